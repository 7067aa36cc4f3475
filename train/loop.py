"""Stage 2 as a story: open the store, build the model, resume or begin, then step after step.

No encoder is imported here, nor by anything that this imports. All that is random is keyed by (seed, step) or by
(seed, epoch, record), so a run that was stopped goes on bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..datasets.loader import Batch, BatchLoader
from ..datasets.shuffle import keyed_hash
from .config import TrainRecipe
from .head import open_store, read_head
from .meters import Meters, StepReport, Window
from .objectives import draw_times, loss_per_image
from .optimizers import learning_rate
from .state import TrainState, averages_are_due, begin_or_resume, check_recipe, prepare, save, save_averages
from .stop import StopRequest


def print_warning(message: str) -> None:
    """Say on stderr what went otherwise than planned."""
    print(f"leandit: {message}", file=sys.stderr)


@dataclass(frozen=True)
class Outcome:
    """How a call of ``train`` ended.

    Args:
      step: that the run has reached.
      first_step: that this call made, or None where the run was finished already.
      finished: all steps of the recipe are done.
      num_images: seen by this call.
      losses: of the reports of this call, first and last, or None.
    """

    step: int
    first_step: int | None
    finished: bool
    num_images: int
    losses: tuple[float, float] | None
    images_per_second: float


def train(
    recipe: TrainRecipe,
    *,
    store_path: Path | str,
    run: Path,
    device: torch.device,
    report: Callable[[StepReport], None],
    stop: StopRequest,
    warn: Callable[[str], None] = print_warning,
) -> Outcome:
    """Train a model on a store; the same call again goes on from the newest valid checkpoint.

    Args:
      store_path: of the store, or its URL.
      report: called with the figures of every ``run.log_every`` steps.
      stop: set it to save a checkpoint after the current step and return.
      warn: called with one line where a checkpoint is damaged, the store has a newer revision than the run reads, or
        not all of its records train.
    Raises: LeanditError: before the first step, where recipe, store and run do not fit each other.
    """
    # Open the revision that the run reads, build what trains.
    check_recipe(recipe)
    head = read_head(run)
    state = prepare(recipe, open_store(recipe, store_path, run, head, warn), device, warn)
    stop.check()
    begin_or_resume(state, run, head, warn)
    first_step, seen_before, told = state.step + 1, state.num_images, list[StepReport]()
    if state.step >= recipe.run.steps:
        return Outcome(state.step, None, True, 0, None, 0.0)

    meters = Meters(run, step=state.step)
    stop.check()
    window = Window()
    batches = endless(state.loader)
    stopping = bool(stop)

    def tell(epoch: int) -> None:
        rate = state.optimizer.param_groups[0]["lr"]
        told.append(window.report(step=state.step, num_images=state.num_images, epoch=epoch, learning_rate=rate))
        meters.write(told[-1])
        report(told[-1])

    try:
        while state.step < recipe.run.steps and not stopping:
            # One batch of one bucket.
            with window.waiting():
                batch = next(batches)

            # Forward, backward, update, average.
            loss, grad_norm = train_step(state, batch)
            window.add(loss, grad_norm, len(batch))
            stop.hold()  # the first step compiles, which is not worth waiting for; from here on each one is kept

            # Tell; before a checkpoint always, since a loss that is not finite must not be saved.
            due = state.step % recipe.run.checkpoint_every == 0 or state.step == recipe.run.steps
            averages_due = averages_are_due(state)
            if due or averages_due or state.step % recipe.run.log_every == 0:
                tell(batch.epoch)

            # Save. The stop is looked at once a step and here, so that no run ends without having saved.
            stopping = bool(stop)
            if stopping and not window.is_empty:
                tell(batch.epoch)
            if averages_due:
                save_averages(state, run)
            if stopping or due:
                save(state, run)
    finally:
        stop.release()
        meters.close()
    ends = (told[0].loss, told[-1].loss) if told else None
    fastest = max((figures.images_per_second for figures in told), default=0.0)
    finished = state.step >= recipe.run.steps
    return Outcome(state.step, first_step, finished, state.num_images - seen_before, ends, fastest)


def endless(loader: BatchLoader) -> Iterator[Batch]:
    """Batches of one epoch after the other."""
    while True:
        yield from loader


def train_step(state: TrainState, batch: Batch) -> tuple[Tensor, Tensor]:
    """One update: accumulate the gradients of the microbatches, clip, step, average.

    Returns: mean loss and gradient norm, scalars on the device (read later, so that the step does not wait for them).
    """
    recipe = state.recipe
    step, size = state.step + 1, len(batch)
    generator = torch.Generator(state.device).manual_seed(keyed_hash(recipe.run.seed, step) % 2**63)
    noise = torch.randn(batch.latents.shape, generator=generator, device=state.device)
    times = draw_times(recipe.objective, size, generator)
    dropped = torch.rand(size, generator=generator, device=state.device) < recipe.conditioning.drop
    conditioning = state.conditioner(batch.labels, batch.captions, batch.caption_lengths)
    conditioning = state.conditioner.drop(conditioning, dropped)

    state.model.train()
    state.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=state.device)
    microbatch = recipe.run.microbatch or size
    for start in range(0, size, microbatch):
        part = slice(start, start + microbatch)
        inputs = type(conditioning)(*(None if tensor is None else tensor[part] for tensor in conditioning))
        loss = _microbatch_loss(state, batch.latents[part], noise[part], times[part], inputs) / size
        loss.backward()
        total += loss.detach()

    limit = recipe.run.grad_clip or float("inf")
    grad_norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), limit, foreach=True)
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(recipe.optimizer.lr, recipe.schedule, step, recipe.run.steps)
    state.optimizer.step()
    state.ema.update(state.model, step)
    state.step, state.num_images = step, state.num_images + size
    return total, grad_norm


def _microbatch_loss(state: TrainState, x: Tensor, noise: Tensor, times: Tensor, conditioning: Any) -> Tensor:
    """Summed loss of a microbatch."""

    def predict(noisy: Tensor, t: Tensor) -> Tensor:
        with torch.autocast(state.device.type, state.autocast_dtype, enabled=state.autocast_dtype is not None):
            return state.model(noisy, t, conditioning)

    return loss_per_image(state.recipe.objective, predict, x, noise, times).sum()
