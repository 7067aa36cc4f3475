"""Stage 2 as a story: open the run, where it was or at step 0, then step after step until the last.

No encoder is imported, directly or indirectly. Everything random is keyed by (seed, step) or by (seed, epoch, record),
so a run that was stopped resumes: bit for bit on a CPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ResourceError
from .config import TrainRecipe
from .metrics.history import StepReport
from .metrics.meter import Meter, peak_flops
from .optim.process import collected_by_hand, set_allocator
from .parallel.ranks import SharedStop, connected, read_ranks
from .parallel.stop import StopRequest
from .run.checkpoints import Saver, due
from .run.data import endless
from .run.evaluation.decoding import Decoding
from .run.evaluation.held_out import Evaluation
from .run.evaluation.log import Log
from .run.opening import open_run, origin_lines
from .run.state import Run
from .step import fit_microbatch, train_step
from .weights.folders import SAMPLES


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
      num_images: images trained on in this call.
      losses: step and loss of the first and the last report of this call, or None.
      images_per_second: the highest of all reports.
      recipe: as used, with the values of a ds_config.json.
      num_nonfinite: updates of the run that were skipped because the loss or the gradient was not finite.
    """

    step: int
    first_step: int | None
    finished: bool
    num_images: int
    losses: tuple[tuple[int, float], tuple[int, float]] | None
    images_per_second: float
    recipe: TrainRecipe
    num_nonfinite: int = 0


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
    continue_with: Sequence[str] = (),
) -> Outcome:
    """Train a model on one store or several; the same call again resumes from the newest valid checkpoint.

    Args:
      store_path: folder or URL of the store; None if the recipe names its stores.
      report: called with the figures of every ``run.log_every`` steps.
      stop: set it to save a checkpoint after the current step and return.
      warn: called with one line for a damaged checkpoint, a newer revision of a store than the run reads, or records
        that are not used.
      say: called by the first rank with a line for each thing that the run starts from.
      recipe_name: of the recipe, for ``starts.jsonl``.
      continue_with: keys of the recipe that may have other values than the run has had so far, as ``run/settings.py``
        lists them; the run goes on from its newest checkpoint.
    Raises: LeanditError: before the first step, if recipe, stores and run are incompatible.
    """
    set_allocator(device)
    ranks = read_ranks()
    with connected(ranks, device):  # what is trained is gone when the ranks part: see ``connected``
        opened = open_run(recipe, store_path, run, device, ranks, warn, continue_with)
        return _train(opened, run, report, stop, warn, say, recipe_name)


def _train(
    opened: contextlib.AbstractContextManager[tuple[Run, Evaluation | None]],
    folder: Path,
    report: Callable[[StepReport], None],
    stop: StopRequest,
    warn: Callable[[str], None],
    say: Callable[[str], None],
    recipe_name: str,
) -> Outcome:
    """``train``, with connected ranks."""
    with opened as (run, evaluation):
        recipe, device, ranks = run.recipe, run.device, run.ranks
        if run.step >= recipe.run.steps:
            if ranks.is_first:  # grids of a run that was killed at its end
                Decoding(folder / SAMPLES, warn).decoded(wait=True)
            return Outcome(run.step, None, True, 0, None, 0.0, recipe, run.num_nonfinite)
        for line in origin_lines(run, folder) if ranks.is_first else ():
            say(line)
        peak, latent = peak_flops(device, recipe.run.precision) * ranks.world_size, run.stores[0].spec.latent
        scale = run.engine.loss_scale
        meter = Meter(
            ranks,
            device,
            run.stores,
            run.spec,
            latent,
            peak_flops=peak,
            scale=scale,
            most_skipped=recipe.run.skip_nonfinite,
            num_skipped=run.num_nonfinite,
            warn=warn,
        )
        log = Log(run, folder, meter, evaluation, report, warn, recipe_name)
        first_step, images_before = run.step + 1, run.num_images
        stop.check()
        try:
            _make_steps(run, meter, log, Saver(run, folder), stop)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"device '{device}': out of memory in step {run.step + 1}. Use a smaller run.microbatch, "
                "run.activation_checkpointing or parallel.strategy 'fsdp'; 'leandit plan train' shows what fits."
            ) from error
        return Outcome(
            step=run.step,
            first_step=first_step,
            finished=run.step >= recipe.run.steps,
            num_images=run.num_images - images_before,
            losses=log.losses,
            images_per_second=log.images_per_second,
            recipe=recipe,
            num_nonfinite=run.num_nonfinite,
        )


def _make_steps(run: Run, meter: Meter, log: Log, saver: Saver, stop: StopRequest) -> None:
    """Train until the recipe's last step or a stop request."""
    section, shared_stop, batches = run.recipe.run, SharedStop(run.ranks), endless(run.loader)
    stopping = False
    try:
        with collected_by_hand() as after_step:
            while run.step < section.steps and not stopping:
                batch = meter.next(batches)
                fit_microbatch(run, batch)
                meter.add(batch, train_step(run, batch))
                stop.hold()  # the first step compiles and may be lost; from now on a stop keeps the step
                # A report is read while the device makes the next step. Before a checkpoint it is read at once,
                # because a loss that is not finite must not be saved.
                at_once = bool(due(run.recipe, run.step)) or log.shows(run.step)
                log.write(meter.flush(due=at_once or run.step % section.log_every == 0, at_once=at_once))
                # The only place that looks at the stop request, so that no run stops without saving.
                if stopping := shared_stop.is_due(bool(stop)):
                    log.write(meter.flush(due=True, at_once=True))
                run.num_nonfinite = meter.num_skipped
                saver.save_due(stopping=stopping)
                after_step()
        shared_stop.finish()
        saver.finish()
        log.finish()
    except BaseException:
        with contextlib.suppress(Exception):
            log.write(meter.last())
        raise
    finally:
        saver.close()
        log.close()
        stop.release()
