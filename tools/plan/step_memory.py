"""How much memory a training step takes, found by running it without memory and without a device.

The real step (``loop.train_step``: forward, loss, backward, clipping, optimizer, averages) runs under torch's fake
tensors, which have shapes and no bytes. A mode beneath it sees every storage that is born and notices when it dies, so
the peak, its moment and what it is made of come from the model itself. Two microbatches give the same moments, at each
of which memory is a line over the microbatch; the peak is the highest of all lines, and a third microbatch proves it.

It is the step as it stands in the code: what torch.compile fuses takes less, so a compiled step stays below.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ...datasets.errors import LeanditError
from ...datasets.format.schema import StoreSpec
from ...train.config import ParallelSection, TrainRecipe
from ...train.metrics.flops import latent_size_of
from ...train.models.activation_checkpointing import checkpoint_blocks
from ...train.models.spec import ModelSpec
from ...train.objectives.draws import GROUP
from ...train.parallel.engine import TorchEngine
from ...train.step.learner import Learner
from ...train.step.train_step import train_step
from ..synthetic.batches import synthetic_batch, synthetic_learner
from .memory_tracker import (
    ACTIVATIONS,
    CATEGORIES,
    EMA,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    STATES,
    HostCounter,
    MemoryTracker,
    clear_caches,
)

AT_UPDATE = "gradients at the update"  # share of them that a strategy holds then, in copies of its own
MOST_GRADIENTS = "gradients as made"  # share of them that is there at once at most, as they are made
REDUCED = "gradients once reduced"  # share of them that a strategy holds as soon as more than that are made
ROUNDING = {
    "cuda": 512,
    "cpu": 1,
}  # bytes that the allocator rounds a block up to (CUDACachingAllocator: kMinBlockSize)
TRACED = (2, 3)  # microbatches that make the lines; not 1, where some copies are left out
PROOF = 5  # one that must lie on them
LINEAR = 0.01  # share that it may be off


@dataclass(frozen=True)
class Trace:
    """One traced step.

    Args:
      moments: (N, 5) int64 bytes of each of ``CATEGORIES`` whenever something was born, in order.
      states: bytes of parameters, gradients, optimizer and averages, all of them.
      block_bytes: of the parameters of the largest block.
      other_bytes: of the parameters that are in no block.
      host: most bytes that waited in the host's memory.
    """

    moments: np.ndarray
    states: Mapping[str, int]
    block_bytes: int
    other_bytes: int
    host: int = 0

    def peak(self, shares: Mapping[str, float] | None = None) -> int:
        """Most bytes at a moment.

        Args:
          shares: what of a category this device holds, where that is not all.
        """
        return int(held(self.moments, self.states, shares).sum(1).max())


def trace_step(
    recipe: TrainRecipe,
    store: StoreSpec,
    spec: ModelSpec,
    bucket: str,
    tokens: int,
    *,
    microbatch: int,
    autocast: torch.dtype | None,
    count: int = 1,
    device_type: str = "cuda",
    to_host: bool = False,
) -> Trace:
    """Run a step under fake tensors, as if it were not the first, and record it.

    Args:
      bucket: "HxW" in pixels.
      tokens: of each caption, for a model with text.
      autocast: dtype of the forward, as the device has it; None is float32.
      count: microbatches of the step; from the second on, the gradients of those before live all the time.
      device_type: whose allocator rounds, and whose optimizer is fused; "cpu" or "cuda".
      to_host: what goes into blocks that are computed again waits in the host's memory.
    """
    host = HostCounter()
    run = recipe.run.model_copy(update={"microbatch": microbatch})
    recipe = recipe.model_copy(update={"run": run, "parallel": ParallelSection()})  # of one process
    clear_caches()
    with FakeTensorMode(allow_non_fake_inputs=True), MemoryTracker(ROUNDING[device_type]) as tracker:
        learner = synthetic_learner(recipe, spec, tokens, torch.device("cpu"), onednn=device_type == "cpu")
        learner.autocast_dtype = autocast
        if to_host:
            checkpoint_blocks(learner.engine.model.blocks, run.activation_checkpointing, to_cpu=host.hooks)
        tracker.assign(PARAMETERS, (*learner.engine.model.parameters(), *learner.engine.model.buffers()))
        tracker.assign(EMA, engine_of(learner).ema.state_dict().values())
        for parameter in learner.engine.model.parameters():
            parameter.register_post_accumulate_grad_hook(functools.partial(_is_gradient, tracker))
        batch = synthetic_batch(store, bucket, microbatch * count, tokens, torch.device("cpu"))
        states = _step_with_zeros(learner, tracker)
        tracker.moments.clear()
        train_step(learner, batch)
        blocks = [sum(p.nbytes for p in block.parameters()) for block in learner.engine.model.blocks]
    clear_caches()
    other = states[PARAMETERS] - sum(blocks)
    return Trace(np.array(tracker.moments, np.int64), states, max(blocks), other, host.most)


def _step_with_zeros(learner: Learner, tracker: MemoryTracker) -> dict[str, int]:
    """Leave what a step leaves: the optimizer's state, and no gradients.

    Returns: bytes of each of ``STATES``, the gradients among them.
    """
    for parameter in learner.engine.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        tracker.assign(GRADIENTS, [parameter.grad])
    engine_of(learner).optimizer.step()
    tracker.assign(OPTIMIZER, optimizer_state(learner))
    states = {name: tracker.live[name] for name in STATES}
    engine_of(learner).optimizer.zero_grad(set_to_none=True)
    return states


def engine_of(learner: Learner) -> TorchEngine:
    """The engine of one process."""
    assert isinstance(learner.engine, TorchEngine)
    return learner.engine


def optimizer_state(learner: Learner) -> list[Tensor]:
    """All tensors of the optimizer's state."""
    return [leaf for leaf in tree_leaves(dict(engine_of(learner).optimizer.state)) if isinstance(leaf, Tensor)]


