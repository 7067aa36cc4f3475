"""Open an image by the format of its bytes, and read its size and orientation, before any pixel is decoded."""

from __future__ import annotations

import importlib
import io
import struct
from collections.abc import Callable
from typing import Any

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from ...errors import RecordRejected
from . import tiff
from .signatures import format_of, may_be_avif

MAX_MEGAPIXELS = 256  # of images.max_megapixels, by default
HEIF_LIBRARY = "pillow_heif"
ORIENTATION_TAG = 0x0112
# Pillow's readers by its name of a format. Image.open would hide why a header cannot be read.
READERS: dict[str, Callable[[io.BytesIO], ImageFile.ImageFile]] = {
    "JPEG": JpegImagePlugin.jpeg_factory,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "PPM": PpmImagePlugin.PpmImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
}


def open_image(data: bytes, *, max_megapixels: int = MAX_MEGAPIXELS) -> ImageFile.ImageFile:
    """Open an image of a format that is read; its pixels are not decoded yet.

    Args:
      data: the file's bytes.
      max_megapixels: width x height above which it is rejected.
    Raises: RecordRejected: of another format, damaged, or too large. Whatever Pillow raises of damaged bytes.
    """
    name = format_of(data)
    reader = READERS.get(name) or _heif_reader(data)
    try:
        image = reader(io.BytesIO(data))
    except (SyntaxError, KeyError, OSError) as error:
        if name == "WEBP" and int.from_bytes(data[4:8], "little") + 8 > len(data):
            raise RecordRejected("decode", "truncated", f"its WEBP data end too early ({error})") from error
        if name == "TIFF" and tiff.lacks_directory(data):
            raise RecordRejected("decode", "truncated", f"its TIFF data end too early ({error})") from error
        words = tiff.describe(data) if name == "TIFF" else ""
        if not words or "truncated" in str(error).lower():
            raise
        raise RecordRejected("decode", "unsupported_mode", f"a TIFF of {words}, which Pillow does not read") from error
    width_px, height_px = image.size
    if width_px * height_px > max_megapixels * 1_000_000:
        megapixels = width_px * height_px / 1e6
        raise RecordRejected(
            "decode",
            "too_large",
            f"{width_px}x{height_px} px are {megapixels:,.0f} megapixels, images.max_megapixels = {max_megapixels}",
        )
    if not width_px or not height_px:
        raise RecordRejected("decode", "decode_error", f"{width_px}x{height_px} px: an image without pixels")
    return image


def _heif_reader(data: bytes) -> Callable[[io.BytesIO], ImageFile.ImageFile]:
    """The reader of HEIC and HEIF, which turns images upright.

    Raises: RecordRejected: its library is not installed.
    """
    try:
        return importlib.import_module(HEIF_LIBRARY).HeifImageFile
    except ModuleNotFoundError as error:
        if may_be_avif(data):  # Pillow reads it
            return AvifImagePlugin.AvifImageFile
        detail = "HEIC or HEIF, which pillow-heif reads: pip install 'leandit[heif]'"
        raise RecordRejected("decode", "not_an_image", detail) from error


def orientation_of(image: Image.Image, data: bytes) -> int:
    """The EXIF orientation that is still to be applied: 1 to 8, or another number of a broken one."""
    if image.format in ("TIFF", "HEIF"):
        return 1  # their readers apply it
    # EXIF may follow the pixels of a PNG, and Pillow would decode them all to look: only if there is some.
    named = {"exif", "Raw profile type exif", "XML:com.adobe.xmp"} & image.info.keys()
    if image.format == "PNG" and not named and b"eXIf" not in data and b"Raw profile type exif" not in data:
        return 1
    try:
        return int(image.getexif().get(ORIENTATION_TAG, 1))
    except (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error):
        return 1  # broken EXIF is common in the wild; the pixels are still good


def tags_of(image: Any) -> Any:
    """The tags of a TIFF; nothing for other formats."""
    return image.tag_v2 if image.format == "TIFF" else {}
