"""The open shard of a part: rows wait in memory, then in files of the journal, until the shard is full.

A part is a bucket with all of its arrays, or a text encoder. The files of the journal hold rows as the shard will, and
the results of the rows; a file is only ever extended, and the journal says how much of it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from ...errors import DamageError
from ..disk.files import extend, remove
from ..format.layout import Part
from ..format.row_layout import POOLED, larger_shard
from ..format.schema import LatentSpec
from ..format.table_schemas import ROW_RESULTS
from ..format.zarr_shard import ArrayLayout
from ..revisions.writer import WrittenShard, write_shard
from .journal import OpenShard

RESULTS = "results"  # name of the file beside those of the arrays
REVISION = 1


class OpenPart:
    """Adds rows to the shards of a part.

    Args:
      root: the store.
      folder: of the journal.
      part: its layouts have the right size of a shard; their number of rows does not matter.
      spec: of the latents.
      state: how far its open shard is filled; None if it is new.
      finish: called with each full shard, once its files are on disk.
    Raises: DamageError: a file of the journal is not what was written.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        part: Part,
        spec: LatentSpec,
        state: OpenShard | None,
        finish: Callable[[str, int, WrittenShard], None],
    ) -> None:
        self.part = part
        self._root = root
        self._folder = folder
        self._spec = spec
        self._finish = finish
        self._num_groups = len(part.groups) or 1
        self.shard = state.shard if state else 0
        self.num_items = state.num_items if state else 0
        names = [layout.path.replace("/", ".") for layout in part.arrays]
        self._files = [_OpenFile(folder, name) for name in (*names, RESULTS + "." + part.name.replace("/", "."))]
        self._old: list[Path] = []  # files of shards that are full, which are removed after the next commit
        for number, file in enumerate(self._files):
            file.start(self.shard, state.files[number] if state else None)

    @property
    def _layouts(self) -> list[ArrayLayout]:
        return self.part.arrays

    @property
    def file_names(self) -> set[str]:
        """Names of the files of the journal that count."""
        return {file.path.name for file in self._files if file.num_synced}

    @property
    def capacity(self) -> int:
        """Rows of the first array in a shard."""
        return self._layouts[0].shard_rows

    @property
    def num_rows(self) -> int:
        """Rows of the first array in the open shard."""
        return self._files[0].num_bytes // self._layouts[0].row_bytes

    @property
    def next_row(self) -> int:
        """Row of the bucket that the next record gets."""
        return self.shard * self.capacity + self.num_items

    def state(self) -> OpenShard:
        """How far the open shard is filled, for the journal; call it after ``flush``."""
        files = [(file.num_bytes, file.digest()) for file in self._files]
        return OpenShard(self.capacity, self.shard, self.num_items, files)

    def add_rows(self, arrays: Sequence[np.ndarray], results: np.ndarray) -> None:
        """Add records.

        Args:
          arrays: (B, ...) rows of each array.
          results: (B, groups) of ROW_RESULTS.
        """
        start = 0
        while start < len(results):
            end = min(len(results), start + self.capacity - self.num_items)
            self._put([rows[start:end] for rows in arrays], results[start:end], end - start)
            start = end
            if self.num_items == self.capacity:
                self._close()

    def add_caption(self, arrays: Sequence[np.ndarray], result: np.ndarray) -> None:
        """Add a caption, in the next shard if the open one has no room for all of its tokens.

        Args:
          arrays: (rows, ...) of each array.
          result: of ROW_RESULTS.
        """
        if self.num_rows + len(arrays[0]) > self.capacity:
            self._close()
        self._put(arrays, result.reshape(1, 1), 1)

    def _put(self, arrays: Sequence[np.ndarray], results: np.ndarray, num_items: int) -> None:
        for file, rows in zip(self._files, (*arrays, results), strict=True):
            file.append(rows)
        self.num_items += num_items

    def _close(self) -> None:
        """Write the open shard, which is full, and begin the next one."""
        self._finish(self.part.name, self.shard, self.write(is_last=False))
        for file in self._files:
            self._old += [file.path] if file.num_synced else []
        self.shard += 1
        self.num_items = 0
        for file in self._files:
            file.start(self.shard, None)

    def write(self, *, is_last: bool) -> WrittenShard:
        """Write the rows of the open shard as a shard.

        Args:
          is_last: no shard follows, so rows behind the last caption do not exist; else they are empty.
        """
        arrays = {}
        for file, layout in zip(self._files, self._layouts, strict=False):
            rows = np.frombuffer(file.read(), layout.disk_dtype).reshape(-1, *layout.shape[1:])
            missing = 0 if is_last else self._rows_of_shard(layout) - len(rows)
            if missing:
                empty = np.full((missing, *layout.shape[1:]), layout.fill_value, layout.disk_dtype)
                rows = np.concatenate([rows, empty])
            arrays[layout.path] = rows
        results = np.frombuffer(self._files[-1].read(), ROW_RESULTS).reshape(-1, self._num_groups)
        return write_shard(self._root, REVISION, self.part, self.shard, arrays, results, self._spec)

    def _rows_of_shard(self, layout: ArrayLayout) -> int:
        """Rows of a shard that another one follows: of pooled vectors those of its captions."""
        return self.num_items if layout.path.endswith(f"/{POOLED}") else layout.shard_rows

    def flush(self) -> None:
        """Write what waits in memory to the files of the journal, and sync it."""
        for file in self._files:
            file.flush()

    def remove_old(self) -> None:
        """Remove the files of full shards, which the journal no longer counts."""
        for path in self._old:
            remove(path)
        self._old.clear()


