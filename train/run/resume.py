"""Start or resume a run, and capture its state for a checkpoint. Nothing here takes a step.

A run resumes from its newest valid checkpoint, all of it or not at all; ``manifest.py`` lists the settings that may
change. Checkpoints hold whole tensors under the names of the model, so any strategy resumes any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from ...datasets.disk.files import write_atomic
from ...datasets.disk.hashing import canonical_json
from ...datasets.disk.strays import sweep_strays
from ...datasets.errors import DamageError, RunError
from ...datasets.recipe import to_toml
from ..models.spec import ModelSpec
from ..optim.ema import build_rules, first_share
from ..optim.state import State, model_state
from ..parallel.ranks import from_first
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
from .saver import Folder
from .state import Run
from .stores import contents_read

LOG = logging.getLogger(__name__)
GROUPS = (MODEL, EMA, OPTIMIZER)


class Progress(BaseModel, strict=True):
    """The part of a checkpoint's ``state.json`` that resumes a run."""

    spec: ModelSpec
    num_images: Annotated[int, Field(ge=0)]
    loader: dict[str, Any]
    loss_scale: dict[str, Any] | None = None
    microbatches_for: dict[str, Any] = {}
    microbatches: dict[str, int] = {}
    frozen: FrozenWeights | None = None


class Loaded(NamedTuple):
    """A checkpoint in memory, checked against the run but not applied."""

    path: Path
    step: int
    progress: Progress
    groups: dict[str, dict[str, Tensor]]


def start_or_resume(
    state: Run,
    run: Path,
    manifest: RunManifest | None,
    warn: Callable[[str], None],
) -> None:
    """Load the newest valid checkpoint of the run, or write the manifest of a new run; a collective call.

    Only the first rank reads and writes; it sends the other ranks what it has read, or its error.

    Args:
      manifest: of the run, None for a new one.
      warn: called for each damaged checkpoint; it is renamed, never deleted.
    Raises: RunError: the run has another model or recipe; DamageError: no checkpoint is valid.
    """
    if manifest:
        check_settings(run, manifest, state.recipe, state.spec)
    has_any = from_first(state.ranks, lambda: bool(checkpoint.find(CHECKPOINT, run)))
    targets = {group: state.engine.state(group) for group in GROUPS} if has_any else {}
    groups: dict[str, dict[str, Tensor]] = {}  # of the first rank

    def open_run() -> tuple[int, Progress] | None:
        run.mkdir(parents=True, exist_ok=True)
        sweep_strays(run)
        loaded = newest_valid(state, targets, run, warn)
        step = loaded.step if loaded else 0
        statistics = state.loader.dataset.reader.statistics
        current = continue_manifest(run, state.recipe, state.spec, state.stores, statistics, manifest, step)
        write_atomic(run / RUN, canonical_json(current.model_dump()))
        write_atomic(run / RECIPE, to_toml(state.recipe).encode())
        if loaded is None:
            return None
        groups.update(loaded.groups)
        return step, loaded.progress

    opened = from_first(state.ranks, open_run)
    if opened is None:
        LOG.info("run '%s': no checkpoint, so it begins at step 0", run)
        return
    step, progress = opened
    LOG.info("run '%s': the checkpoint of step %d is valid, and the newest", run, step)
    earlier = contents_read(manifest, state.stores) if manifest else ()
    state.loader.dataset.load_state_dict(progress.loader, earlier)  # first, because it may be refused
    for group in GROUPS:
        state.engine.load(group, groups.get(group, {}))
    if progress.loss_scale and state.engine.loss_scale:
        state.engine.loss_scale.load_state_dict(progress.loss_scale)
    if progress.microbatches_for == microbatches_for(state):
        state.microbatches = progress.microbatches
    else:
        LOG.info("microbatches are tried again: they were for %s", progress.microbatches_for)
    state.step, state.num_images = step, progress.num_images


def newest_valid(state: Run, targets: Mapping[str, State], run: Path, warn: Callable[[str], None]) -> Loaded | None:
    """Load the newest valid checkpoint, and rename newer ones that are damaged.

    Args:
      targets: tensors of the run by group, for names, shapes and dtypes.
    Raises: DamageError: the run has had checkpoints and none is valid; RunError: a checkpoint is of another model.
    """
    problems: list[CheckpointDamage] = []
    loaded = None
    for path in reversed(checkpoint.find(CHECKPOINT, run)):
        try:
            loaded = _load(state, targets, path)
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
            "from a copy, or use a different --run."
        )
    if snapshots := checkpoint.find(SNAPSHOT, run):
        warn(f"run '{run}' starts from scratch: it has '{snapshots[-1].name}' but no checkpoint")


