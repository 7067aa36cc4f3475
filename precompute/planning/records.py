"""The records table of a plan: every record's bucket, row, crop and captions, frozen before encoding starts.

It combines planned pictures (``pictures.py``), planned captions (``captions.py``) and records carried over from an
earlier revision (``compare.py``). Everything is processed in batches and mapped, so memory does not grow with the
number of records of a first plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...datasets.disk.spill import BATCH_ROWS, map_table, rebatched
from ...datasets.format.table_schemas import PLACES, PLAN_SCHEMA
from .compare import Comparison
from .pictures import PICTURES_SCHEMA

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

WHAT = "the plan"
TEXTS = pa.list_(pa.string())


@dataclass(frozen=True)
class PlannedTexts:
    """Captions of all records of a revision, carried-over ones first; rejects have none.

    A planned record without a caption has the empty one, as in ``record.planned_texts``.

    Args:
      pictures: of the new records (PICTURES_SCHEMA).
    """

    comparison: Comparison
    pictures: pa.Table

    def __iter__(self) -> Iterator[pa.ListArray]:
        kept = self.comparison.texts
        for start in range(0, len(kept), BATCH_ROWS):
            yield pa.array(kept[start : start + BATCH_ROWS], TEXTS)
        first, nothing, null = 0, pa.scalar([], TEXTS), pa.scalar([""], TEXTS)
        for batch in self.comparison.fresh.batches():
            rows = self.pictures["row"].slice(first, batch.num_rows).combine_chunks()
            texts = pc.if_else(pc.equal(pc.list_value_length(batch["captions"]), 0), null, batch["captions"])
            yield pc.if_else(pc.greater_equal(rows, 0), texts, nothing)
            first += batch.num_rows


def plan_records(
    comparison: Comparison,
    pictures: pa.Table,
    caption_ids: pa.ChunkedArray,
    *,
    revision: int,
    first_rows: Mapping[str, int] = {},
    schema: pa.Schema = PLAN_SCHEMA,
) -> pa.Table:
    """Records table of a revision: carried-over records, then new records with their rows.

    Args:
      pictures: of the new records (PICTURES_SCHEMA), with rows counted from 0.
      first_rows: that the revision adds to a bucket, where that is not 0.
      caption_ids: of all records, carried-over ones first.
      schema: as ``plan_schema``.
    Returns: the table, mapped.
    """
    num_kept = len(comparison.kept)
    kept = _carried_records(comparison, caption_ids.slice(0, num_kept), schema).to_batches()
    fresh = _fresh_batches(comparison, pictures, caption_ids.slice(num_kept), revision, first_rows, schema)
    return map_table(schema, rebatched((batch for some in (kept, fresh) for batch in some), BATCH_ROWS), WHAT)


def _fresh_batches(
    comparison: Comparison,
    pictures: pa.Table,
    caption_ids: pa.ChunkedArray,
    revision: int,
    first_rows: Mapping[str, int],
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    first = 0
    for batch in comparison.fresh.batches():
        count = batch.num_rows
        planned = pictures.slice(first, count).combine_chunks()
        nothing, attempts = pa.nulls(count), np.ones(count, np.int32)
        for i in comparison.attempts.keys() & set(range(first, first + count)) if comparison.attempts else ():
            attempts[i - first] = comparison.attempts[i]
        columns = {
            **{name: planned[name] for name in PICTURES_SCHEMA.names},
            "row": _moved_rows(planned, first_rows),
            "key": batch["key"],
            "revision": np.full(count, revision, np.int32),
            "label": batch["label"],
            "caption_ids": caption_ids.slice(first, count),
            "attempts": attempts,
            **dict.fromkeys(("checksum", "source_checksum", "fallback"), nothing),
            "source_path": batch["path"],
            "source_offset": batch["offset"],
            "source_bytes": batch["num_bytes"],
            "source_mtime_ns": batch["mtime_ns"],
        }
        columns |= dict.fromkeys(schema.names[len(PLAN_SCHEMA) :], nothing)
        yield from _as_batches(columns | _picture_places(batch, schema), schema)
        first += count


def _moved_rows(planned: pa.StructArray | pa.RecordBatch, first_rows: Mapping[str, int]) -> pa.Array:
    """Rows of the arrays, from rows counted from 0; -1 stays."""
    if not first_rows:
        return planned["row"]
    buckets = planned["bucket"].combine_chunks().dictionary_encode()
    moves = np.array([*(first_rows.get(name, 0) for name in buckets.dictionary.to_pylist()), 0])
    rows = planned["row"].to_numpy()
    return pa.array(np.where(rows >= 0, rows + moves[pc.fill_null(buckets.indices, -1).to_numpy()], rows))


def _picture_places(batch: pa.RecordBatch, schema: pa.Schema) -> dict[str, pa.Array]:
    """Places of the companion pictures of new records, by column; null where the listing has none."""
    names = _place_columns(schema)
    lengths = pc.list_value_length(batch["picture_paths"]).to_numpy()
    has_places, starts = lengths == len(names), np.cumsum(lengths) - lengths
    paths, numbers = batch["picture_paths"].flatten(), batch["picture_places"].flatten()
    found = {}
    for i, (path, *others) in enumerate(names):
        found[path] = paths.take(pa.array(starts + i, mask=~has_places))
        for j, name in enumerate(others):
            found[name] = numbers.take(pa.array(3 * (starts + i) + j, mask=~has_places))
    return found


def _place_columns(schema: pa.Schema) -> list[list[str]]:
    """The columns of each companion picture's place, in order."""
    prefix = f"{PLACES[0]}_"
    pictures = [name.removeprefix(prefix) for name in schema.names if name.startswith(prefix)]
    return [[f"{name}_{picture}" for name in PLACES] for picture in pictures]


def _carried_records(comparison: Comparison, caption_ids: pa.ChunkedArray, schema: pa.Schema) -> pa.Table:
    """Carried-over records with their present label, captions and place."""
    if not comparison.kept:
        return schema.empty_table()
    records = [kept.record for kept in comparison.kept]
    columns = {name: comparison.table[name] for name in comparison.table.column_names if name in schema.names}
    missing = set(schema.names) - columns.keys() - set(PLAN_SCHEMA.names)  # of features and pictures that are added
    columns |= {name: pa.nulls(len(records), schema.field(name).type) for name in missing}
    columns |= {
        "label": [record.label for record in records],
        "caption_ids": caption_ids,
        "source_path": [record.path for record in records],
        "source_offset": [record.offset for record in records],
        "source_bytes": [record.num_bytes for record in records],
        "source_mtime_ns": [record.mtime_ns for record in records],
    }
    nothing = (None,) * len(PLACES)
    for i, names in enumerate(_place_columns(schema)):
        places = [record.pictures[i] if i < len(record.pictures) else nothing for record in records]
        columns |= dict(zip(names, map(list, zip(*places, strict=True)), strict=True))
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _as_batches(columns: dict[str, Any], schema: pa.Schema) -> list[pa.RecordBatch]:
    arrays = {name: pa.chunked_array(v) if isinstance(v, pa.Array) else v for name, v in columns.items()}
    columns_in_order = [pa.table({field.name: arrays[field.name]}).column(0).cast(field.type) for field in schema]
    return pa.table(columns_in_order, schema=schema).combine_chunks().to_batches()
