"""Stage 2 as a story: open the store, build the model, resume or begin, then step after step.

No encoder is imported here, nor by anything that this imports. All that is random is keyed by (seed, step) or by
(seed, epoch, record), so a run that was stopped goes on bit for bit.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import __version__
from ..datasets.disk.hashing import sha256_of
from ..datasets.loader import Batch, BatchLoader
from ..datasets.recipe import flatten
from .config import TrainRecipe
from .metrics.device import Gauges, Work, peak_flops
from .metrics.wandb_run import check_wandb
from .metrics.window import Meters, StepReport, Window
from .optim.build import learning_rate
from .parallel.deepspeed_config import read_config
from .parallel.deepspeed_engine import with_users_config
from .parallel.ranks import SharedStop, connected, read_ranks
from .parallel.stop import StopRequest
from .parallel.watchdog import Meeting
from .run.autotune import tune
from .run.lock import held
from .run.manifest import open_store, read_head
from .run.resume import averages_are_due, begin_or_resume, capture, prepare
from .run.saver import Saver
from .step.train_step import train_step


def print_warning(message: str) -> None:
    """Say on stderr what went otherwise than planned."""
    print(f"leandit: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Outcome:
    """How a call of ``train`` ended.

    Args:
      step: that the run has reached.
      first_step: that this call made, or None where the run was finished already.
      finished: all steps of the recipe are done.
      recipe: as it was used, with the values of a ds_config.json.
      num_images: seen by this call.
      losses: of the reports of this call, first and last, or None.
    """

    step: int
    first_step: int | None
    finished: bool
    num_images: int
    losses: tuple[float, float] | None
    images_per_second: float
    recipe: TrainRecipe


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
    ranks = read_ranks()
    with connected(ranks, device), Meeting(ranks, warn) as meeting, contextlib.ExitStack() as locks:
        return _train(recipe, store_path, run, device, report, stop, warn, meeting, locks)


def _train(
    recipe: TrainRecipe,
    store_path: Path | str,
    run: Path,
    device: torch.device,
    report: Callable[[StepReport], None],
    stop: StopRequest,
    warn: Callable[[str], None],
    meeting: Meeting,
    locks: contextlib.ExitStack,
) -> Outcome:
    # Open the revision that the run reads, build what trains.
    head, ranks = read_head(run), meeting.ranks
    store = open_store(recipe, store_path, run, head, warn)
    check_wandb(recipe)
    recipe = with_users_config(recipe, ranks, device, warn)
    facts = {
        "release": __version__,
        "revision": store.revision,
        "root hash": store.root_hash,
        "torch": torch.__version__,
    }
    if path := recipe.parallel.deepspeed_config:
        facts["ds_config.json"] = sha256_of(read_config(path))
    meeting.agree(facts | flatten(recipe.model_dump()))
    state = prepare(recipe, store, device, warn, ranks)
    stop.check()
    if ranks.is_first:
        locks.enter_context(held(run))
    begin_or_resume(state, run, head, warn, meeting)
    first_step, seen_before, told = state.step + 1, state.num_images, list[StepReport]()
    if state.step >= recipe.run.steps:
        return Outcome(state.step, None, True, 0, None, 0.0, recipe)

    tune(state, meeting)
    meters = Meters(run, step=state.step, recipe=recipe) if ranks.is_first else None
    stop.check()
    work = Work(state.spec, store.spec.latent, peak_flops(device, recipe.run.precision) * ranks.world_size)
    window = Window(meeting, [store], work, Gauges(device), may_skip=state.engine.loss_scale is not None)
    saver, shared_stop = Saver(run, recipe.run), SharedStop(ranks)
    batches = endless(state.loader)
    stopping = False

    def tell(epoch: int) -> None:
        rate = state.engine.scheduled_rate
        if rate is None:
            rate = learning_rate(recipe.peak_lr, recipe.schedule, state.step, recipe.run.steps)
        scale = state.engine.loss_scale.value() if state.engine.loss_scale else None
        figures = window.report(
            step=state.step, num_images=state.num_images, epoch=epoch, learning_rate=rate, scale=scale
        )
        told.append(figures)
        if meters:
            meters.write(figures)
            report(figures)

    try:
        while state.step < recipe.run.steps and not stopping:
            # One batch of one bucket.
            with window.waiting():
                batch = next(batches)

            # Forward, backward, update, average.
            with window.step(batch):
                trace = train_step(state, batch)
            window.add(trace)
            stop.hold()  # the first step compiles, which is not worth waiting for; from here on each one is kept

            # Tell; before a checkpoint always, since a loss that is not finite must not be saved.
            due = state.step % recipe.run.checkpoint_every == 0 or state.step == recipe.run.steps
            averages_due = averages_are_due(state)
            if due or averages_due or state.step % recipe.run.log_every == 0:
                tell(batch.epoch)

            # Save. The stop is looked at once a step and here, so that no run ends without having saved.
            stopping = shared_stop.asked(bool(stop))
            if stopping and not window.is_empty:
                tell(batch.epoch)
            if stopping or due or averages_due:
                saver.begin(capture(state, averages=averages_due, resumable=stopping or due))
            saver.check()
        saver.finish()
    finally:
        saver.close()
        stop.release()
        if meters:
            meters.close()
    ends = (told[0].loss, told[-1].loss) if told else None
    fastest = max((figures.images_per_second for figures in told), default=0.0)
    finished = state.step >= recipe.run.steps
    return Outcome(state.step, first_step, finished, state.num_images - seen_before, ends, fastest, recipe)


def endless(loader: BatchLoader) -> Iterator[Batch]:
    """Batches of one epoch after the other."""
    while True:
        yield from loader
