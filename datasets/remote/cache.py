"""The shards of a store at a URL in a local folder of bounded size: fetched whole, checked, evicted.

    FOLDER/about.json    the URL that it belongs to
    FOLDER/store/        manifests and tables
    FOLDER/shards/NAME   complete shards; the modification time is the last use
    FOLDER/locks/        locked while a shard is fetched, or shards are chosen for eviction

A NAME is the shard's XXH3-128 and size, which is enough to check it; files of other revisions have other names. A shard
that is being fetched has a temporary file, whose name counts as its whole size. Processes, including forks, may share a
folder. It may be deleted while no process reads it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from ...errors import DamageError, LeanditError, ResourceError
from ...units import readable_size
from ..disk.files import TEMPORARY_NAME, make_folder, remove, write_atomic
from ..disk.fork_safe import reset_in_forks
from ..disk.hashing import xxh3_file
from ..disk.locks import locked
from ..disk.strays import sweep_strays
from ..format.schema import FileEntry, Manifest
from .reader import RemoteReader

STORE, SHARDS, LOCKS = "store", "shards", "locks"
DEFAULT_THREADS = 4
LOOK_SECONDS = 0.05  # between checks for room
PATIENCE_SECONDS = 600.0  # for room that shards of other threads and processes take while they are fetched
_NAME = re.compile(r"[0-9a-f]{32}-(0|[1-9][0-9]{0,14})")

Opened = TypeVar("Opened")


class _NoRoom(Exception):
    """Shards that are being fetched leave no room now."""


def is_shard(entry: FileEntry) -> bool:
    """Whether a file of the manifest is a shard, which is fetched on demand."""
    return "/c/" in entry.path


def name_of(entry: FileEntry) -> str:
    """A shard's name in the local folder."""
    return f"{entry.xxh3_128}-{entry.bytes}"


def size_of(name: str) -> int:
    """Bytes of a shard, by its name in the local folder."""
    return int(name.rpartition("-")[2])


