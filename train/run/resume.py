"""The state of a run: built from recipe and store, begun or resumed, saved. Nothing here takes a step.

A run resumes from its newest valid checkpoint, all of it or not at all. What may differ stands in ``manifest.py``.
Checkpoints hold whole tensors under the names of the model, so every strategy reads those of every other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
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
from ...datasets.format.encoder_paths import encoder_section
from ...datasets.format.schema import StoreSpec
from ...datasets.loader import BatchLoader
from ...datasets.recipe import to_toml
from ...datasets.store import LatentStore
from ..config import TrainRecipe
from ..models.spec import ModelSpec
from ..optim.ema import build_rules
from ..parallel.ranks import ALONE, Ranks
from ..parallel.watchdog import Meeting
from ..step.learner import Learner, build_learner
from ..weights import checkpoint
from ..weights.checkpoint import AVERAGE, CHECKPOINT, EMA, MODEL, NULL_CAPTION, OPTIMIZER, SNAPSHOT, CheckpointDamage
from ..weights.init_from import class_map_warning
from .data import build_loader
from .manifest import RUN, Head, check_head, contents_read, make_head
from .model_for_store import check_sizes, model_spec
from .saver import Captured, Folder, buffers_of, gather, write

RECIPE = "recipe.toml"
GROUPS = (MODEL, EMA, OPTIMIZER)
CODES = "/codes"  # ends the names of optimizer state that is kept in 8 bits


@dataclass(kw_only=True)
class TrainState(Learner):
    """What learns, and what it learns from.

    Args:
      extra: of the snapshots: what is needed to sample.
    """

    store: LatentStore
    loader: BatchLoader
    extra: dict[str, Any]


def prepare(
    recipe: TrainRecipe,
    store: LatentStore,
    device: torch.device,
    warn: Callable[[str], None],
    ranks: Ranks = ALONE,
) -> TrainState:
    """Build model, averages, optimizer and loader.

    Args:
      warn: told what of the store does not train.
      ranks: place of this process, which ``ranks.connected`` has joined with the others.
    Raises: RecipeError, StoreError, RunError: something does not fit; nothing was written.
    """
    spec = model_spec(recipe, store.spec, str(store.path))
    check_sizes(spec, store.spec.latent, list(store.buckets))
    source, classes = recipe.model.init_from, store.spec.classes or []
    if source and not spec.takes_text and (warning := class_map_warning(source, spec.num_classes, classes)):
        warn(warning)
    loader = build_loader(recipe, store, spec, device, warn, ranks)
    learner = build_learner(
        recipe,
        spec,
        device,
        null_caption=torch.from_numpy(store.null_caption).to(device).float() if spec.takes_text else None,
        source_sizes=torch.from_numpy(store.sizes[:, :2]).to(device).float() if spec.takes_sizes else None,
        ranks=ranks,
        compiled=recipe.run.compile and device.type == "cuda",
        pretrained=True,
    )
    known = {"place": store.path, "buckets": store.buckets, "root_hash": store.root_hash}
    extra = snapshot_state(recipe, store.spec, spec, **known)
    return TrainState(**vars(learner), store=store, loader=loader, extra=extra)


def snapshot_state(
    recipe: TrainRecipe,
    store: StoreSpec,
    spec: ModelSpec,
    *,
    place: Path,
    buckets: Mapping[str, int],
    root_hash: str | None,
) -> dict[str, Any]:
    """What a snapshot holds beside its tensors: all that sampling and export need of recipe and store.

    Args:
      place: folder that relative paths of encoders start from: that of the store.
      buckets: of the store, with their records.
    """
    vae, encoder = store.vae, store.text_encoder
    return {
        "spec": spec.model_dump(),
        "objective": recipe.objective.model_dump(),
        "drop": recipe.conditioning.drop,
        "latent": store.latent.model_dump(),
        "text": store.text and store.text.model_dump(),
        "vae": {
            "model": encoder_section(store, "vae", place),
            "class_name": vae.class_name,
            "weights_sha256": vae.weights_sha256,
        },
        "text_encoder": encoder
        and {"model": encoder_section(store, "text", place), "weights_sha256": encoder.weights_sha256},
        "classes": store.classes,
        "class_names": store.class_names,
        "buckets": dict(buckets),
        "root_hash": root_hash,
    }


def begin_or_resume(
    state: TrainState, run: Path, head: Head | None, warn: Callable[[str], None], meeting: Meeting | None = None
) -> None:
    """Take all state from the newest valid checkpoint of the run, or write the head of a new one.

    The first rank alone reads and writes; it hands on to the others what it has read.

    Args:
      head: of the run, None where there is none yet.
      warn: told of damaged checkpoints; they are set aside, never deleted.
      meeting: with the other ranks, where there are some.
    Raises: RunError: the run was begun with another model or recipe; DamageError: no checkpoint is valid any more.
    """
    if head:
        check_head(run, head, state.recipe, state.extra["spec"])
    found = _begin(state, run, head, warn) if state.ranks.is_first else None
    known = found and {"step": found.step, "progress": found.progress.model_dump()}
    if meeting is not None:
        known = meeting.announce(known)
    if known is None:
        return
    earlier = contents_read(head.revisions, state.store) if head else ()
    progress = _Progress.model_validate(known["progress"])
    if found is None:  # read by the first rank
        found = Loaded(run, known["step"], progress, {group: {} for group in GROUPS})
    restore(state, found, earlier=earlier)


def _begin(state: TrainState, run: Path, head: Head | None, warn: Callable[[str], None]) -> Loaded | None:
    """Find the checkpoint to go on from, and write the head of the run."""
    run.mkdir(parents=True, exist_ok=True)
    sweep_strays(run)
    found = newest_valid(state, run, warn)
    head_now = make_head(run, state.recipe, state.extra["spec"], state.store, head, found.step if found else 0)
    write_atomic(run / RUN, canonical_json(head_now.model_dump()))
    write_atomic(run / RECIPE, to_toml(state.recipe).encode())
    return found


def newest_valid(state: TrainState, run: Path, warn: Callable[[str], None]) -> Loaded | None:
    """Load the newest checkpoint that is whole, and set those aside that are newer and are not.

    Raises: DamageError: there are checkpoints, or were, and none is whole; RunError: it is of another model.
    """
    problems: list[CheckpointDamage] = []
    found = None
    for path in reversed(checkpoint.find(checkpoint.CHECKPOINT, run)):
        try:
            found = load(state, path)
            break
        except CheckpointDamage as error:
            problems.append(error)
    aside = checkpoint.damaged(run)
    if found is None and (problems or aside):
        what = str(problems[0]) if problems else f"only '{aside[-1].name}' is left, and it is damaged."
        raise DamageError(
            f"run '{run}': not one valid checkpoint. {what} Training would begin from scratch: restore a checkpoint "
            "from a copy, or give another --run."
        )
    if found is None and (snapshots := checkpoint.find(checkpoint.SNAPSHOT, run)):
        warn(f"run '{run}' begins from scratch: there is no checkpoint, though there is '{snapshots[-1].name}'")
    for problem in problems:
        assert found is not None
        name, renamed = problem.path.name, checkpoint.set_aside(problem.path).name
        warn(
            f"DAMAGED CHECKPOINT '{name}' of run '{run}': {problem.what}. It was renamed to '{renamed}'; "
            f"the run goes on from '{found.path.name}' instead"
        )
    return found


class _Progress(BaseModel, strict=True):
    """What of a checkpoint's state resumes a run."""

    spec: dict[str, Any]
    num_images: Annotated[int, Field(ge=0)]
    loader: dict[str, Any]
    loss_scale: dict[str, Any] | None = None
    tuned_for: dict[str, Any] = {}
    microbatches: dict[str, int] = {}
    attention_kernels: list[str] = []
    in_codes: bool = False


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory: checked against what the state has, and not applied yet."""

    path: Path
    step: int
    progress: _Progress
    groups: dict[str, dict[str, Tensor]]


def load(state: TrainState, path: Path) -> Loaded:
    """Read a checkpoint and check every byte, name, shape and dtype of it; nothing is applied.

    Raises: DamageError; RunError: it is of another model.
    """
    saved = checkpoint.read(path)
    try:
        progress = _Progress.model_validate(saved.state)
    except ValidationError as error:
        problem = error.errors()[0]
        what = f"'{checkpoint.STATE}': '{problem['loc'][0]}' is not valid: {problem['msg']}"
        raise CheckpointDamage(path, what) from error
    if progress.spec != state.extra["spec"]:
        raise RunError(
            f"checkpoint '{path}': of model {progress.spec}, this run has {state.extra['spec']}. Give another --run."
        )
    in_codes = progress.in_codes
    return Loaded(
        path=path,
        step=saved.state["step"],
        progress=progress,
        groups={group: saved.tensors(group, state.engine.expected(group, in_codes=in_codes)) for group in GROUPS},
    )


def restore(state: TrainState, loaded: Loaded, *, earlier: Collection[str] = ()) -> None:
    """Take all state from a checkpoint; the place in the data first, since it may be refused.

    Args:
      loaded: the checkpoint, without its tensors on other ranks than the first.
      earlier: root hashes of the revisions that the run has read; from one that is no longer read, a new pass begins.
    Raises: RunError: the order of batches would be another.
    """
    progress = loaded.progress
    state.loader.dataset.load_state_dict(progress.loader, earlier)
    for group in GROUPS:
        wanted = state.engine.expected(group, in_codes=progress.in_codes)
        state.engine.load(group, _handed_on(state, wanted, loaded.groups[group]))
    if progress.loss_scale and state.engine.loss_scale:
        state.engine.loss_scale.load_state_dict(progress.loss_scale)
    if progress.tuned_for == tuned_for(state):
        state.microbatches, state.attention_kernels = progress.microbatches, progress.attention_kernels
    state.step, state.num_images = loaded.step, progress.num_images


def _handed_on(
    state: TrainState, wanted: dict[str, Tensor], tensors: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors on every rank, one after the other in the order of their names, from the first rank."""
    for name, meta in sorted(wanted.items()):
        tensor = tensors.get(name)
        if state.ranks.world_size > 1:
            empty = torch.empty(meta.shape, dtype=meta.dtype, device=state.device)
            tensor = empty if tensor is None else tensor.to(state.device)
            dist.broadcast(tensor, 0)
        assert tensor is not None
        yield name, tensor


