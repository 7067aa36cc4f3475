"""Pictures: both crops bit for bit, every mode and orientation exactly, every broken file rejected with its reason."""

from __future__ import annotations

import io
import math
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from making import picture
from PIL import Image

from leandit.datasets.errors import RecordRejected
from leandit.datasets.format.table_schemas import REJECT_REASONS
from leandit.precompute.images.pixels import crop_picture, decode_picture, read_size

SIZES = [
    (h, w) for h in (1, 17, 32, 33, 63, 64, 65, 95, 127, 131, 255, 301) for w in (1, 31, 32, 47, 64, 128, 129, 257)
]
BUCKETS = [(32, 32), (48, 80), (80, 48), (64, 32)]


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decoded(data: bytes, height_px: int, width_px: int) -> np.ndarray:
    """Pixels with neither resize nor crop."""
    return decode_picture(data, bucket=(height_px, width_px), crop="bucket")[0]


def noise(height_px: int, width_px: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height_px, width_px, 3), np.uint8))


def adm_by_hand(image: Image.Image, side: int) -> np.ndarray:
    """The crop of Dhariwal and Nichol, written from its description."""
    while min(image.size) >= 2 * side:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = side / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    top, left = math.floor((image.height - side) / 2), math.floor((image.width - side) / 2)
    return np.asarray(image.crop((left, top, left + side, top + side)))


