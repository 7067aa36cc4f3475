"""From a row to the model's input: the draw depends on (seed, epoch, record) alone; shift and scale go per channel."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from hypothesis import given, settings
from hypothesis import strategies as st

from leandit.datasets.latents import (
    denormalise,
    draw_noise,
    final_latents,
    normalise,
    record_generator,
    sample_posterior,
)
from leandit.datasets.schema import LatentSpec

SHIFT, SCALE = [0.5, -1.0, 0.0, 2.0], [0.18215, 2.0, -1.0, 0.25]
SHAPE = (4, 3, 5)
seeds = st.integers(0, 2**64 - 1)


def latent_spec(kind: Any, dtype: str = "float16") -> LatentSpec:
    posterior = kind == "mean_logvar"
    return LatentSpec(
        array="moments" if posterior else "latents",
        kind=kind,
        channels=4,
        stored_channels=8 if posterior else 4,
        downscale=8,
        dtype=dtype,
        shift=SHIFT,
        scale=SCALE,
        flip=False,
        batch_size=1,
    )


def moments_of(count: int, *, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (spread * np.random.default_rng(seed).standard_normal((count, 8, 3, 5))).astype(np.float16)


@settings(deadline=None, max_examples=50)
@given(seeds, st.integers(0, 10**6), st.lists(st.integers(0, 2**40), min_size=1, max_size=6, unique=True), st.data())
def test_a_draw_depends_on_seed_epoch_and_record_but_not_on_the_batch(
    seed: int, epoch: int, records: list[int], data: st.DataObject
) -> None:
    spec, moments = latent_spec("mean_logvar"), moments_of(len(records))
    whole = final_latents(moments, spec, seed=seed, epoch=epoch, records=np.array(records))
    order = data.draw(st.permutations(range(len(records))))
    mixed = final_latents(moments[order], spec, seed=seed, epoch=epoch, records=np.array(records)[order])
    np.testing.assert_array_equal(mixed, whole[order])
    for i, record in enumerate(records):
        alone = final_latents(moments[i : i + 1], spec, seed=seed, epoch=epoch, records=np.array([record]))
        np.testing.assert_array_equal(alone[0], whole[i])


def test_every_seed_epoch_and_record_has_its_own_noise() -> None:
    keys = [(seed, epoch, record) for seed in (0, 1, 2**63) for epoch in (0, 1, 5) for record in (0, 1, 2, 10**12)]
    noises = [draw_noise(SHAPE, seed=s, epoch=e, records=np.array([r]))[0].tobytes() for s, e, r in keys]
    assert len(set(noises)) == len(keys)
    # Not only different: no record's noise continues in that of its neighbour.
    neighbours = draw_noise((4, 64, 64), seed=0, epoch=0, records=np.arange(8)).reshape(8, -1)
    assert len(np.unique(neighbours)) > 0.99 * neighbours.size
    assert abs(np.corrcoef(neighbours) - np.eye(8)).max() < 0.05


def test_the_noise_is_standard_normal() -> None:
    noise = draw_noise((4, 32, 32), seed=1, epoch=2, records=np.arange(50)).ravel().astype(np.float64)
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    assert abs((noise**4).mean() - 3) < 0.1


def test_the_noise_of_a_key_is_the_one_of_the_first_release() -> None:
    # If this changes, a run resumed after an update sees other latents, and a published seed gives another run: an
    # ORDER break in the changelog.
    found = record_generator(1, 2, 3).standard_normal(4, dtype=np.float32)
    assert found.tobytes().hex() == "7c9fe5bfc4fe16be94131040c964033f"
    np.testing.assert_array_equal(draw_noise((4,), seed=1, epoch=2, records=np.array([3]))[0], found)


@pytest.mark.parametrize("spread", [3.0, 100.0])  # 100: the clip of the log-variance at -30 and 20 comes into play
def test_the_draw_is_diffusers_formula_for_the_same_noise(spread: float) -> None:
    moments = moments_of(5, spread=spread).astype(np.float32)
    noise = draw_noise(SHAPE, seed=0, epoch=0, records=np.arange(5))
    posterior: Any = DiagonalGaussianDistribution(torch.from_numpy(moments))
    wanted = posterior.mean + posterior.std * torch.from_numpy(noise)
    np.testing.assert_allclose(sample_posterior(moments, noise), wanted.numpy(), rtol=1e-6, atol=1e-6)


def test_a_posterior_without_width_gives_its_mean() -> None:
    moments = np.concatenate([np.ones((2, *SHAPE)), np.full((2, *SHAPE), -30.0)], axis=1).astype(np.float16)
    latents = final_latents(moments, latent_spec("mean_logvar"), seed=0, epoch=0, records=np.arange(2))
    np.testing.assert_allclose(latents, normalise(np.ones((2, *SHAPE), np.float32), latent_spec("mean")), atol=1e-5)


@pytest.mark.parametrize("kind", sorted({*get_args(LatentSpec.model_fields["kind"].annotation)} - {"mean_logvar"}))
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_no_posterior_is_only_shifted_and_scaled_and_left_as_it_was(kind: str, dtype: str) -> None:
    stored = moments_of(3)[:, :4].astype(dtype)
    before = stored.copy()
    results = [
        final_latents(stored, latent_spec(kind, dtype), seed=seed, epoch=epoch, records=np.arange(3))
        for seed, epoch in ((0, 0), (1, 7))
    ]
    np.testing.assert_array_equal(*results)
    assert results[0].dtype == np.float32
    for channel in range(4):
        wanted = (stored[:, channel].astype(np.float64) - SHIFT[channel]) * SCALE[channel]
        np.testing.assert_allclose(results[0][:, channel], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(stored, before)


def test_shift_and_scale_go_per_channel_in_that_order() -> None:
    ones = np.ones((1, 4, 2, 2), np.float32)
    found = normalise(ones, latent_spec("latent"))
    wanted = [0.5 * 0.18215, 2.0 * 2.0, 1.0 * -1.0, -1.0 * 0.25]
    np.testing.assert_allclose(found[0, :, 0, 0], wanted, rtol=1e-6)
    assert (found == found[:, :, :1, :1]).all()


@settings(deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1e-2, 1.0, 100.0]))
def test_denormalise_undoes_normalise(seed: int, spread: float) -> None:
    spec, latents = latent_spec("latent"), moments_of(2, seed=seed, spread=spread)[:, :4].astype(np.float32)
    there, back = normalise(latents, spec), denormalise(latents, spec)
    np.testing.assert_allclose(denormalise(there, spec), latents, rtol=1e-5, atol=1e-5 * max(spread, 1))
    np.testing.assert_allclose(normalise(back, spec), latents, rtol=1e-5, atol=1e-5 * max(spread, 1))
    assert there.dtype == back.dtype == np.float32
