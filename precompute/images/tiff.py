"""TIFF layouts that Pillow misreads: read plane by plane, or rejected by name.

A TIFF may keep the samples of a pixel together, or each in a plane of its own (PlanarConfiguration 2). Each plane is
a gray image: it is decoded as a TIFF of one sample, with the strips or tiles of that plane.
"""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
from PIL import Image, TiffImagePlugin

from ...errors import RecordRejected

# Tags of TIFF 6.0, and of DNG.
SUBFILE_TYPE = 254
WIDTH = 256
HEIGHT = 257
BITS = 258
COMPRESSION = 259
PHOTOMETRIC = 262
FILL_ORDER = 266
STRIP_OFFSETS = 273
ORIENTATION = 274
SAMPLES = 277
ROWS_PER_STRIP = 278
STRIP_BYTES = 279
PLANAR = 284
PREDICTOR = 317
TILE_WIDTH = 322
TILE_HEIGHT = 323
TILE_OFFSETS = 324
TILE_BYTES = 325
EXTRA_SAMPLES = 338
SAMPLE_FORMAT = 339
JPEG_TABLES = 347
SUBSAMPLING = 530
DNG_VERSION = 50706
# Values of PLANAR, PHOTOMETRIC and EXTRA_SAMPLES.
IN_PLANES = 2
WHITE_IS_ZERO = 0
BLACK_IS_ZERO = 1
RGB = 2
CMYK = 5
PREMULTIPLIED = 1
ALPHA = 2
COPIED = (COMPRESSION, FILL_ORDER, ORIENTATION, ROWS_PER_STRIP, PREDICTOR, TILE_WIDTH, TILE_HEIGHT)
COLOUR_SAMPLES = {WHITE_IS_ZERO: 1, BLACK_IS_ZERO: 1, RGB: 3, CMYK: 4}
PHOTOMETRICS = {0: "gray", 1: "gray", 2: "RGB", 3: "a palette", 4: "a mask", 5: "CMYK", 6: "YCbCr", 8: "Lab"}
COMPRESSIONS = {1: "none", 2: "CCITT", 3: "CCITT", 4: "CCITT", 5: "LZW", 6: "old JPEG", 7: "JPEG", 8: "deflate"}
FORMATS = {1: "unsigned", 2: "signed", 3: "floating-point"}
# Types of the values of a tag.
SHORT = 3
LONG = 4
UNDEFINED = 7


def bits_of(tags: Any) -> int:
    """Bits of the first sample."""
    return _number(tags, BITS, 1)


def white_is_zero(tags: Any) -> bool:
    """A gray image whose samples count from white to black."""
    return _number(tags, PHOTOMETRIC, BLACK_IS_ZERO) == WHITE_IS_ZERO


def check_layout(tags: Any, mode: str) -> None:
    """Reject layouts that Pillow misreads without an error.

    Args:
      tags: of the first page, as Pillow reads them.
      mode: of the image, as Pillow has it.
    """
    if DNG_VERSION in tags or _number(tags, SUBFILE_TYPE, 0) & 1:
        raise RecordRejected("decode", "unsupported_mode", "its first page is a preview, as in raw photographs (DNG)")
    if mode not in ("I", "F") and set(_numbers(tags, SAMPLE_FORMAT)) - {1}:
        raise RecordRejected("decode", "unsupported_mode", "samples that are not unsigned integers")
    # TIFF 6.0, section 21: 2x2 by default. Pillow reads uncompressed pixels as if it were 1x1.
    if mode == "YCbCr" and tags.get(SUBSAMPLING, (2, 2)) != (1, 1):
        raise RecordRejected("decode", "unsupported_mode", "uncompressed YCbCr with subsampled color")


