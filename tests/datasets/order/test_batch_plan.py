"""BatchPlan: every record once per epoch, in an order that is a pure function of (seed, number)."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from leandit.datasets.order.batch_plan import BatchPlan, PlannedBatch, changed_fields
from leandit.datasets.order.shuffle import ShardWindow
from leandit.datasets.order.slices import batch_sizes_by_tokens, rank_slice
from leandit.errors import RecipeError

NAMES = ["48x80", "64x64", "80x48", "96x32"]
seeds = st.integers(0, 2**64 - 1)
windows = st.none() | st.builds(ShardWindow, st.integers(1, 4), st.integers(1, 9))


@st.composite
def plans(draw: st.DrawFn, leftovers: tuple[str, ...] = ("short", "drop")) -> BatchPlan:
    """Plans of up to four small buckets, of one batch size or of one each."""
    buckets = draw(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 40), min_size=1, max_size=4))
    assume(any(buckets.values()))
    sizes = st.integers(1, 12)
    batch = draw(sizes | st.fixed_dictionaries(dict.fromkeys(buckets, sizes)))
    mode: Any = draw(st.sampled_from(leftovers))
    if mode == "drop":
        by_bucket = batch if isinstance(batch, dict) else dict.fromkeys(buckets, batch)
        assume(any(count >= by_bucket[name] for name, count in buckets.items()))
    return BatchPlan(buckets, batch, draw(seeds), leftovers=mode, window=draw(windows))


def epoch_of(plan: BatchPlan, epoch: int) -> list[PlannedBatch]:
    return plan.batches(epoch * plan.batches_per_epoch, plan.batches_per_epoch)


def values(batches: list[PlannedBatch]) -> list[tuple[str, list[int], int]]:
    return [(batch.bucket, batch.positions.tolist(), batch.epoch) for batch in batches]


def seen_in(batches: list[PlannedBatch]) -> Counter[tuple[str, int, int]]:
    """How often (bucket, position, epoch) comes."""
    return Counter((b.bucket, position, b.epoch) for b in batches for position in b.positions.tolist())


def records_of(plan: BatchPlan, epoch: int) -> set[tuple[str, int, int]]:
    return {(bucket, i, epoch) for bucket, count in plan.buckets.items() for i in range(count)}


@given(plans(("short",)), st.integers(0, 10**6))
def test_short_gives_every_record_exactly_once_per_epoch(plan: BatchPlan, epoch: int) -> None:
    batches = epoch_of(plan, epoch)
    assert seen_in(batches) == Counter(records_of(plan, epoch))
    for bucket, count in plan.buckets.items():  # what is left of a bucket is one smaller batch
        sizes = sorted(len(batch.positions) for batch in batches if batch.bucket == bucket)
        full, rest = divmod(count, plan.batch_sizes[bucket])
        assert sizes == ([rest] if rest else []) + [plan.batch_sizes[bucket]] * full


@given(plans(("drop",)), st.integers(0, 10**6))
def test_drop_gives_every_record_at_most_once_per_epoch_and_counts_the_others(plan: BatchPlan, epoch: int) -> None:
    batches = epoch_of(plan, epoch)
    seen = seen_in(batches)
    assert set(seen.values()) == {1}
    assert all(len(batch.positions) == plan.batch_sizes[batch.bucket] for batch in batches)
    missing = Counter(bucket for bucket, _, _ in records_of(plan, epoch) - set(seen))
    assert missing == Counter({b: n % plan.batch_sizes[b] for b, n in plan.buckets.items() if n % plan.batch_sizes[b]})
    assert plan.never_read == {b: n for b, n in plan.buckets.items() if n and b not in {x.bucket for x in batches}}


@given(plans(), st.integers(0, 5))
def test_numbers_count_through_the_epochs_in_one_go_or_one_by_one(plan: BatchPlan, epochs: int) -> None:
    places = [(epoch, index) for epoch in range(epochs) for index in range(plan.batches_per_epoch)]
    assert [plan.place_of(number) for number in range(len(places))] == places
    assert [batch.epoch for batch in plan.batches(0, len(places))] == [epoch for epoch, _ in places]
    assert plan.batches_per_epoch * epochs == len(places)
    again = BatchPlan(dict(plan.buckets), plan.global_batch, plan.seed, plan.leftovers, plan.window)
    alone = [again.batch_at(number) for number in reversed(range(len(places)))]
    assert values(plan.batches(0, len(places))) == values(alone[::-1])


def run(plan: BatchPlan, state: str, steps: int, world_size: int) -> tuple[list[list[Any]], str]:
    """What all ranks read of some steps, put together again, from a state and to the next, as a loader does it."""
    said = json.loads(state)
    assert changed_fields(said["order"], plan.identity()) == []
    read = []
    for batch in plan.batches(said["number"], steps):
        cuts = [rank_slice(len(batch.positions), rank, world_size) for rank in range(world_size)]
        read.append((batch.bucket, batch.epoch, np.concatenate([batch.positions[cut] for cut in cuts]).tolist()))
    return read, json.dumps(said | {"number": said["number"] + steps})


worlds = st.integers(1, 8)


@given(plans(), st.tuples(worlds, worlds, worlds), st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)))
def test_a_run_resumed_twice_at_other_world_sizes_reads_what_one_rank_reads_in_one_go(
    plan: BatchPlan, world_sizes: tuple[int, int, int], steps: tuple[int, int, int]
) -> None:
    begin = json.dumps({"number": 0, "order": plan.identity()})
    whole, end = run(plan, begin, sum(steps), 1)
    read, state = list[list[Any]](), begin
    for world_size, count in zip(world_sizes, steps, strict=True):
        fresh = BatchPlan(dict(plan.buckets), plan.global_batch, plan.seed, plan.leftovers, plan.window)
        part, state = run(fresh, state, count, world_size)
        read += part
    assert (read, state) == (whole, end)


def test_the_order_for_a_fixed_seed_is_the_one_of_the_first_release() -> None:
    # If this changes, a run resumed after an update sees some records twice in an epoch and others never, and a
    # published seed no longer gives the published run: an ORDER break in the changelog, and a new ORDER_VERSION.
    # Digests of every mode are in test_mixture.py.
    found = BatchPlan({"48x80": 5, "64x64": 7}, 3, seed=20).batches(0, 6)
    assert values(found) == [
        ("64x64", [0], 0),
        ("64x64", [5, 6, 2], 0),
        ("48x80", [3, 4], 0),
        ("48x80", [2, 1, 0], 0),
        ("64x64", [1, 4, 3], 0),
        ("48x80", [4, 1, 0], 1),
    ]


@pytest.mark.parametrize("leftovers", ["short", "drop"])
@pytest.mark.parametrize("window", [None, ShardWindow(8, 1000)])
def test_a_batch_of_a_billion_records_is_planned_without_the_others(leftovers: Any, window: ShardWindow | None) -> None:
    plan = BatchPlan({"a": 10**9, "b": 10**8}, 256, 0, leftovers=leftovers, window=window)
    tracemalloc.start()
    for number in (0, 1, 77, 10**6, 10**6 + 1, 10**9):
        plan.batch_at(number)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000  # a batch is 2 KB; the permutation of all would be 8 GB


CHANGES: list[tuple[dict[str, Any], list[str]]] = [
    ({"seed": 2}, ["seed: was 1, is now 2"]),
    ({"leftovers": "drop"}, ["leftovers: was 'short', is now 'drop'"]),
    ({"window": ShardWindow(3, 4)}, ["window_shards: was 2, is now 3"]),
    ({"window": ShardWindow(2, {"a": 4, "b": 5})}, ["buckets.b.shard_rows: was 4, is now 5"]),
    ({"buckets": {"a": 6, "b": 7}}, ["buckets.a.records: was 5, is now 6"]),
    ({"buckets": {"b": 7, "a": 5}}, [f"bucket_order[{i}]: was '{'ab'[i]}', is now '{'ba'[i]}'" for i in (0, 1)]),
    ({"global_batch": {"a": 3, "b": 4}}, ["buckets.b.batch_size: was 3, is now 4"]),
    ({}, []),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_an_identity_survives_json_and_names_each_field_that_changed(change: dict[str, Any], said: list[str]) -> None:
    base = {"buckets": {"a": 5, "b": 7}, "global_batch": 3, "seed": 1, "window": ShardWindow(2, 4)}
    was = json.loads(json.dumps(BatchPlan(**base).identity()))
    assert changed_fields(was, BatchPlan(**(base | change)).identity()) == said  # type: ignore[arg-type]


@given(st.integers(0, 100), st.integers(1, 8), st.integers(1, 4))
def test_ranks_and_microbatches_cover_a_batch_in_order(size: int, world_size: int, accumulation: int) -> None:
    batch = list(range(size))
    of_ranks = [batch[rank_slice(size, rank, world_size)] for rank in range(world_size)]
    assert list(chain(*of_ranks)) == batch
    assert max(map(len, of_ranks)) - min(map(len, of_ranks)) <= 1
    for part in of_ranks:
        pieces = [part[rank_slice(len(part), i, accumulation)] for i in range(accumulation)]
        assert len(pieces) == accumulation  # so all ranks make equally many forward passes
        assert list(chain(*pieces)) == part
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
    if size % (world_size * accumulation) == 0:
        assert {len(part) for part in of_ranks} == {size // world_size}


def test_batch_sizes_by_tokens_of_two_shapes() -> None:
    # 256 tokens a square of 256 px with DiT/2, 512 twice as wide: half as many.
    assert batch_sizes_by_tokens(["256x256", "256x512"], 65536, 16, multiple_of=8) == {"256x256": 256, "256x512": 128}
    with pytest.raises(RecipeError, match=r"a batch of 8 has .* image tokens, 4000 are allowed"):
        batch_sizes_by_tokens(["256x256", "256x512"], 4000, 16, multiple_of=8)
    with pytest.raises(RecipeError, match="tokens of 0"):
        batch_sizes_by_tokens(["64x64"], 0, 1)
    with pytest.raises(IndexError, match="2 of 2"):
        rank_slice(8, 2, 2)
