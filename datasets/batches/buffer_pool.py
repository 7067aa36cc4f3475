"""Memory for batches that is used again: a fresh buffer for every batch costs more than reading it from a warm store.

A buffer goes back when the array over it is gone, and the last tensor that was made of that array, whoever holds them,
so no batch is ever overwritten. Views that numpy makes of the array do not count: hold the array, or make it a tensor.
A copy to a GPU that goes on after the call reads from a buffer too: ``CopiesInFlight`` holds it until the copy is done.
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

# Bytes: allocators begin 16 bytes past a page, and there some processors copy at a quarter of their speed.
ALIGNMENT = 4096
SPARE_BUFFERS = 16  # kept at most
MAX_COPIES = 4  # batches whose copies go on at the same time; one more waits, or page-locked memory would grow


class BufferPool:
    """Buffers of any shape. Safe in threads.

    Args:
      pin: page-locked memory, which a GPU copies from without waiting.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self._pin = pin
        self.reset()
        reset_in_forks(self)

    def reset(self) -> None:
        """Without memory that is used by others."""
        self._spare: list[np.ndarray] = []  # in the order in which they came back
        # The arrays over each that are in use, by the number of the reference: an array has no hash.
        self._lent: dict[int, tuple[weakref.ref, np.ndarray]] = {}
        self._lock = threading.RLock()  # a finalizer may run while it is held

    def take(self, shape: tuple[int, ...], dtype: str | np.dtype) -> np.ndarray:
        """An array with any content; make it a tensor with ``torch.from_numpy``."""
        COPIES.release_done()
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            most = 4 * max(num_bytes, 1 << 16)  # one that is far too large waits for a batch that needs it
            fitting = [i for i, spare in enumerate(self._spare) if num_bytes <= spare.nbytes <= most]
            # Of the smallest the one used last: the caches still have it.
            smallest = min(reversed(fitting), key=lambda i: self._spare[i].nbytes, default=None)
            buffer = None if smallest is None else self._spare.pop(smallest)
        if buffer is None:
            buffer = self._allocate(num_bytes)
        array = buffer[:num_bytes].view(dtype).reshape(shape)
        watch = weakref.ref(array, self._give_back)
        self._lent[id(watch)] = watch, buffer
        return array

    def _give_back(self, watch: weakref.ref) -> None:
        """Take a buffer back when the array over it is gone."""
        with self._lock:
            buffer = self._lent.pop(id(watch))[1]
            self._spare.append(buffer)
            if len(self._spare) > SPARE_BUFFERS:
                del self._spare[0]

    def _allocate(self, num_bytes: int) -> np.ndarray:
        """Aligned memory, an eighth larger than asked for, so that it fits the next one that is a little longer."""
        room = num_bytes + num_bytes // 8 + ALIGNMENT
        memory = torch.empty(room, dtype=torch.uint8, pin_memory=self._pin).numpy()
        return memory[-memory.ctypes.data % ALIGNMENT :]

    def __reduce__(self) -> tuple:
        return _new_pool, (self._pin,)  # another process has memory of its own


class Event(Protocol):
    """The end of what a device was given so far: what is used of ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the device has come there."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


class CopiesInFlight:
    """Holds tensors of page-locked memory until a device has copied them. Safe in threads."""

    def __init__(self) -> None:
        self.reset()
        reset_in_forks(self)

    def reset(self) -> None:
        """Hold nothing: a fork has neither the device nor the copies."""
        self._held: list[tuple[Event, Sequence[torch.Tensor]]] = []  # in the order of their copies
        self._lock = threading.RLock()  # tensors that end may end a batch, whose finalizer may come here

    def hold(self, tensors: Sequence[torch.Tensor], copied: Event) -> None:
        """Hold tensors until their copy is done; waits for the oldest where too many copies are under way.

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
        del done  # not under the lock: their buffers go back to their pools now


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
