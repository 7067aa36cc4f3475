"""Merge a user's ds_config.json with the recipe: values of the file win, the recipe fills in the rest.

``resolve`` returns the recipe with the values of the file, and the config for DeepSpeed. Our loop splits batches and
accumulates gradients, so DeepSpeed gets single microbatches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...datasets.errors import RecipeError
from ...datasets.recipe import flatten
from ..config import TrainRecipe
from .deepspeed_keys import UNUSED_CHECKPOINTING

ADAM_NAMES = ("adam", "adamw")  # DeepSpeed's names of optimizers whose state is AdamW's
AUTO = (None, "auto")
PRECISIONS = {"bf16": "bf16", "fp16": "fp16"}
# Sections that are checked, outer ones first.
SECTIONS = (
    "zero_optimization",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
    *PRECISIONS,
    "torch_autocast",
    "optimizer",
    "optimizer.params",
    "scheduler",
    "scheduler.params",
    "activation_checkpointing",
)


@dataclass(frozen=True)
class ResolvedConfig:
    """A merged recipe and ds_config.json.

    Args:
      config: for DeepSpeed.
      recipe: with the values of the file.
      cpu_checkpointing: offload the checkpointed activations to the CPU.
      loss_scaler: section fp16 of the file, without "auto".
      notes: lines to print: a table of differences, and the ignored keys.
    """

    config: dict[str, Any]
    recipe: TrainRecipe
    cpu_checkpointing: bool
    loss_scaler: dict[str, Any]
    notes: list[str]


@dataclass
class _Table:
    """Differences as rows: key, value of the recipe, value of the file."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def lines(self) -> list[str]:
        if not self.rows:
            return []
        rows = [("key", "recipe", "ds_config.json, which holds"), *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]


def read_config(path: str) -> dict[str, Any]:
    """Read a ds_config.json.

    Raises: RecipeError: it cannot be read, or is not a JSON object.
    """
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise RecipeError(f"parallel.deepspeed_config '{path}': cannot be read ({error}).") from error
    if not isinstance(config, dict):
        raise RecipeError(f"parallel.deepspeed_config '{path}': needed a JSON object, got {type(config).__name__}.")
    return config


def resolve(config: dict[str, Any], recipe: TrainRecipe, world_size: int) -> ResolvedConfig:
    """Merge file and recipe: values of the file win; the recipe replaces "auto" and missing ones.

    Args:
      config: is not changed.
      world_size: ranks, for the sizes of batches.
    Raises: RecipeError: the file contradicts itself, or asks for state that cannot be saved.
    """
    config, table, values = json.loads(json.dumps(config)), _Table(), dict[str, Any]()
    _check_sections(config)
    _check_zero(config)
    _take_batches(config, recipe, world_size, values, table)
    _take_precision(config, recipe, values)
    _take_optimizer(config, recipe, values)
    offloads = _take_checkpointing(config, recipe, values, table)
    if (clip := config.get("gradient_clipping")) not in AUTO:
        values["run.grad_clip"] = clip
    changed = _with(recipe, values)
    before, after = flatten(recipe.model_dump()), flatten(changed.model_dump())
    of_recipe = [(key, str(before[key]), str(after[key])) for key in sorted(values) if before[key] != after[key]]
    table.rows[:0] = of_recipe
    scaler = {key: value for key, value in (config.get("fp16") or {}).items() if value not in AUTO}
    _fill(config, changed, table)
    return ResolvedConfig(config, changed, offloads, scaler, table.lines())


def _check_sections(config: dict[str, Any]) -> None:
    """Remove null sections; raise RecipeError if a section is not an object."""
    for path in SECTIONS:
        *outer, name = path.split(".")
        inside = config
        for section in outer:
            inside = inside.get(section, {})
        if inside.get(name) is None:
            inside.pop(name, None)
        elif not isinstance(inside[name], dict):
            raise RecipeError(f"ds_config.json: {path} is {inside[name]!r}, needed an object, as {{}}.")


def _check_zero(config: dict[str, Any]) -> None:
    zero = config.setdefault("zero_optimization", {})
    if zero.get("stage") not in (1, 2, 3):
        raise RecipeError(
            f"ds_config.json: zero_optimization.stage is {zero.get('stage')!r}, needed 1, 2 or 3. Without sharding use "
            "parallel.strategy 'ddp'."
        )
    for part in ("offload_param", "offload_optimizer"):
        if zero.get(part, {}).get("device") == "nvme":
            raise RecipeError(f"ds_config.json: zero_optimization.{part}.device 'nvme': only 'cpu' can be saved.")


