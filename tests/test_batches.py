"""BatchPlan: every record once per epoch, in an order that is a pure function of (seed, epoch, step)."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leandit.datasets.batches import BatchPlan, PlannedBatch, keyed_choice, keyed_hash, permute

bucket_sizes = st.dictionaries(
    st.sampled_from(["48x80", "64x64", "80x48", "96x32"]), st.integers(0, 40), min_size=1, max_size=4
)
few = settings(deadline=None, max_examples=25)  # no deadline: the machine may be busy
seeds = st.integers(0, 2**64 - 1)

GOLDEN = [
    [("48x80", [4, 1, 3]), ("64x64", [2]), ("64x64", [5, 1, 0]), ("64x64", [4, 3, 6]), ("48x80", [2, 0])],
    [("64x64", [4, 2, 0]), ("64x64", [1]), ("48x80", [4, 2, 0]), ("64x64", [5, 6, 3]), ("48x80", [3, 1])],
]
GOLDEN_PERMUTED = [939805097687, 315238059137, 141052350041]
GOLDEN_HASH = 0x5DEF8C1F8A9E3322
GOLDEN_CHOICES = [2, 0, 3, 5, 5, 5, 4, 2, 2, 3, 2, 0]


def epoch_of(plan: BatchPlan, epoch: int) -> list[PlannedBatch]:
    return [plan.batch(epoch, index) for index in range(plan.batches_per_epoch)]


def order_of(plan: BatchPlan, epoch: int = 0) -> list[tuple[str, list[int]]]:
    return [(batch.bucket, batch.positions.tolist()) for batch in epoch_of(plan, epoch)]


@few
@given(bucket_sizes, st.integers(1, 50), seeds, st.integers(0, 10**6))
def test_every_record_comes_exactly_once_per_epoch_in_batches_of_one_bucket(
    buckets: dict[str, int], global_batch: int, seed: int, epoch: int
) -> None:
    plan = BatchPlan(buckets, global_batch, seed)
    batches = epoch_of(plan, epoch)
    seen = Counter((batch.bucket, position) for batch in batches for position in batch.positions.tolist())
    assert seen == Counter({(bucket, i): 1 for bucket, count in buckets.items() for i in range(count)})
    assert plan.num_records == sum(buckets.values())
    for bucket, count in buckets.items():  # what is left of a bucket is one smaller batch
        sizes = sorted(len(batch.positions) for batch in batches if batch.bucket == bucket)
        full, rest = divmod(count, global_batch)
        assert sizes == ([rest] if rest else []) + [global_batch] * full


@few
@given(bucket_sizes, st.integers(2, 9), seeds)
def test_a_plan_is_pure(buckets: dict[str, int], global_batch: int, seed: int) -> None:
    plan = BatchPlan(buckets, global_batch, seed)
    forward = order_of(plan, 3)
    backward = [plan.batch(3, index) for index in reversed(range(plan.batches_per_epoch))]
    assert [(b.bucket, b.positions.tolist()) for b in reversed(backward)] == forward
    assert order_of(BatchPlan(dict(buckets), global_batch, seed), 3) == forward


def test_buckets_are_mixed() -> None:
    names = [bucket for bucket, _ in order_of(BatchPlan({"a": 400, "b": 400}, 4, seed=0))]
    changes = sum(first != second for first, second in pairwise(names))
    assert 70 < changes < 130  # of 199; in turn it would be 199, one after the other 1
    assert 30 < names[:100].count("a") < 70


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    buckets = {"a": 64, "b": 64}
    orders = [order_of(BatchPlan(buckets, 8, seed), epoch) for seed in range(6) for epoch in range(6)]
    assert len({repr(order) for order in orders}) == 36
    # Not the same batches in another order: a record meets other records.
    batches = [frozenset(positions) for order in orders for bucket, positions in order if bucket == "a"]
    assert len(set(batches)) == len(batches)


def test_two_buckets_of_a_size_are_shuffled_differently() -> None:
    order = order_of(BatchPlan({"a": 64, "b": 64}, 64, seed=0))
    assert order[0][1] != order[1][1]


def test_the_order_for_a_fixed_seed_is_the_one_of_the_first_release() -> None:
    # If this changes, a run resumed after an update sees some records twice in an epoch and others never, and a
    # published seed no longer gives the published run: an ORDER break in the changelog, and a new STATE_VERSION.
    plan = BatchPlan({"48x80": 5, "64x64": 7}, 3, seed=20)
    assert order_of(plan, 0) == GOLDEN[0]
    assert order_of(plan, 1) == GOLDEN[1]
    assert permute(np.array([0, 1, 10**12 - 1]), 10**12, key=7).tolist() == GOLDEN_PERMUTED
    assert keyed_hash(0, 1, 2) == GOLDEN_HASH
    assert _choose(7, seed=1, epoch=2, count=12).tolist() == GOLDEN_CHOICES


@pytest.mark.parametrize("index", [-1, 4])
def test_a_batch_beyond_the_epoch_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match=f"{index}.*4"):
        BatchPlan({"a": 7}, 2, seed=0).batch(0, index)


@few
@given(st.integers(1, 3000), seeds)
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 1, 3 * 10**5])
def test_permute_is_a_permutation_around_powers_of_two(size: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, 5)), np.arange(size))


@few
@given(st.integers(1, 10**12), seeds, st.data())
def test_permute_of_some_indices_is_part_of_the_whole(size: int, key: int, data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    found = permute(indices, size, key)
    assert len(set(found.tolist())) == len(indices)
    assert 0 <= found.min() <= found.max() < size
    assert [int(permute(np.array([i]), size, key)[0]) for i in indices] == found.tolist()


def test_a_plan_of_a_trillion_records_answers_at_once() -> None:
    plan = BatchPlan({"a": 10**12, "b": 17}, 256, seed=0)
    start = time.perf_counter()
    batches = [plan.batch(epoch, index) for epoch in (0, 1000) for index in (0, plan.batches_per_epoch - 1)]
    assert time.perf_counter() - start < 1  # it takes a millisecond; anything of size N takes hours
    assert plan.batches_per_epoch == -(-(10**12) // 256) + 1
    assert all(len(np.unique(batch.positions)) == len(batch.positions) for batch in batches)
    assert all(batch.positions.max() < 10**12 for batch in batches)


def test_permute_spreads_every_index_evenly() -> None:
    places = np.array([permute(np.arange(10), 10, keyed_hash(key)) for key in range(2000)])
    counts = np.array([np.bincount(places[:, i], minlength=10) for i in range(10)])
    assert abs(counts - 200).max() < 70  # 5 standard deviations


def _choose(choices: int, *, seed: int, epoch: int, count: int, purpose: int = 2) -> np.ndarray:
    return keyed_choice(np.full(count, choices), seed=seed, epoch=epoch, records=np.arange(count), purpose=purpose)


@few
@given(st.lists(st.integers(1, 2**31), min_size=1, max_size=50), seeds, st.integers(0, 10**6))
def test_a_keyed_choice_is_in_range_and_depends_on_its_record_alone(choices: list[int], seed: int, epoch: int) -> None:
    counts, records = np.array(choices), np.arange(len(choices)) * 10**9
    found = keyed_choice(counts, seed=seed, epoch=epoch, records=records, purpose=2)
    assert found.min() >= 0
    assert (found < counts).all()
    last = keyed_choice(counts[-1:], seed=seed, epoch=epoch, records=records[-1:], purpose=2)
    assert last[0] == found[-1]


@pytest.mark.parametrize("choices", [1, 2, 5, 7])
def test_a_keyed_choice_is_even_over_records_and_over_epochs(choices: int) -> None:
    over_records = _choose(choices, seed=3, epoch=0, count=20_000)
    over_epochs = np.array([_choose(choices, seed=3, epoch=e, count=9)[8] for e in range(2000)])
    for found in (over_records, over_epochs):
        expected = len(found) / choices
        assert abs(np.bincount(found, minlength=choices) - expected).max() < 5 * expected**0.5


def test_choices_of_another_seed_epoch_or_purpose_are_independent() -> None:
    base = _choose(2, seed=0, epoch=0, count=4000)
    others = [
        _choose(2, seed=1, epoch=0, count=4000),
        _choose(2, seed=0, epoch=1, count=4000),
        _choose(2, seed=0, epoch=0, count=4000, purpose=3),
    ]
    assert all(0.45 < (base == other).mean() < 0.55 for other in others)


def test_a_keyed_hash_depends_on_the_order_of_its_arguments() -> None:
    assert len({keyed_hash(*values) for values in [(1, 2, 3), (3, 2, 1), (1, 2), (2, 1), (1,), (1, 2, 0)]}) == 6
