"""The records of a store: one of them, and those of each bucket in order of their rows.

The index of a bucket is the part of the records table that training needs. It is built for all buckets at once from a
few columns, a batch of rows at a time, so a store of a million records opens in well under a second, and neither the
table nor a copy of it is held in memory.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..disk.spill import map_numbers
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

    Integers are as narrow as their values, 20 bytes a record with a caption; of a large store they are mapped from
    temporary files.

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

    def take(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, records and labels at (B,) positions, (B,) int64 each."""
        rows, records, labels = (one.take(positions) for one in (self.rows, self.records, self.labels))
        return rows.astype(np.int64), records.astype(np.int64), labels.astype(np.int64)


def build_indexes(
    read: Callable[[], Iterable[pa.RecordBatch]], latents: Mapping[str, ArrayLayout]
) -> dict[str, BucketIndex]:
    """Index of each bucket, in memory that does not grow with the table.

    Args:
      read: returns the batches of INDEX_COLUMNS of the records table; called twice, to count and to fill.
      latents: the array of each bucket.
    Raises: DamageError: a record names a row that does not exist.
    """
    counts, num_records = {bucket: np.zeros(2, np.int64) for bucket in latents}, 0
    for batch in read():
        num_captions = _num_captions(batch)
        for bucket, positions in _stored_by_bucket(batch, latents):
            counts[bucket] += len(positions), num_captions[positions].sum()
        num_records += batch.num_rows
    indexes = {}
    for bucket, (count, captions) in counts.items():
        sizes = {"rows": latents[bucket].shape[0], "records": num_records, "labels": 0}
        columns = {name: map_numbers(int(count), _narrow(most), "an index") for name, most in sizes.items()}
        starts = map_numbers(int(count) + 1, _narrow(int(captions)), "an index")
        indexes[bucket] = BucketIndex(
            **columns, caption_starts=starts, caption_ids=map_numbers(int(captions), np.int32, "an index")
        )
    _fill(read(), indexes, latents)
    for bucket, index in indexes.items():
        if np.any(index.rows[1:] < index.rows[:-1]):
            indexes[bucket] = _in_order_of_rows(index)
    return indexes


def _fill(
    batches: Iterable[pa.RecordBatch], indexes: Mapping[str, BucketIndex], latents: Mapping[str, ArrayLayout]
) -> None:
    done, first = {bucket: [0, 0] for bucket in indexes}, 0
    for batch in batches:
        num_captions, ids = _num_captions(batch), batch["caption_ids"].flatten().to_numpy(zero_copy_only=False)
        offsets = np.cumsum(num_captions) - num_captions
        rows, labels = batch["row"].to_numpy(), batch["label"].to_numpy()
        for bucket, positions in _stored_by_bucket(batch, latents):
            if not latents[bucket].has_rows(rows[positions]).all():
                raise DamageError(f"records of bucket '{bucket}' name rows that do not exist")
            index, (start, start_id), lengths = indexes[bucket], done[bucket], num_captions[positions]
            end, end_id = start + len(positions), start_id + int(lengths.sum())
            index.rows[start:end] = rows[positions]
            index.records[start:end] = positions + first
            index.labels[start:end] = labels[positions]
            index.caption_starts[start + 1 : end + 1] = start_id + np.cumsum(lengths)
            index.caption_ids[start_id:end_id] = ids[_ranges(offsets[positions], lengths)]
            done[bucket] = [end, end_id]
        first += batch.num_rows


def _in_order_of_rows(index: BucketIndex) -> BucketIndex:
    order, lengths = np.argsort(index.rows, kind="stable"), np.diff(index.caption_starts)
    starts = np.concatenate([[0], np.cumsum(lengths[order])]).astype(index.caption_starts.dtype)
    return BucketIndex(
        rows=index.rows[order],
        records=index.records[order],
        labels=index.labels[order],
        caption_starts=starts,
        caption_ids=index.caption_ids[_ranges(index.caption_starts[:-1][order], lengths[order])],
    )


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """All numbers from each start on, as many as its length, one range after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def _num_captions(batch: pa.RecordBatch) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(batch["caption_ids"]), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _stored_by_bucket(batch: pa.RecordBatch, buckets: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Positions of the stored records of each bucket in a batch."""
    (names, codes), (statuses, status_codes) = _encoded(batch["bucket"]), _encoded(batch["status"])
    stored = status_codes == (statuses.index("stored") if "stored" in statuses else len(statuses))
    for bucket in buckets:
        if bucket in names:
            yield bucket, np.flatnonzero(stored & (codes == names.index(bucket)))


def _encoded(column: pa.Array) -> tuple[list[str], np.ndarray]:
    """Distinct texts of a column, and the index of each row's text; -1 for null."""
    array = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
    return array.dictionary.to_pylist(), pc.fill_null(array.indices, -1).to_numpy(zero_copy_only=False)


def _narrow(largest: int) -> type[np.int32] | type[np.int64]:
    """The integer type for numbers up to this one."""
    return np.int32 if largest < 1 << 31 else np.int64


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
