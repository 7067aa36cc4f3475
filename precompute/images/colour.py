"""Colours to sRGB, by the profile that is embedded in an image, or by the colour space that its header names.

Little CMS converts, through Pillow. A profile whose colours are those of sRGB, within SAME_LEVELS, costs nothing but a
look at it.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from ...errors import RecordRejected

SAME_LEVELS = 2  # of 255: the curves of sRGB's own profiles differ by rounding
CACHED_PROFILES = 16  # of each process; most sources have few
GRID_STEPS = 9
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
INTENT = ImageCms.Intent.PERCEPTUAL  # which the profiles of photographs are made for
SPACES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}  # of a profile, and the mode of the pixels that it describes

# ITU-T H.273, tables 2 and 3: the codes of cICP in PNG, and of colr in AVIF and HEIC.
UNSPECIFIED = 2
SRGB_PRIMARIES = 1
SDR_TRANSFERS = (1, 6, 13, 14, 15)  # BT.709 and its relatives are shown as sRGB
HDR_TRANSFERS = {16: "PQ", 18: "HLG"}
PRIMARIES = {  # x and y of red, green, blue; their white is D65
    9: (0.708, 0.292, 0.170, 0.797, 0.131, 0.046),  # BT.2020
    12: (0.680, 0.320, 0.265, 0.690, 0.150, 0.060),  # Display P3
}
D65 = (0.3127, 0.3290)
D50 = np.array([0.9642, 1.0, 0.8249])  # of the profile connection space
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)  # IEC 61966-2-1, as a parametric curve of ICC


class UnusableProfile(Exception):
    """A profile that cannot be read, or that describes other pixels than those of its image."""


def converted_to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert pixels to sRGB.

    Args:
      image: of mode RGB (which may be changed), L or CMYK.
      profile: an ICC profile.
    Returns: an RGB image.
    Raises: UnusableProfile: broken, or of another colour space than the pixels.
    """
    mode = profile_mode(profile)
    if mode == "RGB" and image.mode == "L" and _transform(profile, mode) is None:
        return image.convert("RGB")  # programs write sRGB's profile into every image
    if mode != image.mode:
        raise UnusableProfile(f"a profile of {mode} pixels in an image of {image.mode} pixels")
    transform = _transform(profile, mode)
    if transform is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    in_place = image.mode == "RGB"
    result = ImageCms.applyTransform(image, transform, inPlace=in_place)
    return image if result is None else result


@lru_cache(CACHED_PROFILES)
def profile_mode(profile: bytes) -> str:
    """The mode of the pixels that a profile describes: RGB, L or CMYK.

    Raises: UnusableProfile: it cannot be read, or describes other pixels.
    """
    try:
        space = str(_read_profile(profile).profile.xcolor_space)
    except (OSError, ImageCms.PyCMSError) as error:
        raise UnusableProfile(str(error)) from error
    if space not in SPACES:
        raise UnusableProfile(f"a profile of the colour space {space.strip()!r}")
    return SPACES[space]


def _read_profile(profile: bytes) -> Any:
    """A profile of Pillow's, whose type is private."""
    return ImageCms.ImageCmsProfile(io.BytesIO(profile))


