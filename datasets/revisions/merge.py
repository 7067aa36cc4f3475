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
from ..format.layout import Part, Task
from ..format.row_layout import LATENTS
from ..format.schema import CommitRecord, FeatureRows
from ..format.table_schemas import CAPTION_RESULTS, PICTURE_RESULTS, captions_schema, records_schema, suffixes
from ..format.tables import ROW_GROUP, row_groups
from .plan import FrozenPlan

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

Commits = Mapping[Task, CommitRecord]
# Flags of a row: its shard is committed; it is rejected; it has a checksum; its picture has one; it was narrowed.
COMMITTED, REJECTED, CHECKED, SOURCE_CHECKED, NARROWED = 1, 2, 4, 8, 16
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
        self._groups: dict[str, _Results | _PictureResults] = {
            **{one.name: _Results(rows, f"_{one.name}") for one in plan.spec.features},
            **{one.name: _PictureResults(rows, f"_{one.name}") for one in plan.spec.pictures},
        }
        self._texts = {name: _Results(captions, suffix) for name, suffix in suffixes(plan.spec).items()}

    def add(self, task: Task, commit: CommitRecord) -> None:
        """Add one commit record."""
        part, shard = self._plan.layout.parts[task[0]], task[1]
        if part.captions is None:
            self._add_rows(part, shard, commit)
        elif not part.is_null:
            first = self._plan.first_caption_of(part.revision)
            captions = part.captions.captions_of(shard)
            targets = np.arange(first + captions.start, first + captions.stop)
            found = FeatureRows(
                checksums=commit.checksums, min_cosines=commit.min_cosines, max_errors=commit.max_errors
            )
            self._texts[part.captions.name].add(targets, found)

    def _add_rows(self, part: Part, shard: int, commit: CommitRecord) -> None:
        rows = part.arrays[0].rows_of(shard)
        targets = self._plan.positions_of(part)[rows.start : rows.stop]
        rejected = np.array([reject.row for reject in commit.rejects], np.int64) - rows.start
        if LATENTS in part.groups:
            flags = np.full(len(targets), COMMITTED, np.uint8)
            for bit, values, digits in (
                (CHECKED, self._checksums, commit.checksums),
                (SOURCE_CHECKED, self._source_checksums, commit.source_checksums),
            ):
                values[targets], is_present = _numbers(digits)
                flags[is_present] |= bit
            self._flags[targets] = flags
        fallbacks = {fallback.row: fallback for fallback in commit.fallbacks}
        positions = targets[np.array(list(fallbacks), np.int64) - rows.start]
        self._fallbacks.add(positions, [[fallback.how] for fallback in fallbacks.values()])
        self._rejects.add(targets[rejected], [[r.stage, r.reason, r.detail] for r in commit.rejects])
        self._flags[targets[rejected]] = COMMITTED | REJECTED
        for name, found in commit.features.items():
            self._groups[name].add(targets, found)

    def record_groups(self) -> Iterator[pa.Table]:
        """The records table, in the order of the source, by row groups."""
        names = [*RECORD_RESULTS, *(name for results in self._groups.values() for name in results.columns)]
        return _groups(self._plan.records.select(records_schema(self._plan.spec).names), names, self._records_of)

    def caption_groups(self) -> Iterator[pa.Table]:
        """The captions table, in the order of ids, by row groups."""
        names = [name for results in self._texts.values() for name in results.columns] or list(CAPTION_RESULTS)
        return _groups(self._plan.captions.select(captions_schema(self._plan.spec).names), names, self._captions_of)

    def _records_of(self, rows: slice, planned: pa.RecordBatch) -> dict[str, pa.Array]:
        columns = {name: planned[name] for name in planned.schema.names}
        flags = self._flags[rows]
        if flags.any():
            status = STATUSES.take(pa.array((flags & REJECTED != 0).astype(np.int8)))
            columns["status"] = _where(flags & COMMITTED, status, columns["status"])
            for name, bit, values in (
                ("checksum", CHECKED, self._checksums),
                ("source_checksum", SOURCE_CHECKED, self._source_checksums),
            ):
                columns[name] = _where(flags & COMMITTED, pa.array(values[rows], mask=flags & bit == 0), columns[name])
        for sparse in (self._rejects, self._fallbacks):
            columns |= sparse.over(rows, columns)
        for results in self._groups.values():
            columns |= results.over(rows, columns)
        rejected = flags & REJECTED
        if rejected.any():  # an addition rejects records whose features, or fallback, earlier revisions told
            for name in ("fallback", *(name for results in self._groups.values() for name in results.columns)):
                columns[name] = _where(~rejected.astype(bool), columns[name], pa.scalar(None, columns[name].type))
        return columns

    def _captions_of(self, rows: slice, planned: pa.RecordBatch) -> dict[str, pa.Array]:
        columns = {name: planned[name] for name in planned.schema.names}
        for results in self._texts.values():
            columns |= results.over(rows, columns)
        return columns


