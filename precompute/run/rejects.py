"""Limits on rejects: too many are a sign that something is wrong with the source, and stage 1 stops.

Rejects of listing, planning, decoding and encoding, by all processes, count together against
``source.max_reject_share``; those in a row, of one process, against ``source.max_rejects_in_a_row``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute

from ...datasets.revisions.plan import FrozenPlan
from ...datasets.revisions.writer import StoreWriter
from ...errors import RecordRejected, SourceError
from ..config import SourceSection

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

SMALL_NUMBER = 10  # rejects that are always allowed, unless they are more than half: one of twenty is 5 %
HINTS = {
    "no_caption": "Captions are read from tables that name the images (metadata.jsonl, CSV, Parquet; --set "
    "source.caption=COLUMN), from .txt files of the same names, and from fields of .json. To store images without a "
    "caption, add --set source.missing_caption=null.",
    "nonfinite": "The encoder gives NaN or infinity in float32 too, or store.dtype cannot hold its output: check "
    "vae.model, the models of the features and store.dtype rather than the images.",
    "source_changed": "Files of the source were cut short, replaced or rewritten after the plan was made "
    "(source_changed): restore them and run the same command again.",
}


class RejectLimits:
    """Counts the rejects of one revision.

    Args:
      section: of the recipe: both limits.
      total: records of the revision.
      carried: rejects carried over from the previous revision, by reason: they count, but a revision without rejects
        of its own is never stopped.
      is_planning: nothing is encoded yet.
    Attributes:
      rejected: rejects of this revision, by reason.
      problem: the first SourceError of ``count``, which ``check`` raises.
    """

    def __init__(
        self,
        section: SourceSection,
        total: int,
        *,
        carried: Mapping[str, int] | None = None,
        is_planning: bool = False,
    ) -> None:
        self.rejected, self.problem = Counter[str](), None
        self._section, self._total, self._carried, self._is_planning = section, total, Counter(carried), is_planning
        self._allowed = max(section.max_reject_share * total, min(SMALL_NUMBER, total / 2))
        self._in_a_row, self._last = Counter[str](), ""

    def count(
        self, num_records: int, rejects: Sequence[tuple[int, str, RecordRejected]], *, share: bool = True
    ) -> None:
        """Count consecutive records.

        Args:
          rejects: position among them, key and reject of each that is rejected, in order.
          share: count them for the share too.
        """
        following = 0  # position that continues a row of rejects
        if rejects:
            _, key, reject = rejects[-1]
            self._last = f"The last is '{key}': {reject}."
        for position, key, reject in rejects:
            if position > following:
                self._in_a_row.clear()
            following = position + 1
            self._in_a_row[reject.reason] += 1
            if (number := self._in_a_row.total()) >= self._section.max_rejects_in_a_row:
                what = f"{number} records or captions in a row are rejected (source.max_rejects_in_a_row)"
                self._refuse(what, self._in_a_row, f"The last is '{key}': {reject}.", "max_rejects_in_a_row")
        if following < num_records:
            self._in_a_row.clear()
        if share and rejects:
            self.rejected.update(reject.reason for _, _, reject in rejects)
            self.check_share()

    def check_share(self, example: str = "") -> None:
        """Note the problem if too large a share of all records is rejected.

        Args:
          example: a sentence about one of the rejects; by default about the last that was counted.
        """
        reasons = self._carried + self.rejected
        if self.rejected.total() and reasons.total() > self._allowed:
            share = f"more than source.max_reject_share = {self._section.max_reject_share}"
            what = f"{reasons.total()} of {self._total} records are rejected, {share}"
            self._refuse(what, reasons, example or self._last, "max_reject_share")

    def check(self) -> None:
        """Raises: SourceError: too many records are rejected."""
        if self.problem:
            raise self.problem

    def _refuse(self, what: str, reasons: Counter[str], example: str, setting: str) -> None:
        counts = ", ".join(f"{number} x {reason}" for reason, number in reasons.most_common())
        hints = [hint for reason, hint in HINTS.items() if reason in reasons]
        message = " ".join([f"{what}: {counts}.", *filter(None, [example]), *hints])
        kept = "" if self._is_planning else " Finished shards are kept; the same command resumes."
        self.problem = self.problem or SourceError(
            f"{message} Check the source; if it is correct, allow more with --set source.{setting}=...{kept}"
        )


def limits_of(section: SourceSection, writer: StoreWriter) -> RejectLimits:
    """The limits of a frozen plan, with its own rejects and those of all committed shards counted."""
    table = writer.plan.records
    refused = table.filter(pc.equal(table["status"], "rejected"))
    carried = count_reasons(refused.filter(pc.not_equal(refused["revision"], writer.plan.revision))["reason"])
    limits = RejectLimits(section, table.num_rows, carried=carried)
    limits.rejected = planned_rejects(writer.plan) + writer.reject_reasons
    limits.check_share()
    return limits


def planned_rejects(plan: FrozenPlan) -> Counter[str]:
    """Reasons of the rejects of a revision's own records that are known before encoding."""
    own = pc.and_(pc.equal(plan.records["status"], "rejected"), pc.equal(plan.records["revision"], plan.revision))
    return count_reasons(plan.records.filter(own)["reason"])


def count_reasons(reasons: pa.ChunkedArray | pa.Array) -> Counter[str]:
    """Count each value of a column, ignoring nulls."""
    counts = reasons.drop_null().value_counts()
    return Counter(dict(zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)))
