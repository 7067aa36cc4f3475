"""Memory of a training step, measured by running it on fake tensors, without memory and without a device.

The real step (``train_step``: forward, loss, backward, clipping, optimizer, averages) runs under torch's fake tensors,
which have shapes and no bytes. A dispatch mode records when each storage is allocated and freed, so the peak and its
parts come from the model itself. Two microbatch sizes produce the same sequence of moments. At each moment memory is
linear in the microbatch size; the peak is the highest of these lines, and a third size checks it.

The traced step is eager: torch.compile fuses operations, so a compiled step takes less.
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
from ...train.config import ParallelSection
from ...train.metrics.flops import latent_size_of
from ...train.models.activation_checkpointing import checkpoint_blocks
from ...train.models.diffusers_models.adapters import trained_parameters
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
from .workload import TrainingWorkload

AT_UPDATE = "gradients at the update"  # share that a strategy copies for the update
MOST_GRADIENTS = "gradients as made"  # largest share alive while the backward pass produces them
REDUCED = "gradients once reduced"  # share that a strategy holds after the first reduction
ROUNDING = {"cuda": 512, "cpu": 1}  # bytes that the allocator rounds up to (CUDACachingAllocator: kMinBlockSize)
TRACED = (2, 3)  # microbatch sizes that define the lines; a size of 1 skips some copies
CHECKED = 5  # microbatch size that checks them
TOLERANCE = 0.01  # largest relative error of the check


@dataclass(frozen=True)
class StepTrace:
    """One traced step.

    Args:
      moments: (N, 5) int64 bytes of each of ``CATEGORIES`` after each allocation, in order.
      states: bytes of all parameters, gradients, optimizer states and averages.
      block_bytes: parameter bytes of the largest block.
      other_bytes: parameter bytes outside of blocks.
      host: peak bytes in host memory.
    """

    moments: np.ndarray
    states: Mapping[str, int]
    block_bytes: int
    other_bytes: int
    host: int = 0

    def peak(self, shares: Mapping[str, float] | None = None) -> int:
        """Largest number of bytes at any moment.

        Args:
          shares: share of each category on this device, if not all.
        """
        return int(device_moments(self.moments, self.states, shares).sum(1).max())


def trace_step(
    workload: TrainingWorkload,
    bucket: str,
    *,
    microbatch: int,
    autocast: torch.dtype | None,
    count: int = 1,
    device_type: str = "cuda",
    to_host: bool = False,
) -> StepTrace:
    """Run a step that is not the first one on fake tensors, and record it.

    Args:
      bucket: "HxW" in pixels.
      autocast: dtype of the forward on the device; None: float32.
      count: microbatches of the step; from the second on, earlier gradients stay alive.
      device_type: "cpu" or "cuda": selects the allocator's rounding and the fused optimizer.
      to_host: keep the inputs of checkpointed blocks in host memory.
    """
    host = HostCounter()
    run = workload.recipe.run.model_copy(update={"microbatch": microbatch, "fp8": "none"})  # which keeps as many bytes
    recipe = workload.recipe.model_copy(update={"run": run, "parallel": ParallelSection()})  # one process
    tokens, device = workload.tokens, torch.device("cpu")
    clear_caches()
    with FakeTensorMode(allow_non_fake_inputs=True), MemoryTracker(ROUNDING[device_type]) as tracker:
        learner = synthetic_learner(
            recipe, workload.spec, tokens, device, store=workload.store, onednn=device_type == "cpu"
        )
        learner.autocast_dtype = autocast
        if to_host:
            checkpoint_blocks(learner.engine.model.blocks, run.activation_checkpointing, to_cpu=host.hooks)
        tracker.assign(
            PARAMETERS, learner.engine.model.parameters()
        )  # buffers are whole on each device, as activations
        tracker.assign(EMA, _engine_of(learner).ema.state_dict().values())
        for parameter in trained_parameters(learner.engine.model).values():
            parameter.register_post_accumulate_grad_hook(functools.partial(_assign_gradient, tracker))
        batch = synthetic_batch(workload.store, bucket, microbatch * count, tokens, device)
        states = _step_with_zeros(learner, tracker)
        tracker.moments.clear()
        train_step(learner, batch)
        blocks = [sum(p.nbytes for p in block.parameters()) for block in learner.engine.model.blocks]
    clear_caches()
    other = states[PARAMETERS] - sum(blocks)
    return StepTrace(np.array(tracker.moments, np.int64), states, max(blocks), other, host.peak)


def _step_with_zeros(learner: Learner, tracker: MemoryTracker) -> dict[str, int]:
    """Leave the state that a step leaves: optimizer states, and no gradients.

    Returns: bytes of each of ``STATES``, with gradients.
    """
    for parameter in trained_parameters(learner.engine.model).values():
        parameter.grad = torch.zeros_like(parameter)
        tracker.assign(GRADIENTS, [parameter.grad])
    _engine_of(learner).optimizer.step()
    optimizer_state = tree_leaves(dict(_engine_of(learner).optimizer.state))
    tracker.assign(OPTIMIZER, [leaf for leaf in optimizer_state if isinstance(leaf, Tensor)])
    states = {name: tracker.live[name] for name in STATES}
    _engine_of(learner).optimizer.zero_grad(set_to_none=True)
    return states


def _engine_of(learner: Learner) -> TorchEngine:
    assert isinstance(learner.engine, TorchEngine)
    return learner.engine


def _assign_gradient(tracker: MemoryTracker, parameter: Tensor) -> None:
    if parameter.grad is not None:
        tracker.assign(GRADIENTS, [parameter.grad])


def device_moments(moments: np.ndarray, states: Mapping[str, int], shares: Mapping[str, float] | None) -> np.ndarray:
    """Bytes that one device holds at each moment, (N, 5); ``AT_UPDATE`` appends the update as the last moment.

    Args:
      shares: of each category; gradients grow to ``MOST_GRADIENTS`` of all, then ``REDUCED`` of all are added.
    """
    if not shares:
        return moments
    moments = moments * np.array([shares.get(name, 1.0) for name in CATEGORIES])
    gradients, total = moments[:, CATEGORIES.index(GRADIENTS)], states.get(GRADIENTS, 0)
    most = shares.get(MOST_GRADIENTS, 1.0) * total
    gradients[:] = np.minimum(gradients, most) + (gradients > most) * shares.get(REDUCED, 0.0) * total
    if not shares.get(AT_UPDATE):
        return moments
    at_update = {**shares, GRADIENTS: shares[AT_UPDATE]}
    update = [states.get(name, 0) * at_update.get(name, 1.0) for name in CATEGORIES]
    return np.vstack([moments, update])


class TraceError(LeanditError):
    """A step cannot be traced, or its memory is not linear in the microbatch size."""


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step for any microbatch size. At each moment every category is linear in the size.

    Args:
      base, slope: (N, 5) bytes of each of ``CATEGORIES`` at each moment: constant part, and for each image.
      states, block_bytes, other_bytes: as in ``StepTrace``.
      waiting: bytes for each image of a later microbatch.
      count: traced microbatches.
      noise: bytes of an image's noise, which is drawn for whole groups; the traced steps had one group.
      host: bytes in host memory: constant part, and for each image of a microbatch.
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
        """Peak bytes in host memory."""
        return self.host[0] + self.host[1] * microbatch

    def peak(self, microbatch: int, *, batch: int = 0, shares: Mapping[str, float] | None = None) -> dict[str, float]:
        """Bytes of each category at the moment of the peak.

        Args:
          batch: images of the step, if more than one microbatch.
          shares: share of each category on this device, if not all.
        """
        moments = device_moments(self.base + self.slope * microbatch, self.states, shares)
        highest = moments[moments.sum(1).argmax()]
        peak: dict[str, float] = dict(zip(CATEGORIES, highest.tolist(), strict=True))
        images = max(batch, self.count * microbatch)
        peak[ACTIVATIONS] += self.waiting * (images - self.count * microbatch)
        peak[ACTIVATIONS] += self.noise * GROUP * max(0, math.ceil(images / GROUP) - 1)
        return peak

    def total(self, microbatch: int, *, batch: int = 0, shares: Mapping[str, float] | None = None) -> float:
        """All bytes at the peak."""
        return sum(self.peak(microbatch, batch=batch, shares=shares).values())

    def largest(
        self, room: float, *, batch: int = 0, most: int = 1 << 16, shares: Mapping[str, float] | None = None
    ) -> int:
        """Largest microbatch that fits into ``room`` bytes, at most ``most`` images; 0: not even one image fits."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.total(middle, batch=batch, shares=shares) <= room
            low, high = (middle, high) if fits else (low, middle)
        return low


