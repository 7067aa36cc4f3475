"""The runner: fills the missing shards of a revision that no other process is filling, until none is missing.

While a batch is in the encoder, the inputs of later ones are loaded and the rows of the one before are stored; finished
shards are committed in a thread behind. Processes share only the leases and commit records in the store's folder, so
any of them may die at any time.
"""

from __future__ import annotations

import logging
import shutil
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...datasets.format.layout import COMMITS, Task, is_image_task, revision_prefix
from ...datasets.format.schema import Manifest
from ...datasets.format.table_schemas import STORED
from ...datasets.revisions.catalog import sweep_store
from ...datasets.revisions.plan import FrozenPlan
from ...datasets.revisions.writer import StoreWriter
from ...errors import ResourceError, SourceError
from ...units import readable_size
from ..config import SourceSection, StoreSection
from ..encoders.loading import Encoders
from ..encoders.text.encoder import CaptionEncoder, TokenCount
from ..images.decoders import Decoders
from ..images.pixels import PROFILE_IGNORED
from ..sharing.leases import Leases, seal_alone
from ..sources.listing.listing import with_places
from ..sources.source import OpenedSource, Source
from .clock import Progress, StageClock
from .columns import image_columns
from .inputs import ImageReader, PartImages
from .progress import RunProgress
from .rejects import limits_of
from .shards import CaptionShard, ImageShard, Outcomes, Pools, Shard

LOG = logging.getLogger(__name__)
MOST_SHOWN = 20  # shards in a line of the log
BATCHES_AHEAD = 3  # loaded batches that wait for the encoder
BATCHES_BEHIND = 1  # encoded batches that wait to be stored
FETCHES = 64  # in flight, of images that this process reads for the decoders, as from a URL
WRITES_BEHIND = 2  # shards that wait for the disk

Wanted = Mapping[Task, Set[int]]
"""By task, the rows or captions whose batches alone are encoded; of other tasks all are."""


