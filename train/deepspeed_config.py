"""A user's ds_config.json beside the recipe: "auto" or missing is what the recipe says, a contradiction is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..datasets.errors import RecipeError
from .config import TrainRecipe

ADAM_NAMES = ("adam", "adamw")  # of DeepSpeed: their state has our names


def read_config(path: str) -> dict[str, Any]:
    """Read a ds_config.json.

    Raises: RecipeError: there is none, or it is no JSON object.
    """
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise RecipeError(f"parallel.deepspeed_config '{path}': cannot be read ({error}).") from error
    if not isinstance(config, dict):
        raise RecipeError(f"parallel.deepspeed_config '{path}': needed a JSON object, got {type(config).__name__}.")
    return config


def resolve_config(config: dict[str, Any], recipe: TrainRecipe, dtype: torch.dtype | None) -> dict[str, Any]:
    """The config as DeepSpeed gets it: what is "auto" or missing comes from the recipe, what contradicts it is refused.

    Batches are cut and gradients summed by our loop, so DeepSpeed is told of single microbatches.

    Args:
      dtype: of the autocast, None for float32.
    Raises: RecipeError: naming the key.
    """
    config = json.loads(json.dumps(config))
    zero = config.setdefault("zero_optimization", {})
    if zero.get("stage") not in (1, 2, 3):
        raise RecipeError(
            f"ds_config.json: zero_optimization.stage is {zero.get('stage')!r}, needed 1, 2 or 3. Without sharding use "
            "parallel.strategy 'ddp'."
        )
    for part in ("offload_param", "offload_optimizer"):
        if zero.get(part, {}).get("device") == "nvme":
            raise RecipeError(f"ds_config.json: zero_optimization.{part}.device 'nvme': only 'cpu' can be saved.")
    if any(zero.get(part, {}).get("device", "none") != "none" for part in ("offload_param", "offload_optimizer")):
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    if dtype == torch.float16 or recipe.run.precision == "fp16":
        raise RecipeError("run.precision 'fp16' with DeepSpeed: use 'bf16', or parallel.strategy 'fsdp'.")
    adam = config.get("optimizer")
    name = str(adam.get("type") if adam else recipe.optimizer.name).lower()
    if name not in ADAM_NAMES:
        raise RecipeError(f"optimizer '{name}' with DeepSpeed: needed 'adamw'; others with parallel.strategy 'fsdp'.")
    if adam and not recipe.optimizer.decay_all:
        raise RecipeError(
            "optimizer.decay_all false with DeepSpeed's own optimizer: leave 'optimizer' out of its config."
        )
    if "activation_checkpointing" in config and recipe.run.activation_checkpointing != "blocks":
        raise RecipeError(
            "ds_config.json: it has a section activation_checkpointing, run.activation_checkpointing is "
            f"'{recipe.run.activation_checkpointing}'. Use --set run.activation_checkpointing=blocks, or leave it out."
        )
    section = recipe.optimizer
    _settle(config, "gradient_clipping", recipe.run.grad_clip)
    _settle(config, "train_batch_size", recipe.run.global_batch)
    _settle(config, "train_micro_batch_size_per_gpu", recipe.run.microbatch or recipe.run.global_batch)
    if adam:
        of_adam = {
            "lr": section.lr,
            "betas": section.betas[:2],
            "eps": section.eps,
            "weight_decay": section.weight_decay,
        }
        for key, value in of_adam.items():
            _settle(config, f"optimizer.params.{key}", value)
    # Weights stay float32 and the forward is cast, as with every other strategy; 16-bit weights are another training.
    for key in ("bf16", "fp16"):
        _settle(config, f"{key}.enabled", False, "run.precision decides, and weights stay float32")
    if "torch_autocast" in config or dtype is not None:
        _settle(config, "torch_autocast.enabled", dtype is not None, "run.precision decides")
    if dtype is not None:
        _settle(config, "torch_autocast.dtype", str(dtype).removeprefix("torch."))
        # Else gradients of linear layers are summed over the ranks in 16 bits, which no other strategy does.
        config["torch_autocast"].setdefault("lower_precision_safe_modules", [])
    for key in ("train_batch_size", "gradient_accumulation_steps"):
        config.pop(key, None)
    return config | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}


def _settle(config: dict[str, Any], key: str, value: Any, why: str = "") -> None:
    """Put a value of the recipe where the config says "auto" or nothing.

    Raises: RecipeError: it says something else.
    """
    *sections, leaf = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    if config.setdefault(leaf, "auto") == "auto":
        config[leaf] = value
    elif config[leaf] != value:
        raise RecipeError(
            f"ds_config.json: {key} is {config[leaf]!r}, by the recipe it is {value!r}{why and f' ({why})'}. Write "
            '"auto" there, or make them equal.'
        )
