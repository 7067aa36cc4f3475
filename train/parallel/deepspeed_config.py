"""A user's ds_config.json and the recipe: values of the file win, the recipe fills in the rest.

``merge`` returns the recipe with the values of the file; everything but DeepSpeed reads that. ``config_for_deepspeed``
is the file with the values of that recipe. The training loop splits batches and accumulates gradients, so DeepSpeed
gets single microbatches.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ...errors import RecipeError
from ...recipe import flatten
from ..config import ParallelSection, TrainRecipe

AUTO = (None, "auto")
PRECISIONS = ("bf16", "fp16")
ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")
SCHEDULES = {"WarmupLR": "constant", "WarmupCosineLR": "cosine"}  # DeepSpeed's name -> schedule.kind
WARMUP_KEYS = {"warmup_max_lr": "optimizer.lr", "warmup_num_steps": "schedule.warmup_steps"}
OFFLOADS = ("offload_param", "offload_optimizer")
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SECTIONS = (  # that are read here
    *("zero_optimization.offload_param", "zero_optimization.offload_optimizer", "optimizer.params", "scheduler.params"),
    *("bf16", "fp16", "torch_autocast", "activation_checkpointing"),
)
Row = tuple[str, str, str]
HEADER: Row = ("key", "recipe", "ds_config.json (takes precedence)")


def read_config(path: str) -> dict[str, Any]:
    """Read a ds_config.json; keys that are null are left out.

    Raises: RecipeError: it is not a JSON object, a section is not an object, or its state cannot be saved.
    """
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise RecipeError(f"parallel.deepspeed_config '{path}': cannot be read ({error}).") from error
    if not isinstance(config, dict):
        raise RecipeError(f"parallel.deepspeed_config '{path}': expected a JSON object, got {type(config).__name__}.")
    config = _without_nulls(config)
    for path_of_section in SECTIONS:
        inside, keys = config, path_of_section.split(".")
        for number, key in enumerate(keys, 1):
            if not isinstance(inside := inside.get(key, {}), dict):
                where = ".".join(keys[:number])
                raise RecipeError(f"ds_config.json: {where} is {inside!r}, expected an object, such as {{}}.")
    zero = config.setdefault("zero_optimization", {})
    if zero.get("stage") not in (1, 2, 3):
        raise RecipeError(
            f"ds_config.json: zero_optimization.stage is {zero.get('stage')!r}, expected 1, 2 or 3. Without sharding "
            "use parallel.strategy 'ddp'."
        )
    for part in OFFLOADS:
        if zero.get(part, {}).get("device") == "nvme":
            raise RecipeError(f"ds_config.json: zero_optimization.{part}.device 'nvme': only 'cpu' can be saved.")
    return config


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}


def may_compile(section: ParallelSection) -> bool:
    """Whether blocks can go through torch.compile: ZeRO-3 gathers weights by hooks within them."""
    path = section.deepspeed_config
    return not path or read_config(path)["zero_optimization"]["stage"] < 3


def merge(config: Mapping[str, Any], recipe: TrainRecipe, world_size: int) -> tuple[TrainRecipe, list[str]]:
    """The recipe with the values of the file, and a table of the differences, one line a row.

    Args:
      world_size: ranks, for the sizes of batches.
    Raises: RecipeError: the file contradicts itself, or asks for state that cannot be saved.
    """
    rows = list[Row]()
    values = _batches(config, recipe, world_size, rows) | _precision(config, recipe)
    values |= _optimizer(config, recipe) | _schedule(config)
    if "activation_checkpointing" in config and recipe.run.activation_checkpointing == "none":
        values["run.activation_checkpointing"] = "blocks"
    for section, keys, used, why in (
        ("activation_checkpointing", config.get("activation_checkpointing", {}), (), "torch recomputes the blocks"),
        ("fp16", config.get("fp16", {}), ("enabled",), "the loss scale is as without DeepSpeed"),
        ("optimizer.params", config.get("optimizer", {}).get("params", {}), ADAM_KEYS, "it is torch's AdamW"),
        (
            "scheduler.params",
            config.get("scheduler", {}).get("params", {}),
            WARMUP_KEYS,
            "the warm-up is linear from 0",
        ),
    ):
        off = ("auto",) if section == "optimizer.params" else ("auto", False)  # adam_w_mode false is another optimizer
        unused = [key for key, value in keys.items() if value not in off and key not in used]
        rows += [(f"{section}.{key}", "", f"not used: {why}") for key in unused]
    if (clip := config.get("gradient_clipping")) not in AUTO:
        values["run.grad_clip"] = clip
    merged = _with(recipe, values)
    before, after = flatten(recipe.model_dump()), flatten(merged.model_dump())
    rows = [(key, str(before[key]), str(after[key])) for key in sorted(values) if before[key] != after[key]] + rows
    widths = [max(len(row[column]) for row in [HEADER, *rows]) for column in range(2)]
    table = [f"{key:<{widths[0]}}  {ours:<{widths[1]}}  {theirs}".rstrip() for key, ours, theirs in [HEADER, *rows]]
    return merged, table if rows else []


def _batches(config: Mapping[str, Any], recipe: TrainRecipe, world_size: int, rows: list[Row]) -> dict[str, Any]:
    """``train_batch_size`` = ``train_micro_batch_size_per_gpu`` * ``gradient_accumulation_steps`` * ranks.

    Any two give the third; of one, the recipe's batch is the other.
    """
    total, micro, parts = (None if config.get(key) in AUTO else config[key] for key in BATCH_KEYS)
    for key, value in zip(BATCH_KEYS, (total, micro, parts), strict=True):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise RecipeError(f'ds_config.json: {key} is {value!r}, expected a whole number of at least 1, or "auto".')
    if total and micro and parts and total != micro * parts * world_size:
        raise RecipeError(
            f"ds_config.json: train_batch_size {total} is not {micro} train_micro_batch_size_per_gpu * {parts} "
            f'gradient_accumulation_steps * {world_size} ranks. Write "auto" for one of them.'
        )
    if total is None and micro and parts:
        total = micro * parts * world_size
    images = -(-(total or recipe.run.global_batch) // world_size)  # of the largest rank
    if parts and not micro:
        micro = -(-images // parts)
        if (actual_parts := -(-images // micro)) != parts:
            rows.append(("gradient_accumulation_steps", "", f"{actual_parts} of {parts}: a rank has {images} images"))
    return {key: value for key, value in (("run.global_batch", total), ("run.microbatch", micro)) if value}


def _precision(config: Mapping[str, Any], recipe: TrainRecipe) -> dict[str, Any]:
    """The precision of forward and backward; weights always stay float32.

    A file that disables the recipe's precision and enables none means float32.
    """
    enabled = {name for name in PRECISIONS if config.get(name, {}).get("enabled") is True}
    autocast = config.get("torch_autocast", {})
    if autocast.get("enabled") is True:
        enabled.add("fp16" if str(autocast.get("dtype")).removeprefix("torch.") == "float16" else "bf16")
    if len(enabled) > 1:
        raise RecipeError(f"ds_config.json: {' and '.join(sorted(enabled))} are both enabled. Disable one of them.")
    if enabled:
        return {"run.precision": enabled.pop()}
    return {"run.precision": "fp32"} if config.get(recipe.run.precision, {}).get("enabled") is False else {}


def _optimizer(config: Mapping[str, Any], recipe: TrainRecipe) -> dict[str, Any]:
    section = config.get("optimizer")
    name = str(section.get("type") if section else recipe.optimizer.name).lower()
    if name not in ("adam", "adamw"):  # DeepSpeed's names of optimizers whose state is AdamW's
        raise RecipeError(f"optimizer '{name}' with DeepSpeed: expected 'adamw'; others with parallel.strategy 'fsdp'.")
    if section is None:
        return {}
    params = section.get("params", {})
    given = {key: params[key] for key in ADAM_KEYS if params.get(key) not in AUTO}
    if isinstance(given.get("betas"), list):  # Adam has two, CAME three
        given["betas"] = [*given["betas"], *recipe.optimizer.betas[2:]]
    if "lr" in given:
        given["lr_base_batch"] = 0  # the rate is for this batch
    return {"optimizer.name": "adamw"} | {f"optimizer.{key}": value for key, value in given.items()}


def _schedule(config: Mapping[str, Any]) -> dict[str, Any]:
    if not (section := config.get("scheduler")):
        return {}
    if (kind := SCHEDULES.get(section.get("type"))) is None:
        raise RecipeError(
            f"ds_config.json: scheduler.type is {section.get('type')!r}, expected {' or '.join(SCHEDULES)}. Remove the "
            "section, and set schedule.kind."
        )
    params = section.get("params", {})
    given = {key: params[name] for name, key in WARMUP_KEYS.items() if params.get(name) not in AUTO}
    if "optimizer.lr" in given:
        given["optimizer.lr_base_batch"] = 0
    return {"schedule.kind": kind} | given


def _with(recipe: TrainRecipe, values: Mapping[str, Any]) -> TrainRecipe:
    """The recipe with other values. Raises: RecipeError: names the invalid key and value."""
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


def config_for_deepspeed(file: Mapping[str, Any], recipe: TrainRecipe, autocast: torch.dtype | None) -> dict[str, Any]:
    """The file with the recipe's values, for DeepSpeed.

    Args:
      recipe: as ``merge`` returns it.
      autocast: dtype of forward and backward; None: float32.
    """
    config: dict[str, Any] = json.loads(json.dumps(file))
    if any(config["zero_optimization"].get(part, {}).get("device", "none") != "none" for part in OFFLOADS):
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    # Weights stay float32 under autocast, as with every other strategy; 16-bit weights would train differently.
    config |= {name: {"enabled": False} for name in PRECISIONS}
    cast = config.get("torch_autocast", {}) | {"enabled": autocast is not None}
    if autocast is not None:
        # By default gradients of linear layers are summed over the ranks in 16 bits, unlike in every other strategy.
        cast = {"lower_precision_safe_modules": []} | cast | {"dtype": str(autocast).removeprefix("torch.")}
    # DeepSpeed's checkpointing frees inputs that the blocks of a transformer share; optimizer and schedule are ours.
    for key in ("activation_checkpointing", "train_batch_size", "optimizer", "scheduler"):
        config.pop(key, None)
    return config | {
        "gradient_clipping": recipe.run.grad_clip,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "torch_autocast": cast,
    }


def drop_unknown(config: dict[str, Any]) -> Iterator[str]:
    """Remove the keys, outside of optional sections, that DeepSpeed lacks and may reject; yields a warning for each."""
    from deepspeed.runtime import constants
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    top = {value for value in vars(constants).values() if isinstance(value, str)}
    top |= {key for key, value in config.items() if isinstance(value, dict)}  # DeepSpeed names few of its sections
    fields = DeepSpeedZeroConfig.model_fields
    zero = {field.alias or key for key, field in fields.items()}  # the documented names
    sections = (("", config, top, top), ("zero_optimization.", config["zero_optimization"], zero, zero | {*fields}))
    for prefix, keys, documented, known in sections:
        for key in sorted(keys.keys() - known):
            del keys[key]
            near = difflib.get_close_matches(key, sorted(documented - keys.keys()), n=1)  # one that is set is not meant
            meant = f" Did you mean '{near[0]}'?" if near else ""
            yield f"ds_config.json: DeepSpeed has no key '{prefix}{key}', which is ignored.{meant}"
