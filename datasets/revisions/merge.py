"""The tables of a revision: the rows of its plan joined with the results beside the commit records.

The results of each shard are scattered into arrays in mapped temporary files; the tables are then written a row group
at a time. Memory does not grow with the store, except for the texts of rejects and fallbacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...errors import RecordRejected
from ..disk.cached import cached_property
from ..disk.spill import map_array, one_chunk
from ..format.buckets import bucket_size, centre_crop
from ..format.layout import CaptionLayout, Task
from ..format.row_layout import LATENTS
from ..format.schema import CommitRecord, TextEncoder
from ..format.table_schemas import (
    CAPTION_RESULTS,
    CAPTION_START,
    COMPANION_RESULTS,
    EMPTY,
    PLACEMENT,
    REJECTED,
    ROW_RESULTS,
    STORED,
    captions_schema,
    records_schema,
    suffixes,
)
from ..format.tables import ROW_GROUP, row_groups
from .commits import reject_of_caption
from .plan import FrozenPlan, caption_owners

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

KNOWN_SIZES = 1 << 16  # whose placement is kept
STATUSES = pa.array(["stored", "rejected"])
Columns = dict[str, pa.ChunkedArray]


class Merge:
    """Collects the results of a plan's shards one by one, and makes the tables; some shards may be missing."""

    def __init__(self, plan: FrozenPlan) -> None:
        self._plan = plan
        self._rejects = _SparseTexts(["stage", "reason", "detail"])
        self._fallbacks = _SparseTexts(["fallback"])
        features = {one.name: CAPTION_RESULTS for one in plan.spec.features}
        companions = {one.name: COMPANION_RESULTS for one in plan.spec.companions}
        names = {LATENTS: COMPANION_RESULTS, **features, **companions}
        self._place = lru_cache(KNOWN_SIZES)(partial(_placement, crop=plan.spec.images.crop))
        self._groups = {
            group: _Results(plan.records.num_rows, names[group], f"_{group}" if group else "") for group in names
        }
        self._texts = {
            name: _Results(plan.captions.num_rows, CAPTION_RESULTS, suffix)
            for name, suffix in suffixes(plan.spec).items()
        }

    def add(self, task: Task, commit: CommitRecord, results: np.ndarray) -> None:
        """Add the results of a shard, (rows, groups) of ROW_RESULTS."""
        part, shard = self._plan.layout.parts[task[0]], task[1]
        if part.is_null:
            return
        if part.captions:  # the states of its results tell which are rejected
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
            positions[np.array([one.row for one in of_rows], np.int64) - rows.start]
            for of_rows in (commit.rejects, commit.fallbacks)
        )
        self._rejects.add(rejected, [[reject.stage, reject.reason, reject.detail] for reject in commit.rejects])
        self._fallbacks.add(fallen, [[fallback.how] for fallback in commit.fallbacks])

    @property
    def latent_results(self) -> np.ndarray:
        """(records,) ROW_RESULTS of the latents of each record; empty where the revision has not written any."""
        return self._groups[LATENTS].values

    def records(self) -> Iterator[pa.Table]:
        """The row groups of the records table, in the order of the source."""
        lost = self._lost_captions()
        for rows, columns in _row_groups(self._plan.records.select(records_schema(self._plan.spec).names)):
            for results in self._groups.values():
                results.fill(columns, rows)
            self._fill_sizes(columns, rows)
            self._rejects.fill(columns, rows)
            self._fallbacks.fill(columns, rows)
            states = [results.values["state"][rows] for results in self._groups.values()]
            is_rejected = np.any([state == REJECTED for state in states], axis=0)
            is_stored = states[0] == STORED  # of the latents: a group that is added to stored rows changes no status
            is_lost = self._reject_captions(columns, lost, ~is_rejected & (is_stored | _equal(columns, "stored")))
            is_rejected |= is_lost
            status = STATUSES.take(pa.array(is_rejected.astype(np.int8)))
            columns["status"] = _where(is_rejected | is_stored, status, columns["status"])
            if is_rejected.any():  # also records that earlier revisions have stored, by what is added to them
                for name in ("fallback", *(name for results in self._groups.values() for name in results.columns)):
                    columns[name] = _where(~is_rejected, columns[name], pa.scalar(None, columns[name].type))
            yield pa.table(columns, schema=records_schema(self._plan.spec))

    def _fill_sizes(self, columns: Columns, rows: slice) -> None:
        """Put sizes and crops into the columns of some rows, where no header was read while planning."""
        results, planned = self._groups[LATENTS].values[rows], columns["height_px"].is_null().to_numpy()
        is_filled = planned & (results["state"] == STORED) & (results["height_px"] > 0)
        if not is_filled.any():
            return
        sizes = zip(results["height_px"][is_filled].tolist(), results["width_px"][is_filled].tolist(), strict=True)
        buckets = columns["bucket"].filter(pa.array(is_filled)).to_pylist()
        values = np.zeros((len(is_filled), len(PLACEMENT)), np.int32)
        values[is_filled] = [self._place(*size, bucket) for size, bucket in zip(sizes, buckets, strict=True)]
        for name, column in zip(PLACEMENT, values.T, strict=True):
            columns[name] = _where(is_filled, pa.array(np.ascontiguousarray(column)), columns[name])

    @cached_property
    def _caption_layouts(self) -> dict[str, CaptionLayout]:
        """The captions that the revision adds, by text encoder."""
        parts = [part for part in self._plan.layout.parts.values() if not part.is_null]
        return {part.captions.name: part.captions for part in parts if part.captions}

    def _lost_captions(self) -> dict[str, np.ndarray]:
        """Ids of the captions that are rejected, of this revision and earlier ones, by text encoder."""
        lost = {}
        for name, suffix in suffixes(self._plan.spec).items():
            is_lost = self._plan.captions[f"checksum{suffix}"].is_null().to_numpy()
            layout = self._caption_layouts.get(name)
            new = slice(layout.first_caption if layout else len(is_lost), None)
            is_lost[new] = self._texts[name].values["state"][new] == REJECTED
            lost[name] = np.flatnonzero(is_lost)
        return lost

    def _reject_of_caption(self, caption: int, encoder: TextEncoder) -> RecordRejected:
        """The reject of a caption of this revision or of an earlier one, by its id."""
        table = self._plan.captions
        cosine = table[f"min_cosine{suffixes(self._plan.spec)[encoder.name]}"][caption].as_py()
        layout = self._caption_layouts.get(encoder.name)
        if layout and caption >= layout.first_caption:
            result = float(self._texts[encoder.name].values["min_cosine"][caption])
            cosine = None if np.isnan(result) else result
        return reject_of_caption(table["text"][caption].as_py(), encoder.encoder.class_name, cosine)

    def _reject_captions(self, columns: Columns, lost: dict[str, np.ndarray], is_allowed: np.ndarray) -> np.ndarray:
        """Reject the records with captions that are lost. Returns: (rows,) bool, which these are.

        Args:
          is_allowed: (rows,) bool, the records that nothing else rejects.
        """
        rows, ids = caption_owners(columns["caption_ids"].combine_chunks())
        is_rejected = np.zeros(len(is_allowed), bool)
        for one in self._plan.spec.text_encoders:
            found = np.flatnonzero(np.isin(ids, lost[one.name])) if len(lost[one.name]) else np.empty(0, np.int64)
            found = found[is_allowed[rows[found]] & ~is_rejected[rows[found]]]
            own, first = np.unique(rows[found], return_index=True)
            if not len(own):
                continue
            is_rejected[own] = True
            rejects = [self._reject_of_caption(caption, one) for caption in ids[found[first]].tolist()]
            index = np.full(len(is_allowed), -1)
            index[own] = np.arange(len(own))
            positions = pa.array(index, mask=index < 0)
            for name in ("stage", "reason", "detail"):
                texts = pa.array([getattr(reject, name) for reject in rejects])
                columns[name] = _where(index >= 0, texts.take(positions), columns[name])
        return is_rejected

    def captions(self) -> Iterator[pa.Table]:
        """The row groups of the captions table, in the order of ids."""
        for rows, columns in _row_groups(self._plan.captions.select(captions_schema(self._plan.spec).names)):
            for name, suffix in suffixes(self._plan.spec).items():
                if layout := self._caption_layouts.get(name):
                    is_new = np.arange(rows.start, rows.stop) >= layout.first_caption
                    starts = np.zeros(len(is_new), np.int64)
                    starts[is_new] = layout.starts[max(rows.start - layout.first_caption, 0) :][: is_new.sum()]
                    column = f"{CAPTION_START}{suffix}"
                    columns[column] = _where(is_new, pa.array(starts), columns[column])
                self._texts[name].fill(columns, rows)
            yield pa.table(columns, schema=captions_schema(self._plan.spec))


