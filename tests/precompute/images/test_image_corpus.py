"""A corpus of odd, hostile and broken images, decoded in children: exactly right, or rejected with its reason."""

from __future__ import annotations

import struct
import zlib
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
    planar_tiff,
    png,
    png_chunk,
    tiff,
)
from PIL import Image

from leandit.datasets.format.table_schemas import REJECT_REASONS
from leandit.errors import RecordRejected
from leandit.precompute.images.decoders import Decoders


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    with Decoders(1, timeout_seconds=120) as found:
        yield found


XMP = png_chunk(b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0<x:xmpmeta xmlns:x="adobe:ns:meta/"/>')
UPRIGHT_EXIF = png_chunk(b"eXIf", exif(1).tobytes()[6:])


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
PLTE = png_chunk(b"PLTE", PALETTE)


def flat(colour: Any, mode: str = "RGB", size: tuple[int, int] = (16, 16)) -> Image.Image:
    return Image.new(mode, size, colour)


VEIL = flat((0, 0, 0, 51), "RGBA")


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


def cmyk_jpeg(*inks: int) -> bytes:
    return encoded(flat(inks, "CMYK"), "JPEG", quality=100)


def without_adobe_marker(data: bytes) -> bytes:
    at = data.index(b"\xff\xee\0\x0eAdobe")
    return data[:at] + data[at + 16 :]


def jpeg_of_size(height_px: int, width_px: int) -> bytes:
    """A JPEG whose header lies."""
    data = bytearray(encoded(flat(RED), "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height_px, width_px)
    return bytes(data)


def frames(kind: str, **options: Any) -> bytes:
    others = [noise(16, 24, 1), noise(16, 24, 2)]
    return encoded(noise(16, 24), kind, save_all=True, append_images=others, **options)


PLANES = (  # name, (samples, 1, width) levels, (photometric, ) or with more tags, pixels
    ("rgb", [[[1, 9]], [[2, 200]], [[3, 0]]], (2,), [[INK, (9, 200, 0)]]),
    ("cmyk", [[[255, 0]], [[0, 0]], [[0, 0]], [[0, 255]]], (5,), [[CYAN, (0, 0, 0)]]),
)


def ycbcr_tiff(subsampling: list[int] | None) -> bytes:
    rows = bytes([76, 84, 255, 255, 128, 128])
    return tiff(2, 1, 6, [8] * 3, rows, tags={530: subsampling} if subsampling else {})


CASES = {
    # PNG: every colour type and depth
    "png grey 1": Case(png(4, 1, 1, 0, b"\x50"), grey(0, 255, 0, 255)),
    "png grey 16": Case(png(4, 1, 16, 0, u16(0, 257 * 9, 128, 129)), grey(0, 9, 0, 1)),
    "png palette 8": Case(png(2, 1, 8, 3, b"\1\2", PLTE), row(GREEN, INK)),
    "png la 8": Case(png(3, 1, 8, 4, bytes([9, 255, 9, 0, 0, 51])), grey(9, 255, 204)),
    # PNG: a transparent colour, in the depth of the file
    "png grey 4, one transparent": Case(png(2, 1, 4, 0, b"\x12", chunk16(b"tRNS", 2)), grey(17, 255)),
    "png grey 16, one transparent": Case(
        png(3, 1, 16, 0, u16(2313, 2314, 5140), chunk16(b"tRNS", 2313)), grey(255, 9, 20)
    ),
    "png rgb, one transparent": Case(
        png(2, 1, 8, 2, bytes([*INK, 1, 2, 4]), chunk16(b"tRNS", *INK)), row(WHITE, (1, 2, 4))
    ),
    "png rgb 16, one transparent": refused(
        png(1, 1, 16, 2, u16(9, 9, 9), chunk16(b"tRNS", 9, 9, 9)), "unsupported_mode"
    ),
    "png palette with alphas": Case(
        png(2, 1, 8, 3, b"\2\0", png_chunk(b"PLTE", bytes(9)), png_chunk(b"tRNS", b"\xff\0\x33")), grey(204, 0)
    ),
    "png palette without its palette": refused(png(2, 1, 8, 3, b"\0\1"), "decode_error"),
    # PNG: a transparent colour, where Pillow reads metadata from behind the pixels
    "png grey 2, one transparent, with XMP": Case(
        png(4, 1, 2, 0, b"\x1b", chunk16(b"tRNS", 2), XMP), grey(0, 85, 255, 255)
    ),
    "png grey 16, one transparent, with XMP": Case(
        png(2, 1, 16, 0, u16(2313, 2314), chunk16(b"tRNS", 2313), XMP), grey(255, 9)
    ),
    "png rgb, one transparent, with EXIF behind": Case(
        png(2, 1, 8, 2, bytes([*INK, 1, 2, 4]), chunk16(b"tRNS", *INK), after=UPRIGHT_EXIF), row(WHITE, (1, 2, 4))
    ),
    "png palette with alphas and XMP": Case(
        png(2, 1, 8, 3, b"\2\0", png_chunk(b"PLTE", bytes(9)), png_chunk(b"tRNS", b"\xff\0\x33"), XMP), grey(204, 0)
    ),
    # PNG: the rest
    "png with exif behind the pixels": Case(
        png(2, 1, 8, 0, b"\1\2", after=png_chunk(b"eXIf", exif(6).tobytes()[6:])), grey(1, 2).T
    ),
    "png with the orientation in XMP": Case(
        png(2, 1, 8, 0, b"\1\2", png_chunk(b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="6"/>')),
        grey(1, 2).T,
    ),
    "animated png": Case(frames("PNG"), NOISE),
    "png bomb": refused(png(50_000, 50_000, 8, 2, None), "too_large"),
    "png just above the limit": refused(png(16_001, 16_000, 8, 2, None), "too_large"),
    "png with a bomb of text": refused(
        lambda: png(2, 1, 8, 0, b"\1\2", png_chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(1 << 22)))), "decode_error"
    ),
    "png without pixels": refused(png(4, 4, 8, 2, None), "decode_error", "truncated"),
    "png cut in its pixels": refused(encoded(noise(64, 64), "PNG")[:6000], "truncated"),
    # JPEG
    "jpeg cmyk as Adobe writes it": Case(cmyk_jpeg(255, 0, 0, 0), flat_pixels(CYAN), within=2),
    "jpeg cmyk without Adobe's marker": Case(  # programs that strip it leave the inks inverted
        without_adobe_marker(cmyk_jpeg(255, 0, 0, 0)), flat_pixels(CYAN), within=2
    ),
    "mpo": Case(encoded(flat(MID), "MPO", save_all=True, append_images=[flat(RED)]), flat_pixels(MID), within=1),
    "jpeg bomb": refused(jpeg_of_size(65_500, 65_500), "too_large"),
    "jpeg cut": refused(encoded(noise(64, 64), "JPEG")[:3000], "truncated"),
    # GIF
    "gif with transparency": Case(encoded(indexed(0, 1, 2), "GIF", transparency=1), row(RED, WHITE, INK)),
    "gif animated": Case(
        encoded(indexed(0, 1), "GIF", save_all=True, append_images=[indexed(2, 2), indexed(1, 0)]), row(RED, GREEN)
    ),
    "gif whose frame is smaller than it": Case(
        gif_with_small_frame((3, 2), 1, 1, indexed(1, 2)), np.array([[WHITE, WHITE, WHITE], [WHITE, GREEN, INK]])
    ),
    # WebP and AVIF
    "webp with alpha": Case(encoded(VEIL, "WEBP", lossless=True, exact=True), flat_pixels((204,) * 3)),
    "avif": Case(encoded(flat(MID), "AVIF"), flat_pixels(MID), within=2),
    "avif with alpha": Case(encoded(VEIL, "AVIF", quality=100), flat_pixels((204,) * 3), within=2),
    # BMP
    "bmp": Case(encoded(noise(16, 24), "BMP"), NOISE),
    # TIFF: every layout of samples
    "tiff 12": Case(tiff(2, 1, 1, [12], b"\xff\xf8\x00"), grey(255, 128)),
    "tiff 16": Case(tiff(2, 1, 1, [16], u16(771, 65535), order=">"), grey(3, 255)),
    "tiff 16, white is zero": Case(tiff(2, 1, 0, [16], u16(771, 65535, order="<")), grey(252, 0)),
    "tiff 16, turned": Case(tiff(2, 1, 1, [16], u16(771, 65535, order="<"), tags={274: [6]}), grey(3, 255).T),
    "tiff rgb 16": Case(tiff(1, 1, 2, [16] * 3, u16(257, 514, 65535, order=">"), order=">"), row((1, 2, 255))),
    "tiff la, multiplied": Case(tiff(2, 1, 1, [8, 8], bytes([9, 255, 9, 51]), tags={338: [1]}), grey(9, 213)),
    "tiff rgba, multiplied": Case(
        tiff(2, 1, 2, [8] * 4, bytes([*INK, 255, 10, 20, 30, 51]), tags={338: [1]}), row(INK, (214, 224, 234))
    ),
    **{
        f"tiff {bits} in planes, {'big' if order == '>' else 'little'}-endian, {name}": Case(
            planar_tiff(np.array(samples).astype(f"u{bits // 8}") * (257 if bits == 16 else 1), *layout, order=order),
            np.asarray(pixels),
        )
        for bits in (8, 16)
        for order in "<>"
        for name, samples, layout, pixels in PLANES
    },
    "tiff 16 in planes, turned": Case(
        planar_tiff(np.moveaxis(as_stored(NOISE, 6).astype(np.uint16) * 257, -1, 0), 2, tags={274: [6]}), NOISE
    ),
    "tiff 16 in planes, cut": refused(
        planar_tiff(np.moveaxis(NOISE.astype(np.uint16) * 257, -1, 0), 2)[:-300], "truncated"
    ),
    "tiff 32 in planes": refused(planar_tiff(np.ones((3, 2, 2), np.uint32), 2), "unsupported_mode"),
    "tiff rgb of floats": refused(
        tiff(1, 1, 2, [32] * 3, struct.pack("<3f", 0, 1, 0), tags={339: [3] * 3}), "unsupported_mode"
    ),
    "tiff whose first page is a preview": refused(tiff(1, 1, 2, [8] * 3, b"123", tags={254: [1]}), "unsupported_mode"),
    "tiff ycbcr": Case(ycbcr_tiff([1, 1]), row((254, 0, 0), WHITE)),
    "tiff ycbcr, subsampled": refused(
        tiff(2, 2, 6, [8] * 3, bytes([76] * 4 + [84, 255]), tags={530: [2, 2]}), "unsupported_mode"
    ),
    "tiff ycbcr that does not say how": refused(ycbcr_tiff(None), "unsupported_mode"),
    "tiff lab": refused(tiff(1, 1, 8, [8] * 3, bytes([128, 0, 0])), "unsupported_mode"),
    "tiff of signed bytes": refused(tiff(2, 1, 1, [8], b"\0\xc8", tags={339: [2]}), "unsupported_mode"),
    "tiff 32": refused(tiff(1, 1, 1, [32], struct.pack("<I", 7)), "unsupported_mode"),
    "tiff of floats": refused(tiff(1, 1, 1, [32], struct.pack("<f", 0.5), tags={339: [3]}), "unsupported_mode"),
    "tiff lzw": Case(encoded(noise(16, 24), "TIFF", compression="tiff_lzw"), NOISE),
    "tiff of many pages": Case(frames("TIFF"), NOISE),
    # PPM and relatives
    "pgm 16": Case(b"P5 2 1 65535\n" + u16(257 * 9, 65535), grey(9, 255)),
    "ppm": Case(b"P6 1 1 255\n\1\2\3", row(INK)),
    "pfm": refused(b"Pf\n1 1\n-1.0\n" + struct.pack("<f", 0.5), "unsupported_mode"),
    "ppm palette without its palette": refused(b"PyP 2 1 255\n\1\2", "decode_error"),
    # No images, or of formats that are not read
    "nothing": refused(b"", "not_an_image"),
    "postscript": refused(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", "not_an_image"),
    "icon": refused(encoded(noise(16, 16), "ICO"), "not_an_image"),
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
TURNED = Image.fromarray(as_stored(NOISE, 6))
CASES["tiff lzw, turned"] = Case(encoded(TURNED, "TIFF", compression="tiff_lzw", tiffinfo={274: 6}), NOISE)


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
    assert found.size == (height_px, width_px)
    worst = np.abs(found.pixels.astype(int) - expected).max()
    assert worst <= case.within, found.pixels.tolist()


def test_a_long_image_is_rejected_before_it_grows(decoders: Decoders, tmp_path: Path) -> None:
    path = tmp_path / "line.png"
    path.write_bytes(png(100_000, 1, 8, 0, bytes(100_000)))
    for crop in ("adm", "bucket"):
        with pytest.raises(RecordRejected) as caught:
            decoders.decode(path, 0, path.stat().st_size, bucket=(256, 256), crop=crop)
        assert (caught.value.stage, caught.value.reason) == ("decode", "aspect")


@pytest.mark.parametrize(("count", "seed"), [(100, 1), pytest.param(1200, 2, marks=pytest.mark.slow)])
def test_damaged_images_are_decoded_or_rejected(count: int, seed: int, decoders: Decoders, tmp_path: Path) -> None:
    for kind in IMAGE_FORMATS:
        damaged, offset, outcomes = list(mutants(kind, count, seed)), 0, set[str]()
        path = tmp_path / f"{kind}.mutants"
        path.write_bytes(b"".join(damaged))
        for mutant in damaged:
            place = (path, offset, len(mutant))
            size = attempt(lambda place=place: decoders.size(*place))
            image = attempt(lambda place=place: decoders.decode(*place, bucket=(16, 24), crop="bucket"))
            if isinstance(image, RecordRejected):
                outcomes.add(image.reason)
                assert not isinstance(size, RecordRejected) or size.reason == image.reason
            else:
                outcomes.add("decoded")
                assert image.pixels.shape == (16, 24, 3)
                assert size == image.size
            offset += len(mutant)
        assert outcomes <= {"decoded", *REJECT_REASONS} - {"decoder_crash", "decoder_timeout"}
        assert len(outcomes) > 1, f"{kind}: the mutants are all {outcomes}"  # else they test nothing


NAMED = {  # bytes that begin like a file of a known kind: reason, and words of the detail
    "jpeg of 12 bits": (
        encoded(flat(RED), "JPEG").replace(b"\xff\xc0\0\x11\x08", b"\xff\xc1\0\x11\x0c"),
        "decode_error",
        "JPEG",
    ),
    "jpeg without pixels": (jpeg_of_size(0, 0), "decode_error", "its JPEG data have no size in their header"),
    "cut in its header": (encoded(flat(RED), "PNG")[:20], "truncated", "its PNG data end too early"),
    "webp cut": (encoded(noise(16, 24), "WEBP")[:90], "truncated", "its WEBP data end too early"),
    "gif without a frame": (b"GIF89a" + bytes(7), "decode_error", "its GIF data"),
    "bmp of 2 bits": (
        encoded(flat(RED), "BMP").replace(b"\1\0\x18\0", b"\1\0\2\0", 1),
        "decode_error",
        "pixel depth (2)",
    ),
    "tiff lzw, cut": (
        encoded(noise(64, 64), "TIFF", compression="tiff_lzw")[:200],
        "truncated",
        "its TIFF data end too early",
    ),
    "bigtiff of big-endian numbers": (b"MM\0+\0\x08\0\0" + bytes(16), "unsupported_mode", "BigTIFF"),
    "jpeg xl": (b"\xff\x0a\xfa\x0f", "not_an_image", "JPEG XL; convert it first, for example with djxl"),
    "jpeg xl in a box": (b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(9), "not_an_image", "JPEG XL"),
    "jpeg 2000": (encoded(flat(RED), "JPEG2000"), "not_an_image", "JPEG 2000"),
    "tga": (encoded(flat(RED), "TGA"), "not_an_image", "TGA"),
    "dds": (encoded(flat(RED), "DDS"), "not_an_image", "DDS"),
    "photoshop": (b"8BPS\0\1", "not_an_image", "Photoshop"),
    "web page": (
        b"\n<!DOCTYPE html><title>404</title>",
        "not_an_image",
        "a web page, not an image: the download failed",
    ),
    "svg": (b'<?xml version="1.0"?><svg/>', "not_an_image", "XML"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "not_an_image", "git lfs pull"),
    "pdf": (b"%PDF-1.7", "not_an_image", "PDF"),
    "video": (b"\0\0\0\x18ftypisom", "not_an_image", "video"),
    "zeros": (bytes(4000), "not_an_image", "all 4000 bytes are zero"),
    "nothing": (b"", "not_an_image", "the file is empty"),
    "behind a line end": (b"\r\n" + encoded(flat(RED), "PNG"), "not_an_image", "PNG behind 2 bytes of white space"),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_is_not_read_is_named(name: str, decoders: Decoders, tmp_path: Path) -> None:
    data, reason, words = NAMED[name]
    path = tmp_path / "image.jpg"
    path.write_bytes(data)
    found = attempt(lambda: decoders.decode(path, 0, len(data), bucket=(32, 32), crop="bucket"))
    assert isinstance(found, RecordRejected)
    assert found.reason == reason, found
    assert words in found.detail
    assert "no known image format" not in found.detail


def test_photographs_of_phones_are_read_and_a_key_limits_them(tmp_path: Path, decoders: Decoders) -> None:
    path = tmp_path / "phone.png"
    levels = np.zeros(9000, np.uint8).repeat(12000 // 8)  # 108 megapixels of 1 bit, the lower half white
    levels[levels.size // 2 :] = 255
    path.write_bytes(png(12000, 9000, 1, 0, levels.tobytes()))
    place = path, 0, path.stat().st_size
    assert decoders.size(*place) == (9000, 12000)
    pixels = decoders.decode(*place, bucket=(24, 32), crop="bucket").pixels
    assert (pixels[:11].max(), pixels[13:].min()) == (0, 255)
    with Decoders(1, max_megapixels=100) as limited:
        for read in (lambda: limited.size(*place), lambda: limited.decode(*place, bucket=(24, 32), crop="bucket")):
            with pytest.raises(RecordRejected, match=r"12000x9000 px are 108 megapixels, images\.max_megapixels = 100"):
                read()
