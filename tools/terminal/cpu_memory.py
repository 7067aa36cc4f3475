"""What a process on a CPU keeps of the memory that it has freed."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt(3)
MOST_FREE, LARGEST_KEPT = 2**31 - 1, 2**25  # bytes; the most that it takes for each


def keep_freed_memory() -> None:
    """Let glibc keep what is freed: every training step frees all activations, and asks for them again.

    Given back to the system each time, they come back page by page, zeroed, which a step waits for. Other C
    libraries are left as they are, and so are tensors of more than 32 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, MOST_FREE)
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
