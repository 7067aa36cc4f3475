"""Start or resume a run, and capture its state for a checkpoint. Nothing here takes a step.

A run resumes from its newest valid checkpoint, all of it or not at all; ``manifest.py`` lists the settings that may
change. Checkpoints hold whole tensors under the names of the model, so any strategy resumes any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from ...datasets.disk.files import write_atomic
from ...datasets.disk.hashing import canonical_json
from ...datasets.disk.strays import sweep_strays
from ...datasets.errors import DamageError, RunError
from ...datasets.recipe import to_toml
from ..models.spec import ModelSpec
from ..optim.ema import build_rules, first_share
from ..parallel.ranks import all_gather
from ..weights import checkpoint
from ..weights.checkpoint import (
    AVERAGE,
    CHECKPOINT,
    EMA,
    FIRST_SHARE,
    MODEL,
    NULL_CAPTION,
    OPTIMIZER,
    SNAPSHOT,
    CheckpointDamage,
)
from ..weights.folders import RECIPE, RUN
from ..weights.init_from import FrozenWeights
from .data import buckets_at
from .manifest import RunManifest, check_settings, continue_manifest
from .saver import Captured, Folder, buffers_of, gather
from .state import Run
from .stores import contents_read

LOG = logging.getLogger(__name__)
GROUPS = (MODEL, EMA, OPTIMIZER)
CODES = "/codes"  # suffix of optimizer state in 8 bits


class _Progress(BaseModel, strict=True):
    """The part of a checkpoint's ``state.json`` that resumes a run."""

    spec: ModelSpec
    num_images: Annotated[int, Field(ge=0)]
    loader: dict[str, Any]
    loss_scale: dict[str, Any] | None = None
    microbatches_for: dict[str, Any] = {}
    microbatches: dict[str, int] = {}
    in_codes: bool = False
    frozen: FrozenWeights | None = None


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory, checked against the state but not applied."""

    path: Path
    step: int
    progress: _Progress
    groups: dict[str, dict[str, Tensor]]


def start_or_resume(
    state: Run,
    run: Path,
    manifest: RunManifest | None,
    warn: Callable[[str], None],
) -> None:
    """Load the newest valid checkpoint of the run, or write the manifest of a new run.

    Only the first rank reads and writes; it sends the other ranks what it has read.

    Args:
      manifest: of the run, None for a new one.
      warn: called for each damaged checkpoint; it is renamed, never deleted.
    Raises: RunError: the run has another model or recipe; DamageError: no checkpoint is valid.
    """
    if manifest:
        check_settings(run, manifest, state.recipe, state.spec)
    loaded = _open_run(state, run, manifest, warn) if state.ranks.is_first else None
    announced = loaded and {"step": loaded.step, "progress": loaded.progress.model_dump()}
    announced = all_gather(state.ranks, announced)[0]
    if announced is None:
        LOG.info("run '%s': no checkpoint, so it begins at step 0", run)
        return
    LOG.info("run '%s': the checkpoint of step %d is valid, and the newest", run, announced["step"])
    if loaded is None:  # this is not the first rank
        progress = _Progress.model_validate(announced["progress"])
        loaded = Loaded(run, announced["step"], progress, {group: {} for group in GROUPS})
    restore(state, loaded, earlier=contents_read(manifest, state.stores) if manifest else ())


def _open_run(state: Run, run: Path, manifest: RunManifest | None, warn: Callable[[str], None]) -> Loaded | None:
    run.mkdir(parents=True, exist_ok=True)
    sweep_strays(run)
    loaded = newest_valid(state, run, warn)
    step = loaded.step if loaded else 0
    statistics = state.loader.dataset.reader.statistics
    current = continue_manifest(run, state.recipe, state.spec, state.stores, statistics, manifest, step)
    write_atomic(run / RUN, canonical_json(current.model_dump()))
    write_atomic(run / RECIPE, to_toml(state.recipe).encode())
    return loaded


def newest_valid(state: Run, run: Path, warn: Callable[[str], None]) -> Loaded | None:
    """Load the newest valid checkpoint, and rename newer ones that are damaged.

    Raises: DamageError: the run has had checkpoints and none is valid; RunError: a checkpoint is of another model.
    """
    problems: list[CheckpointDamage] = []
    loaded = None
    for path in reversed(checkpoint.find(CHECKPOINT, run)):
        try:
            loaded = load(state, path)
            break
        except CheckpointDamage as error:
            problems.append(error)
    if loaded is None:
        _check_fresh(run, problems, warn)
        return None
    for problem in problems:
        name, renamed = problem.path.name, checkpoint.set_aside(problem.path).name
        warn(
            f"DAMAGED CHECKPOINT '{name}' of run '{run}': {problem.what}. It was renamed to '{renamed}'; "
            f"the run resumes from '{loaded.path.name}' instead"
        )
    return loaded


def _check_fresh(run: Path, problems: list[CheckpointDamage], warn: Callable[[str], None]) -> None:
    """Raise if the run has lost its checkpoints, so that it never silently starts from scratch."""
    aside = checkpoint.damaged(run)
    if problems or aside:
        what = str(problems[0]) if problems else f"only '{aside[-1].name}' is left, and it is damaged."
        raise DamageError(
            f"run '{run}': no valid checkpoint. {what} Training would start from scratch: restore a checkpoint "
            "from a copy, or give another --run."
        )
    if snapshots := checkpoint.find(SNAPSHOT, run):
        warn(f"run '{run}' starts from scratch: it has '{snapshots[-1].name}' but no checkpoint")


def load(state: Run, path: Path) -> Loaded:
    """Read a checkpoint and check every byte, name, shape and dtype; the state does not change.

    Raises: DamageError; RunError: it is of another model.
    """
    saved = checkpoint.read(path)
    try:
        progress = _Progress.model_validate(saved.state)
    except ValidationError as error:
        problem = error.errors()[0]
        what = f"'{checkpoint.STATE}': '{problem['loc'][0]}' is not valid: {problem['msg']}"
        raise CheckpointDamage(path, what) from error
    if progress.spec != state.spec:
        raise RunError(
            f"checkpoint '{path}': of model {progress.spec.model_dump()}, this run has {state.spec.model_dump()}. Give "
            "another --run."
        )
    _check_frozen(path, progress.frozen, state.frozen)
    in_codes = progress.in_codes
    groups = {group: saved.tensors(group, state.engine.expected(group, in_codes=in_codes)) for group in GROUPS}
    return Loaded(path, saved.state["step"], progress, groups)


def _check_frozen(path: Path, then: FrozenWeights | None, now: FrozenWeights | None) -> None:
    """Raise RunError if adapters would continue on other weights than they were trained on."""
    if then and now and then.xxh3_128 != now.xxh3_128:
        raise RunError(
            f"checkpoint '{path}': its adapters were trained on the weights of '{then.source}' with hash "
            f"{then.xxh3_128}, model.init_from is '{now.source}' with {now.xxh3_128}. Name the former with "
            "model.init_from, or give another --run."
        )


def restore(state: Run, loaded: Loaded, *, earlier: Collection[str] = ()) -> None:
    """Apply a checkpoint; the position in the data first, because it may be refused.

    Args:
      loaded: the checkpoint; only the first rank has its tensors.
      earlier: content hashes of the revisions that the run has read; a new pass starts where one is no longer read.
    Raises: RunError: the order of batches would change.
    """
    progress = loaded.progress
    state.loader.dataset.load_state_dict(progress.loader, earlier)
    for group in GROUPS:
        expected = state.engine.expected(group, in_codes=progress.in_codes)
        state.engine.load(group, _broadcast(state, expected, loaded.groups[group]))
    if progress.loss_scale and state.engine.loss_scale:
        state.engine.loss_scale.load_state_dict(progress.loss_scale)
    if progress.microbatches_for == microbatches_for(state):
        state.microbatches = progress.microbatches
    else:
        LOG.info("microbatches are tried again: they were for %s", progress.microbatches_for)
    state.step, state.num_images = loaded.step, progress.num_images


def _broadcast(state: Run, expected: dict[str, Tensor], tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the first rank on every rank, one at a time, sorted by name."""
    for name, meta in sorted(expected.items()):
        tensor = tensors.get(name)
        if state.ranks.world_size > 1:
            empty = torch.empty(meta.shape, dtype=meta.dtype, device=state.device)
            tensor = empty if tensor is None else tensor.to(state.device)
            dist.broadcast(tensor, 0)
        assert tensor is not None
        yield name, tensor


