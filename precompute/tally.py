"""What the workers of a run tell of their shards, and what it comes to: progress, rejects, who holds which shard.

A worker is a process that encodes: this one, one of several on this machine, or an actor of a cluster. What they tell
is small and plain, so that it can be sent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..datasets.commits import Task
from ..datasets.errors import RecordRejected
from ..datasets.frozen import FrozenPlan
from .config import SourceSection
from .rejects import RejectLimit
from .stages import Progress, is_picture_task


@dataclass(frozen=True)
class Took:
    """The worker holds the lease of a shard, and will encode it."""

    task: Task


@dataclass(frozen=True)
class LetGo:
    """The worker does not hold the lease any more: the shard is committed, or the worker ends."""

    task: Task


@dataclass(frozen=True)
class Encoded:
    """So many pictures, or shards of captions, went through the encoder."""

    stage: str
    count: int


@dataclass(frozen=True)
class Rejected:
    """A record was refused; the names are those of ``RecordRejected``."""

    key: str
    stage: str
    reason: str
    detail: str


Event = Took | LetGo | Encoded | Rejected
Tell = Callable[[Event], None]


def tell_nobody(event: Event) -> None:
    """For work that nobody watches."""


@dataclass
class _Watched:
    """What is known of one worker: the shards that it holds, and the pictures in them that are encoded."""

    held: list[Task] = field(default_factory=list)
    encoded: Counter[str] = field(default_factory=Counter)


class Tally:
    """Hears all workers of one revision.

    Args:
      plan: of the revision.
      missing: shards that are to be made.
      section: of the recipe; its largest share of rejects holds for all workers together.
      num_rejected: records that were rejected before.
      progress: is told the sums.
    """

    def __init__(
        self, plan: FrozenPlan, missing: Sequence[Task], section: SourceSection, num_rejected: int, progress: Progress
    ) -> None:
        self._plan, self._progress = plan, progress
        self._totals = {"pictures": sum(self._size(task) for task in missing if is_picture_task(task))}
        self._totals["captions"] = sum(not is_picture_task(task) for task in missing)
        self._done: Counter[str] = Counter()
        self._watched: dict[str, _Watched] = defaultdict(_Watched)
        # Only a worker knows what came in a row, and stops by itself.
        share = section.model_copy(update={"max_rejects_in_a_row": 1 << 62})
        self._limit = RejectLimit(share, plan.records.num_rows, num_rejected)

    @property
    def num_pictures(self) -> int:
        """Pictures that were encoded, of those that were not lost again."""
        return self._done["pictures"]

    def hear(self, worker: str, event: Event) -> None:
        """Count what a worker tells.

        Raises: SourceError: too many records are rejected.
        """
        watched = self._watched[worker]
        match event:
            case Took(task):
                watched.held.append(task)
            case LetGo(task) if task in watched.held:
                watched.held.remove(task)
                watched.encoded[_stage(task)] -= self._size(task)
            case Encoded(stage, count):
                watched.encoded[stage] += count
                self._done[stage] += count
                self._progress(stage, self._done[stage], self._totals[stage])
            case Rejected():
                reject = RecordRejected(event.stage, event.reason, event.detail)
                self._limit.count(event.key, reject)

    def lose(self, worker: str) -> list[Task]:
        """Forget a worker that is gone, and what it had not committed.

        Returns: the shards that it held.
        """
        watched = self._watched.pop(worker, _Watched())
        for stage, count in watched.encoded.items():
            self._done[stage] -= max(0, count)
        return watched.held

    def _size(self, task: Task) -> int:
        return len(self._plan.layout.rows_of(*task)) if is_picture_task(task) else 1


def _stage(task: Task) -> str:
    return "pictures" if is_picture_task(task) else "captions"
