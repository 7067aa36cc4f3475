"""The size, bucket, row and crop of every picture of a revision, before any pixel is decoded.

Headers are read here, unless the recipe trusts a manifest. A picture that cannot be planned is rejected with a reason
and has no row. Pictures of equal size share one placement.
"""

from __future__ import annotations

import functools
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...datasets.disk.spill import BATCH_ROWS, map_table, rebatched
from ...datasets.errors import RecordRejected
from ...datasets.format.buckets import assign_bucket, bucket_name
from ...datasets.format.table_schemas import PLAN_SCHEMA
from ..config import ImagesSection, PrecomputeRecipe
from ..images.decoders import Decoders
from ..images.pixels import MAX_PIXELS, crop_geometry
from ..progress.rejects import RejectLedger, RejectLimit
from ..sources.files.record import NO_CAPTION
from ..sources.listing.listing import Listing
from ..sources.source import Source

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

ASKED = 128  # pictures whose headers are read with one message to a decoder
ASKS_AHEAD = 4  # messages in flight for each thread
MAX_THREADS = 32
KNOWN_SIZES = 1 << 16  # whose bucket and crop are remembered
PLANNED = BATCH_ROWS // ASKED  # answers that are put into one batch
WHAT = "the plan of the pictures"
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
    """Placement of a picture, or its reject."""

    height_px: int | None = None
    width_px: int | None = None
    bucket: Size | None = None
    resized: Size | None = None
    crop_top_px: int | None = None
    crop_left_px: int | None = None
    reject: RecordRejected | None = None


UNPLACED = PlannedPicture()  # of a rejected picture, until its reason is filled in


@dataclass(frozen=True)
class PlannedPictures:
    """Consecutive pictures; many share one placement.

    Args:
      placements: each once.
      placement_of: (N,) index in ``placements`` of each picture.
    """

    placements: list[PlannedPicture]
    placement_of: np.ndarray

    def __iter__(self) -> Iterator[PlannedPicture]:
        return (self.placements[placement] for placement in self.placement_of)


@dataclass
class FoundSizes:
    """Known sizes of pictures.

    Args:
      height_px, width_px: (N,) int64, 0 if unknown.
      rejects: by position.
    """

    height_px: np.ndarray
    width_px: np.ndarray
    rejects: dict[int, RecordRejected] = field(default_factory=dict)


def plan_pictures(
    source: Source,
    fresh: Listing,
    recipe: PrecomputeRecipe,
    decoders: Decoders,
    limit: RejectLimit | None = None,
    *,
    progress: Callable[[int], None],
) -> Iterator[PlannedPictures]:
    """Find the size of every new picture and choose its bucket and crop.

    Args:
      limit: counts the rejects of the revision; None if all of it is new.
      progress: called with the number of pictures planned so far.
    Returns: all new records, in order, lazily.
    Raises: SourceError: too many are rejected.
    """
    limit = limit or RejectLimit(recipe.source, RejectLedger(recipe.source, len(fresh), planning=True))
    check_listing(fresh, recipe, limit)  # before headers are read, so that the message has all counts
    threads = num_threads()
    images, table = recipe.images, recipe.images.table
    place = functools.lru_cache(KNOWN_SIZES)(lambda height_px, width_px: place_picture(height_px, width_px, images))
    assert table, "a recipe has a bucket"
    ahead: deque[tuple[pa.Array, Future[FoundSizes]]] = deque()
    done = 0

    def planned() -> PlannedPictures:
        nonlocal done
        keys, asked = ahead.popleft()
        pictures = _planned(asked.result(), place)
        is_reject = np.array([placement.reject is not None for placement in pictures.placements])[pictures.placement_of]
        rejects = {int(i): pictures.placements[pictures.placement_of[i]].reject for i in np.flatnonzero(is_reject)}
        limit.count_some(keys, rejects)
        done += len(keys)
        progress(done)
        return pictures

    pool = ThreadPoolExecutor(threads, thread_name_prefix="leandit-scan")
    try:
        for batch in fresh.batches():
            for start in range(0, batch.num_rows, ASKED):
                part = batch.slice(start, ASKED)
                ahead.append((part["key"], pool.submit(_find_sizes, source, part, recipe, decoders)))
                if len(ahead) > ASKS_AHEAD * threads:
                    yield planned()
        while ahead:
            yield planned()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def check_listing(fresh: Listing, recipe: PrecomputeRecipe, limit: RejectLimit) -> None:
    """Check the rejects of the listing alone, without changing the limit's counts.

    Raises: SourceError: too many.
    """
    if limit.ledger:
        ledger, first = limit.ledger.copy(), ""
        for batch in fresh.batches():
            rejects = listing_rejects(batch, recipe)
            ledger.add(Counter(reject.reason for reject in rejects.values()))
            if rejects and not first:
                i, reject = next(iter(rejects.items()))
                first = f"The first is '{batch['key'][i].as_py()}': {reject}."
        limit.refuse(ledger.refusal(first))


