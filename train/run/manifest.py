"""The manifest of a run, ``run.json``: its settings, and the revisions of its stores that it reads. Needs no torch.

A run resumes only with the settings it was started with, and stays at its revisions while the stores grow.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...datasets.disk.files import TEMPORARY_PREFIX
from ...datasets.disk.hashing import read_json
from ...datasets.disk.locks import release_lock, try_lock
from ...datasets.errors import DamageError, RecipeError, RunError
from ...datasets.format.schema import LatentStatistics
from ...datasets.revisions.catalog import planned_revisions, sealed_revisions, unsealed
from ...datasets.store import LatentStore
from ..config import RunSection, TrainRecipe
from ..data_recipe import StoreSection
from ..models.spec import ModelSpec
from ..weights.folders import RUN

LOG = logging.getLogger(__name__)


class StoreRead(BaseModel):
    """A store of the run.

    Args:
      path: relative to the run.
      root_hash: of the revision; None if it was incomplete.
    """

    model_config = ConfigDict(frozen=True)  # keys of a newer release are left out

    path: str
    revision: Annotated[int, Field(ge=1)]
    root_hash: str | None


class RunManifest(BaseModel):
    """Content of ``run.json``.

    Args:
      stores: in the order of the recipe.
      spec: of the model.
      recipe: of the latest call.
      statistics: of the latents as the run began, where it normalises by them.
    """

    model_config = ConfigDict(frozen=True)

    stores: Annotated[list[StoreRead], Field(min_length=1)]
    spec: ModelSpec
    recipe: dict[str, Any]
    statistics: LatentStatistics | None = None


def read_run_manifest(run: Path) -> RunManifest | None:
    """Read the manifest of a run; None for a new run.

    Raises: RunError: the folder holds something else; DamageError.
    """
    if (run / RUN).is_file():
        try:
            return RunManifest.model_validate(read_json(run / RUN))
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            raise DamageError(f"run '{run}': '{RUN}' is not valid, '{place}': {problem['msg']}. Restore it.") from error
    if run.exists() and any(not path.name.startswith(TEMPORARY_PREFIX) for path in run.iterdir()):
        raise RunError(f"run '{run}': the folder is not empty and not a run of leandit. Use another --run.")
    return None


def new_manifest(
    run: Path,
    recipe: TrainRecipe,
    spec: ModelSpec,
    stores: Sequence[LatentStore],
    statistics: LatentStatistics | None,
) -> RunManifest:
    """The manifest of a run as it is now."""
    read = [
        StoreRead(path=os.path.relpath(store.path, run), revision=store.revision, root_hash=store.root_hash)
        for store in stores
    ]
    return RunManifest(stores=read, spec=spec, recipe=recipe.model_dump(), statistics=statistics)


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
    if not urls and not recipe.run.remote_folder and recipe.run.remote_gib != RunSection().remote_gib:
        warn("run.remote_gib has no effect: it needs a store at a URL, or run.remote_folder")
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


@contextlib.contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Lock the run's folder against other writers; the lock always ends with the process.

    File systems that cannot lock folders, as some network ones, are not locked.

    Raises: RunError: another process holds the lock.
    """
    run.mkdir(parents=True, exist_ok=True)
    folder = os.open(run, os.O_RDONLY | os.O_CLOEXEC)
    try:
        is_ours = try_lock(folder)
    except OSError:
        os.close(folder)
        yield
        return
    try:
        if not is_ours:
            raise RunError(
                f"run '{run}': another process is training it. Wait until it ends, stop it, or use another --run."
            )
        yield
    finally:
        release_lock(folder)
