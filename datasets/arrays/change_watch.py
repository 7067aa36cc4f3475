"""Notice when something writes to a mapped file: its rows are then no longer those that were checked.

Reading the map of a file that was truncated ends the process with SIGBUS; reading one that is overwritten gives torn
rows. leandit does neither: it only replaces files whole, which does not affect a map. Other programs might. Linux
reports their writes (inotify) at the cost of one system call a batch; one queue serves all stores of a process, because
a user may have only 128. Elsewhere, sizes and times are compared twice a second. Neither notices a write through the
map of another process, or by another machine on a network file system: read there with ``access="pread"``.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
import threading
import time
import warnings
import weakref
from functools import cache

from ..disk.fork_safe import reset_in_forks
from ..errors import StoreWarning

IN_MODIFY, IN_OVERFLOW, IN_IGNORED = 0x2, 0x4000, 0x8000
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
POLL_SECONDS = 0.5
READ_BYTES = 1 << 16


class ChangeWatch:
    """Reports which files were written to after they were added. Of no use in a fork of the process that made it."""

    def __init__(self) -> None:
        self.changed: set[str] = set()
        self._lock = threading.Lock()
        self._marks: dict[str, _Mark | None] = {}  # of files that inotify does not watch
        self._looked = time.monotonic()

    def add(self, path: str) -> None:
        """Watch a file from now on."""
        if not _queue.add(path, self):
            with self._lock:
                self._marks[path] = _mark(path)

    def look(self) -> set[str]:
        """The added files that were written to."""
        _queue.look()
        if self._marks and time.monotonic() - self._looked > POLL_SECONDS:
            self._looked = time.monotonic()
            with self._lock:
                self.changed |= {path for path, mark in self._marks.items() if _is_written(mark, _mark(path))}
        return self.changed


class _Queue:
    """The inotify queue of this process, made when the first file is added."""

    def __init__(self) -> None:
        self._poll: select.epoll | None = None
        self.reset()
        reset_in_forks(self)

    def reset(self) -> None:
        """Drop the queue of the parent, which both processes would read."""
        if self._poll is not None:
            self._poll.close()
            os.close(self._file)
        self._poll, self._file, self._has_warned = None, -1, False
        self._lock = threading.RLock()  # a finalizer may run while it is held
        # Of each file, by its inotify number: its watches, and the path that each of them added.
        self._watches: dict[int, weakref.WeakKeyDictionary[ChangeWatch, str]] = {}

    def add(self, path: str, watch: ChangeWatch) -> bool:
        """Watch a file; False if the system cannot."""
        if sys.platform != "linux":
            return False
        with self._lock:
            library = _libc()
            if self._poll is None:
                self._file = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
                if self._file < 0:
                    return self._warn_of_limit("max_user_instances")
                self._poll = select.epoll()  # polls from any thread, and without an exception
                self._poll.register(self._file, select.EPOLLIN)
            self._read_events()  # earlier writes do not concern this watch
            number = library.inotify_add_watch(self._file, os.fsencode(path), IN_MODIFY)
            if number < 0:
                return self._warn_of_limit("max_user_watches")
            watches = self._watches.setdefault(number, weakref.WeakKeyDictionary())
            watches[watch] = path
            weakref.finalize(watch, self._forget, number, watches).atexit = False
            return True

    def look(self) -> None:
        """Report all writes so far to the watches."""
        if self._poll is not None and self._poll.poll(0, 1):
            with self._lock:
                self._read_events()

    def _read_events(self) -> None:
        try:
            events, position = os.read(self._file, READ_BYTES), 0
        except BlockingIOError:
            return  # another thread has read them
        while position < len(events):
            number, mask, _, length = _EVENT.unpack_from(events, position)
            position += _EVENT.size + length
            if mask & IN_MODIFY:
                self._report(number)
            if mask & IN_OVERFLOW:  # events were lost, of any of the files
                for watched in list(self._watches):
                    self._report(watched)
            if mask & IN_IGNORED:  # the file is gone, and the system may use its number again
                self._watches.pop(number, None)

    def _report(self, number: int) -> None:
        for watch, path in list(self._watches.get(number, {}).items()):
            watch.changed.add(path)

    def _forget(self, number: int, watches: weakref.WeakKeyDictionary[ChangeWatch, str]) -> None:
        """Stop watching a file when its last watch is gone."""
        with self._lock:
            if self._watches.get(number) is watches and not list(watches):
                _libc().inotify_rm_watch(self._file, number)
                del self._watches[number]

    def _warn_of_limit(self, limit: str) -> bool:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the system watches no more files for this user (fs.inotify.{limit}): a write to a shard that is "
                f'being read is noticed only after {POLL_SECONDS:g} s. Raise the limit, or read with access="pread".',
                StoreWarning,
                stacklevel=2,
            )
        return False


_Mark = tuple[int, int, int]  # inode, size, time


def _mark(path: str) -> _Mark | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _is_written(before: _Mark | None, now: _Mark | None) -> bool:
    """Whether the file has changed in place; the map of a file that was removed or replaced stays as it was."""
    return before is not None and now is not None and before[0] == now[0] and before != now


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


_queue = _Queue()
