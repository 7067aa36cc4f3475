"""A store at a URL, read through a local folder of bounded size: shards are fetched whole, checked, and evicted.

    folder = open_remote("s3://bucket/imagenet-256", capacity_gib=200)
    folder.store                        # a local folder with the store except its shards
    with folder.held("buckets/256x256/moments/c/7/0/0/0") as path:
        ...                             # a complete local file; a map of it outlives the file
    folder.prefetch(paths)              # fetched by threads, in this order

    FOLDER/about.json    the URL that it belongs to
    FOLDER/store/        manifests, tables, and the zarr.json of groups and arrays
    FOLDER/shards/       shards, bounded (``bounded.py``); how a URL is read: ``reader.py``

Processes, including forks, may share a folder. It may be deleted while no process reads it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..disk.fork_safe import reset_in_forks
from ..disk.hashing import xxh3_file
from ..errors import DamageError, LeanditError, RecipeError, ResourceError
from ..format.schema import FileEntry, Manifest
from ..units import readable_size
from .bounded import BoundedFolder, NoRoom, locked, release_lock
from .mirror import (
    MAX_LISTED,
    OPENING,
    check_entries,
    check_folder,
    check_listing,
    claim_folder,
    default_folder,
    fetch_manifest,
    fetch_small_files,
    is_shard,
    name_of,
)
from .prefetch import Prefetcher
from .reader import RemoteReader

LOG = logging.getLogger(__name__)
STORE = "store"
DEFAULT_CAPACITY_GIB = 64.0
DEFAULT_THREADS = 4
LOOK_SECONDS = 0.05  # between checks for room
PATIENCE_SECONDS = 600.0  # for room that other processes hold


class RemoteFolder:
    """A local folder with a part of a store at a URL. Its methods may be called by any thread.

    Args:
      reader: of the store.
      folder: the local folder.
      manifest: of the revision that is read.
      capacity: limit on the bytes of its shards, including those being fetched.
      threads: for ``prefetch``.
    Raises: ResourceError: a shard is larger than the capacity.
    """

    def __init__(
        self, reader: RemoteReader, folder: Path, manifest: Manifest, *, capacity: int, threads: int = DEFAULT_THREADS
    ) -> None:
        self.url, self.store, self.manifest = reader.url, folder / STORE, manifest
        self._reader = reader
        self._entries = {entry.path: entry for entry in manifest.files if is_shard(entry)}
        self._paths: dict[str, list[str]] = {}
        for entry in self._entries.values():
            self._paths.setdefault(name_of(entry), []).append(entry.path)
        check_entries(self.url, self._entries.values(), capacity)
        self._folder, self._capacity, self._num_threads = folder, capacity, threads
        self._checked: set[str] = set()  # names that this process has hashed
        self._listeners: list[Callable[[str], object]] = []
        self._beginning, self._is_fork = threading.Lock(), False
        self._begin()
        reset_in_forks(self)

    def reset(self) -> None:
        """Defer the start to the first use: a fork should not touch the file system."""
        self._beginning, self._is_fork = threading.Lock(), True

    def _begin(self) -> None:
        self._room = BoundedFolder(self._folder, self._capacity, self._notify_evicted)
        self._changed = threading.Condition(self._room.mutex)
        self._pins, self._holds = Counter[str](), Counter[str]()
        self._wishes: dict[str, int] = {}  # position in the prefetch list
        self._ahead = Prefetcher(self._num_threads, self._fetch_ahead)
        self.num_fetched = self.num_evicted = 0  # files, by this process

    def fetch(self, path: str) -> Path:
        """Fetch a shard unless it is local, and check it by size and hash.

        Args:
          path: within the store, as in the manifest.
        Returns: the local file. It may be evicted as soon as this returns: see ``held`` and ``pin``.
        Raises: DamageError: it is missing or damaged; StoreError: it cannot be read; ResourceError: pinned shards leave
          no room, or the disk is full.
        """
        with self.held(path) as local:
            return local

    @contextlib.contextmanager
    def held(self, path: str) -> Iterator[Path]:
        """``fetch``, and protect the file from eviction by any process until the block ends.

        Use it while mapping a file, one at a time: other processes may be waiting for its room.
        """
        entry = self._entry(path)
        name = name_of(entry)
        with self._counted(self._holds, [name]):
            while (lock := self._hold(name)) is None:
                self._fetch(entry)
            try:
                yield self._room.path(name)
            finally:
                release_lock(lock)

    def use(self, path: str) -> bool:
        """Mark a mapped shard as used now; False if it was evicted."""
        return self._room.use(name_of(self._entry(path)))

    def pin(self, paths: Iterable[str]) -> contextlib.AbstractContextManager[None]:
        """Protect shards from eviction by this process while the block runs; it fetches none."""
        self._begin_in_fork()
        return self._counted(self._pins, [name_of(self._entry(path)) for path in paths])

    def prefetch(self, paths: Iterable[str]) -> None:
        """Fetch shards in the background, in this order; the list replaces the previous one.

        Pinned shards and earlier ones in the list are not evicted: without room, the rest waits for the next list.
        Errors are raised by the ``fetch`` that needs the shard, which tries again.
        """
        self._begin_in_fork()
        names = list(dict.fromkeys(name_of(self._entry(path)) for path in paths))
        with self._changed:
            self._wishes = {name: place for place, name in enumerate(names)}
        self._ahead.follow(names)

    def on_evict(self, listener: Callable[[str], object]) -> None:
        """Call ``listener`` with the path of every shard that this process evicts; maps keep its disk space in use.

        Any thread may call it; it must not wait for a lock under which shards are fetched.
        """
        self._listeners.append(listener)

    def close(self) -> None:
        """Stop prefetching, after the current downloads."""
        self._begin_in_fork()
        self._ahead.close()

    def __enter__(self) -> RemoteFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_in_fork(self) -> None:
        if self._is_fork:
            with self._beginning:
                if self._is_fork:
                    self._begin()
                    self._is_fork = False

    def _entry(self, path: str) -> FileEntry:
        """Manifest entry of a shard.

        Raises: DamageError: the path is not a shard.
        """
        self._begin_in_fork()
        if path not in self._entries:
            raise DamageError(f"store '{self.url}': file '{path}' is not a shard of the manifest. Check the store.")
        return self._entries[path]

    @contextlib.contextmanager
    def _counted(self, counter: Counter[str], names: list[str]) -> Iterator[None]:
        with self._changed:
            counter.update(names)
        try:
            yield
        finally:
            with self._changed:
                counter.subtract(names)
                self._changed.notify_all()

    def _hold(self, name: str) -> int | None:
        """Hold a local file; a file of an earlier process is hashed first."""
        lock = self._room.hold(name)
        if lock is None or name in self._checked:
            return lock
        if xxh3_file(self._room.path(name)) != name.partition("-")[0]:
            release_lock(lock)
            self._room.discard(name)
            return None
        self._checked.add(name)
        return lock

    def _fetch(self, entry: FileEntry, *, ahead: bool = False) -> None:
        """Fetch a shard, and wait for room.

        Raises: NoRoom: only with ``ahead``.
        """
        name, deadline = name_of(entry), time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                is_new = self._reader.checked(entry, lambda: self._fetch_once(entry, ahead))
                with self._changed:
                    self._checked |= {name} if is_new else set()
                    self.num_fetched += is_new
                    self._changed.notify_all()
                return
            except NoRoom as full:
                if ahead:
                    raise
                self._refuse_what_cannot_fit(entry, full.sizes, time.monotonic() > deadline)
            with self._changed:
                self._changed.wait(LOOK_SECONDS)  # other processes do not notify

    def _fetch_once(self, entry: FileEntry, ahead: bool) -> bool:
        priority = self._priority_ahead(name_of(entry)) if ahead else self._priority
        return self._room.bring(name_of(entry), lambda: self._reader.pieces(entry), priority)

    def _priority(self, name: str) -> int | None:
        """Priority for a shard that is needed now: first shards outside the prefetch list, then its last ones."""
        if self._pins[name] or self._holds[name]:
            return None
        return len(self._wishes) - self._wishes[name] if name in self._wishes else 0

    def _priority_ahead(self, wished: str) -> Callable[[str], int | None]:
        """Priority for a prefetched shard: earlier ones in the list stay."""

        def priority(name: str) -> int | None:
            last = len(self._wishes)  # the list may have been replaced
            is_earlier = self._wishes.get(name, last) < self._wishes.get(wished, last)
            return None if is_earlier else self._priority(name)

        return priority

    def _refuse_what_cannot_fit(self, entry: FileEntry, sizes: dict[str, int], is_late: bool) -> None:
        with self._changed:
            pinned = {name: size for name, size in sizes.items() if self._pins[name] and name != name_of(entry)}
        capacity, taken = self._capacity, sum(pinned.values())
        if taken + entry.bytes > capacity or is_late:
            blocker = "held by others" if is_late else f"pinned ({readable_size(taken)})"
            raise ResourceError(
                f"store '{self.url}': file '{entry.path}' needs {readable_size(entry.bytes)}; of its local folder's "
                f"{readable_size(capacity)} too much is {blocker}. Give it more room, or use fewer shards at a time."
            )

    def _fetch_ahead(self, name: str) -> bool:
        """Fetch one shard of the list; False if there is no room for it and the rest."""
        try:
            if (lock := self._hold(name)) is not None:
                release_lock(lock)
            else:
                self._fetch(self._entries[self._paths[name][0]], ahead=True)
        except NoRoom:
            return False
        except (LeanditError, OSError):
            return True  # the ``fetch`` that needs it tries again and raises
        return True

    def _notify_evicted(self, names: list[str]) -> None:
        with self._changed:
            self.num_evicted += len(names)
        for path in (path for name in names for path in self._paths.get(name, ())):
            for listener in self._listeners:
                listener(path)


def open_remote(
    url: str,
    *,
    folder: str | Path | None = None,
    capacity_gib: float = DEFAULT_CAPACITY_GIB,
    revision: int = 0,
    threads: int = DEFAULT_THREADS,
    options: Mapping[str, Any] | None = None,
) -> RemoteFolder:
    """Open the local folder of a store at a URL: fetch and check everything except the shards.

    Args:
      url: of the store, for any file system of fsspec: s3://, gs://, hf://, ...
      folder: the local folder; by default one for this URL below ~/.cache/leandit.
      capacity_gib: of its shards, in GiB.
      revision: number of the revision; 0 for the newest complete one.
      threads: for ``prefetch``.
      options: of the fsspec file system.
    Raises: StoreNotFound, StoreIncomplete (it has no complete revision), StoreError (it cannot be read, or has no such
      revision), DamageError (a file is missing, or not what the manifest says), ResourceError (no room), RecipeError
      (the URL cannot be read here).
    """
    if not isinstance(capacity_gib, (int, float)) or not 0 < capacity_gib < 2**40:
        raise RecipeError(f"capacity_gib {capacity_gib!r}: needed a positive, finite number.")
    reader, capacity = RemoteReader(url, options), int(capacity_gib * 2**30)
    local = Path(os.path.abspath(folder or default_folder(url)))
    try:
        check_folder(local, reader.url)
        with locked(local / OPENING):  # a second process finds everything done
            claim_folder(local, url, reader.url)
            manifest = fetch_manifest(reader, local / STORE, revision)
            opened = RemoteFolder(reader, local, manifest, capacity=capacity, threads=threads)
            if len(manifest.files) <= MAX_LISTED:
                check_listing(reader, manifest)
            fetch_small_files(reader, local / STORE, manifest)
            LOG.info(
                "store '%s': shards come into '%s', at most %s of them", reader.url, local, readable_size(capacity)
            )
            return opened
    except OSError as error:
        if isinstance(error, LeanditError):
            raise
        raise ResourceError(
            f"folder '{local}': it cannot be used for a store at a URL ({error.strerror or error}). Give another one."
        ) from error
