"""The checkpoints of a run: resume from the newest valid one, and write new ones during the next steps.

A run resumes from all of a checkpoint or not at all; ``manifest.py`` lists the settings that may change. Checkpoints
hold whole tensors under the names of the model, so any strategy resumes any other. All ranks gather a state; the first
one writes a copy, so the next steps may change it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from ...datasets.disk.files import write_atomic
from ...datasets.disk.hashing import canonical_json
from ...datasets.disk.strays import sweep_beside, sweep_strays
from ...errors import DamageError, RunError
from ...recipe import to_toml
from ..config import RunSection, TrainRecipe
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
    INTERRUPTED,
    MODEL,
    NULL_CAPTION,
    OPTIMIZER,
    SNAPSHOT,
    CheckpointDamage,
    Groups,
)
from ..weights.folders import RECIPE, RUN, SAMPLES, knows_null
from ..weights.init_from import FrozenWeights
from .data import buckets_of_stores
from .manifest import new_manifest, store_read
from .state import Run

LOG = logging.getLogger(__name__)
GROUPS = (MODEL, EMA, OPTIMIZER)
MOST_NAMED = 3  # tensors in a message
Folder = tuple[str, Groups, Mapping[str, Any]]
"""What is written: CHECKPOINT, SNAPSHOT or AVERAGE, tensors on the CPU, and everything else as JSON values."""


class Progress(BaseModel, strict=True):
    """The part of a checkpoint's ``state.json`` that resumes a run.

    Args:
      num_nonfinite: updates that were skipped because the loss or the gradient was not finite.
      seed: of the recipe when it was saved; None: not recorded.
      knows_null: the model has learned the null condition, even if it goes on with ``conditioning.drop = 0``.
    """

    step: int
    spec: ModelSpec
    num_images: Annotated[int, Field(ge=0)]
    loader: dict[str, Any]
    loss_scale: dict[str, Any] | None = None
    frozen: FrozenWeights | None = None
    seed: int | None = None
    num_nonfinite: Annotated[int, Field(ge=0)] = 0
    knows_null: bool = False


# ------------------------------------------------------------------------------------------------------------- resume


def start_or_resume(run: Run, folder: Path, warn: Callable[[str], None]) -> None:
    """Load the newest valid checkpoint of the run, or write the manifest of a new run; a collective call.

    Only the first rank reads and writes; it sends the other ranks what it has read, or its error.

    Args:
      warn: called for each damaged checkpoint; it is renamed, never deleted.
    Raises: RunError: the run has another model; DamageError: no checkpoint is valid.
    """
    has_any = from_first(run.ranks, lambda: bool(checkpoint.find(CHECKPOINT, folder)))
    targets = {group: run.engine.state(group) for group in GROUPS} if has_any else {}
    groups: dict[str, Mapping[str, Tensor]] = {}  # of the first rank

    def open_folder() -> Progress | None:
        folder.mkdir(parents=True, exist_ok=True)
        sweep_beside(folder / RUN)
        if (folder / RUN).is_file():
            sweep_strays(folder, below=False)
            sweep_strays(folder / SAMPLES)
        progress, tensors = newest_valid(run, targets, folder, warn) or (None, {})
        groups.update(tensors)
        reads = run.reads or [store_read(folder, store) for store in run.stores]
        current = new_manifest(run.recipe, run.spec, reads, run.loader.reader.statistics)
        write_atomic(folder / RUN, canonical_json(current.model_dump()))
        write_atomic(folder / RECIPE, to_toml(run.recipe).encode())
        return progress

    progress = from_first(run.ranks, open_folder)
    if progress is None:
        LOG.info("run '%s': no checkpoint, so it starts at step 0", folder)
        return
    LOG.info("run '%s': the checkpoint of step %d is valid, and the newest", folder, progress.step)
    is_reseeded = "run.seed" in run.changed or progress.seed not in (None, run.recipe.run.seed)
    run.loader.load_state_dict(progress.loader, reseeded=is_reseeded)  # first, because it may be refused
    for group in GROUPS:
        run.engine.load(group, groups.get(group, {}))
    if progress.loss_scale and run.engine.loss_scale:
        run.engine.loss_scale.load_state_dict(progress.loss_scale)
    if run.recipe.conditioning.drop == 0:  # else the run learns it anyway
        run.extra["base_knows_null"] |= progress.knows_null
    run.step = progress.step
    run.num_images = progress.num_images
    run.num_nonfinite = progress.num_nonfinite


def newest_valid(
    run: Run, targets: Mapping[str, State], folder: Path, warn: Callable[[str], None]
) -> tuple[Progress, Groups] | None:
    """Load the newest valid checkpoint, and rename newer ones that are damaged; None if the run has had none.

    Args:
      targets: tensors of the run by group, for names, shapes and dtypes.
    Raises: DamageError: the run has lost its checkpoints, so that it never silently starts from scratch; RunError: a
      checkpoint is of another model.
    """
    problems: list[CheckpointDamage] = []
    for path in reversed(checkpoint.find(CHECKPOINT, folder)):
        try:
            loaded = _load(run, targets, path)
        except CheckpointDamage as error:
            problems.append(error)
            continue
        for problem in problems:
            name, renamed = problem.path.name, checkpoint.set_aside(problem.path).name
            warn(
                f"DAMAGED CHECKPOINT '{name}' of run '{folder}': {problem.what}. It was renamed to '{renamed}'; "
                f"the run resumes from '{path.name}' instead"
            )
        return loaded
    aside = checkpoint.damaged(folder)
    if problems or aside:
        what = str(problems[0]) if problems else f"only '{aside[-1].name}' is left, and it is damaged."
        raise DamageError(
            f"run '{folder}': no valid checkpoint. {what} Training would start from scratch: restore a checkpoint "
            "from a copy, or use a different --run."
        )
    if snapshots := checkpoint.find(SNAPSHOT, folder):
        warn(f"run '{folder}' starts from scratch: it has '{snapshots[-1].name}' but no checkpoint")
    return None


def _load(run: Run, targets: Mapping[str, State], path: Path) -> tuple[Progress, Groups]:
    """Read a checkpoint and check every byte, name, shape and dtype; the run does not change.

    Raises: DamageError; RunError: it is of another model, or its adapters are of other frozen weights.
    """
    saved = checkpoint.read(path)
    try:
        progress = Progress.model_validate(saved.state)
    except ValidationError as error:
        problem = error.errors()[0]
        what = f"'{checkpoint.STATE}': '{problem['loc'][0]}' is not valid: {problem['msg']}"
        raise CheckpointDamage(path, what) from error
    if progress.spec != run.spec:
        raise RunError(
            f"checkpoint '{path}': of model {progress.spec.model_dump()}, this run has {run.spec.model_dump()}. Use "
            "a different --run."
        )
    then, now = progress.frozen, run.frozen
    if then and now and then.xxh3_128 != now.xxh3_128:
        raise RunError(
            f"checkpoint '{path}': its adapters were trained on the weights of '{then.source}' with hash "
            f"{then.xxh3_128}, model.init_from is '{now.source}' with {now.xxh3_128}. Name the former with "
            "model.init_from, or use a different --run."
        )
    groups = {group: saved.read(group) for group in GROUPS}
    if run.recipe.optimizer.name == "adamw8bit":
        from ..optim.adamw8bit import fit_moments

        fit_moments(groups[OPTIMIZER], targets[OPTIMIZER])
    for group, tensors in groups.items():
        saved.check_tensors(group, tensors, targets[group])
    return progress, groups


# --------------------------------------------------------------------------------------------------------------- save


def due(recipe: TrainRecipe, step: int, *, stopping: bool = False) -> list[str]:
    """The kinds of folder to write after a step: all averages, and a snapshot with each checkpoint.

    Args:
      stopping: the run ends here for now.
    """
    section, ema, is_last = recipe.run, recipe.ema, step == recipe.run.steps
    resumable = stopping or is_last or step % section.checkpoint_every == 0
    with_averages = resumable if not ema.keep_every else is_last or step % ema.keep_every == 0
    averages = [AVERAGE] if ema.kind == "power" and with_averages else []
    return [*averages, SNAPSHOT, CHECKPOINT] if resumable else averages


def capture(run: Run, kinds: Sequence[str], *, interrupted: bool = False) -> list[Folder]:
    """Copy the state into memory, as the folders of some kinds; a collective call. Only the first rank gets any.

    Args:
      interrupted: the run stops at this step, although the recipe saves nothing then.
    Raises: RunError: on every rank, if a tensor is not finite: no run could resume from it.
    """
    recipe, step, engine = run.recipe, run.step, run.engine
    buffer_names = {name for name, _ in engine.model.named_buffers()}  # constants, not learned
    groups: dict[str, dict[str, Tensor]] = {}
    is_finite: dict[str, Tensor] = {}  # () bool on the device
    for group in GROUPS if CHECKPOINT in kinds else (EMA,):
        groups[group] = {}
        for name, tensor in engine.tensors(group):  # only one at a time is whole on the device
            if not run.ranks.is_first:
                continue
            groups[group][name] = tensor.detach().to("cpu", copy=True)
            if name not in buffer_names:
                is_finite[f"{group} {name}"] = tensor.detach().isfinite().all()
    from_first(run.ranks, lambda: _check_finite(is_finite, step))
    if not run.ranks.is_first:
        return []
    extra = run.extra | {"buckets": buckets_of_stores(run.stores)}
    null = {"embedding": run.conditioner.null_caption, "pooled": run.conditioner.null_pooled}
    kept = {name: tensor.cpu() for name, tensor in null.items() if tensor is not None}
    state = model_state(engine.model)
    buffers = {name: state[name].cpu().clone() for name, _ in engine.model.named_buffers() if name in state}
    rest = {MODEL: buffers} | ({NULL_CAPTION: kept} if kept else {})
    stopped = {INTERRUPTED: True} if interrupted else {}
    folders = list[Folder]()
    if AVERAGE in kinds:
        named = extra | ({} if recipe.ema.keep_every else stopped) | {"lengths": recipe.ema.lengths}
        folders.append((AVERAGE, rest | {EMA: groups[EMA]}, named))
    if CHECKPOINT in kinds:
        rule = build_rules(recipe)[0]
        first = {name.removeprefix(rule.prefix): t for name, t in groups[EMA].items() if name.startswith(rule.prefix)}
        young = {FIRST_SHARE: first_share(rule, step)}
        progress = Progress(
            step=step,
            spec=run.spec,
            num_images=run.num_images,
            loader=run.loader.state_dict(),
            loss_scale=None if engine.loss_scale is None else engine.loss_scale.state_dict(),
            frozen=run.frozen,
            seed=recipe.run.seed,
            num_nonfinite=run.num_nonfinite,
            knows_null=knows_null(run.extra),
        )
        folders.append((SNAPSHOT, rest | {MODEL: buffers | first}, extra | young | stopped))
        folders.append((CHECKPOINT, groups, progress.model_dump()))
    return folders


def _check_finite(is_finite: Mapping[str, Tensor], step: int) -> None:
    """Raise RunError if a tensor of the state is not finite, naming the first.

    Args:
      is_finite: () bool of each tensor, by its group and name.
    """
    if not is_finite:
        return
    flags = torch.stack([flag.to(next(iter(is_finite.values())).device) for flag in is_finite.values()]).tolist()
    bad = [name for name, finite in zip(is_finite, flags, strict=True) if not finite]
    if not bad:
        return
    names = ", ".join(f"'{name}'" for name in bad[:MOST_NAMED])
    more = f" and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
    raise RunError(
        f"step {step}: {names}{more} {'is' if len(bad) == 1 else 'are'} not finite, so this step is not saved; "
        "earlier checkpoints and snapshots stay. Go on from the newest with a lower rate, --continue-with "
        "optimizer.lr=VALUE, or with more clipping, --continue-with run.grad_clip=VALUE."
    )


def write(folders: Sequence[Folder], step: int, run: Path, section: RunSection) -> None:
    """Write the folders of a step, a checkpoint last; then remove older checkpoints, and snapshots of earlier stops.

    Raises: ResourceError: the disk is full; DamageError: it returned other bytes. Older checkpoints then stay.
    """
    for kind, groups, state in folders:
        path = checkpoint.save(kind, run, step, groups, state)
        if kind == CHECKPOINT:
            checkpoint.prune(run, section.keep_checkpoints, proven=path, keep_every=section.keep_every)
        elif state.get(INTERRUPTED):
            checkpoint.prune_interrupted(kind, run)


class Saver:
    """Writes the state of a run in a thread, one after the other; an error in one is raised before the next.

    Args:
      folder: of the run.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self._folder, self._section = run, folder, run.recipe.run
        self._thread = ThreadPoolExecutor(1, "leandit-save")
        self._pending: Future[None] | None = None

    def save_due(self, *, stopping: bool) -> None:
        """Start to write what is due after the step, unless ``run.async_checkpoint`` is off; a collective call.

        Raises: ResourceError, DamageError: of this write or the one before.
        """
        recipe, step = self._run.recipe, self._run.step
        if kinds := due(recipe, step, stopping=stopping):
            self.finish()  # first, so that two states are never in memory
            if folders := capture(self._run, kinds, interrupted=stopping and CHECKPOINT not in due(recipe, step)):
                self._pending = self._thread.submit(write, folders, step, self._folder, self._section)
        if self._pending is not None and (self._pending.done() or not self._section.async_checkpoint):
            self.finish()

    def finish(self) -> None:
        """Wait until everything is written; raises ResourceError, DamageError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the thread, and ignore its errors."""
        self._thread.shutdown(wait=True)