def capture(
    state: Run,
    *,
    averages: bool = False,
    resumable: bool = True,
    interrupted: bool = False,
) -> Captured:
    """Copy the state into memory; a collective call.

    Args:
      averages: store all averages of the step.
      resumable: a checkpoint and a snapshot, with the averages where the recipe stores them with each checkpoint.
      interrupted: the run ends at this step although the recipe saves nothing then.
    """
    recipe = state.recipe
    extra = state.extra | {"buckets": buckets_at(recipe.data, state.stores, state.step)}
    null = {"embedding": state.conditioner.null_caption, "pooled": state.conditioner.null_pooled}
    kept = {name: tensor.cpu() for name, tensor in null.items() if tensor is not None}
    rest = {MODEL: buffers_of(state.engine.model)} | ({NULL_CAPTION: kept} if kept else {})
    stopped = {checkpoint.INTERRUPTED: True} if interrupted else {}
    groups = gather(state.engine, GROUPS if resumable else (EMA,), keep=state.ranks.is_first)
    if not groups:
        return Captured(state.step, [])
    folders = []
    if averages or (resumable and recipe.ema.kind == "power" and not recipe.ema.keep_every):
        named = extra | ({} if averages else stopped) | {"lengths": recipe.ema.lengths}
        folders.append(Folder(AVERAGE, rest | {EMA: groups[EMA]}, named))
    if resumable:
        rule = build_rules(recipe)[0]
        prefix, young = rule.prefix, {FIRST_SHARE: first_share(rule, state.step)}
        first = {name.removeprefix(prefix): t for name, t in groups[EMA].items() if name.startswith(prefix)}
        folders.append(Folder(SNAPSHOT, rest | {MODEL: rest[MODEL] | first}, extra | young | stopped))
        folders.append(Folder(CHECKPOINT, groups, _progress(state, groups).model_dump()))
    return Captured(state.step, folders)


