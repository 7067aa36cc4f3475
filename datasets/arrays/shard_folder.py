"""The shard files of a store: opened, checked, watched for changes, and read in threads."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..disk.fork_safe import reset_in_forks
from ..errors import DamageError
from ..format.zarr_shard import ArrayLayout
from .change_watch import ChangeWatch
from .shard_file import REPAIR, ShardFile

if TYPE_CHECKING:
    from ..remote.cache import RemoteFolder

Access = Literal["map", "pread"]
ShardCheck = Callable[[ArrayLayout, int, int, ShardFile], None]
"""Called with the Zarr array, the number of its shard, the first of its rows in the stacked array, and the shard."""

MAX_OPEN_SHARDS = 256  # that are not in a window: descriptors, or maps
READ_THREADS = min(8, 2 * (os.cpu_count() or 1))  # of a batch that is read shard by shard


class ShardFolder:
    """Where the shard files of a store lie, and how they are read.

    Args:
      root: the store.
      sizes: bytes of each file by its path, as the manifest says; checked when a shard is opened.
      access: "map" the shards, or read them by "pread", as on a network file system, where a map that fails ends the
        process with SIGBUS.
    """

    def __init__(
        self,
        root: Path,
        sizes: Mapping[str, int] | None = None,
        *,
        access: Access = "map",
        remote: RemoteFolder | None = None,
    ) -> None:
        self.root, self.access, self._sizes, self.remote = root, access, sizes, remote
        self.reset()
        reset_in_forks(self)
        if remote is not None:
            remote.on_evict(lambda name: self._open.pop(name, None))  # its room is free once nobody maps it

    def reset(self) -> None:
        """Nothing is open."""
        self.lock = threading.RLock()
        self._open: OrderedDict[str, ShardFile] = OrderedDict()
        self._watch: ChangeWatch | None = None
        self._pool: ThreadPoolExecutor | None = None

    def open(self, layout: ArrayLayout, shard: int, *, mapped: bool) -> ShardFile:
        """Open a shard of the size that the manifest says.

        Raises: DamageError.
        """
        name = layout.shard_path(shard)
        if self.remote is not None:  # whole, and checked by its hash
            with self.remote.held(name) as path:
                self._watch_file(path)
                return ShardFile(path, layout, len(layout.rows_of(shard)), mapped=mapped, mend=self._mend)
        path = self.root / name
        size = path.stat().st_size if path.is_file() else None
        if size is None or (self._sizes is not None and size != self._sizes.get(name)):
            was = "is missing" if size is None else f"has {size} bytes, not those of the manifest"
            raise DamageError(f"shard '{path}': {was}. {REPAIR}")
        self._watch_file(path)
        return ShardFile(path, layout, len(layout.rows_of(shard)), mapped=mapped)

    def _watch_file(self, path: Path) -> None:
        if self._watch is None:
            self._watch = ChangeWatch()
        self._watch.add(os.fspath(path))

    @property
    def _mend(self) -> str:
        return REPAIR if self.remote is None else "Remove this file: it comes again from the store's URL."

    def keep_open(self, layout: ArrayLayout, shard: int, check: Callable[[ShardFile], None]) -> ShardFile:
        """The same, kept open until others were used more recently.

        Args:
          check: called where it had to be opened.
        """
        name = layout.shard_path(shard)
        if self.remote is not None and name not in self._open:
            self.remote.fetch(name)  # not under the lock, where others would wait for it
        with self.lock:
            opened = self._open.pop(name, None)
            is_new = opened is None
            if opened is None:
                opened = self.open(layout, shard, mapped=self.access == "map")
                check(opened)
            self._open[name] = opened  # last: the most recently used
            if len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)  # who reads it at this moment holds it
            if is_new and self.remote is not None and not self.remote.use(name):
                self._open.pop(name, None)  # it went meanwhile; its room is free once nobody maps it
            return opened

    def mark_used(self, names: Iterable[str]) -> None:
        """Tell a remote store's folder that these shards are in use, so that others go first."""
        if self.remote is not None:
            for name in names:
                self.remote.use(name)

    def check_unchanged(self) -> None:
        """Raises: DamageError: a shard that is open was written to."""
        if self._watch is not None and (changed := self._watch.look()):
            path = min(changed)
            size = os.stat(path).st_size if os.path.exists(path) else 0
            raise DamageError(
                f"shard '{path}': something wrote to it while it was read, it has {size} bytes now. Stop what writes "
                f"there. {self._mend}"
            )

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Do several things at once."""
        if len(jobs) < 2:
            for job in jobs:
                job()
            return
        with self.lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="leandit-shards")
        futures = [self._pool.submit(job) for job in jobs]
        wait(futures)  # all of them, also where one has failed: they write into memory of the caller
        for future in futures:
            future.result()
