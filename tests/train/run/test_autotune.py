"""Microbatches: all ranks cut alike; sizes from two measured peaks; made-up batches go through every model."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from making import CPU, train_recipe

from leandit.datasets.errors import ResourceError
from leandit.datasets.order.slices import rank_slice
from leandit.datasets.store import LatentStore
from leandit.train.objectives.losses import PLAIN
from leandit.train.parallel.ranks import Ranks
from leandit.train.run import autotune
from leandit.train.run.autotune import TRIED, area, microbatch_sizes, most_that_fit, synthetic_microbatch
from leandit.train.run.state import prepare
from leandit.train.step.image_losses import image_losses
from leandit.train.step.train_step import microbatches


@given(size=st.integers(1, 500), world_size=st.integers(1, 9), limit=st.integers(0, 60))
def test_microbatches_cover_every_rank_and_are_as_many_on_all(size: int, world_size: int, limit: int) -> None:
    parts = microbatches(size, world_size, limit)
    sizes = {part.stop - part.start for part in parts}
    assert len(sizes) == 1
    assert not limit or max(sizes) <= limit
    for rank in range(world_size):
        images = range(*rank_slice(size, rank, world_size).indices(size))
        assert [i for part in parts for i in images[part]] == list(images)
    most = math.ceil(size / world_size)
    assert len(parts) == (math.ceil(most / limit) if limit else 1)


@given(constant=st.integers(0, 1 << 34), each=st.integers(1 << 10, 1 << 30), free=st.integers(0, 1 << 38))
def test_as_many_images_as_memory_has_room_for(constant: int, each: int, free: int) -> None:
    def bytes_of(images: int) -> int:
        return constant + images * each

    for tried in TRIED:
        most = most_that_fit(tried, (float(bytes_of(tried[0])), float(bytes_of(tried[1]))), float(free))
        assert most < 1 or bytes_of(most) <= free
        assert bytes_of(max(most, 0) + 1) > free


def test_smaller_buckets_take_more_images() -> None:
    sizes = microbatch_sizes({"512x512": 9, "256x512": 9, "768x320": 9}, "512x512", 10)
    assert sizes == {"512x512": 10, "256x512": 20, "768x320": 10}
    assert all(sizes[bucket] * area(bucket) <= 10 * 512 * 512 for bucket in sizes)


@pytest.mark.parametrize("buckets", [["256x512", "512x256"], ["512x256", "256x512"]])
def test_of_buckets_with_as_many_pixels_the_first_is_measured(
    buckets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = []
    monkeypatch.setattr(autotune, "_fastest_attention", lambda _, largest: [largest])
    monkeypatch.setattr(autotune, "install_flash", installed.append)
    state: Any = SimpleNamespace(
        device=torch.device("cuda"),
        stores=[SimpleNamespace(buckets=dict.fromkeys(["32x32", *buckets], 1))],
        attention_kernels=[],
        recipe=train_recipe("dit-s-4", "run.microbatch=1"),
    )
    autotune.tune(state, SimpleNamespace(announce=lambda value: value))  # type: ignore[arg-type]
    assert state.attention_kernels == buckets[:1]
    assert installed == [buckets[:1]]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.usefixtures("tiny_models")
def test_a_trial_without_room_is_made_smaller_or_ends_where_others_wait(
    world_size: int, label_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def peak(_state: object, _bucket: str, images: int) -> float:
        tried.append(images)
        if images * world_size > 2:
            raise torch.OutOfMemoryError
        return 100.0 * images

    monkeypatch.setattr(autotune, "_peak", peak)
    monkeypatch.setattr(autotune, "_bytes_to_come", lambda _: 0.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10_000, 10_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    state = prepare(train_recipe("dit-s-4"), [label_store], CPU, print)
    state.ranks = Ranks(world_size=world_size)
    if world_size == 1:
        assert autotune._most_images(state, "32x32") == 92
        assert tried == [2, 4, 1, 2]
    else:
        with pytest.raises(ResourceError, match=r"two images of bucket '32x32'.*run\.microbatch=1"):
            autotune._most_images(state, "32x32")
        assert tried == [1, 2]


@pytest.mark.parametrize("name", ["dit-s-4", "pixart-tiny"])
@pytest.mark.usefixtures("tiny_models")
def test_a_made_up_batch_is_of_the_size_of_a_real_one_and_goes_through_the_model(
    name: str, label_store: LatentStore, caption_store: LatentStore
) -> None:
    store = label_store if name == "dit-s-4" else caption_store
    state = prepare(train_recipe(name), [store], CPU, print)
    bucket = max(store.buckets, key=area)
    images = synthetic_microbatch(state, bucket, 2)
    conditioning = images.conditioning
    assert images.latents.shape[1:] == next(batch for batch in state.loader if batch.bucket == bucket).latents.shape[1:]
    if conditioning.captions is not None:
        assert store.spec.text
        assert conditioning.captions.shape[1] == store.spec.text.max_tokens
    losses = image_losses(state, images, 1)[PLAIN]
    assert losses.shape == (2,)
    assert torch.isfinite(losses).all()
