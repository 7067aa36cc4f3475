"""Locks between threads and processes of one machine: flock(2), which the system frees when their owner dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if missing."""
    descriptor = open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        release_lock(descriptor)


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, which is created if missing; nothing is locked yet."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def try_lock(descriptor: int) -> bool:
    """Take an exclusive lock if it is free.

    Raises: OSError: the file system does not support flock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release_lock(descriptor: int) -> None:
    """Release a lock and close it; closing is not enough if a forked child has the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
