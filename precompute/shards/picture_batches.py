"""Which pictures are encoded together, and decoding them ahead of the encoder."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ...datasets.disk.spill import TakenColumn
from ...datasets.errors import RecordRejected
from ...datasets.format.buckets import bucket_size
from ...datasets.format.layout import Part
from ...datasets.format.schema import ImageSpec
from ...datasets.revisions.commits import Task
from ...datasets.revisions.plan import FrozenPlan
from ..images.decoders import Decoded, Decoders
from ..progress.clock import StageClock
from ..sources.source import OpenedSource

BATCHES_AHEAD = 3  # decoded batches that wait for the encoder


@dataclass(frozen=True)
class Sizes:
    """Height and width in pixels by row."""

    heights: TakenColumn
    widths: TakenColumn

    def __getitem__(self, row: int) -> tuple[int, int]:
        return self.heights[row], self.widths[row]


class BucketSource:
    """Places and planned sizes of the pictures of a part, by row.

    ``positions`` is (N,), -1 for a row that no record has. ``checksums`` are of the pictures whose latents are stored,
    if the part adds features to them; else None.
    """

    def __init__(self, plan: FrozenPlan, part: Part) -> None:
        self.positions = plan.positions_of(part)
        names = ("key", "source_path", "source_offset", "source_bytes", "height_px", "width_px", "source_checksum")
        known = np.maximum(self.positions, 0)
        self.keys, self.paths, self.offsets, self.num_bytes, heights, widths, checksums = (
            TakenColumn(plan.records[name], known) for name in names
        )
        self.sizes = Sizes(heights, widths)
        self.checksums = checksums if part.revision != plan.revision else None


@dataclass(frozen=True)
class PictureBatch:
    """Consecutive rows of a shard that are encoded in one forward."""

    part: str
    shard: int
    rows: range
    is_last: bool
    source: BucketSource


def picture_batches(plan: FrozenPlan, tasks: Iterable[Task]) -> Iterator[PictureBatch]:
    """Batches of shards: always the same rows together, never rows of two shards."""
    size, sources = plan.spec.latent.batch_size, {}
    for part, shard in tasks:
        if part not in sources:
            sources[part] = BucketSource(plan, plan.layout.parts[part])
        rows = plan.layout.rows_of(part, shard)
        for start in range(rows.start, rows.stop, size):
            stop = min(start + size, rows.stop)
            yield PictureBatch(part, shard, range(start, stop), stop == rows.stop, sources[part])


Picture = Decoded | RecordRejected


def decode_planned(
    images: ImageSpec,
    source: OpenedSource,
    decoders: Decoders,
    place: tuple[str, int, int],
    *,
    size: tuple[int, int],
    bucket: tuple[int, int],
    clock: StageClock | None = None,
) -> Picture:
    """Decode the picture of a planned row; rejects are returned.

    Args:
      place: path, offset and number of bytes, as in the plan.
      size: planned height and width in pixels.
      clock: gets the decoder's own time, without waiting.
    """
    start = time.perf_counter()
    try:
        where = source.place(*place, stage="decode")
        fetch_seconds = time.perf_counter() - start
        decoded = decoders.picture(
            *where,
            bucket=bucket,
            crop=images.crop,
            resize_filter=images.resize_filter,
            exif_orientation=images.exif_orientation,
        )
    except RecordRejected as reject:
        return reject
    if clock:
        clock.add({"read": fetch_seconds + decoded.read_seconds, "decode": decoded.decode_seconds})
    found = decoded.height_px, decoded.width_px
    if found == size:
        return decoded
    planned = "{}x{}".format(*size)
    detail = f"the picture has {found[0]}x{found[1]} px, planned were {planned} px"
    return RecordRejected("decode", "wrong_size", detail)


def decode_row(
    plan: FrozenPlan,
    rows: BucketSource,
    row: int,
    source: OpenedSource,
    decoders: Decoders,
    *,
    bucket: tuple[int, int],
    clock: StageClock | None = None,
) -> Picture | None:
    """Decode the picture of a row of a part; None for a row that no record has.

    Args: as ``decode_planned``.
    """
    if rows.positions[row] < 0:
        return None
    place = rows.paths[row], rows.offsets[row], rows.num_bytes[row]
    images = plan.spec.images
    found = decode_planned(images, source, decoders, place, size=rows.sizes[row], bucket=bucket, clock=clock)
    if rows.checksums and isinstance(found, Decoded) and found.source_checksum != rows.checksums[row]:
        return RecordRejected("decode", "source_changed", "its latents are of another picture")
    return found


def decode_ahead(
    pool: ThreadPoolExecutor,
    plan: FrozenPlan,
    tasks: Iterable[Task],
    decoders: Decoders,
    source: OpenedSource,
    clock: StageClock,
) -> Iterator[tuple[PictureBatch, list[Future[Picture | None]]]]:
    """Yield batches in order while the pictures of later ones are decoded; None for a row that no record has.

    Args:
      pool: of threads that wait for the decoders.
    """

    def decode(rows: BucketSource, row: int, bucket: tuple[int, int]) -> Picture | None:
        return decode_row(plan, rows, row, source, decoders, bucket=bucket, clock=clock)

    ahead: deque[tuple[PictureBatch, list[Future[Picture | None]]]] = deque()
    for batch in picture_batches(plan, tasks):
        bucket = bucket_size(plan.layout.parts[batch.part].bucket)
        ahead.append((batch, [pool.submit(decode, batch.source, row, bucket) for row in batch.rows]))
        if len(ahead) > BATCHES_AHEAD:
            yield ahead.popleft()
    while ahead:
        yield ahead.popleft()