@dataclass(kw_only=True)
class ShardRunner(ABC):
    """Fills shards.

    Attributes:
      clock: seconds of each stage.
      num_encoded: images in the shards that this process has committed.
      num_ignored_profiles: those of them whose color profile could not be used.
      num_left: shards that were left to other parts.
      num_low_quality: captions that were stored although a token's cosine is below ``store.min_text_cosine``.
      store: the section of the recipe.
    """

    clock: StageClock = field(default_factory=StageClock)
    num_encoded: int = 0
    num_ignored_profiles: int = 0
    num_left: int = 0
    num_low_quality: int = 0
    store: StoreSection = field(default_factory=StoreSection)

    @property
    @abstractmethod
    def num_at_once(self) -> int:
        """Inputs that are loaded concurrently."""

    @abstractmethod
    def empty_shards(self, plan: FrozenPlan, tasks: Iterable[Task], remade: Wanted | None = None) -> Iterator[Shard]:
        """Shards to be filled, in the given order.

        Args:
          remade: they were made before, and each row is encoded as it was then; these rows' batches alone.
        """

    @abstractmethod
    def remake(self, plan: FrozenPlan, tasks: Iterable[Task], wanted: Wanted | None = None) -> Iterator[Shard]:
        """Fill shards of a sealed revision again.

        Raises: SourceError: the revision is of another source.
        """

    def complete(
        self, writer: StoreWriter, own: Sequence[Task], *, section: SourceSection, progress: Progress
    ) -> Manifest | None:
        """Fill the missing shards of a revision and seal it.

        Args:
          own: the shards of this process's part.
          section: limits of rejects.
          progress: as for ``run``.
        Returns: its manifest; None if other parts still have shards to fill.
        Raises: SourceError: too many records are rejected, by all processes together, or all of the first revision;
          ResourceError: the disk is too small.
        """
        plan, missing = writer.plan, writer.missing_tasks(own)
        _log_shards(plan, own, missing)
        if missing:
            limits_of(section, writer).check()
        check_disk(writer, missing)
        Leases(writer).sweep()  # left by processes that died

        def fill(missing: list[Task]) -> None:
            while missing:
                self.run(writer, missing, section=section, progress=progress)
                sweep_store(writer.root)  # left by lost workers
                missing = writer.missing_tasks(missing)

        fill(missing)
        self.num_left = len(writer.missing_tasks())
        if not writer.is_sealed:
            limits_of(section, writer).check()
        if self.num_left:
            return None
        if not writer.num_stored and not plan.before:
            raise SourceError(
                f"store '{writer.root}': none of {plan.records.num_rows} records could be stored, so it is not sealed. "
                "Check one of them in the source; the reasons are in "
                f"'{writer.root / revision_prefix(plan.revision) / COMMITS}'."
            )
        return seal_alone(writer, fill, lambda: progress("others seal", 0, 1))

    def run(self, writer: StoreWriter, missing: Sequence[Task], *, section: SourceSection, progress: Progress) -> None:
        """Fill the missing shards of a revision until all are committed, here or by others.

        Args:
          section: limits of rejects.
          progress: called with what is done of ``missing``, here and by others.
        Raises: SourceError: too many records are rejected.
        """
        done = RunProgress(writer, missing, limits_of(section, writer), progress)
        with Leases(writer) as leases:
            while missing:
                with closing(Lane("leandit-write")) as commits:
                    shards = self.empty_shards(writer.plan, leases.take(list(missing)))
                    for shard in self.filled(shards, on_batch=done.add):
                        commits.submit(self._commit, writer, leases, shard)
                        commits.wait(WRITES_BEHIND)
                    commits.wait()
                if missing := writer.missing_tasks(missing):
                    leases.wait()  # for other processes
                done.look()

    def _commit(self, writer: StoreWriter, leases: Leases, shard: Shard) -> None:
        with self.clock.measure("write"):
            num_committed = commit_shard(writer, leases, shard)
        if shard.part.captions and not shard.part.is_null:
            self._announce_quality(writer.plan, shard)
        self.num_encoded += num_committed
        if num_committed:
            self.num_ignored_profiles += sum(PROFILE_IGNORED in fallback.how for fallback in shard.fallbacks)

    def _announce_quality(self, plan: FrozenPlan, shard: Shard) -> None:
        """Count the captions of low quality that a shard stores, and log the first of all."""
        results = shard.results[:, 0]
        is_low = (results["min_cosine"] < self.store.min_text_cosine) & (results["state"] == STORED)
        if is_low.any() and not self.num_low_quality:
            assert shard.part.captions is not None
            item = int(np.argmax(is_low))
            text = plan.captions_of(shard.part)["text"][shard.items[item]].as_py()
            LOG.warning(
                "%s: caption %r: a token has a cosine of %.4f with the encoder's, without its largest 1 %%; expected "
                "store.min_text_cosine = %g. This and further such captions are stored. Another store.text_dtype loses "
                "less, or see store.on_low_quality",
                shard.part.name,
                text[:80],
                results["min_cosine"][item],
                self.store.min_text_cosine,
            )
        self.num_low_quality += int(is_low.sum())

    def filled(
        self, shards: Iterable[Shard], *, on_batch: Callable[[Shard, int, Outcomes], None] = lambda *_: None
    ) -> Iterator[Shard]:
        """Load, encode and store the batches of shards, in order; yields each shard when it is full.

        A text encoder is in memory only while its shards last.

        Args:
          shards: those of captions first.
          on_batch: called with each stored batch: its shard, its number of items, and what became of them.
        """
        ahead: deque[tuple[Shard, Any, bool, Future[Any]]] = deque()
        model: CaptionEncoder | None = None
        pools = Pools(
            ThreadPoolExecutor(self.num_at_once, thread_name_prefix="leandit-load"),
            ThreadPoolExecutor(1, thread_name_prefix="leandit-stack"),
        )
        storing = Lane("leandit-store")

        def encode_next() -> None:
            nonlocal model
            shard, batch, is_last, inputs = ahead.popleft()
            if model is not None and model is not shard.model:
                model.release()  # two large encoders would not fit
            model, loaded = shard.model, inputs.result()
            with self.clock.measure(shard.stage):
                outputs = shard.encode(batch, loaded)
            storing.submit(lambda: (shard, len(batch), is_last, shard.put(batch, loaded, outputs)))

        def stored(most_pending: int) -> Iterator[Shard]:
            for shard, count, is_last, outcomes in storing.results(most_pending):
                on_batch(shard, count, outcomes)
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
            for pool in pools:
                pool.shutdown(wait=True, cancel_futures=True)
            storing.close()
            if model is not None:
                model.release()


def check_disk(writer: StoreWriter, missing: list[Task]) -> None:
    """Raise if the disk cannot hold the missing shards, uncompressed.

    Raises: ResourceError.
    """
    needed = writer.plan.layout.num_bytes(missing)
    free = shutil.disk_usage(writer.root).free
    if needed > free:
        raise ResourceError(
            f"store '{writer.root}': the disk has {readable_size(free)} free, the store needs "
            f"{readable_size(needed)} more. Free some space, or pass a --store on another disk; the same command then "
            "resumes."
        )


