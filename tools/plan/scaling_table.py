"""A training on 1 to 512 GPUs: time, cost, and from where on more GPUs bring nothing. Predicted by ``scaling.py``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...datasets.units import readable_time
from ...train.config import TrainRecipe
from ..terminal.text import aligned
from .memory_tracker import GRADIENTS, PARAMETERS
from .scaling import Cluster, StepTime, StepWork, step_time
from .step_memory import StepMemory
from .strategies import zero_section
from .workload import TrainingWorkload

COUNTS = (1, 8, 16, 32, 64, 128, 256, 512)
WORTH = math.log2(1.5)  # twice as many GPUs are worth it if they are at least 1.5 times as fast
NOTHING = 1.1  # more GPUs bring nothing if none of them is this much faster

Fits = Callable[[int, int], tuple[str, int]]


def recipe_strategy(recipe: TrainRecipe, ranks: int) -> str:
    """The recipe's strategy for so many ranks, by its name in ``strategies.py``."""
    section = recipe.parallel
    if section.deepspeed_config:
        zero = zero_section(recipe)
        offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
        return f"zero-{zero['stage']}{', offloaded' if offloaded else ''}"
    if ranks == 1:
        return "single"
    if section.strategy == "fsdp":
        return "fsdp, offloaded" if section.cpu_offload else "fsdp" if section.shard == "full" else "fsdp, gradients"
    return "hsdp" if section.strategy == "hsdp" else "ddp"


def step_work(workload: TrainingWorkload, memory: StepMemory, launches: tuple[int, int]) -> StepWork:
    """What a step of the workload computes and holds.

    Args:
      launches: operations of a step with one microbatch, and of each further one.
    """
    states, precision = memory.states, workload.recipe.run.precision
    weights, gradients = states[PARAMETERS], states[GRADIENTS]
    in_blocks = weights - memory.other_bytes
    narrow = 2 if precision in ("bf16", "fp16") else 1
    return StepWork(
        flops=workload.flops,
        tokens=workload.image_tokens(workload.largest_bucket),
        weights=weights,
        gradients=gradients,
        states=sum(states.values()) - (weights - gradients),  # an update leaves frozen weights alone
        blocks=round(in_blocks / memory.block_bytes),
        gathered=in_blocks / narrow + memory.other_bytes,
        precision=precision,
        launches=launches,
    )


