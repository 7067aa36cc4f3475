"""Open a run: its stores at its revisions, its model and data, at its newest checkpoint or at step 0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..config import TrainRecipe
from ..metrics.writer import check_wandb
from ..parallel.deepspeed_engine import apply_ds_config
from ..parallel.ranks import Ranks, agree
from .evaluation.held_out import Evaluation
from .manifest import read_run_manifest, run_lock
from .notes import log_settings
from .resume import start_or_resume
from .state import Run
from .stores import inputs_of, open_stores


@contextlib.contextmanager
def open_run(
    recipe: TrainRecipe,
    store_path: Path | str | None,
    folder: Path,
    device: torch.device,
    ranks: Ranks,
    warn: Callable[[str], None],
) -> Iterator[tuple[Run, Evaluation | None]]:
    """A run and the evaluation of its held-out records, if it has some; locked against other writers within the block.

    Everything that can be refused is refused before anything is written.

    Args:
      store_path: of the store, or its URL; None if the recipe names its stores.
      folder: of the run; a missing or empty one begins a new run.
      ranks: of this process, connected.
      warn: called with one line for whatever the run goes on without.
    Raises: LeanditError: recipe, stores and run are incompatible, or another process trains the run.
    """
    manifest = read_run_manifest(folder)
    stores = open_stores(recipe, store_path, folder, manifest, warn)
    check_wandb(recipe)
    recipe = apply_ds_config(recipe, ranks, device, warn)
    agree(ranks, inputs_of(recipe, stores))
    run = Run.open(recipe, stores, device, warn, ranks, manifest and manifest.statistics)
    evaluation = Evaluation(run, warn) if recipe.data.holdout and recipe.run.evaluate_every else None
    log_settings(run)
    with run_lock(folder) if ranks.is_first else contextlib.nullcontext():
        start_or_resume(run, folder, manifest, warn)
        yield run, evaluation
