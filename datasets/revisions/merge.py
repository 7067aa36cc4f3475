"""The tables of a revision: the rows of its plan joined with the results in the commit records.

Each commit record is read, scattered into arrays in mapped temporary files, and dropped; the tables are then written a
few rows at a time. Memory does not grow with the store, except for the texts of rejects and fallbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..disk.spill import BATCH_ROWS, map_array, one_chunk
from ..format.layout import CAPTION_PART, NULL_PART
from ..format.schema import CommitRecord
from ..format.table_schemas import CAPTION_RESULTS, CAPTIONS_SCHEMA, RECORDS_SCHEMA
from ..format.tables import ROW_GROUP, row_groups
from .plan import FrozenPlan

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

Task = tuple[str, int]
Commits = Mapping[Task, CommitRecord]
# Flags of a row: its shard is committed; it is rejected; it has a checksum; its picture has one.
COMMITTED, REJECTED, CHECKED, SOURCE_CHECKED = 1, 2, 4, 8
WHAT = "what the commit records say"
RECORD_RESULTS = ("status", "stage", "reason", "detail", "checksum", "source_checksum", "fallback")
STATUSES = pa.array(["stored", "rejected"])


def merge_records(plan: FrozenPlan, commits: Commits) -> pa.Table:
    """Records table of a revision; some of its tasks may be missing."""
    return pa.concat_tables(_merged(plan, commits).record_groups())


def merge_captions(plan: FrozenPlan, commits: Commits) -> pa.Table:
    """Captions table of a revision, with checksums and quality of the embeddings; some tasks may be missing."""
    return pa.concat_tables(_merged(plan, commits).caption_groups())


def _merged(plan: FrozenPlan, commits: Commits) -> Merge:
    merge = Merge(plan)
    for task, commit in commits.items():
        merge.add(task, commit)
    return merge


class Merge:
    """Collects the commit records of a plan one by one, and writes the tables."""

    def __init__(self, plan: FrozenPlan) -> None:
        self._plan, rows, captions = plan, plan.records.num_rows, plan.captions.num_rows
        self._flags = map_array(rows, "uint8", WHAT)
        self._checksums, self._source_checksums = (map_array(rows, "uint64", WHAT) for _ in range(2))
        self._rejects = _Sparse(["stage", "reason", "detail"])
        self._fallbacks = _Sparse(["fallback"])
        self._caption_flags = map_array(captions, "uint8", WHAT)
        self._caption_checksums = map_array(captions, "uint64", WHAT)
        self._qualities = {name: map_array(captions, "float32", WHAT) for name in ("min_cosine", "max_error")}

    def add(self, task: Task, commit: CommitRecord) -> None:
        """Add one commit record."""
        part, shard = task
        if part == CAPTION_PART:
            self._add_captions(shard, commit)
        elif part != NULL_PART:
            self._add_rows(part, shard, commit)

    def _add_rows(self, part: str, shard: int, commit: CommitRecord) -> None:
        positions = self._plan.bucket_positions[part.removeprefix("buckets/")]
        rows = self._plan.layout.rows_of(part, shard)
        targets = positions[rows.start : rows.stop]
        flags = np.full(len(targets), COMMITTED, np.uint8)
        for bit, values, digits in (
            (CHECKED, self._checksums, commit.checksums),
            (SOURCE_CHECKED, self._source_checksums, commit.source_checksums),
        ):
            values[targets], is_present = _numbers(digits)
            flags[is_present] |= bit
        fallbacks = {fallback.row: fallback for fallback in commit.fallbacks}
        self._fallbacks.add(positions[list(fallbacks)], [[fallback.how] for fallback in fallbacks.values()])
        rejects = {reject.row: reject for reject in commit.rejects}
        self._rejects.add(positions[list(rejects)], [[r.stage, r.reason, r.detail] for r in rejects.values()])
        flags[np.array(list(rejects), np.int64) - rows.start] = COMMITTED | REJECTED
        self._flags[targets] = flags

    def _add_captions(self, shard: int, commit: CommitRecord) -> None:
        captions = self._plan.layout.captions_of(shard)
        first = self._plan.first_caption + captions.start
        targets = slice(first, first + len(captions))
        self._caption_checksums[targets], _ = _numbers(commit.checksums)
        self._caption_flags[targets] = COMMITTED
        if commit.min_cosines:
            self._caption_flags[targets] |= CHECKED
            self._qualities["min_cosine"][targets] = commit.min_cosines
            self._qualities["max_error"][targets] = commit.max_errors

    def record_groups(self) -> Iterator[pa.Table]:
        """The records table, in the order of the source, by row groups."""
        return _groups(self._plan.records.select(RECORDS_SCHEMA.names), RECORD_RESULTS, self._records_of)

    def caption_groups(self) -> Iterator[pa.Table]:
        """The captions table, in the order of ids, by row groups."""
        return _groups(self._plan.captions.select(CAPTIONS_SCHEMA.names), CAPTION_RESULTS, self._captions_of)

    def _records_of(self, rows: slice, planned: pa.RecordBatch) -> dict[str, pa.Array]:
        columns = {name: planned[name] for name in RECORD_RESULTS}
        flags = self._flags[rows]
        if not flags.any():
            return columns
        status = STATUSES.take(pa.array((flags & REJECTED != 0).astype(np.int8)))
        columns["status"] = _where(flags & COMMITTED, status, columns["status"])
        for name, bit, values in (
            ("checksum", CHECKED, self._checksums),
            ("source_checksum", SOURCE_CHECKED, self._source_checksums),
        ):
            columns[name] = _where(flags & COMMITTED, pa.array(values[rows], mask=flags & bit == 0), columns[name])
        for sparse in (self._rejects, self._fallbacks):
            columns |= sparse.over(rows, columns)
        return columns

    def _captions_of(self, rows: slice, planned: pa.RecordBatch) -> dict[str, pa.Array]:
        flags = self._caption_flags[rows]
        results = {"checksum": pa.array(self._caption_checksums[rows])}
        for name, values in self._qualities.items():
            results[name] = pa.array(values[rows], mask=flags & CHECKED == 0)
        return {name: _where(flags & COMMITTED, values, planned[name]) for name, values in results.items()}


def _groups(
    planned: pa.Table, names: Sequence[str], merge: Callable[[slice, pa.RecordBatch], dict[str, pa.Array]]
) -> Iterator[pa.Table]:
    """Row groups of a planned table, in which some columns are merged a few rows at a time."""
    for start in row_groups(planned.num_rows):
        group, parts, first = planned.slice(start, ROW_GROUP), {name: list[pa.Array]() for name in names}, start
        for batch in group.select(names).to_batches(max_chunksize=BATCH_ROWS):
            for name, values in merge(slice(first, first + batch.num_rows), batch).items():
                parts[name].append(values)
            first += batch.num_rows
        # Merged columns in one chunk, the others in the plan's chunks, as in the first stores: pages may end with a
        # chunk, so other chunks would change the bytes of a large table and the root hash.
        merged = {name: pa.chunked_array(parts[name], planned.schema.field(name).type) for name in names}
        columns = {name: one_chunk(merged[name]) if name in merged else group[name] for name in group.column_names}
        yield pa.table(columns, schema=planned.schema)


class _Sparse:
    """Texts of a few rows."""

    def __init__(self, names: Sequence[str]) -> None:
        self._schema = pa.schema([(name, pa.string()) for name in names])
        self._positions: list[np.ndarray] = []
        self._batches: list[pa.RecordBatch] = []

    def add(self, positions: np.ndarray, texts: list[list[str]]) -> None:
        """Add the texts of some rows, one for each column."""
        if len(positions):
            columns = [pa.array(column, pa.string()) for column in zip(*texts, strict=True)]
            self._positions.append(np.array(positions))
            self._batches.append(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def over(self, rows: slice, columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
        """Columns of a batch, with these texts in the rows that have them."""
        if len(self._positions) > 1:  # merge them, sorted by row
            positions = np.concatenate(self._positions)
            order = np.argsort(positions)
            table = pa.Table.from_batches(self._batches).take(pa.array(order)).combine_chunks()
            self._positions, self._batches = [positions[order]], table.to_batches()
        if not self._positions:
            return {}
        first, last = np.searchsorted(self._positions[0], [rows.start, rows.stop])
        if first == last:
            return {}
        which = np.full(rows.stop - rows.start, -1)
        which[self._positions[0][first:last] - rows.start] = np.arange(first, last)
        indices = pa.array(which, mask=which < 0)
        texts = self._batches[0]
        return {name: _where(which >= 0, texts[name].take(indices), columns[name]) for name in self._schema.names}


def _where(condition: np.ndarray, values: pa.Array, otherwise: pa.Array) -> pa.Array:
    return pc.if_else(pa.array(condition.astype(bool)), values, otherwise)


def _numbers(digits: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Checksums of 16 hex digits as uint64, 0 for "", and which of them are not ""."""
    numbers = np.frombuffer(bytes.fromhex("".join(text or "0" * 16 for text in digits)), ">u8")
    return numbers.astype(np.uint64), np.array([bool(text) for text in digits], bool)
