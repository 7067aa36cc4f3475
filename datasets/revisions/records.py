"""The records of a store: one of them, and those of each bucket in order of their rows.

The index of a bucket is the part of the records table that training needs. It is built for all buckets at once from a
few columns, so a store of a million records opens in well under a second, and the rest of the table does not stay in
memory.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..errors import DamageError
from ..format.zarr_shard import ArrayLayout

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them
NUM_NEAR, MOST_COMPARED = 3, 4000  # keys in an error; keys compared one by one
INDEX_COLUMNS = ("bucket", "row", "label", "caption_ids", "status")


@dataclass(frozen=True)
class Record:
    """One image with its captions and label, as stored.

    ``index`` is its position in the records table, ``row`` its position in ``store.latents(bucket)``, -1 for none.
    """

    index: int
    key: str
    revision: int
    bucket: str | None
    row: int
    label: int
    caption_ids: tuple[int, ...]
    height_px: int | None
    width_px: int | None
    status: str
    stage: str | None
    reason: str | None
    detail: str | None
    attempts: int
    fallback: str | None


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


def build_indexes(table: pa.Table, latents: Mapping[str, ArrayLayout]) -> dict[str, BucketIndex]:
    """Index of each bucket.

    Args:
      table: with INDEX_COLUMNS.
      latents: the array of each bucket.
    Raises: DamageError: a record names a row that does not exist.
    """
    names, codes = _encoded(table["bucket"])
    statuses, status_codes = _encoded(table["status"])
    stored = status_codes == (statuses.index("stored") if "stored" in statuses else len(statuses))
    rows, labels = (table[name].to_numpy() for name in ("row", "label"))
    captions = table["caption_ids"].combine_chunks()
    counts = pc.fill_null(pc.list_value_length(captions), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    starts_in_table = np.cumsum(counts) - counts
    values = captions.flatten().to_numpy(zero_copy_only=False)
    indexes = {}
    for bucket, layout in latents.items():
        code = names.index(bucket) if bucket in names else len(names)
        positions = np.flatnonzero(stored & (codes == code))
        of_bucket = rows[positions]
        if not layout.has_rows(of_bucket).all():
            raise DamageError(f"records of bucket '{bucket}' name rows that do not exist")
        if np.any(of_bucket[1:] < of_bucket[:-1]):
            order = np.argsort(of_bucket, kind="stable")
            of_bucket, positions = of_bucket[order], positions[order]
        starts = np.concatenate([[0], np.cumsum(counts[positions])]).astype(np.int64)
        taken = np.repeat(starts_in_table[positions] - starts[:-1], counts[positions]) + np.arange(starts[-1])
        indexes[bucket] = BucketIndex(
            rows=of_bucket,
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


def near_keys(keys: pa.ChunkedArray, wanted: str) -> str:
    """A sentence for an error: keys that contain an unknown one, else the nearest keys, else "".

    Among more than ``MOST_COMPARED`` keys, only those with the longest common prefix are compared.
    """
    if matching := keys.filter(pc.match_substring(keys, wanted)).slice(0, NUM_NEAR).to_pylist():
        return f" Keys that contain it: {', '.join(matching)}."
    for length in range(1, len(wanted) + 1):
        alike = keys.filter(pc.starts_with(keys, wanted[:length])) if len(keys) > MOST_COMPARED else []
        if not len(alike):
            break
        keys = alike
    near = difflib.get_close_matches(wanted, keys.slice(0, MOST_COMPARED).to_pylist(), n=NUM_NEAR)
    return f" The nearest keys: {', '.join(near)}." if near else ""
