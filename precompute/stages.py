"""The work of stage 1, with decoding ahead of the encoder and writing behind it.

Both sides are threads: hash functions and the encoder let go of Python's lock, and pictures are decoded in children.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..datasets.buckets import bucket_size
from ..datasets.commits import Task
from ..datasets.errors import RecordRejected
from ..datasets.frozen import FrozenPlan
from ..datasets.layout import CAPTION_PART, NULL_PART
from ..datasets.mapped import TakenColumn
from ..datasets.schema import Fallback, ImageSpec
from ..datasets.writer import StoreWriter
from .caption_task import encode_caption_shard, encode_null_caption
from .decoder import Decoded, PicturePlace
from .encoders import ImageEncoder
from .forwards import InTurn
from .leases import Leases
from .rejects import RejectLimit
from .shard_task import EncodedBatch, PackedShard, ShardBuilder
from .text_encoders import CaptionEncoder

BATCHES_IN_WORK = 2  # one in the encoder, one that is prepared or put away
BATCHES_AHEAD = 3  # decoded batches that wait for the encoder
WRITES_BEHIND = 2  # shards that wait for the disk


class Origin(Protocol):
    """A source, as the encoding sees it: from the place that a plan names to what a decoder takes."""

    def place(self, path: str, offset: int, num_bytes: int, *, stage: str) -> PicturePlace:
        """As ``OpenedSource.place``."""
        ...


class PictureDecoders(Protocol):
    """What decodes pictures: here or elsewhere, from many threads at once."""

    @property
    def num_at_once(self) -> int:
        """Pictures that it works on at the same time."""
        ...

    def picture(
        self,
        path: Path,
        offset: int,
        num_bytes: int,
        data: bytes | None = None,
        *,
        bucket: tuple[int, int],
        crop: str,
        resize_filter: str = "bicubic",
    ) -> Decoded:
        """As ``Decoders.picture``; the place is what the ``Origin`` says."""
        ...


Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) whenever something was done; a total that is not known is 0."""


