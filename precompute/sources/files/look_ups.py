"""Looks up many files: one after the other if that takes microseconds, in threads if each is a network message."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

NUM_THREADS = 32
AT_ONCE = 64  # files that a thread looks up
PROBED = 16  # files of each batch whose look-ups are timed
SLOW_SECONDS = 1e-4  # a longer one is a network message; the kernel's cache answers in microseconds


class LookUps(Generic[T]):
    """Calls a function for many paths. Threads slow down fast calls, so their time is measured.

    Args:
      look: describes the file at a path.
    """

    def __init__(self, look: Callable[[str], T]) -> None:
        self._look, self._is_slow = look, False
        self._lock, self._threads = threading.Lock(), None

    def __call__(self, paths: Sequence[str]) -> list[T]:
        """The result for each path, in order."""
        started = time.perf_counter()
        results = [self._look(path) for path in paths[:PROBED]]
        if len(results) == PROBED:
            self._is_slow = time.perf_counter() - started > SLOW_SECONDS * PROBED
        rest = paths[PROBED:]
        if not self._is_slow:
            return results + [self._look(path) for path in rest]
        with self._lock:
            self._threads = self._threads or ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="leandit-list")
        parts = [rest[start : start + AT_ONCE] for start in range(0, len(rest), AT_ONCE)]
        return results + [
            result
            for part in self._threads.map(lambda paths: [self._look(path) for path in paths], parts)
            for result in part
        ]
