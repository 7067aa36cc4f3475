"""Mixtures of batch plans by weight: pure functions of the batch number.

    photos, art = BatchPlan(...), BatchPlan(...)
    Mixture([(photos, 0.7), (art, 0.3)], seed=0)              # of every ten batches, seven are photos

A weight is a share of the global batches. Each plan runs through its own order at its own pace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from ...errors import RecipeError
from ..disk.cached import cached_property
from .batch_plan import BatchPlan, PlannedBatch
from .shuffle import PURPOSE_MIXTURE, keyed_hash, permute

MAX_PERIOD = 10_000  # batches; a table of a period is kept, and a run should contain several periods


@dataclass(frozen=True)
class Mixture:
    """Batches of several plans, each with its share.

    The shares are exact in every period: the fewest batches in which all shares are whole numbers. Within a period the
    parts are shuffled; the batches of a part keep their order.

    Args:
      parts: plan and weight of each part. The share of a part is its weight over the sum; decimals are exact.
      seed: of the shuffle.
    Raises: RecipeError: no part, a weight that is not above 0, or shares that need a period above MAX_PERIOD.
    """

    parts: Sequence[tuple[BatchPlan, float | Fraction]]
    seed: int

    def __post_init__(self) -> None:
        if not self.parts:
            raise RecipeError("a mixture without parts: expected at least one.")
        if any(not plan.num_records for plan in self.plans):
            raise RecipeError("a plan without records: there is nothing to read. Leave it out.")
        if self.period > MAX_PERIOD:
            total = sum(self.weights)
            near = ", ".join(str(max(1, round(1000 * weight / total))) for weight in self.weights)
            raise RecipeError(
                f"a mixture with shares of {', '.join(map(str, self.weights))} in {self.period} batches: expected "
                f"shares that are whole numbers of batches in at most {MAX_PERIOD}. Weights close to them: {near}."
            )

    @property
    def plans(self) -> tuple[BatchPlan, ...]:
        """The plan of each part."""
        return tuple(plan for plan, _ in self.parts)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Batches of each part in a period."""
        shares = []
        for _, weight in self.parts:
            if not (math.isfinite(weight) and weight > 0):
                raise RecipeError(f"a mixture with a weight of {weight}: expected a number above 0.")
            shares.append(Fraction(str(weight)))  # the decimal, not the nearest binary number: 0.7 is 7/10
        whole = math.lcm(*(share.denominator for share in shares))
        counts = [int(share * whole) for share in shares]
        return tuple(count // math.gcd(*counts) for count in counts)

    @property
    def period(self) -> int:
        """Batches in which all shares are whole numbers."""
        return sum(self.weights)

    def part_of(self, number: int) -> tuple[int, int]:
        """Part of a global batch, and its number within that part. Raises: IndexError: the number is negative."""
        if number < 0:
            raise IndexError(f"batch {number} of a mixture")
        periods, place = divmod(number, self.period)
        which, ordinals = _period_table(self.weights, self.seed, periods)
        part = int(which[place])
        return part, periods * self.weights[part] + int(ordinals[place])

    def batches(self, first: int, count: int) -> list[PlannedBatch]:
        """Global batches ``first`` to ``first + count - 1``. Raises: IndexError: the number is negative."""
        numbers = [self.part_of(number) for number in range(first, first + count)]
        batches_of_part: dict[int, Iterator[PlannedBatch]] = {}
        for part in {part for part, _ in numbers}:
            ordinals = [ordinal for other, ordinal in numbers if other == part]  # consecutive
            batches_of_part[part] = iter(self.plans[part].batches(ordinals[0], len(ordinals)))
        return [replace(next(batches_of_part[part]), plan=part) for part, _ in numbers]

    def identity(self) -> dict[str, Any]:
        """Plain values of everything that decides the order."""
        parts = [
            {"weight": weight, "order": plan.identity()} for plan, weight in zip(self.plans, self.weights, strict=True)
        ]
        return {"kind": "mixture", "seed": self.seed, "parts": parts}


@lru_cache(maxsize=8)
def _period_table(weights: tuple[int, ...], seed: int, period: int) -> tuple[np.ndarray, np.ndarray]:
    """Part of each place in a period, and its ordinal within the part; (P,) each."""
    length = sum(weights)
    order = permute(np.arange(length), length, keyed_hash(seed, period, PURPOSE_MIXTURE))
    which = np.searchsorted(np.cumsum(weights), order, side="right")
    ordinals = np.empty(length, np.int64)
    for part, weight in enumerate(weights):
        ordinals[which == part] = np.arange(weight)
    return which, ordinals
