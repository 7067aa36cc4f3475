"""A folder of complete files that never exceeds its capacity, shared by threads and processes.

    FOLDER/lock          locked during eviction
    FOLDER/shards/NAME   complete files; the access time of each is its last use
    FOLDER/coming/NAME   empty, locked by the thread that fetches NAME; its bytes count already

A NAME is the file's XXH3-128 and size, so its name is enough to check a file, and files of other stores or revisions
have other names. All locks are flock(2): they work between threads and processes, and the system frees them when their
owner dies. A free lock therefore marks the leftovers of a killed process.
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
"""Eviction order of a file, by its name: smaller numbers first, ties by least recent use; None: never evicted."""

_NAME = re.compile(r"[0-9a-f]{32}-(0|[1-9][0-9]{0,14})")


class NoRoom(Exception):
    """The folder has no room now.

    Args:
      sizes: bytes of each file, fetched or being fetched, by name.
    """

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__("no room")
        self.sizes = sizes


class _Stored(NamedTuple):
    name: str
    size: int
    used_ns: int


def is_name(name: str) -> bool:
    """Whether a name is valid: it cannot leave the folder, and includes the size."""
    return bool(_NAME.fullmatch(name))


def size_of(name: str) -> int:
    """Bytes of a file, by its name."""
    return int(name.rpartition("-")[2])


class BoundedFolder:
    """The folder. Its methods may be called by any thread.

    Args:
      path: of the folder; created if missing.
      capacity: limit on the total bytes, including files that are being fetched.
      evicted: called with the names of files that this process evicted. It must not wait for a lock whose holder waits
        for a file.
    """

    def __init__(self, path: Path, capacity: int, evicted: Callable[[list[str]], None]) -> None:
        self.capacity = capacity
        self.mutex = threading.RLock()  # held while choosing files to evict; never taken before an flock
        self._evicted = evicted
        self._shards, self._coming, self._lock = path / "shards", path / "coming", path / "lock"
        self._last_use = 0
        for folder in (self._shards, self._coming):
            make_folder(folder)
        with self._locked(), contextlib.suppress(NoRoom):  # its capacity may have been larger
            self._make_room("", lambda name: 0, [])

    def path(self, name: str) -> Path:
        """Path of a fetched file."""
        return self._shards / name

    def hold(self, name: str) -> int | None:
        """Protect a file from eviction by any process, and mark it as used now.

        Returns: a descriptor for ``release_lock``; None if the file is missing.
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
        """Mark a file as used now; False if it is missing."""
        try:
            self._mark(self.path(name), os.stat(self.path(name)))
        except FileNotFoundError:
            return False
        return True

    def _mark(self, file: int | Path, found: os.stat_result) -> None:
        # Explicit, because the file system's clock ticks only every few milliseconds.
        self._last_use = now = max(self._last_use + 1, time.time_ns())
        os.utime(file, ns=(now, found.st_mtime_ns))

    def discard(self, name: str) -> None:
        """Remove a damaged file, unless it is in use."""
        with self._locked():
            self._remove(name)

    def bring(self, name: str, parts: Callable[[], Iterable[bytes]], priority: EvictionPriority) -> bool:
        """Fetch a file unless it exists; wait while another thread or process fetches it.

        Args:
          parts: returns the content; its exceptions propagate, and nothing remains of the file.
          priority: decides which files may be evicted.
        Returns: True if this call fetched it.
        Raises: NoRoom: not enough can be evicted; ResourceError: the disk is full.
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
        """Make room for a file and create its marker; if another thread holds the marker, wait until it is done.

        Returns: the locked marker; None if the file existed, or after waiting.
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
            fcntl.flock(marker, fcntl.LOCK_SH)  # until its owner is done, or dead
        finally:
            release_lock(marker)
        return None

    def _drop(self, name: str, marker: int) -> None:
        """Remove a marker; only under the lock."""
        (self._coming / name).unlink(missing_ok=True)
        release_lock(marker)

    def _make_room(self, name: str, priority: EvictionPriority, gone: list[str]) -> bool:
        """Evict files until the folder, with all markers counted, is within its capacity.

        Args:
          gone: receives the names of evicted files.
        Returns: True if the file exists.
        """
        stored, coming = self._scan()
        if any(file.name == name for file in stored):
            return True
        excess = sum(file.size for file in stored) + sum(coming.values()) - self.capacity
        with self.mutex:
            ranks = {file.name: rank for file in stored if (rank := priority(file.name)) is not None}
            candidates = sorted((f for f in stored if f.name in ranks), key=lambda f: (ranks[f.name], f.used_ns))
            if sum(file.size for file in candidates) >= excess:
                for file in candidates:
                    if excess > 0 and self._remove(file.name):
                        excess -= file.size
                        gone.append(file.name)
        if excess > 0:
            raise NoRoom({file.name: file.size for file in stored if file.name not in gone} | coming)
        return False

    def _scan(self) -> tuple[list[_Stored], dict[str, int]]:
        """Stored files, and sizes of those being fetched; leftovers of dead processes are removed."""
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
                else:  # truncated, for example by a power failure
                    remove(Path(entry.path))
        for file in stored:
            coming.pop(file.name, None)  # fetched a moment ago
        return stored, coming

    def _is_dead(self, name: str) -> bool:
        """Whether the owner of a marker is dead; then the marker is removed."""
        marker = os.open(self._coming / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not try_lock(marker):
                return False
            (self._coming / name).unlink()
            return True
        finally:
            release_lock(marker)

    def _remove(self, name: str) -> bool:
        """Remove a file unless it is in use."""
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True  # already removed
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
    """Hold an exclusive lock on a file, among all threads and processes."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        release_lock(descriptor)


def release_lock(descriptor: int) -> None:
    """Release a lock and close it; closing is not enough if a forked child has the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Take an exclusive lock if it is free.

    Raises: OSError: the file system does not support flock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
