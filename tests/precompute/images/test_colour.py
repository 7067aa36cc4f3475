"""Color profiles: converted to sRGB by the formula of their space, ignored where asked or broken, and counted."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import (
    P3_PRIMARIES,
    SRGB_PRIMARIES,
    cmyk_profile,
    encoded,
    grey_profile,
    in_srgb,
    png,
    png_chunk,
    rgb_profile,
    srgb_curve,
)
from making import Leandit, add_image, caption_recipe, encode, make_caption_folder, smooth_image
from PIL import Image, ImageCms

from leandit.datasets.store import LatentStore
from leandit.errors import RecordRejected
from leandit.precompute.images.pixels import decode_image
from leandit.tools.inspection.store_facts import StoreFacts

PROPHOTO_LIKE = (0.7347, 0.2653, 0.1596, 0.8404, 0.0366, 0.0001)
SIZE = (40, 60)
PHOTO = smooth_image(1, *SIZE)
PIXELS = np.asarray(PHOTO)
GREY = PHOTO.convert("L")
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
LOSSLESS: dict[str, dict[str, Any]] = {"PNG": {}, "TIFF": {}, "WEBP": {"lossless": True}}


def decoded(data: bytes, **how: Any) -> np.ndarray:
    return decode_image(data, bucket=SIZE, crop="bucket", **how)[0].astype(int)


def with_alpha(alpha: int) -> Image.Image:
    image = PHOTO.copy()
    image.putalpha(alpha)
    return image


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize(("primaries", "gamma"), [(P3_PRIMARIES, 2.2), (PROPHOTO_LIKE, 1.8), (SRGB_PRIMARIES, 1.0)])
def test_an_rgb_profile_is_applied(kind: str, primaries: tuple[float, ...], gamma: float) -> None:
    data = encoded(PHOTO, kind, icc_profile=rgb_profile(primaries, gamma), **LOSSLESS[kind])
    expected = in_srgb(PIXELS, primaries, gamma)
    assert np.abs(expected - PIXELS).max() > 12  # else the profile would not be seen
    assert np.abs(decoded(data) - expected).max() <= 2
    assert np.array_equal(decoded(data, color="as_stored"), PIXELS)


def test_a_jpeg_with_a_profile_is_converted_after_its_own_losses() -> None:
    profile = rgb_profile(P3_PRIMARIES, 2.2)
    data = encoded(PHOTO, "JPEG", icc_profile=profile, quality=95)
    as_stored = decoded(data, color="as_stored")
    assert np.abs(decoded(data) - in_srgb(as_stored, P3_PRIMARIES, 2.2)).max() <= 2


def test_transparency_lies_over_white_after_the_conversion() -> None:
    data = encoded(with_alpha(102), "PNG", icc_profile=rgb_profile(P3_PRIMARIES, 2.2))
    expected = 0.4 * in_srgb(PIXELS, P3_PRIMARIES, 2.2) + 0.6 * 255
    assert np.abs(decoded(data) - expected).max() <= 2


@pytest.mark.parametrize("mode", ["L", "LA", "P", "I;16"])
def test_profiles_of_other_modes_are_applied(mode: str) -> None:
    if mode == "P":
        image = PHOTO.quantize(32)
        data = encoded(image, "PNG", icc_profile=rgb_profile(P3_PRIMARIES, 2.2))
        expected = in_srgb(np.asarray(image.convert("RGB")), P3_PRIMARIES, 2.2)
    else:
        image = GREY if mode == "L" else GREY.convert("LA")
        if mode == "I;16":
            image = Image.fromarray(np.asarray(GREY).astype(np.uint16) * 257)
        data = encoded(image, "PNG", icc_profile=grey_profile(1.0))
        expected = srgb_curve(np.asarray(GREY) / 255.0)[..., None]
    assert np.abs(decoded(data) - expected).max() <= 2


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_a_profile_of_inks_is_applied(kind: str) -> None:
    options = {"quality": 100} if kind == "JPEG" else {}
    inks = Image.new("CMYK", (60, 40), (128, 0, 255, 0))
    data = encoded(inks, kind, icc_profile=cmyk_profile(), **options)
    lightness = 100 * (1 - 128 / 255)
    luminance = ((lightness + 16) / 116) ** 3  # CIE 1976
    assert np.abs(decoded(data) - srgb_curve(np.array(luminance))).max() <= 3
    yellow_green = decoded(data, color="as_stored")[0, 0]
    assert yellow_green[2] < 5 < 120 < yellow_green[0] < 132


@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_profile_of_srgb_changes_nothing(kind: str) -> None:
    for image in (PHOTO, GREY):
        data = encoded(image, kind, icc_profile=SRGB, **LOSSLESS[kind])
        notes = list[str]()
        assert np.array_equal(decoded(data, notes=notes), np.asarray(image.convert("RGB")))
        assert not notes


def test_a_mask_is_never_converted() -> None:
    data = encoded(GREY, "PNG", icc_profile=grey_profile(1.0))
    mask = decode_image(data, bucket=SIZE, crop="bucket", mask_px=4)[0]
    means = np.asarray(GREY).reshape(10, 4, 15, 4).mean((1, 3))
    assert np.abs(mask - means).max() <= 0.5 + 1e-9


def coded_png(primaries: int, transfer: int, *more: bytes) -> bytes:
    chunk = png_chunk(b"cICP", bytes([primaries, transfer, 0, 1]))
    return png(60, 40, 8, 2, PIXELS.tobytes(), chunk, *more)


def test_a_png_that_names_its_color_space_by_a_code_is_converted_or_refused() -> None:
    linear = np.where(PIXELS <= 0.04045 * 255, PIXELS / 255 / 12.92, ((PIXELS / 255 + 0.055) / 1.055) ** 2.4)
    expected = in_srgb(255 * linear, P3_PRIMARIES, 1.0)
    assert np.abs(decoded(coded_png(12, 13)) - expected).max() <= 2
    assert np.array_equal(decoded(coded_png(1, 13)), PIXELS)
    for primaries, transfer, words in ((9, 16, "high dynamic range (PQ)"), (9, 18, "(HLG)"), (10, 8, "of code 10")):
        data = coded_png(primaries, transfer)
        with pytest.raises(RecordRejected) as caught:
            decoded(data)
        assert caught.value.reason == "unsupported_mode"
        assert words in caught.value.detail
        assert 'images.color = "as_stored"' in caught.value.detail
        assert np.array_equal(decoded(data, color="as_stored"), PIXELS)


def test_the_gamma_and_primaries_of_a_png_are_ignored() -> None:
    gamma = png_chunk(b"gAMA", struct.pack(">I", 100000))
    primaries = png_chunk(
        b"cHRM", struct.pack(">8I", *(round(1e5 * value) for value in (0.3127, 0.329, *P3_PRIMARIES)))
    )
    assert np.array_equal(decoded(png(60, 40, 8, 2, PIXELS.tobytes(), gamma, primaries)), PIXELS)


BROKEN: dict[str, Callable[[], bytes]] = {
    "cut": lambda: encoded(PHOTO, "PNG", icc_profile=SRGB[:200]),
    "nonsense": lambda: encoded(PHOTO, "WEBP", icc_profile=b"x" * 500, lossless=True),
    "of gray pixels in color": lambda: encoded(PHOTO, "TIFF", icc_profile=grey_profile(1.0)),
    "of inks in color": lambda: encoded(PHOTO, "PNG", icc_profile=cmyk_profile()),
    "of color in gray": lambda: encoded(GREY, "PNG", icc_profile=rgb_profile(P3_PRIMARIES, 2.2)),
    "of color in inks": lambda: encoded(PHOTO.convert("CMYK"), "TIFF", icc_profile=rgb_profile(P3_PRIMARIES, 2.2)),
    "in too few parts": lambda: encoded(PHOTO, "JPEG", quality=95, icc_profile=bytes(70_000)).replace(
        b"ICC_PROFILE\0\x01\x02", b"ICC_PROFILE\0\x01\x03"
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_profile_that_cannot_be_used_is_ignored_and_noted(name: str) -> None:
    data, notes = BROKEN[name](), list[str]()
    assert np.array_equal(decoded(data, notes=notes), decoded(data, color="as_stored"))
    assert notes == ["profile"]
    decoded(data, color="as_stored", notes=notes)
    assert notes == ["profile"]  # what is not asked for is not missed


@pytest.mark.usefixtures("quick")
def test_a_store_has_images_in_srgb_and_counts_ignored_profiles(tmp_path: Path, leandit: Leandit) -> None:
    source = make_caption_folder(tmp_path / "source", count=1)
    wide, plain = source / "images/wide.png", source / "images/plain.png"
    for path in (wide, plain, source / "images/broken.png"):
        add_image(source, f"images/{path.name}", PHOTO, caption=path.stem)
    wide.write_bytes(encoded(PHOTO, "PNG", icc_profile=rgb_profile(P3_PRIMARIES, 2.2)))
    converted = in_srgb(PIXELS, P3_PRIMARIES, 2.2).round().astype(np.uint8)
    plain.write_bytes(encoded(Image.fromarray(converted), "PNG"))
    (source / "images/broken.png").write_bytes(encoded(PHOTO, "PNG", icc_profile=SRGB[:200]))

    encode(caption_recipe(), source, tmp_path / "srgb")
    encode(caption_recipe("images.color=as_stored"), source, tmp_path / "as_stored")
    srgb, as_stored = LatentStore(tmp_path / "srgb"), LatentStore(tmp_path / "as_stored")

    def latent(store: LatentStore, name: str) -> np.ndarray:
        record = store.record(f"images/{name}.png")
        return np.asarray(store.latents(record.bucket)[record.row], np.float32)

    close = np.abs(latent(srgb, "wide") - latent(srgb, "plain")).max()
    assert close < 0.2 * np.abs(latent(as_stored, "wide") - latent(srgb, "plain")).max()
    assert np.array_equal(latent(as_stored, "wide"), latent(as_stored, "broken"))
    assert np.array_equal(latent(srgb, "broken"), latent(as_stored, "broken"))
    assert StoreFacts(srgb).records["fallbacks"] == {"profile": 1}
    assert StoreFacts(as_stored).records["fallbacks"] == {}
    checked = leandit("verify", tmp_path / "srgb", "--deep", "--source", source)
    assert checked.code == 0, checked.out
    told = leandit("inspect", tmp_path / "srgb").out
    assert "stored as profile 1: without their color profile" in " ".join(told.split())
