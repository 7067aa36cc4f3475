"""Events of the workers of a run, and what they add up to: progress, rejects, and which worker holds which shard.

A worker is a process that encodes: this one, one of several on this machine, or an actor of a cluster. Events are small
and picklable.
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
    """The worker holds the lease of a shard and will encode it."""

    task: Task


@dataclass(frozen=True)
class Committed:
    """The worker has committed a shard and released its lease.

    Args:
      rejected: keys of its rejected records.
    """

    task: Task
    rejected: Sequence[str] = ()


@dataclass(frozen=True)
class Encoded:
    """A number of pictures, or shards of captions, was encoded."""

    stage: str
    count: int


@dataclass(frozen=True)
class Rejected:
    """A record was rejected; the fields are those of ``RecordRejected``."""

    key: str
    stage: str
    reason: str
    detail: str


Event = LeaseTaken | Committed | Encoded | Rejected
EventHandler = Callable[[Event], None]


@dataclass
class _WorkerState:
    """Uncommitted work of one worker.

    Args:
      held: shards that it holds.
      encoded: pictures, and shards of captions, by stage.
      rejected: reason of each reject, by key.
    """

    held: list[Task] = field(default_factory=list)
    encoded: Counter[str] = field(default_factory=Counter)
    rejected: dict[str, str] = field(default_factory=dict)


class Tally:
    """Counts the events of all workers of one revision, from any thread.

    Work counts at once, for progress, and is subtracted if its worker is lost before the commit: others will repeat it.

    Args:
      plan: of the revision.
      missing: shards to encode.
      ledger: counts the rejects of all workers.
      progress: called with the sums.
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
        """Encoded pictures, without those of lost workers."""
        return self._done["pictures"]

    def count(self, worker: str, event: Event) -> None:
        """Count an event.

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
        """Forget a lost worker and its uncommitted work.

        Returns: the shards that it held.
        """
        with self._lock:
            state = self._workers.pop(worker, _WorkerState())
            self._done -= state.encoded
            for reason in state.rejected.values():
                self._ledger.forget(reason)
        return state.held

    def _settle(self, state: _WorkerState, task: Task, rejected: Sequence[str]) -> None:
        """Keep a worker's counts for a shard, unless another worker committed it first."""
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
