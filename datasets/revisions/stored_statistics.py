"""Statistics of the latents of all stored records of a revision, without reading each of their rows again.

What a revision inherits counts rows whose records have since been replaced, dropped or rejected, and the statistics of
a shard count rows whose record a caption rejects. Only these rows are read, and their share is taken out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..arrays.shard_folder import ShardFolder
from ..arrays.sharded_array import ShardedArray
from ..disk.hashing import xxh3_64, xxh3_file
from ..disk.spill import map_array
from ..errors import DamageError
from ..format.buckets import bucket_size
from ..format.layout import index_path
from ..format.row_layout import LATENTS, bucket_part, latent_shape, row_arrays, view_suffixes
from ..format.schema import FileEntry, LatentStatistics, Manifest, StoreSpec
from ..format.table_schemas import STORED
from ..format.zarr_shard import ArrayLayout
from .catalog import REPAIR
from .latent_statistics import merge_statistics, statistics_of, statistics_without
from .plan import FrozenPlan
from .records import map_index

BLOCK_BYTES = 1 << 26  # of rows that are read at a time


@dataclass(frozen=True)
class BucketRows:
    """Rows of a bucket.

    Args:
      rows: (N,) in ascending order.
      checksums: (N,) uint64 of each row of the latents, all views together.
    """

    rows: np.ndarray
    checksums: np.ndarray

    def without(self, others: Iterable[BucketRows], num_rows: int) -> BucketRows:
        """The rows that are in none of the others.

        Args:
          num_rows: rows of the bucket's arrays.
        """
        is_other = map_array(num_rows, np.bool_, "the rows of a bucket")
        for other in others:
            is_other[other.rows] = True
        is_left = ~is_other[self.rows]
        return BucketRows(self.rows[is_left], self.checksums[is_left])


Rows = Mapping[str, BucketRows]
"""Rows of each bucket."""


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
    inherited = _rows_before(root, before) if before else {}
    statistics = [*parts]
    if before and before.statistics:
        statistics.insert(0, before.statistics)
    if not statistics:
        return None
    total = merge_statistics(statistics)

    reader = _RowReader(root, plan.spec, plan.layout.arrays, files)
    counted = {bucket: [rows[bucket] for rows in (inherited, written) if bucket in rows] for bucket in _buckets(plan)}
    removed = dict[str, list[BucketRows]]()
    returned = dict[str, list[BucketRows]]()
    for bucket, groups in counted.items():
        num_rows = reader.num_rows(bucket)
        of_bucket = [stored[bucket]] if bucket in stored else []
        removed[bucket] = [group.without(of_bucket, num_rows) for group in groups]
        returned[bucket] = [group.without(groups, num_rows) for group in of_bucket]

    num_counted = sum(reader.num_values(bucket, groups) for bucket, groups in counted.items())
    num_removed = sum(reader.num_values(bucket, groups) for bucket, groups in removed.items())
    # A difference of nearly equal numbers is imprecise, and a revision of an earlier release counts other rows.
    if total.count == num_counted and 2 * num_removed <= num_counted:
        try:
            total = merge_statistics([total, statistics_of(reader.read(returned), plan.spec.latent)])
            return statistics_without(total, statistics_of(reader.read(removed), plan.spec.latent))
        except DamageError:
            pass  # A damaged row that no record uses needs no repair: the rows in use are read instead.
    return statistics_of(reader.read({bucket: [rows] for bucket, rows in stored.items()}), plan.spec.latent)


def rows_of_records(buckets: Mapping[str, int], rows: np.ndarray, records: np.ndarray, checksums: np.ndarray) -> Rows:
    """The rows of all stored records by bucket, from the arrays of a revision's index.

    Args:
      buckets: stored records of each bucket.
      rows, records: of all stored records, bucket after bucket.
      checksums: of each record of the records table.
    """
    by_bucket = dict[str, BucketRows]()
    first = 0
    for bucket in sorted(buckets, key=bucket_size):
        part = slice(first, first + buckets[bucket])
        by_bucket[bucket] = BucketRows(rows[part], checksums[records[part]])
        first = part.stop
    return by_bucket


def rows_written(plan: FrozenPlan, results: np.ndarray) -> Rows:
    """The rows of latents that the shards of a revision store, also those whose record something else rejects.

    Args:
      results: (records,) ROW_RESULTS of the latents.
    """
    by_bucket = dict[str, BucketRows]()
    for part in plan.layout.parts.values():
        if LATENTS not in part.groups:
            continue
        first = plan.layout.first_row(part.bucket)
        positions = plan.positions_of(part)[first:]
        rows = first + np.flatnonzero(positions >= 0)
        of_rows = results[positions[positions >= 0]]
        is_stored = of_rows["state"] == STORED
        by_bucket[part.bucket] = BucketRows(rows[is_stored], of_rows["checksum"][is_stored])
    return by_bucket


def _buckets(plan: FrozenPlan) -> list[str]:
    """All buckets of a revision, in order of their size."""
    before = plan.before.buckets if plan.before else {}
    return sorted({*before, *plan.new_rows}, key=bucket_size)


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

    def num_values(self, bucket: str, groups: Iterable[BucketRows]) -> int:
        """Values of each channel in some rows of a bucket, in all views."""
        _, height, width = latent_shape(self._spec, bucket)
        num_views = len(view_suffixes(self._spec))
        return height * width * num_views * sum(len(group.rows) for group in groups)

    def read(self, groups: Mapping[str, Sequence[BucketRows]]) -> Iterator[np.ndarray]:
        """Yield (B, row_channels, H, W) rows as stored, view by view.

        Raises: DamageError: a row differs from its checksum, or its shard is missing.
        """
        for bucket, of_bucket in groups.items():
            arrays = [
                ShardedArray(self._folder, self._layouts[f"{bucket_part(bucket)}/{path}"])
                for path in row_arrays(self._spec, bucket, LATENTS)
            ]
            step = max(1, BLOCK_BYTES // sum(array.row_bytes for array in arrays))
            for group in of_bucket:
                for start in range(0, len(group.rows), step):
                    block = BucketRows(group.rows[start : start + step], group.checksums[start : start + step])
                    views = [array.take(block.rows) for array in arrays]
                    self._check(bucket, block, views)
                    yield from views

    def _check(self, bucket: str, block: BucketRows, views: Sequence[np.ndarray]) -> None:
        for i, checksum in enumerate(block.checksums.tolist()):
            if xxh3_64(*(view[i].data for view in views)) != checksum:
                where = f"row {block.rows[i]} of bucket '{bucket}'"
                raise DamageError(f"store '{self._root}': {where} differs from its checksum. {REPAIR}")
