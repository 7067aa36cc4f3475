"""The manifest of a run, ``run.json``: what it was begun with, and which revisions of its store it has read.

A run goes on only with what it was begun with; what differs is named. Its revision stays the same while the store
grows, until the recipe moves it to another.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...datasets.batches.stream import content_hash
from ...datasets.disk.files import TEMPORARY_PREFIX
from ...datasets.disk.hashing import read_json
from ...datasets.errors import DamageError, RunError
from ...datasets.recipe import flatten
from ...datasets.revisions.catalog import read_spec, sealed_revisions
from ...datasets.revisions.commits import read_manifest
from ...datasets.store import LatentStore
from ..config import TrainRecipe

RUN = "run.json"
# Keys of the recipe that may differ when a run goes on: they change how far and how often, not what a step computes.
# The revision changes what is read; it has rules of its own.
FREE_ON_RESUME = {
    "run.steps",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.keep_every",
    "run.async_checkpoint",
    "run.log_every",
    "run.wandb",
    "run.prefetch",
    "run.remote_gib",
    "run.remote_folder",
    "run.revision",
    "run.allow_incomplete",
    "run.compile",
    "run.activation_checkpointing",
    "run.precision",
    "run.residual",
    "run.microbatch",
    "parallel.strategy",
    "parallel.shard",
    "parallel.replicas",
    "parallel.cpu_offload",
    "parallel.deepspeed_config",
    "ema.keep_every",
}


class RevisionRead(BaseModel):
    """A revision of the store that the run reads from a step on; the root hash is None where it was incomplete."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    revision: Annotated[int, Field(ge=1)]
    root_hash: str | None
    from_step: Annotated[int, Field(ge=0)]


class RunManifest(BaseModel):
    """What ``run.json`` holds.

    Args:
      store: path of the store, relative to the run.
      revisions: read so far, in order; the last is the current one.
      spec: of the model.
      recipe: of the last call.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str
    revisions: Annotated[list[RevisionRead], Field(min_length=1)]
    spec: dict[str, Any]
    recipe: dict[str, Any]


def read_run_manifest(run: Path) -> RunManifest | None:
    """Read the manifest of a run; None where there is no run yet.

    Raises: RunError: the folder holds something else; DamageError.
    """
    if (run / RUN).is_file():
        try:
            return RunManifest.model_validate(read_json(run / RUN))
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            raise DamageError(
                f"run '{run}': '{RUN}' is not valid, '{place}': {problem['msg']}. Restore it, or give another --run."
            ) from error
    if run.exists() and any(not path.name.startswith(TEMPORARY_PREFIX) for path in run.iterdir()):
        raise RunError(f"run '{run}': the folder is not empty and no run of leandit. Give another --run.")
    return None


def open_store(
    recipe: TrainRecipe, path: Path | str, run: Path, manifest: RunManifest | None, warn: Callable[[str], None]
) -> LatentStore:
    """Open the revision that the recipe asks for, else the one that the run reads, else the newest.

    Args:
      path: of the store, or its URL.
    Raises: StoreError; RunError: the store is another one, or no longer has the revision.
    """
    pinned = manifest and manifest.revisions[-1]
    sealed = [] if "://" in str(path) else sealed_revisions(Path(path))  # of a URL, opening it tells
    if pinned and not recipe.run.revision and sealed and pinned.revision not in sealed:
        raise RunError(
            f"run '{run}': it reads revision {pinned.revision} of store '{path}', which has only "
            f"{', '.join(map(str, sealed))} now. Move it with --set run.revision={sealed[-1]}."
        )
    asked = recipe.run.revision or (pinned.revision if pinned else 0)
    store = LatentStore(
        path,
        revision=asked,
        allow_incomplete=recipe.run.allow_incomplete,
        remote={"capacity_gib": recipe.run.remote_gib, "folder": recipe.run.remote_folder or None},
    )
    if manifest:
        _check_store(run, manifest.revisions, store)
    if not recipe.run.revision and store.newest_revision > store.revision:
        newest = store.newest_revision
        warn(f"store has revision {newest}, this run reads {store.revision}; move it with --set run.revision={newest}")
    return store


def _check_store(run: Path, known: list[RevisionRead], store: LatentStore) -> None:
    """A revision that the run knows must be the same still; another must be of the same store, and fit the model.

    Raises: RunError.
    """
    pinned = known[-1]
    same = [entry for entry in known if entry.revision == store.revision]
    hashes = [(store.revision, same[-1].root_hash, store.root_hash)] if same else []
    if pinned.revision != store.revision and pinned.revision in sealed_revisions(store.path) and pinned.root_hash:
        hashes.append((pinned.revision, pinned.root_hash, read_manifest(store.path, pinned.revision).root_hash))
        before, now = read_spec(store.path, pinned.revision), store.spec
        classes = before.classes or []
        encoders = [
            (spec.vae.weights_sha256, spec.text_encoder and spec.text_encoder.weights_sha256) for spec in (before, now)
        ]
        if (now.classes or [])[: len(classes)] != classes or encoders[0] != encoders[1]:
            what = "other encoders" if encoders[0] != encoders[1] else "other class names"
            raise RunError(
                f"run '{run}': revision {store.revision} of store '{store.path}' was made with {what} than revision "
                f"{pinned.revision}, which the model has learned. Start a new run."
            )
    for revision, was, found in hashes:
        if was is not None and was != found:  # None: it was incomplete, and has been finished since
            raise RunError(
                f"run '{run}': begun with another store: root_hash of revision {revision} was {was!r}, is {found!r}. "
                "Give another --run, or the store that it was begun with."
            )


def contents_read(revisions: list[RevisionRead], store: LatentStore) -> set[str]:
    """What stands in the loader's states for the revisions that a run has read."""
    sealed = sealed_revisions(store.path)
    found = set()
    for entry in revisions:
        if entry.revision == store.revision:
            found.add(content_hash(entry.root_hash, store.plan_hash))
        elif entry.root_hash or entry.revision in sealed:  # else it was incomplete, and is so still
            plan_hash = "" if entry.root_hash else read_manifest(store.path, entry.revision).plan
            found.add(content_hash(entry.root_hash, plan_hash))
    return found