def _progress(state: Run, groups: dict[str, dict[str, Tensor]]) -> _Progress:
    return _Progress(
        spec=state.spec,
        num_images=state.num_images,
        loader=state.loader.dataset.state_dict(),
        loss_scale=None if state.engine.loss_scale is None else state.engine.loss_scale.state_dict(),
        microbatches_for=microbatches_for(state),
        microbatches=state.microbatches,
        in_codes=any(name.endswith(CODES) for name in groups[OPTIMIZER]),
        frozen=state.frozen,
    )


def microbatches_for(state: Run) -> dict[str, Any]:
    """What the microbatches that fit depend on; where it changes, they are tried again."""
    run, parallel = state.recipe.run, state.recipe.parallel
    return {
        "world_size": state.ranks.world_size,
        "device": torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else state.device.type,
        "run": [run.precision, run.compile, run.activation_checkpointing, run.fp8, run.residual],
        "parallel": [parallel.strategy, parallel.shard, parallel.replicas, parallel.cpu_offload],
    }


def averages_are_due(state: Run) -> bool:
    """Whether this step stores averages, apart from those of a checkpoint."""
    every = state.recipe.ema.keep_every if state.recipe.ema.kind == "power" else 0
    return bool(every) and (state.step % every == 0 or state.step == state.recipe.run.steps)
