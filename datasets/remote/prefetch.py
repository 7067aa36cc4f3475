"""Threads that work through a list in its order, until another list takes its place."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable


class Prefetcher:
    """A list of names and the threads that work through it; they end with the list.

    Args:
      num_threads: at most that many at a time.
      work: what is done with each name; where it gives False, the rest of the list is left alone.
    """

    def __init__(self, num_threads: int, work: Callable[[str], bool]) -> None:
        self._num_threads, self._work = num_threads, work
        self._lock = threading.RLock()  # a finalizer that drops the list may run while it is held
        self._names = deque[str]()
        self._running: set[threading.Thread] = set()

    def follow(self, names: Iterable[str]) -> None:
        """Work through these names; what is being done comes to its end, the rest of the former list is dropped."""
        with self._lock:
            self._names = deque(names)
            for _ in range(min(self._num_threads, len(self._names)) - len(self._running)):
                # Daemons: a process that ends waits for no download.
                thread = threading.Thread(target=self._run, name="leandit-ahead", daemon=True)
                self._running.add(thread)
                thread.start()

    def close(self) -> None:
        """Drop the list, and wait for what is being done."""
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
                        self._running.discard(threading.current_thread())  # here: the next list counts who is left
                        return
                    name = names.popleft()
                if not self._work(name):
                    with self._lock:
                        names.clear()
        finally:
            with self._lock:
                self._running.discard(threading.current_thread())
