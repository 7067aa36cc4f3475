"""Which pictures are encoded together, and decoding them ahead of the encoder."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...datasets.disk.spill import TakenColumn
from ...datasets.errors import RecordRejected
from ...datasets.format.buckets import bucket_size
from ...datasets.format.layout import Part, Task
from ...datasets.format.row_layout import LATENTS, MASK
from ...datasets.format.schema import ImageSpec
from ...datasets.format.table_schemas import PLACES
from ...datasets.revisions.plan import FrozenPlan
from ..images.decoders import Decoded, Decoders
from ..progress.clock import StageClock
from ..sources.source import OpenedSource

BATCHES_AHEAD = 3  # decoded batches that wait for the encoder


Place = tuple[str, int, int]  # path, offset and number of bytes of a picture


@dataclass(frozen=True)
class PlannedRow:
    """What a plan says of the pictures of a record.

    Args:
      place: of its own picture.
      size: height and width of that in pixels.
      companions: places of the companion pictures that are encoded with it, by name.
      checksum: of the file of the picture whose latents are already stored; None if they are not.
    """

    place: Place
    size: tuple[int, int]
    companions: Mapping[str, Place]
    checksum: int | None = None


class BucketSource:
    """Places and planned sizes of the pictures of a part, by row.

    ``positions`` is (N,), -1 for a row that no record has. ``companions`` are the names of the companion pictures of
    the part.
    """

    def __init__(self, plan: FrozenPlan, part: Part) -> None:
        self.positions = plan.positions_of(part)
        self.companions = [one.name for one in plan.spec.pictures if one.name in part.groups]
        known = np.maximum(self.positions, 0)

        def columns(*names: str, suffix: str = "") -> list[TakenColumn]:
            return [TakenColumn(plan.records[f"{name}{suffix}"], known) for name in names]

        (self.keys,), self._place = columns("key"), columns(*PLACES[:3])
        self._size, checksums = columns("height_px", "width_px"), columns("source_checksum")
        self._companion_places = {name: columns(*PLACES[:3], suffix=f"_{name}") for name in self.companions}
        self._checksums = checksums if LATENTS not in part.groups else []

    def planned(self, row: int) -> PlannedRow:
        """The pictures of a row that a record has."""
        return PlannedRow(
            _of_row(self._place, row),
            _of_row(self._size, row),
            {name: _of_row(columns, row) for name, columns in self._companion_places.items()},
            *_of_row(self._checksums, row),
        )


def _of_row(columns: Sequence[TakenColumn], row: int) -> Any:
    return tuple(column[row] for column in columns)


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
    """Decode the pictures of a row of a part, its own and its companions; None for a row that no record has.

    Args: as ``decode_planned``.
    """
    if rows.positions[row] < 0:
        return None
    spec, planned = plan.spec, rows.planned(row)
    images = spec.images
    found = decode_planned(images, source, decoders, planned.place, size=planned.size, bucket=bucket, clock=clock)
    if isinstance(found, RecordRejected):
        return found
    if planned.checksum is not None and found.source_checksum != planned.checksum:
        return RecordRejected("decode", "source_changed", "its latents are of another picture")
    kinds, companions = {one.name: one.kind for one in spec.pictures}, {}
    for name, place in planned.companions.items():
        try:
            where = source.place(*place, stage="decode", picture=name)
            companions[name] = decoders.picture(
                *where,
                bucket=bucket,
                crop=images.crop,
                resize_filter=images.resize_filter,
                exif_orientation=images.exif_orientation,
                beside=planned.size,
                mask_px=spec.latent.downscale if kinds[name] == MASK else 0,
            )
        except RecordRejected as reject:
            return RecordRejected(reject.stage, reject.reason, f"picture '{name}', '{place[0]}': {reject.detail}")
        if clock:
            clock.add({"read": companions[name].read_seconds, "decode": companions[name].decode_seconds})
    return replace(found, companions=companions) if companions else found


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
