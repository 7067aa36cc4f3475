"""From the bytes of a picture file to the pixels of its bucket: upright, RGB, cropped; or a reason why not.

Every mode that Pillow knows is either converted in a defined way or rejected: transparency is composited on white,
16-bit grey is scaled, CMYK and palettes are converted, the first frame of an animation is taken. Colour profiles are
not applied, as in the published trainers.
"""

from __future__ import annotations

import io
import struct

import numpy as np
from PIL import Image, UnidentifiedImageError

from ..datasets.buckets import adm_sizes, cover_size
from ..datasets.errors import RecordRejected

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
MAX_PIXELS = 89_478_485  # Pillow's own warning limit: 256 MiB of RGB
RESIZE_FILTER = "box halvings, then bicubic"
COLOUR = "exif orientation; white under alpha; 16-bit grey scaled; no colour profile"

ORIENTATION_TAG = 0x0112
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
PROGRAMMING_ERRORS = (NameError, AttributeError, ImportError, NotImplementedError, AssertionError)


def read_size(data: bytes) -> tuple[int, int]:
    """Height and width in pixels of the upright picture, from its header.

    Raises: RecordRejected: no picture, or too large.
    """
    try:
        with _open(data) as image:
            width, height = image.size
            return (width, height) if _orientation(image) >= 5 else (height, width)
    except RecordRejected as reject:
        raise RecordRejected("scan", reject.reason, reject.detail) from reject
    except PROGRAMMING_ERRORS:
        raise
    except Exception as error:
        raise _rejected("scan", error) from error


def decode_picture(data: bytes, *, bucket: tuple[int, int], crop: str) -> np.ndarray:
    """Decode a picture and bring it into its bucket.

    Args:
      data: the file's bytes.
      bucket: (height_px, width_px).
      crop: "adm" or "bucket".
    Returns: (height_px, width_px, 3) uint8.
    Raises: RecordRejected.
    """
    try:
        with _open(data) as image:
            orientation = _orientation(image)
            image.load()
            picture = _to_rgb(image)
        if orientation in UPRIGHT:
            picture = picture.transpose(UPRIGHT[orientation])
        return crop_picture(picture, bucket, crop)
    except (RecordRejected, *PROGRAMMING_ERRORS):
        raise
    except Exception as error:
        raise _rejected("decode", error) from error


def crop_geometry(
    height_px: int, width_px: int, bucket: tuple[int, int], crop: str
) -> tuple[list[tuple[int, int]], int, int]:
    """Sizes through which a picture is resized, and the crop's top and left in the last of them, all in pixels."""
    if crop == "adm":
        sizes = adm_sizes(height_px, width_px, bucket[0])
        return sizes, (sizes[-1][0] - bucket[0]) // 2, (sizes[-1][1] - bucket[1]) // 2
    height, width = cover_size(height_px, width_px, bucket)
    # round() halves to even, as torchvision's CenterCrop, which PixArt's trainer uses.
    return [(height, width)], round((height - bucket[0]) / 2), round((width - bucket[1]) / 2)


def crop_picture(picture: Image.Image, bucket: tuple[int, int], crop: str) -> np.ndarray:
    """Resize and centre-crop an RGB picture; (height_px, width_px, 3) uint8."""
    sizes, top, left = crop_geometry(picture.height, picture.width, bucket, crop)
    for height, width in sizes[:-1]:
        picture = picture.resize((width, height), resample=Image.Resampling.BOX)
    height, width = sizes[-1]
    picture = picture.resize((width, height), resample=Image.Resampling.BICUBIC)
    return np.asarray(picture)[top : top + bucket[0], left : left + bucket[1]]


def _open(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise RecordRejected(
            "decode", "too_large", f"{image.width}x{image.height} px, the limit is {MAX_PIXELS} pixels"
        )
    return image


def _orientation(image: Image.Image) -> int:
    if image.format == "TIFF":
        return 1  # Pillow's TIFF reader has turned it already
    if image.format == "PNG" and not {"exif", "Raw profile type exif"} & image.info.keys():
        return 1  # asking further would decode the whole picture
    try:
        return int(image.getexif().get(ORIENTATION_TAG, 1))
    except (OSError, SyntaxError, ValueError, TypeError, KeyError, struct.error):
        return 1  # broken EXIF is common in the wild; the pixels are still good


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _from_grey16(np.asarray(image))
    if image.mode == "I":
        values = np.asarray(image)
        if image.format not in ("PNG", "PPM") or values.min() < 0 or values.max() > 65535:
            raise RecordRejected("decode", "unsupported_mode", "32-bit integer pixels")
        return _from_grey16(values)
    if image.mode == "F":
        raise RecordRejected("decode", "unsupported_mode", "floating-point pixels")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        white = Image.new("RGBA", with_alpha.size, "white")
        return Image.alpha_composite(white, with_alpha).convert("RGB")
    return image.convert("RGB")


def _from_grey16(values: np.ndarray) -> Image.Image:
    return Image.fromarray(np.round(values / 257).astype(np.uint8)).convert("RGB")


def _rejected(stage: str, error: Exception) -> RecordRejected:
    detail = f"{type(error).__name__}: {error}"[:200]
    if isinstance(error, UnidentifiedImageError):
        return RecordRejected(stage, "not_an_image", "no known picture format")
    if isinstance(error, Image.DecompressionBombError):
        return RecordRejected(stage, "too_large", detail)
    if isinstance(error, OSError) and ("truncated" in str(error) or "Truncated" in str(error)):
        return RecordRejected(stage, "truncated", detail)
    return RecordRejected(stage, "decode_error", detail)