def bucket_by_hand(
    image: Image.Image, bucket: tuple[int, int], resample: Image.Resampling = Image.Resampling.BICUBIC
) -> np.ndarray:
    """PixArt's trainer: cover, keep the ratio, cut the middle."""
    height, width = bucket
    if height / image.height > width / image.width:
        size = (image.width * height // image.height, height)
    else:
        size = (width, image.height * width // image.width)
    assert size[0] >= width
    assert size[1] >= height
    image = image.resize(size, resample)
    left, top = round((size[0] - width) / 2.0), round((size[1] - height) / 2.0)
    return np.asarray(image.crop((left, top, left + width, top + height)))


@pytest.mark.parametrize("side", [16, 32, 50])
def test_the_adm_crop_equals_the_published_one_bit_for_bit(side: int) -> None:
    for size in SIZES:
        image = noise(*size)
        assert np.array_equal(crop_picture(image, (side, side), "adm"), adm_by_hand(image, side)), size


@pytest.mark.parametrize("bucket", BUCKETS)
def test_the_bucket_crop_covers_its_bucket_and_equals_pixarts(bucket: tuple[int, int]) -> None:
    for size in SIZES:
        image = noise(*size)
        cropped = crop_picture(image, bucket, "bucket")
        assert cropped.shape == (*bucket, 3)
        assert np.array_equal(cropped, bucket_by_hand(image, bucket)), size


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_bucket_crop_with_lanczos_equals_pixarts_for_its_large_tables(bucket: tuple[int, int]) -> None:
    for size in SIZES[::3]:
        data = encoded(noise(*size), "PNG")
        found = decode_picture(data, bucket=bucket, crop="bucket", resize_filter="lanczos")[0]
        assert np.array_equal(found, bucket_by_hand(noise(*size), bucket, Image.Resampling.LANCZOS)), size


def test_a_picture_of_the_buckets_size_is_kept_as_it_is() -> None:
    image = noise(48, 80)
    assert np.array_equal(decoded(encoded(image, "PNG"), 48, 80), np.asarray(image))
    assert np.array_equal(crop_picture(noise(48, 48), (48, 48), "adm"), np.asarray(noise(48, 48)))


# How the upright picture lies in the file, from EXIF 2.3 section 4.6.4 A ("the 0th row is the visual top ...").
LIES = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[:, ::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a[::-1].swapaxes(0, 1),
}


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("JPEG", {})])
@pytest.mark.parametrize("orientation", LIES)
@pytest.mark.parametrize(("height_px", "width_px"), [(24, 40), (40, 24)])
def test_every_exif_orientation_gives_the_upright_picture(
    kind: str, options: dict[str, Any], orientation: int, height_px: int, width_px: int
) -> None:
    if kind == "JPEG":  # 8x8 blocks of one grey survive compression but for rounding
        blocks = np.random.default_rng(1).integers(0, 256, (height_px // 8, width_px // 8, 1), np.uint8)
        upright = blocks.repeat(8, 0).repeat(8, 1).repeat(3, 2)
        options = {"quality": 100, "subsampling": 0}
    else:
        upright = np.asarray(noise(height_px, width_px))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(np.ascontiguousarray(LIES[orientation](upright))), kind, exif=exif, **options)
    assert read_size(data) == (height_px, width_px)
    worst = int(np.abs(decoded(data, height_px, width_px).astype(int) - upright).max())
    assert worst <= (1 if kind == "JPEG" else 0)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_ignored(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(decoded(encoded(noise(24, 40), "PNG", exif=exif), 24, 40), np.asarray(noise(24, 40)))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_broken_exif_does_not_cost_the_picture() -> None:
    data = encoded(noise(24, 40), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert read_size(data) == (24, 40)
    assert np.array_equal(decoded(data, 24, 40), np.asarray(noise(24, 40)))


def column(*colours: Any, mode: str) -> Image.Image:
    """A picture whose rows have one colour each."""
    image = Image.new(mode, (4, len(colours)))
    for y, colour in enumerate(colours):
        image.paste(colour, (0, y, 4, y + 1))
    return image


def grey16(*levels: int) -> Image.Image:
    return Image.fromarray(np.repeat(np.array(levels, np.uint16)[:, None], 4, 1))


def palette(*indices: int, **info: Any) -> Image.Image:
    image = column(*indices, mode="P")
    image.putpalette([255, 0, 0, 0, 200, 0, 1, 2, 3])
    image.info |= info
    return image


def pgm16(*levels: int) -> bytes:
    return b"P5 4 %d 65535\n" % len(levels) + np.repeat(np.array(levels, ">u2"), 4).tobytes()


RED, GREEN, INK, WHITE, BLACK = (255, 0, 0), (0, 200, 0), (1, 2, 3), (255,) * 3, (0,) * 3
EXACT = {
    "rgb": (encoded(column(RED, INK, mode="RGB"), "PNG"), [RED, INK]),
    "cmyk tiff": (
        encoded(column((0, 0, 0, 0), (0, 0, 0, 255), (255, 0, 0, 0), (0, 255, 255, 0), mode="CMYK"), "TIFF"),
        [WHITE, BLACK, (0, 255, 255), RED],
    ),
    "grey": (encoded(column(0, 7, 255, mode="L"), "PNG"), [BLACK, (7,) * 3, WHITE]),
    "1-bit": (encoded(column(0, 1, mode="1"), "PNG"), [BLACK, WHITE]),
    "1-bit tiff": (encoded(column(0, 1, mode="1"), "TIFF"), [BLACK, WHITE]),
    "16-bit png": (encoded(grey16(0, 257 * 9, 257 * 128, 65535), "PNG"), [BLACK, (9,) * 3, (128,) * 3, WHITE]),
    "16-bit tiff": (encoded(grey16(0, 257 * 9, 257 * 128, 65535), "TIFF"), [BLACK, (9,) * 3, (128,) * 3, WHITE]),
    "16-bit pgm": (pgm16(0, 257 * 9, 257 * 128, 65535), [BLACK, (9,) * 3, (128,) * 3, WHITE]),
    "palette": (encoded(palette(0, 1, 2), "PNG"), [RED, GREEN, INK]),
    "palette with transparency": (encoded(palette(0, 1, 2), "PNG", transparency=1), [RED, WHITE, INK]),
    "palette with alphas": (encoded(palette(0, 1, 2), "PNG", transparency=b"\xff\x00\xff"), [RED, WHITE, INK]),
    "gif with transparency": (encoded(palette(0, 1, 2), "GIF", transparency=1), [RED, WHITE, INK]),
    "rgb with a transparent colour": (
        encoded(column(RED, INK, mode="RGB"), "PNG", transparency=INK),
        [RED, WHITE],
    ),
    "rgba": (
        encoded(column((*INK, 255), (*RED, 0), (0, 0, 0, 51), mode="RGBA"), "PNG"),
        [INK, WHITE, (204, 204, 204)],
    ),
    "rgba webp": (encoded(column((*INK, 255), (*RED, 0), mode="RGBA"), "WEBP", lossless=True), [INK, WHITE]),
    "la": (encoded(column((9, 255), (9, 0), (0, 51), mode="LA"), "PNG"), [(9,) * 3, WHITE, (204, 204, 204)]),
    "bmp": (encoded(column(RED, INK, mode="RGB"), "BMP"), [RED, INK]),
    "ppm": (encoded(column(RED, INK, mode="RGB"), "PPM"), [RED, INK]),
    "animated gif": (
        encoded(palette(0, 1), "GIF", save_all=True, append_images=[palette(2, 2), palette(1, 0)]),
        [RED, GREEN],
    ),
    "animated webp": (
        encoded(
            column(RED, INK, mode="RGB"),
            "WEBP",
            save_all=True,
            lossless=True,
            append_images=[column(WHITE, RED, mode="RGB")],
        ),
        [RED, INK],
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_every_mode_becomes_the_right_rgb(name: str) -> None:
    data, rows = EXACT[name]
    expected = np.repeat(np.array(rows, np.uint8)[:, None], 4, 1)
    assert read_size(data) == expected.shape[:2]
    assert np.array_equal(decoded(data, len(rows), 4), expected)


def test_a_cmyk_jpeg_is_not_inverted() -> None:
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    pixels = decoded(encoded(cyan, "JPEG", quality=100), 16, 16)
    assert np.abs(pixels.astype(int) - (0, 255, 255)).max() <= 2


def test_the_file_name_does_not_decide_the_format() -> None:
    for kind in ("PNG", "BMP", "GIF"):  # the decoder sees bytes only
        assert decoded(encoded(Image.new("RGB", (4, 4), RED), kind), 4, 4)[0, 0].tolist() == list(RED)


def png_header(width_px: int, height_px: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width_px, height_px, 8, 2, 0, 0, 0)
    end = struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body)) + end


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not_an_image"),
        (b"this is no picture\n" * 20, "not_an_image"),
        (b"<html><body>404</body></html>", "not_an_image"),
        (b"\x89PNG\r\n\x1a\n", "not_an_image"),
        (png_header(50_000, 50_000), "too_large"),
        (png_header(10_000, 10_000), "too_large"),
        (encoded(Image.fromarray(np.full((8, 8), 0.5, np.float32)), "TIFF"), "unsupported_mode"),
        (encoded(Image.fromarray(np.full((8, 8), 70_000, np.int32)), "TIFF"), "unsupported_mode"),
    ],
    ids=["empty", "text", "html", "signature alone", "bomb", "large", "float", "32-bit"],
)
def test_what_is_no_usable_picture_is_rejected_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(RecordRejected) as caught:
        decode_picture(data, bucket=(32, 32), crop="adm")
    assert (caught.value.stage, caught.value.reason) == ("decode", reason)
    if reason != "unsupported_mode":  # the header alone does not tell
        with pytest.raises(RecordRejected) as caught:
            read_size(data)
        assert (caught.value.stage, caught.value.reason) == ("scan", reason)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM"])
def test_a_truncated_picture_is_rejected_as_truncated(kind: str, share: float) -> None:
    data = encoded(noise(64, 64), kind)
    with pytest.raises(RecordRejected) as caught:
        decode_picture(data[: int(share * len(data))], bucket=(32, 32), crop="adm")
    # A TIFF keeps its directory at the end, so without its end it cannot be told from anything else.
    assert caught.value.reason in ({"truncated", "not_an_image", "decode_error"} if kind == "TIFF" else {"truncated"})


def test_a_truncated_webp_is_rejected() -> None:
    data = encoded(noise(64, 64), "WEBP", lossless=True)
    with pytest.raises(RecordRejected) as caught:
        decode_picture(data[: len(data) // 2], bucket=(32, 32), crop="adm")
    assert caught.value.reason in ("truncated", "decode_error", "not_an_image")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_the_header_of_a_picture_is_read_without_its_pixels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(noise(24, 40), kind)
    with Image.open(io.BytesIO(data)) as image:
        format_class = type(image)
    calls, load = [], format_class.load
    monkeypatch.setattr(format_class, "load", lambda self: (calls.append(kind), load(self))[1])
    assert read_size(data) == (24, 40)
    assert not calls  # else a scan costs as much as a decode


def mutants(data: bytes, count: int, seed: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        changed = bytearray(data)
        near = len(data) if i % 2 else min(len(data), 120)  # half of them in the header
        for position in rng.integers(0, near, rng.integers(1, 9)):
            changed[position] = rng.integers(0, 256)
        found.append(bytes(changed[: rng.integers(1, len(data))] if i % 5 == 0 else changed))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {}),
        ("PNG", {}),
        ("WEBP", {}),
        ("GIF", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("BMP", {}),
    ],
)
def test_damaged_bytes_give_pixels_or_a_reason_never_another_error(kind: str, options: dict[str, Any]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(picture(3), kind, **options, **({} if kind in ("GIF", "BMP") else {"exif": exif}))
    reasons = set()
    for mutant in mutants(data, 40, seed=len(kind)):
        for work in (read_size, lambda b: decode_picture(b, bucket=(32, 32), crop="adm")):
            try:
                result = work(mutant)
            except RecordRejected as reject:
                reasons.add(reject.reason)
            else:
                assert isinstance(result, tuple) or result.shape == (32, 32, 3)
    assert reasons
    assert reasons <= REJECT_REASONS.keys()
