"""Encoding of shards, with decoding ahead of the encoder and writing behind it.

Both run in threads: hashing and the encoder release the GIL, and pictures are decoded in child processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ...datasets.format.layout import Task
from ...datasets.format.schema import Fallback
from ...datasets.revisions.plan import FrozenPlan
from ...datasets.revisions.writer import StoreWriter
from ..encoders.loading import Encoders
from ..encoders.text.encoder import CaptionEncoder
from ..encoders.text.tokenizer import of_table
from ..images.decoders import Decoders
from ..progress.clock import StageClock
from ..progress.rejects import RejectLimit
from ..sharing.leases import Leases
from ..sources.source import OpenedSource
from .caption_shard import encode_caption_shard, encode_null_caption
from .latent_shard import PackedShard
from .latent_stream import ShardEncoder
from .picture_batches import decode_ahead

WRITES_BEHIND = 2  # shards that wait for the disk


class Background:
    """Commits finished shards in a thread; an error there is raised at the next commit or at the end.

    Args:
      on_commit: called in that thread with each shard after the release of its lease, and whether this process has
        committed it.
    """

    def __init__(
        self,
        writer: StoreWriter,
        leases: Leases,
        clock: StageClock,
        *,
        on_commit: Callable[[PackedShard, bool], None] = lambda shard, is_own: None,
    ) -> None:
        self._writer, self._leases, self._clock, self._on_commit = writer, leases, clock, on_commit
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="leandit-write")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Background:
        return self

    def commit(self, shard: PackedShard) -> None:
        """Queue a shard; waits if too many are queued."""
        self._pending.append(self._pool.submit(self._write, shard))
        with self._clock.measure("wait_write"):
            while len(self._pending) > WRITES_BEHIND:
                self._pending.popleft().result()

    def _write(self, shard: PackedShard) -> None:
        with self._clock.measure("write"):
            task = (shard.part, shard.shard)
            # After a pause others may have taken the lease and committed; their bytes, perhaps of another device, stay.
            if is_own := not self._writer.is_committed(task):
                write_shard(self._writer, shard)
            self._leases.release(task)
        self._on_commit(shard, is_own)

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
        shard.part, shard.shard, shard.arrays, shard.results, rejects=shard.rejects, fallbacks=shard.fallbacks
    )


def encode_captions(
    plan: FrozenPlan, tasks: Iterable[Task], encoders: Mapping[str, CaptionEncoder], clock: StageClock
) -> Iterator[PackedShard]:
    """Encode shards of captions; an encoder is in memory only while its tasks last.

    Args:
      tasks: those of a text encoder one after the other.
      encoders: by name.
    """
    loaded: CaptionEncoder | None = None
    try:
        for name, shard in tasks:
            part = plan.layout.parts[name]
            assert part.captions is not None, "a task of captions"
            encoder = encoders[part.captions.name]
            if loaded and loaded is not encoder:
                loaded.release()  # two large encoders would not fit
            loaded = encoder
            with clock.measure("text"), of_table(part.captions.name):
                if part.is_null:
                    packed = encode_null_caption(part, encoder)
                else:
                    packed = encode_caption_shard(plan, part, shard, encoder)
            yield packed
    finally:
        if loaded:
            loaded.release()


def encode_pictures(
    plan: FrozenPlan,
    tasks: Iterable[Task],
    encoders: Encoders,
    decoders: Decoders,
    source: OpenedSource,
    *,
    limit: RejectLimit,
    clock: StageClock,
    progress: Callable[[int], None],
    num_at_once: int | None = None,
    fallbacks_of: Callable[[str, int], Sequence[Fallback]] = lambda part, shard: (),
) -> Iterator[PackedShard]:
    """Encode shards of pictures in the given order, decoding ahead.

    Args:
      source: of the planned pictures.
      limit: of rejects.
      progress: called with the number of pictures of each finished batch.
      num_at_once: pictures that are decoded concurrently; None for as many as there are decoders.
      fallbacks_of: of a part and shard that is made again, the rows that were not encoded as planned.
    Raises: SourceError: too many pictures are rejected.
    """
    pool = ThreadPoolExecutor(num_at_once or decoders.num_at_once, thread_name_prefix="leandit-decode")
    try:
        with ShardEncoder(
            plan, encoders, limit=limit, clock=clock, progress=progress, fallbacks_of=fallbacks_of
        ) as shards:
            for batch, futures in decode_ahead(pool, plan, tasks, decoders, source, clock):
                with clock.measure("wait_decode"):
                    pictures = [future.result() for future in futures]
                if shard := shards.add(batch, pictures):
                    yield shard
            yield from shards.rest()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
