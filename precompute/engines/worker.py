"""A worker: encodes the missing shards of a revision that no other process is encoding, until none is missing.

It runs in this process, in one process for each device (``processes.py``) or in actors of a cluster (``cluster.py``).
Workers share only the leases and commit records in the store's folder, so any of them may die at any time, and every
engine makes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...datasets.errors import LeanditError, RecordRejected, ResourceError
from ...datasets.format.layout import is_picture_task
from ...datasets.revisions.commits import Task
from ...datasets.revisions.plan import read_plan
from ...datasets.revisions.writer import StoreWriter
from ..config import PrecomputeRecipe, SourceSection
from ..encoders.text import TokenCount
from ..encoders.vae import Encoders
from ..progress.clock import StageClock
from ..progress.rejects import RejectLimit
from ..progress.tally import Committed, Encoded, EventHandler, LeaseTaken, Rejected
from ..shards.latent_shard import PackedShard
from ..shards.picture_batches import Origin, PictureDecoders
from ..shards.stages import Background, encode_captions, encode_pictures
from ..sharing.leases import Leases
from ..sources.source import Source

T = TypeVar("T")


@dataclass(frozen=True)
class EncodeRequest:
    """A request to encode shards in another process.

    Args:
      revision: whose frozen plan is in the store's folder.
      source_paths, sources: of the pictures, and how to read them, with the detected kind.
      missing: shards to encode.
      doubted: shards whose commit record is wrong.
    """

    revision: int
    source_paths: tuple[str, ...]
    sources: tuple[SourceSection, ...]
    missing: Sequence[Task]
    doubted: frozenset[Task]

    @classmethod
    def of(cls, writer: StoreWriter, missing: Sequence[Task], source: Source, paths: Sequence[str]) -> EncodeRequest:
        """A request for the missing shards of a revision, from the sources listed at these paths."""
        settings = tuple(part.settings for part in source.parts)
        return cls(writer.plan.revision, tuple(paths), settings, missing, writer.doubted)


@dataclass(frozen=True)
class WorkDone:
    """Result of a request: seconds of each stage, and tokens of the text encoder."""

    seconds: dict[str, float]
    tokens: TokenCount


@dataclass(frozen=True)
class Failed:
    """An error that the user can fix, and that all workers would meet."""

    error: LeanditError


@dataclass(frozen=True)
class Broken:
    """An error that may be the device's or the machine's.

    Args:
      what: the error in words.
      error: of the operating system; all workers of a machine would meet it.
    """

    what: str
    error: OSError | None = None


def outcome(work: Callable[[], T]) -> T | Failed | Broken:
    """Result of a function, or its error in a form that can be sent."""
    try:
        return work()
    except LeanditError as error:
        return Failed(error)
    except MemoryError:
        return Failed(ResourceError("out of memory. Use a smaller batch (see --set)"))
    except Exception as error:  # noqa: BLE001 a broken device may raise anything
        return Broken(f"{type(error).__name__}: {error}", error if isinstance(error, OSError) else None)


@dataclass
class Worker:
    """The encoders, and everything else that a process needs to make shards."""

    recipe: PrecomputeRecipe
    encoders: Encoders
    decoders: PictureDecoders
    clock: StageClock

    def run_request(self, request: EncodeRequest, root: Path, origin: Origin, emit: EventHandler) -> WorkDone:
        """Handle a request, with a plan frozen by another process; raises as ``encode``."""
        caption, before = self.encoders.caption, dict(self.clock.seconds)
        tokens = caption.computed if caption else TokenCount()
        writer = StoreWriter(root, read_plan(root, request.revision), doubted=request.doubted)
        self.encode(writer, request.missing, origin, emit)
        seconds = {stage: so_far - before.get(stage, 0.0) for stage, so_far in self.clock.seconds.items()}
        return WorkDone(seconds, caption.computed - tokens if caption else tokens)

    def encode(self, writer: StoreWriter, missing: Sequence[Task], origin: Origin, emit: EventHandler) -> None:
        """Encode the missing shards of a revision, decoding ahead and writing behind, until all are committed.

        Args:
          writer: of the revision.
          missing: shards to encode; waits for those that other workers hold.
          origin: of the pictures.
          emit: called with the events of each shard and picture, from several threads; checks the share of rejects.
        Raises: SourceError: too many pictures in a row are rejected.
        """

        def refuse(key: str, reject: RecordRejected) -> None:
            emit(Rejected(key, reject.stage, reject.reason, reject.detail))

        def committed(shard: PackedShard) -> None:
            emit(Committed((shard.part, shard.shard), [reject.key for reject in shard.rejects]))

        plan = writer.plan
        limit = RejectLimit(self.recipe.source, None, on_reject=refuse)  # the tally checks the share
        with Leases(writer, on_taken=lambda task: emit(LeaseTaken(task))) as leases:
            while missing:
                with Background(writer, leases, self.clock, on_commit=committed) as background:
                    if self.encoders.caption:
                        texts = [task for task in missing if not is_picture_task(task)]
                        for shard in encode_captions(plan, leases.take(texts), self.encoders.caption, self.clock):
                            emit(Encoded("captions", 1))
                            background.commit(shard)
                    for shard in encode_pictures(
                        plan,
                        leases.take([task for task in missing if is_picture_task(task)]),
                        self.encoders.image,
                        self.decoders,
                        origin,
                        limit=limit,
                        clock=self.clock,
                        progress=lambda count: emit(Encoded("pictures", count)),
                    ):
                        background.commit(shard)
                if missing := [task for task in missing if not writer.is_committed(task)]:
                    leases.wait()  # for other workers
