"""A record of a store, and the numbers of all records that training reads: mapped, so a billion open in seconds.

The arrays follow from the tables, and are written when a revision is sealed: little-endian integers without a header
(FORMAT.md, section 5). Of an incomplete revision they are computed when they are first needed.
"""

from __future__ import annotations

import difflib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import xxhash

from ...errors import DamageError
from ..disk.faults import named_faults
from ..disk.spill import map_array
from ..format.buckets import bucket_size
from ..format.layout import CAPTIONS, RECORDS
from ..format.row_layout import CAPTION_PART, bucket_part, buckets_of, num_stored_tokens
from ..format.schema import StoreSpec, TextSpec
from ..format.table_schemas import CAPTION_START, suffixes
from ..format.zarr_shard import ArrayLayout

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them
KEY_SEED = 0x686F6C64  # of the hashes of keys, which choose the holdout: another one would let held-out records train
BLOCK = 1 << 20  # records checked at a time
NUM_NEAR, MOST_COMPARED = 3, 4000  # keys in an error; keys compared one by one

ReadTable = Callable[[str, Sequence[str]], Iterable[pa.RecordBatch]]
"""Reads columns of RECORDS or CAPTIONS in batches of rows; texts may be dictionaries."""


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

    def take(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, records and labels at (B,) positions, (B,) int64 each."""
        rows, records, labels = (one.take(positions) for one in (self.rows, self.records, self.labels))
        return rows.astype(np.int64), records.astype(np.int64), labels.astype(np.int64)

    def problem(self, spec: StoreSpec, latents: ArrayLayout, num_records: int, num_captions: int) -> str:
        """Describe numbers that do not fit the store; "" if there are none."""
        num_classes, fewest = len(spec.classes or ()), 1 if spec.text_encoders else 0
        for start in range(0, len(self), BLOCK):
            block = slice(start, start + BLOCK)
            labels, counts = self.labels[block], np.diff(self.caption_starts[start : start + BLOCK + 1])
            if not latents.has_rows(self.rows[block]).all() or not _within(self.records[block], num_records):
                return "names rows that do not exist"
            if not -1 <= labels.min() <= labels.max() < num_classes:
                return f"has label {labels.max()}, with {num_classes} classes"
            if counts.min() < fewest:
                return "has a record without captions"
        is_whole = (int(self.caption_starts[0]), int(self.caption_starts[-1])) == (0, len(self.caption_ids))
        return "" if is_whole and _within(self.caption_ids, num_captions) else "has captions that do not exist"


def _within(numbers: np.ndarray, end: int) -> bool:
    return not len(numbers) or bool(0 <= numbers.min() <= numbers.max() < end)


def spans_fit(spec: TextSpec, layout: ArrayLayout | None, starts: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether all captions of a text encoder lie in its array, in order, each within a shard.

    Args:
      layout: of its tokens, or of its pooled vectors if it has only these.
      starts, lengths: (num_captions,) first row and rows of each caption.
    """
    if layout is None:
        return not len(starts)
    for start in range(0, len(starts), BLOCK):
        first = starts[start : start + BLOCK].astype(np.int64)
        rows = lengths[start : start + BLOCK].astype(np.int64)
        # In this order, because the sum of two hostile numbers can wrap around.
        if not np.all((rows >= 1) & (rows <= spec.max_tokens) & (first >= 0) & (first < layout.shape[0])):
            return False
        last = first + rows - 1 if spec.has_tokens else first
        if not (layout.has_rows(first).all() and layout.has_rows(last).all()):
            return False
        before = starts[max(0, start - 1) : start + BLOCK].astype(np.int64)
        if np.any(first // layout.shard_rows != last // layout.shard_rows) or np.any(np.diff(before) <= 0):
            return False
    return True


def map_index(file: Path, name: str, num_bytes: int, count: int, *, copied: bool = False) -> np.ndarray:
    """Map an array of the index from its file.

    Args:
      count: numbers in it; -1: as many as the file holds.
      copied: map a copy in memory, or if it is large in a temporary file: a map of the file could fail later.
    Returns: uint64 of hashes and checksums; else int32, or int64 where a store is too large for that.
    Raises: DamageError: the file has another size.
    """
    is_hash = name == "keys" or "checksum" in name
    width = 8 if is_hash or num_bytes == 8 * count else 4
    dtype = np.dtype("<u8" if is_hash else f"<i{width}")
    if num_bytes % width or num_bytes != width * (num_bytes // width if count < 0 else count):
        raise DamageError(f"file '{file}': {num_bytes} bytes; expected {count} integers of 4 or 8 bytes.")
    if not num_bytes:
        return np.empty(0, dtype)
    if copied:
        copy = map_array(num_bytes // width, dtype, "an index of the store")
        with named_faults(file), open(file, "rb", buffering=0) as source:
            _read_whole(source, copy.view(np.uint8).data, file)
        return copy
    with named_faults(file):
        return np.memmap(file, dtype, "r").view(np.ndarray)


def _read_whole(source: io.FileIO, target: memoryview, file: Path) -> None:
    """Read a file into memory of its size.

    Args:
      target: memory for all bytes of the file.
    Raises: DamageError: the file ends before.
    """
    done = 0
    while done < len(target):
        count = source.readinto(target[done:])
        if not count:
            raise DamageError(f"file '{file}': it ends at byte {done}; expected {len(target)} bytes.")
        done += count


def build_index(
    spec: StoreSpec, layouts: Mapping[str, ArrayLayout], num_records: int, num_captions: int, read: ReadTable
) -> dict[str, np.ndarray]:
    """All arrays of a revision's index from its tables, in memory that does not grow with them.

    Args:
      layouts: of all arrays, by path.
      read: reads the tables; that of the records is read twice.
    """
    index = _build_records(spec, layouts, num_records, read)
    names = suffixes(spec)
    for suffix in names.values():
        rows = max((one.shape[0] for path, one in layouts.items() if path.startswith(f"{CAPTION_PART}/")), default=0)
        index[f"caption_start{suffix}"] = map_array(num_captions, _narrow(rows), "an index of captions")
        index[f"caption_length{suffix}"] = map_array(num_captions, np.int32, "an index of captions")
        index[f"caption_checksum{suffix}"] = map_array(num_captions, np.uint64, "an index of captions")
    columns = [f"{name}{suffix}" for suffix in names.values() for name in (CAPTION_START, "num_tokens", "checksum")]
    first = 0
    for batch in read(CAPTIONS, columns) if columns else ():
        rows = slice(first, first + batch.num_rows)
        for name, suffix in names.items():
            starts = pc.fill_null(batch[f"{CAPTION_START}{suffix}"], -1).to_numpy()
            counts = num_stored_tokens(spec.text_encoder_of(name).spec, batch[f"num_tokens{suffix}"])
            index[f"caption_start{suffix}"][rows], index[f"caption_length{suffix}"][rows] = starts, counts
            index[f"caption_checksum{suffix}"][rows] = pc.fill_null(batch[f"checksum{suffix}"], 0).to_numpy()
        first += batch.num_rows
    return index


def _build_records(
    spec: StoreSpec, layouts: Mapping[str, ArrayLayout], num_records: int, read: ReadTable
) -> dict[str, np.ndarray]:
    """The arrays of the records: stored ones by bucket, then by row; keys and checksums in the order of the table."""
    counts = {bucket: np.zeros(2, np.int64) for bucket in buckets_of(layouts)}  # records, captions
    for batch in read(RECORDS, ("bucket", "status", "caption_ids")):
        num_captions = _num_captions(batch)
        for bucket, positions in _stored_by_bucket(batch, counts):
            counts[bucket] += len(positions), num_captions[positions].sum()
    counts = {bucket: (int(count[0]), int(count[1])) for bucket, count in counts.items() if count[0]}
    total, total_ids = (sum(column) for column in zip(*counts.values(), (0, 0), strict=True))
    rows = max((layouts[f"{bucket_part(bucket)}/{spec.latent.array}"].shape[0] for bucket in counts), default=0)
    checksums = ["checksum", *(f"checksum_{name}" for name in spec.groups)]
    numbers = {
        "rows": map_array(total, _narrow(rows), "an index"),
        "records": map_array(total, _narrow(num_records), "an index"),
        "labels": map_array(total, np.int32, "an index"),
        "caption_starts": map_array(total + len(counts), _narrow(total_ids), "an index"),
        "caption_ids": map_array(total_ids, np.int32, "an index"),
        **{name: map_array(num_records, np.uint64, "an index") for name in ("keys", *checksums)},
    }
    by_bucket = bucket_indexes(numbers.__getitem__, *({bucket: n[i] for bucket, n in counts.items()} for i in (0, 1)))
    first = 0
    done: dict[str, tuple[int, int]] = dict.fromkeys(counts, (0, 0))
    for batch in read(RECORDS, ("key", "bucket", "row", "label", "caption_ids", "status", *checksums)):
        num_captions, ids = _num_captions(batch), batch["caption_ids"].flatten().to_numpy(zero_copy_only=False)
        offsets = np.cumsum(num_captions) - num_captions
        for bucket, positions in _stored_by_bucket(batch, counts):
            index, (start, start_id), lengths = by_bucket[bucket], done[bucket], num_captions[positions]
            end, end_id = done[bucket] = start + len(positions), start_id + int(lengths.sum())
            index.rows[start:end] = batch["row"].to_numpy()[positions]
            index.records[start:end] = positions + first
            index.labels[start:end] = batch["label"].to_numpy()[positions]
            index.caption_starts[start + 1 : end + 1] = start_id + np.cumsum(lengths)
            index.caption_ids[start_id:end_id] = ids[_ranges(offsets[positions], lengths)]
        part = slice(first, first + batch.num_rows)
        numbers["keys"][part] = [key_hash(key) for key in batch["key"].cast(pa.string()).to_pylist()]
        for name in checksums:
            numbers[name][part] = pc.fill_null(batch[name], 0).to_numpy()
        first += batch.num_rows
    for index in by_bucket.values():
        _sort_by_row(index)
    return numbers


def bucket_indexes(
    numbers: Callable[[str], np.ndarray], counts: Mapping[str, int], num_captions: Mapping[str, int] = {}
) -> dict[str, BucketIndex]:
    """The part of each bucket in the arrays of all, in order of height, then width.

    Args:
      numbers: returns an array by its name.
      counts: stored records of each bucket.
      num_captions: captions of these records, where the arrays are not filled yet.
    """
    rows, records, labels, starts, ids = map(numbers, ("rows", "records", "labels", "caption_starts", "caption_ids"))
    indexes, first, first_start, first_id = dict[str, BucketIndex](), 0, 0, 0
    for bucket in sorted(counts, key=bucket_size):
        count = counts[bucket]
        part, own = slice(first, first + count), starts[first_start : first_start + count + 1]
        if not count:
            own = np.zeros(1, starts.dtype)
        stop_id = first_id + (num_captions[bucket] if num_captions else int(own[-1]))
        indexes[bucket] = BucketIndex(rows[part], records[part], labels[part], own, ids[first_id:stop_id])
        first, first_start, first_id = first + count, first_start + (count and count + 1), stop_id
    return indexes


def key_hash(key: str) -> int:
    """Hash of a record's key, evenly spread over 64 bits."""
    return xxhash.xxh3_64_intdigest(key.encode(), seed=KEY_SEED)


def _sort_by_row(index: BucketIndex) -> None:
    """Put the records of a bucket in order of their rows; most are already."""
    if not np.any(index.rows[1:] < index.rows[:-1]):
        return
    order, lengths = np.argsort(index.rows, kind="stable"), np.diff(index.caption_starts)
    index.caption_ids[:] = index.caption_ids[_ranges(index.caption_starts[:-1][order], lengths[order])]
    index.caption_starts[1:] = np.cumsum(lengths[order])
    for numbers in (index.rows, index.records, index.labels):
        numbers[:] = numbers[order]


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
