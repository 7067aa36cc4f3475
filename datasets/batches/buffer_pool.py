"""Reused memory for batches: allocating a buffer costs more than reading the batch from a warm store.

A buffer is reused once its array, and every tensor made from the array, are deleted, so no batch is ever overwritten.
Numpy views of the array do not count: hold the array, or make it a tensor. ``CopiesInFlight`` holds a buffer until an
asynchronous copy to a GPU is done.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from ..disk.fork_safe import reset_in_forks

# Bytes. Allocators start 16 bytes past a page, where some processors copy at a quarter of their speed.
ALIGNMENT = 4096
SPARE_BUFFERS = 16  # maximum kept
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
        self._spare: list[np.ndarray] = []  # in the order of their return
        # Arrays in use and their buffers, by id of the weak reference: arrays are not hashable.
        self._lent: dict[int, tuple[weakref.ref, np.ndarray]] = {}
        self._lock = threading.RLock()  # a finalizer may run while it is held

    def take(self, shape: tuple[int, ...], dtype: str | np.dtype) -> np.ndarray:
        """An uninitialised array; make it a tensor with ``torch.from_numpy``."""
        COPIES.release_done()
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            most = 4 * max(num_bytes, 1 << 16)  # far larger ones stay for larger batches
            fitting = [i for i, spare in enumerate(self._spare) if num_bytes <= spare.nbytes <= most]
            # The most recently used of the smallest: it is still in the cache.
            smallest = min(reversed(fitting), key=lambda i: self._spare[i].nbytes, default=None)
            buffer = None if smallest is None else self._spare.pop(smallest)
        if buffer is None:
            buffer = self._allocate(num_bytes)
        array = buffer[:num_bytes].view(dtype).reshape(shape)
        watch = weakref.ref(array, self._give_back)
        self._lent[id(watch)] = watch, buffer
        return array

    def _give_back(self, watch: weakref.ref) -> None:
        """Take a buffer back when its array is deleted."""
        with self._lock:
            buffer = self._lent.pop(id(watch))[1]
            self._spare.append(buffer)
            if len(self._spare) > SPARE_BUFFERS:
                del self._spare[0]

    def _allocate(self, num_bytes: int) -> np.ndarray:
        """Aligned memory, an eighth larger than needed, so that it also fits slightly larger batches."""
        room = num_bytes + num_bytes // 8 + ALIGNMENT
        memory = torch.empty(room, dtype=torch.uint8, pin_memory=self._pin).numpy()
        return memory[-memory.ctypes.data % ALIGNMENT :]

    def __reduce__(self) -> tuple:
        return _new_pool, (self._pin,)  # buffers are not shared between processes


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
