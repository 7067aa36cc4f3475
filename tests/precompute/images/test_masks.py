"""Companions at the place of their record's picture: pixels resized to its size, masks averaged over latent places."""

from __future__ import annotations

import numpy as np
import pytest
from companions import grey
from making import picture
from pictures import encoded
from PIL import Image

from leandit.datasets.errors import RecordRejected
from leandit.precompute.images.masks import area_means
from leandit.precompute.images.pixels import crop_geometry, decode_picture

PLACE_PX = 8


def coverage(length: int, resized: int, first: int, count: int, step: int) -> np.ndarray:
    """(count, length) share of each place that each pixel covers, as overlaps of intervals."""
    edges = (first + step * np.arange(count + 1)) * length / resized
    pixels = np.arange(length)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.clip(overlap, 0, None) / (edges[1:] - edges[:-1])[:, None]


@pytest.mark.parametrize("crop", ["bucket", "adm"])
@pytest.mark.parametrize(
    ("beside", "size"),
    [
        ((64, 64), (64, 64)),
        ((60, 100), (60, 100)),
        ((100, 60), (75, 45)),
        ((100, 60), (5, 3)),
        ((300, 200), (601, 400)),
        ((301, 203), (1204, 812)),
    ],
)
def test_a_mask_is_the_area_average_of_its_crop(crop: str, beside: tuple[int, int], size: tuple[int, int]) -> None:
    bucket = (48, 80) if crop == "bucket" else (64, 64)
    mask = grey(1, *size)
    found, upright = decode_picture(encoded(mask, "PNG"), bucket=bucket, crop=crop, beside=beside, mask_px=PLACE_PX)
    assert (upright, found.shape, found.dtype) == (size, (bucket[0] // 8, bucket[1] // 8), np.uint8)
    sizes, *corner = crop_geometry(*beside, bucket, crop)
    down, across = (coverage(size[i], sizes[-1][i], corner[i], bucket[i] // PLACE_PX, PLACE_PX) for i in range(2))
    exact = down @ np.asarray(mask, np.float64) @ across.T
    assert np.abs(found - exact).max() <= 0.5 + 1e-9


def test_places_that_are_whole_pixels_are_plain_means_rounded_half_up() -> None:
    values = np.array([[0, 1, 255, 255], [1, 0, 255, 255], [3, 3, 10, 10], [3, 4, 10, 11]], np.uint8)
    means = area_means(values, (4, 4), (0, 0), (2, 2), 2)
    np.testing.assert_array_equal(means, [[1, 255], [3, 10]])  # 0.5, 255, 3.25, 10.25
    np.testing.assert_array_equal(area_means(values, (16, 16), (0, 0), (4, 4), 4), values)
    np.testing.assert_array_equal(area_means(values[:, ::-1], (4, 4), (0, 0), (2, 2), 2), means[:, ::-1])
    large = np.full((4000, 3000), 255, np.uint8)
    assert (area_means(large, (4000, 3000), (500, 0), (375, 375), 8) == 255).all()


@pytest.mark.parametrize(
    ("crop", "bucket", "beside", "size", "halved"),
    [
        ("bucket", (48, 80), (60, 100), (120, 200), []),
        ("bucket", (64, 64), (61, 100), (305, 500), []),
        ("adm", (64, 64), (200, 300), (100, 150), []),
        ("adm", (64, 64), (80, 90), (320, 360), [(160, 180), (80, 90)]),
    ],
)
def test_a_companion_is_resized_to_the_size_of_its_record_and_cropped_at_the_same_place(
    crop: str,
    bucket: tuple[int, int],
    beside: tuple[int, int],
    size: tuple[int, int],
    halved: list[tuple[int, int]],
) -> None:
    other = picture(3, *size)
    found, _ = decode_picture(encoded(other, "PNG"), bucket=bucket, crop=crop, beside=beside)
    sizes, top, left = crop_geometry(*beside, bucket, crop)
    for height_px, width_px in halved:
        other = other.resize((width_px, height_px), Image.Resampling.BOX)
    resized = other.resize((sizes[-1][1], sizes[-1][0]), Image.Resampling.BICUBIC)
    cropped = resized.crop((left, top, left + bucket[1], top + bucket[0]))
    np.testing.assert_array_equal(found, np.asarray(cropped))


@pytest.mark.parametrize("mask_px", [0, PLACE_PX])
def test_another_aspect_is_refused_and_a_pixel_of_rounding_is_not(mask_px: int) -> None:
    how = {"bucket": (64, 64), "crop": "bucket", "mask_px": mask_px}
    for size in ((50, 75), (50, 76), (49, 75), (1, 1), (1, 2)):
        decode_picture(encoded(grey(0, *size), "PNG"), beside=(100, 151), **how)
    for size in ((50, 78), (53, 75), (151, 100), (64, 64), (51, 75), (1, 4)):
        with pytest.raises(RecordRejected, match=rf"{size[0]}x{size[1]} px.* has 100x151 px; needed the same aspect"):
            decode_picture(encoded(grey(0, *size), "PNG"), beside=(100, 151), **how)
