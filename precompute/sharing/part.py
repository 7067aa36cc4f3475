"""A share of the shards, for one of several independent processes, as in a Slurm array."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...datasets.format.layout import Task


@dataclass(frozen=True)
class Part:
    """Every ``count``-th shard, starting with shard ``number``, counted from 1."""

    number: int = 1
    count: int = 1

    def of(self, tasks: Sequence[Task]) -> list[Task]:
        """The part's share of all tasks of a plan, finished or not."""
        return list(tasks[self.number - 1 :: self.count])


def part_of(text: str) -> Part:
    """Parse "I/N".

    Raises: ValueError: malformed, or I is not from 1 to N.
    """
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    number, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= count:
        raise ValueError(f"'{text}': expected I/N with I from 1 to N, such as 3/8.")
    return Part(number, count)