class _OpenFile:
    """A file of the journal: what counts of it, and what waits in memory.

    Args:
      folder: of the journal.
      name: of the file; the number of the shard follows it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._waiting = bytearray()
        self._digest = xxhash.xxh3_64()
        self.path = folder / name
        self.num_synced = 0
        self.num_bytes = 0

    def start(self, shard: int, counted: tuple[int, str] | None) -> None:
        """Begin the file of a shard, or go on with it.

        Args:
          counted: bytes that count, and their hash; None for a new file.
        Raises: DamageError: the file has other bytes.
        """
        self.path = self._folder / f"{self._name}.{shard}"
        self._waiting.clear()
        self._digest = xxhash.xxh3_64()
        self.num_synced = self.num_bytes = counted[0] if counted else 0
        if counted and counted[0]:
            self._digest.update(self._read_file())
            if self.digest() != counted[1]:
                raise DamageError(f"file '{self.path}': it was changed. Remove the store, and write it again.")

    def _read_file(self) -> bytes:
        """The bytes of the file that count."""
        content = b""
        if self.path.is_file():
            with open(self.path, "rb") as file:
                content = file.read(self.num_synced)
        if len(content) != self.num_synced:
            raise DamageError(
                f"file '{self.path}': {len(content)} bytes, expected at least {self.num_synced}. Remove the store, and "
                "write it again."
            )
        return content

    def append(self, rows: np.ndarray) -> None:
        """Add rows."""
        self._waiting += rows.tobytes()
        self.num_bytes += rows.nbytes

    def read(self) -> bytes:
        """All rows."""
        return (self._read_file() if self.num_synced else b"") + self._waiting

    def flush(self) -> None:
        """Write the rows that wait, and sync them."""
        if not self._waiting:
            return
        extend(self.path, self.num_synced, [self._waiting])
        self._digest.update(self._waiting)
        self._waiting = bytearray()
        self.num_synced = self.num_bytes

    def digest(self) -> str:
        """Hash of the bytes that are synced."""
        return self._digest.hexdigest()


def sized_for(part: Part, expected_records: int) -> int:
    """Rows of a shard of a part's first array, for an expected number of records.

    Captions are counted at full length, since nobody knows theirs.
    """
    largest = max(layout.row_bytes for layout in part.arrays)
    num_rows = expected_records
    if part.captions and part.captions.spec.has_tokens:
        largest = part.arrays[0].row_bytes
        num_rows *= part.captions.spec.max_tokens
    return larger_shard(part.arrays[0].shard_rows, largest, num_rows)
