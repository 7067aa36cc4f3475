"""The keys of a ds_config.json that DeepSpeed knows; others are ignored with a warning."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

# Keys of activation_checkpointing that torch's recomputation does not use, and why.
UNUSED_CHECKPOINTING = {
    "partition_activations": "nothing to partition: a model is not split over ranks within a layer",
    "contiguous_memory_optimization": "torch's allocator does without",
    "synchronize_checkpoint_boundary": "not needed",
    "number_checkpoints": "each block is one",
    "profile": "use torch's profiler",
}
# Sections that DeepSpeed defines outside of ``deepspeed.runtime.constants``.
OTHER_SECTIONS = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "autotuning",
        "checkpoint",
        "comms_logger",
        "compression_training",
        "curriculum_learning",
        "data_efficiency",
        "data_types",
        "elasticity",
        "flops_profiler",
        "hybrid_engine",
        "monitor_config",
        "nebula",
        "sparse_attention",
        "tensorboard",
        "tensor_parallel",
        "timers",
        "torch_autocast",
        "wandb",
        "comet",
        "csv_monitor",
        "zero_optimization",
        "compile",
    }
)


def drop_unknown(config: dict[str, Any]) -> Iterator[str]:
    """Remove keys that DeepSpeed would reject; yields a warning for each, with the nearest known key."""
    from deepspeed.runtime import constants
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    top = {value for name, value in vars(constants).items() if isinstance(value, str) and value.isidentifier()}
    yield from _dropped(config, {name: name for name in top | OTHER_SECTIONS}, "")
    zero = config.get("zero_optimization", {})
    models: list[tuple[str, Any, Any]] = [
        ("zero_optimization.", zero, DeepSpeedZeroConfig),
        ("zero_optimization.offload_param.", zero.get("offload_param"), DeepSpeedZeroOffloadParamConfig),
        ("zero_optimization.offload_optimizer.", zero.get("offload_optimizer"), DeepSpeedZeroOffloadOptimizerConfig),
        ("fp16.", config.get("fp16"), DeepSpeedFP16Config),
        ("bf16.", config.get("bf16"), DeepSpeedBF16Config),
    ]
    if isinstance(checkpointing := config.get("activation_checkpointing"), dict):
        known = {name: name for name in ("cpu_checkpointing", *UNUSED_CHECKPOINTING)}
        yield from _dropped(checkpointing, known, "activation_checkpointing.")
    for prefix, section, model in models:
        if isinstance(section, dict):
            names = {of.alias or name: name for name, of in model.model_fields.items()}
            yield from _dropped(section, names, prefix)


def _dropped(section: dict[str, Any], known: Mapping[str, str], prefix: str) -> Iterator[str]:
    """Remove unknown keys from a section.

    Args:
      known: documented name of each key -> an alias that is accepted too.
    """
    taken = known.keys() | set(known.values())
    for key in [key for key in section if key not in taken]:
        del section[key]
        left = [
            name for name, other in known.items() if not {name, other} & section.keys()
        ]  # a key that is set is not a suggestion
        near = difflib.get_close_matches(key, sorted(left), n=1)
        meant = f" The nearest that it has is '{near[0]}'." if near else ""
        yield f"ds_config.json: DeepSpeed has no key '{prefix}{key}', it is passed over.{meant}"
