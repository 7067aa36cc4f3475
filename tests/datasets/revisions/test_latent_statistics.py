"""Statistics of the latents: those of all values, however they are split, and kept through every revision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from faults import break_word
from hypothesis import given
from hypothesis import strategies as st
from making import COMPANIONS, caption_recipe, encode, latent_spec, make_companion_folder, no_progress
from stores import ImageSource, make_added, make_grown, make_plain, small_shards

from leandit.datasets.batches.latents import normalised_as
from leandit.datasets.disk.hashing import canonical_json
from leandit.datasets.format.schema import Decoding, LatentSpec, LatentStatistics
from leandit.datasets.loader import make_loader
from leandit.datasets.revisions.catalog import read_manifest, sealed_revisions
from leandit.datasets.revisions.latent_statistics import merge_statistics, statistics_of
from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError
from leandit.tools.export.compact import compact

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


def statistics_of_stored_rows(store: LatentStore) -> LatentStatistics:
    """Those of every view of every stored record."""
    views = [(variant, flipped) for variant in range(store.spec.images.variants) for flipped in (False, True)]
    rows = [
        store.latents(bucket, variant=variant, flipped=flipped).take(store.index(bucket).rows)
        for bucket in store.buckets
        for variant, flipped in views
        if store.spec.latent.flip or not flipped
    ]
    return statistics_of(rows, store.spec.latent)


def assert_those_of_stored_records(root: Path) -> None:
    for revision in sealed_revisions(root):
        found = statistics_in(root, revision)
        assert_close(found, statistics_of_stored_rows(LatentStore(root, revision=revision)))


GROWN: dict[str, tuple[Callable[..., tuple[ImageSource, Path]], tuple[str, ...]]] = {
    "only new images": (make_added, ("vae.flip=true",)),
    "images that are new, replaced and dropped": (make_grown, ()),
    "all views of such images": (make_grown, ("vae.flip=true", "images.variants=2")),
    "compressed shards": (make_grown, ("store.codec=blosc",)),
    "latents in int8": (make_grown, ("vae.keep=mean", "store.dtype=int8")),
}


@pytest.mark.parametrize("case", GROWN)
def test_every_revision_and_its_compaction_have_those_of_their_stored_records(case: str, tmp_path: Path) -> None:
    make, overrides = GROWN[case]
    with small_shards():
        grown = make(tmp_path, *overrides)[1]
    assert statistics_in(grown, 1) != statistics_in(grown, 3)
    assert_those_of_stored_records(grown)
    compact(grown, tmp_path / "new", progress=no_progress)
    assert_close(statistics_in(tmp_path / "new", 4), statistics_in(grown, 3))


def test_few_images_that_are_left_of_many_have_theirs(tmp_path: Path) -> None:
    with small_shards():
        images, store = make_plain(tmp_path)
        for i in range(8):
            images.drop(i)
        images.write()
        encode(caption_recipe(), images.root, store, drop_gone=True)
    assert len(LatentStore(store)) == 2
    assert_those_of_stored_records(store)


def test_a_damaged_row_that_no_record_uses_any_more_does_not_count(tmp_path: Path) -> None:
    with small_shards():
        images, store = make_plain(tmp_path)
        first = LatentStore(store)
        record = first.record("images/0.png")
        array = first.latents(record.bucket or "")
        path, start, _ = array.place(record.row)
        content = bytearray((store / path).read_bytes())
        content[start : start + 2] = np.float16(6e4).tobytes()
        (store / path).write_bytes(content)
        images.put(0, seed=77)
        images.write()
        encode(caption_recipe(), images.root, store)
    assert_close(statistics_in(store, 2), statistics_of_stored_rows(LatentStore(store)))


def test_a_store_whose_statistics_count_other_rows_has_the_right_ones_once_it_grows(tmp_path: Path) -> None:
    with small_shards():
        images, store = make_plain(tmp_path)
        manifest = read_manifest(store, 1)
        assert manifest.statistics
        biased = manifest.statistics.model_copy(update={"count": manifest.statistics.count + 184})
        changed = manifest.model_copy(update={"statistics": biased}).with_hash()
        for name in ("manifest.json", "twin/manifest.json"):
            (store / "revisions/000001" / name).write_bytes(canonical_json(changed.model_dump()))
        images.put(20)
        images.write()
        encode(caption_recipe(), images.root, store)
    assert_close(statistics_in(store, 2), statistics_of_stored_rows(LatentStore(store)))


def test_the_rows_of_records_that_a_caption_rejects_do_not_count(tmp_path: Path) -> None:
    broken = break_word(tmp_path / "t5", "triangle")
    with small_shards():
        images = ImageSource(tmp_path / "source", 6)
        images.describe(1, words=" and a triangle")
        images.write()
        encode(caption_recipe(broken, "source.max_reject_share=1"), images.root, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert (store.record("images/1.png").reason, len(store)) == ("nonfinite_caption", 5)
    assert_those_of_stored_records(store.path)


def test_the_rows_of_records_that_an_addition_rejects_do_not_count(tmp_path: Path) -> None:
    allowed = "source.max_reject_share=1"
    with small_shards():
        folder = make_companion_folder(tmp_path / "source", count=5)
        encode(caption_recipe(allowed), folder, tmp_path / "store")
        (folder / "masks/4.png").write_bytes(b"no image")
        encode(caption_recipe(allowed, *COMPANIONS), folder, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert (store.revision, len(store)) == (2, 4)
    assert_those_of_stored_records(store.path)


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
