"""Choose the parallel strategy of a run."""

from __future__ import annotations

from ...datasets.errors import RecipeError
from ..config import ParallelSection
from .ranks import Ranks


def choose_strategy(section: ParallelSection, ranks: Ranks) -> str:
    """The strategy of a run; "auto": "single" for one rank, "ddp" for several, "deepspeed" if its config is given.

    Raises: RecipeError: the strategy does not fit the number of ranks.
    """
    asked, world_size = section.strategy, ranks.world_size
    if asked == "auto":
        asked = "deepspeed" if section.deepspeed_config else "single" if world_size == 1 else "ddp"
    if asked == "single" and world_size > 1:
        raise RecipeError(f"parallel.strategy 'single': {world_size} ranks were started. Use 'ddp', 'fsdp' or 'hsdp'.")
    if asked in ("ddp", "fsdp", "hsdp") and world_size == 1:
        raise RecipeError(
            f"parallel.strategy '{asked}': there is only one rank. Start more, for example '"
            "torchrun --nproc-per-node 8 --no-python -- leandit train ...', or use 'auto'."
        )
    if (asked == "deepspeed") != bool(section.deepspeed_config):
        raise RecipeError(
            f"parallel.strategy '{asked}' with parallel.deepspeed_config '{section.deepspeed_config}': expected both, "
            "'deepspeed' and the path of a ds_config.json, or neither."
        )
    if section.cpu_offload and asked not in ("fsdp", "hsdp"):
        raise RecipeError(
            f"parallel.cpu_offload: strategy '{asked}' keeps everything on the GPU. Use 'fsdp' or 'hsdp', or a "
            "ds_config.json that offloads."
        )
    if asked == "hsdp":
        num_replicas(section, ranks)
    return asked


def num_replicas(section: ParallelSection, ranks: Ranks) -> int:
    """Groups of ranks that each hold the whole model.

    Raises: RecipeError: the ranks cannot be split into that many groups.
    """
    replicas = section.replicas or ranks.num_machines
    if ranks.world_size % replicas or not 1 < replicas < ranks.world_size:
        raise RecipeError(
            f"parallel.replicas {section.replicas}: {ranks.world_size} ranks on {ranks.num_machines} machines cannot "
            f"form {replicas} equal groups of two or more ranks. Set parallel.replicas, or use 'fsdp'."
        )
    return replicas
