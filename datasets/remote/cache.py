"""A store at a URL, read through a local folder of bounded size: shards are fetched whole, checked, and evicted.

    folder = open_remote("s3://bucket/imagenet-256", capacity_gib=200)
    folder.store                        # a local folder with the store except its shards
    folder.fetch("buckets/256x256/moments/c/7/0/0/0")   # a complete local file; a map of it outlives the file
    folder.prefetch(paths)              # fetched by threads, in this order

    FOLDER/about.json    the URL that it belongs to
    FOLDER/store/        manifests, tables, and the zarr.json of groups and arrays
    FOLDER/shards/NAME   complete shards; the modification time of each is its last use
    FOLDER/coming/NAME   empty, locked by the thread that fetches NAME; its bytes count already
    FOLDER/lock          locked while shards are chosen for eviction

A NAME is the shard's XXH3-128 and size, which is enough to check it; files of other revisions have other names.
Processes, including forks, may share a folder. It may be deleted while no process reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..disk.files import TEMPORARY_PREFIX, make_folder, remove, write_atomic
from ..disk.fork_safe import reset_in_forks
from ..disk.hashing import xxh3_file
from ..disk.locks import locked, open_lock, release_lock, try_lock
from ..errors import DamageError, LeanditError, RecipeError, ResourceError
from ..format.schema import FileEntry, Manifest
from ..units import readable_size
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
    is_name,
    is_shard,
    name_of,
    size_of,
)
from .prefetch import Prefetcher
from .reader import RemoteReader

LOG = logging.getLogger(__name__)
STORE = "store"
DEFAULT_CAPACITY_GIB = 64.0
DEFAULT_THREADS = 4
LOOK_SECONDS = 0.05  # between checks for room
PATIENCE_SECONDS = 600.0  # for room that shards of other processes take while they are fetched

Opened = TypeVar("Opened")


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
        self._reader, self._capacity, self._num_threads = reader, capacity, threads
        self._entries = {entry.path: entry for entry in manifest.files if is_shard(entry)}
        self._paths: dict[str, list[str]] = {}
        for entry in self._entries.values():
            self._paths.setdefault(name_of(entry), []).append(entry.path)
        check_entries(self.url, self._entries.values(), capacity)
        self.on_evict: Callable[[str], object] = lambda path: None
        """Called with the path of every shard that this process evicts: its map keeps disk space in use."""
        self._shards, self._coming, self._lock = folder / "shards", folder / "coming", folder / "lock"
        self._checked: set[str] = set()  # names that this process has hashed
        self._wishes: list[str] = []  # names to prefetch
        self._last_use = 0
        self.num_fetched = self.num_evicted = 0  # files, by this process
        for each in (self._shards, self._coming):
            make_folder(each)
        self.reset()
        reset_in_forks(self)

    def reset(self) -> None:
        """Start without threads."""
        self._counting = threading.Lock()
        self._ahead = Prefetcher(self._num_threads, self._fetch_ahead)

    def fetch(self, path: str) -> Path:
        """Fetch a shard unless it is local, check it by size and hash, and mark it as used now.

        Args:
          path: within the store, as in the manifest.
        Returns: the local file. Another thread or process may evict it at once: see ``open``.
        Raises: DamageError: it is missing or damaged; StoreError: it cannot be read; ResourceError: shards that others
          fetch leave no room, or the disk is full.
        """
        entry, deadline = self._entry(path), time.monotonic() + PATIENCE_SECONDS
        while not self._bring(entry, keep=()):
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"store '{self.url}': file '{path}' needs {readable_size(entry.bytes)}; its local folder's "
                    f"{readable_size(self._capacity)} are taken by shards that others fetch. Give it more room."
                )
            time.sleep(LOOK_SECONDS)
        return self._shards / name_of(entry)

    def open(self, path: str, opener: Callable[[Path], Opened]) -> Opened:
        """What ``opener`` makes of the local file of a shard; fetched again if it is evicted before it is open."""
        while True:
            local = self.fetch(path)
            with contextlib.suppress(FileNotFoundError):
                return opener(local)

    def use(self, path: str) -> bool:
        """Mark a shard as used now, so that others are evicted first; False if it was evicted."""
        # Explicit, because the file system's clock ticks only every few milliseconds.
        self._last_use = now = max(self._last_use + 1, time.time_ns())
        try:
            os.utime(self._shards / name_of(self._entry(path)), ns=(now, now))
        except FileNotFoundError:
            return False
        return True

    def prefetch(self, paths: Iterable[str]) -> None:
        """Fetch shards in the background, in this order; the list replaces the previous one.

        Earlier shards of the list are not evicted for later ones: without room, the rest waits for the next list.
        Errors are raised by the ``fetch`` that needs the shard, which tries again.
        """
        self._wishes = list(dict.fromkeys(name_of(self._entry(path)) for path in paths))
        self._ahead.follow(self._wishes)

    def close(self) -> None:
        """Stop prefetching, after the current downloads."""
        self._ahead.close()

    def __enter__(self) -> RemoteFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _entry(self, path: str) -> FileEntry:
        """Manifest entry of a shard.

        Raises: DamageError: the path is not a shard.
        """
        if path not in self._entries:
            raise DamageError(f"store '{self.url}': file '{path}' is not a shard of the manifest. Check the store.")
        return self._entries[path]

    def _fetch_ahead(self, name: str) -> bool:
        """Fetch one shard of the list; False if there is no room for it and the rest."""
        wishes = self._wishes  # may be replaced meanwhile
        earlier = wishes[: wishes.index(name)] if name in wishes else wishes
        try:
            return self._bring(self._entries[self._paths[name][0]], keep=earlier)
        except (LeanditError, OSError):
            return True  # the ``fetch`` that needs it tries again and raises

    def _bring(self, entry: FileEntry, keep: Collection[str]) -> bool:
        """Fetch a shard unless it is whole; wait while another thread or process fetches it.

        Args:
          keep: names that are not evicted for it.
        Returns: False if there is no room now.
        """
        name = name_of(entry)
        while not self._is_whole(entry):
            marker = open_lock(self._coming / name)
            try:
                fcntl.flock(marker, fcntl.LOCK_EX)  # until another owner is done, or dead
                if not os.fstat(marker).st_nlink or self._is_whole(entry):
                    continue
                if not self._make_room(name, keep):
                    return False
                try:
                    self._reader.checked(entry, lambda: write_atomic(self._shards / name, self._reader.pieces(entry)))
                finally:
                    (self._coming / name).unlink()
            finally:
                release_lock(marker)
            self._checked.add(name)
            with self._counting:
                self.num_fetched += 1
        return True

    def _is_whole(self, entry: FileEntry) -> bool:
        """Whether a shard is local; it is marked as used. A file of another process is hashed first, a damaged one
        removed."""
        name, local = name_of(entry), self._shards / name_of(entry)
        try:
            if name not in self._checked or local.stat().st_size != entry.bytes:
                if local.stat().st_size != entry.bytes or xxh3_file(local) != entry.xxh3_128:
                    remove(local)
                    return False
                self._checked.add(name)
        except FileNotFoundError:
            return False
        return self.use(entry.path)

    def _make_room(self, name: str, keep: Collection[str]) -> bool:
        """Evict shards until the folder, with all markers counted, is within its capacity.

        First go those that are not to be prefetched, the least recently used first, then the last ones of the list.

        Args:
          name: whose marker is removed if there is no room.
          keep: names that are not evicted.
        """
        evicted: list[str] = []
        wishes = {wish: place for place, wish in enumerate(self._wishes)}
        with locked(self._lock):
            stored, coming = self._scan()
            excess = sum(map(size_of, {*stored, *coming})) - self._capacity
            for candidate in sorted(
                stored.keys() - set(keep), key=lambda one: (len(wishes) - wishes.get(one, len(wishes)), stored[one])
            ):
                if excess <= 0:
                    break
                evicted.append(candidate)
                excess -= size_of(candidate)
            if excess > 0:
                (self._coming / name).unlink()
                return False
            for one in evicted:
                remove(self._shards / one)
        with self._counting:
            self.num_evicted += len(evicted)
        for one in evicted:
            for path in self._paths.get(one, ()):
                self.on_evict(path)
        return True

    def _scan(self) -> tuple[dict[str, int], list[str]]:
        """Last uses of the stored shards by name, and names of those being fetched; leftovers of dead processes are
        removed. Only under the lock."""
        coming = [one for one in os.listdir(self._coming) if is_name(one) and not self._is_dead(one)]
        stored: dict[str, int] = {}
        for entry in os.scandir(self._shards):
            if entry.name.startswith(TEMPORARY_PREFIX):
                if entry.name.rpartition("@")[2] not in coming:
                    remove(Path(entry.path))
            elif is_name(entry.name):
                found = entry.stat()
                if found.st_size == size_of(entry.name):
                    stored[entry.name] = found.st_mtime_ns
                else:  # truncated, for example by a power failure
                    remove(Path(entry.path))
        return stored, coming

    def _is_dead(self, name: str) -> bool:
        """Whether nobody holds a marker; then it is removed."""
        while True:
            marker = open_lock(self._coming / name)
            try:
                if not try_lock(marker):
                    return False
                if os.fstat(marker).st_nlink:  # else its owner has removed it, and the name may be another's by now
                    (self._coming / name).unlink()
                    return True
            finally:
                release_lock(marker)


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
