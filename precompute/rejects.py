"""When rejects are no longer single broken files but a sign that something is wrong: then stage 1 stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..datasets.errors import RecordRejected, SourceError
from .config import SourceSection

SMALL_NUMBER = 10  # so many rejects are never too large a share: of twenty pictures, one is 5 %


class RejectLimit:
    """Counts rejects as they come, in order.

    Args:
      section: of the recipe: the largest share, and the largest number in a row.
      total: records of the source.
      already: of them rejected before, by an earlier call.
      tell: called with the key of each that counts, and why.
    """

    def __init__(
        self,
        section: SourceSection,
        total: int,
        already: int = 0,
        *,
        tell: Callable[[str, RecordRejected], None] = lambda key, reject: None,
    ) -> None:
        self._section, self._total, self._tell = section, total, tell
        self._rejected, self._in_a_row = already, 0
        self._reasons: Counter[str] = Counter()

    def count(self, key: str, reject: RecordRejected | None) -> None:
        """Count one record.

        Raises: SourceError: too many are rejected.
        """
        if reject is None:
            self._in_a_row = 0
            return
        if reject.reason == "source_changed":
            return  # it is encoded at once in the next revision, as what it is now
        self._tell(key, reject)
        self._rejected += 1
        self._in_a_row += 1
        self._reasons[reject.reason] += 1
        section = self._section
        many = self._rejected > max(SMALL_NUMBER, section.max_reject_share * self._total)
        if many or self._in_a_row >= section.max_rejects_in_a_row:
            what = (
                f"{self._rejected} of {self._total} records are rejected, more than source.max_reject_share = "
                f"{section.max_reject_share}"
                if many
                else f"{self._in_a_row} records in a row are rejected (source.max_rejects_in_a_row)"
            )
            reasons = ", ".join(f"{number} x {reason}" for reason, number in self._reasons.most_common())
            key_of = "max_reject_share" if many else "max_rejects_in_a_row"
            raise SourceError(
                f"{what}: {reasons}. The last is '{key}': {reject}. Look at the source; if it is right as it is, allow "
                f"more with --set source.{key_of}=... What is encoded stays, the same command goes on."
            )
