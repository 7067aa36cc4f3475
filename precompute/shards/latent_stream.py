"""Decoded batches to shards of latents: while one batch is in the encoder, others are prepared and stored."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from ...datasets.format.schema import Fallback
from ...datasets.revisions.plan import FrozenPlan
from ..encoders.forwards import SharedEncoder
from ..encoders.loading import Encoders
from ..progress.clock import StageClock
from ..progress.rejects import RejectLimit
from .latent_shard import EncodedBatch, PackedShard, ShardBuilder
from .picture_batches import Picture, PictureBatch

BATCHES_IN_WORK = 2  # one in the encoder, one being prepared or stored


@dataclass(frozen=True)
class PendingBatch:
    """A batch that is being encoded, and its shard."""

    batch: PictureBatch
    builder: ShardBuilder
    encoded: Future[EncodedBatch]


class ShardEncoder:
    """Makes shards of latents from decoded batches, which come in row order; a context manager.

    While one batch is in the encoder, the next one is prepared and the previous one stored, so a GPU never waits.

    Args: as ``encode_pictures`` in ``stages.py``.
    """

    def __init__(
        self,
        plan: FrozenPlan,
        encoders: Encoders,
        *,
        limit: RejectLimit,
        clock: StageClock,
        progress: Callable[[int], None],
        fallbacks_of: Callable[[str, int], Sequence[Fallback]],
    ) -> None:
        self._plan, self._limit, self._progress, self._fallbacks_of = plan, limit, progress, fallbacks_of
        turn = threading.Lock()
        self._encoders = {
            one.group: SharedEncoder(one, turn, lambda: clock.measure("encode"))
            for one in encoders.rows_encoders(plan.spec.latent)
        }
        self._black = encoders.image.black
        self._builder: ShardBuilder | None = None
        self._pending_batches: deque[PendingBatch] = deque()
        self._pool = ThreadPoolExecutor(BATCHES_IN_WORK, thread_name_prefix="leandit-encode")

    def __enter__(self) -> ShardEncoder:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, batch: PictureBatch, pictures: Sequence[Picture | None]) -> PackedShard | None:
        """Start encoding a batch, and finish the one before the last.

        Returns: a shard, if that was its last batch.
        Raises: SourceError: too many pictures are rejected.
        """
        if self._builder is None:
            self._builder = ShardBuilder(
                self._plan.layout.parts[batch.part],
                batch.shard,
                batch.source,
                batch_size=self._plan.spec.latent.batch_size,
                known_fallbacks=self._fallbacks_of(batch.part, batch.shard),
            )
        encoded = self._pool.submit(self._encode, self._builder, batch, batch.rows, pictures, self._builder.max_rows)
        self._pending_batches.append(PendingBatch(batch, self._builder, encoded))
        if batch.is_last:
            self._builder = None
        return self._next() if len(self._pending_batches) > BATCHES_IN_WORK else None

    def rest(self) -> Iterator[PackedShard]:
        """Finish all pending batches.

        Raises: as ``add``.
        """
        while self._pending_batches:
            if shard := self._next():
                yield shard

    def _encode(
        self, builder: ShardBuilder, batch: PictureBatch, rows: range, pictures: Sequence[Picture | None], max_rows: int
    ) -> EncodedBatch:
        encoders = [self._encoders[group] for group in self._plan.layout.parts[batch.part].groups]
        num_views = 2 if self._plan.spec.latent.flip else 1
        return builder.encode(rows, pictures, encoders, self._black, num_views=num_views, max_rows=max_rows)

    def _next(self) -> PackedShard | None:
        done = self._pending_batches.popleft()
        outcomes = done.builder.store(done.encoded.result(), partial(self._encode, done.builder, done.batch))
        for row, reject in zip(done.batch.rows, outcomes, strict=True):
            if done.batch.source.positions[row] >= 0:
                self._limit.count(done.batch.source.keys[row], reject)
        self._progress(len(done.batch.rows))
        return done.builder.finish() if done.batch.is_last else None
