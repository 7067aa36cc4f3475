"""How much freed memory a process keeps that computes on a CPU."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt(3)
MOST_FREE, LARGEST_KEPT = 2**31 - 1, 2**25  # bytes; the most that it takes for each


def keep_freed_memory() -> None:
    """Make glibc keep freed memory: every training step frees all activations and allocates them again.

    Memory returned to the system comes back page by page, zeroed, which slows down each step. Has no effect on other C
    libraries, or on tensors of more than 32 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, MOST_FREE)
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
