"""What ``bench train`` is asked for, our step, and how steps are timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....datasets.errors import RecipeError
from ....train import loop
from ....train.config import TrainRecipe
from ....train.optim.loss_scale import autocast_dtype
from ....train.run.model_for_store import model_spec
from ...plan.workload import TrainingWorkload
from ...synthetic.batches import synthetic_batch, synthetic_learner
from ..harness.meters import hardware

WARM_STEPS = 3  # not counted: compile, fill caches, allocate
LOSS_EVERY = 10  # steps after which our loop reads its loss, as run.log_every
Step = Callable[[], None]


@dataclass(frozen=True)
class StepRequest:
    """What to measure.

    Args:
      steps: of each cell in each round.
      data: "synthetic", or "store" for the real loop on a store.
      store: to train on; None makes one of noise.
      without: sections of the recipe; the step without each is measured beside it.
      fast_dit: checkout of fast-DiT, whose loop is then measured beside ours instead of that around diffusers' model.
      as_on_gpu: with the precision and the compiled blocks of a GPU on any device, to count their work.
    """

    work: TrainingWorkload
    device: torch.device
    rounds: int
    steps: int
    data: str
    store: str | None = None
    without: tuple[str, ...] = ()
    fast_dit: Path | None = None
    as_on_gpu: bool = False

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of matrix products; None: float32."""
        precision = self.work.recipe.run.precision
        if self.as_on_gpu:
            return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        return autocast_dtype(precision, self.device)

    @property
    def is_compiled(self) -> bool:
        """Whether our blocks are."""
        return self.work.recipe.run.compile and (self.as_on_gpu or self.device.type == "cuda")


def without_section(request: StepRequest, name: str) -> StepRequest:
    """The same without a section of the recipe.

    Raises: RecipeError: there is no such section, or the recipe does not set it.
    """
    work, default = request.work, TrainRecipe()
    if getattr(work.recipe, name, None) == getattr(default, name, None):
        raise RecipeError(f"--without '{name}': the recipe has no section [{name}] of its own.")
    recipe = work.recipe.model_copy(update={name: getattr(default, name)})
    spec = model_spec(recipe, work.store, "the same store")
    return replace(request, work=replace(work, recipe=recipe, spec=spec))


def our_step(request: StepRequest) -> Step:
    """One step of our loop on noise; the loss is read every ``LOSS_EVERY`` steps, as in the loop."""
    work, device = request.work, request.device
    how: dict[str, Any] = {"store": work.store, "compiled": request.is_compiled, "onednn": not request.as_on_gpu}
    learner = synthetic_learner(work.recipe, work.spec, work.tokens, device, **how)
    learner.autocast_dtype = request.autocast
    size = work.recipe.run.global_batch
    batch = synthetic_batch(work.store, work.largest_bucket, size, work.tokens, device)
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(loop.train_step(learner, batch).loss)
        if len(losses) == LOSS_EVERY:
            torch.stack(losses).mean().item()
            losses.clear()

    return step


def device_name(device: torch.device) -> str:
    """The model of a GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else hardware()["cpu"]


def timed(step: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds of ``count`` steps, including the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
