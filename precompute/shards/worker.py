"""A worker: encodes the missing shards of a revision that no other process is encoding, until none is missing.

Workers share only the leases and commit records in the store's folder, so any of them may die at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...datasets.format.layout import Task, is_picture_task
from ...datasets.revisions.writer import StoreWriter
from ..config import SourceSection
from ..encoders.loading import Encoders
from ..encoders.text.encoder import TokenCount
from ..images.decoders import Decoders
from ..progress.clock import Progress, StageClock
from ..progress.rejects import RejectLimit, ledger_of
from ..progress.tally import CAPTIONS, PICTURES, Tally, Work
from ..sharing.leases import Leases
from ..sources.source import OpenedSource
from .latent_shard import PackedShard
from .stages import Background, encode_captions, encode_pictures


@dataclass
class Worker:
    """The encoders of this process, and what it has done.

    Args:
      num_decoders: pictures that it decodes concurrently while it encodes.
      clock: its seconds are those of ``work``.
    """

    encoders: Encoders
    num_decoders: int
    clock: StageClock = field(default_factory=StageClock)

    def __post_init__(self) -> None:
        self.work = Work(seconds=self.clock.seconds)
        self._before = self._tokens()

    def snapshot(self) -> Work:
        """What it has done, as a copy."""
        work, tokens = self.work, self._tokens() - self._before
        return replace(work, seconds=dict(work.seconds), held=list(work.held), tokens=tokens)

    def encode(
        self,
        writer: StoreWriter,
        missing: Sequence[Task],
        source: OpenedSource,
        decoders: Decoders,
        *,
        section: SourceSection,
        progress: Progress,
    ) -> None:
        """Encode the missing shards of a revision, decoding ahead and writing behind, until all are committed.

        Args:
          writer: of the revision.
          section: limits of rejects.
          progress: called with what is done of ``missing``, here and by others.
        Raises: SourceError: too many records are rejected.
        """
        plan, tally = writer.plan, Tally(writer, missing, ledger_of(section, writer), progress, self.work)
        limit = RejectLimit(section, None, on_reject=tally.reject)  # the tally checks the share

        def committed(shard: PackedShard, is_own: bool) -> None:
            tally.commit((shard.part, shard.shard), shard.rejects, is_own=is_own)

        with Leases(writer, on_taken=tally.take) as leases:
            while missing:
                with Background(writer, leases, self.clock, on_commit=committed) as background:
                    texts = [task for task in missing if not is_picture_task(task)]
                    for shard in encode_captions(plan, leases.take(texts), self.encoders.captions, self.clock):
                        tally.encode(CAPTIONS, 1)
                        background.commit(shard)
                    for shard in encode_pictures(
                        plan,
                        leases.take([task for task in missing if is_picture_task(task)]),
                        self.encoders,
                        decoders,
                        source,
                        limit=limit,
                        clock=self.clock,
                        progress=lambda count: tally.encode(PICTURES, count),
                        num_at_once=self.num_decoders,
                    ):
                        background.commit(shard)
                if missing := [task for task in missing if not writer.is_committed(task)]:
                    leases.wait()  # for other workers
                tally.look()

    def _tokens(self) -> TokenCount:
        return sum((encoder.computed for encoder in self.encoders.captions.values()), TokenCount())