def _planned(sizes_found: FoundSizes, place: Callable[[int, int], PlannedPicture]) -> PlannedPictures:
    _, first, placement_of = np.unique(
        sizes_found.height_px << 32 | sizes_found.width_px, return_index=True, return_inverse=True
    )
    sizes = zip(sizes_found.height_px[first].tolist(), sizes_found.width_px[first].tolist(), strict=True)
    placements = [place(height_px, width_px) if height_px else UNPLACED for height_px, width_px in sizes]
    for i, reject in sizes_found.rejects.items():
        placement_of[i] = len(placements)
        placements.append(PlannedPicture(reject=RecordRejected("scan", reject.reason, reject.detail)))
    return PlannedPictures(placements, placement_of)


def _find_sizes(source: Source, batch: pa.RecordBatch, recipe: PrecomputeRecipe, decoders: Decoders) -> FoundSizes:
    found = _known_sizes(batch, recipe)
    asked = [i for i in np.flatnonzero(found.height_px == 0).tolist() if i not in found.rejects]
    columns = [batch[name].take(pa.array(asked, pa.int64())).to_pylist() for name in ("path", "offset", "num_bytes")]
    places = list(zip(*columns, strict=True))
    answers: Iterable[Size | RecordRejected]
    if source.is_read_by_decoders:
        listed = [source.place(*place, stage="scan") for place in places]
        answers = decoders.sizes(listed, exif_orientation=recipe.images.exif_orientation) if places else []
    else:
        answers = (_sent_size(source, place, decoders, recipe.images) for place in places)
    for i, answer in zip(asked, answers, strict=True):
        if isinstance(answer, RecordRejected):
            found.rejects[i] = answer
        else:
            found.height_px[i], found.width_px[i] = answer
    return found


def _known_sizes(batch: pa.RecordBatch, recipe: PrecomputeRecipe) -> FoundSizes:
    """Rejects, and trusted sizes, from the listing alone."""
    sizes = np.zeros((2, batch.num_rows), np.int64)
    if recipe.source.sizes == "manifest":
        sizes[:] = batch["height_px"].to_numpy(), batch["width_px"].to_numpy()
    return FoundSizes(sizes[0], sizes[1], listing_rejects(batch, recipe))


def listing_rejects(batch: pa.RecordBatch, recipe: PrecomputeRecipe) -> dict[int, RecordRejected]:
    """Rejects of a batch of the listing, by position; as ``listing_problem``."""
    rejects = {}
    if recipe.needs_captions:
        for i in np.flatnonzero(pc.list_value_length(batch["captions"]).to_numpy() == 0).tolist():
            rejects[i] = RecordRejected("scan", *NO_CAPTION)
    for i in np.flatnonzero(batch["reason"].is_valid().to_numpy(zero_copy_only=False)).tolist():
        rejects[i] = RecordRejected("scan", batch["reason"][i].as_py(), batch["detail"][i].as_py())
    return rejects


def _sent_size(
    source: Source, place: tuple[str, int, int], decoders: Decoders, images: ImagesSection
) -> Size | RecordRejected:
    """Size of a picture whose bytes this process reads, one at a time to bound memory."""
    try:
        return decoders.size(*source.place(*place, stage="scan"), exif_orientation=images.exif_orientation)
    except RecordRejected as reject:
        return reject