def describe(data: bytes) -> str:
    """The layout of a TIFF that Pillow does not open, in words; "" if its tags cannot be read either."""
    if data.startswith(b"MM\0+"):
        return "64-bit offsets and big-endian numbers (BigTIFF)"
    try:
        tags: Any = TiffImagePlugin.ImageFileDirectory_v2(data[: 16 if data[2] == 43 else 8])
        file = io.BytesIO(data)
        file.seek(tags.next)
        tags.load(file)
        bits = _numbers(tags, BITS) or [1]
        sample_formats = _numbers(tags, SAMPLE_FORMAT) or [1]
        photometric = tags[PHOTOMETRIC]
        compression = tags.get(COMPRESSION, 1)
        words = f"{len(bits)} x {max(bits)}-bit {FORMATS.get(sample_formats[0], 'other')} samples"
    except RecordRejected:
        return ""
    except (ArithmeticError, AttributeError, LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error):
        return ""  # its tags are damaged
    words += " in planes" if tags.get(PLANAR) == IN_PLANES else ""
    colour = PHOTOMETRICS.get(photometric, f"photometric {photometric}")
    return f"{words}, {colour}, compression {COMPRESSIONS.get(compression, compression)}"


def lacks_directory(data: bytes) -> bool:
    """The tags of the first page, which often follow its pixels, lie behind the end of the file."""
    order: Any = "big" if data.startswith(b"MM") else "little"
    is_big = data[2:4] in (b"+\0", b"\0+")
    offset = data[8:16] if is_big else data[4:8]
    return int.from_bytes(offset, order) + 2 > len(data)


def ends_early(tags: Any, num_bytes: int) -> bool:
    """A strip or a tile of the first page ends behind the end of the file."""
    for offset_tag, count_tag in ((STRIP_OFFSETS, STRIP_BYTES), (TILE_OFFSETS, TILE_BYTES)):
        offsets, counts = _numbers(tags, offset_tag), _numbers(tags, count_tag)
        if any(offset + count > num_bytes for offset, count in zip(offsets, counts, strict=False)):
            return True
    return False


def is_in_planes(tags: Any) -> bool:
    """Each sample of a pixel lies in a plane of its own."""
    return _number(tags, PLANAR, 1) == IN_PLANES and _number(tags, SAMPLES, 1) > 1


def read_planes(data: bytes, tags: Any, size: tuple[int, int]) -> Image.Image:
    """The pixels of a TIFF whose samples lie in planes, upright.

    Args:
      data: the file.
      tags: of the first page, as Pillow reads them.
      size: width and height in pixels, upright.
    Returns: an image of mode L, LA, RGB, RGBA, RGBa (alpha is multiplied) or CMYK.
    Raises: RecordRejected: unsupported_mode; another layout than 8 or 16 bits of gray, RGB or CMYK. Whatever Pillow
      raises of damaged pixels.
    """
    photometric = _number(tags, PHOTOMETRIC, WHITE_IS_ZERO)
    num_samples, bits = _number(tags, SAMPLES, 1), _numbers(tags, BITS)
    num_colours = COLOUR_SAMPLES.get(photometric, 0)
    if not num_colours or num_samples < num_colours or set(bits) not in ({8}, {16}):
        raise RecordRejected("decode", "unsupported_mode", f"a TIFF of {describe(data)}")
    extra = _numbers(tags, EXTRA_SAMPLES)
    has_alpha = num_samples > num_colours and bool(extra) and extra[0] in (PREMULTIPLIED, ALPHA)
    num_read = num_colours + (1 if has_alpha and photometric != CMYK else 0)
    planes = []
    for number in range(num_read):
        with TiffImagePlugin.TiffImageFile(io.BytesIO(_plane(data, tags, number, num_samples, bits[0]))) as plane:
            plane.load()
            if plane.size != size:
                raise RecordRejected("decode", "decode_error", f"a plane of {plane.size} px in an image of {size} px")
            values = np.asarray(plane)
        if bits[0] == 16:
            values = _eight_bits(values)
        planes.append(255 - values if photometric == WHITE_IS_ZERO and number == 0 else values)
    mode = {(1, 1): "L", (1, 2): "LA", (3, 3): "RGB", (3, 4): "RGBA", (4, 4): "CMYK"}[num_colours, num_read]
    merged = Image.merge(mode, [Image.fromarray(np.ascontiguousarray(plane)) for plane in planes])
    if has_alpha and extra[0] == PREMULTIPLIED and mode in ("LA", "RGBA"):
        rgba = merged.convert("RGBA")
        return Image.frombytes("RGBa", rgba.size, rgba.tobytes())
    return merged


