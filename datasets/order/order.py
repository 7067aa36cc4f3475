"""The interface of batch orders: plans, mixtures of plans, and stages of plans."""

from __future__ import annotations

from typing import Any, Protocol

from .batch_plan import BatchPlan, PlannedBatch


class BatchOrder(Protocol):
    """An endless sequence of global batches, each a function of its number. Orders nest."""

    @property
    def plans(self) -> tuple[BatchPlan, ...]:
        """The nested plans, depth first; ``PlannedBatch.plan`` is an index into them. Each reads one store."""
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
        """Plain values of everything that decides the order, except the stores' root hashes."""
        ...


def changed_fields(before: Any, now: Any, name: str = "") -> list[str]:
    """Differences of two identities, field by field: ["seed: was 1, is now 2"]."""
    if isinstance(before, dict) and isinstance(now, dict):
        dotted = f"{name}." if name else ""
        keys = [*before, *(key for key in now if key not in before)]
        return [line for key in keys for line in changed_fields(before.get(key), now.get(key), f"{dotted}{key}")]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [line for i, pair in pairs for line in changed_fields(*pair, f"{name}[{i}]")]
    return [] if before == now else [f"{name}: was {before!r}, is now {now!r}"]
