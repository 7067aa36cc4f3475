"""Whether a training step fits into the memory of a CPU, told before the first step: there nothing says so but a kill.

The figures are the planner's (``tools/plan/step_memory.py``), traced for the bucket whose steps are largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ...train.config import TrainRecipe
from ...train.metrics.flops import latent_size_of, meta_model, tokens_per_image
from ...train.optim.loss_scale import autocast_dtype
from .memory_tracker import GRADIENTS
from .step_memory import StepMemory, step_memory
from .training import Work, work_on_store

GIB = 2**30
USABLE = 0.8  # share of what is available that a proposed microbatch may take
STATES_OF_A_WEIGHT = 10  # weight, gradient, two moments, average, and the copy of a checkpoint: at most
GROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # version 2 and 1


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process can still take: of the machine, or of a control group (container) that has less.

    None where neither is told, as on systems other than Linux.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    rooms = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*rooms, *_rooms_of_groups(proc, groups)], default=None)


def _rooms_of_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Bytes left in each control group that this process is in; its file cache can be taken, so it counts as free."""
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
        for folder in (inner, *inner.parents):  # a container may see its own group as the top
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
    recipe: TrainRecipe, store: str, available: int, *, num_ranks: int = 1, local_ranks: int = 1
) -> str | None:
    """Warn that a training step does not fit into a CPU's memory, and propose a run.microbatch; None where it fits.

    Args:
      available: bytes for all ranks of this machine.
      num_ranks, local_ranks: that share the batch, and those of them on this machine; each has all of the model.
    Raises: StoreError, RecipeError, RunError: as training does.
    """
    work, room = work_on_store(recipe, store), available / local_ranks
    bucket, images = _largest_step(work)
    images = -(-images // num_ranks)
    asked = min(recipe.run.microbatch or images, images)
    if _most_bytes(work, bucket, images) < room:  # so most runs are not traced, which takes a second
        return None

    def memory(*, accumulates: bool) -> StepMemory:
        return step_memory(
            recipe,
            work.store,
            work.spec,
            bucket,
            work.tokens,
            autocast=autocast_dtype(recipe.run.precision, torch.device("cpu")),
            accumulates=accumulates,
            device_type="cpu",
            proves=False,
        )

    def beside(states: Mapping[str, int]) -> float:
        """Batches that are read ahead, and the copy that is written as a checkpoint."""
        copied = sum(states.values()) - states[GRADIENTS] if recipe.run.async_checkpoint else 0
        return copied + recipe.run.prefetch * work.batch_bytes(images)

    found = memory(accumulates=asked < images)
    needed = found.total(asked, batch=images) + beside(found.states)
    if needed <= room:
        return None
    parts = f" in microbatches of {asked}" if asked < images else ""
    says = f"a step of {images} images{parts} needs about {needed / GIB:.2f} GiB, {room / GIB:.2f} GiB are available."
    split = found if asked < images else memory(accumulates=True)
    largest = split.largest(USABLE * room - beside(split.states), batch=images, most=max(1, images // 2))
    if not largest:
        return f"{says} Not even one image at a time fits: use a smaller model or run.global_batch."
    proposed = 1 << (largest.bit_length() - 1)
    less = split.total(proposed, batch=images) + beside(split.states)
    return f"{says} Use --set run.microbatch={proposed}: the same update with about {less / GIB:.2f} GiB."


def _largest_step(work: Work) -> tuple[str, int]:
    """The bucket whose steps have most image tokens, and their images."""
    run, data, steps = work.recipe.run, work.recipe.data, dict[str, int]()
    for bucket, records in work.buckets.items():
        images = data.batch_tokens // _tokens(work, bucket) if data.batch_tokens else run.global_batch
        steps[bucket] = images if data.leftovers == "carry" else min(images, records)
    bucket = max(steps, key=lambda name: steps[name] * _tokens(work, name))
    return bucket, steps[bucket]


def _tokens(work: Work, bucket: str) -> int:
    return tokens_per_image(work.spec, latent_size_of(bucket, work.store.latent))


def _most_bytes(work: Work, bucket: str, images: int) -> float:
    """More than any step takes: a product of matrices keeps fewer numbers of a token than its matrix has."""
    weights = 4 * sum(parameter.numel() for parameter in meta_model(work.spec).parameters())
    tokens = images * (_tokens(work, bucket) + work.tokens)
    return (STATES_OF_A_WEIGHT + tokens) * weights + (2 + work.recipe.run.prefetch) * work.batch_bytes(images)
