"""How far a revision is, from the commit records of all processes and the batches of this one.

Rejects count before their shard is committed, so a source that breaks stops the run before its rejects are permanent.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from ...datasets.format.layout import Task, is_image_task
from ...datasets.revisions.writer import StoreWriter
from .clock import REJECTED, Progress
from .rejects import RejectLimits, planned_rejects
from .shards import Outcomes, Shard

CAPTIONS, IMAGES = "captions", "images"  # stages, by what they count
LOOK_SHARE = 0.05  # of the time at most, for reading what others have committed


class RunProgress:
    """Counts records and captions of the missing shards of a revision; used by one thread.

    Args:
      limits: gets the rejects of all committed shards.
      show: called with the sums, which never go back.
    """

    def __init__(self, writer: StoreWriter, missing: Sequence[Task], limits: RejectLimits, show: Progress) -> None:
        self._writer, self._limits, self._show = writer, limits, show
        self._sizes = {task: len(writer.plan.layout.parts[task[0]].items(task[1])) for task in missing}
        self._left, self._encoded = set(missing), Counter[Task]()
        self._pending: dict[Task, Counter[str]] = {}  # rejects of the shards of this process, by reason
        self._planned, self._next_look, self._shown = planned_rejects(writer.plan), 0.0, Counter[str]()

    def add(self, shard: Shard, count: int, outcomes: Outcomes) -> None:
        """This process has encoded some more items of a shard, which is not committed yet.

        Args:
          outcomes: of records or captions.
        Raises: SourceError: it has rejected too many in a row, or all processes together too many records.
        """
        if outcomes:
            in_order = [(i, key, reject) for i, (key, reject) in enumerate(outcomes) if reject]
            self._limits.count(len(outcomes), in_order, share=False)
            self._limits.check()
        self._encoded[shard.task] += count
        if rejects := list(shard.rejects):
            layout = self._writer.plan.layout
            counted = layout.counted_rows(*shard.task) if is_image_task(shard.task) else None
            reasons = (one.reason for one in rejects if counted is None or one.row in counted)
            self._pending[shard.task] = Counter(reasons)  # of captions, of which each is in a record at least
        self.look(_stage(shard.task))

    def look(self, stage: str = "") -> None:
        """Read the commit records again, unless that was a moment ago, and show a stage; without one, show all.

        Raises: SourceError: as ``add``.
        """
        start = time.monotonic()
        if start >= self._next_look or not stage:
            self._left = {task for task in self._left if not self._writer.is_committed(task)}
            self._next_look = time.monotonic() + (time.monotonic() - start) / LOOK_SHARE
        pending = (reasons for task, reasons in self._pending.items() if not self._writer.is_committed(task))
        self._limits.rejected = sum(pending, self._planned + self._writer.reject_reasons)
        self._limits.check_share()
        if (rejected := self._limits.rejected.total()) != self._shown[REJECTED]:
            self._show(REJECTED, rejected, 0)
            self._shown[REJECTED] = rejected
        for each in [stage] if stage else dict.fromkeys(map(_stage, self._sizes)):
            tasks = [task for task in self._sizes if _stage(task) == each]
            done = sum(
                min(self._encoded[one], self._sizes[one]) if one in self._left else self._sizes[one] for one in tasks
            )
            self._shown[each] = max(done, self._shown[each])
            self._show(each, self._shown[each], sum(self._sizes[task] for task in tasks))
        self._limits.check()


def _stage(task: Task) -> str:
    return IMAGES if is_image_task(task) else CAPTIONS
