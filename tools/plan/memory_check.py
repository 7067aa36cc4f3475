"""Warns before the first step if a training step exceeds a CPU's memory; otherwise the system kills the process.

The figures come from ``step_memory.py``, traced for the bucket whose steps are largest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ...train.config import TrainRecipe
from ...train.metrics.flops import meta_model
from ...train.optim.loss_scale import autocast_dtype
from .step_memory import EMA, GRADIENTS, OPTIMIZER, trace_steps
from .strategies import SINGLE
from .workload import TrainingWorkload, workload_of_stores

GIB = 2**30
USABLE = 0.8  # share of available memory that a proposed microbatch may take
STATES_OF_A_WEIGHT = 10  # weight, gradient, two moments, average, and the copy of a checkpoint: at most
GROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # version 2 and 1


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process can still allocate: the least of the machine and of each control group (container).

    None if neither is known, as on systems other than Linux.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    of_machine = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*of_machine, *_available_in_groups(proc, groups)], default=None)


def _available_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Bytes left in each control group of this process; file cache counts as free, since it can be reclaimed."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = groups / controllers
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):  # in a container, its own group may be the top
            if not folder.is_relative_to(top):
                break
            for limit_name, usage_name in GROUP_FILES:
                try:
                    limit, usage = (folder / limit_name).read_text().strip(), int((folder / usage_name).read_text())
                    stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                except (OSError, ValueError):
                    continue
                if limit != "max":
                    yield int(limit) - usage + int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)


def memory_warning(
    recipe: TrainRecipe, store: str | None, available: int, *, num_ranks: int = 1, local_ranks: int = 1
) -> str | None:
    """Warn if a training step exceeds a CPU's memory, and propose a run.microbatch; None if it fits.

    Args:
      store: path; None where the recipe names its stores.
      available: bytes for all ranks of this machine.
      num_ranks, local_ranks: ranks that share the batch, and those on this machine; each holds the whole model.
    Raises: StoreError, RecipeError, RunError: as training does.
    """
    workload, room = workload_of_stores(recipe, store), available / local_ranks
    bucket, images = _largest_step(workload)
    images = -(-images // num_ranks)
    microbatch = min(recipe.run.microbatch or images, images)
    if _upper_bound(workload, bucket, images) < room:  # skips the trace, which takes some seconds
        return None

    precision = "bf16" if autocast_dtype(recipe.run.precision, torch.device("cpu")) else "fp32"
    traced = trace_steps(workload, bucket, [SINGLE], precision=precision, device_type="cpu")[SINGLE.name]
    states = traced.whole.states
    saved = states[GRADIENTS] + states[OPTIMIZER] + states[EMA]  # a gradient is as large as a weight that trains
    outside_step = (saved if recipe.run.async_checkpoint else 0) + recipe.run.prefetch * workload.batch_bytes(images)
    step = traced.split if microbatch < images else traced.whole
    needed = step.total(microbatch, batch=images) + outside_step
    if needed <= room:
        return None
    parts = f" in microbatches of {microbatch}" if microbatch < images else ""
    needs = f"a step of {images} images{parts} needs about {needed / GIB:.2f} GiB, {room / GIB:.2f} GiB are available."
    largest = traced.split.largest(USABLE * room - outside_step, batch=images, most=max(1, images // 2))
    if not largest:
        return f"{needs} Not even one image at a time fits: use a smaller model or run.global_batch."
    proposed = 1 << (largest.bit_length() - 1)
    less = traced.split.total(proposed, batch=images) + outside_step
    return f"{needs} Use --set run.microbatch={proposed}: the same update with about {less / GIB:.2f} GiB."


def _largest_step(workload: TrainingWorkload) -> tuple[str, int]:
    """The bucket whose steps have most image tokens, and their images."""
    run, data, steps = workload.recipe.run, workload.recipe.data, dict[str, int]()
    for bucket, records in workload.buckets.items():
        images = data.batch_tokens // workload.image_tokens(bucket) if data.batch_tokens else run.global_batch
        steps[bucket] = images if data.leftovers == "carry" else min(images, records)
    bucket = max(steps, key=lambda name: steps[name] * workload.image_tokens(name))
    return bucket, steps[bucket]


def _upper_bound(workload: TrainingWorkload, bucket: str, images: int) -> float:
    """More bytes than any step takes: for a token, a matrix product keeps fewer numbers than its matrix has."""
    weights = 4 * sum(parameter.numel() for parameter in meta_model(workload.spec).parameters())
    tokens = images * (workload.image_tokens(bucket) + workload.tokens)
    batches = (2 + workload.recipe.run.prefetch) * workload.batch_bytes(images)
    return (STATES_OF_A_WEIGHT + tokens) * weights + batches
