"""Reused memory for batches: allocating a buffer costs more than reading the batch from a warm store.

A buffer is reused once nothing refers to its memory: no array, view or tensor made from it. Page-locked memory is
torch's: its allocator reuses a block only after the asynchronous copies from it are done.
"""

from __future__ import annotations

import functools
import math
import sys
import threading

import numpy as np
import torch

from ..disk.fork_safe import reset_in_forks

# Bytes. Allocators start 16 bytes past a page, where some processors copy at a quarter of their speed.
ALIGNMENT = 4096
MAX_BUFFERS = 32  # kept, used or not


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
        """An uninitialized array; make it a tensor with ``torch.from_numpy``, which is page-locked where asked for."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if self._pin:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().view(dtype).reshape(shape)
        most = 4 * max(num_bytes, 1 << 16)  # far larger ones stay for larger batches
        with self._lock:
            sizes = [buffer.nbytes for buffer in self._buffers]
            fitting = [
                i
                for i, size in enumerate(sizes)
                if num_bytes <= size <= most and _references(self._buffers[i]) == UNUSED
            ]
            # The most recently used of the smallest: it is still in the cache.
            best = min(reversed(fitting), key=sizes.__getitem__, default=None)
            buffer = _allocate(num_bytes) if best is None else self._buffers.pop(best)
            del self._buffers[: 1 - MAX_BUFFERS]  # the system gets their memory back when nothing refers to it
            self._buffers.append(buffer)
            return buffer[:num_bytes].view(dtype).reshape(shape)

    def __reduce__(self) -> tuple:
        return functools.partial(BufferPool, pin=self._pin), ()  # buffers are not shared between processes


def _allocate(num_bytes: int) -> np.ndarray:
    """Aligned memory, an eighth larger than needed, so that it also fits slightly larger batches."""
    memory = np.empty(num_bytes + num_bytes // 8 + ALIGNMENT, np.uint8)  # numpy asks for huge pages, torch does not
    return memory[-memory.ctypes.data % ALIGNMENT :]


def _references(buffer: np.ndarray) -> int:
    """References to the memory of a buffer: every view and tensor of it counts."""
    return sys.getrefcount(buffer.base)


UNUSED = _references(_allocate(0))  # of a buffer that is not lent