def scaling(
    work: StepWork, cluster: Cluster, fits: Fits, *, batch: int, images: int, gpus: int, mfu: float | None
) -> dict[str, Any]:
    """The table as JSON values: with run.global_batch, and with a batch that grows with the GPUs.

    Args:
      fits: strategy and largest microbatch (0: none) for ranks and images of each.
      batch: run.global_batch.
      images: to train on.
      gpus: asked for; a row of its own. It sets the images a GPU of the batch that grows, with at least one machine.
      mfu: measured, else None.
    """
    counts = sorted({*COUNTS, gpus})
    each = -(-batch // min(batch, max(gpus, cluster.gpus_per_machine)))
    fixed = {n: _time(work, cluster, fits, n, -(-batch // n), mfu) for n in counts if n <= batch}
    grown = {n: _time(work, cluster, fits, n, each, mfu) for n in counts}
    rates = {n: batch / time.seconds for n, time in fixed.items() if time}
    grown_rates = {n: n * each / time.seconds for n, time in grown.items() if time}
    rows = []
    for n in counts:
        time = fixed.get(n)
        rate = rates.get(n)
        rows.append(
            {
                "gpus": n,
                "images_a_gpu": -(-batch // n) if n <= batch else 0,
                "step_seconds": time.seconds if time else None,
                "images_per_second": rate,
                "of_linear": _of_linear(rates, n, cluster.gpus_per_machine),
                "exposed_communication": time.exposed / time.seconds if time else None,
                "limit": time.limit if time else None,
                "seconds": images / rate if rate else None,
                "gpu_hours": n * images / rate / 3600 if rate else None,
                "grown_batch": n * each,
                "grown_images_per_second": grown_rates.get(n),
                "grown_of_linear": _of_linear(grown_rates, n, cluster.gpus_per_machine),
            }
        )
    return {
        "gpu": cluster.gpu.name,
        "strategy": fits(max(gpus, cluster.gpus_per_machine), each)[0],
        "network_gbit": cluster.network_gbit,
        "global_batch": batch,
        "images": images,
        "grown_images_a_gpu": each,
        "rows": rows,
        "limits": limits(rates) if rates else None,
    }


def _time(work: StepWork, cluster: Cluster, fits: Fits, ranks: int, images: int, mfu: float | None) -> StepTime | None:
    """Time of a step; None if it does not fit into the memory of a GPU."""
    strategy, microbatch = fits(ranks, images)
    return step_time(work, cluster, strategy, ranks, images, microbatch, mfu) if microbatch else None


def _of_linear(rates: Mapping[int, float], gpus: int, per_machine: int) -> float | None:
    """Images a second and GPU, relative to one machine (or the fewest GPUs that fit)."""
    if gpus not in rates:
        return None
    first = per_machine if per_machine in rates else min(rates)
    return rates[gpus] / gpus / (rates[first] / first)


def limits(rates: Mapping[int, float]) -> dict[str, int]:
    """Up to how many GPUs twice as many are worth it, and beyond how many they bring nothing.

    Args:
      rates: images a second of numbers of GPUs.
    """
    counts = sorted(rates)
    worth = counts[0]
    for fewer, more in itertools.pairwise(counts):
        if rates[more] < rates[fewer] * (more / fewer) ** WORTH:
            break
        worth = more
    best = max(rates.values())
    return {"worth": worth, "end": next(n for n in counts if rates[n] * NOTHING > best)}


def render_scaling(result: Mapping[str, Any]) -> list[str]:
    """The table, and what it says, as lines."""
    rows, each = result["rows"], result["grown_images_a_gpu"]
    table = [
        ("GPUs", "each", "s/step", "images/s", "linear", "exposed", "time", "GPU h", "batch", "images/s", "linear"),
        *(_cells(row) for row in rows),
    ]
    most, batch = rows[-1]["gpus"], result["global_batch"]
    return [
        f"{result['images']:,} images on 1 to {most} {result['gpu']} by {result['strategy']}: predicted, not measured",
        f"left: run.global_batch = {batch}; right: {each} images on each GPU, which is another training",
        *aligned(table),
        *_advice(result),
    ]


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    grown = row["grown_images_per_second"]
    right = (
        f"{row['grown_batch']:,}",
        f"{grown:,.0f}" if grown else "-",
        f"{row['grown_of_linear']:.0%}" if grown else "-",
    )
    each = str(row["images_a_gpu"] or "-")
    if not row["seconds"]:
        return (str(row["gpus"]), each, *"------", *right)
    return (
        str(row["gpus"]),
        each,
        f"{row['step_seconds']:.3f}",
        f"{row['images_per_second']:,.0f}",
        f"{row['of_linear']:.0%}",
        f"{row['exposed_communication']:.0%}",
        readable_time(row["seconds"]),
        f"{row['gpu_hours']:,.0f}",
        *right,
    )


def _advice(result: Mapping[str, Any]) -> list[str]:
    """Up to where more GPUs are worth it, what they cost, and why it ends."""
    found = result["limits"]
    if not found:
        return ["nowhere does an image fit: use parallel.strategy fsdp, or a GPU with more memory"]
    rows = {row["gpus"]: row for row in result["rows"]}
    worth, end, batch = found["worth"], found["end"], result["global_batch"]
    at = rows[worth]
    lines = [
        f"worth it up to {worth} (twice as many GPUs are at least 1.5 times as fast): {readable_time(at['seconds'])}, "
        f"{at['gpu_hours']:,.0f} GPU hours"
    ]
    more = [row for row in result["rows"] if row["gpus"] > worth and row["seconds"]]
    if more:
        faster = more[0]["images_per_second"] / at["images_per_second"]
        lines.append(f"{more[0]['gpus']} are {faster:.2f} times as fast: {more[0]['limit']} takes as long as before")
    if end == max(rows):
        lines.append(f"beyond {end} GPUs: not looked at")
    elif any(row["gpus"] > end for row in more):
        lines.append(f"beyond {end} GPUs more bring less than 10 %")
    else:
        lines.append(f"beyond {end} GPUs more bring nothing: run.global_batch = {batch} has no image for them")
    return lines
