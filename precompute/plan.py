"""The plan: every record's bucket, row, crop and captions, frozen before the first encode.

Tokens are counted and picture headers read here; pixels and weights are not. A record that cannot be planned is
rejected here, with its reason, and has no row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from ..datasets.buckets import assign_bucket, bucket_name, bucket_table
from ..datasets.errors import RecordRejected
from ..datasets.schema import RECORDS_SCHEMA
from .config import PrecomputeRecipe
from .encoders import CaptionTokenizer
from .images import MAX_PIXELS, crop_geometry, read_size
from .sources import Source, SourceRecord, read_record

PLAN_SCHEMA = pa.schema(
    [
        *(field for field in RECORDS_SCHEMA if field.name != "checksum"),
        ("source_path", pa.string()),
        ("source_offset", pa.int64()),
        ("source_bytes", pa.int64()),
        ("source_mtime_ns", pa.int64()),
    ]
)
TOKENIZE_BATCH = 4096


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
    source: Source, recipe: PrecomputeRecipe, *, num_threads: int, progress: Callable[[int], None]
) -> list[PlannedPicture]:
    """Read the header of every picture and choose its bucket and crop.

    Args:
      progress: called with the number of pictures looked at so far.
    Returns: one for each record of the source, in order.
    """
    planned = []
    with ThreadPoolExecutor(num_threads, thread_name_prefix="leandit-scan") as pool:
        for done, picture in enumerate(
            pool.map(lambda record: plan_picture(source, record, recipe), source.records), 1
        ):
            planned.append(picture)
            progress(done)
    return planned


def plan_picture(source: Source, record: SourceRecord, recipe: PrecomputeRecipe) -> PlannedPicture:
    """Choose the bucket and crop of one picture; a reject is returned, not raised."""
    try:
        if record.problem:
            raise RecordRejected("scan", *record.problem)
        if recipe.text.kind != "none" and not any(caption.strip() for caption in record.captions):
            raise RecordRejected("scan", "no_caption", "no caption, or only white space")
        height_px, width_px = read_size(read_record(source.root, record.path, record.offset, record.num_bytes))
        bucket = assign_bucket(height_px, width_px, bucket_table(recipe.images.buckets, recipe.images.resolution))
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
    source: Source, pictures: Sequence[PlannedPicture], tokenizer: CaptionTokenizer | None, max_tokens: int
) -> tuple[pa.Table, list[list[int]]]:
    """Deduplicate the captions of all planned records and sort them by length, so that equal lengths lie together.

    Returns: the captions table (text, num_tokens, truncated), and the caption ids of each record.
    """
    first_seen: dict[str, int] = {}
    of_record: list[list[int]] = []
    for record, picture in zip(source.records, pictures, strict=True):
        texts = [text.strip() for text in record.captions] if tokenizer and not picture.reject else []
        unique = dict.fromkeys(text for text in texts if text)
        of_record.append([first_seen.setdefault(text, len(first_seen)) for text in unique])
    texts = list(first_seen)
    counts = []
    for start in range(0, len(texts) if tokenizer else 0, TOKENIZE_BATCH):
        assert tokenizer is not None
        counts += tokenizer.count(texts[start : start + TOKENIZE_BATCH])
    lengths = [min(count, max_tokens) for count in counts]
    order = sorted(range(len(texts)), key=lambda i: (lengths[i], i))
    rank = {old: new for new, old in enumerate(order)}
    table = pa.table(
        {
            "text": pa.array([texts[i] for i in order], pa.string()),
            "num_tokens": pa.array([lengths[i] for i in order], pa.int32()),
            "truncated": pa.array([counts[i] > max_tokens for i in order], pa.bool_()),
        }
    )
    return table, [[rank[i] for i in ids] for ids in of_record]


def plan_records(source: Source, pictures: Sequence[PlannedPicture], caption_ids: Sequence[Sequence[int]]) -> pa.Table:
    """Give every planned record its row; rows of a bucket follow the order of the source."""
    next_row: dict[tuple[int, int], int] = {}
    rows = []
    for record, picture, captions in zip(source.records, pictures, caption_ids, strict=True):
        reject, bucket = picture.reject, picture.bucket
        row = -1
        if bucket:
            row = next_row.get(bucket, 0)
            next_row[bucket] = row + 1
        rows.append(
            {
                "key": record.key,
                "bucket": bucket_name(*bucket) if bucket else None,
                "row": row,
                "label": record.label,
                "caption_ids": captions,
                "height_px": picture.height_px,
                "width_px": picture.width_px,
                "resized_height_px": picture.resized and picture.resized[0],
                "resized_width_px": picture.resized and picture.resized[1],
                "crop_top_px": picture.crop_top_px,
                "crop_left_px": picture.crop_left_px,
                "status": "rejected" if reject else "planned",
                "stage": reject and reject.stage,
                "reason": reject and reject.reason,
                "detail": reject and reject.detail,
                "source_path": record.path,
                "source_offset": record.offset,
                "source_bytes": record.num_bytes,
                "source_mtime_ns": record.mtime_ns,
            }
        )
    return pa.Table.from_pylist(rows, schema=PLAN_SCHEMA)


def num_threads() -> int:
    """Threads for decoding: the cores of this process, at most 32."""
    return min(32, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
