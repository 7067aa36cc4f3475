"""The records of a source in bounded memory: batches of a table in a mapped temporary file.

Ten million records as Python objects take several gigabytes; here they are a file that the kernel may drop from memory
at any time. The file is unlinked once it is mapped, so nothing is left however the process ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ....datasets.disk.spill import BATCH_ROWS, map_array, map_table, rebatched
from ....datasets.format.table_schemas import PLACES, PLAN_SCHEMA
from ....datasets.revisions.plan import FrozenPlan
from ..files.record import SourceRecord, encoded_texts
from .duck import database, numbered

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

WHAT = "the list of the source"
PLACE = pa.struct([("path", pa.string()), ("offset", pa.int64()), ("num_bytes", pa.int64()), ("mtime_ns", pa.int64())])
PLACES_SQL = 'STRUCT("path" VARCHAR, "offset" BIGINT, num_bytes BIGINT, mtime_ns BIGINT)[]'  # a list of them
PLACE_NAMES = [PLACE.field(i).name for i in range(PLACE.num_fields)]
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("path", pa.string()),
        ("offset", pa.int64()),
        ("num_bytes", pa.int64()),
        ("mtime_ns", pa.int64()),
        ("label", pa.int32()),
        ("captions", pa.list_(pa.string())),  # as they are encoded
        ("reason", pa.string()),  # null where there is no problem
        ("detail", pa.string()),
        ("height_px", pa.int32()),  # 0 where the source does not say it
        ("width_px", pa.int32()),
        ("companions", pa.list_(PLACE)),  # each companion image; empty without any
    ]
)
# What a record has under the same name.
OWN = [name for name in SCHEMA.names if name not in ("reason", "detail")]


class Listing:
    """Records of a source in order, created on access.

    Args:
      batches: of SCHEMA, all of ``batch_rows`` but the last.
    """

    def __init__(self, batches: list[pa.RecordBatch], batch_rows: int = BATCH_ROWS) -> None:
        self._batches, self._batch_rows = batches, batch_rows
        self._length = sum(batch.num_rows for batch in batches)
        self._latest: tuple[int, list[SourceRecord]] = -1, []  # replaced as one, so any thread may read it

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[SourceRecord]:
        for batch in self._batches:
            yield from _records(batch)

    def __getitem__(self, index: int) -> SourceRecord:
        if not -self._length <= index < self._length:
            raise IndexError(f"record {index} of {self._length}")
        number, row = divmod(index % self._length, self._batch_rows)
        latest = self._latest
        if latest[0] != number:
            latest = self._latest = number, _records(self._batches[number])
        return latest[1][row]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The records as batches of SCHEMA: far cheaper than one by one."""
        return iter(self._batches)

    def take(self, positions: np.ndarray) -> pa.RecordBatch:
        """Some records as a batch of SCHEMA; others are not read: pyarrow would join all chunks of text."""
        numbers = positions // self._batch_rows
        order = np.argsort(numbers, kind="stable")
        begins = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        parts = [SCHEMA.empty_table()]
        for begin, end in pairwise([*begins.tolist(), len(order)]):
            number = int(numbers[order[begin]])
            rows = self._batches[number].take(pa.array(positions[order[begin:end]] - number * self._batch_rows))
            parts.append(pa.Table.from_batches([rows], SCHEMA))
        (joined,) = pa.concat_tables(parts).combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], SCHEMA)]
        return joined.take(pa.array(np.argsort(order, kind="stable")))

    def has_sizes(self) -> bool:
        """Whether the source gives the size of an image."""
        return any(pc.max(batch["height_px"]).as_py() > 0 for batch in self._batches)

    def largest_label(self) -> int:
        """Largest label; -1 if there are none."""
        return max((int(batch["label"].to_numpy().max()) for batch in self._batches), default=-1)


