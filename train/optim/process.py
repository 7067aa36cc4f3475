"""Settings of a process that trains: memory allocators and garbage collection."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager

import torch

ALLOCATION = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads either
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt(3)
COLLECT_EVERY = 50  # steps; a step leaves no cycle that holds tensors, so little memory waits for it


def set_allocator(device: torch.device, environment: MutableMapping[str, str] = os.environ) -> None:
    """Keep freed memory: a step frees all activations and the next one allocates them again.

    On a GPU, torch's segments may grow, unless the user has configured the allocator or CUDA has started; batches of
    many shapes would otherwise split memory into pieces that fit none of the next. On a CPU, glibc keeps tensors of up
    to 32 MiB; memory returned to the system comes back page by page, zeroed.
    """
    if device.type == "cuda":
        if not torch.cuda.is_initialized() and not any(name in environment for name in ALLOCATION):
            environment[ALLOCATION[0]] = "expandable_segments:True"
    elif mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 2**25)


@contextmanager
def collected_by_hand() -> Iterator[Callable[[], None]]:
    """Collect garbage between steps, at the same step on every rank; afterwards everything is as before.

    A collection takes a good part of a second in a process that has compiled a model, and all other ranks wait for it.
    What exists after the first collections, such as modules and compiled code, is not searched again.

    Yields: a function to call after each step.
    """
    was_enabled, freezes, steps = gc.isenabled(), gc.get_freeze_count() == 0, 0

    def after_step() -> None:
        nonlocal steps
        if steps % COLLECT_EVERY == 0:
            gc.collect()
            if freezes and steps <= COLLECT_EVERY:
                gc.freeze()
        steps += 1

    after_step()
    gc.disable()
    try:
        yield after_step
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
