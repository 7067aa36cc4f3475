"""Slices of ranks and microbatches cover a batch exactly; batch sizes by tokens keep their limit."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leandit.datasets.errors import RecipeError
from leandit.datasets.format.buckets import bucket_name, bucket_size, bucket_table
from leandit.datasets.order.slices import batch_sizes_by_tokens, rank_slice


@given(st.integers(0, 100), st.integers(1, 8), st.integers(1, 4))
def test_ranks_and_microbatches_cover_a_batch_in_order_and_evenly(
    size: int, world_size: int, accumulation: int
) -> None:
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


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    with pytest.raises(IndexError, match=f"{rank} of 2"):
        rank_slice(8, rank, 2)


@given(st.sampled_from([256, 512, 1024]), st.integers(1, 10**6), st.sampled_from([16, 32]), st.integers(1, 8))
def test_batch_sizes_by_tokens_are_the_largest_that_are_allowed(
    resolution_px: int, tokens: int, pixels_per_token: int, multiple_of: int
) -> None:
    names = [bucket_name(*row[1:]) for row in bucket_table("pixart", resolution_px)]
    areas = {name: bucket_size(name)[0] * bucket_size(name)[1] for name in names}
    allowed = tokens * pixels_per_token**2
    if any(multiple_of * area > allowed for area in areas.values()):
        with pytest.raises(RecipeError, match=f"a batch of {multiple_of} has .* image tokens, {tokens} are allowed"):
            batch_sizes_by_tokens(names, tokens, pixels_per_token, multiple_of=multiple_of)
        return
    sizes = batch_sizes_by_tokens(names, tokens, pixels_per_token, multiple_of=multiple_of)
    assert list(sizes) == names
    for name, size in sizes.items():
        assert size % multiple_of == 0
        assert size * areas[name] <= allowed < (size + multiple_of) * areas[name]


def test_batch_sizes_by_tokens_of_two_shapes() -> None:
    # 256 tokens a square of 256 px with DiT/2, 512 twice as wide: half as many.
    assert batch_sizes_by_tokens(["256x256", "256x512"], 65536, 16, multiple_of=8) == {"256x256": 256, "256x512": 128}


@pytest.mark.parametrize("name", ["tokens", "pixels_per_token", "multiple_of"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=f"{name} of 0"):
        batch_sizes_by_tokens(["64x64"], **({"tokens": 1, "pixels_per_token": 1} | {name: 0}))
