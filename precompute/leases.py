"""Leases on shard tasks, so that two coordinators on one store share the work instead of doing it twice.

They only save work: a shard is written whole, and everybody who makes it makes the same bytes. On a file system whose
locks do not reach other machines, shards are made twice, and nothing else happens. The lock of a process that dies is
free at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ..datasets.commits import Task
from ..datasets.layout import LEASES
from ..datasets.writer import StoreWriter

LOOK_SECONDS = 0.2  # between two looks at what others are making
PATIENCE_SECONDS = 600.0  # without a commit: then others are taken for stuck, and their shards are made here as well


class Leases:
    """Leases on the tasks of one revision; a context manager that leaves nothing behind.

    Args:
      writer: of the revision.
    """

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self._folder = writer.root / LEASES
        self._held: dict[Task, FileLock] = {}
        self._patient, self._missing, self._since = True, -1, time.monotonic()

    def __enter__(self) -> Leases:
        return self

    def __exit__(self, *_: object) -> None:
        for task in list(self._held):
            self.release(task)
        for path in list(self._folder.glob("*.lock")):  # left by processes that died: who lives holds its lock
            with contextlib.suppress(Timeout, OSError), FileLock(path, timeout=0):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others still hold leases, or have removed it
            self._folder.rmdir()

    def take(self, tasks: list[Task]) -> Iterator[Task]:
        """Hand out the tasks that are neither committed nor leased by others; each is leased until it is released."""
        for task in tasks:
            if self._writer.is_committed(task) or not self._lease(task):
                continue
            if self._writer.is_committed(task):  # between the look and the lease
                self.release(task)
            else:
                yield task

    def wait(self) -> None:
        """Let others go on with what they hold, for a moment; who holds it for too long is taken for stuck."""
        missing = len(self._writer.missing_tasks())
        if missing != self._missing:
            self._missing, self._since = missing, time.monotonic()
        self._patient = time.monotonic() - self._since < PATIENCE_SECONDS
        time.sleep(LOOK_SECONDS)

    def release(self, task: Task) -> None:
        """Give a lease back."""
        if lock := self._held.pop(task, None):
            with contextlib.suppress(OSError):
                Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()

    def _lease(self, task: Task) -> bool:
        part, shard = task
        self._folder.mkdir(exist_ok=True)
        name = f"{self._writer.plan.revision}-{part.replace('/', '-')}-{shard}.lock"
        lock = FileLock(self._folder / name, thread_local=False)  # released by the thread that writes
        try:
            lock.acquire(blocking=False)
        except (Timeout, OSError):  # OSError: another process has just removed the folder
            return not self._patient
        self._held[task] = lock
        return True
