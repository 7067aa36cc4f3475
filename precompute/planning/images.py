"""The size, bucket, row and crop of every image of a revision, before any pixel is decoded.

Headers are read here, unless the recipe trusts a manifest or nothing depends on them (``reads_headers``). An image that
cannot be planned is rejected with a reason and has no row. Each size is placed once.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...datasets.disk.spill import BATCH_ROWS, map_table, rebatched
from ...datasets.format.buckets import bucket_name, centre_crop
from ...datasets.format.table_schemas import PLACEMENT, PLAN_SCHEMA
from ...errors import RecordRejected
from ..config import ImagesSection, PrecomputeRecipe
from ..images.bucket_tables import assign_bucket
from ..images.decoders import Decoders
from ..images.pixels import resize_problem
from ..run.rejects import RejectLimits
from ..run.tasks import FETCHES
from ..sources.files.record import NO_CAPTION
from ..sources.listing.listing import Listing
from ..sources.source import Source

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

ASKED = 128  # images whose headers are read with one message to a decoder
FETCHED = 4  # images whose headers a thread of this process fetches, one after the other
ASKS_AHEAD = 4  # messages in flight for each thread
MAX_THREADS = 32
DECODERS = "LEANDIT_DECODERS"  # environment variable of a process that shares its cores with others
KNOWN_SIZES = 1 << 16  # whose placement is kept
WHAT = "the plan of the images"
REJECT = "stage", "reason", "detail"
REJECTED_ROW = {"row": -1, "status": "rejected", "stage": "scan"}
IMAGES_SCHEMA = pa.schema([PLAN_SCHEMA.field(name) for name in ("bucket", "row", *PLACEMENT, "status", *REJECT)])

Size = tuple[int, int]
"""Height and width in pixels; (0, 0) if unknown."""


def reads_headers(source: Source, images: ImagesSection) -> bool:
    """Whether sizes are found while planning. Otherwise every image has one place, whatever its size, and headers would
    be read from a URL or a row of a Parquet file: the size is that of the decoded image.
    """
    return source.is_read_by_decoders or len(images.table) > 1 or images.min_px > 1


def plan_images(
    source: Source,
    fresh: Listing,
    recipe: PrecomputeRecipe,
    decoders: Decoders,
    limits: RejectLimits,
    *,
    first_rows: Mapping[str, int] = {},
    progress: Callable[[int], None] = lambda done: None,
    stops: bool = True,
) -> pa.Table:
    """Find the size of every new image, and choose its bucket, its crop, and its row in source order.

    Args:
      limits: count the rejects of the revision.
      first_rows: of the revision by bucket; 0 for those that it does not have.
      progress: called with the number of images planned so far.
      stops: raise if too many are rejected; otherwise ``limits.problem`` has the error.
    Returns: all new records, in order (IMAGES_SCHEMA), mapped.
    Raises: SourceError: too many are rejected.
    """
    check_listing(fresh, recipe, limits, stops=stops)  # before headers are read, so that the message has all counts
    place = lru_cache(KNOWN_SIZES)(partial(place_image, images=recipe.images))

    def planned() -> Iterator[pa.RecordBatch]:
        next_rows, done = Counter(first_rows), 0
        for listed, sizes in _sizes(source, fresh, recipe, decoders):
            rows, rejects = list[dict[str, Any]](), list[tuple[int, str, RecordRejected]]()
            for position, size in enumerate(sizes):
                placed = size if isinstance(size, RecordRejected) else place(*size)
                if isinstance(placed, RecordRejected):
                    rejects.append((position, listed["key"][position].as_py(), placed))
                    rows.append(REJECTED_ROW | {"reason": placed.reason, "detail": placed.detail})
                else:
                    rows.append(placed | {"row": next_rows[placed["bucket"]]})
                    next_rows[placed["bucket"]] += 1
            limits.count(len(rows), rejects)
            if stops:
                limits.check()
            done += len(rows)
            progress(done)
            yield pa.RecordBatch.from_pylist(rows, IMAGES_SCHEMA)

    return map_table(IMAGES_SCHEMA, rebatched(planned(), BATCH_ROWS), WHAT)


def _sizes(
    source: Source, fresh: Listing, recipe: PrecomputeRecipe, decoders: Decoders
) -> Iterator[tuple[pa.RecordBatch, list[Size | RecordRejected]]]:
    """Slices of the listing in order, and the sizes of their images, which threads find ahead."""
    threads, length = (num_threads(), ASKED) if source.is_read_by_decoders else (FETCHES, FETCHED)
    slices = (batch.slice(i, length) for batch in fresh.batches() for i in range(0, batch.num_rows, length))
    waiting: deque[tuple[pa.RecordBatch, Future[list[Size | RecordRejected]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="leandit-scan") as pool:
        try:
            while True:
                for listed in islice(slices, ASKS_AHEAD * threads + 1 - len(waiting)):
                    waiting.append((listed, pool.submit(_find_sizes, source, listed, recipe, decoders)))
                if not waiting:
                    return
                listed, sizes = waiting.popleft()
                yield listed, sizes.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def place_image(height_px: int, width_px: int, images: ImagesSection) -> dict[str, Any] | RecordRejected:
    """Bucket and crop for an image size, by the name of the column; or why it has none. The size may be unknown where
    there is one bucket."""
    if not height_px:
        _, *bucket = images.table[0]
        return {"bucket": bucket_name(*bucket), "status": "planned"}
    size = f"{height_px}x{width_px} px"
    if min(height_px, width_px) < images.min_px:
        return RecordRejected("scan", "too_small", f"{size}, images.min_px = {images.min_px}")
    bucket = assign_bucket(height_px, width_px, images.table, max_ratio=images.max_ratio)
    if bucket is None:
        return RecordRejected("scan", "aspect", f"{size} is outside the bucket table")
    sizes, top, left = centre_crop(height_px, width_px, bucket, images.crop)
    if problem := resize_problem(height_px, width_px, sizes[-1]):
        return RecordRejected("scan", "aspect", problem)
    placement = dict(zip(PLACEMENT, (height_px, width_px, *sizes[-1], top, left), strict=True))
    return {"bucket": bucket_name(*bucket), "status": "planned", **placement}


def check_listing(fresh: Listing, recipe: PrecomputeRecipe, limits: RejectLimits, *, stops: bool = True) -> None:
    """Check the rejects of the listing alone; their counts are not kept.

    Raises: SourceError: too many.
    """
    example = ""
    for batch in fresh.batches():
        rejects = listing_rejects(batch, recipe)
        limits.rejected.update(reject.reason for reject in rejects.values())
        if rejects and not example:
            i, reject = next(iter(rejects.items()))
            example = f"The first is '{batch['key'][i].as_py()}': {reject}."
    limits.check_share(example)
    limits.rejected.clear()
    if stops:
        limits.check()


def _find_sizes(
    source: Source, batch: pa.RecordBatch, recipe: PrecomputeRecipe, decoders: Decoders
) -> list[Size | RecordRejected]:
    """Sizes of a slice of the listing: trusted ones, else from the headers."""
    sizes: list[Size | RecordRejected] = [(0, 0)] * batch.num_rows
    if recipe.source.sizes == "manifest":
        sizes = list(zip(batch["height_px"].to_pylist(), batch["width_px"].to_pylist(), strict=True))
    for position, reject in listing_rejects(batch, recipe).items():
        sizes[position] = reject
    is_read = reads_headers(source, recipe.images)
    unknown = [position for position, size in enumerate(sizes) if is_read and size == (0, 0)]
    columns = [batch[name].take(pa.array(unknown, pa.int64())).to_pylist() for name in ("path", "offset", "num_bytes")]
    places = list(zip(*columns, strict=True))
    if source.is_read_by_decoders:
        listed = [source.place(*place, stage="scan") for place in places]
        answers = decoders.sizes(listed) if places else []
    else:  # one at a time, to bound memory
        answers = (_sent_size(source, place, decoders) for place in places)
    for position, answer in zip(unknown, answers, strict=True):
        sizes[position] = answer
    return sizes


def _sent_size(source: Source, place: tuple[str, int, int], decoders: Decoders) -> Size | RecordRejected:
    """Size of an image whose bytes this process reads: at a URL only the first, if they tell."""
    path, offset, num_bytes = place
    try:
        head = source.read_head(*place)
        size = decoders.size(Path(path), offset, num_bytes, head) if head else None
        size = size or decoders.size(*source.place(*place, stage="scan"))
        assert size, "all of its bytes were at hand"
        return size
    except RecordRejected as reject:
        return reject.without_traceback()


def listing_rejects(batch: pa.RecordBatch, recipe: PrecomputeRecipe) -> dict[int, RecordRejected]:
    """Rejects of a batch of the listing, by position."""
    rejects = {}
    if recipe.needs_captions:
        for i in np.flatnonzero(pc.list_value_length(batch["captions"]).to_numpy() == 0).tolist():
            rejects[i] = RecordRejected("scan", *NO_CAPTION)
    for i in np.flatnonzero(batch["reason"].is_valid().to_numpy(zero_copy_only=False)).tolist():
        rejects[i] = RecordRejected("scan", batch["reason"][i].as_py(), batch["detail"][i].as_py())
    return rejects


def num_threads() -> int:
    """Threads for decoding: the cores of this process or its share of them (DECODERS), at most MAX_THREADS."""
    return min(MAX_THREADS, int(os.environ.get(DECODERS, 0)) or num_cores())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
