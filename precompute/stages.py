"""The work of stage 1, with decoding ahead of the encoder and writing behind it.

Both sides are threads: decoders and hash functions let go of Python's lock, and the encoder stays busy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute

from ..datasets.buckets import bucket_size
from ..datasets.commits import FrozenPlan
from ..datasets.errors import RecordRejected
from ..datasets.layout import CAPTION_PART, EMBEDDINGS, NULL_PART, bucket_part, latent_layouts
from ..datasets.schema import StoreSpec
from ..datasets.writer import StoreWriter
from .encoders import Encoders
from .images import decode_picture
from .plan import num_threads
from .shard_task import PackedShard, ShardBuilder, encode_caption_shard, encode_null_caption
from .sources import Source, read_record

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

BATCHES_AHEAD = 3  # decoded batches that wait for the encoder
WRITES_BEHIND = 2  # shards that wait for the disk

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) whenever something was done."""


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
            with self._lock:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


class Background:
    """Commits finished shards in a thread; an error there is raised here at the next commit or at the end."""

    def __init__(self, writer: StoreWriter, clock: StageClock) -> None:
        self._writer, self._clock = writer, clock
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
            self._writer.commit(shard.part, shard.shard, shard.arrays, checksums=shard.checksums, rejects=shard.rejects)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                with self._clock.measure("wait_write"):
                    while self._pending:
                        self._pending.popleft().result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)


def encode_captions(
    writer: StoreWriter, encoders: Encoders, missing: list[tuple[str, int]], clock: StageClock, progress: Progress
) -> Iterator[PackedShard]:
    """Encode the missing caption shards."""
    encoder, spec = encoders.caption, writer.spec
    if encoder is None or spec.text is None:
        return
    shards = [(part, shard) for part, shard in missing if part in (NULL_PART, CAPTION_PART)]
    for done, (part, shard) in enumerate(shards, 1):
        with clock.measure("text"):
            if part == NULL_PART:
                packed = encode_null_caption(encoder, spec.text.dtype)
            else:
                packed = encode_caption_shard(
                    shard,
                    writer.layouts[EMBEDDINGS],
                    writer.plan.captions,
                    writer.plan.offsets(spec),
                    encoder,
                    spec.text.batch_size,
                )
        yield packed
        progress("captions", done, len(shards))


def encode_pictures(
    writer: StoreWriter,
    encoders: Encoders,
    source: Source,
    missing: list[tuple[str, int]],
    clock: StageClock,
    progress: Progress,
) -> Iterator[PackedShard]:
    """Encode the missing latent shards, in the order of the plan, decoding ahead."""
    wanted = set(missing)
    work = [batch for batch in _batches(writer) if (batch.part, batch.shard) in wanted]
    total, done = sum(len(batch.rows) for batch in work), 0
    buckets = {batch.bucket: BucketRows(writer.plan, batch.bucket) for batch in work}
    builder: ShardBuilder | None = None
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="leandit-decode") as pool:
        for batch, pictures in _decode_ahead(pool, work, buckets, source, writer.spec, clock):
            if builder is None:
                rows = buckets[batch.bucket]
                layouts = latent_layouts(writer.spec, batch.bucket, len(rows.keys))
                builder = ShardBuilder(
                    batch.part, batch.shard, layouts, keys=rows.keys, records=rows.records, spec=writer.spec.latent
                )
            with clock.measure("wait_decode"):
                decoded = [future.result() for future in pictures]
            with clock.measure("encode"):
                builder.add(batch.rows, decoded, encoders.image)
            done += len(batch.rows)
            progress("pictures", done, total)
            if batch.is_last:
                yield builder.finish()
                builder = None


@dataclass(frozen=True)
class PictureBatch:
    """The next rows of a shard, encoded in one forward."""

    part: str
    bucket: str
    shard: int
    rows: range
    is_last: bool


def _batches(writer: StoreWriter) -> Iterator[PictureBatch]:
    """All picture batches of the plan: a batch never crosses two shards."""
    size = writer.spec.latent.batch_size
    for bucket, num_rows in writer.plan.bucket_rows.items():
        layout = latent_layouts(writer.spec, bucket, num_rows)[0]
        for shard in range(layout.num_shards):
            rows = layout.rows_of(shard)
            for start in range(rows.start, rows.stop, size):
                stop = min(start + size, rows.stop)
                yield PictureBatch(bucket_part(bucket), bucket, shard, range(start, stop), stop == rows.stop)


class BucketRows:
    """Where the pictures of a bucket lie in the source, by row."""

    def __init__(self, plan: FrozenPlan, bucket: str) -> None:
        wanted = pc.fill_null(pc.equal(plan.records["bucket"], bucket), False).to_numpy(zero_copy_only=False)
        positions = np.flatnonzero(wanted)  # rows follow the order of the table
        table = plan.records.take(positions)
        self.records = positions
        self.keys: list[str] = table["key"].to_pylist()
        self.paths: list[str] = table["source_path"].to_pylist()
        self.offsets: list[int] = table["source_offset"].to_pylist()
        self.sizes: list[int] = table["source_bytes"].to_pylist()


Picture = np.ndarray | RecordRejected


def _decode_ahead(
    pool: ThreadPoolExecutor,
    work: list[PictureBatch],
    buckets: dict[str, BucketRows],
    source: Source,
    spec: StoreSpec,
    clock: StageClock,
) -> Iterator[tuple[PictureBatch, list[Future[Picture]]]]:
    """Hand out batches in order while the pictures of the next ones are being decoded."""

    def decode(rows: BucketRows, row: int, size: tuple[int, int]) -> Picture:
        with clock.measure("decode"):
            try:
                data = read_record(source.root, rows.paths[row], rows.offsets[row], rows.sizes[row])
                return decode_picture(data, bucket=size, crop=spec.images.crop)
            except RecordRejected as reject:
                return reject

    ahead: deque[tuple[PictureBatch, list[Future[Picture]]]] = deque()
    try:
        for batch in work:
            rows, size = buckets[batch.bucket], bucket_size(batch.bucket)
            ahead.append((batch, [pool.submit(decode, rows, row, size) for row in batch.rows]))
            if len(ahead) > BATCHES_AHEAD:
                yield ahead.popleft()
        while ahead:
            yield ahead.popleft()
    finally:
        for _, futures in ahead:
            for future in futures:
                future.cancel()
