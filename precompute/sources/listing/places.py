"""Where the images of records are: places of a listing as columns of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ....datasets.disk.spill import BATCH_ROWS, map_array, map_table
from ....datasets.format.table_schemas import PLACES, PLAN_SCHEMA
from ....datasets.revisions.plan import FrozenPlan
from .duck import database, numbered
from .listing import PLACE_NAMES, SCHEMA, Listing

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

WHAT = "the places of images"


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
