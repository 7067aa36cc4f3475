"""The runner: encodes the missing shards of a revision that no other process is encoding, until none is missing.

While a batch is in the encoder, the inputs of later ones are loaded and the rows of the one before are stored; finished
shards are committed in a thread behind. Processes share only the leases and commit records in the store's folder, so
any of them may die at any time.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ...datasets.format.layout import Task, is_picture_task
from ...datasets.format.schema import Fallback
from ...datasets.revisions.plan import FrozenPlan
from ...datasets.revisions.writer import StoreWriter
from ..config import SourceSection
from ..encoders.loading import Encoders
from ..encoders.text.encoder import CaptionEncoder, TokenCount
from ..images.decoders import Decoders
from ..sharing.leases import Leases
from ..sources.source import OpenedSource
from .clock import Progress, StageClock
from .columns import image_columns
from .inputs import ImageReader, PlannedRows
from .progress import RunProgress
from .rejects import RejectLimits, limits_of
from .shards import CaptionShard, ImageSettings, ImageShard, Outcomes, Pools, Shard

BATCHES_AHEAD = 3  # loaded batches that wait for the encoder
BATCHES_BEHIND = 1  # encoded batches that wait to be stored
FETCHES = 64  # in flight, of images that this process reads for the decoders, as from a URL
WRITES_BEHIND = 2  # shards that wait for the disk

FallbacksOf = Callable[[str, int], Sequence[Fallback]]
WantedOf = Callable[[Task], Set[int] | None]


OnBatch = Callable[[Shard, int], None]
"""Called with each finished batch: its shard, and its number of items."""


def no_batch(shard: Shard, count: int) -> None:
    """An ``OnBatch`` that ignores them."""


@dataclass(kw_only=True)
class ShardRunner(ABC):
    """Fills the missing shards of a revision until all are committed.

    Attributes:
      clock: seconds of each stage.
      num_encoded: images in the shards that this process has committed.
    """

    clock: StageClock = field(default_factory=StageClock)
    num_encoded: int = 0

    def run(self, writer: StoreWriter, missing: Sequence[Task], *, section: SourceSection, progress: Progress) -> None:
        """Encode the missing shards of a revision until all are committed, here or by others.

        Args:
          section: limits of rejects.
          progress: called with what is done of ``missing``, here and by others.
        Raises: SourceError: too many records are rejected.
        """
        limits = limits_of(section, writer)
        done = RunProgress(writer, missing, limits, progress)
        with Leases(writer) as leases:
            while missing:
                with Commits(writer, leases, self.clock) as commits:
                    for shard in self.shards(writer.plan, leases.take(list(missing)), limits=limits, on_batch=done.add):
                        commits.add(shard)
                self.num_encoded += commits.num_images
                if missing := writer.missing_tasks(missing):
                    leases.wait()  # for other processes
                done.look()

    @abstractmethod
    def shards(
        self,
        plan: FrozenPlan,
        tasks: Iterable[Task],
        *,
        limits: RejectLimits | None = None,
        on_batch: OnBatch = no_batch,
    ) -> Iterator[Shard]:
        """Fill shards in the given order.

        Args:
          tasks: those of captions first.
          limits: of rejects in a row.
        Raises: SourceError: too many records in a row are rejected.
        """


@dataclass
class Runner(ShardRunner):
    """What encodes: encoders, decoders and the source."""

    encoders: Encoders
    decoders: Decoders
    source: OpenedSource

    def __post_init__(self) -> None:
        self._before = self._tokens()

    @property
    def tokens(self) -> TokenCount:
        """Tokens that went through the text encoders since this was made."""
        return self._tokens() - self._before

    def shards(
        self,
        plan: FrozenPlan,
        tasks: Iterable[Task],
        *,
        limits: RejectLimits | None = None,
        on_batch: OnBatch = no_batch,
        fallbacks_of: FallbacksOf = lambda part, shard: (),
        wanted_of: WantedOf = lambda task: None,
    ) -> Iterator[Shard]:
        """Encode shards in the given order; a text encoder is in memory only while its tasks last.

        Args:
          tasks: those of captions first.
          limits: of rejects in a row.
          fallbacks_of: of a part and shard that is made again, the rows that were not encoded as planned.
          wanted_of: of a task, the rows or captions whose batches alone are encoded; None for all.
        Raises: SourceError: too many records in a row are rejected.
        """
        reader = ImageReader(plan.spec.images, self.source, self.decoders, self.clock)
        columns = image_columns(self.encoders, plan.spec.latent)
        settings = ImageSettings(plan, columns, reader, self.encoders.image.black, threading.Lock())
        rows_of: dict[str, PlannedRows] = {}

        def empty_shards() -> Iterator[Shard]:
            for task in tasks:
                name, number = task
                part = plan.layout.parts[name]
                if part.captions:
                    yield CaptionShard(plan, part, number, self.encoders.captions[part.captions.name], wanted_of(task))
                    continue
                if name not in rows_of:
                    rows_of[name] = PlannedRows(plan, part)
                fallbacks, wanted = fallbacks_of(*task), wanted_of(task)
                yield ImageShard(settings, part, number, rows_of[name], fallbacks=fallbacks, wanted=wanted)

        num_at_once = self.decoders.num_at_once if self.source.is_read_by_decoders else FETCHES
        yield from filled(empty_shards(), self.clock, num_at_once=num_at_once, limits=limits, on_batch=on_batch)

    def _tokens(self) -> TokenCount:
        return sum((encoder.computed for encoder in self.encoders.captions.values()), TokenCount())


def filled(
    shards: Iterable[Shard],
    clock: StageClock,
    *,
    num_at_once: int,
    limits: RejectLimits | None = None,
    on_batch: OnBatch = no_batch,
) -> Iterator[Shard]:
    """Load, encode and store the batches of shards, in order; yields each shard when it is full.

    Args:
      num_at_once: inputs that are loaded concurrently.
      limits, on_batch: as for ``Runner.shards``.
    """
    ahead: deque[tuple[Shard, Any, bool, Future[Any]]] = deque()
    behind: deque[tuple[Shard, Any, bool, Future[Outcomes]]] = deque()
    model: CaptionEncoder | None = None
    pools = Pools(
        ThreadPoolExecutor(num_at_once, thread_name_prefix="leandit-load"),
        ThreadPoolExecutor(1, thread_name_prefix="leandit-stack"),
    )
    storing = ThreadPoolExecutor(1, thread_name_prefix="leandit-store")

    def encode_next() -> None:
        nonlocal model
        shard, batch, is_last, inputs = ahead.popleft()
        if model is not None and model is not shard.model:
            model.release()  # two large encoders would not fit
        model, loaded = shard.model, inputs.result()
        if shard.part.captions:
            with clock.measure("text"):
                outputs = shard.encode(batch, loaded)
        else:
            outputs = shard.encode(batch, loaded)
        behind.append((shard, batch, is_last, storing.submit(shard.put, batch, loaded, outputs)))

    def stored(most: int) -> Iterator[Shard]:
        while len(behind) > most:
            shard, batch, is_last, future = behind.popleft()
            outcomes = future.result()
            if limits and outcomes:
                rejects = [(i, key, reject) for i, (key, reject) in enumerate(outcomes) if reject]
                limits.count(len(outcomes), rejects, share=False)
                limits.check()
            on_batch(shard, len(batch))
            if is_last:
                yield shard

    try:
        for shard in shards:
            batches = shard.batches()
            for number, batch in enumerate(batches, 1):
                ahead.append((shard, batch, number == len(batches), shard.load(batch, pools)))
                if len(ahead) > BATCHES_AHEAD:
                    encode_next()
                    yield from stored(BATCHES_BEHIND)
        while ahead:
            encode_next()
            yield from stored(BATCHES_BEHIND)
        yield from stored(0)
    finally:
        for pool in (*pools, storing):
            pool.shutdown(wait=True, cancel_futures=True)
        if model is not None:
            model.release()


class Commits:
    """Commits finished shards in a thread; an error there is raised at the next shard or at the end.

    ``num_images`` counts the images of the shards that this process has committed.
    """

    def __init__(self, writer: StoreWriter, leases: Leases, clock: StageClock) -> None:
        self._writer, self._leases, self._clock, self.num_images = writer, leases, clock, 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="leandit-write")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Commits:
        return self

    def add(self, shard: Shard) -> None:
        """Queue a shard; waits if too many are queued."""
        self._pending.append(self._pool.submit(self._write, shard))
        self._wait(WRITES_BEHIND)

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            self._pending.popleft().result()

    def _write(self, shard: Shard) -> None:
        with self._clock.measure("write"):
            # After a pause others may have taken the lease and committed; their bytes, perhaps of another device, stay.
            if not self._writer.is_committed(shard.task):
                self._writer.commit(
                    *shard.task, shard.arrays, shard.results, rejects=shard.rejects, fallbacks=shard.fallbacks
                )
                if is_picture_task(shard.task):
                    self.num_images += len(self._writer.plan.layout.counted_rows(*shard.task))
            self._leases.release(shard.task)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._wait(0)
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
