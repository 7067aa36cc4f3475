"""A store at a URL, read through a local folder of bounded size: shards come whole, are checked, and may go again.

    folder = open_remote("s3://bucket/imagenet-256", capacity_gib=200)
    folder.store                        # a local folder with all of the store but its shards
    with folder.held("buckets/256x256/moments/c/7/0/0/0") as path:
        ...                             # a local file, whole; map it here: the map outlives the file
    folder.prefetch(paths)              # brought ahead by threads, in this order

    FOLDER/about.json    which URL it belongs to
    FOLDER/store/        manifests, tables, and the zarr.json of groups and arrays
    FOLDER/shards/       shards, bounded (``bounded.py``); how a URL is read: ``reader.py``

A folder may be shared by processes, forks too, and deleted while no process reads it.
"""

from __future__ import annotations

import contextlib
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
    in_mib,
    is_shard,
    name_of,
)
from .prefetch import Prefetcher
from .reader import RemoteReader

STORE = "store"
DEFAULT_CAPACITY_GIB = 64.0
DEFAULT_THREADS = 4
LOOK_SECONDS = 0.05  # between two looks whether others have made room
PATIENCE_SECONDS = 600.0  # for room that others hold


class RemoteFolder:
    """A local folder with a part of a store at a URL. Its methods may be called by any thread.

    Args:
      reader: of the store.
      folder: the local folder.
      manifest: of the revision that is read.
      capacity: bytes that its shards may have together, those included that are coming.
      threads: that bring shards ahead.
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
        self._checked: set[str] = set()  # names whose bytes this process has seen to be right
        self._listeners: list[Callable[[str], object]] = []
        self._beginning, self._is_fork = threading.Lock(), False
        self._begin()
        reset_in_forks(self)

    def reset(self) -> None:
        """Begin when it is first used: that asks the file system, which a fork should not."""
        self._beginning, self._is_fork = threading.Lock(), True

    def _begin(self) -> None:
        self._room = BoundedFolder(self._folder, self._capacity, self._tell)
        self._changed = threading.Condition(self._room.mutex)
        self._pins, self._holds = Counter[str](), Counter[str]()
        self._wishes: dict[str, int] = {}  # their place in the list
        self._ahead = Prefetcher(self._num_threads, self._bring_ahead)
        self.num_fetched = self.num_evicted = 0  # files, by this process

    def fetch(self, path: str) -> Path:
        """Bring a shard, unless it is here, and check it by size and hash.

        Args:
          path: within the store, as in the manifest.
        Returns: the local file. Others may make it go as soon as this returns: see ``held`` and ``pin``.
        Raises: DamageError: it is missing or its bytes are wrong; StoreError: it cannot be read; ResourceError: what is
          pinned leaves no room, or the disk is full.
        """
        with self.held(path) as local:
            return local

    @contextlib.contextmanager
    def held(self, path: str) -> Iterator[Path]:
        """``fetch``, and keep the file from every process that wants its room until the block ends.

        For the moment in which a file is mapped; hold one at a time, others may be waiting for its room.
        """
        entry = self._entry(path)
        name = name_of(entry)
        with self._counted(self._holds, [name]):
            while (lock := self._hold(name)) is None:
                self._bring(entry)
            try:
                yield self._room.path(name)
            finally:
                release_lock(lock)

    def use(self, path: str) -> bool:
        """Mark a shard as used now, as every use of a mapped one should; False where it has gone since."""
        return self._room.use(name_of(self._entry(path)))

    def pin(self, paths: Iterable[str]) -> contextlib.AbstractContextManager[None]:
        """Keep shards in this process from going, once they are here, while the block runs; it brings none."""
        self._begin_in_fork()
        return self._counted(self._pins, [name_of(self._entry(path)) for path in paths])

    def prefetch(self, paths: Iterable[str]) -> None:
        """Bring shards ahead, in this order; the list takes the place of the one before.

        None makes one go that is pinned or stands earlier in the list: where there is no more room, the rest waits for
        the next list. What goes wrong here is told by the ``fetch`` that needs the shard, which tries it again.
        """
        self._begin_in_fork()
        names = list(dict.fromkeys(name_of(self._entry(path)) for path in paths))
        with self._changed:
            self._wishes = {name: place for place, name in enumerate(names)}
        self._ahead.follow(names)

    def on_evict(self, listener: Callable[[str], object]) -> None:
        """Call this with the path of every shard that this process makes go: its room is free once its maps are gone.

        The listener may be called by any thread, and must wait for no lock under which shards are fetched.
        """
        self._listeners.append(listener)

    def close(self) -> None:
        """Bring nothing more ahead; what is coming comes to its end first."""
        self._begin_in_fork()
        self._ahead.close()

    def __enter__(self) -> RemoteFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_in_fork(self) -> None:
        """Every method comes through here."""
        if self._is_fork:
            with self._beginning:
                if self._is_fork:
                    self._begin()
                    self._is_fork = False

    def _entry(self, path: str) -> FileEntry:
        """What the manifest says of a shard.

        Raises: DamageError: it is none.
        """
        self._begin_in_fork()
        if path not in self._entries:
            raise DamageError(f"store '{self.url}': file '{path}' is no shard of the manifest. Check the store.")
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
        """Hold a file that is here; one that was here before this process is hashed first."""
        lock = self._room.hold(name)
        if lock is None or name in self._checked:
            return lock
        is_right = xxh3_file(self._room.path(name)) == name.partition("-")[0]
        if not is_right:
            release_lock(lock)
            self._room.discard(name)
            return None
        self._checked.add(name)
        return lock

    def _bring(self, entry: FileEntry, *, ahead: bool = False) -> None:
        """Bring a shard into the folder, when there is room.

        Raises: NoRoom: only where it is brought ahead.
        """
        name, deadline = name_of(entry), time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                is_new = self._reader.checked(entry, lambda: self._bring_once(entry, ahead))
                with self._changed:
                    self._checked |= {name} if is_new else set()
                    self.num_fetched += is_new
                    self._changed.notify_all()
                return
            except NoRoom as full:
                if ahead:
                    raise
                self._refuse_what_cannot_fit(entry, full.there, time.monotonic() > deadline)
            with self._changed:
                self._changed.wait(LOOK_SECONDS)  # not longer: other processes tell nobody

    def _bring_once(self, entry: FileEntry, ahead: bool) -> bool:
        order = self._order_ahead(name_of(entry)) if ahead else self._order
        return self._room.bring(name_of(entry), lambda: self._reader.pieces(entry), order)

    def _order(self, name: str) -> int | None:
        """What goes for a shard that is needed now: first what nobody wishes for, then the last wish."""
        if self._pins[name] or self._holds[name]:
            return None
        return len(self._wishes) - self._wishes[name] if name in self._wishes else 0

    def _order_ahead(self, wished: str) -> Callable[[str], int | None]:
        """What goes for a shard that is wished for: nothing that stands earlier in the list."""

        def order(name: str) -> int | None:
            last = len(self._wishes)  # the list may be another by now: then its wishes stay
            is_earlier = self._wishes.get(name, last) < self._wishes.get(wished, last)
            return None if is_earlier else self._order(name)

        return order

    def _refuse_what_cannot_fit(self, entry: FileEntry, there: dict[str, int], is_late: bool) -> None:
        with self._changed:
            pinned = {name: size for name, size in there.items() if self._pins[name] and name != name_of(entry)}
        capacity, taken = self._capacity, sum(pinned.values())
        if taken + entry.bytes > capacity or is_late:
            what = "held by others" if is_late else f"pinned ({in_mib(taken)})"
            raise ResourceError(
                f"store '{self.url}': file '{entry.path}' needs {in_mib(entry.bytes)}; of its local folder's "
                f"{in_mib(capacity)} too much is {what}. Give it more room, or use fewer shards at a time."
            )

    def _bring_ahead(self, name: str) -> bool:
        """Bring a wish; False where there is no room for it, nor for those after it."""
        try:
            if (lock := self._hold(name)) is not None:
                release_lock(lock)
            else:
                self._bring(self._entries[self._paths[name][0]], ahead=True)
        except NoRoom:
            return False
        except (LeanditError, OSError):
            return True  # told by the fetch that needs it, which tries again
        return True

    def _tell(self, names: list[str]) -> None:
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
    """Open the local folder of a store at a URL: all but the shards is brought and checked.

    Args:
      url: of the store, for any file system of fsspec: s3://, gs://, hf://, ...
      folder: the local folder; by default one for this URL below ~/.cache/leandit.
      capacity_gib: of its shards, in GiB.
      revision: number of the revision; 0 for the newest that is complete.
      threads: that bring shards ahead.
      options: for the file system, as fsspec has them.
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
        with locked(local / OPENING):  # who comes second finds all there
            claim_folder(local, url, reader.url)
            manifest = fetch_manifest(reader, local / STORE, revision)
            opened = RemoteFolder(reader, local, manifest, capacity=capacity, threads=threads)
            if len(manifest.files) <= MAX_LISTED:
                check_listing(reader, manifest)
            fetch_small_files(reader, local / STORE, manifest)
            return opened
    except OSError as error:
        if isinstance(error, LeanditError):
            raise
        raise ResourceError(
            f"folder '{local}': it cannot be used for a store at a URL ({error.strerror or error}). Give another one."
        ) from error
