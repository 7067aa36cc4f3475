"""The records table of a plan: every record's bucket, row, crop and captions, frozen before encoding starts.

It combines planned images (``images.py``), planned captions (``captions.py``) and records carried over from an earlier
revision (``compare.py``). Everything is processed in batches and mapped, so memory does not grow with the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...datasets.disk.spill import BATCH_ROWS, map_table, rebatched
from ...datasets.format.table_schemas import PLACES, PLAN_SCHEMA
from ..sources.listing.listing import Listing
from .compare import Comparison

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

WHAT = "the plan"
TEXTS = pa.list_(pa.string())


def planned_texts(comparison: Comparison, images: pa.Table) -> Iterator[pa.ListArray]:
    """Captions of all records of a revision, carried-over ones first; rejects have none.

    A planned record without a caption has the empty one, which is null.

    Args:
      images: of the new records (IMAGES_SCHEMA).
    """
    nothing, null = pa.scalar([], TEXTS), pa.scalar([""], TEXTS)
    for listing, table in ((comparison.kept, comparison.table), (comparison.fresh, images)):
        for batch, rows in _beside(listing, table.select(["row"])):
            texts = pc.if_else(pc.equal(pc.list_value_length(batch["captions"]), 0), null, batch["captions"])
            yield pc.if_else(pc.greater_equal(rows["row"], 0), texts, nothing)


def _beside(listing: Listing, table: pa.Table) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Batches of a listing with the same rows of a table."""
    first = 0
    for batch in listing.batches():
        (rows,) = table.slice(first, batch.num_rows).combine_chunks().to_batches()
        yield batch, rows
        first += batch.num_rows


def plan_records(
    comparison: Comparison,
    images: pa.Table,
    caption_ids: pa.ChunkedArray,
    *,
    revision: int,
    first_rows: Mapping[str, int] = {},
    schema: pa.Schema = PLAN_SCHEMA,
) -> pa.Table:
    """Build the records table of a plan.

    Args:
      images: of the new records (IMAGES_SCHEMA).
      caption_ids: of all records, carried-over ones first.
      first_rows: of the revision by bucket; 0 for those that it does not have.
      schema: of the plan; columns that no new record has yet are null.
    Returns: carried-over records in the order of the base, then new ones in source order; mapped.
    """
    num_kept, attempts = len(comparison.kept), comparison.attempts
    carried = comparison.table
    carried = carried.drop_columns(["caption_ids"]) if "caption_ids" in carried.column_names else carried
    carried = carried.append_column("caption_ids", caption_ids.slice(0, num_kept))
    fresh = images.append_column("caption_ids", caption_ids.slice(num_kept))
    fresh = fresh.append_column("attempts", pa.array(np.ones(len(fresh), np.int32) if attempts is None else attempts))

    def batches() -> Iterator[pa.RecordBatch]:
        for listed, rows in _beside(comparison.kept, carried):
            yield _record_batch(rows, listed, schema)
        revisions = pa.scalar(revision, pa.int32())
        for listed, rows in _beside(comparison.fresh, fresh):
            moved = {"row": _moved_rows(rows, first_rows), "revision": pa.repeat(revisions, rows.num_rows)}
            yield _record_batch(rows, listed, schema, moved)

    return map_table(schema, rebatched(batches(), BATCH_ROWS), WHAT)


def _record_batch(
    rows: pa.RecordBatch, listed: pa.RecordBatch, schema: pa.Schema, changed: Mapping[str, pa.Array] = {}
) -> pa.RecordBatch:
    """Records of a plan: their present label and place, and what is planned; columns that no record has are null."""
    columns = {name: rows[name] for name in rows.schema.names} | {name: listed[name] for name in ("key", "label")}
    columns |= dict(zip(PLACES, (listed[name] for name in ("path", "offset", "num_bytes", "mtime_ns")), strict=True))
    columns |= {**_companion_places(listed, schema), **changed}
    nulls = {field.name: pa.nulls(listed.num_rows, field.type) for field in schema if field.name not in columns}
    arrays = [(columns | nulls)[field.name].cast(field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _moved_rows(planned: pa.RecordBatch, first_rows: Mapping[str, int]) -> pa.Array:
    """Rows of the arrays, from rows counted from 0; -1 stays."""
    if not first_rows:
        return planned["row"]
    buckets = planned["bucket"].dictionary_encode()
    moves = np.array([*(first_rows.get(name, 0) for name in buckets.dictionary.to_pylist()), 0])
    rows = planned["row"].to_numpy()
    return pa.array(np.where(rows >= 0, rows + moves[pc.fill_null(buckets.indices, -1).to_numpy()], rows))


def _companion_places(batch: pa.RecordBatch, schema: pa.Schema) -> dict[str, pa.Array]:
    """Places of the companion images, by column; null where the listing has none."""
    prefix = f"{PLACES[0]}_"
    companions = [name.removeprefix(prefix) for name in schema.names if name.startswith(prefix)]
    lengths = pc.list_value_length(batch["companions"]).to_numpy()
    starts, places, columns = np.cumsum(lengths) - lengths, batch["companions"].flatten(), {}
    for i, companion in enumerate(companions):
        of_records = places.take(pa.array(starts + i, mask=lengths <= i)).flatten()
        columns |= {f"{name}_{companion}": values for name, values in zip(PLACES, of_records, strict=True)}
    return columns
