"""Statistics of the latents: those of all values, however they are split, and kept through every revision."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import latent_spec, no_progress
from stores import make_added, small_shards

from leandit.datasets.batches.latents import normalised_as
from leandit.datasets.errors import RecipeError
from leandit.datasets.format.schema import Decoding, LatentSpec, LatentStatistics
from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.compact import compact
from leandit.datasets.revisions.catalog import read_manifest
from leandit.datasets.revisions.latent_statistics import merge_statistics, statistics_of
from leandit.datasets.store import LatentStore

SHIFT, SCALE = [0.5, -1.0, 2.0], [0.18215, -2.0, 1.0]
spec_of = partial(latent_spec, shift=SHIFT, scale=SCALE)
KINDS = ("mean_logvar", "mean_std", "mean", "sample", "latent")


def rows_of(spec: LatentSpec, seed: int, count: int = 7) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = 2 * rng.standard_normal((count, spec.stored_channels, 4, 5)) + np.arange(spec.stored_channels)[:, None, None]
    if spec.kind == "mean_std":
        rows[:, spec.channels :] = np.abs(rows[:, spec.channels :])
    return rows.astype(spec.dtype)


def plainly(rows: np.ndarray, spec: LatentSpec) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation by their definitions, in float64."""
    values = rows[np.isfinite(rows).all(axis=(1, 2, 3))].astype(np.float64)
    mean, variance = values[:, : spec.channels], np.zeros(1)
    if spec.has_posterior:
        spread = values[:, spec.channels :]
        variance = np.exp(spread) if spec.kind == "mean_logvar" else spread**2
        variance = variance.mean(axis=(0, 2, 3))
    std = np.sqrt(mean.var(axis=(0, 2, 3)) + variance)
    return (mean.mean(axis=(0, 2, 3)) - SHIFT) * SCALE, std * np.abs(SCALE)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_all_values(kind: str, dtype: str) -> None:
    spec = spec_of(kind, dtype)
    rows = rows_of(spec, 0)
    rows[2] = np.nan  # a reject
    found, (mean, std) = statistics_of([rows], spec), plainly(rows, spec)
    assert found.count == 6 * 20
    tolerance = 1e-6 if dtype == "float16" else 1e-3  # float32 values are counted by their nearest float16
    np.testing.assert_allclose(found.channel_mean, mean, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.channel_std, std, rtol=tolerance)


@given(st.sampled_from(KINDS), st.integers(0, 1000), st.lists(st.integers(0, 7), max_size=4))
def test_however_the_rows_are_split_the_merge_is_that_of_all(kind: str, seed: int, cuts: list[int]) -> None:
    spec = spec_of(kind)
    rows = rows_of(spec, seed)
    parts = [statistics_of([part], spec) for part in np.split(rows, sorted(cuts))]
    merged, whole = merge_statistics(parts), statistics_of([rows], spec)
    assert merged.count == whole.count
    np.testing.assert_allclose(merged.channel_mean, whole.channel_mean, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(merged.channel_std, whole.channel_std, rtol=1e-12)


def test_their_bits_do_not_depend_on_the_order_of_values_or_arrays_and_rejects_count_for_nothing() -> None:
    spec = spec_of("mean_logvar")
    rows, flipped = rows_of(spec, 0, count=60), rows_of(spec, 1, count=60)
    some = statistics_of([rows, flipped], spec)
    assert some == statistics_of([flipped[::-1], rows[:, :, ::-1]], spec)
    empty = statistics_of([np.full((3, 6, 2, 2), np.nan, np.float16)], spec)
    assert empty == LatentStatistics(count=0, channel_mean=[0.0] * 3, channel_std=[0.0] * 3)
    assert merge_statistics([empty, some, empty]).count == some.count


def test_a_small_variance_beside_a_large_mean_is_not_lost() -> None:
    spec = spec_of("mean")
    rows = np.full((512, 3, 4, 5), 1000, np.float16)
    rows[::2] += np.float16(0.5)
    parts = [statistics_of([part], spec) for part in np.split(rows, 16)]
    np.testing.assert_allclose(merge_statistics(parts).channel_std, 0.25 * np.abs(SCALE), rtol=1e-9)


# --- In a store -------------------------------------------------------------------------------------------------------


def assert_close(found: LatentStatistics | None, wanted: LatentStatistics | None) -> None:
    assert found
    assert wanted
    assert found.count == wanted.count
    np.testing.assert_allclose(found.channel_mean, wanted.channel_mean, rtol=1e-9)
    np.testing.assert_allclose(found.channel_std, wanted.channel_std, rtol=1e-9)


def statistics_in(store: Path, revision: int = 1) -> LatentStatistics | None:
    return read_manifest(store, revision).statistics


def test_a_manifest_has_those_of_all_its_latents_flipped_earlier_and_compacted(tmp_path: Path) -> None:
    with small_shards():
        grown = make_added(tmp_path, "vae.flip=true")[1]
    assert statistics_in(grown, 1) != statistics_in(grown, 3)
    for revision in (1, 3):
        store, parts = LatentStore(grown, revision=revision), []
        for flipped in (False, True):
            parts += [
                statistics_of(
                    [store.latents(bucket, flipped=flipped).take(store.index(bucket).rows)], store.spec.latent
                )
                for bucket in store.buckets
            ]
        assert_close(statistics_in(grown, revision), merge_statistics(parts))
    compact(grown, tmp_path / "new", progress=no_progress)
    assert_close(statistics_in(tmp_path / "new", 4), statistics_in(grown, 3))


# --- As the model sees them -------------------------------------------------------------------------------------------


def test_latents_normalised_by_the_store_have_mean_0_and_deviation_1(label_store: LatentStore) -> None:
    loader = make_loader(label_store, global_batch=15, normalise="store")
    drawn = np.concatenate([loader.dataset.reader[epoch].latents.numpy() for epoch in range(40)])
    np.testing.assert_allclose(drawn.mean(axis=(0, 2, 3)), 0, atol=0.02)
    np.testing.assert_allclose(drawn.std(axis=(0, 2, 3)), 1, atol=0.02)


def test_latents_without_normalisation_are_those_of_the_vae() -> None:
    spec = spec_of("mean")
    assert normalised_as(spec, "encoder") is spec
    plain = normalised_as(spec, "none")
    assert (plain.shift, plain.scale) == ([0.0] * 3, [1.0] * 3)
    imported = spec.model_copy(
        update={"decoding": Decoding(shift=[1.0, 2.0, 3.0], scale=[2.0, 4.0, 0.5], zero_to_one=False)}
    )
    plain, row = normalised_as(imported, "none"), np.array([3.0, 3.0, 3.0])
    np.testing.assert_allclose((row - plain.shift) * plain.scale, row / [2.0, 4.0, 0.5] + [1.0, 2.0, 3.0])


def test_a_store_without_statistics_says_how_to_get_them(label_store: LatentStore, tmp_path: Path) -> None:
    advice = "An incomplete store has them once it is finished"
    with pytest.raises(RecipeError, match=f"the store has none in its statistics.*{advice}"):
        normalised_as(label_store.spec.latent, "store")
    constant = LatentStatistics(count=4, channel_mean=[1.0] * 3, channel_std=[0.0, 1.0, 1.0])
    with pytest.raises(RecipeError, match="a channel with standard deviation 0"):
        normalised_as(spec_of("mean"), "store", constant)