def capture(state: TrainState, *, averages: bool = False, resumable: bool = True) -> Captured:
    """Copy state into memory; every rank must ask.

    Args:
      averages: store all averages of the step.
      resumable: a checkpoint and a snapshot, with the averages where the recipe stores them with each checkpoint.
    """
    recipe, extra = state.recipe, state.extra
    groups = gather(state.engine, GROUPS if resumable else (EMA,), keep=state.ranks.is_first)
    if not groups:
        return Captured(state.step, [])
    null = state.conditioner.null_caption
    rest = {MODEL: buffers_of(state.engine.model)} | ({} if null is None else {NULL_CAPTION: {"embedding": null.cpu()}})
    folders = []
    if averages or (resumable and recipe.ema.kind == "power" and not recipe.ema.keep_every):
        folders.append(Folder(AVERAGE, rest | {EMA: groups[EMA]}, extra | {"lengths": recipe.ema.lengths}))
    if resumable:
        prefix = build_rules(recipe)[0].prefix
        first = {name.removeprefix(prefix): t for name, t in groups[EMA].items() if name.startswith(prefix)}
        folders.append(Folder(SNAPSHOT, rest | {MODEL: rest[MODEL] | first}, extra))
        folders.append(Folder(CHECKPOINT, groups, _progress(state, groups).model_dump()))
    return Captured(state.step, folders)


