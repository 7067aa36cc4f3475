"""How far a revision is: what this process encodes, and what other processes commit meanwhile."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...datasets.errors import RecordRejected
from ...datasets.format.layout import Task, is_picture_task
from ...datasets.format.schema import Reject
from ...datasets.revisions.writer import StoreWriter
from ..encoders.text.encoder import TokenCount
from .clock import REJECTED, Progress
from .rejects import RejectLedger

CAPTIONS, PICTURES = "caption shards", "pictures"  # stages, by what they count
LOOK_SHARE = 0.05  # of the time at most, for looking what others have committed


@dataclass
class Work:
    """What one process has done so far; picklable.

    Args:
      num_encoded: pictures in the shards that it has committed.
      num_commits: these shards.
      seconds: of each stage, summed over threads.
      tokens: that went through its text encoder.
      held: shards that it is encoding.
    """

    num_encoded: int = 0
    num_commits: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: TokenCount = field(default_factory=TokenCount)
    held: list[Task] = field(default_factory=list)


class Tally:
    """Counts the shards of one revision, from any thread: those that this process encodes, and others' commit records.

    Args:
      writer: of the revision.
      missing: shards to encode.
      ledger: counts the rejects of all processes.
      progress: called with the sums, and whenever ``work`` changes.
      work: of this process; updated here.
    """

    def __init__(
        self, writer: StoreWriter, missing: Sequence[Task], ledger: RejectLedger, progress: Progress, work: Work
    ) -> None:
        self._writer, self._ledger, self._progress, self._work = writer, ledger, progress, work
        self._layout, rows_of = writer.plan.layout, writer.plan.layout.rows_of
        self._sizes = {task: len(rows_of(*task)) if is_picture_task(task) else 1 for task in missing}
        self._missing = set(missing)
        self._totals, self._committed, self._encoded = Counter[str](), Counter[str](), Counter[str]()
        for task, size in self._sizes.items():
            self._totals[_stage(task)] += size
        self._pending: dict[str, str] = {}  # reasons of rejects that are not committed yet, by key
        self._rejected: set[str] = set()  # keys; another part of the revision may have the same record
        self._counted = writer.reject_reasons
        self._lock, self._next_look, self._shown_rejects = threading.Lock(), 0.0, 0

    def take(self, task: Task) -> None:
        """This process begins a shard, whose lease it holds."""
        with self._lock:
            self._work.held.append(task)
            self._show(_stage(task))

    def encode(self, stage: str, count: int) -> None:
        """This process has encoded pictures, or a shard of captions."""
        with self._lock:
            self._encoded[stage] += count
            self._show(stage)

    def reject(self, key: str, reject: RecordRejected) -> None:
        """This process has rejected a record.

        Raises: SourceError: all processes together have rejected too many.
        """
        with self._lock:
            if key in self._rejected:
                return
            self._rejected.add(key)
            self._pending[key] = reject.reason
            if refusal := self._ledger.count(key, reject):
                raise refusal

    def commit(self, task: Task, rejects: Iterable[Reject], *, is_own: bool) -> None:
        """This process has finished a shard.

        Args:
          is_own: this process committed it; otherwise another one was faster.
        Raises: SourceError: as ``reject``.
        """
        with self._lock:
            stage, size = _stage(task), self._sizes[task]
            self._work.held.remove(task)
            self._encoded[stage] -= size
            counted = self._layout.counted_rows(*task) if stage == PICTURES else range(0)
            for reject in rejects:
                if (reason := self._pending.pop(reject.key, None)) is None:
                    continue
                if is_own and reject.row in counted:
                    self._counted[reason] += 1
                else:
                    self._ledger.forget(reason)  # its record is counted
            if is_own:
                self._work.num_commits += 1
                self._work.num_encoded += len(counted)
            self._settle([task])
            self._look()
            self._show(stage)

    def look(self) -> None:
        """Count what other processes have committed.

        Raises: SourceError: as ``reject``.
        """
        with self._lock:
            self._next_look = 0.0
            self._look()
            for stage in self._totals:
                self._show(stage)

    def _look(self) -> None:
        if (start := time.monotonic()) < self._next_look:
            return
        self._settle([task for task in self._missing if self._writer.is_committed(task)])
        committed = self._writer.reject_reasons
        self._ledger.add(committed - self._counted)
        self._counted = committed
        self._next_look = time.monotonic() + (time.monotonic() - start) / LOOK_SHARE
        self._ledger.check()

    def _settle(self, tasks: Iterable[Task]) -> None:
        for task in self._missing.intersection(tasks):
            self._missing.remove(task)
            self._committed[_stage(task)] += self._sizes[task]

    def _show(self, stage: str) -> None:
        if (rejected := self._ledger.num_rejected) != self._shown_rejects:
            self._shown_rejects = rejected
            self._progress(REJECTED, rejected, 0)
        total = self._totals[stage]
        self._progress(stage, min(total, self._committed[stage] + self._encoded[stage]), total)


def _stage(task: Task) -> str:
    return PICTURES if is_picture_task(task) else CAPTIONS
