"""One worker of stage 1: encodes the missing shards of a revision that nobody else is encoding, until none is missing.

Which process it is, and how it tells what it does, is the matter of an engine: this process itself, one process for
each device (``processes.py``), or actors of a cluster (``cluster.py``). Workers know nothing of each other but the
leases and the commit records in the store's folder, so any of them may end at any time, and every engine ends in the
same bytes.
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
    """What a worker elsewhere is asked to do; all of it is found again in the store's folder.

    Args:
      revision: whose plan is frozen there.
      source_paths, sources: of the pictures, which are read by their places; how, with the kind that was found.
      missing: the shards to make.
      doubted: shards with a commit record that does not hold.
    """

    revision: int
    source_paths: tuple[str, ...]
    sources: tuple[SourceSection, ...]
    missing: Sequence[Task]
    doubted: frozenset[Task]

    @classmethod
    def of(cls, writer: StoreWriter, missing: Sequence[Task], source: Source, paths: Sequence[str]) -> EncodeRequest:
        """To make what is missing of a revision, from a source, or several, listed at these paths."""
        settings = tuple(part.settings for part in source.parts)
        return cls(writer.plan.revision, tuple(paths), settings, missing, writer.doubted)


@dataclass(frozen=True)
class WorkDone:
    """What a worker did in one go: seconds of each stage, and what went through its text encoder."""

    seconds: dict[str, float]
    tokens: TokenCount


@dataclass(frozen=True)
class Failed:
    """A worker met an error that a user can mend: all the others would."""

    error: LeanditError


@dataclass(frozen=True)
class Broken:
    """A worker met an error that may be its device's or its machine's.

    Args:
      what: it was, in words.
      error: of the operating system, as the worker met it; workers of one machine would all meet it.
    """

    what: str
    error: OSError | None = None


def outcome(work: Callable[[], T]) -> T | Failed | Broken:
    """What a function gives, or what it raised, as something that can be sent."""
    try:
        return work()
    except LeanditError as error:
        return Failed(error)
    except MemoryError:
        return Failed(ResourceError("out of memory. Use a smaller batch (see --set)"))
    except Exception as error:  # noqa: BLE001 the edge of a process: a broken device raises whatever it likes
        return Broken(f"{type(error).__name__}: {error}", error if isinstance(error, OSError) else None)


@dataclass
class Worker:
    """The encoders and all else that a process needs to make shards."""

    recipe: PrecomputeRecipe
    encoders: Encoders
    decoders: PictureDecoders
    clock: StageClock

    def run_request(self, request: EncodeRequest, root: Path, origin: Origin, emit: EventHandler) -> WorkDone:
        """Do what is asked for, with a plan that another process has frozen; raises as ``encode``."""
        caption, before = self.encoders.caption, dict(self.clock.seconds)
        tokens = caption.computed if caption else TokenCount()
        writer = StoreWriter(root, read_plan(root, request.revision), doubted=request.doubted)
        self.encode(writer, request.missing, origin, emit)
        seconds = {stage: so_far - before.get(stage, 0.0) for stage, so_far in self.clock.seconds.items()}
        return WorkDone(seconds, caption.computed - tokens if caption else tokens)

    def encode(self, writer: StoreWriter, missing: Sequence[Task], origin: Origin, emit: EventHandler) -> None:
        """Encode what is missing of a revision, decoding ahead and writing behind; ends when all of it is committed.

        Args:
          writer: of the revision.
          missing: the shards to make; those that others hold are waited for.
          origin: of the pictures.
          emit: hears of each shard and picture, from several threads; it looks at the share of rejects.
        Raises: SourceError: too many pictures in a row are rejected.
        """

        def refuse(key: str, reject: RecordRejected) -> None:
            emit(Rejected(key, reject.stage, reject.reason, reject.detail))

        def committed(shard: PackedShard) -> None:
            emit(Committed((shard.part, shard.shard), [reject.key for reject in shard.rejects]))

        plan = writer.plan
        limit = RejectLimit(self.recipe.source, None, on_reject=refuse)  # the share holds for all workers together
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
