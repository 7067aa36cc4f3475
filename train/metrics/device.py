"""What a run reads of its device: how busy it is, its memory, and the arithmetic that steps make of it.

A step marks its beginning and its end in the device's own queue, and counts its FLOPs on the host from shapes that the
host knows; nothing waits. What was marked is read when the figures of some steps are.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator

import torch

from ...datasets.batches.reader import Batch
from ...datasets.format.schema import LatentSpec
from ..models.spec import ModelSpec
from ..optim.loss_scale import autocast_dtype
from .flops import latent_size_of, tokens_per_image, train_flops
from .gpus import gpu_by_name


class ComputeCounter:
    """Arithmetic and image tokens of steps, counted from the model.

    Args:
      spec: of the model.
      latent: of the store.
      peak_flops: of all devices together, in FLOP/s; 0 where it is not known.
    """

    def __init__(self, spec: ModelSpec, latent: LatentSpec, peak_flops: float) -> None:
        self._spec, self._latent, self._peak = spec, latent, peak_flops
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._flops, self._tokens = 0.0, 0

    def add(self, batch: Batch) -> None:
        """Count a step: the images of the global batch, all with captions as long as this rank's are padded to."""
        size = latent_size_of(batch.bucket, self._latent)
        self._tokens += batch.global_size * tokens_per_image(self._spec, size)
        if self._peak:
            captions = batch.captions if self._spec.takes_text else None
            length = 0 if captions is None else captions.shape[1]
            self._flops += batch.global_size * train_flops(self._spec, size, length)

    def tokens_per_second(self, seconds: float) -> float:
        """Image tokens that the model has trained on, in each of so many seconds."""
        return self._tokens / seconds

    def mfu(self, seconds: float) -> float | None:
        """Share of the arithmetic that the devices could have done in so many seconds; None: it is not known."""
        return self._flops / (self._peak * seconds) if self._peak else None


def peak_flops(device: torch.device, precision: str) -> float:
    """Peak of a device in FLOP/s, in the precision that it computes in; 0: a CPU, or a GPU that is not known.

    Args:
      precision: of the recipe; a device without bf16 computes in float32 instead.
    """
    if device.type != "cuda":
        return 0.0
    gpu = gpu_by_name(torch.cuda.get_device_name(device))
    computed_in = "fp32" if precision == "bf16" and autocast_dtype(precision, device) is None else precision
    return gpu.peak_flops(computed_in) if gpu else 0.0


class Gauges:
    """Busy time and memory of a device; on a CPU there is no busy time, and the memory is the host's.

    Args:
      device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: the time from when the device begins it until it has ended it."""
        if self._device.type != "cuda":
            yield
            return
        marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        marks[0].record()
        yield
        marks[1].record()
        self._marks.append(marks)

    def busy_share(self, seconds: float) -> float | None:
        """Share of the time that the device spent in the marked steps, which are forgotten; it must have ended them."""
        marks, self._marks = self._marks, []
        if not marks:
            return None
        return min(1.0, sum(begin.elapsed_time(end) for begin, end in marks) / 1000 / seconds)

    def peak_memory_gib(self) -> float:
        """Most that torch has handed out of the GPU since this was last read; on a CPU, the process's peak so far."""
        if self._device.type != "cuda":
            unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak / 2**30
