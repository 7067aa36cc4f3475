"""Orders of orders: mixtures of plans by weight, and consecutive stages. Pure functions of the batch number.

    photos, art = BatchPlan(...), BatchPlan(...)
    Mixture([(photos, 0.7), (art, 0.3)], seed=0)              # of every ten batches, seven are photos
    Stages([(at_256_px, 200_000), (at_512_px, None)])         # progressive training

A weight is a share of the global batches. Each part of a mixture runs through its own order at its own pace. Each stage
starts at batch 0 of its order.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from ...errors import RecipeError
from ..disk.cached import cached_property
from .batch_plan import BatchOrder, BatchPlan, PlannedBatch
from .shuffle import PURPOSE_MIXTURE, keyed_hash, permute

MAX_PERIOD = 10_000  # batches; a table of a period is kept, and a run should contain several periods


class _Nested:
    """An order that takes each batch from one of several orders."""

    @property
    def _orders(self) -> list[BatchOrder]:
        raise NotImplementedError

    def part_of(self, number: int) -> tuple[int, int]:
        """Part of a global batch, and its number within that part. Raises: IndexError: the number is negative."""
        raise NotImplementedError

    def _check_orders(self) -> None:
        if not self._orders:
            raise RecipeError("an order without parts: expected at least one.")
        if any(not plan.num_records for plan in self.plans):
            raise RecipeError("a plan without records: there is nothing to read. Leave it out.")

    @property
    def plans(self) -> tuple[BatchPlan, ...]:
        """The plans of all parts, in order."""
        return tuple(plan for order in self._orders for plan in order.plans)

    def batches(self, first: int, count: int) -> list[PlannedBatch]:
        """Global batches ``first`` to ``first + count - 1``. Raises: IndexError: the number is negative."""
        places = [self.part_of(number) for number in range(first, first + count)]
        offsets = [0, *accumulate(len(order.plans) for order in self._orders)]  # index of each order's first plan
        parts = {}
        for part in {part for part, _ in places}:
            ordinals = [ordinal for which, ordinal in places if which == part]  # consecutive
            batches = self._orders[part].batches(ordinals[0], len(ordinals))
            parts[part] = iter([replace(batch, plan=batch.plan + offsets[part]) for batch in batches])
        return [next(parts[part]) for part, _ in places]


@dataclass(frozen=True)
class Mixture(_Nested):
    """Batches of several orders, each with its share.

    The shares are exact in every period: the fewest batches in which all shares are whole numbers. Within a period the
    parts are shuffled; the batches of a part keep their order.

    Args:
      parts: order and weight of each part. The share of a part is its weight over the sum; decimals are exact.
      seed: of the shuffle.
    Raises: RecipeError: no part, a weight that is not above 0, or shares that need a period above MAX_PERIOD.
    """

    parts: Sequence[tuple[BatchOrder, float | Fraction]]
    seed: int

    def __post_init__(self) -> None:
        self._check_orders()
        if self.period > MAX_PERIOD:
            total = sum(self.weights)
            near = ", ".join(str(max(1, round(1000 * weight / total))) for weight in self.weights)
            raise RecipeError(
                f"a mixture with shares of {', '.join(map(str, self.weights))} in {self.period} batches: expected "
                f"shares that are whole numbers of batches in at most {MAX_PERIOD}. Weights close to them: {near}."
            )

    @property
    def _orders(self) -> list[BatchOrder]:
        return [order for order, _ in self.parts]

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

    def identity(self) -> dict[str, Any]:
        """Plain values of everything that decides the order."""
        parts = [{"weight": w, "order": o.identity()} for (o, _), w in zip(self.parts, self.weights, strict=True)]
        return {"kind": "mixture", "seed": self.seed, "parts": parts}


@dataclass(frozen=True)
class Stages(_Nested):
    """Consecutive orders, as in progressive training: small images first, then large ones.

    Args:
      stages: order of each stage and its number of global batches; None for the last, which does not end. Two stages of
        one plan start with the same batches, unless they have different seeds.
    Raises: RecipeError: no stage, a number below 1, or None elsewhere than at the end.
    """

    stages: Sequence[tuple[BatchOrder, int | None]]

    def __post_init__(self) -> None:
        self._check_orders()
        for _, count in self.stages[:-1]:
            if count is None or count < 1:
                raise RecipeError(f"a stage of {count} batches before the last: expected at least 1.")
        if self.stages[-1][1] is not None:
            raise RecipeError(f"the last stage has {self.stages[-1][1]} batches: expected None, it does not end.")

    @property
    def _orders(self) -> list[BatchOrder]:
        return [order for order, _ in self.stages]

    @cached_property
    def _starts(self) -> list[int]:
        """First batch number of each stage."""
        return [0, *accumulate(count or 0 for _, count in self.stages[:-1])]

    def part_of(self, number: int) -> tuple[int, int]:
        """Stage of a global batch, and its number within that stage. Raises: IndexError: the number is negative."""
        if number < 0:
            raise IndexError(f"batch {number} of stages")
        stage = bisect.bisect_right(self._starts, number) - 1
        return stage, number - self._starts[stage]

    def identity(self) -> dict[str, Any]:
        """Plain values of everything that decides the order."""
        stages = [{"num_batches": count, "order": order.identity()} for order, count in self.stages]
        return {"kind": "stages", "stages": stages}


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
