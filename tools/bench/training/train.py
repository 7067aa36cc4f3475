"""``leandit bench train``: our training step compared with usual ones, and our real loop with its bare step.

On the same noise, with the same objective, precision and batch: our step, and diffusers' class of the same model in the
usual loop (``usual.py``). Or fast-DiT's own loop; or our step without a section of the recipe. They alternate in one
process.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from ....datasets.errors import RecipeError
from ....train import loop
from ....train.config import TrainRecipe
from ....train.metrics.device import peak_flops
from ....train.metrics.flops import latent_size_of, train_flops
from ....train.metrics.window import StepReport
from ....train.optim.loss_scale import autocast_dtype
from ....train.parallel.engine import TorchEngine
from ....train.parallel.stop import StopRequest
from ....train.step import train_step as step_module
from ...plan.workload import TrainingWorkload
from ...synthetic.store import make_store
from ...terminal.cpu_memory import keep_freed_memory
from ...terminal.progress import ProgressLine
from ..harness.meters import hardware
from ..harness.rounds import alternating_rounds, median_and_range, ratios
from .fast_dit import fast_dit_step
from .steps import (
    LOSS_EVERY,
    WARM_STEPS,
    Step,
    StepRequest,
    device_name,
    our_step,
    timed,
    without_section,
)
from .usual import is_of_diffusers, usual_step

OURS, DIFFUSERS, FAST_DIT = "leandit", "diffusers", "fast-DiT"


def run(request: StepRequest, progress: ProgressLine) -> dict[str, Any]:
    """Measure all cells in alternating rounds.

    Raises: RecipeError: unknown data.
    """
    if request.data not in ("synthetic", "store"):
        raise RecipeError(f"--data '{request.data}': needed synthetic or store.")
    work, device = request.work, request.device
    recipe, spec = work.recipe, work.spec
    if device.type == "cpu":
        keep_freed_memory()  # as the command 'train' does
    loops: list[LoopFigures] = []
    rates = _on_store(request, progress, loops) if request.data == "store" else _beside(request, progress)
    size = latent_size_of(work.largest_bucket, work.store.latent)
    flops = train_flops(spec, size, work.tokens)
    precision = (
        recipe.run.precision if autocast_dtype(recipe.run.precision, device) or device.type == "cuda" else "fp32"
    )
    peak = peak_flops(device, recipe.run.precision)
    return {
        "model": spec.name,
        "bucket": work.largest_bucket,
        "batch": recipe.run.global_batch,
        "precision": precision,
        "device": device_name(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "hardware": hardware(),
        "flops_per_image": flops,
        "images_per_second": rates,
        "mfu": {cell: median(values) * flops / peak for cell, values in rates.items()} if peak else {},
        "outside_share": [one.outside for one in loops] if device.type == "cpu" else [],
        "data_wait_share": [one.data_wait for one in loops],
        "peak_gib": max((one.peak_gib for one in loops), default=None),
    }


def render(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each line: medians and ranges over the rounds; a ratio is of rates of the same round."""
    rates: dict[str, list[float]] = result["images_per_second"]
    first = next(iter(rates))
    rows = [
        ("machine", f"{result['device']}, torch {result['torch']}, {result['threads']} threads"),
        ("model", f"{result['model']}, {result['bucket']} px, batch {result['batch']}, {result['precision']}"),
    ]
    for cell, values in rates.items():
        mfu = f", MFU {result['mfu'][cell]:.1%}" if cell in result["mfu"] else ""
        rows.append(("", f"{cell:<16}  {median_and_range(values, '{:.2f}')} images/s{mfu}"))
    for cell in [cell for cell in rates if cell != first]:
        spread = median_and_range(ratios(rates[first], rates[cell]), "{:.3f}x")
        rows.append(("", f"{first} of {cell}: {spread}"))
    if shares := result["outside_share"]:
        rows.append(("", f"outside forward, backward, update: {median_and_range(shares, '{:.2%}')}"))
    if waits := result["data_wait_share"]:
        rows.append(("", f"waits for data: {median_and_range(waits, '{:.2%}')}, peak {result['peak_gib']:.1f} GiB"))
    return rows


# ---------------------------------------------------------------------------------------------- against the usual ones


