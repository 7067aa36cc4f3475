"""The plan of a revision: every record's bucket, row, crop and captions, frozen before the first encode.

Tokens are counted and picture headers read here; pixels and weights are not. A record that cannot be planned is
rejected here, with its reason, and has no row. What an earlier revision holds and the source did not change is carried
over as it is (``growth.py`` finds it). All goes by in batches and what comes out is mapped, so the memory that a first
plan takes does not depend on the number of records. The captions are planned in ``caption_plan.py``.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..datasets.buckets import assign_bucket, bucket_name
from ..datasets.errors import RecordRejected
from ..datasets.mapped import BATCH_ROWS, map_table, rebatched
from ..datasets.schema import PLAN_SCHEMA, RECORDS_SCHEMA
from .config import ImagesSection, PrecomputeRecipe
from .decoder import Decoders
from .growth import Comparison
from .images import MAX_PIXELS, crop_geometry
from .rejects import RejectLimit
from .source_listing import Listing
from .source_record import encoded_texts
from .sources import Source

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

ASKED = 128  # pictures whose headers are read with one message to a decoder
ASKS_AHEAD = 4  # messages on their way for each thread
MAX_THREADS = 32
KNOWN_SIZES = 1 << 16  # whose bucket and crop are remembered
WHAT = "the plan"
PICTURES_SCHEMA = pa.schema(
    [
        PLAN_SCHEMA.field(name)
        for name in (
            *("bucket", "row", "height_px", "width_px", "resized_height_px", "resized_width_px"),
            *("crop_top_px", "crop_left_px", "status", "stage", "reason", "detail"),
        )
    ]
)

Size = tuple[int, int]


@dataclass(frozen=True)
class PlannedPicture:
    """Where one picture goes, or why it is rejected."""

    height_px: int | None = None
    width_px: int | None = None
    bucket: Size | None = None
    resized: Size | None = None
    crop_top_px: int | None = None
    crop_left_px: int | None = None
    reject: RecordRejected | None = None


def plan_pictures(
    source: Source,
    fresh: Listing,
    recipe: PrecomputeRecipe,
    decoders: Decoders,
    *,
    progress: Callable[[int], None],
) -> Iterator[PlannedPicture]:
    """Learn the size of every new picture and choose its bucket and crop.

    Args:
      progress: called with the number of pictures looked at so far.
    Returns: one for each new record, in order, as they are asked for.
    Raises: SourceError: too many are rejected.
    """
    limit, threads = RejectLimit(recipe.source, len(source.records)), num_threads()
    images, table = recipe.images, recipe.images.table
    place = functools.lru_cache(KNOWN_SIZES)(lambda height_px, width_px: place_picture(height_px, width_px, images))
    assert table, "a recipe has a bucket"
    ahead: deque[tuple[list[str], Future[list[Size | RecordRejected]]]] = deque()
    done = 0

    def planned() -> Iterator[PlannedPicture]:
        nonlocal done
        keys, asked = ahead.popleft()
        for key, found in zip(keys, asked.result(), strict=True):
            picture = _rejected(found) if isinstance(found, RecordRejected) else place(*found)
            limit.count(key, picture.reject)
            yield picture
        done += len(keys)
        progress(done)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="leandit-scan")
    try:
        for batch in fresh.batches():
            for start in range(0, batch.num_rows, ASKED):
                part = batch.slice(start, ASKED)
                ahead.append((part["key"].to_pylist(), pool.submit(_sizes, source, part, recipe, decoders)))
                if len(ahead) > ASKS_AHEAD * threads:
                    yield from planned()
        while ahead:
            yield from planned()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _sizes(
    source: Source, batch: pa.RecordBatch, recipe: PrecomputeRecipe, decoders: Decoders
) -> list[Size | RecordRejected]:
    """Size of each picture, or why it is not planned."""
    found: list[Size | RecordRejected | None] = _known_sizes(batch, recipe)
    asked = [i for i, known in enumerate(found) if known is None]
    columns = [batch[name].to_pylist() for name in ("path", "offset", "num_bytes")]
    places = [(columns[0][i], columns[1][i], columns[2][i]) for i in asked]
    answers: Iterable[Size | RecordRejected]
    if source.is_read_by_decoders:
        answers = decoders.sizes([source.place(*place, stage="scan") for place in places]) if places else []
    else:
        answers = (_sent_size(source, place, decoders) for place in places)
    for i, answer in zip(asked, answers, strict=True):
        found[i] = answer
    return [one for one in found if one is not None]


def _known_sizes(batch: pa.RecordBatch, recipe: PrecomputeRecipe) -> list[Size | RecordRejected | None]:
    """What the listing alone decides: rejects, and sizes where the recipe believes them; else None."""
    found: list[Size | RecordRejected | None] = [None] * batch.num_rows
    if recipe.source.sizes == "manifest":
        sizes = zip(batch["height_px"].to_pylist(), batch["width_px"].to_pylist(), strict=True)
        found = [size if size[0] else None for size in sizes]
    if recipe.text.kind != "none":
        for i, captions in enumerate(batch["captions"].to_pylist()):
            if not encoded_texts(captions):
                found[i] = RecordRejected("scan", "no_caption", "no caption, or only white space")
    if batch["reason"].null_count < batch.num_rows:
        problems = zip(batch["reason"].to_pylist(), batch["detail"].to_pylist(), strict=True)
        for i, (reason, detail) in enumerate(problems):
            if reason:
                found[i] = RecordRejected("scan", reason, detail)
    return found


def _sent_size(source: Source, place: tuple[str, int, int], decoders: Decoders) -> Size | RecordRejected:
    """Size of a picture whose bytes this process reads: one at a time, so that it never holds many."""
    try:
        return decoders.size(*source.place(*place, stage="scan"))
    except RecordRejected as reject:
        return reject


def place_picture(height_px: int, width_px: int, images: ImagesSection) -> PlannedPicture:
    """Choose the bucket and crop of a picture of some size; a reject is returned, not raised."""
    bucket = assign_bucket(height_px, width_px, images.table, max_ratio=images.max_ratio)
    if bucket is None:
        detail = f"{height_px}x{width_px} px is outside the bucket table"
        return PlannedPicture(reject=RecordRejected("scan", "aspect", detail))
    sizes, top, left = crop_geometry(height_px, width_px, bucket, images.crop)
    if sizes[-1][0] * sizes[-1][1] > MAX_PIXELS:
        detail = f"{height_px}x{width_px} px would be resized to {sizes[-1][0]}x{sizes[-1][1]} px before the crop"
        return PlannedPicture(reject=RecordRejected("scan", "aspect", detail))
    return PlannedPicture(height_px, width_px, bucket, sizes[-1], top, left)


def _rejected(reject: RecordRejected) -> PlannedPicture:
    return PlannedPicture(reject=RecordRejected("scan", reject.reason, reject.detail))


def picture_table(pictures: Iterable[PlannedPicture]) -> pa.Table:
    """Pictures as a mapped table, each with its row: rows of a bucket follow the order of the source.

    Returns: PICTURES_SCHEMA.
    """
    return map_table(PICTURES_SCHEMA, _picture_batches(iter(pictures)), WHAT)


def _picture_batches(pictures: Iterator[PlannedPicture]) -> Iterator[pa.RecordBatch]:
    next_row: dict[Size, int] = {}
    while some := list(islice(pictures, BATCH_ROWS)):
        rows = []
        for picture in some:
            row = next_row.get(picture.bucket, 0) if picture.bucket else -1
            if picture.bucket:
                next_row[picture.bucket] = row + 1
            rows.append(row)
        rejects = [picture.reject for picture in some]
        columns = {
            "bucket": [picture.bucket and bucket_name(*picture.bucket) for picture in some],
            "row": rows,
            "height_px": [picture.height_px for picture in some],
            "width_px": [picture.width_px for picture in some],
            "resized_height_px": [picture.resized and picture.resized[0] for picture in some],
            "resized_width_px": [picture.resized and picture.resized[1] for picture in some],
            "crop_top_px": [picture.crop_top_px for picture in some],
            "crop_left_px": [picture.crop_left_px for picture in some],
            "status": ["rejected" if reject else "planned" for reject in rejects],
            "stage": [reject and reject.stage for reject in rejects],
            "reason": [reject and reject.reason for reject in rejects],
            "detail": [reject and reject.detail for reject in rejects],
        }
        yield pa.RecordBatch.from_pydict(columns, PICTURES_SCHEMA)


@dataclass(frozen=True)
class PlannedTexts:
    """Captions of all records of a revision: those carried over, then the new ones; what is rejected has none.

    Args:
      pictures: of the new records (PICTURES_SCHEMA).
    """

    comparison: Comparison
    pictures: pa.Table

    def __iter__(self) -> Iterator[list[str]]:
        yield from self.comparison.texts
        first = 0
        for batch in self.comparison.fresh.batches():
            rows = self.pictures["row"].slice(first, batch.num_rows).to_numpy()
            for captions, row in zip(batch["captions"].to_pylist(), rows.tolist(), strict=True):
                yield encoded_texts(captions) if row >= 0 else []
            first += batch.num_rows


def plan_records(
    comparison: Comparison, pictures: pa.Table, caption_ids: pa.ChunkedArray, *, revision: int
) -> pa.Table:
    """Records table of a revision: what is carried over, then the new records with their rows.

    Args:
      pictures: of the new records (PICTURES_SCHEMA).
      caption_ids: of all records: those carried over, then the new ones.
    Returns: PLAN_SCHEMA, mapped.
    """
    num_kept = len(comparison.kept)
    kept = _carried_records(comparison, caption_ids.slice(0, num_kept)).to_batches()
    fresh = _fresh_batches(comparison, pictures, caption_ids.slice(num_kept), revision)
    return map_table(PLAN_SCHEMA, rebatched((batch for some in (kept, fresh) for batch in some), BATCH_ROWS), WHAT)


def _fresh_batches(
    comparison: Comparison, pictures: pa.Table, caption_ids: pa.ChunkedArray, revision: int
) -> Iterator[pa.RecordBatch]:
    first = 0
    for batch in comparison.fresh.batches():
        count = batch.num_rows
        planned = pictures.slice(first, count).combine_chunks()
        nothing = pa.nulls(count)
        columns = {
            **{name: planned[name] for name in PICTURES_SCHEMA.names},
            "key": batch["key"],
            "revision": np.full(count, revision, np.int32),
            "label": batch["label"],
            "caption_ids": caption_ids.slice(first, count),
            "attempts": [comparison.attempts.get(i, 1) for i in range(first, first + count)],
            **dict.fromkeys(("checksum", "source_checksum", "fallback"), nothing),
            "source_path": batch["path"],
            "source_offset": batch["offset"],
            "source_bytes": batch["num_bytes"],
            "source_mtime_ns": batch["mtime_ns"],
        }
        yield from _as_batches(columns)
        first += count


def _carried_records(comparison: Comparison, caption_ids: pa.ChunkedArray) -> pa.Table:
    """Records carried over, with the label, captions and place in the source that they have now."""
    if not comparison.kept:
        return PLAN_SCHEMA.empty_table()
    records = [kept.record for kept in comparison.kept]
    columns = {name: comparison.table[name] for name in RECORDS_SCHEMA.names}
    columns |= {
        "label": [record.label for record in records],
        "caption_ids": caption_ids,
        "source_path": [record.path for record in records],
        "source_offset": [record.offset for record in records],
        "source_bytes": [record.num_bytes for record in records],
        "source_mtime_ns": [record.mtime_ns for record in records],
    }
    return pa.table(columns, schema=PLAN_SCHEMA)


def _as_batches(columns: dict[str, Any]) -> list[pa.RecordBatch]:
    arrays = {name: pa.chunked_array(v) if isinstance(v, pa.Array) else v for name, v in columns.items()}
    wanted = [pa.table({field.name: arrays[field.name]}).column(0).cast(field.type) for field in PLAN_SCHEMA]
    return pa.table(wanted, schema=PLAN_SCHEMA).combine_chunks().to_batches()


def num_threads() -> int:
    """Threads for decoding: the cores of this process, at most MAX_THREADS."""
    return min(MAX_THREADS, num_cores())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
