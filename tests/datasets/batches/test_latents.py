"""From a row to the model's input: the draw depends on (seed, epoch, record) alone; shift and scale go per channel."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import making
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from hypothesis import given
from hypothesis import strategies as st

from leandit.datasets.batches.latents import denormalise, draw_keys, final_latents, keyed_noise, normalise
from leandit.datasets.format.schema import POSTERIORS, Decoding, LatentSpec
from leandit.precompute.run.columns import sample_once

SHIFT, SCALE = [0.5, -1.0, 0.0, 2.0], [0.18215, 2.0, -1.0, 0.25]
SHAPE = (4, 3, 5)
seeds = st.integers(0, 2**64 - 1)
latent_spec = partial(making.latent_spec, shift=SHIFT, scale=SCALE)


def moments_of(count: int, *, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (spread * np.random.default_rng(seed).standard_normal((count, 8, 3, 5))).astype(np.float16)


def stored_of(count: int, *, seed: int = 0, spread: float = 3.0, dtype: str = "float16") -> torch.Tensor:
    return torch.from_numpy(moments_of(count, seed=seed, spread=spread).astype(dtype))


def keys_of(records: list[int], *, seed: int = 0, epoch: int = 0) -> torch.Tensor:
    return draw_keys(seed, np.full(len(records), epoch), np.array(records))


@given(seeds, st.integers(0, 10**6), st.lists(st.integers(0, 2**40), min_size=1, max_size=6, unique=True), st.data())
def test_a_draw_depends_on_seed_epoch_and_record_but_not_on_the_batch(
    seed: int, epoch: int, records: list[int], data: st.DataObject
) -> None:
    spec, stored = latent_spec("mean_logvar"), stored_of(len(records))
    keys = keys_of(records, seed=seed, epoch=epoch)
    whole = final_latents(stored, spec, keys)
    order = torch.tensor(data.draw(st.permutations(range(len(records)))))
    np.testing.assert_array_equal(final_latents(stored[order], spec, keys[order]), whole[order])
    for i, record in enumerate(records):
        alone = final_latents(stored[i : i + 1], spec, keys_of([record], seed=seed, epoch=epoch))
        np.testing.assert_array_equal(alone[0], whole[i])


def test_a_draw_is_the_same_in_a_large_batch_and_with_any_number_of_threads() -> None:
    # Vector units compute the ends of an array otherwise than its middle, and threads cut it in pieces.
    spec, stored = latent_spec("mean_logvar"), stored_of(301)
    keys, before = keys_of(list(range(301))), torch.get_num_threads()
    whole = final_latents(stored, spec, keys)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            parts = [final_latents(stored[i : i + 7], spec, keys[i : i + 7]) for i in range(0, 301, 7)]
            np.testing.assert_array_equal(torch.cat(parts), whole)
    finally:
        torch.set_num_threads(before)


def test_every_seed_epoch_and_record_has_its_own_noise() -> None:
    keys = [(seed, epoch, record) for seed in (0, 1, 2**63) for epoch in (0, 1, 5) for record in (0, 1, 2, 10**12)]
    noises = [keyed_noise(keys_of([r], seed=s, epoch=e), SHAPE).numpy().tobytes() for s, e, r in keys]
    assert len(set(noises)) == len(keys)
    # Not only different: no record's noise continues in that of its neighbour.
    neighbours = keyed_noise(keys_of(list(range(8))), (4, 64, 64)).reshape(8, -1).numpy()
    assert len(np.unique(neighbours)) > 0.99 * neighbours.size
    assert abs(np.corrcoef(neighbours) - np.eye(8)).max() < 0.05


def test_the_noise_is_standard_normal() -> None:
    noise = keyed_noise(keys_of(list(range(250)), seed=1, epoch=2), (4, 32, 32)).double().numpy().ravel()
    for power, wanted, most in ((1, 0, 0.005), (2, 1, 0.01), (3, 0, 0.01), (4, 3, 0.02)):
        assert abs((noise**power).mean() - wanted) < most
    # Kolmogorov and Smirnov: the largest gap between the two distributions, 1.63 / sqrt(n) in one case of a hundred.
    ordered = np.sort(noise)
    normal = torch.special.ndtr(torch.from_numpy(ordered)).numpy()
    assert abs(normal - np.arange(len(ordered)) / len(ordered)).max() < 1.63 / np.sqrt(len(ordered))
    # The two of a pair, and the pairs of a record, have nothing to do with each other.
    for step in (1, 2, 1024):
        assert abs(np.corrcoef(noise[:-step], noise[step:])[0, 1]) < 0.005
    # If these change, a run resumed after an update sees other latents, and a published seed gives another run: an
    # ORDER break in the changelog.
    found = keyed_noise(keys_of([3], seed=1, epoch=2), (4,))
    assert found.numpy().tobytes().hex() == "c8d81940c0f8093d775bd43f2c8b5bbf"


@pytest.mark.parametrize("spread", [3.0, 100.0])  # 100: the clip of the log-variance at -30 and 20 comes into play
def test_the_draw_is_diffusers_formula_for_the_same_noise(spread: float) -> None:
    stored, keys = stored_of(5, spread=spread), keys_of(list(range(5)))
    posterior: Any = DiagonalGaussianDistribution(stored.float())
    wanted = normalise(posterior.mean + posterior.std * keyed_noise(keys, SHAPE), latent_spec("mean"))
    np.testing.assert_allclose(final_latents(stored, latent_spec("mean_logvar"), keys), wanted, rtol=1e-6, atol=1e-6)
    mean, std = stored.float().chunk(2, dim=1)  # a stored deviation is multiplied as it is
    wanted = normalise(mean + std * keyed_noise(keys, SHAPE), latent_spec("mean"))
    np.testing.assert_array_equal(final_latents(stored, latent_spec("mean_std"), keys), wanted)


def test_a_sample_that_is_frozen_into_a_store_is_drawn_by_the_same_formula() -> None:
    moments = moments_of(50, spread=1.0).astype(np.float32)
    posterior: Any = DiagonalGaussianDistribution(torch.from_numpy(moments))
    drawn = sample_once(moments, np.arange(50))
    noise = (drawn - posterior.mean.numpy()) / posterior.std.numpy()
    assert abs(noise.mean()) < 0.1
    assert noise.std() == pytest.approx(1, abs=0.05)
    np.testing.assert_array_equal(drawn[2:3], sample_once(moments[2:3], np.array([2])))
    assert not np.array_equal(drawn[2:3], sample_once(moments[2:3], np.array([3])))


def test_what_was_applied_before_storing_is_undone_for_the_decoder_only() -> None:
    decoding = Decoding(shift=[0.0, 1.0, -1.0, 0.5], scale=[0.18215, 2.0, 4.0, -1.0], zero_to_one=False)
    plain = latent_spec("sample").model_copy(update={"shift": [0.0] * 4, "scale": [1.0] * 4})
    spec, raw = plain.model_copy(update={"decoding": decoding}), stored_of(3)[:, :4].float()
    shift, scale = (torch.tensor(numbers)[:, None, None] for numbers in (decoding.shift, decoding.scale))
    rows = (raw - shift) * scale
    np.testing.assert_array_equal(final_latents(rows, spec, None), rows)
    np.testing.assert_allclose(denormalise(final_latents(rows, spec, None), spec), raw, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", sorted({*get_args(LatentSpec.model_fields["kind"].annotation)} - set(POSTERIORS)))
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_no_posterior_is_only_shifted_and_scaled_and_left_as_it_was(kind: str, dtype: str) -> None:
    stored = stored_of(3, dtype=dtype)[:, :4]
    before = stored.clone()
    results = [
        final_latents(stored, latent_spec(kind, dtype), keys_of([0, 1, 2], seed=seed, epoch=epoch))
        for seed, epoch in ((0, 0), (1, 7))
    ]
    np.testing.assert_array_equal(*results)
    assert results[0].dtype == torch.float32
    for channel in range(4):
        wanted = (stored[:, channel].double() - SHIFT[channel]) * SCALE[channel]
        np.testing.assert_allclose(results[0][:, channel], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(stored, before)
