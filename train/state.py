"""The state of a run: built from recipe and store, begun or resumed, saved.

A run goes on only with what it was begun with; what differs is named. Nothing here takes a step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from ..datasets.errors import RecipeError, RunError
from ..datasets.files import canonical_json, read_json, sweep_strays, write_atomic
from ..datasets.loader import make_loader
from ..datasets.recipe import flatten, to_toml
from ..datasets.store import LatentStore
from . import checkpoint
from .config import TrainRecipe
from .ema import Ema
from .models import Conditioner, Denoiser, ModelSpec, build_model, check_sizes, model_spec
from .optimizers import build_optimizer, load_optimizer_tensors, optimizer_tensors

RUN = "run.json"
RECIPE = "recipe.toml"
# Keys of the recipe that may differ when a run goes on: they change how far and how often, not what a step computes.
FREE_ON_RESUME = {
    "run.steps",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.log_every",
    "run.allow_incomplete",
    "run.compile",
    "run.activation_checkpointing",
}


@dataclass
class TrainState:
    """Everything that a step reads or changes."""

    recipe: TrainRecipe
    spec: ModelSpec
    model: Denoiser
    ema: Ema
    optimizer: torch.optim.AdamW
    loader: StatefulDataLoader
    conditioner: Conditioner
    device: torch.device
    autocast_dtype: torch.dtype | None
    step: int = 0
    num_images: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # of the snapshots: what is needed to sample


def prepare(recipe: TrainRecipe, store_path: Path, device: torch.device) -> TrainState:
    """Open the store and build model, averages, optimizer and loader.

    Raises: RecipeError, StoreError, RunError: something does not fit; nothing was written.
    """
    check_recipe(recipe)
    store = LatentStore(store_path, allow_incomplete=recipe.run.allow_incomplete)
    spec = model_spec(recipe, store.spec, str(store_path))
    check_sizes(spec, store.spec.latent, list(store.buckets))
    loader = make_loader(store, global_batch=recipe.run.global_batch, seed=recipe.run.seed, pin=device.type == "cuda")
    model = build_model(spec, seed=recipe.run.seed).to(device)
    optimizer = build_optimizer(recipe.optimizer, model)
    ema = Ema(model, recipe.run.ema_decay)
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


def begin_or_resume(state: TrainState, run: Path, store_path: Path) -> None:
    """Load the newest checkpoint of the run, or write the head of a new one.

    Raises: RunError: the run was begun with another model, store or recipe, or the folder holds something else.
    """
    head = {
        "store": os.path.relpath(store_path, run),
        "root_hash": state.extra["root_hash"],
        "spec": state.extra["spec"],
        "recipe": state.recipe.model_dump(),
    }
    if (run / RUN).is_file():
        check_head(run, read_json(run / RUN), head)
    elif run.exists() and any(run.iterdir()):
        raise RunError(f"run '{run}': the folder is not empty and no run of leandit. Give another --run.")
    run.mkdir(parents=True, exist_ok=True)
    sweep_strays(run)
    write_atomic(run / RUN, canonical_json(head))
    write_atomic(run / RECIPE, to_toml(state.recipe).encode())
    if found := checkpoint.find(checkpoint.CHECKPOINT, run):
        restore(state, checkpoint.read(found[-1]))


def check_head(run: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to go on with a run that computes something else, naming the fields.

    Raises: RunError.
    """
    there, here = flatten(found), flatten(wanted)
    differing = [
        key
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key) and key != "store" and key.removeprefix("recipe.") not in FREE_ON_RESUME
    ]
    if found["recipe"]["schedule"]["kind"] == "cosine" and there["recipe.run.steps"] != here["recipe.run.steps"]:
        differing.append("recipe.run.steps")  # the cosine ends at the last step
    if differing:
        fields = "; ".join(f"{key} was {there.get(key)!r}, is {here.get(key)!r}" for key in differing[:4])
        raise RunError(
            f"run '{run}': begun with other settings: {fields}. "
            "Give another --run, or go on with the settings in its recipe.toml."
        )


def save(state: TrainState, run: Path) -> None:
    """Write a checkpoint and a snapshot of the current step."""
    common = {"spec": state.extra["spec"]}
    averaged = {"model": {**_buffers(state), **state.ema.state_dict()}}
    if state.conditioner.null_caption is not None:
        averaged["null_caption"] = {"embedding": state.conditioner.null_caption}
    checkpoint.save(checkpoint.SNAPSHOT, run, state.step, averaged, state.extra)
    groups = {
        "model": state.model.state_dict(),
        "ema": state.ema.state_dict(),
        "optimizer": optimizer_tensors(state.optimizer, state.model),
    }
    progress = {"num_images": state.num_images, "loader": state.loader.state_dict()}
    checkpoint.save(checkpoint.CHECKPOINT, run, state.step, groups, common | progress)
    checkpoint.prune(run, state.recipe.run.keep_checkpoints)


def _buffers(state: TrainState) -> dict[str, Tensor]:
    saved = state.model.state_dict()
    return {name: saved[name] for name, _ in state.model.named_buffers() if name in saved}


def restore(state: TrainState, saved: checkpoint.Saved) -> None:
    """Take all state from a checkpoint.

    Raises: RunError: it is of another model.
    """
    if saved.state.get("spec") != state.extra["spec"]:
        raise RunError(
            f"checkpoint '{saved.path}': of model {saved.state.get('spec')}, this run has {state.extra['spec']}. "
            "Give another --run."
        )
    state.model.load_state_dict(saved.tensors("model"))
    state.ema.load_state_dict(saved.tensors("ema"))
    load_optimizer_tensors(state.optimizer, state.model, saved.tensors("optimizer"))
    state.loader.load_state_dict(saved.state["loader"])
    state.step, state.num_images = saved.state["step"], saved.state["num_images"]