def spool(batches: Iterable[pa.RecordBatch], progress: Callable[[int], None], *, check_keys: bool = True) -> Listing:
    """Write records to a temporary file and map it.

    Args:
      batches: of SCHEMA, of any length.
      progress: called with the number of records so far.
      check_keys: a repeated key becomes a reject, ``duplicate_key``: the first record counts.
    Raises: ResourceError: the folder for temporary files is full.
    """
    batch_rows = BATCH_ROWS
    equal = map_table(SCHEMA, _counted(rebatched(batches, batch_rows), progress), WHAT).to_batches()
    if check_keys and (repeated := _repeated_keys(equal)):
        equal = map_table(SCHEMA, _without_repeated(equal, repeated), WHAT).to_batches()
    return Listing(equal, batch_rows)


def _repeated_keys(batches: Sequence[pa.RecordBatch]) -> dict[int, int]:
    """Position of each record whose key an earlier one has, and the position of the first."""
    with database(WHAT) as connection:
        keys = numbered(pa.schema([SCHEMA.field("key")]), (batch.select(["key"]) for batch in batches))
        connection.register("keys_of_batches", keys)
        connection.execute("CREATE TEMP TABLE keys AS SELECT * FROM keys_of_batches")
        return dict(
            connection.execute(
                """SELECT position, first FROM keys JOIN (
                SELECT key, min(position) AS first FROM keys GROUP BY key HAVING count(*) > 1) USING (key)
                WHERE position > first"""
            ).fetchall()
        )


def _without_repeated(batches: Iterable[pa.RecordBatch], repeated: dict[int, int]) -> Iterator[pa.RecordBatch]:
    """The records with a reject for each repeated key."""
    positions, start = np.array(sorted(repeated)), 0
    for batch in batches:
        stop = start + batch.num_rows
        again = positions[np.searchsorted(positions, start) : np.searchsorted(positions, stop)].tolist()
        if again:
            records = _records(batch)
            for position in again:
                record = records[position - start]
                problem = ("duplicate_key", f"record {repeated[position] + 1} of the source has the same key")
                records[position - start] = SourceRecord(record.key, record.path, problem=problem)
            batch = record_batch(records)
        yield batch
        start = stop


