"""Mixtures: exact shares, no batch of any part left out or given twice, all by number alone."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leandit.datasets.order.batch_plan import BatchOrder, BatchPlan, PlannedBatch, changed_fields
from leandit.datasets.order.filters import Selection
from leandit.datasets.order.mixture import MAX_PERIOD, Mixture
from leandit.datasets.order.shuffle import ShardWindow
from leandit.errors import RecipeError

seeds = st.integers(0, 2**64 - 1)
A, B, C = (BatchPlan({name: 20}, 3, seed) for seed, name in enumerate(("64x64", "48x80", "80x48")))


def values(batches: list[PlannedBatch]) -> list[tuple[int, str, list[int], int]]:
    return [(batch.plan, batch.bucket, batch.positions.tolist(), batch.epoch) for batch in batches]


buckets = st.dictionaries(st.sampled_from(["64x64", "48x80", "80x48"]), st.integers(1, 30), min_size=1)
plans = st.builds(BatchPlan, buckets, st.integers(1, 9), seeds)


orders = plans | st.builds(Mixture, st.lists(st.tuples(plans, st.integers(1, 9)), min_size=1, max_size=3), seeds)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), seeds, st.integers(0, 10**9))
def test_shares_are_exact_in_every_period(weights: list[int], seed: int, period: int) -> None:
    mixture = Mixture([(A, weight) for weight in weights], seed)
    first = period * mixture.period
    parts = [mixture.part_of(number) for number in range(first, first + mixture.period)]
    counts = Counter(part for part, _ in parts)
    assert [Fraction(counts[i], mixture.period) for i in range(len(weights))] == [
        Fraction(w, sum(weights)) for w in weights
    ]
    for part, weight in enumerate(mixture.weights):  # and go on where the period before stopped
        ordinals = [ordinal for which, ordinal in parts if which == part]
        assert ordinals == list(range(period * weight, (period + 1) * weight))


@pytest.mark.parametrize(
    ("weights", "whole"),
    [((0.1, 0.2, 0.7), (1, 2, 7)), ((1, 999), (1, 999)), ((Fraction(1, 3), Fraction(2, 3)), (1, 2))],
)  # as binary numbers the first would need a period of 2^55
def test_weights_become_whole_numbers_exactly(weights: tuple[Any, ...], whole: tuple[int, ...]) -> None:
    mixture = Mixture([(A, weight) for weight in weights], seed=0)
    assert (mixture.weights, mixture.period) == (whole, sum(whole))


def test_a_mixture_that_cannot_be_is_refused() -> None:
    empty = BatchPlan({"64x64": 0}, 3, 0)
    for parts, said in [
        ([], "expected at least one"),
        ([(A, 1), (A, 0)], "weight of 0"),
        ([(A, 1), (A, float("nan"))], "weight of nan"),
        ([(A, 1_281_167), (A, 3_318_333)], f"at most {MAX_PERIOD}.*279, 721"),
        ([(A, 1), (empty, 1)], "without records"),
    ]:
        with pytest.raises(RecipeError, match=said):
            Mixture(parts, seed=0)


@given(orders, st.integers(0, 60), st.integers(0, 30))
def test_the_batches_of_any_order_are_those_one_by_one(order: BatchOrder, first: int, count: int) -> None:
    alone = [order.batches(number, 1)[0] for number in reversed(range(first, first + count))]
    assert values(order.batches(first, count)) == values(alone[::-1])
    for batch in alone:
        assert batch.bucket in order.plans[batch.plan].buckets
        assert batch.positions.max() < order.plans[batch.plan].buckets[batch.bucket]
    whole = order.batches(0, 60)
    for which, plan in enumerate(order.plans):  # each plan beneath is read from its start without gaps
        mine = [batch for batch in whole if batch.plan == which]
        assert [batch[1:] for batch in values(mine)] == [batch[1:] for batch in values(plan.batches(0, len(mine)))]
    with pytest.raises(IndexError, match="-1"):
        order.batches(-1, 1)


def test_a_change_anywhere_beneath_is_named() -> None:
    def order(weight: float = 0.7, seed: int = 0, records: int = 20) -> BatchOrder:
        return Mixture([(BatchPlan({"64x64": records}, 3, 0), weight), (B, 1 - weight)], seed)

    was = json.loads(json.dumps(order(weight=0.5).identity()))
    for changed, said in [
        (order(weight=0.25), ["parts[1].weight: was 1, is now 3"]),
        (order(0.5, seed=3), ["seed: was 0, is now 3"]),
        (order(0.5, records=21), ["parts[0].order.buckets.64x64.records: was 20, is now 21"]),
    ]:
        assert changed_fields(was, changed.identity()) == said
    assert "kind: was 'plan', is now 'mixture'" in changed_fields(A.identity(), Mixture([(A, 1)], 0).identity())


DIGESTS = [  # of 400 batches from the start, and of 20 far away
    ("887779e6fcb30852", "c6ed540b90f36ada"),
    ("981db4ee6562a7cb", "3fc26ab142dee375"),
    ("99a7c6d0259471b8", "7a16f02a849a636f"),
    ("c643133bbd60d7e9", "53d5ccb428f12782"),
    ("0a997876dda6e615", "cd2f2ebea94ef2da"),
    ("80e9d3b4d38b0ebd", "b8b77be01ef85649"),
]


def digest(order: BatchOrder, first: int, count: int) -> str:
    hashes = hashlib.sha256()
    for batch in order.batches(first, count):
        epochs = [batch.epoch] * len(batch.positions)
        hashes.update(repr((batch.bucket, batch.plan, batch.positions.tolist(), epochs)).encode())
    return hashes.hexdigest()[:16]


def test_the_order_of_every_mode_of_selections_and_mixtures_does_not_change() -> None:
    # As in test_batch_plan.py: these change with an ORDER break only.
    chosen = {"64x64": np.arange(0, 600, 2, dtype=np.uint16), "48x80": None, "80x48": np.zeros(0, np.uint8)}
    selection = Selection({"64x64": 300, "48x80": 333, "80x48": 0}, chosen, {}, {}, "", {})
    whole = BatchPlan({"64x64": 701, "48x80": 333, "80x48": 5}, 16, 7)
    windowed = BatchPlan(whole.buckets, 16, 7, window=ShardWindow(3, 40))
    selected = BatchPlan(selection.counts, 16, 7, window=ShardWindow(3, 40), selection=selection)
    mixture = Mixture([(whole, 0.7), (windowed, 0.3)], 3)
    sized = BatchPlan(whole.buckets, {"64x64": 16, "48x80": 9, "80x48": 2}, 7)
    orders = (whole, windowed, selected, mixture, BatchPlan(whole.buckets, 16, 7, "drop"), sized)
    assert [(digest(order, 0, 400), digest(order, 10**9, 20)) for order in orders] == DIGESTS