def revisions_read(manifest: RunManifest | None, store: LatentStore, step: int) -> list[RevisionRead]:
    """The revisions up to a step from which the run goes on, and the one that is open now as the last."""
    here = RevisionRead(revision=store.revision, root_hash=store.root_hash, from_step=step)
    lived = [entry for entry in manifest.revisions if entry.from_step <= step] if manifest else []
    if lived and (lived[-1].revision, lived[-1].root_hash) == (here.revision, here.root_hash):
        return lived
    return [*lived, here]


def check_settings(run: Path, manifest: RunManifest, recipe: TrainRecipe, spec: dict[str, Any]) -> None:
    """Refuse to go on with a run that computes something else, naming the fields.

    Raises: RunError.
    """
    # A key that is newer than the run has its default, with which all is computed as before.
    there = flatten({"recipe": TrainRecipe().model_dump()}) | flatten(
        {"spec": manifest.spec, "recipe": manifest.recipe}
    )
    here = flatten({"spec": spec, "recipe": recipe.model_dump()})
    free = FREE_ON_RESUME
    if "cosine" in (there.get("recipe.schedule.kind"), recipe.schedule.kind):
        free = FREE_ON_RESUME - {"run.steps"}  # the cosine ends at the last step
    differing = [
        key
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key) and key.removeprefix("recipe.") not in free
    ]
    if differing:
        fields = "".join(f"\n  {key} was {there.get(key)!r}, is {here.get(key)!r}" for key in differing)
        raise RunError(
            f"run '{run}': begun with other settings. Give another --run, or go on with the settings in its "
            f"recipe.toml. What differs:{fields}"
        )


def continue_manifest(
    run: Path, recipe: TrainRecipe, spec: dict[str, Any], store: LatentStore, manifest: RunManifest | None, step: int
) -> RunManifest:
    """The manifest with which a run goes on from a step."""
    return RunManifest(
        store=os.path.relpath(store.path, run),
        revisions=revisions_read(manifest, store, step),
        spec=spec,
        recipe=recipe.model_dump(),
    )