def _placement(height_px: int, width_px: int, bucket: str, *, crop: str) -> tuple[int, ...]:
    """PLACEMENT of an image."""
    sizes, top_px, left_px = centre_crop(height_px, width_px, bucket_size(bucket), crop)
    return height_px, width_px, *sizes[-1], top_px, left_px


def _row_groups(planned: pa.Table) -> Iterator[tuple[slice, Columns]]:
    """Rows and columns of each row group of a planned table; a column is one chunk, since pages end with chunks."""
    for start in row_groups(planned.num_rows):
        group = planned.slice(start, ROW_GROUP)
        yield slice(start, start + group.num_rows), {name: one_chunk(group[name]) for name in group.column_names}


class _Results:
    """ROW_RESULTS of each row of a table, of one group of arrays or one text encoder.

    Args:
      names: the fields that the table has.
      suffix: of its columns in the table.
    """

    def __init__(self, num_rows: int, names: Sequence[str], suffix: str) -> None:
        self.columns = {f"{name}{suffix}": name for name in names}
        self.values = map_array(num_rows, ROW_RESULTS, "results of the shards")

    def fill(self, columns: Columns, rows: slice) -> None:
        """Put the results into the columns of some rows, where there are any."""
        values = self.values[rows]
        has_result = values["state"] != EMPTY
        if not has_result.any():
            return
        for column, name in self.columns.items():
            numbers = np.ascontiguousarray(values[name])
            is_absent = np.isnan(numbers) if numbers.dtype.kind == "f" else numbers == 0  # no checksum is 0
            columns[column] = _where(has_result, pa.array(numbers, mask=is_absent), columns[column])


