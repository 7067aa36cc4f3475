"""What one GPU holds under each strategy: a share of every category of memory, and buffers.

``benchmarks/planner.py`` measures DDP, FSDP and ZeRO on two processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...datasets.errors import RecipeError
from ...train.config import TrainRecipe
from ...train.parallel.deepspeed_config import read_config, resolve
from .memory_tracker import EMA, GRADIENTS, OPTIMIZER, PARAMETERS
from .step_memory import AT_UPDATE, MOST_GRADIENTS, REDUCED, StepMemory, StepTrace

# DeepSpeed's defaults, in elements.
DEEPSPEED_ELEMENTS = {
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_max_live_parameters": 1e9,
}
GPUS_PER_MACHINE = 8
WHOLE = {PARAMETERS: 1.0, GRADIENTS: 1.0, OPTIMIZER: 1.0, EMA: 1.0}


@dataclass(frozen=True)
class Strategy:
    """Memory of one GPU under a strategy.

    Args:
      shares: of each category.
      buffers: bytes for communication.
      host: bytes of host memory for each GPU.
    """

    name: str
    shares: Mapping[str, float]
    buffers: float
    host: float = 0.0


def strategies(
    memory: StepMemory | StepTrace, num_gpus: int, zero: Mapping[str, Any] | None = None, *, accumulates: bool = False
) -> list[Strategy]:
    """Every strategy, for the memory of a step.

    Sources: PyTorch's documentation of DistributedDataParallel and fully_shard; Rajbhandari et al. 2020 (ZeRO),
    figure 1; DeepSpeed's documentation of zero_optimization; and measurements (``benchmarks/planner.py``).

    - DDP: gradients are views of its buckets, which stay allocated from step to step.
    - FSDP: two blocks are gathered, the current one and the next, which arrives in a buffer; so are the parameters
      outside of blocks.
    - DeepSpeed: float32 weights and gradients, a float32 copy of each rank's part in the optimizer, one bucket
      allocated in full, and copies of its part of the gradients at the update.
    - ZeRO-2: holds new gradients up to a bucket, then its part of all of them. The last rank's part comes first, so
      the figures are that rank's.
    - ZeRO-3: gathers ahead into a buffer and copies from there. It frees nothing below its limit of live parameters.

    Args:
      zero: section zero_optimization of a ds_config.json; missing keys take DeepSpeed's defaults.
      accumulates: the step has several microbatches.
    """
    n, m = num_gpus, min(num_gpus, GPUS_PER_MACHINE)
    states, block = memory.states, memory.block_bytes
    gathered = 3 * block + memory.other_bytes  # the current block, the next one, and the buffer that it arrives in
    sharded = dict.fromkeys(WHOLE, 1 / n)
    in_machine = dict.fromkeys(WHOLE, 1 / m)
    on_host = dict.fromkeys(WHOLE, 0.0)
    return [
        Strategy("single", WHOLE, 0.0),
        Strategy("ddp", WHOLE | {GRADIENTS: 0.0}, states[GRADIENTS]),
        Strategy("fsdp", sharded, gathered),
        Strategy("fsdp, offloaded", on_host, gathered, sum(states.values()) / n),
        Strategy("fsdp, gradients", sharded, states[PARAMETERS] + block),
        Strategy("hsdp", in_machine, gathered),
        *_zero_strategies(memory, n, zero or {}, accumulates=accumulates),
    ]


def _zero_strategies(
    memory: StepMemory | StepTrace, n: int, zero: Mapping[str, Any], *, accumulates: bool
) -> list[Strategy]:
    bucket, ahead, max_live = (4 * _elements(zero, key) for key in DEEPSPEED_ELEMENTS)  # float32
    states, block, other = memory.states, memory.block_bytes, memory.other_bytes
    params, trained = states[PARAMETERS], states[GRADIENTS]  # a gradient is as large as its parameter
    adam = 1 / n * (1 + trained / max(1, states[OPTIMIZER]))  # and a float32 copy of this rank's part of the weights
    zero1 = WHOLE | {OPTIMIZER: adam, EMA: 1 / n, AT_UPDATE: 3 / n}
    in_bucket = {MOST_GRADIENTS: min(1.0, bucket / max(1, states[GRADIENTS])), REDUCED: 1 / n}
    zero2 = zero1 | in_bucket | {AT_UPDATE: (1 if accumulates else 2) / n}
    zero3 = zero2 | {PARAMETERS: 1 / n, GRADIENTS: 0.0, AT_UPDATE: 0.0}
    live = min(params, max(max_live, 2 * block + other))
    last = params % ahead if live == params else ahead  # the parameters gathered last exist twice
    buffers3 = bucket + trained / n + live + last  # the gradients of its part stay
    bucket *= 1 + bool(zero.get("overlap_comm"))
    earlier = states[GRADIENTS] / n * accumulates  # its part of the gradients of earlier microbatches
    off = {OPTIMIZER: 0.0, EMA: 0.0, AT_UPDATE: 0.0, REDUCED: 0.0}
    moved = (states[OPTIMIZER] + trained + states[EMA]) / n
    return [
        Strategy("zero-1", zero1, bucket),
        Strategy("zero-1, offloaded", zero1 | off, bucket, moved),
        Strategy("zero-2", zero2, bucket + earlier),
        Strategy("zero-2, offloaded", zero2 | off, bucket, moved),
        Strategy("zero-3", zero3, buffers3),
        Strategy("zero-3, offloaded", zero3 | off, buffers3, moved),
    ]


def _elements(zero: Mapping[str, Any], key: str) -> float:
    """Elements of a buffer; DeepSpeed's default where the key is "auto" or missing.

    Raises: RecipeError: not a number.
    """
    value = zero.get(key, "auto")
    if value == "auto":
        return DEEPSPEED_ELEMENTS[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise RecipeError(f"ds_config.json: zero_optimization.{key} is {value!r}, needed a number of elements.")
    return value


def zero_section(recipe: TrainRecipe) -> dict[str, Any]:
    """Section zero_optimization of the recipe's ds_config.json; empty without one."""
    path = recipe.parallel.deepspeed_config
    return read_config(path).get("zero_optimization", {}) if path else {}


def keeps_on_host(recipe: TrainRecipe) -> bool:
    """Whether the ds_config.json keeps the inputs of checkpointed blocks in host memory (``cpu_checkpointing``)."""
    path = recipe.parallel.deepspeed_config
    section = read_config(path).get("activation_checkpointing") if path else None
    return bool(section and section.get("cpu_checkpointing"))


def with_ds_config(recipe: TrainRecipe, num_gpus: int) -> tuple[TrainRecipe, list[str]]:
    """The recipe with the values of its ds_config.json, and lines that list the differences.

    Needs neither DeepSpeed nor a GPU.

    Raises: RecipeError: the file cannot be read, or contradicts itself.
    """
    if not (path := recipe.parallel.deepspeed_config):
        return recipe, []
    resolved = resolve(read_config(path), recipe, num_gpus)
    return resolved.recipe, resolved.notes
