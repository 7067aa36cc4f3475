"""The state of a run: built from recipe and store, begun or resumed, saved. Nothing here takes a step.

A run resumes from its newest valid checkpoint, and from all of it or not at all. What may differ stands in ``head.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from ..datasets.errors import DamageError, RecipeError, RunError
from ..datasets.files import sweep_strays, write_atomic
from ..datasets.hashing import canonical_json
from ..datasets.loader import BatchLoader
from ..datasets.recipe import to_toml
from ..datasets.store import LatentStore
from . import checkpoint
from .checkpoint import AVERAGE, EMA, MODEL, NULL_CAPTION, OPTIMIZER, CheckpointDamage
from .config import TrainRecipe
from .data import build_loader
from .ema import Ema, build_ema
from .head import RUN, Head, check_head, contents_read, make_head
from .models import Conditioner, Denoiser, ModelSpec, build_model, check_sizes, model_spec
from .optimizer_state import expected_tensors, load_optimizer_tensors, optimizer_tensors
from .optimizers import build_optimizer

RECIPE = "recipe.toml"


@dataclass
class TrainState:
    """Everything that a step reads or changes."""

    recipe: TrainRecipe
    store: LatentStore
    spec: ModelSpec
    model: Denoiser
    ema: Ema
    optimizer: torch.optim.Optimizer
    loader: BatchLoader
    conditioner: Conditioner
    device: torch.device
    autocast_dtype: torch.dtype | None
    step: int = 0
    num_images: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # of the snapshots: what is needed to sample


def prepare(recipe: TrainRecipe, store: LatentStore, device: torch.device, warn: Callable[[str], None]) -> TrainState:
    """Build model, averages, optimizer and loader.

    Args:
      warn: told what of the store does not train.
    Raises: RecipeError, StoreError, RunError: something does not fit; nothing was written.
    """
    spec = model_spec(recipe, store.spec, str(store.path))
    check_sizes(spec, store.spec.latent, list(store.buckets))
    loader = build_loader(recipe, store, spec, device, warn)
    model = build_model(spec, seed=recipe.run.seed).to(device)
    optimizer = build_optimizer(recipe.optimizer, model)
    ema = build_ema(recipe, model)
    if recipe.run.activation_checkpointing:
        model.checkpoint_activations()
    if recipe.run.compile and device.type == "cuda":
        for block in model.blocks:
            block.compile()
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = recipe.run.precision != "fp32"
    null_caption = torch.from_numpy(store.null_caption).to(device).float() if spec.takes_text else None
    vae = store.spec.vae
    return TrainState(
        recipe=recipe,
        store=store,
        spec=spec,
        model=model,
        ema=ema,
        optimizer=optimizer,
        loader=loader,
        conditioner=Conditioner(spec, null_caption),
        device=device,
        autocast_dtype=autocast_dtype(recipe.run.precision, device),
        extra={
            "spec": spec.model_dump(),
            "objective": recipe.objective.model_dump(),
            "latent": store.spec.latent.model_dump(),
            "text": store.spec.text and store.spec.text.model_dump(),
            "vae": {"model": store.spec.recipe["vae"], "weights_sha256": vae.weights_sha256},
            "text_encoder": store.spec.text_encoder
            and {
                "model": store.spec.recipe["text"],
                "weights_sha256": store.spec.text_encoder.weights_sha256,
            },
            "classes": store.spec.classes,
            "buckets": store.buckets,
            "root_hash": store.root_hash,
        },
    )


def check_recipe(recipe: TrainRecipe) -> None:
    """Refuse what this release does not have.

    Raises: RecipeError.
    """
    refused = {
        "model.init_from": recipe.model.init_from,
        "parallel.deepspeed_config": recipe.parallel.deepspeed_config,
        "run.precision": "fp16" if recipe.run.precision == "fp16" else "",
        "parallel.strategy": recipe.parallel.strategy if recipe.parallel.strategy not in ("auto", "single") else "",
    }
    for key, value in refused.items():
        if value:
            raise RecipeError(f"{key} '{value}': not in this release. It trains from scratch, in one process.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: this release trains in one process.")


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Dtype of autocast, or None: bf16 where asked for and the GPU has it. A CPU computes bf16 ten times slower."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if precision == "bf16" and has_bf16 else None


def begin_or_resume(state: TrainState, run: Path, head: Head | None, warn: Callable[[str], None]) -> None:
    """Take all state from the newest valid checkpoint of the run, or write the head of a new one.

    Args:
      head: of the run, None where there is none yet.
      warn: told of damaged checkpoints; they are set aside, never deleted.
    Raises: RunError: the run was begun with another model or recipe; DamageError: no checkpoint is valid any more.
    """
    if head:
        check_head(run, head, state.recipe, state.extra["spec"])
    run.mkdir(parents=True, exist_ok=True)
    sweep_strays(run)
    found = newest_valid(state, run, warn)
    head_now = make_head(run, state.recipe, state.extra["spec"], state.store, head, found.step if found else 0)
    write_atomic(run / RUN, canonical_json(head_now.model_dump()))
    write_atomic(run / RECIPE, to_toml(state.recipe).encode())
    if found:
        restore(state, found, earlier=contents_read(head.revisions, state.store) if head else ())


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


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory: checked against what the state has, and not applied yet."""

    path: Path
    step: int
    progress: _Progress
    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict[str, Tensor]


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
    return Loaded(
        path=path,
        step=saved.state["step"],
        progress=progress,
        model=saved.tensors(MODEL, state.model.state_dict()),
        ema=saved.tensors(EMA, state.ema.state_dict()),
        optimizer=saved.tensors(OPTIMIZER, expected_tensors(state.recipe.optimizer, state.model)),
    )


