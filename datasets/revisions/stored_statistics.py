"""Statistics of the latents of all stored records of a revision, without reading each of their rows again.

What a revision inherits counts rows whose records have since been replaced, dropped or rejected, and the statistics of
a shard count rows whose record a caption rejects. Only these rows are read, and their share is taken out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import DamageError
from ..arrays.shard_folder import ShardFolder
from ..arrays.sharded_array import ShardedArray
from ..disk.hashing import xxh3_64, xxh3_file
from ..disk.spill import map_array
from ..format.buckets import bucket_size
from ..format.layout import Part, index_path
from ..format.row_layout import LATENTS, bucket_part, latent_shape, row_arrays, view_suffixes
from ..format.schema import FileEntry, LatentStatistics, Manifest, StoreSpec
from ..format.table_schemas import STORED
from ..format.zarr_shard import ArrayLayout
from .catalog import REPAIR
from .latent_statistics import merge_statistics, statistics_of, statistics_without
from .plan import FrozenPlan
from .records import map_index

BLOCK_BYTES = 1 << 26  # of rows that are read at a time
BLOCK_ROWS = 1 << 20  # that are looked at together, so that memory does not grow with the store


class Block(NamedTuple):
    """Some rows of a bucket.

    Args:
      rows: (N,) in ascending order.
      checksums: (N,) uint64 of each row of the latents, all views together.
    """

    rows: np.ndarray
    checksums: np.ndarray

    def where(self, is_wanted: np.ndarray) -> Block:
        """The rows at some positions, or for which an (N,) bool is true."""
        return Block(self.rows[is_wanted], self.checksums[is_wanted])


Rows = Mapping[str, Callable[[], Iterator[Block]]]
"""For each bucket a function that yields its rows, a block at a time."""


def statistics_of_stored(
    root: Path,
    plan: FrozenPlan,
    *,
    stored: Rows,
    written: Rows,
    parts: Sequence[LatentStatistics],
    files: Mapping[str, FileEntry],
) -> LatentStatistics | None:
    """Mean and deviation of each channel over the stored records of a revision that is being sealed.

    Args:
      stored: rows of the records that the revision stores.
      written: rows that the revision has written, as ``rows_written``.
      parts: statistics of the rows of each shard that the revision has written.
      files: size and hash of all shards, by path.
    Returns: None for a revision without latents.
    Raises: DamageError: a row that must be read is not what was written.
    """
    before = plan.before
    statistics = list(parts)
    if before and before.statistics:
        statistics.insert(0, before.statistics)
    if not statistics:
        return None
    total = merge_statistics(statistics)

    reader = _RowReader(root, plan.spec, plan.layout.arrays, files)
    counted = [_rows_before(root, before) if before else {}, written]
    num_counted = 0
    num_removed = 0
    removed: dict[str, list[Block]] = {}
    returned: dict[str, list[Block]] = {}
    for bucket in sorted({*stored, *counted[0], *written}, key=bucket_size):
        is_stored = reader.mark(bucket, [stored])
        is_counted = reader.mark(bucket, counted)
        num_counted += reader.num_values(bucket, int(np.count_nonzero(is_counted)))
        removed[bucket] = [block.where(~is_stored[block.rows]) for block in _blocks(bucket, counted)]
        returned[bucket] = [block.where(~is_counted[block.rows]) for block in _blocks(bucket, [stored])]
        num_removed += reader.num_values(bucket, sum(len(block.rows) for block in removed[bucket]))

    # A difference of nearly equal numbers is imprecise, and a revision of an earlier release counts other rows.
    if total.count == num_counted and 2 * num_removed <= num_counted:
        try:
            total = merge_statistics([total, statistics_of(reader.read(returned), plan.spec.latent)])
            return statistics_without(total, statistics_of(reader.read(removed), plan.spec.latent))
        except DamageError:
            pass  # A damaged row that no record uses needs no repair: the rows in use are read instead.
    return statistics_of(reader.read({bucket: rows() for bucket, rows in stored.items()}), plan.spec.latent)


def rows_of_records(buckets: Mapping[str, int], rows: np.ndarray, records: np.ndarray, checksums: np.ndarray) -> Rows:
    """The rows of all stored records by bucket, from the arrays of a revision's index.

    Args:
      buckets: stored records of each bucket.
      rows, records: of all stored records, bucket after bucket.
      checksums: of each record of the records table.
    """

    def blocks(first: int, end: int) -> Iterator[Block]:
        for start in range(first, end, BLOCK_ROWS):
            block = slice(start, min(start + BLOCK_ROWS, end))
            yield Block(rows[block].astype(np.int64), checksums[records[block]])

    by_bucket = dict[str, Callable[[], Iterator[Block]]]()
    first = 0
    for bucket in sorted(buckets, key=bucket_size):
        by_bucket[bucket] = functools.partial(blocks, first, first + buckets[bucket])
        first += buckets[bucket]
    return by_bucket


def rows_written(plan: FrozenPlan, results: np.ndarray) -> Rows:
    """The rows of latents that the shards of a revision store, also those whose record something else rejects.

    Args:
      results: (records,) ROW_RESULTS of the latents.
    """

    def blocks(part: Part) -> Iterator[Block]:
        positions = plan.positions_of(part)
        for start in range(plan.layout.first_row(part.bucket), len(positions), BLOCK_ROWS):
            block = positions[start : start + BLOCK_ROWS]
            has_record = block >= 0
            of_rows = results[block[has_record]]
            rows = start + np.flatnonzero(has_record)
            yield Block(rows, of_rows["checksum"]).where(of_rows["state"] == STORED)

    parts = [part for part in plan.layout.parts.values() if LATENTS in part.groups]
    return {part.bucket: functools.partial(blocks, part) for part in parts}


def _blocks(bucket: str, sources: Iterable[Rows]) -> Iterator[Block]:
    """The rows of a bucket in all of some sources."""
    for rows in sources:
        if bucket in rows:
            yield from rows[bucket]()


def _rows_before(root: Path, before: Manifest) -> Rows:
    """The rows of the stored records of a complete revision. Raises: DamageError."""
    entries = {entry.path: entry for entry in before.files}
    counts = {"rows": before.num_stored, "records": before.num_stored, "checksum": before.num_planned}
    numbers = dict[str, np.ndarray]()
    for name, count in counts.items():
        entry = entries[index_path(before.revision, name)]
        path = root / entry.path
        if not path.is_file() or xxh3_file(path) != entry.xxh3_128:
            raise DamageError(f"store '{root}': '{entry.path}' is missing or differs from the manifest. {REPAIR}")
        numbers[name] = map_index(path, name, entry.bytes, count)
    return rows_of_records(before.buckets, numbers["rows"], numbers["records"], numbers["checksum"])


class _RowReader:
    """Reads rows of latents of a store that is being sealed, and compares them with their checksums.

    Args:
      layouts: of all arrays, by path.
      files: size and hash of all shards, by path.
    """

    def __init__(
        self, root: Path, spec: StoreSpec, layouts: Mapping[str, ArrayLayout], files: Mapping[str, FileEntry]
    ) -> None:
        self._root = root
        self._spec = spec
        self._layouts = layouts
        sizes = {path: entry.bytes for path, entry in files.items()}
        self._folder = ShardFolder(root, sizes, access="pread")

    def num_rows(self, bucket: str) -> int:
        """Rows of the arrays of a bucket."""
        return self._layouts[f"{bucket_part(bucket)}/{self._spec.latent.array}"].shape[0]

    def mark(self, bucket: str, sources: Iterable[Rows]) -> np.ndarray:
        """(rows,) bool, the rows of the arrays of a bucket that are in one of some sources."""
        is_marked = map_array(self.num_rows(bucket), np.bool_, "the rows of a bucket")
        for block in _blocks(bucket, sources):
            is_marked[block.rows] = True
        return is_marked

    def num_values(self, bucket: str, num_rows: int) -> int:
        """Values of each channel in a number of rows of a bucket, in all views."""
        _, height, width = latent_shape(self._spec, bucket)
        return height * width * len(view_suffixes(self._spec)) * num_rows

    def read(self, buckets: Mapping[str, Iterable[Block]]) -> Iterator[np.ndarray]:
        """Yield (B, row_channels, H, W) rows as stored, view by view.

        Raises: DamageError: a row differs from its checksum, or its shard is missing.
        """
        for bucket, blocks in buckets.items():
            arrays = [
                ShardedArray(self._folder, self._layouts[f"{bucket_part(bucket)}/{path}"])
                for path in row_arrays(self._spec, bucket, LATENTS)
            ]
            step = max(1, BLOCK_BYTES // sum(array.row_bytes for array in arrays))
            for block in blocks:
                for start in range(0, len(block.rows), step):
                    some = block.where(np.arange(start, min(start + step, len(block.rows))))
                    views = [array.take(some.rows) for array in arrays]
                    self._check(bucket, some, views)
                    yield from views

    def _check(self, bucket: str, block: Block, views: Sequence[np.ndarray]) -> None:
        for i, checksum in enumerate(block.checksums.tolist()):
            if xxh3_64(*(view[i].data for view in views)) != checksum:
                where = f"row {block.rows[i]} of bucket '{bucket}'"
                raise DamageError(f"store '{self._root}': {where} differs from its checksum. {REPAIR}")