def place_picture(height_px: int, width_px: int, images: ImagesSection) -> PlannedPicture:
    """Choose the bucket and crop for a picture size; rejects are returned."""
    if min(height_px, width_px) < images.min_px:
        detail = f"{height_px}x{width_px} px, images.min_px = {images.min_px}"
        return PlannedPicture(reject=RecordRejected("scan", "too_small", detail))
    bucket = assign_bucket(height_px, width_px, images.table, max_ratio=images.max_ratio)
    if bucket is None:
        detail = f"{height_px}x{width_px} px is outside the bucket table"
        return PlannedPicture(reject=RecordRejected("scan", "aspect", detail))
    sizes, top, left = crop_geometry(height_px, width_px, bucket, images.crop)
    if sizes[-1][0] * sizes[-1][1] > MAX_PIXELS:
        detail = f"{height_px}x{width_px} px would be resized to {sizes[-1][0]}x{sizes[-1][1]} px before the crop"
        return PlannedPicture(reject=RecordRejected("scan", "aspect", detail))
    return PlannedPicture(height_px, width_px, bucket, sizes[-1], top, left)


def picture_table(pictures: Iterable[PlannedPictures]) -> pa.Table:
    """Pictures as a mapped table, with rows numbered within each bucket in source order.

    Returns: PICTURES_SCHEMA.
    """
    return map_table(PICTURES_SCHEMA, rebatched(_picture_batches(iter(pictures)), BATCH_ROWS), WHAT)


def _picture_batches(pictures: Iterator[PlannedPictures]) -> Iterator[pa.RecordBatch]:
    next_row: dict[Size | None, int] = {}
    while some := list(islice(pictures, PLANNED)):
        starts = np.cumsum([0, *(len(one.placements) for one in some)])
        placements = [placement for one in some for placement in one.placements]
        placement_of = np.concatenate([one.placement_of + start for one, start in zip(some, starts, strict=False)])
        distinct = pa.RecordBatch.from_pydict(_columns_of(placements), PICTURES_SCHEMA)
        batch = distinct.take(pa.array(placement_of))
        row = PICTURES_SCHEMA.get_field_index("row")
        yield batch.set_column(
            row, PICTURES_SCHEMA.field(row), pa.array(_next_rows(placements, placement_of, next_row))
        )


def _columns_of(placements: Sequence[PlannedPicture]) -> dict[str, Any]:
    rejects = [placement.reject for placement in placements]
    return {
        "bucket": [placement.bucket and bucket_name(*placement.bucket) for placement in placements],
        "row": [-1] * len(placements),
        "height_px": [placement.height_px for placement in placements],
        "width_px": [placement.width_px for placement in placements],
        "resized_height_px": [placement.resized and placement.resized[0] for placement in placements],
        "resized_width_px": [placement.resized and placement.resized[1] for placement in placements],
        "crop_top_px": [placement.crop_top_px for placement in placements],
        "crop_left_px": [placement.crop_left_px for placement in placements],
        "status": ["rejected" if reject else "planned" for reject in rejects],
        "stage": [reject and reject.stage for reject in rejects],
        "reason": [reject and reject.reason for reject in rejects],
        "detail": [reject and reject.detail for reject in rejects],
    }


def _next_rows(
    placements: Sequence[PlannedPicture], placement_of: np.ndarray, next_row: dict[Size | None, int]
) -> np.ndarray:
    """(N,) row of each picture in its bucket, -1 without one; advances ``next_row``."""
    buckets = list(dict.fromkeys(placement.bucket for placement in placements))
    number = {bucket: i for i, bucket in enumerate(buckets)}
    bucket_of = np.array([number[placement.bucket] for placement in placements])[placement_of]
    rows = np.full(len(placement_of), -1, np.int64)
    for i, bucket in enumerate(buckets):
        if bucket:
            positions = np.flatnonzero(bucket_of == i)
            start = next_row.get(bucket, 0)
            rows[positions] = np.arange(start, start + len(positions))
            next_row[bucket] = start + len(positions)
    return rows


def num_threads() -> int:
    """Threads for decoding: the cores of this process, at most MAX_THREADS."""
    return min(MAX_THREADS, num_cores())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
