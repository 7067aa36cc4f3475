"""The strategies that a training can use on one GPU or several, as ``tracing.py`` runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...train.config import ParallelSection, TrainRecipe
from ...train.parallel.deepspeed_config import merge, read_config
from .scaling import GPUS_PER_MACHINE
from .step_memory import EMA, GRADIENTS, OPTIMIZER, PARAMETERS, STATES, Strategy, Traced

SINGLE = Strategy("single")
TORCH_SECTIONS = {
    "ddp": ParallelSection(strategy="ddp"),
    "fsdp": ParallelSection(strategy="fsdp"),
    "fsdp, gradients": ParallelSection(strategy="fsdp", shard="gradient"),
}
# What each rank has a part of; the rest of a rank's memory does not depend on the number of ranks.
SHARDED = {
    **dict.fromkeys(("fsdp", "fsdp, gradients", "hsdp", "zero-3"), STATES),
    **dict.fromkeys(("zero-1", "zero-2"), (OPTIMIZER, EMA)),
}
OFFLOADED = ", offloaded"


def strategies(recipe: TrainRecipe, num_gpus: int) -> list[Strategy]:
    """What has to be traced for every strategy on so many GPUs.

    Of one machine, HSDP is FSDP. ZeRO is traced where the recipe has a ds_config.json: each trace takes as long as all
    others.
    """
    known = [SINGLE]
    if num_gpus > 1:
        known += [Strategy(name, section, num_gpus) for name, section in TORCH_SECTIONS.items()]
        replicas, rest = divmod(num_gpus, GPUS_PER_MACHINE)
        if replicas > 1 and not rest:
            known.append(Strategy("hsdp", ParallelSection(strategy="hsdp", replicas=replicas), num_gpus))
    if recipe.parallel.deepspeed_config:
        kept = {name: value for name, value in zero_section(recipe).items() if not name.startswith("offload")}
        known += [
            Strategy(f"zero-{stage}", ParallelSection(), num_gpus, zero=kept | {"stage": stage}) for stage in (1, 2, 3)
        ]
    of_many = recipe_strategy(recipe, GPUS_PER_MACHINE).removesuffix(OFFLOADED)
    of_many = "fsdp" if of_many == "hsdp" else of_many
    if of_many not in {one.name for one in known}:  # the table of scaling begins with one machine
        known.append(Strategy(of_many, TORCH_SECTIONS[of_many], GPUS_PER_MACHINE))
    return known


def strategy_rows(traced: Mapping[str, Traced], num_gpus: int) -> dict[str, tuple[Traced, int]]:
    """Memory of each strategy on a GPU, and the bytes that each GPU has on the host.

    What is offloaded is taken out of the trace of the same strategy, and for ZeRO the update, which the host computes.
    """
    rows: dict[str, tuple[Traced, int]] = {}
    for name, memory in traced.items():
        states = memory.whole.states
        if num_gpus == 1 and (name == "single" or name in TORCH_SECTIONS):
            rows |= {name: (memory, 0)} if name == "single" else {}
        elif name != "single":
            if num_gpus > 1:
                rows[name] = memory, 0
            if name == "fsdp":
                kept = states[PARAMETERS] + states[OPTIMIZER] + states[EMA] + states[GRADIENTS] // num_gpus
                rows[name + OFFLOADED] = memory.offloaded(STATES), kept
            if name.startswith("zero"):
                rows[name + OFFLOADED] = memory.offloaded((OPTIMIZER, EMA)), states[OPTIMIZER] + states[EMA]
    if "fsdp" in rows and "hsdp" not in rows and num_gpus <= GPUS_PER_MACHINE:
        rows["hsdp"] = rows["fsdp"]
    return rows


def recipe_memory(recipe: TrainRecipe, traced: Mapping[str, Traced], num_gpus: int, ranks: int) -> tuple[str, Traced]:
    """The recipe's strategy for a number of ranks, and its memory, from traces for another number of GPUs."""
    name = recipe_strategy(recipe, ranks)
    if name == "single":
        return name, traced[name]
    plain = name.removesuffix(OFFLOADED)
    memory = traced[plain] if plain in traced else traced["fsdp"]  # HSDP of one machine is FSDP
    if plain != name:
        memory = memory.offloaded(STATES if plain == "fsdp" else (OPTIMIZER, EMA))
    of_trace = GPUS_PER_MACHINE if num_gpus == 1 and not plain.startswith("zero") else num_gpus
    if name == "hsdp":
        of_trace, ranks = min(of_trace, GPUS_PER_MACHINE), min(ranks, GPUS_PER_MACHINE)
    shares = dict.fromkeys(SHARDED.get(plain, ()), of_trace / ranks)
    return name, memory.scaled(shares)


def recipe_strategy(recipe: TrainRecipe, ranks: int) -> str:
    """The name of the recipe's strategy for so many ranks."""
    section = recipe.parallel
    if section.deepspeed_config:
        zero = zero_section(recipe)
        offloaded = zero.get("offload_optimizer", {}).get("device", "none") != "none"
        return f"zero-{zero['stage']}{OFFLOADED if offloaded else ''}"
    if ranks == 1:
        return "single"
    if section.strategy == "fsdp":
        return "fsdp, offloaded" if section.cpu_offload else "fsdp" if section.shard == "full" else "fsdp, gradients"
    return "hsdp" if section.strategy == "hsdp" else "ddp"


def zero_section(recipe: TrainRecipe) -> dict[str, Any]:
    """Section zero_optimization of the recipe's ds_config.json; empty without one."""
    path = recipe.parallel.deepspeed_config
    return read_config(path)["zero_optimization"] if path else {}


def with_ds_config(recipe: TrainRecipe, num_gpus: int) -> tuple[TrainRecipe, list[str]]:
    """The recipe with the values of its ds_config.json, and lines that list the differences.

    Needs neither DeepSpeed nor a GPU.

    Raises: RecipeError: the file cannot be read, or contradicts itself.
    """
    if not (path := recipe.parallel.deepspeed_config):
        return recipe, []
    return merge(read_config(path), recipe, num_gpus)