def _beside(request: StepRequest, progress: ProgressLine) -> dict[str, list[float]]:
    """Images a second of each cell in each round."""
    cells: dict[str, Step] = {OURS: our_step(request)}
    for name in request.without:
        cells[f"without {name}"] = our_step(without_section(request, name))
    if request.fast_dit:
        cells[FAST_DIT] = fast_dit_step(request)
    elif not request.without and is_of_diffusers(request.work.spec):
        cells[DIFFUSERS] = usual_step(request)
    rates: dict[str, list[float]] = {cell: [] for cell in cells}
    for step in cells.values():
        timed(step, WARM_STEPS, request.device)
    for number, cell in alternating_rounds(list(cells), request.rounds):
        seconds = timed(cells[cell], request.steps, request.device)
        rates[cell].append(request.steps * request.work.recipe.run.global_batch / seconds)
        progress("train", number + 1, request.rounds, f"{cell}: {rates[cell][-1]:.2f} images/s")
    return rates


# --------------------------------------------------------------------------------------------- the real loop on a store


class LoopFigures(NamedTuple):
    """What a run did after its first report.

    Args:
      seconds: of a step.
      outside: share of the time outside forward, backward and update. On a GPU, work is only launched there, so it
        means nothing.
      data_wait: share of the time spent waiting for batches.
      peak_gib: of the GPU; on a CPU, of the process.
    """

    seconds: float
    outside: float
    data_wait: float
    peak_gib: float


def _on_store(request: StepRequest, progress: ProgressLine, loops: list[LoopFigures]) -> dict[str, list[float]]:
    """Images a second of the real loop on a store and of its step on one batch; appends the figures of the loops."""
    work, size = request.work, request.work.recipe.run.global_batch
    rates: dict[str, list[float]] = {"store": [], "synthetic": []}
    with tempfile.TemporaryDirectory(prefix="leandit-bench-") as scratch:
        names_stores = bool(work.recipe.data.turns)
        path = request.store if names_stores or request.store else noise_store(work, Path(scratch) / "store")
        step = our_step(request)
        timed(step, WARM_STEPS, request.device)
        for number in range(request.rounds):
            run_folder = Path(scratch) / f"run-{number}"
            loops.append(real_loop(work.recipe, path, run_folder, request.device, request.steps))
            rates["store"].append(size / loops[-1].seconds)
            rates["synthetic"].append(request.steps * size / timed(step, request.steps, request.device))
            progress("train", number + 1, request.rounds, f"{rates['store'][-1]:.2f} images/s on the store")
    return rates


def real_loop(
    recipe: TrainRecipe, store: Path | str | None, run_folder: Path, device: torch.device, steps: int
) -> LoopFigures:
    """Run ``leandit train`` for some steps.

    Args:
      steps: least number of measured steps, rounded up to whole report intervals.
    """
    steps = LOSS_EVERY * -(-steps // LOSS_EVERY)
    last = LOSS_EVERY + steps  # steps before the first report are not counted
    changed = {"steps": last, "log_every": LOSS_EVERY, "checkpoint_every": last}
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update=changed)})
    marks: list[tuple[float, float, StepReport]] = []
    with ComputeTimer() as timer:
        loop.train(
            recipe,
            store_path=store,
            run=run_folder,
            device=device,
            report=lambda figures: marks.append((time.perf_counter(), timer.seconds, figures)),
            stop=StopRequest(),
            warn=lambda message: None,
        )
    (start, within_before, _), (end, within_after, _) = marks[0], marks[-1]
    reports = [report for *_, report in marks[1:]]
    return LoopFigures(
        seconds=(end - start) / steps,
        outside=1 - (within_after - within_before) / (end - start),
        data_wait=mean(report.data_wait_share for report in reports),
        peak_gib=max(report.memory_gib for report in reports),
    )


def noise_store(work: TrainingWorkload, path: Path) -> Path:
    """A store of noise for a workload: four batches of its largest bucket."""
    make_store(
        path,
        {work.largest_bucket: 4 * work.recipe.run.global_batch},
        channels=work.spec.channels,
        num_classes=work.spec.num_classes,
        token_counts=[work.tokens] * 8 if work.tokens else (),
        text_width=0 if work.spec.texts else work.spec.caption_width or 1,
        texts={one.name: one.spec for one in work.store.texts},
        downscale=work.store.latent.downscale,
        resolution_px=work.store.images.resolution_px,
    )
    return path


class ComputeTimer:
    """Sums the seconds that this thread spends in forward and loss, in backward, and in update.

    Update is clipping, optimizer and averages. Data, draws, conditioning, metrics and checkpoints are outside.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ComputeTimer:
        owners: list[tuple[Any, str]] = [
            (step_module, "image_losses"),
            (TorchEngine, "backward"),
            (TorchEngine, "update"),
        ]
        for owner, name in owners:
            self._stack.enter_context(self._counted(owner, name))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def _counted(self, owner: Any, name: str) -> Iterator[None]:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(owner, name, timed)
        try:
            yield
        finally:
            setattr(owner, name, original)
