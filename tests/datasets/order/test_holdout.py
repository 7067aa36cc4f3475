"""Held-out records: chosen by their keys alone, so that no growth, order or seed lets one of them train."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leandit.datasets.errors import RecipeError
from leandit.datasets.loader import make_loader
from leandit.datasets.order.filters import RecordFilter, is_held_out
from leandit.datasets.revisions.records import key_hash
from leandit.datasets.store import LatentStore


def hashes_of(keys: Sequence[str]) -> np.ndarray:
    return np.array([key_hash(key) for key in keys], np.uint64)


def held_out(keys: Sequence[str], share: float) -> set[str]:
    return {key for key, is_out in zip(keys, is_held_out(hashes_of(keys), share), strict=True) if is_out}


def test_the_choice_is_this_one() -> None:
    """Golden: with another choice, runs that resume or follow would train on records that were held out before."""
    hashes = hashes_of(["n01440764/10026", "images/0.png", ""])
    assert hashes.tolist() == [15705493248779199630, 4208413429367991535, 7327116974169609948]


@given(st.lists(st.text(), unique=True), st.lists(st.text(), unique=True), st.floats(0, 0.999), st.floats(0, 0.999))
def test_growth_order_and_a_larger_share_never_release_a_record(
    first: list[str], second: list[str], share: float, other: float
) -> None:
    small, large = sorted((share, other))
    grown = list(dict.fromkeys([*second, *reversed(first)]))
    assert held_out(first, small) == held_out(grown, small) & set(first)
    assert held_out(grown, small) <= held_out(grown, large)


def test_the_share_is_that_of_the_records() -> None:
    keys = [f"n{number:08}" for number in range(200_000)]
    for share in (0.0, 0.001, 0.25):
        assert len(held_out(keys, share)) / len(keys) == pytest.approx(share, rel=0.1)


def test_a_record_trains_or_is_held_out_and_a_filter_comes_first(label_store: LatentStore) -> None:
    with_filter = RecordFilter(labels=[0, 2], holdout=0.5).select(label_store)
    without = RecordFilter(labels=[0, 2]).select(label_store)
    for bucket, count in without.counts.items():
        trained, out = with_filter.positions[bucket], with_filter.held_out[bucket]
        all_of_them = without.positions[bucket]
        assert trained is not None
        assert all_of_them is not None
        assert sorted([*trained, *out]) == all_of_them.tolist()
        assert 0 < len(out) < count
    assert with_filter.num_filtered["label"] == 5
    assert with_filter.num_filtered["holdout"] == sum(map(len, with_filter.held_out.values()))
    assert with_filter.identity == without.identity | {"holdout": 0.5}
    batches = list(make_loader(label_store, global_batch=4, selection=with_filter))
    hashes = label_store.numbers("keys")
    assert not is_held_out(hashes[np.concatenate([batch.records for batch in batches])], 0.5).any()


@pytest.mark.parametrize("share", [1.0, -0.1])
def test_a_holdout_that_leaves_nothing_is_refused(share: float) -> None:
    with pytest.raises(RecipeError, match=r"expected a share from 0 to below 1"):
        RecordFilter(holdout=share)
