"""A corpus of odd, hostile and broken images, decoded in children: exactly right, or rejected with its reason."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
from image_files import (
    IMAGE_FORMATS,
    as_stored,
    encoded,
    exif,
    gif_with_small_frame,
    mutants,
    noise,
    png,
    png_chunk,
    tiff,
)
from PIL import Image

from leandit.datasets.errors import RecordRejected
from leandit.datasets.format.table_schemas import REJECT_REASONS
from leandit.precompute.images.decoders import Decoders


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    with Decoders(1, timeout_seconds=120) as found:
        yield found


class Case(NamedTuple):
    """Bytes, or what makes large ones; the pixels they must give, to within so many levels, or the possible reasons."""

    data: bytes | Callable[[], bytes]
    pixels: Any = None  # (H, W, 3) or a grey (H, W)
    within: int = 0
    reasons: tuple[str, ...] = ()


def refused(data: bytes | Callable[[], bytes], *reasons: str) -> Case:
    return Case(data, reasons=reasons)


RED, GREEN, INK, WHITE, MID, CYAN = (255, 0, 0), (0, 200, 0), (1, 2, 3), (255,) * 3, (90,) * 3, (0, 255, 255)
NOISE = np.asarray(noise(16, 24))
PALETTE = bytes([*RED, *GREEN, *INK, *WHITE])
PLTE, BMP_PALETTE = png_chunk(b"PLTE", PALETTE), bytes([0, 0, 255, 0, 3, 2, 1, 0])


def flat(colour: Any, mode: str = "RGB", size: tuple[int, int] = (16, 16)) -> Image.Image:
    return Image.new(mode, size, colour)


def flat_pixels(colour: tuple[int, ...]) -> np.ndarray:
    return np.full((16, 16, 3), colour, np.uint8)


def grey(*levels: int) -> np.ndarray:
    return np.array([levels], np.uint8)


def row(*colours: tuple[int, ...]) -> np.ndarray:
    return np.array([colours], np.uint8)


def u16(*values: int, order: str = ">") -> bytes:
    return struct.pack(f"{order}{len(values)}H", *values)


def chunk16(kind: bytes, *values: int) -> bytes:
    return png_chunk(kind, u16(*values))


def indexed(*indices: int) -> Image.Image:
    image = Image.frombytes("P", (len(indices), 1), bytes(indices))
    image.putpalette(PALETTE)
    return image


def bmp(width_px: int, height_px: int, bits: int, rows: bytes, *, palette: bytes = b"", compression: int = 0) -> bytes:
    """A BMP with the header of Windows 3; a negative height runs from top to bottom."""
    start = 54 + len(palette)
    info = struct.pack("<IiiHHIIiiII", 40, width_px, height_px, 1, bits, compression, len(rows), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", start + len(rows), 0, 0, start) + info + palette + rows


def bmp_with_alpha(row: bytes) -> bytes:
    """A BMP with the header of Windows 95, which says where in a pixel each colour lies."""
    info = struct.pack("<IiiHHIIiiII", 108, len(row) // 4, 1, 1, 32, 3, len(row), 0, 0, 0, 0)
    masks = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    return b"BM" + struct.pack("<IHHI", 122 + len(row), 0, 0, 122) + info + masks + bytes(52) + row


def without_adobe_marker(data: bytes) -> bytes:
    at = data.index(b"\xff\xee\0\x0eAdobe")
    return data[:at] + data[at + 16 :]


def jpeg_of_size(height_px: int, width_px: int, bits: int = 8) -> bytes:
    """A JPEG whose header lies."""
    data = bytearray(encoded(flat(RED), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 4 : at + 9] = struct.pack(">BHH", bits, height_px, width_px)
    return bytes(data)


def webp_of_size(side_px: int) -> bytes:
    data = bytearray(encoded(flat((*RED, 9), "RGBA"), "WEBP", lossless=True, exif=exif(1)))
    at = data.index(b"VP8X")
    data[at + 12 : at + 18] = struct.pack("<I", side_px - 1)[:3] * 2
    return bytes(data)


def gif_of_size(side_px: int) -> bytes:
    return gif_with_small_frame((side_px, side_px), 0, 0, indexed(1, 2))


def tiff_grey16(*values: int, order: str = "<", photometric: int = 1) -> bytes:
    return tiff(len(values), 1, photometric, [16], u16(*values, order=order), order=order)


def frames(kind: str, **options: Any) -> bytes:
    others = [noise(16, 24, 1), noise(16, 24, 2)]
    return encoded(noise(16, 24), kind, save_all=True, append_images=others, **options)


def ycbcr_tiff(subsampling: list[int] | None) -> bytes:
    rows = bytes([76, 84, 255, 255, 128, 128])
    return tiff(2, 1, 6, [8] * 3, rows, tags={530: subsampling} if subsampling else {})


CASES = {
    # PNG: every colour type and depth
    "png grey 1": Case(png(4, 1, 1, 0, b"\x50"), grey(0, 255, 0, 255)),
    "png grey 2": Case(png(4, 1, 2, 0, b"\x1b"), grey(0, 85, 170, 255)),
    "png grey 4": Case(png(2, 1, 4, 0, b"\x1f"), grey(17, 255)),
    "png grey 8": Case(png(2, 1, 8, 0, b"\x07\xff"), grey(7, 255)),
    "png grey 16": Case(png(4, 1, 16, 0, u16(0, 257 * 9, 128, 129)), grey(0, 9, 0, 1)),
    "png rgb 8": Case(png(1, 1, 8, 2, bytes(INK)), row(INK)),
    "png rgb 16": Case(png(1, 1, 16, 2, u16(257, 514, 65535)), row((1, 2, 255))),
    "png palette 1": Case(png(2, 1, 1, 3, b"\x40", png_chunk(b"PLTE", PALETTE[:6])), row(RED, GREEN)),
    "png palette 2": Case(png(4, 1, 2, 3, b"\x1b", PLTE), row(RED, GREEN, INK, WHITE)),
    "png palette 4": Case(png(2, 1, 4, 3, b"\x12", PLTE), row(GREEN, INK)),
    "png palette 8": Case(png(2, 1, 8, 3, b"\1\2", PLTE), row(GREEN, INK)),
    "png la 8": Case(png(3, 1, 8, 4, bytes([9, 255, 9, 0, 0, 51])), grey(9, 255, 204)),
    "png la 16": Case(png(2, 1, 16, 4, u16(257 * 9, 65535, 5000, 0)), grey(9, 255)),
    "png rgba 8": Case(png(2, 1, 8, 6, bytes([*INK, 255, *RED, 0])), row(INK, WHITE)),
    "png rgba 16": Case(png(2, 1, 16, 6, u16(257, 514, 771, 65535, 1, 2, 3, 0)), row(INK, WHITE)),
    # PNG: a transparent colour, in the depth of the file
    "png grey 1, one transparent": Case(png(2, 1, 1, 0, b"\x40", chunk16(b"tRNS", 0)), grey(255, 255)),
    "png grey 2, one transparent": Case(png(4, 1, 2, 0, b"\x1b", chunk16(b"tRNS", 1)), grey(0, 255, 170, 255)),
    "png grey 4, one transparent": Case(png(2, 1, 4, 0, b"\x12", chunk16(b"tRNS", 2)), grey(17, 255)),
    "png grey 8, one transparent": Case(png(2, 1, 8, 0, b"\1\2", chunk16(b"tRNS", 2)), grey(1, 255)),
    "png grey 16, one transparent": Case(
        png(3, 1, 16, 0, u16(2313, 2314, 5140), chunk16(b"tRNS", 2313)), grey(255, 9, 20)
    ),
    "png rgb, one transparent": Case(
        png(2, 1, 8, 2, bytes([*INK, 1, 2, 4]), chunk16(b"tRNS", *INK)), row(WHITE, (1, 2, 4))
    ),
    "png rgb 16, one transparent": refused(
        png(1, 1, 16, 2, u16(9, 9, 9), chunk16(b"tRNS", 9, 9, 9)), "unsupported_mode"
    ),
    "png palette, one transparent": Case(
        png(2, 1, 8, 3, b"\0\1", PLTE, png_chunk(b"tRNS", b"\xff\0")), row(RED, WHITE)
    ),
    "png palette with alphas": Case(
        png(2, 1, 8, 3, b"\2\0", png_chunk(b"PLTE", bytes(9)), png_chunk(b"tRNS", b"\xff\0\x33")), grey(204, 0)
    ),
    "png palette without its palette": refused(png(2, 1, 8, 3, b"\0\1"), "decode_error"),
    # PNG: the rest
    "png with exif behind the pixels": Case(
        png(2, 1, 8, 0, b"\1\2", after=png_chunk(b"eXIf", exif(6).tobytes()[6:])), grey(1, 2).T
    ),
    "png with the word eXIf in a comment": Case(
        png(2, 1, 8, 0, b"\1\2", png_chunk(b"tEXt", b"Comment\0eXIf")), grey(1, 2)
    ),
    "png with the orientation in XMP": Case(
        png(2, 1, 8, 0, b"\1\2", png_chunk(b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="6"/>')),
        grey(1, 2).T,
    ),
    "animated png": Case(frames("PNG"), NOISE),
    "1x1": Case(png(1, 1, 8, 0, b"\7"), grey(7)),
    "4000x1": Case(png(4000, 1, 8, 0, bytes(range(250)) * 16), grey(*list(range(250)) * 16)),
    "1x4000": Case(png(1, 4000, 8, 0, bytes(range(250)) * 16), grey(*list(range(250)) * 16).T),
    "png with more pixels than it needs": Case(
        lambda: png(2, 1, 8, 0, b"\1\2", after=png_chunk(b"IDAT", zlib.compress(bytes(10**6)))), grey(1, 2)
    ),
    "png bomb": refused(png(50_000, 50_000, 8, 2, None), "too_large"),
    "png just above the limit": refused(png(9_460, 9_459, 8, 2, None), "too_large"),
    "png with a bomb of text": refused(
        lambda: png(2, 1, 8, 0, b"\1\2", png_chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(1 << 22)))), "decode_error"
    ),
    "png with a bomb of texts": refused(
        lambda: png(2, 1, 8, 0, b"\1\2", *[png_chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(1 << 19)))] * 200),
        "decode_error",
    ),
    "png with a bomb of a profile": refused(
        lambda: png(2, 1, 8, 0, b"\1\2", png_chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(1 << 22)))), "decode_error"
    ),
    "png without pixels": refused(png(4, 4, 8, 2, None), "decode_error", "truncated"),
    "png of no width": refused(png(0, 4, 8, 2, b""), "decode_error", "not_an_image", "truncated"),
    "png of depth 3": refused(png(1, 1, 3, 0, b"\0"), "not_an_image"),
    "png signature alone": refused(b"\x89PNG\r\n\x1a\n", "not_an_image"),
    "png cut in its pixels": refused(encoded(noise(64, 64), "PNG")[:6000], "truncated"),
    # JPEG
    "jpeg": Case(encoded(flat(MID), "JPEG"), flat_pixels(MID), within=1),
    "jpeg grey": Case(encoded(flat(77, "L"), "JPEG"), flat_pixels((77, 77, 77)), within=1),
    "jpeg progressive": Case(
        encoded(flat((200, 30, 60)), "JPEG", progressive=True), flat_pixels((200, 30, 60)), within=2
    ),
    "jpeg with rubbish behind it": Case(
        encoded(flat((9, 9, 9)), "JPEG") + b"\0rubbish" * 99, flat_pixels((9,) * 3), within=1
    ),
    "jpeg cmyk as Adobe writes it": Case(
        encoded(flat((255, 0, 0, 0), "CMYK"), "JPEG", quality=100), flat_pixels(CYAN), within=2
    ),
    "jpeg cmyk without Adobe's marker": Case(
        without_adobe_marker(encoded(flat((0, 255, 255, 255), "CMYK"), "JPEG", quality=100)),
        flat_pixels(CYAN),
        within=2,
    ),
    "mpo": Case(encoded(flat(MID), "MPO", save_all=True, append_images=[flat(RED)]), flat_pixels(MID), within=1),
    "jpeg bomb": refused(jpeg_of_size(65_500, 65_500), "too_large"),
    "jpeg of 12 bit": refused(jpeg_of_size(16, 16, bits=12), "not_an_image"),
    "jpeg of no width": refused(jpeg_of_size(16, 0), "not_an_image", "decode_error", "truncated"),
    "jpeg cut": refused(encoded(noise(64, 64), "JPEG")[:3000], "truncated"),
    "jpeg start alone": refused(b"\xff\xd8\xff\xe0", "not_an_image", "truncated"),
    # GIF
    "gif": Case(encoded(indexed(0, 1, 2), "GIF"), row(RED, GREEN, INK)),
    "gif interlaced": Case(
        encoded(noise(24, 24).quantize(64), "GIF", interlace=1), np.asarray(noise(24, 24).quantize(64).convert("RGB"))
    ),
    "gif with transparency": Case(encoded(indexed(0, 1, 2), "GIF", transparency=1), row(RED, WHITE, INK)),
    "gif animated": Case(
        encoded(indexed(0, 1), "GIF", save_all=True, append_images=[indexed(2, 2), indexed(1, 0)]), row(RED, GREEN)
    ),
    "gif whose frame is smaller than it": Case(
        gif_with_small_frame((3, 2), 1, 1, indexed(1, 2)), np.array([[WHITE, WHITE, WHITE], [WHITE, GREEN, INK]])
    ),
    "gif whose frame is larger than it": Case(
        gif_with_small_frame((1, 1), 1, 0, indexed(1, 2)), row(WHITE, GREEN, INK)
    ),
    "gif bomb": refused(gif_of_size(65_535), "too_large"),
    "gif without a frame": refused(encoded(indexed(0, 1), "GIF")[:19] + b";", "not_an_image"),
    "gif cut": refused(encoded(noise(64, 64).quantize(256), "GIF")[:2500], "truncated"),
    # WebP and AVIF
    "webp": Case(encoded(flat(MID), "WEBP"), flat_pixels(MID), within=2),
    "webp lossless": Case(encoded(noise(16, 24), "WEBP", lossless=True), NOISE),
    "webp with alpha": Case(
        encoded(flat((0, 0, 0, 51), "RGBA"), "WEBP", lossless=True, exact=True), flat_pixels((204,) * 3)
    ),
    "webp animated": Case(frames("WEBP", lossless=True), NOISE),
    "webp bomb": refused(webp_of_size(16_383), "too_large"),
    "webp cut": refused(
        encoded(noise(64, 64), "WEBP", lossless=True)[:3000], "truncated", "decode_error", "not_an_image"
    ),
    "avif": Case(encoded(flat(MID), "AVIF"), flat_pixels(MID), within=2),
    "avif with alpha": Case(
        encoded(flat((0, 0, 0, 51), "RGBA"), "AVIF", quality=100), flat_pixels((204,) * 3), within=2
    ),
    "avif animated": Case(
        encoded(flat(MID), "AVIF", save_all=True, append_images=[flat(RED)]), flat_pixels(MID), within=2
    ),
    "avif cut": refused(encoded(noise(64, 64), "AVIF")[:900], "decode_error", "truncated", "not_an_image"),
    # BMP
    "bmp 1": Case(bmp(2, 1, 1, b"\x40\0\0\0", palette=BMP_PALETTE), row(RED, INK)),
    "bmp 8": Case(bmp(2, 1, 8, b"\1\0\0\0", palette=BMP_PALETTE + bytes(254 * 4)), row(INK, RED)),
    "bmp 16": Case(bmp(2, 1, 16, struct.pack("<HH", 0x7C00, 0x001F)), row(RED, (0, 0, 255))),
    "bmp 24": Case(bmp(1, 2, 24, b"\0\0\xff\0\3\2\1\0"), np.array([[INK], [RED]])),
    "bmp from top to bottom": Case(bmp(1, -2, 24, b"\0\0\xff\0\3\2\1\0"), np.array([[RED], [INK]])),
    "bmp 32, its fourth byte is nothing": Case(bmp(2, 1, 32, b"\0\0\xff\0\3\2\1\xff"), row(RED, INK)),
    "bmp run-length": Case(
        bmp(4, 1, 8, b"\3\1\1\0\0\0\0\1", palette=BMP_PALETTE + bytes(254 * 4), compression=1), row(INK, INK, INK, RED)
    ),
    "bmp with alpha": Case(bmp_with_alpha(bytes([3, 2, 1, 255, 0, 0, 255, 0])), row(INK, WHITE)),
    "bmp bomb": refused(bmp(100_000, 100_000, 24, b""), "too_large"),
    "bmp cut": refused(encoded(noise(64, 64), "BMP")[:5000], "truncated"),
    # TIFF: every layout of samples
    "tiff 1, white is zero": Case(tiff(8, 1, 0, [1], b"\x0f"), grey(*[255] * 4, *[0] * 4)),
    "tiff 1, black is zero": Case(tiff(8, 1, 1, [1], b"\x0f"), grey(*[0] * 4, *[255] * 4)),
    "tiff 4": Case(tiff(2, 1, 1, [4], b"\x1f"), grey(17, 255)),
    "tiff 8, white is zero": Case(tiff(2, 1, 0, [8], b"\0\xc8"), grey(255, 55)),
    "tiff 12": Case(tiff(2, 1, 1, [12], b"\xff\xf8\x00"), grey(255, 128)),
    "tiff 16": Case(tiff_grey16(257 * 3, 65535), grey(3, 255)),
    "tiff 16, big-endian": Case(tiff_grey16(257 * 3, 65535, order=">"), grey(3, 255)),
    "tiff 16, white is zero": Case(tiff_grey16(257 * 3, 65535, photometric=0), grey(252, 0)),
    "tiff 16, turned": Case(tiff(2, 1, 1, [16], u16(771, 65535, order="<"), tags={274: [6]}), grey(3, 255).T),
    "tiff rgb 16": Case(tiff(1, 1, 2, [16] * 3, u16(257, 514, 65535, order=">"), order=">"), row((1, 2, 255))),
    "tiff palette 2": Case(tiff(4, 1, 3, [2], b"\x1b", tags={320: [0, 257, 514, 771] * 3}), grey(0, 1, 2, 3)),
    "tiff palette 8": Case(
        tiff(2, 1, 3, [8], b"\0\1", tags={320: [v for c in (5, 7, 9) for v in (257 * c, 257 * c + 257, *[0] * 254)]}),
        row((5, 7, 9), (6, 8, 10)),
    ),
    "tiff la": Case(tiff(2, 1, 1, [8, 8], bytes([9, 255, 9, 0]), tags={338: [2]}), grey(9, 255)),
    "tiff la, multiplied": Case(tiff(2, 1, 1, [8, 8], bytes([9, 255, 9, 51]), tags={338: [1]}), grey(9, 213)),
    "tiff grey and something": Case(tiff(2, 1, 1, [8, 8], bytes([9, 255, 9, 0]), tags={338: [0]}), grey(9, 9)),
    "tiff rgba": Case(tiff(2, 1, 2, [8] * 4, bytes([*INK, 255, *RED, 0]), tags={338: [2]}), row(INK, WHITE)),
    "tiff rgba, multiplied": Case(
        tiff(2, 1, 2, [8] * 4, bytes([*INK, 255, 10, 20, 30, 51]), tags={338: [1]}), row(INK, (214, 224, 234))
    ),
    "tiff rgb and something": Case(tiff(2, 1, 2, [8] * 4, bytes([*INK, 255, *RED, 0]), tags={338: [0]}), row(INK, RED)),
    "tiff cmyk": Case(tiff(2, 1, 5, [8] * 4, bytes([0, 255, 255, 0, 0, 0, 0, 0])), row(RED, WHITE)),
    "tiff cmyk 16": Case(tiff(1, 1, 5, [16] * 4, u16(0, 65535, 65535, 0)), row(RED)),
    "tiff ycbcr": Case(ycbcr_tiff([1, 1]), row((254, 0, 0), WHITE)),
    "tiff ycbcr, subsampled": refused(
        tiff(2, 2, 6, [8] * 3, bytes([76] * 4 + [84, 255]), tags={530: [2, 2]}), "unsupported_mode"
    ),
    "tiff ycbcr that does not say how": refused(ycbcr_tiff(None), "unsupported_mode"),
    "tiff lab": refused(tiff(1, 1, 8, [8] * 3, bytes([128, 0, 0])), "unsupported_mode"),
    "tiff of signed bytes": refused(tiff(2, 1, 1, [8], b"\0\xc8", tags={339: [2]}), "unsupported_mode"),
    "tiff 16, signed": refused(tiff(1, 1, 1, [16], b"\0\1", tags={339: [2]}), "unsupported_mode"),
    "tiff 32": refused(tiff(1, 1, 1, [32], struct.pack("<I", 7)), "unsupported_mode"),
    "tiff of floats": refused(tiff(1, 1, 1, [32], struct.pack("<f", 0.5), tags={339: [3]}), "unsupported_mode"),
    "tiff of doubles": refused(
        tiff(1, 1, 1, [64], struct.pack("<d", 0.5), tags={339: [3]}), "unsupported_mode", "not_an_image"
    ),
    "tiff of fax": Case(
        encoded(noise(16, 24).convert("1"), "TIFF", compression="group4"),
        np.asarray(noise(16, 24).convert("1")).astype(np.uint8) * 255,
    ),
    "tiff lzw": Case(encoded(noise(16, 24), "TIFF", compression="tiff_lzw"), NOISE),
    "tiff deflate": Case(encoded(noise(16, 24), "TIFF", compression="tiff_adobe_deflate"), NOISE),
    "tiff jpeg": Case(encoded(flat(MID), "TIFF", compression="jpeg"), flat_pixels(MID), within=1),
    "tiff of many pages": Case(frames("TIFF"), NOISE),
    "tiff bomb": refused(tiff(100_000, 100_000, 1, [8], b"\0"), "too_large"),
    "tiff without its directory": refused(b"II*\0\xff\xff\xff\xff", "not_an_image", "decode_error"),
    "tiff whose strip is not there": refused(tiff(64, 64, 1, [8], b"\0"), "truncated", "decode_error"),
    # PPM and relatives
    "pbm plain": Case(b"P1 2 1\n0 1\n", grey(255, 0)),
    "pgm plain": Case(b"P2 2 1 100\n0 100\n", grey(0, 255)),
    "ppm plain": Case(b"P3 1 1 255\n1 2 3\n", row(INK)),
    "pbm": Case(b"P4 8 1\n\x0f", grey(*[255] * 4, *[0] * 4)),
    "pgm": Case(b"P5 2 1 255\n\x07\xff", grey(7, 255)),
    "pgm 10": Case(b"P5 2 1 1023\n" + u16(0, 1023), grey(0, 255)),
    "pgm 16": Case(b"P5 2 1 65535\n" + u16(257 * 9, 65535), grey(9, 255)),
    "ppm": Case(b"P6 1 1 255\n\1\2\3", row(INK)),
    "ppm 16": Case(b"P6 1 1 65535\n" + u16(257, 514, 771), row(INK)),
    "ppm with a comment": Case(b"P6\n# no image\n1 1\n255\n\1\2\3", row(INK)),
    "pfm": refused(b"Pf\n1 1\n-1.0\n" + struct.pack("<f", 0.5), "unsupported_mode"),
    "ppm palette without its palette": refused(b"PyP 2 1 255\n\1\2", "decode_error"),
    "ppm beyond its maximum": refused(b"P3 1 1 255\n1 2 300\n", "decode_error"),
    "ppm of 17 bit": refused(b"P6 1 1 70000\n\1\2\3", "decode_error"),
    "ppm bomb": refused(b"P6 100000 100000 255\n", "too_large"),
    "ppm cut": refused(b"P6 9 9 255\n\1\2\3", "truncated"),
    # No images, or of formats that are not read
    "nothing": refused(b"", "not_an_image"),
    "a zero": refused(b"\0", "not_an_image"),
    "zeros": refused(lambda: bytes(100_000), "not_an_image"),
    "text": refused(b"this is no image\n" * 99, "not_an_image"),
    "html": refused(b"<!DOCTYPE html><title>404</title>", "not_an_image"),
    "svg": refused(b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "not_an_image"),
    "postscript": refused(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", "not_an_image"),
    "pdf": refused(b"%PDF-1.7\n", "not_an_image"),
    "icon": refused(encoded(noise(16, 16), "ICO"), "not_an_image"),
    "jpeg 2000": refused(encoded(noise(16, 16), "JPEG2000"), "not_an_image"),
    "targa": refused(encoded(noise(16, 16), "TGA"), "not_an_image"),
    "gzip": refused(b"\x1f\x8b" + zlib.compress(encoded(noise(9, 9), "PNG")), "not_an_image"),
}

BLOCKS = np.random.default_rng(1).integers(0, 256, (2, 3, 1), np.uint8).repeat(8, 0).repeat(8, 1).repeat(3, 2)
EXIF_FORMATS = {  # levels by which 8x8 blocks of one grey may differ, and how the format is written
    "PNG": (0, {}),
    "WEBP": (0, {"lossless": True}),
    "TIFF": (0, {}),
    "JPEG": (1, {"quality": 100, "subsampling": 0}),
    "MPO": (1, {"quality": 100, "subsampling": 0, "save_all": True, "append_images": [flat(RED)]}),
    "AVIF": (3, {"quality": 100, "subsampling": "4:4:4"}),
}


def oriented(kind: str, orientation: int) -> Case:
    within, options = EXIF_FORMATS[kind]
    image = Image.fromarray(as_stored(BLOCKS, orientation))
    return Case(lambda: encoded(image, kind, exif=exif(orientation), **options), BLOCKS, within)


CASES |= {f"{kind} of orientation {i}": oriented(kind, i) for kind in EXIF_FORMATS for i in range(1, 9)}
CASES |= {
    f"tiff lzw of orientation {i}": Case(
        lambda i=i: encoded(Image.fromarray(as_stored(NOISE, i)), "TIFF", compression="tiff_lzw", tiffinfo={274: i}),
        NOISE,
    )
    for i in range(1, 9)
}


T = TypeVar("T")


def attempt(work: Callable[[], T]) -> T | RecordRejected:
    try:
        return work()
    except RecordRejected as reject:
        return reject


@pytest.mark.parametrize("name", CASES)
def test_an_odd_image_is_exactly_right_or_rejected(name: str, decoders: Decoders, tmp_path: Path) -> None:
    case = CASES[name]
    data = case.data() if callable(case.data) else case.data
    path = tmp_path / "image.jpg"  # whatever it is: names decide nothing
    path.write_bytes(data)
    size = attempt(lambda: decoders.size(path, 0, len(data)))
    if case.reasons:
        found = attempt(lambda: decoders.decode(path, 0, len(data), bucket=(32, 32), crop="bucket"))
        assert isinstance(found, RecordRejected)
        assert found.stage == "decode"
        assert found.reason in case.reasons, found
        if isinstance(size, RecordRejected):
            assert (size.stage, size.reason) == ("scan", found.reason)
        else:  # the header of what is too large or no image tells
            assert found.reason not in ("too_large", "not_an_image")
        return
    expected = np.asarray(case.pixels, np.uint8)
    if expected.ndim == 2:
        expected = expected[:, :, None].repeat(3, 2)
    height_px, width_px = expected.shape[:2]
    assert size == (height_px, width_px)
    found = decoders.decode(path, 0, len(data), bucket=(height_px, width_px), crop="bucket")
    assert (found.height_px, found.width_px) == (height_px, width_px)
    worst = np.abs(found.pixels.astype(int) - expected).max()
    assert worst <= case.within, found.pixels.tolist()


def test_a_long_image_is_rejected_before_it_grows(decoders: Decoders, tmp_path: Path) -> None:
    path = tmp_path / "line.png"
    path.write_bytes(png(100_000, 1, 8, 0, bytes(100_000)))
    for crop in ("adm", "bucket"):
        with pytest.raises(RecordRejected) as caught:
            decoders.decode(path, 0, path.stat().st_size, bucket=(256, 256), crop=crop)
        assert (caught.value.stage, caught.value.reason) == ("decode", "aspect")


def decode_mutants(kind: str, count: int, seed: int, folder: Path, decoders: Decoders) -> Counter[str]:
    """What became of the mutants of a format: decoded, or the reason."""
    found = list(mutants(kind, count, seed))
    path = folder / f"{kind}.mutants"
    path.write_bytes(b"".join(found))
    outcomes: Counter[str] = Counter()
    offset = 0
    for mutant in found:
        place = (path, offset, len(mutant))
        size = attempt(lambda place=place: decoders.size(*place))
        image = attempt(lambda place=place: decoders.decode(*place, bucket=(16, 24), crop="bucket"))
        outcome = "decoded"
        if isinstance(image, RecordRejected):
            outcome = image.reason
            assert outcome in REJECT_REASONS
            assert not isinstance(size, RecordRejected) or size.reason == outcome
        else:
            assert image.pixels.shape == (16, 24, 3)
            assert size == (image.height_px, image.width_px)
        outcomes[outcome] += 1
        offset += len(mutant)
    assert path.read_bytes() == b"".join(found)
    return outcomes


def check_mutants(count: int, seed: int, folder: Path, decoders: Decoders) -> None:
    outcomes: Counter[str] = Counter()
    for kind in IMAGE_FORMATS:
        found = decode_mutants(kind, count, seed, folder, decoders)
        assert found.total() == count
        assert len(found) > 1, f"{kind}: the mutants are all {found}"  # else they test nothing
        outcomes += found
    print(f"{outcomes.total()} mutants: {dict(outcomes.most_common())}")
    assert not {"decoder_crash", "decoder_timeout"} & outcomes.keys()


def test_damaged_images_are_decoded_or_rejected(decoders: Decoders, tmp_path: Path) -> None:
    check_mutants(100, 1, tmp_path, decoders)


@pytest.mark.slow
def test_thousands_of_damaged_images_are_decoded_or_rejected(decoders: Decoders, tmp_path: Path) -> None:
    check_mutants(1200, 2, tmp_path, decoders)
