"""``leandit bench train``: what a step of a recipe costs on your store, your disk and your GPU.

The loop of ``leandit train`` runs for some steps in a temporary folder. Its own reports say how long a step took, how
much of it was waiting for data, and what was used of the device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from ...train import loop
from ...train.metrics.history import StepReport
from ...train.parallel.stop import StopRequest
from ..plan.workload import TrainingWorkload
from ..terminal.outcome import computed_precision
from ..terminal.progress import ProgressLine

REPORT_EVERY = 10  # steps: as the default of run.log_every, so that waits for figures cost what they cost in a run

FIGURES: dict[str, tuple[Callable[[list[float]], float], str, str, str, str]] = {
    "images_per_second": (mean, "images_per_second", "rate", "{:.2f}", " images/s"),
    "step_seconds": (mean, "seconds_per_step", "step", "{:.3f}", " s"),
    "data_wait_share": (mean, "data_wait_share", "data wait", "{:.2%}", " of the time"),
    "peak_gib": (max, "memory_gib", "peak memory", "{:.1f}", " GiB"),
    "mfu": (mean, "mfu", "MFU", "{:.1%}", ""),
}
"""For each figure: how a round sums up its reports, their attribute, and the title, form and unit of its line."""


def measure(
    work: TrainingWorkload,
    store: Path | str | None,
    device: torch.device,
    *,
    rounds: int,
    steps: int,
    stop: StopRequest,
    progress: ProgressLine,
) -> dict[str, Any]:
    """Run the loop for ``steps`` steps in each of ``rounds`` runs.

    Args:
      work: the recipe, and what its stores decide.
      store: path or URL; None where the recipe names its stores.
      steps: measured in each round, rounded up to a multiple of ``REPORT_EVERY``; the first ``REPORT_EVERY`` come
        before them and are not counted.
      stop: ends the measurement after a step.
    Returns: JSON values. Lists have one value a round: images_per_second, step_seconds, data_wait_share (0 to 1), mfu
      (0 to 1; None where the peak of the device is unknown), peak_gib.
    Raises: as ``loop.train``; KeyboardInterrupt: it was stopped.
    """
    last = REPORT_EVERY * (1 + -(-steps // REPORT_EVERY))
    changed = {"steps": last, "log_every": REPORT_EVERY, "checkpoint_every": last}
    run = work.recipe.run.model_copy(update=changed | {"evaluate_every": 0, "sample_every": 0, "wandb": ""})
    recipe = work.recipe.model_copy(update={"run": run})
    measured: dict[str, list[Any]] = {name: [] for name in FIGURES}
    for number in range(1, rounds + 1):
        reports: list[StepReport] = []
        how: dict[str, Any] = {"report": reports.append, "stop": stop, "warn": lambda message: None}
        with tempfile.TemporaryDirectory(prefix="leandit-bench-") as folder:
            outcome = loop.train(recipe, store_path=store, run=Path(folder) / "run", device=device, **how)
        if not outcome.finished:
            raise KeyboardInterrupt
        for name, (summarize, attribute, *_) in FIGURES.items():
            values = [value for report in reports[1:] if (value := getattr(report, attribute)) is not None]
            measured[name].append(summarize(values) if values else None)
        progress("train", number, rounds, f"{measured['images_per_second'][-1]:.2f} images/s")
    return {
        "model": work.spec.name,
        "buckets": len(work.buckets),
        "largest_bucket": work.largest_bucket,
        "access": list(work.access),
        "batch": recipe.run.global_batch,
        "precision": computed_precision(recipe.run.precision, device),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads",
        "torch": torch.__version__,
        **measured,
    }


def render(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each line: medians over the rounds, with their range."""
    rows = [
        ("model", f"{result['model']}, {result['buckets']} buckets, largest {result['largest_bucket']} px"),
        ("batch", f"{result['batch']} images, {result['precision']}, {result['device']}, torch {result['torch']}"),
    ]
    rows += [("access", line) for line in result["access"]]
    for name, (_, _, title, form, unit) in FIGURES.items():
        if None not in (values := result[name]):
            low, middle, high = (form.format(value) for value in (min(values), median(values), max(values)))
            rows.append((title, (f"{middle} ({low} to {high})" if len(values) > 1 else middle) + unit))
    return rows
