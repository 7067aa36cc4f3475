"""Locks between threads and processes of one machine: flock(2), which the system frees when their owner dies.

Python's descriptors are closed by ``exec``, and those of ``locked`` and ``hold`` by a fork: no child keeps a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_held: set[int] = set()


def try_lock(descriptor: int) -> bool:
    """Take an exclusive lock if it is free.

    Raises: OSError: the file system does not support flock; NFS does not for folders.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release_lock(descriptor: int) -> None:
    """Release a lock and close it; closing is not enough if a forked child has the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if missing."""
    with _closed_in_forks(os.open(path, os.O_RDWR | os.O_CREAT, 0o666)) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def try_locked(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on a file, which is created if missing, unless another process holds it.

    Yields: False if another process holds it; True also on a file system without locks.
    """
    with _closed_in_forks(os.open(path, os.O_RDWR | os.O_CREAT, 0o666)) as descriptor:
        try:
            is_held = try_lock(descriptor)
        except OSError:
            is_held = True
        yield is_held


@contextlib.contextmanager
def hold(path: Path, create: Callable[[Path], None] | None = None) -> Iterator[None]:
    """Lock a file or folder while the block runs, wherever it is renamed to; nothing happens without flock.

    Args:
      create: creates what is missing; called again if a sweep removes it before it is locked.
    Raises: FileNotFoundError: it is missing, or another process has just removed it.
    """
    while True:
        if create:
            create(path)
        try:
            descriptor = open_existing(path)
        except FileNotFoundError:
            if create:
                continue
            raise
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_at(descriptor, path):
            break
        release_lock(descriptor)
    with _closed_in_forks(descriptor):
        yield


@contextlib.contextmanager
def _closed_in_forks(descriptor: int) -> Iterator[int]:
    """Release a lock after the block; a fork meanwhile closes its copy of the descriptor, so it keeps no lock."""
    _held.add(descriptor)
    try:
        yield descriptor
    finally:
        if descriptor in _held:
            _held.remove(descriptor)
            release_lock(descriptor)


def open_existing(path: Path) -> int:
    """A descriptor of a file or folder. An exclusive lock on NFS needs a writable one, which a folder cannot have."""
    return os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file or folder still has this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _close_in_fork() -> None:
    for descriptor in _held:
        os.close(descriptor)  # without unlocking: the lock belongs to the parent
    _held.clear()


os.register_at_fork(after_in_child=_close_in_fork)
