"""A share of the shards, for one of several processes that know nothing of each other, as in a Slurm array."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...datasets.revisions.commits import Task


@dataclass(frozen=True)
class Part:
    """Every ``count``-th shard, beginning with shard ``number``, counted from 1."""

    number: int = 1
    count: int = 1

    def of(self, tasks: Sequence[Task]) -> list[Task]:
        """Its share of all tasks of a plan, whichever of them are done."""
        return list(tasks[self.number - 1 :: self.count])


def part_of(text: str) -> Part:
    """Read "I/N".

    Raises: ValueError: it is not that, or there is no such part.
    """
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    number, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= count:
        raise ValueError(f"'{text}': needed I/N with I from 1 to N, as 3/8.")
    return Part(number, count)
