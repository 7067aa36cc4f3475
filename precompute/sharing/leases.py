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
import os
import re
import stat
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
RETRY_SECONDS = 0.001  # after another process has removed or created the folder of the leases at the same time
MAY_NOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)
CANNOT_WRITE = (*MAY_NOT_WRITE, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT)
MOVED = (errno.ENOENT, errno.EEXIST, errno.ESTALE)
MOVED_SECONDS = 10.0  # of tries in a row, until such an error counts as one of the file system
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
        self._path = path
        self._empty_file = (0, 0)  # inode and time of the empty file that was seen last
        self._empty_since = time.monotonic()

    def take(self) -> bool:
        """Take it unless another process holds it.

        Raises: OSError: the folder is not writable, or it does not exist.
        """
        try:
            self._lease.acquire(blocking=False)
        except Timeout:
            self._remove_empty()
            return False
        if not self._is_published():
            self.release()
            return False
        return True

    def release(self) -> None:
        """Release it and remove its file."""
        with contextlib.suppress(OSError):
            self._lease.release()

    def _is_published(self) -> bool:
        """Whether the file at the path is this owner's: a slow owner's empty file may count as that of a dead one."""
        try:
            return (self._lease.token or "no token") in self._path.read_text()
        except (OSError, UnicodeDecodeError):
            return False

    def _remove_empty(self) -> None:
        """Remove the file of an owner that died before writing its name, which would block forever."""
        with contextlib.suppress(OSError):
            status = self._path.stat()
            file = (status.st_ino, status.st_ctime_ns)
            if status.st_size or file != self._empty_file:
                self._empty_file = file
                self._empty_since = time.monotonic()
            elif time.monotonic() - self._empty_since > EMPTY_SECONDS:
                self._path.unlink()


def _is_something_else(folder: Path) -> bool:
    """Whether a path exists and is no folder, nor a link to one; other processes may create and remove it meanwhile."""
    try:
        mode = folder.lstat().st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(mode) and not (stat.S_ISLNK(mode) and folder.is_dir())


class LeaseFolder:
    """The folder of a store's leases, which exists only while there are leases.

    Args:
      root: the store. Its folder is made if it is missing, and removed again if nothing else came into it.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / LEASES
        self._root = root
        self._has_made_root = False

    def make(self) -> None:
        """Create it where it is missing.

        Raises: OSError: it cannot be created. FileNotFoundError and FileExistsError: another process removed or created
          it meanwhile, so a second try may succeed.
        """
        for folder in (self._root, self.path):
            if _is_something_else(folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        with contextlib.suppress(FileExistsError):
            self._root.mkdir(parents=True)
            self._has_made_root = True
        self.path.mkdir(exist_ok=True)

    def remove_empty(self) -> None:
        """Remove it unless it holds leases, and then the store's folder, if this object made it and it is empty."""
        with contextlib.suppress(OSError):  # others hold leases, or the store exists now
            self.path.rmdir()
            if self._has_made_root:
                self._root.rmdir()


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

    If nothing can be written to the folder, the block runs without a lease.

    Args:
      waiting: called repeatedly while another process holds the lease.
    Raises: OSError: the file system fails.
    """
    folder = LeaseFolder(root)
    lease = Lease(folder.path / f"{name}.lock")
    try:
        while not _take(lease, folder):
            waiting()
            time.sleep(POLL_SECONDS)
        yield
    finally:
        lease.release()
        folder.remove_empty()


def _take(lease: Lease, folder: LeaseFolder) -> bool:
    """Take a lease unless another process holds it; True also where nothing can be written, so nobody can have it."""
    end = time.monotonic() + MOVED_SECONDS
    while True:
        try:
            folder.make()
            return lease.take()
        except OSError as error:
            if error.errno in CANNOT_WRITE:
                return True
            if error.errno not in MOVED or time.monotonic() > end:
                raise
            time.sleep(RETRY_SECONDS)


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
