"""The shard files of a store: opened, checked, and read in threads."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...errors import DamageError
from ..format.zarr_shard import ArrayLayout
from .shard_file import REPAIR, ShardFile

if TYPE_CHECKING:
    from ..remote.cache import RemoteFolder

MAX_OPEN_SHARDS = 256  # outside of a window: descriptors or maps
READ_THREADS = min(8, 2 * (os.cpu_count() or 1))  # for a batch that is read shard by shard


class ShardFolder:
    """The shard files of a store.

    Args:
      root: the store.
      sizes: bytes of each file by its path, from the manifest; checked when a shard is opened.
      access: "map" the shards, or "pread" them, as ``choose_access`` says.
    """

    def __init__(
        self,
        root: Path,
        sizes: Mapping[str, int] | None = None,
        *,
        access: Literal["map", "pread"] = "map",
        remote: RemoteFolder | None = None,
    ) -> None:
        self.root = root
        self.access = access
        self.remote = remote
        self._sizes = sizes
        self._pid = 0
        self._check_process()
        if remote is not None:
            remote.on_evict = lambda name: self._open.pop(name, None)  # its map is then closed

    def _check_process(self) -> None:
        """Start afresh in a fork: threads are not inherited, and locks may be held by a thread that is not there."""
        if self._pid != os.getpid():
            self._lock, self._pool = threading.RLock(), None
            self._open: OrderedDict[str, ShardFile] = OrderedDict()
            self._pid = os.getpid()

    @property
    def lock(self) -> threading.RLock:  # pyright: ignore[reportGeneralTypeIssues, reportInvalidTypeForm]
        """Held while shards are opened."""
        self._check_process()
        return self._lock

    def open(self, layout: ArrayLayout, shard: int, *, mapped: bool) -> ShardFile:
        """Open a shard with the size in the manifest.

        Raises: DamageError.
        """
        name, num_rows = layout.shard_path(shard), len(layout.rows_of(shard))
        if self.remote is not None:  # complete, and checked by hash
            remedy = "Remove this file: it is fetched again from the store's URL."
            return self.remote.open(name, lambda path: ShardFile(path, layout, num_rows, mapped=mapped, remedy=remedy))
        path = self.root / name
        size = path.stat().st_size if path.is_file() else None
        expected = size if self._sizes is None else self._sizes.get(name)
        if size is None or size != expected:
            state = "is missing" if size is None else f"has {size} bytes, the manifest says {expected}"
            raise DamageError(f"shard '{path}': {state}. {REPAIR}")
        return ShardFile(path, layout, num_rows, mapped=mapped)

    def keep_open(self, layout: ArrayLayout, shard: int, check: Callable[[ShardFile], None]) -> ShardFile:
        """Open a shard and keep it open while it is among the most recently used.

        Args:
          check: called if the shard was not open.
        """
        name = layout.shard_path(shard)
        if self.remote is not None and name not in self._open:
            self.remote.fetch(name)  # not under the lock: others would wait
        with self.lock:
            opened = self._open.pop(name, None)
            is_new = opened is None
            if opened is None:
                opened = self.open(layout, shard, mapped=self.access == "map")
                check(opened)
            self._open[name] = opened  # most recently used last
            if len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)  # current readers hold a reference
            if is_new and self.remote is not None and not self.remote.use(name):
                self._open.pop(name, None)  # evicted meanwhile; close its map
            return opened

    def mark_used(self, names: Iterable[str]) -> None:
        """Mark shards of a remote store as used, so that others are evicted first."""
        if self.remote is not None:
            for name in names:
                self.remote.use(name)

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run jobs in parallel."""
        if len(jobs) < 2:
            for job in jobs:
                job()
            return
        with self.lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="leandit-shards")
        futures = [self._pool.submit(job) for job in jobs]
        wait(futures)  # even if one fails: they write into the caller's memory
        for future in futures:
            future.result()