def _load(state: Run, targets: Mapping[str, State], path: Path) -> Loaded:
    """Read a checkpoint and check every byte, name, shape and dtype; the run does not change.

    Raises: DamageError; RunError: it is of another model.
    """
    saved = checkpoint.read(path)
    try:
        progress = Progress.model_validate(saved.state)
    except ValidationError as error:
        problem = error.errors()[0]
        what = f"'{checkpoint.STATE}': '{problem['loc'][0]}' is not valid: {problem['msg']}"
        raise CheckpointDamage(path, what) from error
    if progress.spec != state.spec:
        raise RunError(
            f"checkpoint '{path}': of model {progress.spec.model_dump()}, this run has {state.spec.model_dump()}. Use "
            "a different --run."
        )
    _check_frozen(path, progress.frozen, state.frozen)
    groups = {group: saved.read(group) for group in GROUPS}
    if state.recipe.optimizer.name == "adamw8bit":
        from ..optim.adamw8bit import fit_moments

        fit_moments(groups[OPTIMIZER], targets[OPTIMIZER])
    for group, tensors in groups.items():
        saved.check_tensors(group, tensors, targets[group])
    return Loaded(path, saved.state["step"], progress, groups)


def _check_frozen(path: Path, then: FrozenWeights | None, now: FrozenWeights | None) -> None:
    """Raise RunError if adapters would continue on other weights than they were trained on."""
    if then and now and then.xxh3_128 != now.xxh3_128:
        raise RunError(
            f"checkpoint '{path}': its adapters were trained on the weights of '{then.source}' with hash "
            f"{then.xxh3_128}, model.init_from is '{now.source}' with {now.xxh3_128}. Name the former with "
            "model.init_from, or use a different --run."
        )


def capture(
    state: Run,
    *,
    averages: bool = False,
    resumable: bool = True,
    interrupted: bool = False,
) -> list[Folder]:
    """Copy the state into memory, as the folders to write; a collective call. Only the first rank gets any.

    Args:
      averages: store all averages of the step.
      resumable: a checkpoint and a snapshot, with the averages where the recipe stores them with each checkpoint.
      interrupted: the run ends at this step although the recipe saves nothing then.
    """
    recipe, step, engine = state.recipe, state.step, state.engine
    groups: dict[str, dict[str, Tensor]] = {}
    for group in GROUPS if resumable else (EMA,):
        whole = engine.tensors(group)  # only one at a time is whole on the device
        groups[group] = {name: t.detach().to("cpu", copy=True) for name, t in whole if state.ranks.is_first}
    if not state.ranks.is_first:
        return []
    extra = state.extra | {"buckets": buckets_at(recipe.data, state.stores, step)}
    null = {"embedding": state.conditioner.null_caption, "pooled": state.conditioner.null_pooled}
    kept = {name: tensor.cpu() for name, tensor in null.items() if tensor is not None}
    saved = model_state(engine.model)
    buffers = {name: saved[name].cpu().clone() for name, _ in engine.model.named_buffers() if name in saved}
    rest = {MODEL: buffers} | ({NULL_CAPTION: kept} if kept else {})
    stopped = {checkpoint.INTERRUPTED: True} if interrupted else {}
    folders = []
    if averages or (resumable and recipe.ema.kind == "power" and not recipe.ema.keep_every):
        named = extra | ({} if averages else stopped) | {"lengths": recipe.ema.lengths}
        folders.append(Folder(AVERAGE, step, rest | {EMA: groups[EMA]}, named))
    if resumable:
        rule = build_rules(recipe)[0]
        first = {name.removeprefix(rule.prefix): t for name, t in groups[EMA].items() if name.startswith(rule.prefix)}
        young = {FIRST_SHARE: first_share(rule, step)}
        progress = Progress(
            spec=state.spec,
            num_images=state.num_images,
            loader=state.loader.dataset.state_dict(),
            loss_scale=None if engine.loss_scale is None else engine.loss_scale.state_dict(),
            microbatches_for=microbatches_for(state),
            microbatches=state.microbatches,
            frozen=state.frozen,
        )
        folders.append(Folder(SNAPSHOT, step, rest | {MODEL: buffers | first}, extra | young | stopped))
        folders.append(Folder(CHECKPOINT, step, groups, progress.model_dump()))
    return folders


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
