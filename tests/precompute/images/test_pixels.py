"""Crops bit for bit, headers without pixels, companions and masks at the place of their record's image."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from image_files import adm_by_hand, bucket_by_hand, encoded, exif, noise
from making import encode, gray_mask, label_recipe, smooth_image
from PIL import Image

from leandit.datasets.store import LatentStore
from leandit.errors import RecordRejected
from leandit.precompute.images.pixels import area_means, crop_geometry, crop_image, decode_image, read_size
from leandit.precompute.sources.files import record as source_record
from leandit.precompute.sources.source import list_source

SIZES = [
    (h, w) for h in (1, 17, 32, 33, 63, 64, 65, 95, 127, 131, 255, 301) for w in (1, 31, 32, 47, 64, 128, 129, 257)
]
BUCKETS = [(32, 32), (48, 80), (80, 48), (64, 32)]


@pytest.mark.parametrize("side", [16, 32, 50])
def test_the_adm_crop_equals_the_published_one_bit_for_bit(side: int) -> None:
    for size in SIZES:
        image = noise(*size)
        assert np.array_equal(crop_image(image, (side, side), "adm"), adm_by_hand(image, side)), size


@pytest.mark.parametrize("bucket", BUCKETS)
def test_the_bucket_crop_covers_its_bucket_and_equals_pixarts(bucket: tuple[int, int]) -> None:
    for size in SIZES:
        image = noise(*size)
        cropped = crop_image(image, bucket, "bucket")
        assert cropped.shape == (*bucket, 3)
        assert np.array_equal(cropped, bucket_by_hand(image, bucket)), size
        large = crop_image(image, bucket, "bucket", "lanczos")  # of its tables of 2048 px and more
        assert np.array_equal(large, bucket_by_hand(image, bucket, Image.Resampling.LANCZOS)), size


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("tags", [exif(0), exif(9), b"Exif\0\0MM\0*\xff\xff\xff\xff"])
def test_broken_exif_does_not_cost_the_image(tags: Image.Exif | bytes) -> None:
    data = encoded(noise(24, 40), "PNG", exif=tags)
    assert read_size(data) == (24, 40)
    assert np.array_equal(decode_image(data, bucket=(24, 40), crop="bucket")[0], np.asarray(noise(24, 40)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_header_of_an_image_is_read_without_its_pixels(kind: str) -> None:
    data = encoded(noise(24, 40), kind)
    with patch.object(type(Image.open(io.BytesIO(data))), "load", side_effect=AssertionError):
        assert read_size(data) == (24, 40)  # else a scan costs as much as a decode


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
    [((60, 100), (60, 100)), ((100, 60), (5, 3)), ((300, 200), (601, 400)), ((301, 203), (1204, 812))],
)
def test_a_mask_is_the_area_average_of_its_crop(crop: str, beside: tuple[int, int], size: tuple[int, int]) -> None:
    bucket = (48, 80) if crop == "bucket" else (64, 64)
    mask = gray_mask(1, *size)
    found, upright = decode_image(encoded(mask, "PNG"), bucket=bucket, crop=crop, beside=beside, mask_px=PLACE_PX)
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
    crop: str, bucket: tuple[int, int], beside: tuple[int, int], size: tuple[int, int], halved: list[tuple[int, int]]
) -> None:
    other = smooth_image(3, *size)
    found, _ = decode_image(encoded(other, "PNG"), bucket=bucket, crop=crop, beside=beside)
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
        decode_image(encoded(gray_mask(0, *size), "PNG"), beside=(100, 151), **how)
    for size in ((50, 78), (53, 75), (151, 100), (64, 64), (51, 75), (1, 4)):
        with pytest.raises(RecordRejected, match=rf"{size[0]}x{size[1]} px.* has 100x151 px; expected the same aspect"):
            decode_image(encoded(gray_mask(0, *size), "PNG"), beside=(100, 151), **how)


def heic() -> bytes:
    """An image of 40x80 px."""
    pytest.importorskip("pillow_heif").register_heif_opener()
    return encoded(smooth_image(0, 40, 80), "HEIF")


@pytest.mark.usefixtures("quick")
def test_a_store_has_upright_images_and_no_tiny_ones(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a/0.jpg").write_bytes(encoded(smooth_image(0, 40, 80), "JPEG", exif=exif(6)))
    (source / "a/1.heic").write_bytes(heic())
    smooth_image(1, 4, 200).save(source / "a/2.png")
    encode(label_recipe("source.max_reject_share=1", "images.min_px=8"), source, tmp_path / "store")
    records = LatentStore(tmp_path / "store").records.select(["key", "height_px", "reason"]).to_pylist()
    wanted = [("a/0.jpg", 80, None), ("a/1.heic", 40, None), ("a/2.png", None, "too_small")]
    assert [tuple(record.values()) for record in records] == wanted
    # Other words would change the fingerprint: no store could resume or grow.
    assert LatentStore(tmp_path / "store").spec.images.colour == (
        "exif orientation; white under alpha; 16-bit grey scaled; inverted inks in every CMYK JPEG; "
        "colour profiles to sRGB, perceptual"
    )


def test_jpeg_xl_beside_images_is_named_with_what_to_do(tmp_path: Path) -> None:
    smooth_image(0).save(tmp_path / "0.png")
    (tmp_path / "1.jxl").write_bytes(b"\xff\x0a")
    source = list_source(tmp_path)
    assert [record.key for record in source.records] == ["0.png"]
    assert source.ignored.lines()[1] == "JPEG XL is not read: convert it first, for example with djxl of libjxl"


def test_heic_without_its_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = heic()
    assert read_size(data) == (40, 80)
    smooth_image(0).save(tmp_path / "0.png")
    (tmp_path / "1.heic").write_bytes(data)
    assert len(list_source(tmp_path).records) == 2
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(RecordRejected, match=r"not_an_image.*leandit\[heif\]"):
        read_size(data)
    known = source_record.IMAGE_EXTENSIONS - source_record.HEIF_EXTENSIONS
    monkeypatch.setattr(source_record, "IMAGE_EXTENSIONS", known)
    source = list_source(tmp_path)
    assert [record.key for record in source.records] == ["0.png"]
    assert source.ignored.lines()[1] == "HEIC and HEIF are read with pillow-heif: pip install 'leandit[heif]'"