def _progress(state: TrainState, groups: dict[str, dict[str, Tensor]]) -> _Progress:
    return _Progress(
        spec=state.extra["spec"],
        num_images=state.num_images,
        loader=state.loader.dataset.state_dict(),
        loss_scale=None if state.engine.loss_scale is None else state.engine.loss_scale.state_dict(),
        tuned_for=tuned_for(state),
        microbatches=state.microbatches,
        attention_kernels=state.attention_kernels,
        in_codes=any(name.endswith(CODES) for name in groups[OPTIMIZER]),
    )


def tuned_for(state: TrainState) -> dict[str, Any]:
    """What the measured microbatches and kernels depend on: where it is another, they are measured again."""
    run, parallel = state.recipe.run, state.recipe.parallel
    return {
        "world_size": state.ranks.world_size,
        "device": torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else state.device.type,
        "run": [run.precision, run.compile, run.activation_checkpointing],
        "parallel": [parallel.strategy, parallel.shard, parallel.replicas, parallel.cpu_offload],
    }


def averages_are_due(state: TrainState) -> bool:
    """Whether the averages of this step are stored, beside those that come with a checkpoint."""
    every = state.recipe.ema.keep_every if state.recipe.ema.kind == "power" else 0
    return bool(every) and (state.step % every == 0 or state.step == state.recipe.run.steps)


def save(state: TrainState, run: Path) -> None:
    """Write a snapshot and a checkpoint of the current step, and wait until they are there.

    Raises: ResourceError: the disk is full; DamageError: it gives back other bytes. The older ones then stay.
    """
    write(capture(state), run, state.recipe.run)
