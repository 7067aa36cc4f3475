"""Stage 2 as a story: open the stores, build the model, start or resume the run, then step after step.

No encoder is imported, directly or indirectly. Everything random is keyed by (seed, step) or by (seed, epoch, record),
so a run that was stopped resumes: bit for bit on a CPU.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .. import __version__
from ..datasets.disk.hashing import sha256_of
from ..datasets.loader import Batch, BatchLoader
from ..datasets.recipe import flatten
from ..datasets.store import LatentStore
from .config import TrainRecipe
from .metrics.device import ComputeCounter, Gauges, peak_flops
from .metrics.starts import start_of, write_start
from .metrics.wandb_run import check_wandb
from .metrics.window import StepReport, Window
from .metrics.writer import MetricsWriter, last_step
from .optim.build import learning_rate
from .parallel.deepspeed_config import read_config
from .parallel.deepspeed_engine import apply_ds_config
from .parallel.ranks import SharedStop, agree, all_gather, connected, read_ranks
from .parallel.stop import StopRequest
from .parallel.strategy import choose_strategy
from .run.evaluation.evaluation import Evaluation
from .run.evaluation.pictures import Pictures
from .run.lock import run_lock
from .run.manifest import read_run_manifest
from .run.resume import averages_are_due, capture, start_or_resume
from .run.saver import Saver
from .run.state import TrainState, origin_lines, prepare
from .run.stores import open_stores
from .step.microbatch import fit_microbatch
from .step.process import collected_by_hand, set_allocator
from .step.train_step import train_step

LOG = logging.getLogger(__name__)


def print_warning(message: str) -> None:
    """Print a warning on stderr."""
    print(f"leandit: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Outcome:
    """How a call of ``train`` ended.

    Args:
      step: last step of the run.
      first_step: of this call, or None if the run had finished before.
      finished: all steps of the recipe are done.
      num_images: seen by this call.
      losses: step and loss of the first and the last report of this call, or None.
      images_per_second: the highest of all reports.
      recipe: as used, with the values of a ds_config.json.
    """

    step: int
    first_step: int | None
    finished: bool
    num_images: int
    losses: tuple[tuple[int, float], tuple[int, float]] | None
    images_per_second: float
    recipe: TrainRecipe


def train(
    recipe: TrainRecipe,
    *,
    store_path: Path | str | None = None,
    run: Path,
    device: torch.device,
    report: Callable[[StepReport], None],
    stop: StopRequest,
    warn: Callable[[str], None] = print_warning,
    say: Callable[[str], None] = lambda _: None,
    recipe_name: str = "",
) -> Outcome:
    """Train a model on one store or several; the same call again resumes from the newest valid checkpoint.

    Args:
      store_path: of the store, or its URL; None if the recipe names its stores.
      report: called with the figures of every ``run.log_every`` steps.
      stop: set it to save a checkpoint after the current step and return.
      warn: called with one line for a damaged checkpoint, a newer revision of a store than the run reads, or records
        that do not train.
      say: called with a line for each thing that the run begins from; by the first rank.
      recipe_name: of the recipe, for ``starts.jsonl``.
    Raises: LeanditError: before the first step, if recipe, stores and run are incompatible.
    """
    set_allocator(device)
    ranks = read_ranks()
    with connected(ranks, device), contextlib.ExitStack() as stack:
        manifest = read_run_manifest(run)
        stores = open_stores(recipe, store_path, run, manifest, warn)
        check_wandb(recipe)
        recipe = apply_ds_config(recipe, ranks, device, warn)
        agree(ranks, _inputs(recipe, stores))
        state = prepare(recipe, stores, device, warn, ranks, manifest and manifest.statistics)
        evaluates = recipe.data.holdout and recipe.run.evaluate_every
        evaluation = Evaluation(state, warn) if evaluates else None  # may refuse: nothing has been written
        _log_settings(state)
        stop.check()
        if ranks.is_first:
            stack.enter_context(run_lock(run))
        start_or_resume(state, run, manifest, warn)
        if state.step >= recipe.run.steps:
            return Outcome(state.step, None, True, 0, None, 0.0, recipe)
        for line in origin_lines(state, run) if ranks.is_first else ():
            say(line)
        if ranks.is_first:
            _note_start(state, run, recipe_name)
        return _Training(state, run, evaluation, report, stop, warn).run()


def _log_settings(state: TrainState) -> None:
    """Log what computes a step, as far as the recipe leaves it open."""
    recipe, ranks, device = state.recipe, state.ranks, state.device
    strategy = choose_strategy(recipe.parallel, ranks)
    LOG.info("rank %d of %d on %s, parallel.strategy %s", ranks.rank, ranks.world_size, device, strategy)
    asked = f"run.precision {recipe.run.precision}, run.compile {recipe.run.compile}"
    how = "compiled blocks" if state.compiled else "nothing compiled"
    LOG.info("computes in %s, %s (%s)", state.autocast_dtype or "float32", how, asked)
    LOG.info("run.microbatch %d (0: open), run.prefetch %d batches", recipe.run.microbatch, recipe.run.prefetch)


def _note_start(state: TrainState, run: Path, name: str) -> None:
    """Write when, where and with what this call trains."""
    steps = {"from_step": state.step, "reached_step": last_step(run)}
    write_start(run, start_of(state.recipe, state.device, state.ranks, name=name, release=__version__, **steps))


def _inputs(recipe: TrainRecipe, stores: Sequence[LatentStore]) -> dict[str, object]:
    """What all ranks must agree on."""
    inputs: dict[str, object] = {"release": __version__, "torch": torch.__version__}
    for number, store in enumerate(stores, 1):
        which = f" of store {number}" if len(stores) > 1 else ""
        inputs |= {f"revision{which}": store.revision, f"root hash{which}": store.root_hash}
    if path := recipe.parallel.deepspeed_config:
        inputs["ds_config.json"] = sha256_of(read_config(path))
    return inputs | flatten(recipe.model_dump())


class _Training:
    """The training loop of one ``train`` call, from a state that was started or resumed."""

    def __init__(
        self,
        state: TrainState,
        run: Path,
        evaluation: Evaluation | None,
        report: Callable[[StepReport], None],
        stop: StopRequest,
        warn: Callable[[str], None],
    ) -> None:
        recipe, ranks, device, scale = state.recipe, state.ranks, state.device, state.engine.loss_scale
        self._evaluation = evaluation
        self._pictures = Pictures(state, run, warn) if recipe.run.sample_every else None
        self._state, self._recipe, self._report, self._stop = state, recipe, report, stop
        self._writer = MetricsWriter(run, step=state.step, recipe=recipe) if ranks.is_first else None
        stop.check()
        peak = peak_flops(device, recipe.run.precision) * ranks.world_size
        compute = ComputeCounter(state.spec, state.stores[0].spec.latent, peak)
        self._window = Window(ranks, state.stores, compute, Gauges(device), may_skip=scale is not None)
        self._saver, self._shared_stop = Saver(run, recipe.run), SharedStop(ranks)
        self._reports: list[StepReport] = []

    def run(self) -> Outcome:
        """Train until the recipe's last step or a stop request."""
        state, steps = self._state, self._recipe.run.steps
        first_step, images_before = state.step + 1, state.num_images
        batches, stopping = endless(state.loader), False
        try:
            with collected_by_hand() as after_step:
                while state.step < steps and not stopping:
                    stopping = self._save_if_due(self._make_step(batches))
                    after_step()
            self._saver.finish()
            if self._pictures and state.step >= steps:
                self._pictures.finish(self._writer)
        except BaseException:
            with contextlib.suppress(Exception):
                if self._window.can_end or state.ranks.world_size == 1:  # others may never do what it would wait for
                    self._end_report(alone=True)
            raise
        finally:
            self._saver.close()
            if self._pictures:
                self._pictures.close()
            self._stop.release()
            if self._writer:
                self._writer.close()
        reports = self._reports
        first, last = ((one.step, one.loss) for one in (reports[0], reports[-1])) if reports else (None, None)
        losses = (first, last) if first and last else None
        fastest = max((report.images_per_second for report in reports), default=0.0)
        return Outcome(
            state.step, first_step, state.step >= steps, state.num_images - images_before, losses, fastest, self._recipe
        )

    def _make_step(self, batches: Iterator[Batch]) -> int:
        """Train on one batch of one bucket; returns its epoch."""
        with self._window.waiting():
            batch = next(batches)
        fit_microbatch(self._state, batch)
        with self._window.step(batch):
            result = train_step(self._state, batch)
        self._window.add(result)
        self._stop.hold()  # the first step compiles and may be lost; from now on a stop keeps the step
        return batch.epoch

    def _save_if_due(self, epoch: int) -> bool:
        """Report and save what is due after a step; returns whether the run stops here."""
        state, section, stop = self._state, self._recipe.run, self._stop
        self._end_report()  # of the step before: the device has this one to do meanwhile
        due = state.step % section.checkpoint_every == 0 or state.step == section.steps
        averages_due = averages_are_due(state)
        shows = any(part and part.is_due(state.step) for part in (self._evaluation, self._pictures))
        # Before a checkpoint always, because a loss that is not finite must not be saved.
        if due or averages_due or shows or state.step % section.log_every == 0:
            self._begin_report(epoch)
            if due or averages_due or shows or self._window.ends_at_once:
                self._end_report()
        # The only place that looks at the stop request, so that no run stops without saving.
        stopping = self._shared_stop.is_due(bool(stop))
        if stopping and not self._window.is_empty:
            self._begin_report(epoch)
        if stopping:
            self._end_report()
        if stopping or due or averages_due:
            self._save(averages=averages_due, resumable=stopping or due, interrupted=stopping and not due)
        self._saver.check()
        return stopping

    def _save(self, **how: bool) -> None:
        """Begin to write the state, unless a rank has read damaged rows: then all of them end here."""
        self._state.loader.dataset.finish_checks()
        all_gather(self._state.ranks, "checked")
        self._saver.finish()  # first, so that two states are never in memory
        captured = capture(self._state, **how)
        self._saver.begin(captured)

    def _begin_report(self, epoch: int) -> None:
        state, engine, section = self._state, self._state.engine, self._recipe.run
        rate = engine.scheduled_rate
        if rate is None:
            rate = learning_rate(self._recipe.peak_lr, self._recipe.schedule, state.step, section.steps)
        scale = engine.loss_scale.value() if engine.loss_scale else None  # waits for the device
        self._window.begin_report(
            step=state.step, num_images=state.num_images, epoch=epoch, learning_rate=rate, scale=scale
        )

    def _end_report(self, *, alone: bool = False) -> None:
        """Write the report that has begun, with what is shown after its step; nothing if there is none."""
        figures, evaluation, pictures = self._window.end_report(alone=alone), self._evaluation, self._pictures
        if figures is None:
            return
        if evaluation and evaluation.is_due(figures.step):
            figures = replace(figures, held_out=evaluation.evaluate())
            self._window.reset()  # the time of an evaluation, or of pictures, is not that of steps
        if pictures and pictures.is_due(figures.step):
            pictures.draw()
            self._window.reset()
        self._reports.append(figures)
        if self._writer:
            self._writer.write(figures)
            if self._pictures:
                self._pictures.show(self._writer)
            self._report(figures)


def endless(loader: BatchLoader) -> Iterator[Batch]:
    """Batches of successive epochs, without end."""
    while True:
        yield from loader