def _take_batches(
    config: dict[str, Any], recipe: TrainRecipe, world_size: int, values: dict[str, Any], table: _Table
) -> None:
    """``train_batch_size`` = ``train_micro_batch_size_per_gpu`` * ``gradient_accumulation_steps`` * ranks.

    Any two give the third; of one, the recipe's batch is the other.
    """
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, parts = (None if config.get(key) in AUTO else config.pop(key) for key in keys)
    for key, value in zip(keys, (total, micro, parts), strict=True):
        config.pop(key, None)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise RecipeError(f'ds_config.json: {key} is {value!r}, needed a whole number from 1, or "auto".')
    if total and micro and parts and total != micro * parts * world_size:
        raise RecipeError(
            f"ds_config.json: train_batch_size {total} is not {micro} train_micro_batch_size_per_gpu * {parts} "
            f'gradient_accumulation_steps * {world_size} ranks. Write "auto" for one of them.'
        )
    if total is None and micro and parts:
        total = micro * parts * world_size
    if total:
        values["run.global_batch"] = total
    images = -(-(total or recipe.run.global_batch) // world_size)  # of the largest rank
    if parts and not micro:
        micro = -(-images // parts)
        if (actual_parts := -(-images // micro)) != parts:
            table.rows.append(
                ("gradient_accumulation_steps", "", f"{actual_parts} of {parts}: a rank has {images} images")
            )
    if micro:
        values["run.microbatch"] = micro


def _take_precision(config: dict[str, Any], recipe: TrainRecipe, values: dict[str, Any]) -> None:
    """The precision of forward and backward; weights always stay float32.

    A file that disables the recipe's precision and enables none means float32.
    """
    asked = [name for name in PRECISIONS if config.get(name, {}).get("enabled") is True]
    autocast = config.get("torch_autocast", {})
    if autocast.get("enabled") is True:
        names = {"bfloat16": "bf16", "float16": "fp16"}
        asked.append(names.get(str(autocast.get("dtype", "bfloat16")).removeprefix("torch."), "bf16"))
    if len(set(asked)) > 1:
        raise RecipeError(f"ds_config.json: {' and '.join(sorted(set(asked)))} are both enabled. Disable one of them.")
    if asked:
        values["run.precision"] = asked[0]
    elif config.get(recipe.run.precision, {}).get("enabled") is False:
        values["run.precision"] = "fp32"


def _take_optimizer(config: dict[str, Any], recipe: TrainRecipe, values: dict[str, Any]) -> None:
    section = config.get("optimizer")
    name = str(section.get("type") if section else recipe.optimizer.name).lower()
    if name not in ADAM_NAMES:
        raise RecipeError(f"optimizer '{name}' with DeepSpeed: needed 'adamw'; others with parallel.strategy 'fsdp'.")
    if section is None:
        return
    values["optimizer.name"] = "adamw"
    params = section.get("params", {})
    for key in ("lr", "betas", "eps", "weight_decay"):
        if params.get(key) not in AUTO:
            values[f"optimizer.{key}"] = params[key]
    if isinstance(values.get("optimizer.betas"), list):  # Adam has two, CAME three
        values["optimizer.betas"] = [*values["optimizer.betas"], *recipe.optimizer.betas[2:]]
    if "optimizer.lr" in values:
        values["optimizer.lr_base_batch"] = 0  # the rate is for this batch


def _take_checkpointing(config: dict[str, Any], recipe: TrainRecipe, values: dict[str, Any], table: _Table) -> bool:
    """Use torch's recomputation; returns whether activations are offloaded to the CPU.

    DeepSpeed's own checkpointing frees inputs that the blocks of a transformer share.
    """
    section = config.pop("activation_checkpointing", None)
    if section is None:
        return False
    if recipe.run.activation_checkpointing == "none":
        values["run.activation_checkpointing"] = "blocks"
    for key, why in UNUSED_CHECKPOINTING.items():
        if section.get(key):
            table.rows.append((f"activation_checkpointing.{key}", "", f"not used: {why}"))
    return bool(section.get("cpu_checkpointing"))


def _with(recipe: TrainRecipe, values: dict[str, Any]) -> TrainRecipe:
    """The recipe with other values; raises RecipeError, naming the invalid key and value."""
    whole = recipe.model_dump()
    for key, value in values.items():
        section, leaf = key.split(".")
        whole[section][leaf] = value
    try:
        return TrainRecipe.model_validate(whole)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise RecipeError(f"ds_config.json: {place} would be {problem['input']!r}: {problem['msg']}.") from error


def _fill(config: dict[str, Any], recipe: TrainRecipe, table: _Table) -> None:
    """Fill in the values of the recipe that DeepSpeed needs."""
    zero, section = config["zero_optimization"], recipe.optimizer
    if any(zero.get(part, {}).get("device", "none") != "none" for part in ("offload_param", "offload_optimizer")):
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    config["gradient_clipping"] = recipe.run.grad_clip
    if adam := config.get("optimizer"):
        of_adam = {"lr": recipe.peak_lr, "betas": section.betas[:2], "eps": section.eps}
        adam["params"] = adam.get("params", {}) | of_adam | {"weight_decay": section.weight_decay}
    if scheduler := config.get("scheduler"):
        table.rows.append(("scheduler", f"schedule.kind {recipe.schedule.kind}", str(scheduler.get("type"))))
        known = {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": recipe.peak_lr,
            "warmup_num_steps": recipe.schedule.warmup_steps,
            "total_num_steps": recipe.run.steps,
        }
        params = scheduler.setdefault("params", {})
        for key, value in list(params.items()):
            if value == "auto" and key not in known:
                raise RecipeError(
                    f'ds_config.json: scheduler.params.{key} is "auto", but the recipe has no such value.'
                )
            params[key] = known[key] if value == "auto" else value
    # Weights stay float32 under autocast, as with every other strategy; 16-bit weights would train differently.
    for name in PRECISIONS:
        config[name] = {"enabled": False}
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