def _eight_bits(values: np.ndarray) -> np.ndarray:
    """16-bit samples, scaled to 8 bits and rounded."""
    return np.round(np.arange(1 << 16) / 257).astype(np.uint8)[values]


def _plane(data: bytes, tags: Any, number: int, num_samples: int, bits: int) -> bytes:
    """One plane as a TIFF of one gray sample, in the byte order of the file.

    Raises: RecordRejected: decode_error; its strips or tiles are not those of planes.
    """
    is_tiled = TILE_OFFSETS in tags
    offset_tag, count_tag = (TILE_OFFSETS, TILE_BYTES) if is_tiled else (STRIP_OFFSETS, STRIP_BYTES)
    offsets, counts = _numbers(tags, offset_tag), _numbers(tags, count_tag)
    per_plane, rest = divmod(len(offsets), num_samples)
    if rest or not per_plane or len(counts) != len(offsets):
        detail = f"{len(offsets)} strips or tiles in {num_samples} planes"
        raise RecordRejected("decode", "decode_error", detail)
    chosen = range(number * per_plane, (number + 1) * per_plane)
    pieces = [data[offsets[i] : offsets[i] + counts[i]] for i in chosen]
    if any(len(pieces[j]) != counts[i] for j, i in enumerate(chosen)):
        raise RecordRejected("decode", "truncated", "the file ends before its last strip or tile")
    order = ">" if data[:2] == b"MM" else "<"
    entries = {
        WIDTH: [_number(tags, WIDTH, 0)],
        HEIGHT: [_number(tags, HEIGHT, 0)],
        BITS: [bits],
        PHOTOMETRIC: [BLACK_IS_ZERO],
        SAMPLES: [1],
    }
    entries |= {tag: [_number(tags, tag, 0)] for tag in COPIED if tag in tags}
    starts = np.cumsum([8, *(len(piece) for piece in pieces[:-1])]).tolist()
    entries[offset_tag] = starts
    entries[count_tag] = [counts[i] for i in chosen]
    return _tiff(order, b"".join(pieces), entries, jpeg_tables=tags.get(JPEG_TABLES))


def _tiff(order: str, body: bytes, entries: dict[int, list[int]], *, jpeg_tables: bytes | None) -> bytes:
    """A TIFF: its header, the body, and a directory of tags behind it."""
    body += bytes(len(body) % 2)
    contents = {
        tag: (LONG, len(values), struct.pack(f"{order}{len(values)}I", *values)) for tag, values in entries.items()
    }
    for tag in (BITS, COMPRESSION, PHOTOMETRIC, FILL_ORDER, ORIENTATION, SAMPLES, PREDICTOR):
        if tag in entries:
            contents[tag] = (SHORT, 1, struct.pack(f"{order}H", *entries[tag]))
    if isinstance(jpeg_tables, bytes):
        contents[JPEG_TABLES] = (UNDEFINED, len(jpeg_tables), jpeg_tables)
    directory = struct.pack(f"{order}H", len(contents))
    tail = b""
    end = 8 + len(body) + 2 + 12 * len(contents) + 4
    for tag, (kind, count, content) in sorted(contents.items()):
        directory += struct.pack(f"{order}HHI", tag, kind, count)
        if len(content) <= 4:
            directory += content.ljust(4, b"\0")
        else:
            directory += struct.pack(f"{order}I", end + len(tail))
            tail += content + bytes(len(content) % 2)
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(body))
    return start + body + directory + bytes(4) + tail


def _numbers(tags: Any, tag: int) -> list[int]:
    """The whole numbers of a tag; none if it is missing.

    Raises: RecordRejected: decode_error; it holds something else.
    """
    value = tags.get(tag, ())
    numbers = list(value) if isinstance(value, tuple) else [value]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise RecordRejected("decode", "decode_error", f"tag {tag} of its TIFF data is not a whole number")
    return numbers


def _number(tags: Any, tag: int, default: int) -> int:
    """The first number of a tag, or the default if it is missing; raises as ``_numbers``."""
    numbers = _numbers(tags, tag)
    return numbers[0] if numbers else default
