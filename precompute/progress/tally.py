"""What the workers of a run tell of their shards, and what it comes to: progress, rejects, who holds which shard.

A worker is a process that encodes: this one, one of several on this machine, or an actor of a cluster. What they tell
is small and plain, so that it can be sent.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...datasets.errors import RecordRejected
from ...datasets.format.layout import is_picture_task
from ...datasets.revisions.commits import Task
from ...datasets.revisions.plan import FrozenPlan
from .clock import Progress
from .rejects import RejectLedger


@dataclass(frozen=True)
class LeaseTaken:
    """The worker will encode a shard, of which it holds the lease."""

    task: Task


@dataclass(frozen=True)
class Committed:
    """A shard that the worker took is committed, and its lease given back.

    Args:
      rejected: keys of its records that were refused.
    """

    task: Task
    rejected: Sequence[str] = ()


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


Event = LeaseTaken | Committed | Encoded | Rejected
EventHandler = Callable[[Event], None]


@dataclass
class _WorkerState:
    """What one worker did that is not committed: the shards that it holds, what is encoded of them, why what is not.

    Args:
      encoded: pictures, and shards of captions, by stage.
      rejected: the reason of each, by key.
    """

    held: list[Task] = field(default_factory=list)
    encoded: Counter[str] = field(default_factory=Counter)
    rejected: dict[str, str] = field(default_factory=dict)


class Tally:
    """Hears all workers of one revision, each from one or more threads.

    What a worker does counts at once, so that progress is seen, and is taken back where the worker is lost before it
    has committed it: others will make it again.

    Args:
      plan: of the revision.
      missing: shards that are to be made.
      ledger: of the revision; rejects of all workers count in it.
      progress: is told the sums.
    """

    def __init__(self, plan: FrozenPlan, missing: Sequence[Task], ledger: RejectLedger, progress: Progress) -> None:
        self._plan, self._ledger, self._progress = plan, ledger, progress
        self._totals = {"pictures": sum(self._size(task) for task in missing if is_picture_task(task))}
        self._totals["captions"] = sum(not is_picture_task(task) for task in missing)
        self._done: Counter[str] = Counter()
        self._workers: dict[str, _WorkerState] = defaultdict(_WorkerState)
        self._committed: set[Task] = set()
        self._lock = threading.Lock()

    @property
    def num_pictures(self) -> int:
        """Pictures that were encoded, of those that were not lost again."""
        return self._done["pictures"]

    def hear(self, worker: str, event: Event) -> None:
        """Count what a worker tells.

        Raises: SourceError: too many records are rejected.
        """
        with self._lock:
            state = self._workers[worker]
            match event:
                case LeaseTaken(task):
                    state.held.append(task)
                case Committed(task, rejected):
                    self._settle(state, task, rejected)
                case Encoded(stage, count):
                    state.encoded[stage] += count
                    self._done[stage] += count
                    self._progress(stage, self._done[stage], self._totals[stage])
                case Rejected(key, stage, reason, detail):
                    state.rejected[key] = reason
                    if refusal := self._ledger.count(key, RecordRejected(stage, reason, detail)):
                        raise refusal

    def drop_worker(self, worker: str) -> list[Task]:
        """Forget a worker that is gone, and what it had not committed.

        Returns: the shards that it held.
        """
        with self._lock:
            state = self._workers.pop(worker, _WorkerState())
            self._done -= state.encoded
            for reason in state.rejected.values():
                self._ledger.forget(reason)
        return state.held

    def _settle(self, state: _WorkerState, task: Task, rejected: Sequence[str]) -> None:
        """What a worker did for a shard stays, unless another one was faster."""
        stage, size = _stage(task), self._size(task)
        state.held.remove(task)
        state.encoded[stage] -= size
        reasons = [state.rejected.pop(key) for key in rejected if key in state.rejected]
        if task in self._committed:
            self._done[stage] -= size
            for reason in reasons:
                self._ledger.forget(reason)
        self._committed.add(task)

    def _size(self, task: Task) -> int:
        return len(self._plan.layout.rows_of(*task)) if is_picture_task(task) else 1


def _stage(task: Task) -> str:
    return "pictures" if is_picture_task(task) else "captions"
