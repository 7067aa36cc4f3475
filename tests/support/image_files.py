"""Images for tests, byte by byte where Pillow writes none: PNG, TIFF and GIF of every kind, and damaged ones."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "MPO")
HEADER_BYTES = 160  # where a changed byte does most


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(height_px: int, width_px: int, seed: int = 0) -> Image.Image:
    """Random RGB pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height_px, width_px, 3), np.uint8))


def exif(orientation: int) -> Image.Exif:
    """EXIF that holds an orientation only."""
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def as_stored(upright: np.ndarray, orientation: int) -> np.ndarray:
    """How upright pixels lie in a file of that orientation: EXIF 2.3, section 4.6.4 A ("the 0th row is ...")."""
    lies = {2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.swapaxes(0, 1)}
    lies |= {6: upright[:, ::-1].swapaxes(0, 1), 7: upright[::-1, ::-1].swapaxes(0, 1), 8: upright[::-1].swapaxes(0, 1)}
    return np.ascontiguousarray(lies.get(orientation, upright))


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """Length, type, body, checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    width_px: int, height_px: int, depth: int, colour: int, rows: bytes | None, *before: bytes, after: bytes = b""
) -> bytes:
    """A PNG.

    Args:
      depth, colour: of its header: bits a sample, and 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGBA.
      rows: its packed rows one after the other; None for a header without pixels.
      before, after: chunks before and behind the pixels.
    """
    header = struct.pack(">IIBBBBB", width_px, height_px, depth, colour, 0, 0, 0)
    chunks = [b"\x89PNG\r\n\x1a\n", png_chunk(b"IHDR", header), *before]
    if rows is not None:
        step = len(rows) // height_px
        lines = b"".join(b"\0" + rows[y * step : (y + 1) * step] for y in range(height_px))
        chunks.append(png_chunk(b"IDAT", zlib.compress(lines)))
    return b"".join([*chunks, after, png_chunk(b"IEND", b"")])


def tiff(
    width_px: int,
    height_px: int,
    photometric: int,
    bits: list[int],
    rows: bytes,
    *,
    order: str = "<",
    tags: dict[int, list[int]] | None = None,
    num_strips: int = 1,
) -> bytes:
    """An uncompressed TIFF.

    Args:
      photometric: 0 white is zero, 1 black is zero, 2 RGB, 3 palette, 5 CMYK, 6 YCbCr, 8 Lab.
      bits: of each sample of a pixel.
      order: "<" little-endian, ">" big-endian.
      tags: more tags, of 16-bit numbers.
      num_strips: strips of equal size; of samples in planes (tag 284: 2), as many as there are samples.
    """
    strip = len(rows) // num_strips
    entries = {256: ("I", [width_px]), 257: ("I", [height_px]), 258: ("H", bits), 259: ("H", [1])}
    entries |= {
        262: ("H", [photometric]),
        273: ("I", [8 + i * strip for i in range(num_strips)]),
        277: ("H", [len(bits)]),
        278: ("I", [height_px]),
    }
    entries |= {279: ("I", [strip] * num_strips)} | {tag: ("H", values) for tag, values in (tags or {}).items()}
    pixels = rows + b"\0" * (len(rows) % 2)
    directory, tail = struct.pack(order + "H", len(entries)), b""
    end = 8 + len(pixels) + 2 + 12 * len(entries) + 4
    for tag, (kind, values) in sorted(entries.items()):
        body = struct.pack(f"{order}{len(values)}{kind}", *values)
        directory += struct.pack(order + "HHI", tag, {"H": 3, "I": 4}[kind], len(values))
        if len(body) <= 4:
            directory += body.ljust(4, b"\0")
        else:
            directory += struct.pack(order + "I", end + len(tail))
            tail += body
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8 + len(pixels))
    return start + pixels + directory + b"\0\0\0\0" + tail


def planar_tiff(
    planes: np.ndarray, photometric: int, *, order: str = "<", tags: dict[int, list[int]] | None = None
) -> bytes:
    """A TIFF whose samples lie in planes.

    Args:
      planes: (samples, H, W) uint8 or uint16.
    """
    num_samples, height_px, width_px = planes.shape
    rows = planes.astype(planes.dtype.newbyteorder(order)).tobytes()
    bits = [8 * planes.dtype.itemsize] * num_samples
    more = {284: [2]} | (tags or {})
    return tiff(width_px, height_px, photometric, bits, rows, order=order, tags=more, num_strips=num_samples)


# --- Color profiles: ICC.1:2001-04 ------------------------------------------------------------------------------------

D50 = (0.9642, 1.0, 0.8249)
D65 = (0.3127, 0.3290)
SRGB_PRIMARIES = (0.64, 0.33, 0.30, 0.60, 0.15, 0.06)
P3_PRIMARIES = (0.680, 0.320, 0.265, 0.690, 0.150, 0.060)
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


def rgb_to_xyz(primaries: tuple[float, ...]) -> np.ndarray:
    """(3, 3) matrix from linear RGB with a white of D65; ``primaries``: x and y of red, green, blue."""

    def xyz(x: float, y: float) -> list[float]:
        return [x / y, 1.0, (1 - x - y) / y]

    columns = np.array([xyz(*primaries[i : i + 2]) for i in (0, 2, 4)]).T
    return columns * np.linalg.solve(columns, xyz(*D65))


def icc_profile(space: bytes, tags: dict[bytes, bytes], *, connection: bytes = b"XYZ ", kind: bytes = b"mntr") -> bytes:
    """A profile of version 2."""
    text = b"desc" + bytes(4) + struct.pack(">I", 2) + b"x\0" + bytes(78)
    tags = {b"desc": text, b"cprt": b"text" + bytes(4) + b"x\0", b"wtpt": _xyz_type(D50)} | tags
    table, body = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for name, content in tags.items():
        table += name + struct.pack(">II", start + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    head = struct.pack(">I4sI4s4s4s", start + len(body), bytes(4), 0x02100000, kind, space, connection)
    head += struct.pack(">6H", 2020, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + _xyz_type(D50)[8:]
    return head.ljust(128, b"\0") + table + body


def _xyz_type(values: Any) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(value * 65536) for value in values))


def _gamma_curve(gamma: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))


def rgb_profile(primaries: tuple[float, ...], gamma: float) -> bytes:
    """A profile of an RGB space with a white of D65."""
    white = rgb_to_xyz(primaries).sum(1)
    to_d50 = np.linalg.inv(BRADFORD) @ np.diag(BRADFORD @ D50 / (BRADFORD @ white)) @ BRADFORD
    adapted = to_d50 @ rgb_to_xyz(primaries)
    columns = {name + b"XYZ": _xyz_type(adapted[:, i]) for i, name in enumerate((b"r", b"g", b"b"))}
    return icc_profile(b"RGB ", columns | {name + b"TRC": _gamma_curve(gamma) for name in (b"r", b"g", b"b")})


def grey_profile(gamma: float) -> bytes:
    """A profile of gray pixels."""
    return icc_profile(b"GRAY", {b"kTRC": _gamma_curve(gamma)})


def cmyk_profile() -> bytes:
    """A profile in which cyan alone is ink, and gray: L* falls from 100 to 0 with it, whatever the other inks are."""
    entries = 8 * bytes([255, 128, 128]) + 8 * bytes([0, 128, 128])  # of a grid of two points for each ink
    lut = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    ramp = bytes(range(256))
    lut += 4 * ramp + entries + 3 * ramp
    return icc_profile(b"CMYK", {b"A2B0": lut}, connection=b"Lab ", kind=b"prtr")


def srgb_curve(linear: np.ndarray) -> np.ndarray:
    """Linear light from 0 to 1 to sRGB's levels, 0 to 255: IEC 61966-2-1."""
    linear = np.clip(linear, 0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def in_srgb(pixels: np.ndarray, primaries: tuple[float, ...], gamma: float) -> np.ndarray:
    """(..., 3) levels of sRGB, float, of pixels of an RGB space with a white of D65."""
    linear = (pixels / 255.0) ** gamma
    return srgb_curve(linear @ rgb_to_xyz(primaries).T @ np.linalg.inv(rgb_to_xyz(SRGB_PRIMARIES)).T)


def gif_with_small_frame(canvas: tuple[int, int], left: int, top: int, frame: Image.Image, **options: Any) -> bytes:
    """A GIF whose only frame does not fill its canvas (width_px, height_px)."""
    data = bytearray(encoded(frame, "GIF", **options))
    data[6:10] = struct.pack("<HH", *canvas)
    colours = 3 * (2 << (data[10] & 7)) if data[10] & 0x80 else 0
    descriptor = data.index(b",", 13 + colours)
    data[descriptor + 1 : descriptor + 5] = struct.pack("<HH", left, top)
    return bytes(data)


def whole_images() -> dict[str, list[bytes]]:
    """Some small good images of each format, for mutants to be made of."""
    image, second = noise(16, 24, 1), noise(16, 24, 2)
    smooth = image.resize((3, 2)).resize((24, 16), Image.Resampling.BICUBIC)
    turned = {"exif": exif(6)}
    return {
        "JPEG": [
            encoded(smooth, "JPEG", **turned),
            encoded(image, "JPEG", progressive=True),
            encoded(image.convert("CMYK"), "JPEG", icc_profile=cmyk_profile()),
        ],
        "PNG": [
            encoded(image, "PNG", **turned),
            encoded(smooth.quantize(16), "PNG", transparency=3),
            encoded(image.convert("RGBA"), "PNG", save_all=True, append_images=[second]),
            encoded(image, "PNG", icc_profile=rgb_profile(P3_PRIMARIES, 2.2)),
        ],
        "WEBP": [
            encoded(smooth, "WEBP", **turned),
            encoded(image, "WEBP", lossless=True),
            encoded(image, "WEBP", save_all=True, append_images=[second]),
        ],
        "BMP": [encoded(image, "BMP"), encoded(smooth.quantize(16), "BMP"), encoded(image.convert("RGBA"), "BMP")],
        "GIF": [encoded(smooth, "GIF"), encoded(image, "GIF", save_all=True, append_images=[second])],
        "TIFF": [
            planar_tiff(np.moveaxis(np.asarray(image).astype(np.uint16) * 257, -1, 0), 2, order=">"),
            encoded(image, "TIFF", **turned),
            *(encoded(image, "TIFF", compression=how) for how in ("tiff_lzw", "tiff_adobe_deflate", "jpeg")),
            encoded(image.convert("1"), "TIFF", compression="group4"),
            encoded(image, "TIFF", save_all=True, append_images=[second]),
        ],
        "PPM": [encoded(image, "PPM"), encoded(image.convert("1"), "PPM"), b"P3 3 1 9\n1 2 3 4 5 6 7 8 9\n" * 2],
        "AVIF": [encoded(smooth, "AVIF", **turned), encoded(image.convert("RGBA"), "AVIF", quality=90)],
        "MPO": [encoded(smooth, "MPO", save_all=True, append_images=[second], **turned)],
    }


def with_right_checksums(data: bytes) -> bytes:
    """A damaged PNG whose chunks agree with their checksums, so that the damage reaches what lies behind them."""
    parts, at = [data[:8]], 8
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        parts.append(png_chunk(kind, data[at + 8 : at + 8 + length]) if at + 12 + length <= len(data) else data[at:])
        at += 12 + length
    return b"".join(parts)


def mutants(kind: str, count: int, seed: int) -> Iterator[bytes]:
    """Damaged images of one format: flipped bits, overwritten runs, cut ends, spliced parts; half in the header."""
    rng = np.random.default_rng([seed, IMAGE_FORMATS.index(kind)])
    whole = whole_images()
    strangers = [data for found in whole.values() for data in found]
    for number in range(count):
        data = bytearray(whole[kind][number % len(whole[kind])])
        near = len(data) if rng.integers(2) else min(len(data), HEADER_BYTES)
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(near))
            match int(rng.integers(6)):
                case 0 | 1:
                    for position in rng.integers(near, size=int(rng.integers(1, 9))):
                        data[position % len(data)] ^= 1 << int(rng.integers(8))
                case 2:
                    run = int(rng.integers(1, 17))
                    data[at : at + run] = bytes([int(rng.choice([0, 1, 127, 128, 255]))]) * len(data[at : at + run])
                case 3:
                    data[at : at + 4] = rng.bytes(4)
                case 4:
                    stranger = strangers[int(rng.integers(len(strangers)))]
                    start = int(rng.integers(len(stranger)))
                    data[at : at + int(rng.integers(64))] = stranger[start : start + int(rng.integers(64))]
                case _:
                    data = data[: max(1, int(rng.integers(len(data))))]
            near = min(near, len(data))
        repaired = kind == "PNG" and number % 2
        yield with_right_checksums(bytes(data)) if repaired else bytes(data)


def adm_by_hand(image: Image.Image, side: int) -> np.ndarray:
    """The crop of Dhariwal and Nichol, written from its description."""
    while min(image.size) >= 2 * side:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = side / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    top, left = (image.height - side) // 2, (image.width - side) // 2
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
