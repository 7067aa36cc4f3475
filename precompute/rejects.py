"""When rejects are no longer single broken files but a sign that something is wrong: then stage 1 stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import pyarrow as pa

from ..datasets.errors import RecordRejected, SourceError
from .config import SourceSection

SMALL_NUMBER = 10  # so many rejects are never too large a share: of twenty pictures, one is 5 %


class RejectShare:
    """Counts rejects whatever their order, so it can count for several processes at once.

    Args:
      section: of the recipe: the largest share.
      total: records of the source.
      already: of them rejected before, by an earlier call.
    """

    def __init__(self, section: SourceSection, total: int, already: int = 0) -> None:
        self._largest, self._total, self._rejected = section.max_reject_share, total, already
        self._reasons: Counter[str] = Counter()

    def count(self, key: str, reject: RecordRejected) -> None:
        """Count one reject.

        Raises: SourceError: they are too large a share of all records.
        """
        self._rejected += 1
        self._reasons[reject.reason] += 1
        if self._rejected > max(SMALL_NUMBER, self._largest * self._total):
            what = f"{self._rejected} of {self._total} records are rejected, more than source.max_reject_share = "
            raise _too_many(f"{what}{self._largest}", self._reasons, key, reject, "max_reject_share")

    def forget(self, reason: str) -> None:
        """Take one back, that was counted and is not in the store."""
        self._rejected -= 1
        self._reasons -= Counter([reason])


class RejectLimit:
    """Counts rejects as they come, in order.

    Args:
      section: of the recipe: the largest share, and the largest number in a row.
      total: records of the source; None where who is told looks at the share.
      already: of them rejected before, by an earlier call.
      tell: called with the key of each that counts, and why.
    """

    def __init__(
        self,
        section: SourceSection,
        total: int | None,
        already: int = 0,
        *,
        tell: Callable[[str, RecordRejected], None] = lambda key, reject: None,
    ) -> None:
        self._share = None if total is None else RejectShare(section, total, already)
        self._most, self._in_a_row, self._tell = section.max_rejects_in_a_row, 0, tell
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
        if self._share:
            self._share.count(key, reject)
        self._in_a_row += 1
        self._reasons[reject.reason] += 1
        if self._in_a_row >= self._most:
            what = f"{self._in_a_row} records in a row are rejected (source.max_rejects_in_a_row)"
            raise _too_many(what, self._reasons, key, reject, "max_rejects_in_a_row")

    def count_some(self, keys: pa.Array, rejects: Mapping[int, RecordRejected]) -> None:
        """Count some records that follow each other.

        Args:
          rejects: of some of them, by their place, in order.
        Raises: SourceError: too many are rejected.
        """
        next_one = 0
        for i, reject in rejects.items():
            if i > next_one:
                self._in_a_row = 0
            self.count(keys[i].as_py(), reject)
            next_one = i + 1
        if next_one < len(keys):
            self._in_a_row = 0


def _too_many(what: str, reasons: Counter[str], key: str, reject: RecordRejected, setting: str) -> SourceError:
    counts = ", ".join(f"{number} x {reason}" for reason, number in reasons.most_common())
    return SourceError(
        f"{what}: {counts}. The last is '{key}': {reject}. Look at the source; if it is right as it is, allow more "
        f"with --set source.{setting}=... What is encoded stays, the same command goes on."
    )