@dataclass
class StageClock:
    """Seconds spent in each stage, summed over threads."""

    seconds: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add({stage: time.perf_counter() - start})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add to stages what was measured elsewhere."""
        with self._lock:
            for stage, more in seconds.items():
                self.seconds[stage] = self.seconds.get(stage, 0.0) + more


class Background:
    """Commits finished shards in a thread; an error there is raised here at the next commit or at the end.

    Args:
      committed: called in that thread with each shard that is committed and whose lease is given back.
    """

    def __init__(
        self,
        writer: StoreWriter,
        leases: Leases,
        clock: StageClock,
        *,
        committed: Callable[[PackedShard], None] = lambda shard: None,
    ) -> None:
        self._writer, self._leases, self._clock, self._committed = writer, leases, clock, committed
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="leandit-write")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Background:
        return self

    def commit(self, shard: PackedShard) -> None:
        """Queue a shard; waits while too many are queued."""
        self._pending.append(self._pool.submit(self._write, shard))
        with self._clock.measure("wait_write"):
            while len(self._pending) > WRITES_BEHIND:
                self._pending.popleft().result()

    def _write(self, shard: PackedShard) -> None:
        with self._clock.measure("write"):
            task = (shard.part, shard.shard)
            # Who stood still may find that others took its lease, and that their bytes are not to be touched any more:
            # another device, or less memory, makes others.
            if not self._writer.is_committed(task):
                write_shard(self._writer, shard)
            self._leases.release(task)
        self._committed(shard)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                with self._clock.measure("wait_write"):
                    while self._pending:
                        self._pending.popleft().result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)


def write_shard(writer: StoreWriter, shard: PackedShard) -> None:
    """Commit a packed shard."""
    writer.commit(
        shard.part,
        shard.shard,
        shard.arrays,
        checksums=shard.checksums,
        source_checksums=shard.source_checksums,
        rejects=shard.rejects,
        qualities=shard.qualities,
        fallbacks=shard.fallbacks,
    )


def is_picture_task(task: tuple[str, int]) -> bool:
    """The task makes latents, not caption embeddings."""
    return task[0] not in (CAPTION_PART, NULL_PART)


def encode_captions(
    plan: FrozenPlan, tasks: Iterable[Task], encoder: CaptionEncoder, clock: StageClock
) -> Iterator[PackedShard]:
    """Encode shards of captions."""
    assert plan.spec.text is not None
    for part, shard in tasks:
        with clock.measure("text"):
            if part == NULL_PART:
                packed = encode_null_caption(plan, encoder)
            else:
                packed = encode_caption_shard(plan, shard, encoder)
        yield packed


def encode_pictures(
    plan: FrozenPlan,
    tasks: Iterable[Task],
    encoder: ImageEncoder,
    decoders: PictureDecoders,
    origin: Origin,
    *,
    limit: RejectLimit,
    clock: StageClock,
    progress: Callable[[int], None],
    told: Callable[[str, int], Sequence[Fallback]] = lambda part, shard: (),
) -> Iterator[PackedShard]:
    """Encode shards of latents in the order given, decoding ahead.

    Args:
      origin: of the pictures that the plan names.
      told: of a part and shard that is made again: how rows were encoded that were not as planned.
      progress: called with the number of pictures of each batch that is done.
    Raises: SourceError: too many pictures are rejected.
    """
    pool = ThreadPoolExecutor(decoders.num_at_once, thread_name_prefix="leandit-decode")
    try:
        with ShardEncoder(plan, encoder, limit=limit, clock=clock, told=told) as shards:
            for batch, futures in _decode_ahead(pool, plan, tasks, decoders, origin, clock):
                with clock.measure("wait_decode"):
                    pictures = [future.result() for future in futures]
                shard = shards.add(batch, pictures)
                progress(len(batch.rows))
                if shard:
                    yield shard
            yield from shards.rest()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class InWork:
    """A batch that is being encoded, and the shard that it belongs to."""

    batch: PictureBatch
    builder: ShardBuilder
    encoded: Future[EncodedBatch]


class ShardEncoder:
    """Makes shards of latents out of decoded batches, which come in the order of their rows; a context manager.

    While one batch is in the encoder, the next one is prepared and the one before is put away, so that a GPU has
    nothing to wait for.

    Args: as ``encode_pictures``.
    """

    def __init__(
        self,
        plan: FrozenPlan,
        encoder: ImageEncoder,
        *,
        limit: RejectLimit,
        clock: StageClock,
        told: Callable[[str, int], Sequence[Fallback]] = lambda part, shard: (),
    ) -> None:
        self._plan, self._limit, self._told = plan, limit, told
        self._encoder = InTurn(encoder, lambda: clock.measure("encode"))
        self._builder: ShardBuilder | None = None
        self._in_work: deque[InWork] = deque()
        self._pool = ThreadPoolExecutor(BATCHES_IN_WORK, thread_name_prefix="leandit-encode")

    def __enter__(self) -> ShardEncoder:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, batch: PictureBatch, pictures: Sequence[Picture]) -> PackedShard | None:
        """Begin to encode a batch, and finish the one before the last.

        Returns: a shard, where that was its last batch.
        Raises: SourceError: too many pictures are rejected.
        """
        if self._builder is None:
            self._builder = ShardBuilder(
                batch.part,
                batch.shard,
                self._plan.layout.part_arrays(batch.part),
                keys=batch.source.keys,
                records=batch.source.positions,
                spec=self._plan.spec.latent,
                told=self._told(batch.part, batch.shard),
            )
        encoded = self._pool.submit(self._builder.encode, batch.rows, pictures, self._encoder, most=self._builder.most)
        self._in_work.append(InWork(batch, self._builder, encoded))
        if batch.is_last:
            self._builder = None
        return self._next() if len(self._in_work) > BATCHES_IN_WORK else None

    def rest(self) -> Iterator[PackedShard]:
        """Finish what is in work.

        Raises: as ``add``.
        """
        while self._in_work:
            if shard := self._next():
                yield shard

    def _next(self) -> PackedShard | None:
        done = self._in_work.popleft()
        outcomes = done.builder.store(done.encoded.result(), self._encoder)
        for row, reject in zip(done.batch.rows, outcomes, strict=True):
            self._limit.count(done.batch.source.keys[row], reject)
        return done.builder.finish() if done.batch.is_last else None


@dataclass(frozen=True)
class Sizes:
    """Height and width in pixels by row."""

    heights: TakenColumn
    widths: TakenColumn

    def __getitem__(self, row: int) -> tuple[int, int]:
        return self.heights[row], self.widths[row]


class BucketSource:
    """Where the pictures of a bucket lie in the source, and their size when they were planned; by row."""

    def __init__(self, plan: FrozenPlan, bucket: str) -> None:
        self.positions = plan.bucket_positions[bucket]
        names = ("key", "source_path", "source_offset", "source_bytes", "height_px", "width_px")
        self.keys, self.paths, self.offsets, self.num_bytes, heights, widths = (
            TakenColumn(plan.records[name], self.positions) for name in names
        )
        self.sizes = Sizes(heights, widths)


@dataclass(frozen=True)
class PictureBatch:
    """The next rows of a shard, encoded in one forward."""

    part: str
    shard: int
    rows: range
    is_last: bool
    source: BucketSource


def picture_batches(plan: FrozenPlan, tasks: Iterable[Task]) -> Iterator[PictureBatch]:
    """Batches of some shards: always the same rows together, and never rows of two shards."""
    size, sources = plan.spec.latent.batch_size, {}
    for part, shard in tasks:
        if part not in sources:
            sources[part] = BucketSource(plan, part.removeprefix("buckets/"))
        rows = plan.layout.rows_of(part, shard)
        for start in range(rows.start, rows.stop, size):
            stop = min(start + size, rows.stop)
            yield PictureBatch(part, shard, range(start, stop), stop == rows.stop, sources[part])


Picture = Decoded | RecordRejected


def decode_planned(
    images: ImageSpec,
    origin: Origin,
    decoders: PictureDecoders,
    place: tuple[str, int, int],
    *,
    size: tuple[int, int],
    bucket: tuple[int, int],
    clock: StageClock | None = None,
) -> Picture:
    """Decode the picture of one planned row, or say why there is none.

    Args:
      place: path, offset and number of bytes, as the plan has them.
      size: height and width in pixels that the picture had when it was planned.
      clock: told what the decoder took, not how long it was waited for: on a cluster that is much more.
    """
    start = time.perf_counter()
    try:
        where = origin.place(*place, stage="decode")
        fetch_seconds = time.perf_counter() - start
        decoded = decoders.picture(*where, bucket=bucket, crop=images.crop, resize_filter=images.resize_filter)
    except RecordRejected as reject:
        return reject
    if clock:
        clock.add({"read": fetch_seconds + decoded.read_seconds, "decode": decoded.decode_seconds})
    return as_planned(decoded, size)


def as_planned(decoded: Decoded, size: tuple[int, int]) -> Picture:
    """A decoded picture, or the reject that it is not the one that was planned."""
    found = decoded.height_px, decoded.width_px
    if found == size:
        return decoded
    planned = "{}x{}".format(*size)
    detail = f"the picture has {found[0]}x{found[1]} px, the one that was planned had {planned} px"
    return RecordRejected("decode", "wrong_size", detail)


def _decode_ahead(
    pool: ThreadPoolExecutor,
    plan: FrozenPlan,
    tasks: Iterable[Task],
    decoders: PictureDecoders,
    origin: Origin,
    clock: StageClock,
) -> Iterator[tuple[PictureBatch, list[Future[Picture]]]]:
    """Hand out batches in order while the pictures of the next ones are being decoded."""
    images = plan.spec.images

    def decode(source: BucketSource, row: int, bucket: tuple[int, int]) -> Picture:
        place = source.paths[row], source.offsets[row], source.num_bytes[row]
        return decode_planned(images, origin, decoders, place, size=source.sizes[row], bucket=bucket, clock=clock)

    ahead: deque[tuple[PictureBatch, list[Future[Picture]]]] = deque()
    for batch in picture_batches(plan, tasks):
        bucket = bucket_size(batch.part.removeprefix("buckets/"))
        ahead.append((batch, [pool.submit(decode, batch.source, row, bucket) for row in batch.rows]))
        if len(ahead) > BATCHES_AHEAD:
            yield ahead.popleft()
    while ahead:
        yield ahead.popleft()
