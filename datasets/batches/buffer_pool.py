"""Reused memory for batches: allocating a buffer costs more than reading the batch from a warm store.

A buffer is reused once nothing refers to its memory: no array, view or tensor made from it. ``CopiesInFlight`` holds it
until an asynchronous copy to a GPU is done.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from ..disk.fork_safe import reset_in_forks

# Bytes. Allocators start 16 bytes past a page, where some processors copy at a quarter of their speed.
ALIGNMENT = 4096
MAX_BUFFERS = 32  # kept, used or not
MAX_COPIES = 4  # concurrent copies of batches; more would grow page-locked memory


class BufferPool:
    """Buffers of any shape. Thread-safe.

    Args:
      pin: use page-locked memory, which a GPU copies asynchronously.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self._pin = pin
        self.reset()
        reset_in_forks(self)

    def reset(self) -> None:
        """Forget all buffers."""
        self._buffers: list[np.ndarray] = []  # in the order of their last use
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: str | np.dtype) -> np.ndarray:
        """An uninitialised array; make it a tensor with ``torch.from_numpy``."""
        COPIES.release_done()
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        most = 4 * max(num_bytes, 1 << 16)  # far larger ones stay for larger batches
        with self._lock:
            sizes, counts = [buffer.nbytes for buffer in self._buffers], _reference_counts(self._buffers)
            fitting = [i for i, size in enumerate(sizes) if num_bytes <= size <= most and counts[i] == UNUSED]
            # The most recently used of the smallest: it is still in the cache.
            best = min(reversed(fitting), key=sizes.__getitem__, default=None)
            buffer = self._allocate(num_bytes) if best is None else self._buffers.pop(best)
            del self._buffers[: 1 - MAX_BUFFERS]  # the system gets their memory back when nothing refers to it
            self._buffers.append(buffer)
            return buffer[:num_bytes].view(dtype).reshape(shape)

    def _allocate(self, num_bytes: int) -> np.ndarray:
        """Aligned memory, an eighth larger than needed, so that it also fits slightly larger batches."""
        room = num_bytes + num_bytes // 8 + ALIGNMENT
        # numpy asks the system for huge pages, torch does not: a gather of captions into them is faster.
        memory = (
            torch.empty(room, dtype=torch.uint8, pin_memory=True).numpy() if self._pin else np.empty(room, np.uint8)
        )
        return memory[-memory.ctypes.data % ALIGNMENT :]

    def __reduce__(self) -> tuple:
        return _new_pool, (self._pin,)  # buffers are not shared between processes


def _reference_counts(buffers: Sequence[np.ndarray]) -> list[int]:
    """How many references there are to the memory of each buffer: every view and tensor of it counts."""
    return [sys.getrefcount(buffer.base) for buffer in buffers]


UNUSED = _reference_counts([np.empty(1)[:]])[0]  # of a buffer that is not lent


class Event(Protocol):
    """The end of the work submitted to a device: the part of ``torch.cuda.Event`` that is used."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached it."""
        ...


class CopiesInFlight:
    """Holds tensors of page-locked memory until a device has copied them. Thread-safe."""

    def __init__(self) -> None:
        self.reset()
        reset_in_forks(self)

    def reset(self) -> None:
        """Hold nothing: a fork has no device and no copies."""
        self._held: list[tuple[Event, Sequence[torch.Tensor]]] = []  # in the order of their copies
        self._lock = threading.RLock()  # deleting tensors may run finalizers that come here

    def hold(self, tensors: Sequence[torch.Tensor], copied: Event) -> None:
        """Hold tensors until their copy is done; waits for the oldest if too many are in flight.

        Args:
          copied: recorded on the stream of the copy, after it.
        """
        with self._lock:
            self._held.append((copied, tensors))
            waiting = [event for event, _ in self._held[:-MAX_COPIES]]  # not their tensors, which are released below
        for oldest in waiting:
            oldest.synchronize()
        self.release_done()

    def release_done(self) -> None:
        """Release the tensors of all copies that are done."""
        with self._lock:
            done, going_on = [], []
            for entry in self._held:
                (done if entry[0].query() else going_on).append(entry)
            self._held = going_on
        del done  # outside of the lock: this returns their buffers to the pools


COPIES = CopiesInFlight()


def hold_while_copied(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Keep the buffers of tensors that were just copied to a GPU with ``non_blocking`` until the copy is done.

    Only memory that is page-locked is read after the call returns; CUDA stages other memory before it does.

    Args:
      device: to which they were copied, on its current stream.
    Source: CUDA Runtime API, "API synchronization behavior", memcpy.
    """
    pinned = [tensor for tensor in tensors if tensor.is_pinned()]
    if pinned and device.type == "cuda":
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))
        COPIES.hold(pinned, copied)


def _new_pool(pin: bool) -> BufferPool:
    return BufferPool(pin=pin)
