"""Open a run, at its newest checkpoint or at step 0, and tell what it begins from, what trains, and how it computes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...datasets.disk.hashing import sha256_of
from ...datasets.store import LatentStore
from ...errors import RecipeError, RunError
from ...recipe import flatten
from ..config import TrainRecipe
from ..metrics.flops import meta_model, shortened
from ..metrics.writer import check_wandb
from ..models.build import family_of, patch_of
from ..models.diffusers.adapters import trained_parameters
from ..optim.ema import build_rules, first_share
from ..parallel.deepspeed_config import read_config
from ..parallel.deepspeed_engine import apply_ds_config
from ..parallel.ranks import Ranks, agree, choose_strategy, from_first
from ..weights.checkpoint import YOUNG
from ..weights.folders import CHECKPOINT, find
from .checkpoints import start_or_resume
from .evaluation.grids import own_subjects
from .evaluation.held_out import Evaluation
from .manifest import RunManifest, describe_access, open_stores, read_run_manifest, run_lock, store_read
from .settings import OPTION, check_continued, check_settings, read_stored_recipe
from .state import Run

LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def open_run(
    recipe: TrainRecipe,
    store_path: Path | str | None,
    folder: Path,
    device: torch.device,
    ranks: Ranks,
    warn: Callable[[str], None],
    continued: Sequence[str] = (),
) -> Iterator[tuple[Run, Evaluation | None]]:
    """A run and the evaluation of its held-out records, if it has some; locked against other writers within the block.

    Everything that can be refused is refused before anything is written.

    Args:
      store_path: of the store, or its URL; None if the recipe names its stores.
      folder: of the run; a missing or empty one begins a new run.
      ranks: of this process, connected.
      warn: called with one line for whatever the run goes on without.
      continued: recipe keys that may have other values than before (``--continue-with``).
    Raises: LeanditError: recipe, stores and run are incompatible, or another process trains the run.
    """
    check_continued(continued)
    manifest = from_first(ranks, lambda: read_run_manifest(folder))
    has_checkpoint = from_first(ranks, lambda: bool(find(CHECKPOINT, folder)))
    stores = open_stores(recipe, store_path, folder, manifest, warn)
    check_wandb(recipe)
    requested = recipe
    recipe = apply_ds_config(requested, ranks, device, warn)
    agree(ranks, inputs_of(recipe, stores))
    _check_ds_config(requested, recipe, continued)
    changed = _check_recipe(recipe, folder, manifest, warn, continued, has_checkpoint=has_checkpoint)
    run = Run.open(
        recipe,
        stores,
        device,
        warn,
        ranks,
        statistics=manifest.statistics if manifest else None,
        learned=manifest.spec if manifest and has_checkpoint else None,
    )
    run.changed = changed
    run.reads = [
        store_read(folder, store, section.store, recipe.run.remote_folder)
        for section, store in zip(recipe.store_sections(store_path), stores, strict=True)
    ]
    own_subjects(run)  # raises if a store does not have them
    evaluation = Evaluation(run, warn) if recipe.data.holdout and recipe.run.evaluate_every else None
    _log_settings(run)
    with run_lock(folder) if ranks.is_first else contextlib.nullcontext():
        start_or_resume(run, folder, warn)
        yield run, evaluation


def _check_ds_config(requested: TrainRecipe, recipe: TrainRecipe, continued: Sequence[str]) -> None:
    """Raise RecipeError if a ds_config.json replaces the value of a key that ``--continue-with`` names.

    Args:
      requested, recipe: before and after the settings of the ds_config.json.
    """
    before = flatten(requested.model_dump())
    now = flatten(recipe.model_dump())
    for key in continued:
        if before.get(key) != now.get(key):
            raise RecipeError(
                f"{OPTION} {key}: the ds_config.json '{recipe.parallel.deepspeed_config}' sets it to "
                f"{now.get(key)!r}. Change it there, and pass {OPTION} {key}={now.get(key)} to go on with it."
            )


def _check_recipe(
    recipe: TrainRecipe,
    folder: Path,
    manifest: RunManifest | None,
    warn: Callable[[str], None],
    continued: Sequence[str],
    *,
    has_checkpoint: bool,
) -> dict[str, tuple[Any, Any]]:
    """Compare the recipe with that of the run, and warn of keys without effect.

    Returns: as ``check_settings``.
    Raises: RunError: they differ, or there is no checkpoint to continue with other settings.
    """
    if continued and not has_checkpoint:
        raise RunError(
            f"run '{folder}': {OPTION} {continued[0]} goes on from a checkpoint, and there is none. Use --set for a "
            "new run."
        )
    if manifest is None:
        return {}
    stored = read_stored_recipe(manifest.recipe)
    if stored.notice:
        warn(f"run '{folder}': {stored.notice}")
    changed = check_settings(folder, stored, recipe, continued)
    source = recipe.model.init_from
    if has_checkpoint and not recipe.lora.rank and source not in ("", stored.values["model"].get("init_from")):
        warn(f"model.init_from '{source}' is not read: run '{folder}' resumes, and its checkpoint holds all weights")
    return changed


def inputs_of(recipe: TrainRecipe, stores: Sequence[LatentStore]) -> dict[str, object]:
    """What all ranks must agree on."""
    inputs: dict[str, object] = {"release": __version__, "torch": torch.__version__}
    for number, store in enumerate(stores, 1):
        which = f" of store {number}" if len(stores) > 1 else ""
        inputs |= {f"revision{which}": store.revision, f"root hash{which}": store.root_hash}
    if path := recipe.parallel.deepspeed_config:
        inputs["ds_config.json"] = sha256_of(read_config(path))
    return inputs | flatten(recipe.model_dump())


def origin_lines(run: Run, folder: Path) -> Iterator[str]:
    """Lines for the log: how the run begins and reads its stores, what trains, what takes longer than the run."""
    recipe, spec, steps = run.recipe, run.spec, run.recipe.run.steps
    if run.step:
        settings = ", ".join(f"{key} {after!r} (was {before!r})" for key, (before, after) in run.changed.items())
        beginning = f"resumes after step {run.step}{f', with {settings}' if settings else ''}"
    else:
        beginning = f"starts from {', '.join([run.origin, *_positions(run)])}"
    yield f"run '{folder}' {'; '.join([beginning, *describe_access(run.stores)])}"
    model = meta_model(spec)
    total = shortened(sum(parameter.numel() for parameter in model.parameters()))
    if adapter := spec.adapter:
        trained = shortened(sum(parameter.numel() for parameter in trained_parameters(model).values()))
        scale = f"rank {adapter.rank}, alpha {adapter.alpha:g}"
        frozen = run.frozen.source if run.frozen else recipe.model.init_from
        yield f"{spec.name}: adapters of {scale} train, {trained} of {total} parameters; '{frozen}' is frozen"
    else:
        yield f"{spec.name}: training all {total} parameters"
    if (warmup := recipe.schedule.warmup_steps) >= steps:
        yield (
            f"schedule.warmup_steps {warmup}: the learning rate still rises when the run ends at step {steps}, so its "
            "loss may look flat. For a short test use --set schedule.warmup_steps=0"
        )
    if (share := first_share(build_rules(recipe)[0], steps)) > YOUNG:
        yield (
            f"run.ema_decay {recipe.run.ema_decay:g}: the average is longer than the run, at its end {share:.0%} of it "
            "is still the initial weights, and so are snapshots and images. For a short run use --set ema.warmup=true"
        )


def _positions(run: Run) -> Iterator[str]:
    """The span of a DiT's positions, where it is that of other images than those of the store."""
    spec = run.spec
    stored = max(store.spec.images.resolution_px // store.spec.latent.downscale for store in run.stores)
    if not family_of(spec.name) and spec.base_size != stored:
        learned, new = spec.base_size // patch_of(spec), stored // patch_of(spec)
        yield f"positions over {learned} tokens a side as it has learned, not {new}"


def _log_settings(run: Run) -> None:
    """Log what computes a step, as far as the recipe leaves it open."""
    recipe, ranks, device = run.recipe, run.ranks, run.device
    strategy = choose_strategy(recipe.parallel, ranks)
    LOG.info("rank %d of %d on %s, parallel.strategy %s", ranks.rank, ranks.world_size, device, strategy)
    asked = f"run.precision {recipe.run.precision}, run.compile {recipe.run.compile}"
    how = "compiled blocks" if run.compiled else "nothing compiled"
    LOG.info("computes in %s, %s (%s)", run.autocast_dtype or "float32", how, asked)
    LOG.info("run.microbatch %d (0: open), run.prefetch %d batches", recipe.run.microbatch, recipe.run.prefetch)
