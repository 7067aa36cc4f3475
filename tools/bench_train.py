"""``leandit bench train``: our training step beside the usual ones, and our real loop beside its bare step.

Beside our step run, on the same noise with the same objective, precision and batch: diffusers'
``DiTTransformer2DModel`` and a plain DiT (``plain_dit.py``), each in the loop that is usual (DiT, SiT and others):
eager modules, AdamW as torch constructs it, averages parameter by parameter in Python, the loss read at every step. All
take turns in one process.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ..datasets.errors import RecipeError
from ..train import loop
from ..train import step as step_module
from ..train.config import TrainRecipe
from ..train.dit import size_of
from ..train.flops import latent_size_of, train_flops
from ..train.gauges import peak_flops
from ..train.models import ModelSpec
from ..train.objectives import draw_times, loss_per_image
from ..train.parallel import TorchEngine
from ..train.precision import autocast_dtype
from ..train.stop import StopRequest
from ..train.synthetic import synthetic_batch, synthetic_learner
from .bench_meters import hardware
from .cpu_memory import keep_freed_memory
from .planner import Work
from .progress import ProgressLine
from .synthetic import make_store

OURS, DIFFUSERS, PLAIN = "leandit", "diffusers", "plain"
WARM_STEPS = 3  # of a cell, not counted: what is compiled, cached or allocated at first
LOSS_EVERY = 10  # steps after which our loop reads its loss, as run.log_every
GOAL, OUTSIDE_GOAL, STORE_GOAL = 1.15, 0.02, 0.995
Step = Callable[[], None]


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Args:
      steps: of each cell in each round.
      data: "synthetic", or "store" for the real loop on a store.
      store: to train on; None makes one of noise.
    """

    work: Work
    device: torch.device
    rounds: int
    steps: int
    data: str
    store: str | None = None


def run(request: Request, progress: ProgressLine) -> dict[str, Any]:
    """Measure, the cells in turn.

    Raises: RecipeError: unknown data.
    """
    if request.data not in ("synthetic", "store"):
        raise RecipeError(f"--data '{request.data}': needed synthetic or store.")
    work, device = request.work, request.device
    recipe, spec = work.recipe, work.spec
    if device.type == "cpu":
        keep_freed_memory()  # as the command 'train' does
    rates, outside = _on_store(request, progress) if request.data == "store" else (_beside(request, progress), [])
    size = latent_size_of(work.largest_bucket, work.store.latent)
    flops = train_flops(spec, size, work.tokens)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else hardware()["cpu"]
    precision = (
        recipe.run.precision if autocast_dtype(recipe.run.precision, device) or device.type == "cuda" else "fp32"
    )
    peak = peak_flops(device, recipe.run.precision)
    return {
        "model": spec.name,
        "bucket": work.largest_bucket,
        "batch": recipe.run.global_batch,
        "precision": precision,
        "device": name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "hardware": hardware(),
        "flops_per_image": flops,
        "images_per_second": rates,
        "mfu": {cell: median(found) * flops / peak for cell, found in rates.items()} if peak else {},
        "outside_share": outside,
    }


