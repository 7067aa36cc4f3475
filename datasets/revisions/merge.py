"""The tables of a revision: the rows of its plan joined with the results beside the commit records.

Each commit record is read, its results are scattered into arrays in mapped temporary files, and it is dropped; the
tables are then written a few rows at a time. Memory does not grow with the store, except for the texts of rejects and
fallbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..disk.spill import BATCH_ROWS, map_array, one_chunk
from ..format.layout import Task
from ..format.row_layout import LATENTS
from ..format.schema import CommitRecord
from ..format.table_schemas import (
    CAPTION_RESULTS,
    CAPTION_START,
    PICTURE_RESULTS,
    REJECTED,
    ROW_RESULTS,
    STORED,
    captions_schema,
    records_schema,
    suffixes,
)
from ..format.tables import ROW_GROUP, row_groups
from .plan import FrozenPlan

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

WHAT = "what the commit records say"
STATUSES = pa.array(["stored", "rejected"])


class Merge:
    """Collects the results of a plan's shards one by one, and writes the tables; some shards may be missing."""

    def __init__(self, plan: FrozenPlan) -> None:
        self._plan = plan
        self._rejects = _Sparse(["stage", "reason", "detail"])
        self._fallbacks = _Sparse(["fallback"])
        features = {one.name: CAPTION_RESULTS for one in plan.spec.features}
        pictures = {one.name: PICTURE_RESULTS for one in plan.spec.pictures}
        groups = {LATENTS: PICTURE_RESULTS, **features, **pictures}
        self._groups = {
            name: _Results(plan.records.num_rows, columns, f"_{name}" if name else "")
            for name, columns in groups.items()
        }
        self._texts = {
            name: _Results(plan.captions.num_rows, CAPTION_RESULTS, suffix)
            for name, suffix in suffixes(plan.spec).items()
        }
        self._layouts = {
            part.captions.name: part.captions
            for part in plan.layout.parts.values()
            if part.captions and not part.is_null
        }

    def add(self, task: Task, commit: CommitRecord, results: np.ndarray) -> None:
        """Add the results of a shard, (rows, groups) of ROW_RESULTS."""
        part, shard = self._plan.layout.parts[task[0]], task[1]
        if part.is_null:
            return
        if part.captions:
            captions, first = part.captions.captions_of(shard), part.captions.first_caption
            targets = slice(first + captions.start, first + captions.stop)
            self._texts[part.captions.name].values[targets] = results[:, 0]
            return
        rows = part.arrays[0].rows_of(shard)
        positions = self._plan.positions_of(part)[rows.start : rows.stop]
        known = positions >= 0
        for i, group in enumerate(part.groups):
            self._groups[group].values[positions[known]] = results[known, i]
        rejected, fallen = (
            positions[np.array([one.row for one in some], np.int64) - rows.start]
            for some in (commit.rejects, commit.fallbacks)
        )
        self._rejects.add(rejected, [[r.stage, r.reason, r.detail] for r in commit.rejects])
        self._fallbacks.add(fallen, [[fallback.how] for fallback in commit.fallbacks])

    def records(self) -> pa.Table:
        """The records table, in memory."""
        return pa.concat_tables(self.record_groups())

    def captions(self) -> pa.Table:
        """The captions table, in memory."""
        return pa.concat_tables(self.caption_groups())

    def record_groups(self) -> Iterator[pa.Table]:
        """The records table, in the order of the source, by row groups."""
        names = ["status", "stage", "reason", "detail", "fallback", *self._result_columns(self._groups)]
        return _groups(self._plan.records.select(records_schema(self._plan.spec).names), names, self._records_of)

    def caption_groups(self) -> Iterator[pa.Table]:
        """The captions table, in the order of ids, by row groups."""
        starts = [f"{CAPTION_START}{suffix}" for suffix in suffixes(self._plan.spec).values()]
        names = [*starts, *self._result_columns(self._texts)] or list(CAPTION_RESULTS)
        return _groups(self._plan.captions.select(captions_schema(self._plan.spec).names), names, self._captions_of)

    @staticmethod
    def _result_columns(results: Mapping[str, _Results]) -> list[str]:
        return [column for one in results.values() for column in one.columns]

    def _records_of(self, rows: slice, planned: pa.RecordBatch) -> dict[str, pa.Array]:
        columns = {name: planned[name] for name in planned.schema.names}
        for results in self._groups.values():
            columns |= results.over(rows, columns)
        for sparse in (self._rejects, self._fallbacks):
            columns |= sparse.over(rows, columns)
        states = [results.values["state"][rows] for results in self._groups.values()]
        is_rejected = np.any([state == REJECTED for state in states], axis=0)
        is_stored = states[0] == STORED  # of the latents: a group that is added to stored rows changes no status
        if is_rejected.any() or is_stored.any():
            status = STATUSES.take(pa.array(is_rejected.astype(np.int8)))
            columns["status"] = _where(is_rejected | is_stored, status, columns["status"])
        if is_rejected.any():  # an addition rejects records that earlier revisions have stored
            for name in ("fallback", *self._result_columns(self._groups)):
                columns[name] = _where(~is_rejected, columns[name], pa.scalar(None, columns[name].type))
        return columns

    def _captions_of(self, rows: slice, planned: pa.RecordBatch) -> dict[str, pa.Array]:
        columns = {name: planned[name] for name in planned.schema.names}
        for name, suffix in suffixes(self._plan.spec).items():
            if layout := self._layouts.get(name):
                column, first = f"{CAPTION_START}{suffix}", layout.first_caption
                is_new = np.arange(rows.start, rows.start + planned.num_rows) >= first
                starts = np.zeros(planned.num_rows, np.int64)
                starts[is_new] = layout.starts[max(rows.start - first, 0) :][: is_new.sum()]
                columns[column] = _where(is_new, pa.array(starts), columns[column])
            columns |= self._texts[name].over(rows, columns)
        return columns


class _Results:
    """ROW_RESULTS of each row of a table, of one group of arrays or one text encoder.

    Args:
      names: the fields that the table has.
      suffix: of its columns in the table.
    """

    def __init__(self, num_rows: int, names: Sequence[str], suffix: str) -> None:
        self.columns = {f"{name}{suffix}": name for name in names}
        self.values = map_array(num_rows, ROW_RESULTS, WHAT)

    def over(self, rows: slice, columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
        """Columns of a batch, with these results in the rows that have them."""
        values = self.values[rows]
        is_stored = values["state"] == STORED
        if not is_stored.any():
            return {}
        found = {}
        for column, name in self.columns.items():
            numbers = np.ascontiguousarray(values[name])
            mask = np.isnan(numbers) if numbers.dtype.kind == "f" else (name == "source_checksum") & (numbers == 0)
            found[column] = _where(is_stored, pa.array(numbers, mask=mask), columns[column])
        return found


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
        merged = {name: pa.chunked_array(parts[name], planned.schema.field(name).type) for name in names}
        columns = [one_chunk(merged.get(name, group[name])) for name in group.column_names]  # pages end with chunks
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
