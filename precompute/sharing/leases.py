"""Leases on shards, so that processes on one store share the work instead of repeating it.

Leases only save work: shards are written atomically, and the same kind of device makes the same bytes. A lease is a
file in the store's folder that its owner touches every few seconds, so it needs no file system locks, which often do
not work across machines. The lease of a process that died on this machine is free at once, one from another machine
when it has not been touched for LEASE_SECONDS.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import SoftFileLease, Timeout

from ...datasets.disk.files import raise_resource_error
from ...datasets.format.layout import LEASES, Task
from ...datasets.format.schema import Manifest
from ...datasets.revisions.writer import StoreWriter

LOG = logging.getLogger(__name__)
LEASE_SECONDS = 60.0  # without a touch, until others may take it; all processes must agree
TOUCH_SECONDS = 15.0
EMPTY_SECONDS = 2.0  # at most, from creating a lease's file to its first bytes
MAY_NOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)
POLL_SECONDS = 0.2  # between two checks of other processes
# Without a commit, until other processes count as stuck and their shards are encoded here; far more than a shard takes.
PATIENCE_SECONDS = 7200.0
ALL_SHARDS = slice(0, None, 1)


class Lease:
    """A lease on one file."""

    def __init__(self, path: Path) -> None:
        # thread_local=False: the writing thread releases it, not the thread that took it.
        self._lease = SoftFileLease(
            path, lease_duration=LEASE_SECONDS, heartbeat_interval=TOUCH_SECONDS, thread_local=False
        )
        self._path, self._empty_since = path, float("inf")

    def take(self) -> bool:
        """Take it unless another process holds it.

        Raises: OSError: the folder is not writable.
        """
        try:
            self._lease.acquire(blocking=False)
        except Timeout:
            self._remove_empty()
            return False
        return True

    def release(self) -> None:
        """Release it and remove its file."""
        with contextlib.suppress(OSError):
            self._lease.release()

    def _remove_empty(self) -> None:
        """Remove the file of an owner that died before writing its name, which would block forever."""
        with contextlib.suppress(OSError):
            is_empty, now = not self._path.stat().st_size, time.monotonic()
            self._empty_since = min(self._empty_since, now) if is_empty else float("inf")
            if now - self._empty_since > EMPTY_SECONDS:
                self._path.unlink()


class Leases:
    """Leases on the shards of one revision; a context manager that leaves nothing behind.

    Args:
      writer: of the revision.
    """

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self._folder = writer.root / LEASES
        self._held: dict[Task, Lease] = {}
        self._wanted: dict[Task, Lease] = {}  # held by others; each remembers the last touch
        self._patient, self._missing, self._since = True, -1, time.monotonic()

    def __enter__(self) -> Leases:
        return self

    def __exit__(self, *_: object) -> None:
        for task in list(self._held):
            self.release(task)
        self.sweep()

    def sweep(self) -> None:
        """Remove leases of dead processes, and all leases of a complete revision."""
        if all(map(self._writer.is_committed, self._writer.plan.layout.tasks())):
            for path in self._folder.glob(f"{self._writer.plan.revision}-*"):
                path.unlink(missing_ok=True)
        for path in self._folder.glob("*.lock"):
            lease = Lease(path)
            with contextlib.suppress(OSError):
                if lease.take():  # its owner died
                    lease.release()
        with contextlib.suppress(OSError):  # others hold leases, or have removed it
            self._folder.rmdir()

    def take(self, tasks: list[Task]) -> Iterator[Task]:
        """Yield tasks that are neither committed nor leased by others; each is leased until ``release``.

        Raises: OSError: the folder is not writable. ResourceError: the disk is full.
        """
        for task in tasks:
            if self._writer.is_committed(task) or not self._take(task):
                continue
            if self._writer.is_committed(task):  # between the check and the lease
                self.release(task)
            else:
                yield task

    def wait(self) -> None:
        """Wait a moment for other processes; one without commits for PATIENCE_SECONDS counts as stuck."""
        missing = len(self._writer.missing_tasks())
        if missing != self._missing:
            self._missing, self._since = missing, time.monotonic()
        self._patient = time.monotonic() - self._since < PATIENCE_SECONDS
        time.sleep(POLL_SECONDS)

    def release(self, task: Task) -> None:
        """Release a lease."""
        if lease := self._held.pop(task, None):
            lease.release()

    def _take(self, task: Task) -> bool:
        part, shard = task
        name = f"{self._writer.plan.revision}-{part.replace('/', '-')}-{shard}.lock"
        waited_for = self._wanted.pop(task, None)
        lease = waited_for or Lease(self._folder / name)
        try:
            self._folder.mkdir(exist_ok=True)
            is_taken = lease.take()
        except OSError as error:
            raise_resource_error(error, self._folder)
            if error.errno in MAY_NOT_WRITE:  # shards cannot be written either
                raise
            return not self._patient  # another process removed the folder
        (self._held if is_taken else self._wanted)[task] = lease
        if not is_taken and waited_for is None:
            LOG.info("shard %d of '%s' is left to the process that holds its lease", shard, part)
        self._writer.is_shared |= not is_taken
        return is_taken or not self._patient


def part_of(text: str) -> slice:
    """The shards of one of several independent processes, as of a Slurm array: "I/N" is every N-th from the I-th on.

    Raises: ValueError: malformed, or I is not from 1 to N.
    """
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    number, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= count:
        raise ValueError(f"'{text}': expected I/N with I from 1 to N, such as 3/8.")
    return slice(number - 1, None, count)


@contextlib.contextmanager
def alone(root: Path, name: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a named lease while the block runs, so that other processes wait for its result.

    If the folder is not writable, the block runs without a lease.

    Args:
      waiting: called repeatedly while another process holds the lease.
    """
    folder = root / LEASES
    lease, is_taken = Lease(folder / f"{name}.lock"), False
    with contextlib.suppress(OSError):
        while not is_taken:
            folder.mkdir(parents=True, exist_ok=True)
            is_taken = lease.take()
            if not is_taken:
                waiting()
                time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        lease.release()
        with contextlib.suppress(OSError):  # others hold leases, or the store exists now
            folder.rmdir()
            root.rmdir()


def seal_alone(writer: StoreWriter, encode: Callable[[list[Task]], None], waiting: Callable[[], None]) -> Manifest:
    """Seal a complete revision; of several processes only one reads the shards again.

    Args:
      encode: makes shards again that differ from their records, of any part.
      waiting: called repeatedly while another process seals.
    """
    with alone(writer.root, f"seal-{writer.plan.revision}", waiting):
        while damaged := writer.recheck():
            encode(damaged)
        return writer.seal()
