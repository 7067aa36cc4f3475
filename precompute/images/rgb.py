"""The pixels of an opened image as upright RGB: every mode of Pillow is converted in a defined way, or rejected.

Transparency is composited on white, 16-bit gray is scaled, CMYK, palettes and colour profiles are converted, the first
frame of an animation is used. Where Pillow would silently give wrong colours, they are corrected here, or the image is
rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from ...errors import RecordRejected
from . import tiff
from .colour import UnusableProfile, coded_profile, converted_to_srgb
from .opening import orientation_of, tags_of

OPAQUE_MODES = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr")
ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
GREY_MODES = ("1", "L", "LA", "La")
CODED_FORMATS = ("PNG", "AVIF", "HEIF")  # whose header may name a colour space by a code
PROFILE_KEY = "icc_profile"
# EXIF 2.3, section 4.6.4 A: what makes each orientation upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class RgbImage:
    """An upright RGB image.

    Args:
      ignores_profile: its colour profile is broken or of other pixels, so the pixels are as they were stored.
    """

    image: Image.Image
    ignores_profile: bool = False


def read_rgb(opened: ImageFile.ImageFile, data: bytes, *, to_srgb: bool) -> RgbImage:
    """Decode an opened image.

    Args:
      data: the file's bytes.
      to_srgb: apply its colour profile.
    Raises: RecordRejected: a mode or layout that is not read. Whatever Pillow raises of damaged bytes.
    """
    frame = opened.tile[0][1] if opened.tile else None  # lost by loading
    orientation = orientation_of(opened, data)
    profile = _profile_of(opened, data) if to_srgb else None
    is_broken = to_srgb and PROFILE_KEY in opened.info and not opened.info[PROFILE_KEY]
    tags = tags_of(opened)
    if tags and tiff.is_in_planes(tags):
        tiff.check_layout(tags, "")
        image = tiff.read_planes(data, tags, opened.size)
    else:
        if tags:
            tiff.check_layout(tags, opened.mode)
        _load(opened, data, tags)
        image = _with_eight_bits(opened, data, tags)
    rgb, ignores_profile = _composited(image, profile)
    if opened.format == "GIF" and frame not in (None, (0, 0, *image.size)):
        # The canvas outside of the first frame is empty; Pillow fills it with the first color of the palette.
        canvas = Image.new("RGB", rgb.size, "white")
        canvas.paste(rgb.crop(frame), frame)
        rgb = canvas
    if orientation in UPRIGHT:
        rgb = rgb.transpose(UPRIGHT[orientation])
    return RgbImage(rgb, ignores_profile or is_broken)


def _load(opened: ImageFile.ImageFile, data: bytes, tags: Any) -> None:
    """Decode the pixels; of a TIFF, Pillow does not say that they end too early."""
    try:
        opened.load()
    except (OSError, ValueError) as error:
        if not tags:
            raise
        if tiff.ends_early(tags, len(data)):
            raise RecordRejected("decode", "truncated", f"its TIFF data end too early ({error})") from error
        detail = f"its TIFF data of {tiff.describe(data)} are damaged, or of a kind that Pillow does not read ({error})"
        raise RecordRejected("decode", "decode_error", detail) from error


def _profile_of(opened: ImageFile.ImageFile, data: bytes) -> bytes | None:
    """The embedded colour profile, or that of a colour space that the header names."""
    # PNG, third edition, section 4.3: cICP comes before iCCP. In AVIF and HEIC the profile comes first.
    coded = coded_profile(data, opened.format or "") if opened.format in CODED_FORMATS else None
    embedded = opened.info.get(PROFILE_KEY)
    if opened.format == "PNG":
        return coded or embedded
    return embedded or coded


def _with_eight_bits(opened: ImageFile.ImageFile, data: bytes, tags: Any) -> Image.Image:
    """A decoded image in one of OPAQUE_MODES or ALPHA_MODES; as gray if it has more than 8 bits."""
    if opened.mode.startswith("I;16"):
        return _from_grey16(opened, np.asarray(opened), tags)
    if opened.mode == "I":
        values = np.asarray(opened)
        if opened.format not in ("PNG", "PPM") or values.min() < 0 or values.max() > 65535:
            raise RecordRejected("decode", "unsupported_mode", "32-bit integer pixels")
        return _from_grey16(opened, values, tags)
    if opened.mode not in OPAQUE_MODES + ALPHA_MODES:
        kind = "floating-point" if opened.mode == "F" else opened.mode
        raise RecordRejected("decode", "unsupported_mode", f"{kind} pixels")
    if opened.mode == "P" and not opened.getpalette():
        raise RecordRejected("decode", "decode_error", "a palette image without its palette")
    if opened.format == "PNG" and "transparency" in opened.info:
        _scale_transparent_colour(opened, data)
    return opened


def _composited(image: Image.Image, profile: bytes | None) -> tuple[Image.Image, bool]:
    """RGB pixels in sRGB, on white where they are transparent; and whether the profile could not be used."""
    has_alpha = image.mode in ALPHA_MODES or "transparency" in image.info
    rgba = None
    if has_alpha and image.mode == "RGBA":
        rgba = image  # without a copy, for which a large photograph has no memory
    elif has_alpha and image.mode == "La":
        rgba = image.convert("LA").convert("RGBA")  # Pillow converts La only through LA
    elif has_alpha:
        rgba = image.convert("RGBA")
    if profile is None and rgba is None:
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        return rgb, False
    if image.mode == "CMYK":
        colours = image
    elif image.mode in GREY_MODES:
        colours = (rgba or image).convert("L")
    else:
        colours = (rgba or image).convert("RGB")
    ignores_profile = False
    if profile is not None:
        try:
            colours = converted_to_srgb(colours, profile)
        except UnusableProfile:
            ignores_profile = True
    if colours.mode != "RGB":
        colours = colours.convert("RGB")
    if rgba is None:
        return colours, ignores_profile
    canvas = Image.new("RGB", colours.size, "white")
    canvas.paste(colours, mask=rgba.getchannel("A"))
    return canvas, ignores_profile


def _scale_transparent_colour(image: Image.Image, data: bytes) -> None:
    """Scale a PNG's transparent color from the depth of the file to 8 bits, as Pillow does with the pixels."""
    depth, colour_type = data[24], data[25]  # of the header, PNG 1.2, section 11.2.2
    if colour_type == 2 and depth == 16:
        raise RecordRejected("decode", "unsupported_mode", "a transparent color in 16-bit RGB")
    if colour_type == 0 and depth in (2, 4):
        largest = (1 << depth) - 1
        image.info["transparency"] = (image.info["transparency"] & largest) * (255 // largest)


def _from_grey16(image: Image.Image, values: np.ndarray, tags: Any) -> Image.Image:
    """Gray of up to 16 bits, scaled to 8; white where it has the transparent colour."""
    largest = (1 << (tiff.bits_of(tags) if tags else 16)) - 1  # a TIFF may hold 12 bits a sample
    scaled = np.round(np.minimum(np.arange(1 << 16), largest) / (largest / 255)).astype(np.uint8)
    if tags and tiff.white_is_zero(tags):
        scaled = 255 - scaled
    grey = scaled[values]  # a look-up table is much faster than arithmetic on every pixel
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return Image.fromarray(grey)
