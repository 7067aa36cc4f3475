"""What an order of batches is: the face that a plan, a mixture of plans and stages of plans show to a loader."""

from __future__ import annotations

from typing import Any, Protocol

from .batch_plan import BatchPlan
from .planned import PlannedBatch


class BatchOrder(Protocol):
    """An endless sequence of global batches, each known by its number alone. Orders nest."""

    @property
    def plans(self) -> tuple[BatchPlan, ...]:
        """The plans beneath, depth first; ``PlannedBatch.plan`` counts in them. Each reads one store."""
        ...

    def batches(self, first: int, count: int) -> list[PlannedBatch]:
        """Global batches ``first`` to ``first + count - 1``; sixteen at once take little longer than one.

        Raises: IndexError: the number is negative.
        """
        ...

    def batch_at(self, number: int) -> PlannedBatch:
        """Global batch ``number``, counted from 0.

        Raises: IndexError: the number is negative.
        """
        ...

    def identity(self) -> dict[str, Any]:
        """Plain values of everything that decides the order, but for the stores' own root hashes."""
        ...


def changed_fields(was: Any, here: Any, name: str = "") -> list[str]:
    """Say field by field how two identities differ: ["seed: was 1, is now 2"]; empty where they are equal."""
    if isinstance(was, dict) and isinstance(here, dict):
        dotted = f"{name}." if name else ""
        keys = [*was, *(key for key in here if key not in was)]
        return [line for key in keys for line in changed_fields(was.get(key), here.get(key), f"{dotted}{key}")]
    if isinstance(was, list) and isinstance(here, list) and len(was) == len(here):
        pairs = enumerate(zip(was, here, strict=True))
        return [line for i, pair in pairs for line in changed_fields(*pair, f"{name}[{i}]")]
    return [] if was == here else [f"{name}: was {was!r}, is now {here!r}"]
