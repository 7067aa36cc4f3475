"""Latents as int8 with a scale for each 64 channels of a position (``store.dtype = "int8"``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import adm_by_hand
from making import CPU, encode, label_recipe
from PIL import Image
from stores import deep

from leandit.datasets.batches.latents import final_latents, mean_latents
from leandit.datasets.format.schema import LatentSpec
from leandit.datasets.format.token_dtypes import narrow_latents, widen_latents
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.tools.inspection.images import LatentDecoder
from leandit.tools.inspection.store_facts import describe_record

MEAN = "vae.keep=mean"


@pytest.fixture(scope="module")
def stores(class_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LatentStore]:
    """The same images in float32 and in int8."""
    root, found = tmp_path_factory.mktemp("int8"), {}
    for dtype in ("float32", "int8"):
        encode(label_recipe(MEAN, "vae.flip=true", f"store.dtype={dtype}"), class_folder, root / dtype)
        found[dtype] = LatentStore(root / dtype)
    return found


@pytest.mark.parametrize("channels", [1, 6, 63, 64, 65, 130, 768])
def test_a_position_has_a_scale_for_each_64_channels_in_further_channels(channels: int) -> None:
    latents = np.random.default_rng(0).normal(size=(3, channels, 2, 5)).astype(np.float32)
    latents[1, :, 0, 0] = 0
    latents[2, channels // 2] *= 300
    stored = narrow_latents(latents)
    groups = -(-channels // 64)
    assert (stored.shape, stored.dtype) == ((3, channels + 2 * groups, 2, 5), np.dtype(np.int8))
    assert stored.flags.c_contiguous
    numbers = widen_latents(stored)
    for image, row, column in np.ndindex(3, 2, 5):  # FORMAT.md's words, a position at a time
        scales = np.frombuffer(stored[image, channels:, row, column].tobytes(), "<f2").astype(np.float32)
        for group, scale in enumerate(scales):
            part = slice(64 * group, min(64 * group + 64, channels))
            exact = latents[image, part, row, column]
            assert scale == pytest.approx(np.abs(exact).max() / 127, rel=2e-3)
            np.testing.assert_array_equal(numbers[image, part, row, column], stored[image, part, row, column] * scale)
            assert np.abs(numbers[image, part, row, column] - exact).max() <= 0.501 * scale
    spec = LatentSpec(
        array="latents", kind="latent", channels=channels, stored_channels=channels, downscale=16, dtype="int8",
        shift=[0.0] * channels, scale=[1.0] * channels, flip=False, batch_size=1, tile_px=0,
    )  # fmt: skip
    assert spec.row_channels == stored.shape[1]
    ours = final_latents(torch.from_numpy(stored), spec, None)
    np.testing.assert_array_equal(ours.numpy(), numbers)


def test_rows_statistics_and_images_are_of_float32_but_for_the_rounding(stores: dict[str, LatentStore]) -> None:
    exact, rounded = stores["float32"], stores["int8"]
    for flipped in (False, True):
        before, after = (one.latents("32x32", flipped=flipped)[:] for one in (exact, rounded))
        np.testing.assert_array_equal(after, narrow_latents(before))
    spec, stored = rounded.spec.latent, torch.from_numpy(rounded.latents("32x32")[:].copy())
    numbers = torch.from_numpy(widen_latents(stored.numpy()).copy())
    as_float = spec.model_copy(update={"dtype": "float32"})
    for function in (lambda rows, one: final_latents(rows, one, None), mean_latents):
        assert torch.equal(function(stored, spec), function(numbers, as_float))
    statistics = [store.manifest.statistics for store in (exact, rounded) if store.manifest]
    np.testing.assert_allclose(statistics[1].channel_std, statistics[0].channel_std, rtol=0.02)
    decoded = [LatentDecoder.of_store(one, None, CPU).decode_rows(one.latents("32x32")[:4]) for one in (exact, rounded)]
    assert np.abs(decoded[0].astype(int) - decoded[1].astype(int)).max() <= 8
    described = describe_record(rounded, rounded.record_at(0))
    assert (described["stored_shape"][0], len(described["channel_mean"])) == (spec.channels + 2, spec.channels)


def test_it_is_verified_and_encoded_again_bit_for_bit(stores: dict[str, LatentStore], class_folder: Path) -> None:
    root = stores["int8"].path
    assert not verify_store(root).findings
    found = deep(root, class_folder)
    assert (found.num_exact, found.num_close, found.findings) == (found.num_records, 0, [])


def test_moments_are_refused_and_what_is_not_finite_is_rejected_and_counts_for_no_statistics(
    class_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError, match=r'store\.dtype "int8".*vae\.keep = "mean"'):
        encode(label_recipe("store.dtype=int8"), class_folder, tmp_path / "moments")
    forward = ImageEncoder.encode

    def failing(self: ImageEncoder, pixels: np.ndarray) -> np.ndarray:
        moments = forward(self, pixels).copy()
        moments[pixels[:, 0, 0, 0] == first, 0, 0, 0] = np.nan
        return moments

    pixels = [adm_by_hand(Image.open(path), 32)[0, 0, 0] for path in sorted(class_folder.glob("*/*.png"))]
    first = pixels[7]
    monkeypatch.setattr(ImageEncoder, "encode", failing)
    manifest = encode(label_recipe(MEAN, "store.dtype=int8"), class_folder, tmp_path / "store").manifest
    assert manifest.num_rejected == pixels.count(first)
    assert manifest.statistics.count == manifest.num_stored * 4 * 4
    assert {one["reason"] for one in LatentStore(tmp_path / "store").records.to_pylist()} == {"nonfinite", None}
