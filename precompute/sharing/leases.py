"""Leases on shard tasks, so that coordinators on one store share the work instead of doing it twice.

They only save work: a shard is written whole, and whoever makes it on the same kind of device makes the same bytes. A
lease is a file in the store's folder whose owner touches it every few seconds, so it needs no locks of the file system,
which often end at one machine. That of a process that died on this machine is free at once, one from elsewhere when it
was not touched lately.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import SoftFileLease, Timeout

from ...datasets.disk.files import raise_if_full
from ...datasets.format.layout import LEASES
from ...datasets.format.schema import Manifest
from ...datasets.revisions.commits import Task
from ...datasets.revisions.writer import StoreWriter

LEASE_SECONDS = 60.0  # without a touch, then others take it; all coordinators must agree
TOUCH_SECONDS = 15.0
EMPTY_SECONDS = 2.0  # between the making of a lease's file and its first bytes, at most
MAY_NOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)
LOOK_SECONDS = 0.2  # between two looks at what others are making
# Without a commit: then others are taken for stuck, and their shards are made here as well. Much more than one takes.
PATIENCE_SECONDS = 7200.0


class Lease:
    """A lease on one file."""

    def __init__(self, path: Path) -> None:
        # Released by the thread that writes, not by the one that took it.
        self._lease = SoftFileLease(
            path, lease_duration=LEASE_SECONDS, heartbeat_interval=TOUCH_SECONDS, thread_local=False
        )
        self._path, self._empty_since = path, float("inf")

    def take(self) -> bool:
        """Take it, unless others hold it.

        Raises: OSError: nobody may write there.
        """
        try:
            self._lease.acquire(blocking=False)
        except Timeout:
            self._remove_empty()
            return False
        return True

    def release(self) -> None:
        """Give it back; its file goes."""
        with contextlib.suppress(OSError):
            self._lease.release()

    def _remove_empty(self) -> None:
        """Remove the file of an owner that died before it wrote its name into it, which nobody would ever take."""
        with contextlib.suppress(OSError):
            is_empty, now = not self._path.stat().st_size, time.monotonic()
            self._empty_since = min(self._empty_since, now) if is_empty else float("inf")
            if now - self._empty_since > EMPTY_SECONDS:
                self._path.unlink()


class Leases:
    """Leases on the tasks of one revision; a context manager that leaves nothing behind.

    Args:
      writer: of the revision.
      on_taken: called with each task that is handed out.
    """

    def __init__(self, writer: StoreWriter, *, on_taken: Callable[[Task], None] = lambda task: None) -> None:
        self._writer, self._on_taken = writer, on_taken
        self._folder = writer.root / LEASES
        self._held: dict[Task, Lease] = {}
        self._wanted: dict[Task, Lease] = {}  # held by others; each remembers when it saw the last touch
        self._patient, self._missing, self._since = True, -1, time.monotonic()

    def __enter__(self) -> Leases:
        return self

    def __exit__(self, *_: object) -> None:
        for task in list(self._held):
            self.release(task)
        self.sweep()

    def sweep(self) -> None:
        """Remove what dead processes left, and all leases of a revision of which nothing is missing."""
        if not self._writer.missing_tasks():  # nobody needs one any more
            for path in self._folder.glob(f"{self._writer.plan.revision}-*"):
                path.unlink(missing_ok=True)
        for path in self._folder.glob("*.lock"):
            lease = Lease(path)
            with contextlib.suppress(OSError):
                if lease.take():  # left by a process that died
                    lease.release()
        with contextlib.suppress(OSError):  # others still hold leases, or have removed it
            self._folder.rmdir()

    def take(self, tasks: list[Task]) -> Iterator[Task]:
        """Hand out the tasks that are neither committed nor leased by others; each is leased until it is released.

        Raises: OSError: this user may not write there. ResourceError: the disk is full.
        """
        for task in tasks:
            if self._writer.is_committed(task) or not self._take(task):
                continue
            if self._writer.is_committed(task):  # between the look and the lease
                self.release(task)
            else:
                self._on_taken(task)
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
        if lease := self._held.pop(task, None):
            lease.release()

    def _take(self, task: Task) -> bool:
        part, shard = task
        name = f"{self._writer.plan.revision}-{part.replace('/', '-')}-{shard}.lock"
        lease = self._wanted.pop(task, None) or Lease(self._folder / name)
        try:
            self._folder.mkdir(exist_ok=True)
            is_taken = lease.take()
        except OSError as error:
            raise_if_full(error, self._folder)
            if error.errno in MAY_NOT_WRITE:  # shards neither, and no waiting would change that
                raise
            return not self._patient  # another process has just removed the folder
        (self._held if is_taken else self._wanted)[task] = lease
        self._writer.is_shared |= not is_taken
        return is_taken or not self._patient


@contextlib.contextmanager
def alone(root: Path, name: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lease of a name while the block runs, so that others wait for its outcome instead of doing it as well.

    Where no lease can be had, because nobody may write there, the block runs all the same.

    Args:
      waiting: called again and again while somebody else holds it.
    """
    folder = root / LEASES
    lease, is_taken = Lease(folder / f"{name}.lock"), False
    with contextlib.suppress(OSError):
        while not is_taken:
            folder.mkdir(parents=True, exist_ok=True)
            is_taken = lease.take()
            if not is_taken:
                waiting()
                time.sleep(LOOK_SECONDS)
    try:
        yield
    finally:
        lease.release()
        with contextlib.suppress(OSError):  # others hold leases there, or there is a store now
            folder.rmdir()
            root.rmdir()


def seal_alone(writer: StoreWriter, encode: Callable[[list[Task]], None], waiting: Callable[[], None]) -> Manifest:
    """Seal a revision of which nothing is missing; of many processes that get here together one reads the shards again.

    Args:
      encode: makes shards again that are not as recorded, whichever part they are of.
      waiting: called again and again while another process seals.
    """
    with alone(writer.root, f"seal-{writer.plan.revision}", waiting):
        while damaged := writer.recheck():
            encode(damaged)
        return writer.seal()
