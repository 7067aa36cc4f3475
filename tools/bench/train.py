"""``leandit bench train``: what a step of a recipe costs on your store, your disk and your GPU.

The loop of ``leandit train`` runs for some steps in a temporary folder. Its own reports say how long a step took, how
much of it was waiting for data, and what was used of the device.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from ...datasets.errors import RunError
from ...train import loop
from ...train.config import TrainRecipe
from ...train.metrics.window import StepReport
from ...train.parallel.stop import StopRequest
from ..plan.workload import TrainingWorkload
from ..terminal.progress import ProgressLine

REPORT_EVERY = 10  # steps: as the default of run.log_every, so that waits for figures cost what they cost in a run


def measure(
    work: TrainingWorkload,
    store: Path | str | None,
    device: torch.device,
    *,
    rounds: int,
    steps: int,
    progress: ProgressLine,
) -> dict[str, Any]:
    """Run the loop for ``steps`` steps in each of ``rounds`` runs.

    Args:
      work: the recipe, and what its stores decide.
      store: path or URL; None where the recipe names its stores.
      steps: measured in each round, rounded up to a multiple of ``REPORT_EVERY``; the first ``REPORT_EVERY`` come
        before them and are not counted.
    Returns: JSON values. Lists have one value a round: images_per_second, step_seconds, data_wait_share (0 to 1), mfu
      (0 to 1; None where the peak of the device is unknown), peak_gib.
    Raises: as ``loop.train``; RunError: it was stopped.
    """
    figures: dict[str, list[Any]] = {name: [] for name in ("step_seconds", "data_wait_share", "mfu", "peak_gib")}
    recipe, rates = work.recipe, list[float]()
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="leandit-bench-") as folder:
            reports = _run(recipe, store, Path(folder) / "run", device, steps)
        figures["step_seconds"].append(mean(report.seconds_per_step for report in reports))
        figures["data_wait_share"].append(mean(report.data_wait_share for report in reports))
        shares = [report.mfu for report in reports if report.mfu is not None]
        figures["mfu"].append(mean(shares) if shares else None)
        figures["peak_gib"].append(max(report.memory_gib for report in reports))
        rates.append(mean(report.images_per_second for report in reports))
        progress("train", number + 1, rounds, f"{rates[-1]:.2f} images/s")
    return {
        "model": work.spec.name,
        "buckets": len(work.buckets),
        "largest_bucket": work.largest_bucket,
        "batch": recipe.run.global_batch,
        "precision": recipe.run.precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "images_per_second": rates,
        **figures,
    }


def _run(
    recipe: TrainRecipe, store: Path | str | None, run: Path, device: torch.device, steps: int
) -> list[StepReport]:
    """The reports of a run after its first one."""
    last = REPORT_EVERY * (1 + -(-steps // REPORT_EVERY))
    changed = {"steps": last, "log_every": REPORT_EVERY, "checkpoint_every": last, "evaluate_every": 0}
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update=changed | {"sample_every": 0})})
    reports: list[StepReport] = []
    outcome = loop.train(
        recipe,
        store_path=store,
        run=run,
        device=device,
        report=reports.append,
        stop=StopRequest(),
        warn=lambda message: None,
    )
    if not outcome.finished:
        raise RunError("bench train: stopped before the measured steps were done.")
    return reports[1:]


def render(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each line: medians over the rounds, with their range."""
    rows = [
        ("model", f"{result['model']}, {result['buckets']} buckets, largest {result['largest_bucket']} px"),
        ("batch", f"{result['batch']} images, {result['precision']}, {result['device']}, torch {result['torch']}"),
        ("rate", f"{_spread(result['images_per_second'], '{:.2f}')} images/s"),
        ("step", f"{_spread(result['step_seconds'], '{:.3f}')} s"),
        ("data wait", f"{_spread(result['data_wait_share'], '{:.2%}')} of the time"),
        ("peak memory", f"{_spread(result['peak_gib'], '{:.1f}')} GiB"),
    ]
    if None not in result["mfu"]:
        rows.append(("MFU", _spread(result["mfu"], "{:.1%}")))
    return rows


def _spread(values: list[float], form: str) -> str:
    low, middle, high = (form.format(value) for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})" if len(values) > 1 else middle
