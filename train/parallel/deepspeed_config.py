"""A user's ds_config.json and the recipe: values of the file win, the recipe fills in the rest.

``merge`` returns the recipe with the values of the file; everything but DeepSpeed reads that. ``config_for_deepspeed``
is the file with the values of that recipe. Our loop splits batches and accumulates gradients, so DeepSpeed gets single
microbatches.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ...datasets.errors import RecipeError
from ...datasets.recipe import flatten
from ..config import ParallelSection, TrainRecipe

AUTO = (None, "auto")
HEADER = ("key", "recipe", "ds_config.json (takes precedence)")
PRECISIONS = ("bf16", "fp16")
OFFLOADS = ("offload_param", "offload_optimizer")
# Sections that are checked, outer ones first.
SECTIONS = (
    "zero_optimization",
    *(f"zero_optimization.{part}" for part in OFFLOADS),
    *PRECISIONS,
    "torch_autocast",
    "optimizer",
    "optimizer.params",
    "scheduler",
    "scheduler.params",
    "activation_checkpointing",
)
# Keys of activation_checkpointing that torch's recomputation has no use for.
UNUSED = (
    "partition_activations",
    "contiguous_memory_optimization",
    "synchronize_checkpoint_boundary",
    "number_checkpoints",
    "profile",
)
# Sections that DeepSpeed names only where it reads them, not in ``deepspeed.runtime.constants``.
MORE_SECTIONS = (
    *("activation_checkpointing", "aio", "autotuning", "comet", "comms_logger", "compile", "compression_training"),
    *("csv_monitor", "curriculum_learning", "data_efficiency", "elasticity", "flops_profiler", "hybrid_engine"),
    *("monitor_config", "nebula", "sparse_attention", "tensor_parallel", "tensorboard", "timers", "torch_autocast"),
    *("wandb", "zero_optimization"),
)

Row = tuple[str, str, str]  # of the table of differences: key, value of the recipe, value of the file


def read_config(path: str) -> dict[str, Any]:
    """Read a ds_config.json; a section that is null is left out.

    Raises: RecipeError: it cannot be read, is not a JSON object, has a section that is none, or asks for state that
      cannot be saved.
    """
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise RecipeError(f"parallel.deepspeed_config '{path}': cannot be read ({error}).") from error
    if not isinstance(config, dict):
        raise RecipeError(f"parallel.deepspeed_config '{path}': expected a JSON object, got {type(config).__name__}.")
    for section in SECTIONS:
        *outer, name = section.split(".")
        inside = config
        for key in outer:
            inside = inside.get(key, {})
        if inside.get(name) is None:
            inside.pop(name, None)
        elif not isinstance(inside[name], dict):
            raise RecipeError(f"ds_config.json: {section} is {inside[name]!r}, expected an object, as {{}}.")
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


def may_compile(section: ParallelSection) -> bool:
    """Whether blocks can go through torch.compile: ZeRO-3 gathers weights by hooks within them."""
    path = section.deepspeed_config
    return not path or read_config(path)["zero_optimization"]["stage"] < 3


def offloads_checkpoints(section: ParallelSection) -> bool:
    """Whether the inputs of checkpointed blocks wait in the memory of the CPU (``cpu_checkpointing``)."""
    path = section.deepspeed_config
    return bool(path and read_config(path).get("activation_checkpointing", {}).get("cpu_checkpointing"))


# ---------------------------------------------------------------------------------------------- the recipe by the file


def merge(config: Mapping[str, Any], recipe: TrainRecipe, world_size: int) -> tuple[TrainRecipe, list[str]]:
    """The recipe with the values of the file, and a table of the differences, one line a row.

    Args:
      world_size: ranks, for the sizes of batches.
    Raises: RecipeError: the file contradicts itself, or asks for state that cannot be saved.
    """
    values, rows = dict[str, Any](), list[Row]()
    _merge_batches(config, recipe, world_size, values, rows)
    _merge_precision(config, recipe, values)
    _merge_optimizer(config, recipe, values)
    if (section := config.get("activation_checkpointing")) is not None:
        if recipe.run.activation_checkpointing == "none":
            values["run.activation_checkpointing"] = "blocks"
        why = "not used: torch recomputes the blocks"
        rows += [(f"activation_checkpointing.{key}", "", why) for key in UNUSED if section.get(key)]
    if (clip := config.get("gradient_clipping")) not in AUTO:
        values["run.grad_clip"] = clip
    merged = _with(recipe, values)
    if scheduler := config.get("scheduler"):
        rows.append(("scheduler", f"schedule.kind {merged.schedule.kind}", str(scheduler.get("type"))))
    before, after = flatten(recipe.model_dump()), flatten(merged.model_dump())
    changed = [(key, str(before[key]), str(after[key])) for key in sorted(values) if before[key] != after[key]]
    return merged, _table([*changed, *rows])


def _table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[column]) for row in [HEADER, *rows]) for column in range(2)]
    return [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in [HEADER, *rows]]


def _merge_batches(
    config: Mapping[str, Any], recipe: TrainRecipe, world_size: int, values: dict[str, Any], rows: list[Row]
) -> None:
    """``train_batch_size`` = ``train_micro_batch_size_per_gpu`` * ``gradient_accumulation_steps`` * ranks.

    Any two give the third; of one, the recipe's batch is the other.
    """
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, parts = (None if config.get(key) in AUTO else config[key] for key in keys)
    for key, value in zip(keys, (total, micro, parts), strict=True):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise RecipeError(f'ds_config.json: {key} is {value!r}, expected a whole number from 1, or "auto".')
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
            rows.append(("gradient_accumulation_steps", "", f"{actual_parts} of {parts}: a rank has {images} images"))
    if micro:
        values["run.microbatch"] = micro


def _merge_precision(config: Mapping[str, Any], recipe: TrainRecipe, values: dict[str, Any]) -> None:
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
        values["run.precision"] = enabled.pop()
    elif config.get(recipe.run.precision, {}).get("enabled") is False:
        values["run.precision"] = "fp32"


def _merge_optimizer(config: Mapping[str, Any], recipe: TrainRecipe, values: dict[str, Any]) -> None:
    section = config.get("optimizer")
    name = str(section.get("type") if section else recipe.optimizer.name).lower()
    if name not in ("adam", "adamw"):  # DeepSpeed's names of optimizers whose state is AdamW's
        raise RecipeError(f"optimizer '{name}' with DeepSpeed: expected 'adamw'; others with parallel.strategy 'fsdp'.")
    if section is None:
        return
    params = section.get("params", {})
    keys = [key for key in ("lr", "betas", "eps", "weight_decay") if params.get(key) not in AUTO]
    values |= {"optimizer.name": "adamw"} | {f"optimizer.{key}": params[key] for key in keys}
    if isinstance(values.get("optimizer.betas"), list):  # Adam has two, CAME three
        values["optimizer.betas"] = [*values["optimizer.betas"], *recipe.optimizer.betas[2:]]
    if "lr" in keys:
        values["optimizer.lr_base_batch"] = 0  # the rate is for this batch


def _with(recipe: TrainRecipe, values: Mapping[str, Any]) -> TrainRecipe:
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


# ---------------------------------------------------------------------------------------------- the file by the recipe


def config_for_deepspeed(file: Mapping[str, Any], recipe: TrainRecipe, autocast: torch.dtype | None) -> dict[str, Any]:
    """The file with the recipe's values, for DeepSpeed.

    Args:
      recipe: of ``merge``.
      autocast: dtype of forward and backward; None: float32.
    Raises: RecipeError: "auto" of the scheduler has no value in the recipe.
    """
    section = recipe.optimizer
    config: dict[str, Any] = json.loads(json.dumps(file))
    zero = config["zero_optimization"]
    if any(zero.get(part, {}).get("device", "none") != "none" for part in OFFLOADS):
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    if adam := config.get("optimizer"):
        values = {"lr": recipe.peak_lr, "betas": section.betas[:2], "eps": section.eps}
        adam["params"] = adam.get("params", {}) | values | {"weight_decay": section.weight_decay}
    if scheduler := config.get("scheduler"):
        known = {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": recipe.peak_lr,
            "warmup_num_steps": recipe.schedule.warmup_steps,
            "total_num_steps": recipe.run.steps,
        }
        params = scheduler.setdefault("params", {})
        if missing := [key for key, value in params.items() if value == "auto" and key not in known]:
            raise RecipeError(
                f'ds_config.json: scheduler.params.{missing[0]} is "auto", but the recipe has no such value.'
            )
        params |= {key: known[key] for key, value in params.items() if value == "auto"}
    # Weights stay float32 under autocast, as with every other strategy; 16-bit weights would train differently.
    config |= {name: {"enabled": False} for name in PRECISIONS}
    cast = config.get("torch_autocast", {}) | {"enabled": autocast is not None}
    if autocast is not None:
        # By default gradients of linear layers are summed over the ranks in 16 bits, unlike in every other strategy.
        cast = {"lower_precision_safe_modules": []} | cast | {"dtype": str(autocast).removeprefix("torch.")}
    config.pop("train_batch_size", None)
    config.pop("activation_checkpointing", None)  # DeepSpeed's frees inputs that the blocks of a transformer share
    return config | {
        "gradient_clipping": recipe.run.grad_clip,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "torch_autocast": cast,
    }


def drop_unknown(config: dict[str, Any]) -> Iterator[str]:
    """Remove keys that DeepSpeed does not have, and may reject; yields a warning for each, with the nearest key."""
    from deepspeed.runtime import constants
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config as zero

    top = {value for value in vars(constants).values() if isinstance(value, str) and value.isidentifier()}
    section = config.get("zero_optimization", {})
    known: list[tuple[str, Any, Any]] = [
        ("", config, top.union(MORE_SECTIONS)),
        ("zero_optimization.", section, zero.DeepSpeedZeroConfig),
        ("zero_optimization.offload_param.", section.get(OFFLOADS[0]), zero.DeepSpeedZeroOffloadParamConfig),
        ("zero_optimization.offload_optimizer.", section.get(OFFLOADS[1]), zero.DeepSpeedZeroOffloadOptimizerConfig),
        ("fp16.", config.get("fp16"), DeepSpeedFP16Config),
        ("bf16.", config.get("bf16"), DeepSpeedBF16Config),
        ("activation_checkpointing.", config.get("activation_checkpointing"), {"cpu_checkpointing", *UNUSED}),
    ]
    for prefix, keys, model in known:
        aliases = {name: name for name in model} if isinstance(model, set) else _aliases(model)
        for key in [key for key in keys or () if key not in {*aliases, *aliases.values()}]:
            del keys[key]
            # A key that is set is not a suggestion.
            free = sorted(name for name, alias in aliases.items() if not {name, alias} & keys.keys())
            near = difflib.get_close_matches(key, free, n=1)
            meant = f" The nearest that it has is '{near[0]}'." if near else ""
            yield f"ds_config.json: DeepSpeed has no key '{prefix}{key}', which is ignored.{meant}"


def _aliases(model: Any) -> dict[str, str]:
    """Documented name of each key of a section -> another name that is accepted too."""
    return {field.alias or name: name for name, field in model.model_fields.items()}
