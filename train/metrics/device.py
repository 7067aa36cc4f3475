"""What a run's device can do, how long it took, and its memory."""

from __future__ import annotations

import resource
import sys
import time

import torch

from ..optim.loss_scale import autocast_dtype
from .gpus import gpu_by_name

Event = float | torch.cuda.Event
"""A moment on a device: seconds of a CPU's clock, or an event that a GPU passes once it has done all work so far."""


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


def now(device: torch.device) -> Event:
    """This moment; nothing waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def has_passed(event: Event) -> bool:
    """The device has reached it."""
    return not isinstance(event, torch.cuda.Event) or event.query()


def wait_for(event: Event) -> None:
    """Wait until the device has reached it."""
    if isinstance(event, torch.cuda.Event):
        event.synchronize()


def seconds_between(start: Event, end: Event) -> float:
    """Seconds by the clock of the device, which must have reached both."""
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1000
    assert not isinstance(end, torch.cuda.Event)
    return end - start


def peak_memory_gib(device: torch.device) -> float:
    """Peak of torch's allocations on the GPU since the last call; on a CPU, the process's peak so far."""
    if device.type != "cuda":
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak / 2**30