class _SparseTexts:
    """Texts of a few rows, for some columns; all are added before the first is read."""

    def __init__(self, names: Sequence[str]) -> None:
        self._schema = pa.schema([("position", pa.int64()), *((name, pa.string()) for name in names)])
        self._added = [self._schema.empty_table()]

    def add(self, positions: np.ndarray, texts: list[list[str]]) -> None:
        """Add the texts of some rows, one for each column."""
        if len(positions):
            columns = [pa.array(positions), *(pa.array(column) for column in zip(*texts, strict=True))]
            self._added.append(pa.table(columns, schema=self._schema))

    @cached_property
    def _sorted(self) -> pa.Table:
        return pa.concat_tables(self._added).sort_by("position")

    def fill(self, columns: Columns, rows: slice) -> None:
        """Put the texts into the columns of some rows, where there are any."""
        positions = self._sorted["position"].to_numpy()
        first, last = np.searchsorted(positions, [rows.start, rows.stop])
        if first < last:
            index = np.full(rows.stop - rows.start, -1)
            index[positions[first:last] - rows.start] = np.arange(first, last)
            texts = self._sorted.take(pa.array(index, mask=index < 0)).combine_chunks()
            columns |= {name: _where(index >= 0, texts[name], columns[name]) for name in self._schema.names[1:]}


def _equal(columns: Columns, status: str) -> np.ndarray:
    return pc.equal(columns["status"], status).to_numpy(zero_copy_only=False)


def _where(condition: np.ndarray, values: Any, otherwise: Any) -> pa.ChunkedArray:
    return pc.if_else(pa.array(condition), values, otherwise)