class _Results:
    """Checksum and quality of captions, or of a feature's rows.

    Args:
      suffix: of its columns in the table.
    """

    def __init__(self, num_rows: int, suffix: str) -> None:
        self.columns = [f"{name}{suffix}" for name in CAPTION_RESULTS]
        self._flags = map_array(num_rows, "uint8", WHAT)
        self._checksums = map_array(num_rows, "uint64", WHAT)
        self._min_cosines, self._max_errors = (map_array(num_rows, "float32", WHAT) for _ in range(2))

    def add(self, targets: np.ndarray, found: FeatureRows) -> None:
        """Add the results of some rows.

        Args:
          targets: (n,) rows of the table; those below 0 are left out.
        """
        known = targets >= 0
        numbers, is_present = _numbers(found.checksums)
        flags = np.where(is_present, COMMITTED | CHECKED, COMMITTED).astype(np.uint8)
        self._checksums[targets[known]] = numbers[known]
        if found.min_cosines:
            flags[is_present] |= NARROWED
            self._min_cosines[targets[known]] = np.array(found.min_cosines, np.float32)[known]
            self._max_errors[targets[known]] = np.array(found.max_errors, np.float32)[known]
        self._flags[targets[known]] = flags[known]

    def over(self, rows: slice, columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
        """Columns of a batch, with these results in the rows that have them."""
        flags = self._flags[rows]
        if not flags.any():
            return {}
        values = ((self._checksums, CHECKED), (self._min_cosines, NARROWED), (self._max_errors, NARROWED))
        return {
            name: _where(flags & COMMITTED, pa.array(value[rows], mask=flags & bit == 0), columns[name])
            for name, (value, bit) in zip(self.columns, values, strict=True)
        }


class _PictureResults:
    """Checksums of the rows and files of a companion picture.

    Args:
      suffix: of its columns in the table.
    """

    def __init__(self, num_rows: int, suffix: str) -> None:
        self.columns = [f"{name}{suffix}" for name in PICTURE_RESULTS]
        self._values = [map_array(num_rows, "uint64", WHAT) for _ in self.columns]
        self._flags = [map_array(num_rows, "uint8", WHAT) for _ in self.columns]

    def add(self, targets: np.ndarray, found: FeatureRows) -> None:
        """As of ``_Results``."""
        known = targets >= 0
        for values, flags, digits in zip(
            self._values, self._flags, (found.checksums, found.source_checksums), strict=True
        ):
            numbers, is_present = _numbers(digits)
            values[targets[known]] = numbers[known]
            flags[targets[known]] = np.where(is_present, COMMITTED | CHECKED, COMMITTED).astype(np.uint8)[known]

    def over(self, rows: slice, columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
        """As of ``_Results``."""
        return {
            name: _where(
                flags[rows] & COMMITTED, pa.array(values[rows], mask=flags[rows] & CHECKED == 0), columns[name]
            )
            for name, values, flags in zip(self.columns, self._values, self._flags, strict=True)
            if flags[rows].any()
        }


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
