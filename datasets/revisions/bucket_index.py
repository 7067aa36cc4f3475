"""The records of each bucket, in order of their rows: the part of the records table that training needs.

Built for all buckets at once from six columns of the table, so a store of a million records opens in well under a
second, and the rest of the table does not stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them
INDEX_COLUMNS = ("revision", "bucket", "row", "label", "caption_ids", "status")


@dataclass(frozen=True)
class BucketIndex:
    """The stored records of a bucket, in order of their rows.

    Args:
      rows: (N,) positions in ``store.latents(bucket)``.
      records: (N,) positions in the records table.
      labels: (N,) class index, or -1.
      caption_starts: (N + 1,) where each record's captions begin in ``caption_ids``.
      caption_ids: (M,) caption ids, record after record.
    """

    rows: np.ndarray
    records: np.ndarray
    labels: np.ndarray
    caption_starts: np.ndarray
    caption_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


def build_indexes(
    table: pa.Table, buckets: Iterable[str], stacked_rows: Callable[[str, np.ndarray, np.ndarray], np.ndarray]
) -> dict[str, BucketIndex]:
    """Index of each bucket.

    Args:
      table: with INDEX_COLUMNS.
      stacked_rows: (bucket, revisions, rows) to positions in the bucket's stacked array.
    """
    names, codes = _encoded(table["bucket"])
    statuses, status_codes = _encoded(table["status"])
    stored = status_codes == (statuses.index("stored") if "stored" in statuses else len(statuses))
    revisions, rows, labels = (table[name].to_numpy() for name in ("revision", "row", "label"))
    captions = table["caption_ids"].combine_chunks()
    counts = pc.fill_null(pc.list_value_length(captions), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    starts_in_table = np.cumsum(counts) - counts
    values = captions.flatten().to_numpy(zero_copy_only=False)
    indexes = {}
    for bucket in buckets:
        code = names.index(bucket) if bucket in names else len(names)
        positions = np.flatnonzero(stored & (codes == code))
        stacked = stacked_rows(bucket, revisions[positions], rows[positions])
        if np.any(stacked[1:] < stacked[:-1]):
            order = np.argsort(stacked, kind="stable")
            stacked, positions = stacked[order], positions[order]
        starts = np.concatenate([[0], np.cumsum(counts[positions])]).astype(np.int64)
        taken = np.repeat(starts_in_table[positions] - starts[:-1], counts[positions]) + np.arange(starts[-1])
        indexes[bucket] = BucketIndex(
            rows=stacked,
            records=positions,
            labels=labels[positions],
            caption_starts=starts,
            caption_ids=values[taken].astype(np.int64),
        )
    return indexes


def _encoded(column: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """Distinct texts of a column, and the index of each row's text; -1 for null."""
    if not pa.types.is_dictionary(column.type):
        column = pc.dictionary_encode(column)
    array = column.unify_dictionaries().combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    return array.dictionary.to_pylist(), pc.fill_null(array.indices, -1).to_numpy(zero_copy_only=False)