def step_memory(
    workload: TrainingWorkload,
    bucket: str,
    *,
    autocast: torch.dtype | None,
    accumulates: bool = False,
    device_type: str = "cuda",
    check_linear: bool = True,
    to_host: bool = False,
) -> StepMemory:
    """Trace a step at two microbatch sizes, and check with a third that its memory is linear.

    Args:
      accumulates: the step has several microbatches.
      check_linear: trace the third size.
      others: as in ``trace_step``.
    Raises: TraceError: the third size is not on the line.
    """
    settings = {"autocast": autocast, "device_type": device_type, "to_host": to_host}
    trace = functools.partial(trace_step, workload, bucket, **settings)
    count = 2 if accumulates else 1
    small, large = TRACED
    first, second = (trace(microbatch=images, count=count) for images in TRACED)
    if first.moments.shape != second.moments.shape:
        lengths = f"{len(first.moments)} and {len(second.moments)}"
        raise TraceError(f"bucket '{bucket}': {small} and {large} images run different steps ({lengths} moments).")
    slope = (second.moments - first.moments) // (large - small)
    host_slope = (second.host - first.host) // (large - small)
    waiting = (trace(microbatch=small, count=3).peak() - first.peak()) / small if accumulates else 0.0
    latent = workload.store.latent
    memory = StepMemory(
        base=first.moments - slope * small,
        slope=slope,
        states=first.states,
        block_bytes=first.block_bytes,
        other_bytes=first.other_bytes,
        waiting=max(0.0, waiting),
        count=count,
        noise=4 * latent.channels * math.prod(latent_size_of(bucket, latent)),
        host=(first.host - host_slope * small, host_slope),
    )
    if check_linear:
        traced, predicted = trace(microbatch=CHECKED, count=count).peak(), memory.total(CHECKED)
        if abs(predicted - traced) > TOLERANCE * traced:
            raise TraceError(
                f"bucket '{bucket}': a step of {CHECKED} images takes {traced:,} bytes, {small} and {large} images "
                f"predict {predicted:,.0f}. The memory of other microbatches is unknown."
            )
    return memory
