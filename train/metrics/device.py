"""Busy time, memory and FLOPs of a run's device.

A step records its start and end as events on the device, and counts its FLOPs on the host from shapes: nothing waits.
Events are read when figures are reported.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from ...datasets.batches.batch import Batch
from ...datasets.format.schema import LatentSpec
from ..models.spec import ModelSpec
from ..optim.loss_scale import autocast_dtype
from .flops import latent_size_of, tokens_per_image, train_flops
from .gpus import gpu_by_name


class ComputeCounter:
    """FLOPs and image tokens of steps, counted from the model.

    Args:
      spec: of the model.
      latent: of the store.
      peak_flops: of all devices together, in FLOP/s; 0 if unknown.
    """

    def __init__(self, spec: ModelSpec, latent: LatentSpec, peak_flops: float) -> None:
        self._spec, self._latent, self._peak = spec, latent, peak_flops
        self.reset()

    def reset(self) -> None:
        """Start counting from zero."""
        self._flops, self._tokens = 0.0, 0

    def add(self, batch: Batch) -> None:
        """Count the images of a global batch, all with captions as long as this rank's padded ones."""
        size = latent_size_of(batch.bucket, self._latent)
        self._tokens += batch.global_size * tokens_per_image(self._spec, size)
        if self._peak:
            captions = batch.captions if self._spec.takes_text else None
            length = self._spec.joined_tokens or (0 if captions is None else captions.shape[1])
            self._flops += batch.global_size * train_flops(self._spec, size, length)

    def tokens_per_second(self, seconds: float) -> float:
        """Image tokens a second, if the steps took this many seconds."""
        return self._tokens / seconds

    def mfu(self, seconds: float) -> float | None:
        """Model FLOPs utilisation, 0 to 1, if the steps took this many seconds; None if the peak is unknown."""
        return self._flops / (self._peak * seconds) if self._peak else None


def peak_flops(device: torch.device, precision: str) -> float:
    """Peak of a device in FLOP/s, in the precision it computes in; 0: a CPU, or an unknown GPU.

    Args:
      precision: of the recipe.
    """
    if device.type != "cuda":
        return 0.0
    gpu = gpu_by_name(torch.cuda.get_device_name(device))
    return gpu.peak_flops(computed_in(precision, device)) if gpu else 0.0


def computed_in(precision: str, device: torch.device) -> str:
    """The precision that a recipe's means on a device: without bf16 it computes in float32 instead."""
    return "fp32" if precision == "bf16" and autocast_dtype(precision, device) is None else precision


class Moment:
    """Now: on a GPU when it has done all that it was given so far, on a CPU at once. Nothing waits for it.

    Args:
      device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._seconds, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    @property
    def has_passed(self) -> bool:
        """The device is so far."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait until the device is so far."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, other: Moment) -> float:
        """Seconds from another moment, by the clock of the device; both must have passed."""
        if self._event is None or other._event is None:
            return self._seconds - other._seconds
        return other._event.elapsed_time(self._event) / 1000


class Gauges:
    """Busy time and memory of a device; a CPU has no busy time, and its memory is that of the process.

    Args:
      device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._steps: list[tuple[Moment, Moment]] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: time it on the device."""
        if self.device.type != "cuda":
            yield
            return
        start = Moment(self.device)
        yield
        self._steps.append((start, Moment(self.device)))

    def steps(self) -> list[tuple[Moment, Moment]]:
        """Start and end of the steps since the last call; none on a CPU."""
        steps, self._steps = self._steps, []
        return steps

    def peak_memory_gib(self) -> float:
        """Peak of torch's allocations on the GPU since the last call; on a CPU, the process's peak so far."""
        if self.device.type != "cuda":
            unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak / 2**30


def busy_share(steps: Sequence[tuple[Moment, Moment]], seconds: float) -> float | None:
    """Share of the time that a device spent in steps; None without steps. It must have finished them."""
    return min(1.0, sum(end.since(start) for start, end in steps) / seconds) if steps else None
