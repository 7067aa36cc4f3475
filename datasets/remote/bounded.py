"""A folder of whole files that never holds more than its room, shared by threads and processes. Knows nothing remote.

    FOLDER/lock          locked while somebody makes room
    FOLDER/shards/NAME   whole files; the time of access of each is the time of its last use
    FOLDER/coming/NAME   empty: somebody, who has it locked, is bringing NAME, and its bytes count already

A NAME is the file's XXH3-128 and its size, so a file can be checked by its name, and one of another store or revision
is never taken for it. All locks are those of flock(2): they hold between threads as between processes, and the system
frees them when their owner dies. So what a killed process has left is known by its lock being free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..disk.files import TEMPORARY_PREFIX, make_folder, remove, write_atomic

EvictionPriority = Callable[[str], int | None]
"""When a file goes, by its name: smaller numbers first, then what was not used for longest; None: never."""

_NAME = re.compile(r"[0-9a-f]{32}-(0|[1-9][0-9]{0,14})")


class NoRoom(Exception):
    """There is no room now.

    Args:
      there: sizes in bytes of what is there or coming, by name.
    """

    def __init__(self, there: dict[str, int]) -> None:
        super().__init__("no room")
        self.there = there


class _Stored(NamedTuple):
    name: str
    size: int
    used_ns: int


def is_name(name: str) -> bool:
    """A file may be called so: it leads out of no folder, and its size can be read from it."""
    return bool(_NAME.fullmatch(name))


def size_of(name: str) -> int:
    """Bytes of a file, by its name."""
    return int(name.rpartition("-")[2])


class BoundedFolder:
    """The folder. Its methods may be called by any thread.

    Args:
      path: of the folder; made if missing.
      capacity: bytes that the files together may have, those included that are coming.
      evicted: called with the names of files that this process removed for others. It must wait for no lock that is
        held by who waits for a file.
    """

    def __init__(self, path: Path, capacity: int, evicted: Callable[[list[str]], None]) -> None:
        self.capacity = capacity
        self.mutex = threading.RLock()  # held while it is decided what goes; never taken before a lock of the system
        self._evicted = evicted
        self._shards, self._coming, self._lock = path / "shards", path / "coming", path / "lock"
        self._last_use = 0
        for folder in (self._shards, self._coming):
            make_folder(folder)
        with self._locked(), contextlib.suppress(NoRoom):  # it may have had more room before
            self._make_room("", lambda name: 0, [])

    def path(self, name: str) -> Path:
        """Where a file is, once it is there."""
        return self._shards / name

    def hold(self, name: str) -> int | None:
        """Keep a file from being removed by any process, and mark it as used now.

        Returns: a descriptor for ``release_lock``; None where the file is not there.
        """
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        found = os.fstat(descriptor)
        if not found.st_nlink or found.st_size != size_of(name):
            release_lock(descriptor)
            return None
        self._mark(descriptor, found)
        return descriptor

    def use(self, name: str) -> bool:
        """Mark a file as used now; False where it is not there."""
        try:
            self._mark(self.path(name), os.stat(self.path(name)))
        except FileNotFoundError:
            return False
        return True

    def _mark(self, file: int | Path, found: os.stat_result) -> None:
        # Given, not "now": the clock of the file system ticks every few milliseconds only. The time of change stays as
        # it was: by it a reader sees that somebody wrote to a file (``change_watch.py``).
        self._last_use = now = max(self._last_use + 1, time.time_ns())
        os.utime(file, ns=(now, found.st_mtime_ns))

    def discard(self, name: str) -> None:
        """Remove a file whose bytes are wrong, unless somebody reads it."""
        with self._locked():
            self._remove(name)

    def bring(self, name: str, parts: Callable[[], Iterable[bytes]], priority: EvictionPriority) -> bool:
        """Put a file into the folder, unless it is there; wait while somebody else is bringing it.

        Args:
          parts: gives the content; what it raises goes on to the caller, and nothing is left behind.
          priority: what may go to make room.
        Returns: True where this call has brought it.
        Raises: NoRoom: nothing that may go is enough; ResourceError: the disk is full.
        """
        while (marker := self._claim(name, priority)) is None:
            if self.path(name).exists():
                return False
        try:
            write_atomic(self.path(name), parts())
            self.use(name)
        finally:
            with self._locked():
                self._drop(name, marker)
        return True

    def _claim(self, name: str, priority: EvictionPriority) -> int | None:
        """Make room for a file and say that it is coming, as one; where somebody else has said so, wait for its end.

        Returns: the locked marker; None where the file was there, or after waiting.
        """
        gone: list[str] = []
        try:
            with self._locked():
                marker = os.open(self._coming / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                if try_lock(marker):
                    is_ready = False
                    try:
                        is_ready = not self._make_room(name, priority, gone)
                    finally:
                        if not is_ready:
                            self._drop(name, marker)
                    return marker if is_ready else None
        finally:
            if gone:
                self._evicted(gone)
        try:
            fcntl.flock(marker, fcntl.LOCK_SH)  # until whoever brings it is done, or dead
        finally:
            release_lock(marker)
        return None

    def _drop(self, name: str, marker: int) -> None:
        """Take back that a file is coming; only under the lock."""
        (self._coming / name).unlink(missing_ok=True)
        release_lock(marker)

    def _make_room(self, name: str, priority: EvictionPriority, gone: list[str]) -> bool:
        """Remove what must go so that a file fits whose marker is there, and so counts already.

        Args:
          gone: takes the names of what is removed.
        Returns: True where the file is there.
        """
        stored, coming = self._scan()
        if any(file.name == name for file in stored):
            return True
        excess = sum(file.size for file in stored) + sum(coming.values()) - self.capacity
        with self.mutex:
            places = {file.name: place for file in stored if (place := priority(file.name)) is not None}
            leaving = sorted((f for f in stored if f.name in places), key=lambda f: (places[f.name], f.used_ns))
            if sum(file.size for file in leaving) >= excess:
                for file in leaving:
                    if excess > 0 and self._remove(file.name):
                        excess -= file.size
                        gone.append(file.name)
        if excess > 0:
            raise NoRoom({file.name: file.size for file in stored if file.name not in gone} | coming)
        return False

    def _scan(self) -> tuple[list[_Stored], dict[str, int]]:
        """Files that are there, and sizes of those that are coming; what the dead have left is removed."""
        coming: dict[str, int] = {}
        for entry in os.scandir(self._coming):
            if is_name(entry.name) and not self._is_dead(entry.name):
                coming[entry.name] = size_of(entry.name)
        stored = []
        for entry in os.scandir(self._shards):
            if entry.name.startswith(TEMPORARY_PREFIX):
                if entry.name.rpartition("@")[2] not in coming:
                    remove(Path(entry.path))
            elif is_name(entry.name):
                found = entry.stat()
                if found.st_size == size_of(entry.name):
                    stored.append(_Stored(entry.name, found.st_size, found.st_atime_ns))
                else:  # not ours: cut by somebody, or by a disk that lost power
                    remove(Path(entry.path))
        for file in stored:
            coming.pop(file.name, None)  # it has just come
        return stored, coming

    def _is_dead(self, name: str) -> bool:
        """Whoever was bringing a file is gone; then its marker is removed."""
        marker = os.open(self._coming / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not try_lock(marker):
                return False
            (self._coming / name).unlink()
            return True
        finally:
            release_lock(marker)

    def _remove(self, name: str) -> bool:
        """Remove a file unless somebody holds it."""
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True  # somebody emptied the folder
        try:
            if not try_lock(descriptor):
                return False
            remove(self.path(name))
            return True
        finally:
            release_lock(descriptor)

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return locked(self._lock)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file alone, among all threads and processes."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        release_lock(descriptor)


def release_lock(descriptor: int) -> None:
    """Free a lock; closing alone would not, where the process has forked meanwhile and its child has the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Take a lock alone, unless somebody has it.

    Raises: OSError: the file system has no such locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