def _is_gradient(tracker: MemoryTracker, parameter: Tensor) -> None:
    if parameter.grad is not None:
        tracker.assign(GRADIENTS, [parameter.grad])


def held(moments: np.ndarray, states: Mapping[str, int], shares: Mapping[str, float] | None) -> np.ndarray:
    """What a device has of the bytes of each moment, (N, 5); with ``AT_UPDATE`` one moment more, the last.

    Args:
      shares: of a category; and, of gradients, at most ``MOST_GRADIENTS`` of all, then ``REDUCED`` of all beside.
    """
    if not shares:
        return moments
    moments = moments * np.array([shares.get(name, 1.0) for name in CATEGORIES])
    made, all_of_them = moments[:, CATEGORIES.index(GRADIENTS)], states.get(GRADIENTS, 0)
    most = shares.get(MOST_GRADIENTS, 1.0) * all_of_them
    made[:] = np.minimum(made, most) + (made > most) * shares.get(REDUCED, 0.0) * all_of_them
    if not shares.get(AT_UPDATE):
        return moments
    of_gradients = {**shares, GRADIENTS: shares[AT_UPDATE]}
    update = [states.get(name, 0) * of_gradients.get(name, 1.0) for name in CATEGORIES]
    return np.vstack([moments, update])


class TraceError(LeanditError):
    """A step could not be traced, or its memory is not what a line through two microbatches says."""


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step for any microbatch. At each moment every category is a line over the microbatch.

    Args:
      base, slope: (N, 5) bytes of each of ``CATEGORIES`` at each moment: at no image, and for each.
      states, block_bytes, other_bytes: as in ``Trace``.
      waiting: bytes for each image of the step that waits for its microbatch.
      count: microbatches that were traced.
      noise: bytes of the noise of an image, which is drawn for whole groups; those that were traced had one group.
      host: bytes in the host's memory, at no image and for each of a microbatch.
    """

    base: np.ndarray
    slope: np.ndarray
    states: Mapping[str, int]
    block_bytes: int
    other_bytes: int
    waiting: float = 0.0
    count: int = 1
    noise: int = 0
    host: tuple[int, int] = (0, 0)

    def on_host(self, microbatch: int) -> int:
        """Most bytes that wait in the host's memory."""
        return self.host[0] + self.host[1] * microbatch

    def peak(self, microbatch: int, *, batch: int = 0, shares: Mapping[str, float] | None = None) -> dict[str, float]:
        """Bytes of each category at the moment of the peak.

        Args:
          batch: images of the step, where they are more than were traced.
          shares: what of a category this device holds, where that is not all.
        """
        moments = held(self.base + self.slope * microbatch, self.states, shares)
        worst = moments[moments.sum(1).argmax()]
        found: dict[str, float] = dict(zip(CATEGORIES, worst.tolist(), strict=True))
        images = max(batch, self.count * microbatch)
        found[ACTIVATIONS] += self.waiting * (images - self.count * microbatch)
        found[ACTIVATIONS] += self.noise * GROUP * max(0, math.ceil(images / GROUP) - 1)
        return found

    def total(self, microbatch: int, *, batch: int = 0, shares: Mapping[str, float] | None = None) -> float:
        """All bytes at the peak."""
        return sum(self.peak(microbatch, batch=batch, shares=shares).values())

    def largest(
        self, room: float, *, batch: int = 0, most: int = 1 << 16, shares: Mapping[str, float] | None = None
    ) -> int:
        """Most images of a microbatch that fit into so many bytes, at most ``most``; 0: not one does."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.total(middle, batch=batch, shares=shares) <= room
            low, high = (middle, high) if fits else (low, middle)
        return low


def step_memory(
    recipe: TrainRecipe,
    store: StoreSpec,
    spec: ModelSpec,
    bucket: str,
    tokens: int,
    *,
    autocast: torch.dtype | None,
    accumulates: bool = False,
    device_type: str = "cuda",
    proves: bool = True,
    to_host: bool = False,
) -> StepMemory:
    """Trace a step at two microbatches, and prove with a third that its memory is linear.

    Args:
      accumulates: the step has more than one microbatch.
      proves: trace the third.
      others: as in ``trace_step``.
    Raises: TraceError: the third one is not what the first two say.
    """

    how = {"autocast": autocast, "device_type": device_type, "to_host": to_host}
    trace = functools.partial(trace_step, recipe, store, spec, bucket, tokens, **how)
    count = 2 if accumulates else 1
    small, large = TRACED
    first, second = (trace(microbatch=images, count=count) for images in TRACED)
    if first.moments.shape != second.moments.shape:
        lengths = f"{len(first.moments)} and {len(second.moments)}"
        raise TraceError(
            f"bucket '{bucket}': {small} and {large} images do not make the same step ({lengths} moments)."
        )
    slope = (second.moments - first.moments) // (large - small)
    each_on_host = (second.host - first.host) // (large - small)
    waiting = (trace(microbatch=small, count=3).peak() - first.peak()) / small if accumulates else 0.0
    found = StepMemory(
        base=first.moments - slope * small,
        slope=slope,
        states=first.states,
        block_bytes=first.block_bytes,
        other_bytes=first.other_bytes,
        waiting=max(0.0, waiting),
        count=count,
        noise=4 * store.latent.channels * math.prod(latent_size_of(bucket, store.latent)),
        host=(first.host - each_on_host * small, each_on_host),
    )
    proven = trace(microbatch=PROOF, count=count).peak() if proves else 0
    if proves and abs(found.total(PROOF) - proven) > LINEAR * proven:
        raise TraceError(
            f"bucket '{bucket}': a step of {PROOF} images takes {proven:,} bytes, those of {small} and {large} say "
            f"{found.total(PROOF):,.0f}. Its memory cannot be told for other microbatches."
        )
    return found
