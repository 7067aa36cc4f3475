"""Limits on rejects: too many are a sign that something is wrong with the source, and stage 1 stops.

A revision has one ledger: rejects of listing, planning, decoding and encoding, by all processes, count together against
``source.max_reject_share``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute

from ...datasets.errors import RecordRejected, SourceError
from ...datasets.revisions.writer import StoreWriter
from ..config import SourceSection

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

SMALL_NUMBER = 10  # rejects that are always allowed, unless they are more than half: one of twenty is 5 %
CHANGED_HINT = (
    "Files of the source were cut short, replaced or rewritten after the plan was made (source_changed): restore them "
    "and run the same command again."
)


class RejectLedger:
    """Counts the rejects of one revision in any order, so it can count for several processes.

    Args:
      section: of the recipe: the maximum share.
      total: records of the revision.
      carried: rejects carried over from the previous revision, by reason: they count, but without new rejects a
        revision is never stopped.
      rejected: rejects of this revision so far, by reason.
      hint: called with the reasons if there are too many; returns advice for the message.
      planning: nothing is encoded yet.
    """

    def __init__(
        self,
        section: SourceSection,
        total: int,
        *,
        carried: Mapping[str, int] | None = None,
        rejected: Mapping[str, int] | None = None,
        hint: Callable[[Mapping[str, int]], str] = lambda reasons: "",
        planning: bool = False,
    ) -> None:
        self._section, self._total, self._hint, self.planning = section, total, hint, planning
        self._carried, self._rejected = Counter(carried or {}), Counter(rejected or {})
        self._allowed = max(section.max_reject_share * total, min(SMALL_NUMBER, total / 2))

    def copy(self) -> RejectLedger:
        """Another ledger with the same counts."""
        counts = {"carried": self._carried, "rejected": self._rejected}
        return RejectLedger(self._section, self._total, **counts, hint=self._hint, planning=self.planning)

    @property
    def num_rejected(self) -> int:
        """Rejects of this revision so far."""
        return self._rejected.total()

    def add(self, reasons: Mapping[str, int]) -> None:
        """Count rejects, by reason."""
        self._rejected.update(reasons)

    def count(self, key: str, reject: RecordRejected) -> SourceError | None:
        """Count one reject; returns the error if there are too many."""
        self._rejected[reject.reason] += 1
        return self.refusal(f"The last is '{key}': {reject}.")

    def forget(self, reason: str) -> None:
        """Subtract a reject that was not committed."""
        self._rejected -= Counter([reason])

    def refusal(self, example: str = "") -> SourceError | None:
        """The error if there are too many rejects, or None.

        Args:
          example: a sentence about one of the rejects.
        """
        reasons = self._carried + self._rejected
        if not self._rejected or reasons.total() <= self._allowed:
            return None
        share = f"more than source.max_reject_share = {self._section.max_reject_share}"
        what = f"{reasons.total()} of {self._total} records are rejected, {share}"
        return _too_many(what, reasons, example, self._hint(reasons), "max_reject_share", planning=self.planning)

    def check(self) -> None:
        """Raises: SourceError: too large a share of all records is rejected."""
        if refusal := self.refusal():
            raise refusal


def ledger_of(section: SourceSection, writer: StoreWriter) -> RejectLedger:
    """The ledger of a frozen plan: its own rejects, and those of all committed shards."""
    plan = writer.plan
    refused = plan.records.filter(pc.equal(plan.records["status"], "rejected"))
    is_own = pc.equal(refused["revision"], plan.revision)
    carried, own = refused.filter(pc.invert(is_own)), refused.filter(is_own)
    rejected = count_reasons(own["reason"]) + writer.reject_reasons
    return RejectLedger(section, plan.records.num_rows, carried=count_reasons(carried["reason"]), rejected=rejected)


def count_reasons(reasons: pa.ChunkedArray | pa.Array) -> Counter[str]:
    """Count each value of a column, ignoring nulls."""
    found = reasons.drop_null().value_counts()
    return Counter(dict(zip(found.field("values").to_pylist(), found.field("counts").to_pylist(), strict=True)))


class RejectLimit:
    """Checks rejects as they come, in order.

    Args:
      section: of the recipe: the maximum number in a row.
      ledger: checks the share; None if it is checked elsewhere.
      stops: raise on too many rejects; otherwise keep the first error as ``error``.
      on_reject: called with the key and the reject of each that counts.
    """

    def __init__(
        self,
        section: SourceSection,
        ledger: RejectLedger | None,
        *,
        stops: bool = True,
        on_reject: Callable[[str, RecordRejected], None] = lambda key, reject: None,
    ) -> None:
        self.ledger, self.error = ledger, None
        self._most, self._stops, self._on_reject = section.max_rejects_in_a_row, stops, on_reject
        self._in_a_row: Counter[str] = Counter()

    def count(self, key: str, reject: RecordRejected | None) -> None:
        """Count one record.

        Raises: SourceError: too many are rejected.
        """
        if reject is None:
            self._in_a_row.clear()
        else:
            self._on_reject(key, reject)
            if self.ledger:
                self.refuse(self.ledger.count(key, reject))
            self._count_row(key, reject)

    def count_some(self, keys: pa.Array, rejects: Mapping[int, RecordRejected]) -> None:
        """Count consecutive records; the share is checked after all of them.

        Args:
          rejects: by position among the keys, in order.
        Raises: SourceError: too many are rejected.
        """
        if self.ledger and rejects:
            *others, last = rejects
            self.ledger.add(Counter(rejects[i].reason for i in others))
            self.refuse(self.ledger.count(keys[last].as_py(), rejects[last]))
        next_one = 0
        for i, reject in rejects.items():
            if i > next_one:
                self._in_a_row.clear()
            self._count_row(keys[i].as_py(), reject)
            next_one = i + 1
        if next_one < len(keys):
            self._in_a_row.clear()

    def refuse(self, error: SourceError | None) -> None:
        """Raise an error, or keep the first one."""
        if error and self._stops:
            raise error
        self.error = self.error or error

    def _count_row(self, key: str, reject: RecordRejected) -> None:
        self._in_a_row[reject.reason] += 1
        if (number := self._in_a_row.total()) >= self._most:
            what = f"{number} records in a row are rejected (source.max_rejects_in_a_row)"
            example = f"The last is '{key}': {reject}."
            planning = self.ledger is not None and self.ledger.planning
            self.refuse(_too_many(what, self._in_a_row, example, "", "max_rejects_in_a_row", planning=planning))


def _too_many(
    what: str, reasons: Counter[str], example: str, hint: str, setting: str, *, planning: bool
) -> SourceError:
    counts = ", ".join(f"{number} x {reason}" for reason, number in reasons.most_common())
    changed = CHANGED_HINT if "source_changed" in reasons else ""
    said = " ".join(part for part in (f"{what}: {counts}.", example, hint, changed) if part)
    kept = "" if planning else " What is encoded stays, the same command goes on."
    return SourceError(
        f"{said} Look at the source; if it is right as it is, allow more with --set source.{setting}=...{kept}"
    )
