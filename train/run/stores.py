"""Open the stores of a run at the revisions that it reads, and check that they are still the same stores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ... import __version__
from ...datasets.disk.hashing import sha256_of
from ...datasets.errors import RecipeError, RunError
from ...datasets.recipe import flatten
from ...datasets.revisions.catalog import planned_revisions, sealed_revisions, unsealed
from ...datasets.store import LatentStore
from ..config import TrainRecipe
from ..data_recipe import StoreSection
from ..parallel.deepspeed_config import read_config
from .manifest import RunManifest, StoreRead

LOG = logging.getLogger(__name__)


def open_stores(
    recipe: TrainRecipe, path: Path | str | None, run: Path, manifest: RunManifest | None, warn: Callable[[str], None]
) -> list[LatentStore]:
    """Open the stores that the recipe names, else the one at ``path``.

    Of each the revision of the run, which never changes; of a new run that of the recipe, else the newest.

    Args:
      path: of the store, or its URL.
    Raises: RecipeError: no store is named, or two ways; StoreError; RunError: it is another store, or it no longer has
      the revision.
    """
    sections = [turn.section for turn in recipe.turns(path)]
    known = manifest.stores if manifest else []
    if manifest and len(known) != len(sections):
        raise RunError(
            f"run '{run}': it was started with {len(known)} stores, this recipe has {len(sections)}. Use another "
            "--run, or resume with the stores in its recipe.toml."
        )
    named = {section.store for section in sections}
    urls = {store for store in named if "://" in store}
    if recipe.run.remote_folder and len(urls or named) > 1:
        raise RecipeError(
            f"run.remote_folder '{recipe.run.remote_folder}': it is for one store, not {len(urls or named)}"
            f"{' at a URL' if urls else ''}. Leave it empty: then each at a URL gets a folder below ~/.cache/leandit."
        )
    is_copied = bool(recipe.run.remote_folder) and not urls  # a local store, such as on a network file system
    opened: dict[tuple[str, int], LatentStore] = {}  # a store that the recipe names twice is opened once
    stores = []
    for number, section in enumerate(sections):
        read = known[number] if known else None
        asked = _revision(section, run, read)
        if (section.store, asked) not in opened:
            opened[section.store, asked] = LatentStore(
                f"file://{Path(section.store).resolve()}" if is_copied else section.store,
                revision=asked,
                allow_incomplete=recipe.run.allow_incomplete,
                remote={"capacity_gib": recipe.run.remote_gib, "folder": recipe.run.remote_folder or None},
            )
            if not section.revision and (newest := opened[section.store, asked].newest_revision) > asked > 0:
                warn(
                    f"store '{section.store}' has revision {newest}, this run reads {asked}; a new run with "
                    f"model.init_from={run} can read it"
                )
        store = opened[section.store, asked]
        stores.append(store)
        why = "as the run has read it" if read else "named" if asked else "the newest"
        LOG.info("store '%s': revision %d, %s; %d records", section.store, store.revision, why, len(store))
        if read and read.root_hash not in (None, store.root_hash):  # None: it was incomplete when the run began
            raise RunError(
                f"run '{run}': started with another store: root_hash of revision {store.revision} was "
                f"{read.root_hash!r}, is {store.root_hash!r}. Use another --run, or the store that it was started with."
            )
    return stores


def _revision(section: StoreSection, run: Path, read: StoreRead | None) -> int:
    """The revision to open, 0 for the newest.

    Raises: RunError: the run reads another one, or its own is gone.
    """
    if not read:
        return section.revision
    path, pinned, asked = section.store, read.revision, section.revision
    if asked not in (0, pinned):
        raise RunError(
            f"run '{run}': it reads revision {pinned} of store '{path}', not {asked}, and keeps it. Start a new run "
            f"with model.init_from={run}."
        )
    sealed = [] if "://" in path else sealed_revisions(Path(path))  # a URL raises when it is opened
    if sealed and pinned not in sealed:
        lost = f" {unsealed(pinned)}" if pinned in planned_revisions(Path(path)) else ""
        raise RunError(
            f"run '{run}': it reads revision {pinned} of store '{path}', which has only "
            f"{', '.join(map(str, sealed))} now.{lost} Restore it, or start a new run with model.init_from={run}."
        )
    return pinned


def inputs_of(recipe: TrainRecipe, stores: Sequence[LatentStore]) -> dict[str, object]:
    """What all ranks must agree on."""
    inputs: dict[str, object] = {"release": __version__, "torch": torch.__version__}
    for number, store in enumerate(stores, 1):
        which = f" of store {number}" if len(stores) > 1 else ""
        inputs |= {f"revision{which}": store.revision, f"root hash{which}": store.root_hash}
    if path := recipe.parallel.deepspeed_config:
        inputs["ds_config.json"] = sha256_of(read_config(path))
    return inputs | flatten(recipe.model_dump())
