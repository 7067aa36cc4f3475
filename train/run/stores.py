"""Open the stores of a run at the revisions that it reads, and check that they are still the same stores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ... import __version__
from ...datasets.batches.stream import content_hash
from ...datasets.disk.hashing import sha256_of
from ...datasets.errors import RecipeError, RunError
from ...datasets.recipe import flatten
from ...datasets.revisions.catalog import planned_revisions, read_manifest, sealed_revisions, unsealed
from ...datasets.revisions.local import read_local
from ...datasets.revisions.plan import read_spec
from ...datasets.store import LatentStore
from ..config import TrainRecipe
from ..data_recipe import StoreSection
from ..parallel.deepspeed_config import read_config
from .manifest import RevisionRead, RunManifest

LOG = logging.getLogger(__name__)


def open_stores(
    recipe: TrainRecipe, path: Path | str | None, run: Path, manifest: RunManifest | None, warn: Callable[[str], None]
) -> list[LatentStore]:
    """Open the stores that the recipe names, else the one at ``path``.

    Of each the revision of the recipe, else that of the run, else the newest.

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
    urls = {section.store for section in sections if "://" in section.store}
    if recipe.run.remote_folder and len(urls) > 1:
        raise RecipeError(
            f"run.remote_folder '{recipe.run.remote_folder}': it is of one store, the recipe names {len(urls)} at a "
            "URL. Leave it empty: then each has a folder below ~/.cache/leandit."
        )
    may_move = not recipe.data.turns
    opened: dict[tuple[str, int], LatentStore] = {}  # a store that the recipe names twice is opened once
    stores = []
    for number, section in enumerate(sections):
        revisions = known[number].revisions if known else []
        asked = _revision(section, run, revisions, may_move=may_move)
        if (section.store, asked) not in opened:
            opened[section.store, asked] = LatentStore(
                section.store,
                revision=asked,
                allow_incomplete=recipe.run.allow_incomplete,
                remote={"capacity_gib": recipe.run.remote_gib, "folder": recipe.run.remote_folder or None},
            )
            if not section.revision and opened[section.store, asked].newest_revision > asked > 0:
                _warn_of_newer(opened[section.store, asked], run, warn, may_move=may_move)
        stores.append(opened[section.store, asked])
        why = "as the run has read it" if revisions else "named" if asked else "the newest"
        LOG.info("store '%s': revision %d, %s; %d records", section.store, stores[-1].revision, why, len(stores[-1]))
        if revisions:
            _check_store(run, revisions, stores[-1])
    return stores


def _revision(section: StoreSection, run: Path, known: Sequence[RevisionRead], *, may_move: bool) -> int:
    """The revision to open, 0 for the newest.

    Raises: RunError: the run cannot be moved there, or its own is gone.
    """
    if not known:
        return section.revision
    path, pinned, asked = section.store, known[-1].revision, section.revision or known[-1].revision
    sealed = [] if "://" in path else sealed_revisions(Path(path))  # a URL raises when it is opened
    if may_move and not section.revision and sealed and pinned not in sealed:
        lost = f"{unsealed(pinned)} " if pinned in planned_revisions(Path(path)) else ""
        raise RunError(
            f"run '{run}': it reads revision {pinned} of store '{path}', which has only "
            f"{', '.join(map(str, sealed))} now. {lost}Move it with --set run.revision={sealed[-1]}."
        )
    if not may_move and asked != pinned:
        raise RunError(
            f"run '{run}': it reads revision {pinned} of store '{path}', not {asked}. A run whose recipe names its "
            f"stores stays at their revisions. Start a new run with model.init_from={run}."
        )
    return asked


def _warn_of_newer(store: LatentStore, run: Path, warn: Callable[[str], None], *, may_move: bool) -> None:
    newest, reads = store.newest_revision, f"this run reads {store.revision}"
    if may_move:
        warn(f"store has revision {newest}, {reads}; move it with --set run.revision={newest}")
    else:
        warn(f"store '{store.path}' has revision {newest}, {reads}; a new run with model.init_from={run} can read it")


def _check_store(run: Path, known: list[RevisionRead], store: LatentStore) -> None:
    """Check that known revisions are unchanged, and that a new one has the encoders and classes of the model.

    Raises: RunError.
    """
    pinned = known[-1]
    same = [entry for entry in known if entry.revision == store.revision]
    hashes = [(store.revision, same[-1].root_hash, store.root_hash)] if same else []
    if pinned.revision != store.revision and pinned.revision in sealed_revisions(store.path) and pinned.root_hash:
        hashes.append((pinned.revision, pinned.root_hash, read_manifest(store.path, pinned.revision).root_hash))
        before, now = read_spec(store.path, pinned.revision), store.spec
        classes = before.classes or []
        texts = {encoder.name for encoder in before.text_encoders}
        encoders = [
            (spec.vae.weights_sha256, [t.encoder.weights_sha256 for t in spec.text_encoders if t.name in texts])
            for spec in (before, now)
        ]
        if (now.classes or [])[: len(classes)] != classes or encoders[0] != encoders[1]:
            what = "other encoders" if encoders[0] != encoders[1] else "other class names"
            raise RunError(
                f"run '{run}': revision {store.revision} of store '{store.path}' was made with {what} than revision "
                f"{pinned.revision}, which the model has learned. Start a new run."
            )
    for revision, expected, actual in hashes:
        if expected is not None and expected != actual:  # None: it was incomplete, and has been finished since
            raise RunError(
                f"run '{run}': started with another store: root_hash of revision {revision} was {expected!r}, "
                f"is {actual!r}. Use another --run, or the store that it was started with."
            )


def contents_read(manifest: RunManifest, stores: Sequence[LatentStore]) -> set[str]:
    """Content hashes of the revisions that a run has read of its only store, as in the states of its loader."""
    if len(stores) > 1:
        return set()  # they stay at their revisions
    store, hashes = stores[0], set[str]()
    sealed = sealed_revisions(store.path)
    for entry in manifest.stores[0].revisions:
        if entry.revision == store.revision:
            hashes.add(content_hash(entry.root_hash, store.plan_hash))
        elif entry.root_hash or entry.revision in sealed:  # otherwise it is still incomplete
            local = read_local(store.path, entry.revision)
            plan_hash = "" if entry.root_hash or not local else local.plan
            hashes.add(content_hash(entry.root_hash, plan_hash))
    return hashes


def inputs_of(recipe: TrainRecipe, stores: Sequence[LatentStore]) -> dict[str, object]:
    """What all ranks must agree on."""
    inputs: dict[str, object] = {"release": __version__, "torch": torch.__version__}
    for number, store in enumerate(stores, 1):
        which = f" of store {number}" if len(stores) > 1 else ""
        inputs |= {f"revision{which}": store.revision, f"root hash{which}": store.root_hash}
    if path := recipe.parallel.deepspeed_config:
        inputs["ds_config.json"] = sha256_of(read_config(path))
    return inputs | flatten(recipe.model_dump())