class RemoteFolder:
    """A local folder with a part of a store at a URL. Its methods may be called by any thread.

    Args:
      reader: of the store.
      folder: the local folder.
      manifest: of the revision that is read.
      capacity: limit on the bytes of its shards, including those being fetched.
      threads: for ``prefetch``.
    Raises: ResourceError: a shard is larger than the capacity; DamageError: a hash of the manifest is invalid.
    """

    def __init__(
        self, reader: RemoteReader, folder: Path, manifest: Manifest, *, capacity: int, threads: int = DEFAULT_THREADS
    ) -> None:
        self.url, self.store, self.manifest = reader.url, folder / STORE, manifest
        self._reader, self._capacity, self._num_threads = reader, capacity, threads
        self._entries = {entry.path: entry for entry in manifest.files if is_shard(entry)}
        self._paths: dict[str, list[str]] = {}
        for entry in self._entries.values():
            self._check(entry)
            self._paths.setdefault(name_of(entry), []).append(entry.path)
        self.on_evict: Callable[[str], object] = lambda path: None
        """Called with the path of every shard that this process evicts: its map keeps disk space in use."""
        self._shards, self._locks = folder / SHARDS, folder / LOCKS
        self._checked: set[str] = set()  # names that this process has hashed
        self._last_use = 0
        self.num_fetched = self.num_evicted = 0  # files, by this process
        for each in (self._shards, self._locks):
            make_folder(each)
        self.reset()
        reset_in_forks(self)

    def reset(self) -> None:
        """Start without threads."""
        self._lock = threading.RLock()  # a finalizer that calls ``prefetch`` may run while it is held
        self._wanted = deque[tuple[str, int]]()
        self._threads: set[threading.Thread] = set()

    def fetch(self, path: str, *, ahead: int = 0) -> Path:
        """Fetch a shard unless it is local, check it by size and hash, and mark it as used now.

        Args:
          path: within the store, as in the manifest.
          ahead: of a shard that is not needed yet: the time of use to mark it with. Then nothing waits for room.
        Returns: the local file. Another thread or process may evict it at once: see ``open``.
        Raises: DamageError: it is missing or damaged; StoreError: it cannot be read; ResourceError: shards that others
          fetch leave no room, or the disk is full.
        """
        entry = self._entry(path)
        local, deadline = self._shards / name_of(entry), time.monotonic() + PATIENCE_SECONDS
        while not self._is_whole(entry, local):
            try:
                with locked(self._locks / local.name[:2]):
                    if not self._is_whole(entry, local):  # else another thread or process has just fetched it
                        self._reader.checked(entry, lambda: write_atomic(local, self._pieces(entry)))
                        with self._lock:
                            self._checked.add(local.name)
                            self.num_fetched += 1
                break
            except _NoRoom:
                if ahead or time.monotonic() > deadline:
                    raise ResourceError(
                        f"store '{self.url}': file '{path}' needs {readable_size(entry.bytes)}; its local folder's "
                        f"{readable_size(self._capacity)} are used by shards that other processes download. "
                        "Increase its capacity."
                    ) from None
                time.sleep(LOOK_SECONDS * random.uniform(0.5, 1.5))
        self._mark(path, ahead) if ahead else self.use(path)
        return local

    def open(self, path: str, opener: Callable[[Path], Opened]) -> Opened:
        """What ``opener`` makes of the local file of a shard; fetched again if it is evicted before it is open."""
        while True:
            local = self.fetch(path)
            with contextlib.suppress(FileNotFoundError):
                return opener(local)

    def use(self, path: str) -> bool:
        """Mark a shard as used now, so that others are evicted first; False if it was evicted."""
        # Explicit, because the file system's clock ticks only every few milliseconds.
        self._last_use = max(self._last_use + 1, time.time_ns())
        return self._mark(path, self._last_use)

    def _mark(self, path: str, last_use: int) -> bool:
        try:
            os.utime(self._shards / name_of(self._entry(path)), ns=(last_use, last_use))
        except FileNotFoundError:
            return False
        return True

    def prefetch(self, paths: Iterable[str]) -> None:
        """Fetch the shards that fit in the background, in this order; the list replaces the previous one.

        They are marked as used, the first as the last one used, so that shards outside of the list and then its end are
        evicted first. Errors are raised by the ``fetch`` that needs the shard, which tries again.
        """
        wanted: dict[str, str] = {}
        room = self._capacity
        for path in paths:
            name = name_of(self._entry(path))
            if name not in wanted:
                if (room := room - size_of(name)) < 0:
                    break
                wanted[name] = path
        self._last_use = max(self._last_use + len(wanted) + 1, time.time_ns())
        uses = {path: self._last_use - place for place, path in enumerate(wanted.values())}
        for path, last_use in uses.items():
            self._mark(path, last_use)
        with self._lock:
            self._wanted = deque(uses.items())
            for _ in range(min(self._num_threads, len(self._wanted)) - len(self._threads)):
                # Daemons: process exit must not wait for downloads.
                thread = threading.Thread(target=self._fetch_ahead, name="leandit-ahead", daemon=True)
                self._threads.add(thread)
                thread.start()

    def close(self) -> None:
        """Stop prefetching, after the current downloads."""
        with self._lock:
            self._wanted = deque()
            threads = set(self._threads)
        for thread in threads:
            thread.join()

    def _check(self, entry: FileEntry) -> None:
        """Refuse a shard that can never be fetched, before any is."""
        if not _NAME.fullmatch(name_of(entry)):  # not trusted, and used as a file name
            raise DamageError(
                f"store '{self.url}': file '{entry.path}' has no valid hash in the manifest. Copy the store again."
            )
        if entry.bytes > self._capacity:
            raise ResourceError(
                f"store '{self.url}': shard '{entry.path}' has {readable_size(entry.bytes)}, the local folder may hold "
                f"{readable_size(self._capacity)}. Increase capacity_gib."
            )

    def _entry(self, path: str) -> FileEntry:
        if path not in self._entries:
            raise DamageError(f"store '{self.url}': file '{path}' is not a shard of the manifest. Check the store.")
        return self._entries[path]

    def _fetch_ahead(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._threads.discard(threading.current_thread())
                    return
                path, last_use = self._wanted.popleft()
            with contextlib.suppress(LeanditError, OSError):  # the ``fetch`` that needs it tries again and raises
                self.fetch(path, ahead=last_use)

    def _is_whole(self, entry: FileEntry, local: Path) -> bool:
        """Whether a shard is local. A file of another process is hashed first, a damaged one removed."""
        try:
            is_right_size = local.stat().st_size == entry.bytes
            if is_right_size and (local.name in self._checked or xxh3_file(local) == entry.xxh3_128):
                self._checked.add(local.name)
                return True
            remove(local)
        except FileNotFoundError:
            pass
        return False

    def _pieces(self, entry: FileEntry) -> Iterator[bytes]:
        """The bytes of a shard, once there is room for it. ``write_atomic`` has made its temporary, so it counts."""
        self._make_room()
        yield from self._reader.pieces(entry)

    def _make_room(self) -> None:
        """Evict the least recently used shards until the folder is within its capacity.

        Raises: _NoRoom: those that are being fetched exceed it; then nothing is evicted.
        """
        evicted: list[str] = []
        with locked(self._locks / "evict"):
            sweep_strays(self._shards, below=False)  # of dead processes
            stored, names = dict[str, int](), set[str]()
            for each in os.scandir(self._shards):
                temporary = TEMPORARY_NAME.fullmatch(each.name)
                name = temporary["final"] if temporary else each.name
                if not _NAME.fullmatch(name):
                    continue
                with contextlib.suppress(FileNotFoundError):  # just renamed or given up
                    last_use = each.stat().st_mtime_ns
                    names.add(name)
                    if not temporary:
                        stored[name] = last_use
            excess = sum(map(size_of, names)) - self._capacity
            if excess > sum(map(size_of, stored)):
                raise _NoRoom
            for name in sorted(stored, key=stored.__getitem__):
                if excess <= 0:
                    break
                remove(self._shards / name)
                evicted.append(name)
                excess -= size_of(name)
        with self._lock:
            self.num_evicted += len(evicted)
        for name in evicted:
            for path in self._paths.get(name, ()):
                self.on_evict(path)