def restore(state: TrainState, loaded: Loaded, *, earlier: Collection[str] = ()) -> None:
    """Take all state from a checkpoint; the place in the data first, since it may be refused.

    Args:
      earlier: root hashes of the revisions that the run has read; from one that is no longer read, a new pass begins.
    Raises: RunError: the order of batches would be another.
    """
    state.loader.dataset.load_state_dict(loaded.progress.loader, earlier)
    state.model.load_state_dict(loaded.model)
    state.ema.load_state_dict(loaded.ema)
    load_optimizer_tensors(state.optimizer, state.model, loaded.optimizer)
    state.step, state.num_images = loaded.step, loaded.progress.num_images


def save(state: TrainState, run: Path) -> None:
    """Write a snapshot and a checkpoint of the current step; older checkpoints go once this one has proven whole.

    Raises: ResourceError: the disk is full; DamageError: it gives back other bytes. The older ones then stay.
    """
    averaged = {MODEL: {**_buffers(state), **state.ema.weights}, **_null_caption(state)}
    checkpoint.save(checkpoint.SNAPSHOT, run, state.step, averaged, state.extra)
    if state.recipe.ema.kind == "power" and not state.recipe.ema.keep_every:
        save_averages(state, run)
    groups = {
        MODEL: state.model.state_dict(),
        EMA: state.ema.state_dict(),
        OPTIMIZER: optimizer_tensors(state.optimizer, state.model),
    }
    progress = _Progress(
        spec=state.extra["spec"], num_images=state.num_images, loader=state.loader.dataset.state_dict()
    )
    proven = checkpoint.save(checkpoint.CHECKPOINT, run, state.step, groups, progress.model_dump())
    checkpoint.prune(run, state.recipe.run.keep_checkpoints, proven=proven)


def averages_are_due(state: TrainState) -> bool:
    """Whether the averages of this step are stored, beside those that come with a checkpoint."""
    every = state.recipe.ema.keep_every if state.recipe.ema.kind == "power" else 0
    return bool(every) and (state.step % every == 0 or state.step == state.recipe.run.steps)


def save_averages(state: TrainState, run: Path) -> None:
    """Write all averages of the current step, of which ``posthoc.combine`` makes those of other lengths.

    Raises: as ``save``.
    """
    groups = {EMA: state.ema.state_dict(), MODEL: _buffers(state), **_null_caption(state)}
    checkpoint.save(AVERAGE, run, state.step, groups, state.extra | {"lengths": state.recipe.ema.lengths})


def _null_caption(state: TrainState) -> dict[str, dict[str, Tensor]]:
    embedding = state.conditioner.null_caption
    return {} if embedding is None else {NULL_CAPTION: {"embedding": embedding}}


def _buffers(state: TrainState) -> dict[str, Tensor]:
    saved = state.model.state_dict()
    return {name: saved[name] for name, _ in state.model.named_buffers() if name in saved}
