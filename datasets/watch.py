"""Notice that a mapped file is written to: its rows are then no longer those that were checked.

A map of a file that gets shorter ends the process with SIGBUS, and one that is written to gives torn rows. Nothing of
leandit does either, files are only ever replaced whole, which a map does not see. For what others do, Linux tells
(inotify), at the price of one system call a batch. Elsewhere sizes and times are looked at twice a second. Neither
sees a write through a map of another process, nor what another machine does on a network file system: read there with
``access="pread"``.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
import threading
import time

IN_MODIFY = 0x2
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
POLL_SECONDS = 0.5
READ_BYTES = 1 << 16


class ChangeWatch:
    """Which of some files were written to since they were added. For the process that made it, not for its forks."""

    def __init__(self) -> None:
        self.changed: set[str] = set()
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}  # by inotify's number
        self._marks: dict[str, tuple[int, int]] = {}  # size and time, of files that inotify does not watch
        self._looked = time.monotonic()
        self._libc, self._queue = _inotify()
        if self._queue is not None:
            self._poll = select.epoll()  # asks without an exception where there is nothing, and from many threads
            self._poll.register(self._queue, select.EPOLLIN)

    def add(self, path: str) -> None:
        """Watch a file from now on."""
        with self._lock:
            if self._libc is not None:
                number = self._libc.inotify_add_watch(self._queue, os.fsencode(path), IN_MODIFY)
                if number >= 0:
                    self._names[number] = path
                    return
            self._marks[path] = _mark(path)  # the user's limit of watches is reached, or there is no inotify

    def look(self) -> set[str]:
        """Files that were written to, of all that were added."""
        if self._queue is not None and self._poll.poll(0, 1):
            with self._lock:
                self._read_events(self._queue)
        if self._marks and time.monotonic() - self._looked > POLL_SECONDS:
            self._looked = time.monotonic()
            with self._lock:
                self.changed |= {path for path, mark in self._marks.items() if _mark(path) != mark}
        return self.changed

    def _read_events(self, queue: int) -> None:
        try:
            events, position = os.read(queue, READ_BYTES), 0
        except BlockingIOError:
            return  # another thread has read them
        while position < len(events):
            number, mask, _, length = _EVENT.unpack_from(events, position)
            position += _EVENT.size + length
            if mask & IN_MODIFY:
                self.changed.add(self._names[number])

    def __del__(self) -> None:
        if self._queue is not None:
            self._poll.close()
            os.close(self._queue)


def _mark(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _inotify() -> tuple[ctypes.CDLL, int] | tuple[None, None]:
    if sys.platform != "linux":
        return None, None
    libc = ctypes.CDLL(None, use_errno=True)
    queue = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    return (libc, queue) if queue >= 0 else (None, None)
