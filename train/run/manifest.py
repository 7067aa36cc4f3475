"""The manifest of a run, ``run.json``: its settings, and the revisions of its store that it has read.

A run resumes only with the settings it was started with. It stays at its revision while the store grows, until the
recipe moves it to another.
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
# Keys that may change when a run resumes: they do not change what a step computes. The revision changes which records
# are read; ``_check_store`` has its rules.
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
    """A revision that the run reads from a step on; the root hash is None if the store was incomplete."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    revision: Annotated[int, Field(ge=1)]
    root_hash: str | None
    from_step: Annotated[int, Field(ge=0)]


class RunManifest(BaseModel):
    """Content of ``run.json``.

    Args:
      store: path of the store, relative to the run.
      revisions: read so far, in order; the last is the current one.
      spec: of the model.
      recipe: of the latest call.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str
    revisions: Annotated[list[RevisionRead], Field(min_length=1)]
    spec: dict[str, Any]
    recipe: dict[str, Any]


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
            raise DamageError(
                f"run '{run}': '{RUN}' is not valid, '{place}': {problem['msg']}. Restore it, or give another --run."
            ) from error
    if run.exists() and any(not path.name.startswith(TEMPORARY_PREFIX) for path in run.iterdir()):
        raise RunError(f"run '{run}': the folder is not empty and not a run of leandit. Give another --run.")
    return None


def open_store(
    recipe: TrainRecipe, path: Path | str, run: Path, manifest: RunManifest | None, warn: Callable[[str], None]
) -> LatentStore:
    """Open the revision of the recipe, else that of the run, else the newest.

    Args:
      path: of the store, or its URL.
    Raises: StoreError; RunError: it is another store, or it no longer has the revision.
    """
    pinned = manifest and manifest.revisions[-1]
    sealed = [] if "://" in str(path) else sealed_revisions(Path(path))  # a URL raises when it is opened
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
        encoders = [
            (spec.vae.weights_sha256, spec.text_encoder and spec.text_encoder.weights_sha256) for spec in (before, now)
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
                f"is {actual!r}. Give another --run, or the store that it was started with."
            )


def contents_read(revisions: list[RevisionRead], store: LatentStore) -> set[str]:
    """Content hashes of the revisions that a run has read, as in the states of its loader."""
    sealed = sealed_revisions(store.path)
    hashes = set()
    for entry in revisions:
        if entry.revision == store.revision:
            hashes.add(content_hash(entry.root_hash, store.plan_hash))
        elif entry.root_hash or entry.revision in sealed:  # otherwise it is still incomplete
            plan_hash = "" if entry.root_hash else read_manifest(store.path, entry.revision).plan
            hashes.add(content_hash(entry.root_hash, plan_hash))
    return hashes


def revisions_read(manifest: RunManifest | None, store: LatentStore, step: int) -> list[RevisionRead]:
    """The revisions read up to the step from which the run resumes, and the open one as the last."""
    current = RevisionRead(revision=store.revision, root_hash=store.root_hash, from_step=step)
    earlier = [entry for entry in manifest.revisions if entry.from_step <= step] if manifest else []
    if earlier and (earlier[-1].revision, earlier[-1].root_hash) == (current.revision, current.root_hash):
        return earlier
    return [*earlier, current]


def check_settings(run: Path, manifest: RunManifest, recipe: TrainRecipe, spec: dict[str, Any]) -> None:
    """Check that a resumed run computes the same.

    Raises: RunError: naming the settings that differ.
    """
    # A key that is newer than the run has its default, which keeps the old behaviour.
    stored = flatten({"recipe": TrainRecipe().model_dump()}) | flatten(
        {"spec": manifest.spec, "recipe": manifest.recipe}
    )
    current = flatten({"spec": spec, "recipe": recipe.model_dump()})
    free = FREE_ON_RESUME
    if "cosine" in (stored.get("recipe.schedule.kind"), recipe.schedule.kind):
        free = FREE_ON_RESUME - {"run.steps"}  # the cosine ends at the last step
    differing = [
        key
        for key in sorted(stored.keys() | current.keys())
        if stored.get(key) != current.get(key) and key.removeprefix("recipe.") not in free
    ]
    if differing:
        fields = "".join(f"\n  {key} was {stored.get(key)!r}, is {current.get(key)!r}" for key in differing)
        raise RunError(
            f"run '{run}': started with other settings. Give another --run, or resume with the settings in its "
            f"recipe.toml. They differ in:{fields}"
        )


def continue_manifest(
    run: Path, recipe: TrainRecipe, spec: dict[str, Any], store: LatentStore, manifest: RunManifest | None, step: int
) -> RunManifest:
    """The manifest of a run that starts or resumes at a step."""
    return RunManifest(
        store=os.path.relpath(store.path, run),
        revisions=revisions_read(manifest, store, step),
        spec=spec,
        recipe=recipe.model_dump(),
    )
