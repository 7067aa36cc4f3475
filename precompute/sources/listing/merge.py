"""Merge rows of a table that name the same picture into one record, at the first row, with all captions.

Such rows are usually consecutive, but need not be. Intermediate data is in mapped temporary files, so memory is bounded
for any number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ....datasets.disk.spill import map_array
from ..files.record import MAX_CAPTIONS
from .distinct import digests

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

WHAT = "rows of one picture"


def merged_rows(batches: Sequence[pa.RecordBatch], first: np.ndarray) -> Iterator[pa.RecordBatch] | None:
    """Merge rows that name the same picture.

    A row is merged into the first row of its picture if it has captions or is unusable, and neither its label nor its
    companion pictures differ.
    Other rows stay and repeat the key.

    Args:
      batches: of the listing, all of the same length but the last.
      first: (N,) int64, position of the first row with each row's key.
    Returns: the records; None if nothing is merged.
    """
    joined = _joined(batches, first)
    return None if joined is None else _merged(batches, *joined)


def repeated_texts(rows: np.ndarray, texts: pa.Array) -> np.ndarray:
    """(T,) bool: texts that occur earlier in the same row.

    Args:
      rows: (T,) row of each text.
    """
    codes = texts.dictionary_encode(null_encoding="encode").indices.to_numpy()
    _, first = np.unique(rows * max(len(texts), 1) + codes, return_index=True)
    again = np.ones(len(texts), bool)
    again[first] = False
    return again


def _joined(batches: Sequence[pa.RecordBatch], first: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Group the rows.

    Returns: (N,) int64 positions of the rows, grouped by record, first row first; and (N,) bool, where a record begins.
      None if every row is its own record.
    """
    total = len(first)
    if not total:
        return None
    kinds = ("int32", "int16", "int32", "uint64")
    labels, ranks, counts, companions = (map_array(total, kind, WHAT) for kind in kinds)
    start, joins = 0, False
    for batch in batches:
        positions = np.arange(start, start + batch.num_rows)
        labels[positions] = batch["label"].to_numpy()
        if len(batch["picture_paths"].flatten()):
            companions[positions] = digests(pc.binary_join(batch["picture_paths"], "\0"))[:, 0]
        leaders = first[positions]
        says = (pc.list_value_length(batch["captions"]).to_numpy() > 0) | ~batch["reason"].is_null().to_numpy(False)
        rows = np.flatnonzero(
            (leaders != positions)
            & says
            & ((labels[positions] < 0) | (labels[positions] == labels[leaders]))
            & (companions[positions] == companions[leaders])
        )
        rows = rows[np.argsort(leaders[rows], kind="stable")]
        begins = np.flatnonzero(np.diff(leaders[rows], prepend=-1))
        among = np.arange(len(rows)) - np.repeat(begins, np.diff(begins, append=len(rows)))
        rank = counts[leaders[rows]] + among + 1
        fits = rank <= MAX_CAPTIONS  # one more than a record may have: it is rejected, and the rest are repetitions
        rows, rank = rows[fits], rank[fits]
        np.add.at(counts, leaders[rows], 1)
        ranks[start + rows], joins = rank, joins or bool(len(rows))
        start += batch.num_rows
    if not joins:
        return None
    return _ordered(first, ranks, counts)


def _ordered(first: np.ndarray, ranks: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total, chunk = len(first), 1 << 16
    places, order, begins = (map_array(total, kind, WHAT) for kind in ("int64", "int64", "bool"))
    at = 0
    for start in range(0, total, chunk):
        is_first = ranks[start : start + chunk] == 0
        sizes = np.where(is_first, 1 + counts[start : start + chunk].astype(np.int64), 0)
        ends = at + np.cumsum(sizes)
        places[start : start + chunk], at = ends - sizes, int(ends[-1])
    for start in range(0, total, chunk):
        positions = np.arange(start, min(start + chunk, total))
        is_first = ranks[positions] == 0
        place = places[np.where(is_first, positions, first[positions])] + ranks[positions]
        order[place], begins[place] = positions, is_first
    return order, begins


def _merged(batches: Sequence[pa.RecordBatch], order: np.ndarray, begins: np.ndarray) -> Iterator[pa.RecordBatch]:
    length, start = batches[0].num_rows, 0
    while start < len(order):
        stop = min(start + length, len(order))
        while stop < len(order) and not begins[stop]:  # a record is shorter than a batch
            stop -= 1
        if stop == start:
            stop = start + 1 + int(np.argmax(np.append(begins[start + 1 :], True)))
        yield _joined_batch(_taken(batches, order[start:stop], length), np.flatnonzero(begins[start:stop]))
        start = stop


def _taken(batches: Sequence[pa.RecordBatch], rows: np.ndarray, length: int) -> pa.RecordBatch:
    """Rows of equal batches by position, with one take for each batch: a take from all would copy them."""
    numbers = rows // length
    by_batch = np.argsort(numbers, kind="stable")
    parts = []
    for number in np.unique(numbers):
        parts.append(batches[number].take(pa.array(rows[numbers == number] - number * length)))
    table = pa.Table.from_batches(parts).combine_chunks()
    (whole,) = table.to_batches()
    if np.array_equal(by_batch, np.arange(len(rows))):
        return whole
    back = np.empty(len(rows), np.int64)
    back[by_batch] = np.arange(len(rows))
    return whole.take(pa.array(back))


def _joined_batch(rows: pa.RecordBatch, begins: np.ndarray) -> pa.RecordBatch:
    """Grouped rows as one row a record."""
    record_of = np.repeat(np.arange(len(begins)), np.diff(begins, append=rows.num_rows))
    texts = rows["captions"].flatten()
    text_of = np.repeat(record_of, pc.list_value_length(rows["captions"]).to_numpy())
    again = repeated_texts(text_of, texts)
    texts, text_of = texts.filter(pa.array(~again)), text_of[~again]
    counts = np.bincount(text_of, minlength=len(begins))
    captions = pa.ListArray.from_arrays(pa.array(np.append(0, np.cumsum(counts)), pa.int32()), texts)
    faulty = np.flatnonzero(~rows["reason"].is_null().to_numpy(False))
    records, which = np.unique(record_of[faulty], return_index=True)
    speaker = begins.copy()
    speaker[records] = faulty[which]  # the first row of a record that cannot be used rejects it
    columns = dict(zip(rows.schema.names, rows.take(pa.array(begins)).columns, strict=True))
    columns |= {name: rows[name].take(pa.array(speaker)) for name in ("reason", "detail")}
    columns["captions"] = captions.cast(rows.schema.field("captions").type)
    many = counts > MAX_CAPTIONS
    if many.any():
        mask, details = (
            pa.array(many),
            [f"{count} captions, at most {MAX_CAPTIONS} are taken" for count in counts[many]],
        )
        columns["reason"] = pc.if_else(mask, "bad_metadata", columns["reason"])
        columns["detail"] = pc.replace_with_mask(columns["detail"], mask, pa.array(details))
    return pa.RecordBatch.from_arrays([columns[name] for name in rows.schema.names], schema=rows.schema)
