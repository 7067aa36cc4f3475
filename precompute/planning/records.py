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
from ..sources.listing.listing import SCHEMA
from .compare import Comparison, listed_places

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

WHAT = "the plan"
TEXTS = pa.list_(pa.string())


def planned_texts(comparison: Comparison, images: pa.Table) -> Iterator[pa.ListArray]:
    """Captions whose ids are to be found, of all records of a revision, carried-over ones first.

    Rejects have none, and records whose captions stay. A planned record without a caption has the empty one, the null
    caption.

    Args:
      images: of the new records (IMAGES_SCHEMA).
    """
    nothing, null = pa.scalar([], TEXTS), pa.scalar([""], TEXTS)
    for table in (comparison.carried, _fresh(comparison, images)):
        for batch in table.select(["row", "captions"]).to_batches():
            captions = batch["captions"]
            texts = pc.if_else(pc.equal(pc.list_value_length(captions), 0), null, captions)
            yield pc.if_else(pc.and_(pc.greater_equal(batch["row"], 0), captions.is_valid()), texts, nothing)


def _fresh(comparison: Comparison, images: pa.Table) -> pa.Table:
    """New records: columns of the listing, and those of their images, which replace the listing's."""
    listed = pa.Table.from_batches(list(comparison.fresh.batches()), SCHEMA)
    return pa.table(
        {name: listed[name] for name in SCHEMA.names} | {name: images[name] for name in images.column_names}
    )


def plan_records(
    comparison: Comparison,
    images: pa.Table,
    caption_ids: pa.ChunkedArray,
    *,
    revision: int,
    schema: pa.Schema = PLAN_SCHEMA,
) -> pa.Table:
    """Build the records table of a plan.

    Args:
      images: of the new records (IMAGES_SCHEMA).
      caption_ids: of the texts of ``planned_texts``.
      schema: of the plan; columns that no new record has yet are null.
    Returns: carried-over records in the order of the base, then new ones in source order; mapped.
    """
    carried, attempts = comparison.carried, comparison.attempts
    fresh = _fresh(comparison, images)
    prefix = f"{PLACES[0]}_"
    companions = [name.removeprefix(prefix) for name in schema.names if name.startswith(prefix)]
    revisions = pa.array(np.full(fresh.num_rows, revision, np.int32))
    attempts = pa.array(np.ones(fresh.num_rows, np.int32) if attempts is None else attempts)

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in carried.append_column("looked_up", caption_ids.slice(0, carried.num_rows)).to_batches():
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            ids = pc.if_else(batch["captions"].is_valid(), batch["looked_up"], batch["caption_ids"])
            yield _record_batch(columns | {"caption_ids": ids}, schema)
        new = fresh.append_column("caption_ids", caption_ids.slice(carried.num_rows))
        for batch in new.append_column("revision", revisions).append_column("attempts", attempts).to_batches():
            columns = dict(zip(batch.schema.names, batch.columns, strict=True)) | listed_places(batch, companions)
            yield _record_batch(columns, schema)

    return map_table(schema, rebatched(batches(), BATCH_ROWS), WHAT)


def _record_batch(columns: Mapping[str, pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """Records of a plan; columns that are missing are null."""
    length = len(columns["key"])
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else pa.nulls(length, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
