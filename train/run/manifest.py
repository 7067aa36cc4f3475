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
from ...datasets.format.layout import REMOTE_ABOUT
from ...datasets.format.schema import LatentStatistics
from ...datasets.order.alike import store_names
from ...datasets.remote.reader import redact_url
from ...datasets.revisions.catalog import planned_revisions, sealed_revisions, unsealed
from ...datasets.store import LatentStore
from ...errors import DamageError, RecipeError, RunError, StoreError
from ..config import RunSection, TrainRecipe
from ..data_recipe import StoreSection
from ..models.spec import ModelSpec
from ..weights.folders import RUN
from .settings import read_stored_recipe

LOG = logging.getLogger(__name__)


class StoreRead(BaseModel):
    """A store of the run.

    Args:
      path: as the user has named it: a folder, relative to the run, or a URL without user, password and query.
      root_hash: of the revision; None if it was incomplete.
      remote_folder: folder of the local copy, absolute, as ``run.remote_folder`` names it; "": the default one of a
        URL, none of a folder.
      has_secret: the URL has had a user, a password or a query, which a run does not record.
    """

    model_config = ConfigDict(frozen=True)  # keys of a newer release are left out

    path: str
    revision: Annotated[int, Field(ge=1)]
    root_hash: str | None
    remote_folder: str = ""
    has_secret: bool = False

    @property
    def is_url(self) -> bool:
        """Whether the store lies at a URL."""
        return "://" in self.path


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
    recipe: TrainRecipe,
    spec: ModelSpec,
    stores: Sequence[StoreRead],
    statistics: LatentStatistics | None,
) -> RunManifest:
    """The manifest of a run as it is now."""
    return RunManifest(stores=list(stores), spec=spec, recipe=recipe.model_dump(), statistics=statistics)


def store_read(run: Path, store: LatentStore, name: str = "", remote_folder: str = "") -> StoreRead:
    """A store as ``run.json`` records it, so that ``reopen_store`` opens it from any folder.

    Args:
      name: path or URL as the user has typed it; "": that of the store.
      remote_folder: of the recipe.
    """
    named = name or str(store.path)
    path = redact_url(named)
    if "://" not in named:  # from the real run, because a path that goes up from a symbolic link ends elsewhere
        path = os.path.relpath(os.path.abspath(named), os.path.realpath(run))
    return StoreRead(
        path=path,
        revision=store.revision,
        root_hash=store.root_hash,
        remote_folder=os.path.abspath(remote_folder) if remote_folder else "",
        has_secret="://" in named and path != named.rstrip("/"),
    )


def store_place(run: Path, read: StoreRead) -> str:
    """URL or absolute path of a store of a run, for messages and to open it."""
    if read.is_url:
        return read.path
    places = [os.path.normpath(os.path.join(folder(run), read.path)) for folder in (os.path.realpath, os.path.abspath)]
    return next((place for place in places if os.path.isdir(place)), places[0])


def reopen_store(run: Path, manifest: RunManifest, read: StoreRead, *, revision: int = 0) -> LatentStore:
    """Open a store of a run for reading, as the run has opened it: at its URL, or through its local copy.

    Args:
      revision: number of the revision; 0 for the newest complete one.
    Raises: StoreError, DamageError, ResourceError: it cannot be opened.
    """
    place = store_place(run, read)
    if read.has_secret:
        raise StoreError(
            f"store '{place}': it was opened at a URL with a user, a password or a query, which a run does not record. "
            "Copy the store to a folder, and pass that."
        )
    about = Path(place).parent / REMOTE_ABOUT
    folder = read.remote_folder
    if not read.is_url and not folder and about.is_file():  # earlier releases recorded the copy in place of the URL
        place = str(read_json(about)["url"])
        folder = str(about.parent)
    is_copied = bool(folder) and "://" not in place
    recipe = read_stored_recipe(manifest.recipe).values
    return LatentStore(
        f"file://{place}" if is_copied else place,
        revision=revision,
        allow_incomplete=True,
        remote={"capacity_gib": recipe["run"]["remote_gib"], "folder": folder or None},
    )


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
    sections = recipe.store_sections(path)
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
                access=recipe.data.access,
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


def describe_access(stores: Sequence[LatentStore]) -> list[str]:
    """How each store is read, and why: "store 'S2' is mapped (ext4)"."""
    names = store_names(stores)
    lines = [f"store {name} is {store.access}" for name, store in zip(names, stores, strict=True)]
    return list(dict.fromkeys(lines))  # a store that is named twice is listed once


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
