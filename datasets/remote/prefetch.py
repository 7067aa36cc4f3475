"""Threads that work through a list in order, until a new list replaces it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable


class Prefetcher:
    """A list of names and the threads that work through it; the threads end with the list.

    Args:
      num_threads: maximum number of threads.
      work: called with each name; if it returns False, the rest of the list is dropped.
    """

    def __init__(self, num_threads: int, work: Callable[[str], bool]) -> None:
        self._num_threads, self._work = num_threads, work
        self._lock = threading.RLock()  # a finalizer that drops the list may run while it is held
        self._names = deque[str]()
        self._running: set[threading.Thread] = set()

    def follow(self, names: Iterable[str]) -> None:
        """Work through these names; the rest of the previous list is dropped, current calls finish."""
        with self._lock:
            self._names = deque(names)
            for _ in range(min(self._num_threads, len(self._names)) - len(self._running)):
                # Daemons: process exit must not wait for downloads.
                thread = threading.Thread(target=self._run, name="leandit-ahead", daemon=True)
                self._running.add(thread)
                thread.start()

    def close(self) -> None:
        """Drop the list, and wait for current calls."""
        with self._lock:
            self._names = deque()
            running = set(self._running)
        for thread in running:
            thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    names = self._names
                    if not names:
                        self._running.discard(threading.current_thread())  # under the lock, for the next list's count
                        return
                    name = names.popleft()
                if not self._work(name):
                    with self._lock:
                        names.clear()
        finally:
            with self._lock:
                self._running.discard(threading.current_thread())
