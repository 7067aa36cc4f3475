"""Keyed permutations, their inverse, windows of blocks, keyed choices: pure, even, and the same for ever."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from leandit.datasets.order.shuffle import keyed_choice, keyed_hash, permute, permute_in_windows

seeds = st.integers(0, 2**64 - 1)

GOLDEN_PERMUTED = [706125455025, 75605624888, 658012575310]
GOLDEN_HASH = 0x5DEF8C1F8A9E3322
GOLDEN_CHOICES = [2, 0, 3, 5, 5, 5, 4, 2, 2, 3, 2, 0]
GOLDEN_WINDOWS = [8, 2, 7, 1, 0, 6, 15, 16, 4, 3, 5, 13, 14, 9, 10, 11, 12]


def in_windows(places: np.ndarray, size: int, rows: int, shards: int, seed: int = 0) -> np.ndarray:
    keys = {"block_key": keyed_hash(seed, 1), "row_key": keyed_hash(seed, 2)}
    return permute_in_windows(places, size, rows=rows, shards=shards, **keys)


def test_the_permutations_for_a_fixed_key_are_those_of_the_first_release() -> None:
    # If these change, so does every batch order, caption choice and flip of every seed: an ORDER break.
    assert permute(np.array([0, 1, 10**12 - 1]), 10**12, key=7).tolist() == GOLDEN_PERMUTED
    assert permute(np.array(GOLDEN_PERMUTED), 10**12, key=7, inverse=True).tolist() == [0, 1, 10**12 - 1]
    assert permute(np.array([0, 1, 10**12 - 1] * 20), 10**12, key=7).tolist() == GOLDEN_PERMUTED * 20
    assert keyed_hash(0, 1, 2) == GOLDEN_HASH
    assert _choose(7, seed=1, epoch=2, count=12).tolist() == GOLDEN_CHOICES
    assert in_windows(np.arange(17), 17, rows=3, shards=2).tolist() == GOLDEN_WINDOWS


@given(st.integers(1, 10**12), seeds, st.data())
def test_unpermute_undoes_permute_for_few_indices_and_for_many(size: int, key: int, data: st.DataObject) -> None:
    for count in (5, 60):
        indices = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count)))
        assert permute(permute(indices, size, key), size, key, inverse=True).tolist() == indices.tolist()
        assert permute(permute(indices, size, key, inverse=True), size, key).tolist() == indices.tolist()


window_shapes = st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5))


@given(window_shapes, seeds)
def test_a_shuffle_in_windows_stays_in_the_blocks_of_a_window(shape: tuple[int, int, int], seed: int) -> None:
    size, rows, shards = shape
    found = in_windows(np.arange(size), size, rows, shards, seed)
    assert sorted(found.tolist()) == list(range(size))
    # Walked from the start, each window takes all of its blocks, and nothing else, before the next one begins.
    blocks, begun, done = found // rows, set[int](), set[int]()
    left = {block: int(np.count_nonzero(blocks == block)) for block in set(blocks.tolist())}
    for block in blocks.tolist():
        assert block not in done
        if len(begun) == shards and block not in begun:
            raise AssertionError("a window of more blocks than asked for")
        begun.add(block)
        left[block] -= 1
        if not any(left[b] for b in begun):
            done |= begun
            begun = set()
    assert not begun


def _choose(choices: int, *, seed: int, epoch: int, count: int, purpose: int = 2) -> np.ndarray:
    return keyed_choice(np.full(count, choices), seed=seed, epoch=epoch, records=np.arange(count), purpose=purpose)


@given(st.lists(st.integers(1, 2**31), min_size=1, max_size=50), seeds, st.integers(0, 10**6))
def test_a_keyed_choice_is_in_range_and_depends_on_its_record_alone(choices: list[int], seed: int, epoch: int) -> None:
    counts, records = np.array(choices), np.arange(len(choices)) * 10**9
    found = keyed_choice(counts, seed=seed, epoch=epoch, records=records, purpose=2)
    assert found.min() >= 0
    assert (found < counts).all()
    last = keyed_choice(counts[-1:], seed=seed, epoch=epoch, records=records[-1:], purpose=2)
    assert last[0] == found[-1]