def _counted(batches: Iterable[pa.RecordBatch], progress: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    length = 0
    for batch in batches:
        yield batch
        length += batch.num_rows
        progress(length)


def record_batches(records: Iterable[SourceRecord]) -> Iterator[pa.RecordBatch]:
    """Records as batches of SCHEMA, lazily."""
    iterator = iter(records)
    while batch := list(islice(iterator, BATCH_ROWS)):
        yield record_batch(batch)


def record_batch(records: Sequence[SourceRecord]) -> pa.RecordBatch:
    """Records as a batch of SCHEMA; captions as encoded."""
    columns: dict[str, Sequence] = dict(zip(OWN, zip(*map(attrgetter(*OWN), records), strict=True), strict=True))
    columns["captions"] = [encoded_texts(texts) if texts else texts for texts in columns["captions"]]
    problems = [record.problem or (None, None) for record in records]
    columns["reason"], columns["detail"] = zip(*problems, strict=True)
    columns["companions"] = [
        [dict(zip(PLACE_NAMES, place, strict=True)) for place in places] for places in columns["companions"]
    ]
    return pa.RecordBatch.from_pydict(columns, SCHEMA)


def with_labels(batch: pa.RecordBatch, labels: np.ndarray) -> pa.RecordBatch:
    """Records of a batch of SCHEMA with other labels, (N,)."""
    column = SCHEMA.get_field_index("label")
    return batch.set_column(column, SCHEMA.field(column), pa.array(labels.astype(np.int32)))


def rejected(batch: pa.RecordBatch, is_unusable: np.ndarray, problem: tuple[str, str]) -> pa.RecordBatch:
    """Records of a batch of SCHEMA, of which some become rejects unless they are already.

    Args:
      is_unusable: (N,) bool.
      problem: reason and detail.
    """
    reason, detail = problem
    is_new = pa.array(is_unusable & batch["reason"].is_null().to_numpy(zero_copy_only=False))
    columns = {name: batch[name] for name in batch.schema.names}
    columns["reason"] = pc.if_else(is_new, reason, batch["reason"])
    columns["detail"] = pc.if_else(is_new, detail, batch["detail"])
    columns["captions"] = distinct_texts(batch["captions"], ~is_unusable)
    return pa.RecordBatch.from_pydict(columns, SCHEMA)


def _records(batch: pa.RecordBatch) -> list[SourceRecord]:
    columns = batch.to_pydict()
    reasons, details = columns.pop("reason"), columns.pop("detail")
    columns["problem"] = [reason and (reason, detail) for reason, detail in zip(reasons, details, strict=True)]
    columns["captions"] = map(tuple, columns["captions"])
    columns["companions"] = [tuple(tuple(place.values()) for place in places) for places in columns["companions"]]
    return [SourceRecord(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def distinct_texts(texts: pa.ListArray, is_kept: np.ndarray) -> pa.ListArray:
    """Lists of texts without those that occur earlier in the same list.

    Args:
      texts: of each record.
      is_kept: (N,) bool, whether a record keeps its texts; otherwise its list becomes empty.
    """
    record_of = np.repeat(np.arange(len(texts)), pc.list_value_length(texts).to_numpy())
    flat = texts.flatten()
    codes = flat.dictionary_encode().indices.to_numpy()
    _, first = np.unique(record_of * max(len(flat), 1) + codes, return_index=True)
    is_new = np.zeros(len(flat), bool)
    is_new[first] = True
    is_new &= is_kept[record_of]
    ends = np.cumsum(np.bincount(record_of[is_new], minlength=len(texts)))
    return pa.ListArray.from_arrays(pa.array(np.append(0, ends), pa.int32()), flat.filter(pa.array(is_new)))


def place_fields(companions: Iterable[str]) -> list[pa.Field]:
    """Columns of a plan with the places of a record's image and its companions, in the order of ``listed_places``."""
    suffixes = ["", *(f"_{name}" for name in companions)]
    return [PLAN_SCHEMA.field(name).with_name(f"{name}{suffix}") for suffix in suffixes for name in PLACES]


def listed_places(listed: pa.RecordBatch, companions: Iterable[str]) -> dict[str, pa.Array]:
    """Places of the images of a batch of the listing, by their columns in a plan; null where it has none."""
    arrays = [listed[name] for name in PLACE_NAMES]
    lengths = pc.list_value_length(listed["companions"]).to_numpy()
    starts, places = np.cumsum(lengths) - lengths, listed["companions"].flatten()
    for i, _ in enumerate(companions):
        arrays += places.take(pa.array(starts + i, mask=lengths <= i)).flatten()
    return dict(zip((field.name for field in place_fields(companions)), arrays, strict=True))


def with_places(plan: FrozenPlan, records: Listing, companions: Sequence[str]) -> FrozenPlan:
    """The plan with the present places of its images; that of a record that is not listed stays as planned.

    Args:
      records, companions: of the source as it is now.
    """
    listed_of = map_array(plan.records.num_rows, "int64", WHAT)
    listed_of[:] = -1
    keys = pa.schema([SCHEMA.field("key")])
    usable = (
        batch.set_column(0, "key", pc.if_else(batch["reason"].is_null(), batch["key"], None)).select(["key"])
        for batch in records.batches()
    )
    with database(WHAT) as connection:
        planned = plan.records.select(["key"])
        connection.register("planned_keys", numbered(planned.schema, planned.to_batches()))
        connection.register("listed_keys", numbered(keys, usable))
        found = connection.sql(
            """SELECT planned_keys.position AS known, listed_keys.position AS listed
            FROM planned_keys JOIN listed_keys USING (key)"""
        )
        for batch in found.to_arrow_reader(BATCH_ROWS):
            listed_of[batch["known"].to_numpy()] = batch["listed"].to_numpy()

    def batches() -> Iterator[pa.RecordBatch]:
        start = 0
        for batch in plan.records.to_batches():
            positions, start = listed_of[start : start + batch.num_rows], start + batch.num_rows
            now = listed_places(records.take(positions.clip(0)), companions)
            is_listed = pa.array(positions >= 0)
            columns = {name: batch[name] for name in batch.schema.names}
            columns |= {name: pc.if_else(is_listed, now[name], columns[name]) for name in columns.keys() & now.keys()}
            yield pa.RecordBatch.from_pydict(columns, batch.schema)

    return replace(plan, records=map_table(plan.records.schema, batches(), WHAT), recorded_hash=plan.recorded_hash)