def render(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each line: medians of all rounds, least and most; ratios of figures of one round."""
    rates: dict[str, list[float]] = result["images_per_second"]
    first = next(iter(rates))
    rows = [
        ("machine", f"{result['device']}, torch {result['torch']}, {result['threads']} threads"),
        ("model", f"{result['model']}, {result['bucket']} px, batch {result['batch']}, {result['precision']}"),
    ]
    for cell, found in rates.items():
        spread = f"({min(found):.2f} to {max(found):.2f})"
        mfu = f", MFU {result['mfu'][cell]:.1%}" if cell in result["mfu"] else ""
        rows.append(("", f"{cell:<16}{median(found):>9.2f} images/s {spread}{mfu}"))
    for cell, found in rates.items():
        if cell != first:
            ratios = [one / other for one, other in zip(rates[first], found, strict=True)]
            spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
            goal = STORE_GOAL if cell == "synthetic" else GOAL
            rows.append(("", f"{first} of {cell}: {median(ratios):.3f}x {spread}, goal {goal}"))
    if shares := result["outside_share"]:
        spread = f"({min(shares):.2%} to {max(shares):.2%})"
        rows.append(("", f"outside forward, backward, update: {median(shares):.2%} {spread}, goal {OUTSIDE_GOAL:.0%}"))
    return rows


# ------------------------------------------------------------------------------------------------ beside the usual ones


def _beside(request: Request, progress: ProgressLine) -> dict[str, list[float]]:
    """Images a second of each cell in each round."""
    spec = request.work.spec
    cells: dict[str, Step] = {OURS: our_step(request)}
    if not spec.takes_text:
        cells |= {DIFFUSERS: usual_step(request, diffusers_dit(spec)), PLAIN: usual_step(request, plain_dit(spec))}
    rates: dict[str, list[float]] = {cell: [] for cell in cells}
    for step in cells.values():
        timed(step, WARM_STEPS, request.device)
    for number in range(request.rounds):
        for cell in cells if number % 2 == 0 else reversed(cells):
            seconds = timed(cells[cell], request.steps, request.device)
            rates[cell].append(request.steps * request.work.recipe.run.global_batch / seconds)
            progress("train", number + 1, request.rounds, f"{cell}: {rates[cell][-1]:.2f} images/s")
    return rates


def our_step(request: Request) -> Step:
    """One step of our loop on noise; the loss is read as seldom as the loop does."""
    work, device = request.work, request.device
    compiled = work.recipe.run.compile and device.type == "cuda"
    learner = synthetic_learner(work.recipe, work.spec, work.tokens, device, compiled=compiled)
    size = work.recipe.run.global_batch
    batch = synthetic_batch(work.store, work.largest_bucket, size, work.tokens, device)
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(loop.train_step(learner, batch).loss)
        if len(losses) == LOSS_EVERY:
            torch.stack(losses).mean().item()
            losses.clear()

    return step


def usual_step(request: Request, model: nn.Module) -> Step:
    """One step as the usual loops have it, with our objective, on the same kind of batch."""
    work, device, recipe = request.work, request.device, request.work.recipe
    model = model.to(device).train()
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    section = recipe.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=section.lr, weight_decay=section.weight_decay)
    batch = synthetic_batch(work.store, work.largest_bucket, recipe.run.global_batch, 0, device)
    dtype, size = autocast_dtype(recipe.run.precision, device), recipe.run.global_batch
    microbatch = recipe.run.microbatch or size
    generator = torch.Generator(device).manual_seed(0)

    def step() -> None:
        optimizer.zero_grad()
        for start in range(0, size, microbatch):
            x = batch.latents[start : start + microbatch]
            noise = torch.randn(x.shape, device=device)
            t = draw_times(recipe.objective, len(x), generator)
            dropped = torch.rand(len(x), device=device) < recipe.conditioning.drop
            y = torch.where(dropped, work.spec.num_classes, batch.labels[start : start + microbatch])

            def predict(noisy: Tensor, time: Tensor, y: Tensor = y) -> Tensor:
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    return model(noisy, time, y)

            loss = loss_per_image(recipe.objective, predict, x, noise, t).sum() / size
            loss.backward()
            loss.item()
        if recipe.run.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.run.grad_clip)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                averages[name].mul_(recipe.run.ema_decay).add_(parameter, alpha=1 - recipe.run.ema_decay)

    return step


def plain_dit(spec: ModelSpec) -> nn.Module:
    """The plain DiT of a model's size."""
    from .plain_dit import PlainDiT

    depth, width, heads, patch = size_of(spec.name)
    return PlainDiT(
        depth=depth,
        width=width,
        heads=heads,
        patch=patch,
        channels=spec.channels,
        out_channels=spec.out_channels,
        num_classes=spec.num_classes,
        side=spec.base_size,
    )


class DiffusersDiT(nn.Module):
    """diffusers' class behind the call of the others; it drops labels itself, which is turned off."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

        depth, width, heads, patch = size_of(spec.name)
        self.net = DiTTransformer2DModel(
            num_layers=depth,
            num_attention_heads=heads,
            attention_head_dim=width // heads,
            in_channels=spec.channels,
            out_channels=spec.out_channels,
            sample_size=spec.base_size,
            patch_size=patch,
            num_embeds_ada_norm=spec.num_classes,
        )
        for module in self.net.modules():
            if hasattr(module, "dropout_prob"):
                setattr(module, "dropout_prob", 0.0)  # noqa: B010 (a type checker takes it for a tensor)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return self.net(x, timestep=t, class_labels=y, return_dict=False)[0]


def diffusers_dit(spec: ModelSpec) -> nn.Module:
    """diffusers' DiT of a model's size."""
    return DiffusersDiT(spec)


def timed(step: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds of some steps, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


# --------------------------------------------------------------------------------------------- the real loop on a store


def _on_store(request: Request, progress: ProgressLine) -> tuple[dict[str, list[float]], list[float]]:
    """Images a second of the real loop on a store, and of its step on one batch of noise; time outside, on a CPU."""
    work, size = request.work, request.work.recipe.run.global_batch
    rates: dict[str, list[float]] = {"store": [], "synthetic": []}
    outside = []
    with tempfile.TemporaryDirectory(prefix="leandit-bench-") as scratch:
        path = request.store or _noise_store(request, Path(scratch) / "store")
        step = our_step(request)
        timed(step, WARM_STEPS, request.device)
        for number in range(request.rounds):
            run_folder = Path(scratch) / f"run-{number}"
            seconds, share = real_loop(work.recipe, path, run_folder, request.device, request.steps)
            rates["store"].append(size / seconds)
            outside.append(share)
            rates["synthetic"].append(request.steps * size / timed(step, request.steps, request.device))
            progress("train", number + 1, request.rounds, f"{rates['store'][-1]:.2f} images/s on the store")
    return rates, outside if request.device.type == "cpu" else []


def real_loop(
    recipe: TrainRecipe, store: Path | str, run_folder: Path, device: torch.device, steps: int
) -> tuple[float, float]:
    """Seconds of a step of ``leandit train``, and the share of it outside forward, backward and update.

    On a GPU work is only started here, so there the share says nothing.

    Args:
      steps: to be measured, at least; whole intervals of reports.
    """
    steps = LOSS_EVERY * -(-steps // LOSS_EVERY)
    last = LOSS_EVERY + steps  # what comes before the first report is not counted
    changed = {"steps": last, "log_every": LOSS_EVERY, "checkpoint_every": last}
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update=changed)})
    marks: list[tuple[float, float]] = []
    with Inside() as inside:
        loop.train(
            recipe,
            store_path=store,
            run=run_folder,
            device=device,
            report=lambda figures: marks.append((time.perf_counter(), inside.seconds)),
            stop=StopRequest(),
            warn=lambda message: None,
        )
    (start, within_before), (end, within_after) = marks[0], marks[-1]
    return (end - start) / steps, 1 - (within_after - within_before) / (end - start)


def _noise_store(request: Request, path: Path) -> Path:
    work = request.work
    make_store(
        path,
        {work.largest_bucket: 4 * work.recipe.run.global_batch},
        channels=work.spec.channels,
        num_classes=work.spec.num_classes,
        token_counts=[work.tokens] * 8 if work.tokens else (),
        text_width=work.spec.caption_width or 1,
    )
    return path


class Inside:
    """Sums the time that this thread spends in the forward with its loss, in the backward, and in the update.

    The update is clipping, optimizer and averages. Data, draws, conditioning, figures and checkpoints are outside.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Inside:
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