def _log_shards(plan: FrozenPlan, own: Sequence[Task], missing: Sequence[Task]) -> None:
    buckets = ", ".join(f"{name}: {count}" for name, count in plan.new_rows.items())
    LOG.info("revision %d, images of each bucket: %s", plan.revision, buckets)
    done = [task for task in own if task not in set(missing)]
    for what, tasks in {"committed and skipped": done, "missing": missing}.items():
        shown = ", ".join(f"{part} {shard}" for part, shard in tasks[:MOST_SHOWN]) or "none"
        more = f" and {len(tasks) - MOST_SHOWN} more" if len(tasks) > MOST_SHOWN else ""
        LOG.info("revision %d, shards %s (%d): %s%s", plan.revision, what, len(tasks), shown, more)


def commit_shard(writer: StoreWriter, leases: Leases, shard: Shard) -> int:
    """Commit a shard, unless another process has, and release its lease; the number of its images that are committed.

    After a pause others may have taken the lease and committed; their bytes, perhaps of another device, stay.
    """
    is_new = not writer.is_committed(shard.task)
    if is_new:
        reasons = {"rejects": shard.rejects, "fallbacks": shard.fallbacks}
        writer.commit(*shard.task, shard.arrays, shard.results, **reasons)
    leases.release(shard.task)
    return len(writer.plan.layout.counted_rows(*shard.task)) if is_new and is_image_task(shard.task) else 0


class Lane:
    """A thread that works in order; results, and errors, come back in the same order."""

    def __init__(self, name: str) -> None:
        self._pool, self._pending = ThreadPoolExecutor(1, thread_name_prefix=name), deque[Future[Any]]()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Queue a call."""
        self._pending.append(self._pool.submit(work, *arguments))

    def results(self, most_pending: int = 0) -> Iterator[Any]:
        """Results of the oldest calls, until at most some calls are pending."""
        while len(self._pending) > most_pending:
            yield self._pending.popleft().result()

    def wait(self, most_pending: int = 0) -> None:
        """Wait until at most some calls are pending, and drop their results."""
        for _ in self.results(most_pending):
            pass

    def close(self) -> None:
        """Cancel what has not begun, and wait for the rest."""
        self._pool.shutdown(wait=True, cancel_futures=True)


@dataclass
class Runner(ShardRunner):
    """Encodes: encoders, decoders and the source."""

    encoders: Encoders
    decoders: Decoders
    source: OpenedSource

    def __post_init__(self) -> None:
        for encoder in self.encoders.captions.values():
            encoder.computed = TokenCount()

    @property
    def tokens(self) -> TokenCount:
        """Tokens that went through the text encoders since this was made."""
        return TokenCount.total(encoder.computed for encoder in self.encoders.captions.values())

    @property
    def num_at_once(self) -> int:
        """Images that are read and decoded concurrently."""
        return self.decoders.num_at_once if self.source.is_read_by_decoders else FETCHES

    def empty_shards(self, plan: FrozenPlan, tasks: Iterable[Task], remade: Wanted | None = None) -> Iterator[Shard]:
        """Shards of images or captions to be encoded."""
        reader = ImageReader(plan.spec.images, self.source, self.decoders, self.clock)
        columns, images_of = image_columns(self.encoders, plan.spec.latent), dict[str, PartImages]()
        for task in tasks:
            (name, number), wanted = task, (remade or {}).get(task)
            part = plan.layout.parts[name]
            if part.captions:
                yield CaptionShard(
                    plan,
                    part,
                    number,
                    encoder=self.encoders.captions[part.captions.name],
                    wanted=wanted,
                    rejects_below=self.store.min_text_cosine if self.store.on_low_quality == "reject" else -1.0,
                )
                continue
            if name not in images_of:
                images_of[name] = PartImages(plan, part, reader)
            how = {"again": remade is not None, "wanted": wanted}
            yield ImageShard(images_of[name], number, columns, self.encoders.image.black, **how)

    def remake(self, plan: FrozenPlan, tasks: Iterable[Task], wanted: Wanted | None = None) -> Iterator[Shard]:
        """Encode shards of a sealed revision again, from where their images are in the source now."""
        assert isinstance(self.source, Source), "the source is listed"
        if tasks := sorted(tasks, key=is_image_task):
            plan = with_places(plan, self.source.records, list(self.source.companions))
        yield from self.filled(self.empty_shards(plan, tasks, wanted or {}))
