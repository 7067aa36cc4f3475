"""The plan of a store whose shards are written: its tables, from the journal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ..disk.spill import map_table
from ..format.buckets import bucket_size
from ..format.schema import StoreSpec
from ..format.table_schemas import PLACES, captions_schema, plan_schema, suffixes
from ..revisions.plan import FrozenPlan
from .journal import AddedCaption, AddedRecord, Journal

REVISION = 1
LISTING = "create_store"  # stands for the hash of a source's listing


def plan_of(spec: StoreSpec, journal: Journal, shard_rows: Mapping[str, int]) -> FrozenPlan:
    """The plan of what was added, with its tables in mapped temporary files.

    Args:
      spec: the whole one.
      shard_rows: as ``RevisionLayout.shard_rows``.
    """
    return FrozenPlan(
        spec=spec,
        revision=REVISION,
        base="",
        copies=False,
        listing=LISTING,
        records=map_table(plan_schema(spec), _record_batches(spec, journal), "records of the store"),
        captions=map_table(captions_schema(spec), _caption_batches(spec, journal), "captions of the store"),
        shard_rows=shard_rows,
    )


def _record_batches(spec: StoreSpec, journal: Journal) -> Iterator[pa.RecordBatch]:
    for records in journal.record_batches():
        yield _batch(plan_schema(spec), len(records), _record_columns(records))


def _record_columns(records: Sequence[AddedRecord]) -> dict[str, Any]:
    """Columns of the records table of a plan; all others are null."""
    count = len(records)
    buckets = [record.bucket for record in records]
    sizes = [bucket_size(bucket) if bucket else (None, None) for bucket in buckets]
    crops = [0 if bucket else None for bucket in buckets]
    ids = np.frombuffer(b"".join(record.caption_ids for record in records), "<i4")
    ends = np.cumsum([0, *(len(record.caption_ids) // 4 for record in records)])
    columns: dict[str, Any] = {
        "key": [record.key for record in records],
        "revision": [REVISION] * count,
        "bucket": buckets,
        "row": [record.row for record in records],
        "label": [record.label for record in records],
        "caption_ids": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(ids, pa.int32())),
        "height_px": [record.height_px for record in records],
        "width_px": [record.width_px for record in records],
        "resized_height_px": [height_px for height_px, _ in sizes],
        "resized_width_px": [width_px for _, width_px in sizes],
        "crop_top_px": crops,
        "crop_left_px": crops,
        "status": ["planned" if bucket else "rejected" for bucket in buckets],
        "stage": [record.stage for record in records],
        "reason": [record.reason for record in records],
        "detail": [record.detail for record in records],
        "attempts": [1] * count,
    }
    path, *numbers = PLACES
    columns[path] = [""] * count
    for name in numbers:
        columns[name] = [0] * count
    return columns


def _caption_batches(spec: StoreSpec, journal: Journal) -> Iterator[pa.RecordBatch]:
    for captions in journal.caption_batches():
        yield _batch(captions_schema(spec), len(captions), _caption_columns(spec, captions))


def _caption_columns(spec: StoreSpec, captions: Sequence[AddedCaption]) -> dict[str, Any]:
    """Columns of the captions table of a plan; all others are null."""
    count = len(captions)
    columns: dict[str, Any] = {"text": [caption.text for caption in captions], "revision": [REVISION] * count}
    lengths = np.frombuffer(b"".join(caption.num_tokens for caption in captions), "<i4").reshape(count, -1)
    for number, suffix in enumerate(suffixes(spec).values()):
        columns[f"num_tokens{suffix}"] = lengths[:, number]
        columns[f"truncated{suffix}"] = [False] * count
    return columns


def _batch(schema: pa.Schema, count: int, columns: Mapping[str, Any]) -> pa.RecordBatch:
    """Rows of a table; a column that is not given is null."""
    arrays = []
    for column in schema:
        if column.name not in columns:
            arrays.append(pa.nulls(count, column.type))
        elif isinstance(columns[column.name], pa.Array):
            arrays.append(columns[column.name])
        else:
            arrays.append(pa.array(columns[column.name], column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