@lru_cache(CACHED_PROFILES)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The conversion of a profile to sRGB; None if it changes nothing.

    Raises: UnusableProfile: its tables are broken.
    """
    try:
        transform = ImageCms.buildTransform(_read_profile(profile), SRGB, mode, "RGB", renderingIntent=INTENT)
    except (OSError, ImageCms.PyCMSError) as error:
        raise UnusableProfile(str(error)) from error
    if mode == "CMYK":
        return transform
    probe = _probe(mode)
    before = np.asarray(probe.convert("RGB"), np.int16)
    after = np.asarray(ImageCms.applyTransform(probe, transform), np.int16)
    return None if np.abs(after - before).max() <= SAME_LEVELS else transform


def _probe(mode: str) -> Image.Image:
    """An image of all greys, or of colours on a grid."""
    if mode == "L":
        return Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    levels = np.linspace(0, 255, GRID_STEPS).round().astype(np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels), axis=-1)
    return Image.fromarray(grid.reshape(GRID_STEPS, -1, 3))


def coded_profile(data: bytes, file_format: str) -> bytes | None:
    """A profile of the colour space that a header names by a code: cICP of PNG, colr of AVIF and HEIC.

    Returns: None if it names none, or sRGB.
    Raises: RecordRejected: unsupported_mode; high dynamic range, or another space.
    """
    codes = set(_png_codes(data) if file_format == "PNG" else _box_codes(data))
    if len(codes) != 1:  # none; or several, of images that are not shown
        return None
    primaries, transfer = codes.pop()
    if transfer in HDR_TRANSFERS:
        raise _rejected_space(f"high dynamic range ({HDR_TRANSFERS[transfer]}), which sRGB cannot show")
    if UNSPECIFIED in (primaries, transfer) or (primaries == SRGB_PRIMARIES and transfer in SDR_TRANSFERS):
        return None
    if primaries not in PRIMARIES or transfer not in SDR_TRANSFERS:
        raise _rejected_space(f"primaries of code {primaries} with the transfer function {transfer} (ITU-T H.273)")
    return matrix_profile(PRIMARIES[primaries])


def _rejected_space(space: str) -> RecordRejected:
    """The reject of an image in a colour space that is not converted."""
    detail = f'{space}; images.color = "as_stored" stores it as it is'
    return RecordRejected("decode", "unsupported_mode", detail)


def _png_codes(data: bytes) -> Iterator[tuple[int, int]]:
    """Primaries and transfer function of the chunk cICP, which precedes the pixels."""
    at = 8
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind in (b"IDAT", b"IEND"):
            return
        if kind == b"cICP" and length == 4:
            yield data[at + 8], data[at + 9]
        at += 12 + length


def _box_codes(data: bytes) -> Iterator[tuple[int, int]]:
    """Primaries and transfer function of the boxes colr with codes."""
    at = data.find(b"colrnclx")
    while at >= 0 and at + 12 <= len(data):
        yield struct.unpack_from(">HH", data, at + 8)
        at = data.find(b"colrnclx", at + 8)


@lru_cache(len(PRIMARIES))
def matrix_profile(primaries: tuple[float, ...]) -> bytes:
    """An ICC profile (version 4) of an RGB space with sRGB's curve and a white of D65.

    Args:
      primaries: x and y of red, green and blue.
    Source: ICC.1:2010, sections 7 to 10; Lindbloom, RGB/XYZ matrices and chromatic adaptation.
    """
    columns = np.array([_xyz(*primaries[i : i + 2]) for i in (0, 2, 4)]).T
    white = _xyz(*D65)
    to_xyz = columns * np.linalg.solve(columns, white)
    cone_gain = (BRADFORD @ D50) / (BRADFORD @ white)
    to_d50 = np.linalg.inv(BRADFORD) @ np.diag(cone_gain) @ BRADFORD
    adapted = to_d50 @ to_xyz
    curve = b"para" + struct.pack(">IHH", 0, 3, 0) + b"".join(map(_fixed, SRGB_CURVE))
    text = b"mluc" + struct.pack(">IIIHHII", 0, 1, 12, 0x656E, 0x5553, 6, 28) + "RGB".encode("utf-16-be")
    adaptation = b"sf32" + bytes(4) + b"".join(map(_fixed, to_d50.ravel()))
    tags = {b"desc": text, b"cprt": text, b"wtpt": _xyz_tag(D50), b"chad": adaptation}
    for channel, name in enumerate((b"r", b"g", b"b")):
        tags[name + b"XYZ"] = _xyz_tag(adapted[:, channel])
        tags[name + b"TRC"] = curve
    table = struct.pack(">I", len(tags))
    body = b""
    start = 128 + 4 + 12 * len(tags)
    for name, content in tags.items():
        table += name + struct.pack(">II", start + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    head = struct.pack(">I4sI4s4s4s", start + len(body), b"\0\0\0\0", 0x04300000, b"mntr", b"RGB ", b"XYZ ")
    head += struct.pack(">6H", 2020, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + b"".join(map(_fixed, D50))
    return head.ljust(128, b"\0") + table + body


def _xyz(x: float, y: float) -> np.ndarray:
    return np.array([x / y, 1.0, (1 - x - y) / y])


def _xyz_tag(values: np.ndarray) -> bytes:
    return b"XYZ " + bytes(4) + b"".join(map(_fixed, values))


def _fixed(value: float) -> bytes:
    """A number with 16 bits behind the point."""
    return struct.pack(">i", round(float(value) * 65536))
