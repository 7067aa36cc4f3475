"""The plan of a revision: every record's bucket, row, crop and captions, frozen before the first encode.

Tokens are counted and picture headers read here; pixels and weights are not. A record that cannot be planned is
rejected here, with its reason, and has no row. What an earlier revision holds and the source did not change is carried
over as it is (``growth.py`` finds it).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ..datasets.buckets import assign_bucket, bucket_name
from ..datasets.errors import RecordRejected
from ..datasets.schema import CAPTION_RESULTS, CAPTIONS_SCHEMA, PLAN_SCHEMA, RECORDS_SCHEMA
from .config import PrecomputeRecipe
from .decoder import Decoders
from .growth import Comparison, Fresh
from .images import MAX_PIXELS, crop_geometry
from .rejects import RejectLimit
from .source_record import SourceRecord, caption_texts
from .sources import Source
from .text_encoders import CaptionTokenizer

TOKENIZE_BATCH = 4096
MAX_THREADS = 32


@dataclass(frozen=True)
class PlannedPicture:
    """Where one picture goes, or why it is rejected."""

    height_px: int | None = None
    width_px: int | None = None
    bucket: tuple[int, int] | None = None
    resized: tuple[int, int] | None = None
    crop_top_px: int | None = None
    crop_left_px: int | None = None
    reject: RecordRejected | None = None


def plan_pictures(
    source: Source,
    fresh: Sequence[Fresh],
    recipe: PrecomputeRecipe,
    decoders: Decoders,
    *,
    progress: Callable[[int], None],
) -> list[PlannedPicture]:
    """Read the header of every new picture and choose its bucket and crop.

    Args:
      progress: called with the number of pictures looked at so far.
    Returns: one for each new record, in order.
    Raises: SourceError: too many are rejected.
    """
    planned, limit = [], RejectLimit(recipe.source, len(source.records))
    pool = ThreadPoolExecutor(num_threads(), thread_name_prefix="leandit-scan")
    try:
        pictures = pool.map(lambda one: plan_picture(source, one.record, recipe, decoders), fresh)
        for done, (one, picture) in enumerate(zip(fresh, pictures, strict=True), 1):
            limit.count(one.record.key, picture.reject)
            planned.append(picture)
            progress(done)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return planned


def plan_picture(source: Source, record: SourceRecord, recipe: PrecomputeRecipe, decoders: Decoders) -> PlannedPicture:
    """Choose the bucket and crop of one picture; a reject is returned, not raised."""
    try:
        if record.problem:
            raise RecordRejected("scan", *record.problem)
        if recipe.text.kind != "none" and not caption_texts(record):
            raise RecordRejected("scan", "no_caption", "no caption, or only white space")
        height_px, width_px = decoders.size(*source.place(record.path, record.offset, record.num_bytes, stage="scan"))
        bucket = assign_bucket(height_px, width_px, recipe.images.table, max_ratio=recipe.images.max_ratio)
        if bucket is None:
            raise RecordRejected("scan", "aspect", f"{height_px}x{width_px} px is outside the bucket table")
    except RecordRejected as reject:
        return PlannedPicture(reject=RecordRejected("scan", reject.reason, reject.detail))
    sizes, top, left = crop_geometry(height_px, width_px, bucket, recipe.images.crop)
    if sizes[-1][0] * sizes[-1][1] > MAX_PIXELS:
        detail = f"{height_px}x{width_px} px would be resized to {sizes[-1][0]}x{sizes[-1][1]} px before the crop"
        return PlannedPicture(reject=RecordRejected("scan", "aspect", detail))
    return PlannedPicture(height_px, width_px, bucket, sizes[-1], top, left)


def plan_captions(
    texts_of_records: Sequence[Sequence[str]],
    tokenizer: CaptionTokenizer | None,
    max_tokens: int,
    *,
    revision: int = 1,
    known: pa.Table | None = None,
) -> tuple[pa.Table, list[list[int]]]:
    """Deduplicate captions and sort the new ones by length, so that equal lengths lie together.

    Args:
      texts_of_records: captions of each record.
      revision: that encodes the new ones.
      known: captions table of the revision before; its captions keep their ids.
    Returns: the captions table (CAPTIONS_SCHEMA), known ones first, and the caption ids of each record.
    """
    before = known if known is not None else CAPTIONS_SCHEMA.empty_table()
    if tokenizer is None:
        return before, [[] for _ in texts_of_records]
    known_ids = {text: i for i, text in enumerate(before["text"].to_pylist())}
    texts = list(dict.fromkeys(text for texts in texts_of_records for text in texts if text not in known_ids))
    counts = []
    for start in range(0, len(texts), TOKENIZE_BATCH):
        counts += tokenizer.count(texts[start : start + TOKENIZE_BATCH])
    lengths = [min(count, max_tokens) for count in counts]
    order = sorted(range(len(texts)), key=lambda i: (lengths[i], i))
    new = {
        "text": [texts[i] for i in order],
        "revision": [revision] * len(texts),
        "num_tokens": [lengths[i] for i in order],
        "truncated": [counts[i] > max_tokens for i in order],
        **dict.fromkeys(CAPTION_RESULTS, [None] * len(texts)),
    }
    ids = known_ids | {text: before.num_rows + i for i, text in enumerate(new["text"])}
    table = pa.concat_tables([before, pa.table(new, schema=CAPTIONS_SCHEMA)])
    return table, [[ids[text] for text in texts] for texts in texts_of_records]


def plan_records(
    comparison: Comparison, pictures: Sequence[PlannedPicture], caption_ids: Sequence[Sequence[int]], *, revision: int
) -> pa.Table:
    """Records table of a revision: what is carried over, then the new records with their rows.

    Args:
      pictures: of the new records.
      caption_ids: of all records: those carried over, then the new ones.
    Returns: PLAN_SCHEMA; rows of a bucket follow the order of the source.
    """
    num_kept = len(comparison.kept)
    kept = _carried_records(comparison, caption_ids[:num_kept])
    next_row: dict[tuple[int, int], int] = {}
    rows = np.full(len(pictures), -1, np.int64)
    for i, picture in enumerate(pictures):
        if picture.bucket:
            rows[i] = next_row.get(picture.bucket, 0)
            next_row[picture.bucket] = int(rows[i]) + 1
    records = [fresh.record for fresh in comparison.fresh]
    rejects = [picture.reject for picture in pictures]
    columns = {
        "key": [record.key for record in records],
        "revision": [revision] * len(records),
        "bucket": [picture.bucket and bucket_name(*picture.bucket) for picture in pictures],
        "row": rows,
        "label": [record.label for record in records],
        "caption_ids": list(caption_ids[num_kept:]),
        "height_px": [picture.height_px for picture in pictures],
        "width_px": [picture.width_px for picture in pictures],
        "resized_height_px": [picture.resized and picture.resized[0] for picture in pictures],
        "resized_width_px": [picture.resized and picture.resized[1] for picture in pictures],
        "crop_top_px": [picture.crop_top_px for picture in pictures],
        "crop_left_px": [picture.crop_left_px for picture in pictures],
        "status": ["rejected" if reject else "planned" for reject in rejects],
        "stage": [reject and reject.stage for reject in rejects],
        "reason": [reject and reject.reason for reject in rejects],
        "detail": [reject and reject.detail for reject in rejects],
        "attempts": [fresh.attempts for fresh in comparison.fresh],
        "checksum": pa.nulls(len(records), pa.uint64()),
        "source_checksum": pa.nulls(len(records), pa.uint64()),
        "fallback": pa.nulls(len(records), pa.string()),
        **_source_columns(records),
    }
    return pa.concat_tables([kept, pa.table(columns, schema=PLAN_SCHEMA)]).combine_chunks()


def _carried_records(comparison: Comparison, caption_ids: Sequence[Sequence[int]]) -> pa.Table:
    """Records carried over, with the label, captions and place in the source that they have now."""
    if not comparison.kept:
        return PLAN_SCHEMA.empty_table()
    records = [kept.record for kept in comparison.kept]
    columns = {name: comparison.table[name] for name in RECORDS_SCHEMA.names}
    columns |= {"label": [record.label for record in records], "caption_ids": list(caption_ids)}
    return pa.table(columns | _source_columns(records), schema=PLAN_SCHEMA)


def _source_columns(records: Sequence[SourceRecord]) -> dict[str, list]:
    return {
        "source_path": [record.path for record in records],
        "source_offset": [record.offset for record in records],
        "source_bytes": [record.num_bytes for record in records],
        "source_mtime_ns": [record.mtime_ns for record in records],
    }


def num_threads() -> int:
    """Threads for decoding: the cores of this process, at most MAX_THREADS."""
    return min(MAX_THREADS, num_cores())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
