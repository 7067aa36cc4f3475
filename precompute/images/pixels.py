"""From the bytes of an image file to the pixels of its bucket: upright, RGB, cropped; or a reason why not.

Every mode that Pillow knows is either converted in a defined way or rejected: transparency is composited on white,
16-bit grey is scaled, CMYK and palettes are converted, the first frame of an animation is used. Color profiles are
not applied, as in the published trainers. Where Pillow would silently give wrong colors, they are corrected here, or
the image is rejected.
"""

from __future__ import annotations

import importlib
import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import xxhash
from PIL import Image, ImageChops, ImageFile, UnidentifiedImageError

from ...datasets.errors import RecordRejected
from ...datasets.format.buckets import adm_sizes, centre_crop, cover_size

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
MAX_PIXELS = 89_478_485  # Pillow's own warning limit: 256 MiB of RGB
ADM_FILTER = "box halvings, then bicubic"
RESAMPLING = {
    ADM_FILTER: Image.Resampling.BICUBIC,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
# What is done to an image before its crop, as the fingerprint of a store has it.
COLOUR = "exif orientation; white under alpha; 16-bit grey scaled; no colour profile"
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")  # ISO/IEC 23008-12
HEIF_LIBRARY = "pillow_heif"

ORIENTATION_TAG = 0x0112
BITS_TAG, PHOTOMETRIC_TAG, SAMPLE_FORMAT_TAG, SUBSAMPLING_TAG = 258, 262, 339, 530  # TIFF 6.0
OPAQUE_MODES = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr")
ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
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
Variant = tuple[float, float, float]
"""A random crop: enlargement of the image, and top and left as shares of the room, from 0 on and below 1."""

PROGRAMMING_ERRORS = (NameError, AttributeError, ImportError, NotImplementedError, AssertionError)


def read_size(data: bytes) -> tuple[int, int]:
    """Height and width in pixels of an image, upright, from its header.

    Raises: RecordRejected: stage "scan"; not an image, or too large.
    """
    with _rejects("scan"), _open(data) as image:
        is_turned = _orientation(image, data) in (5, 6, 7, 8)
        width_px, height_px = image.size
        return (width_px, height_px) if is_turned else (height_px, width_px)


def decode_image(
    data: bytes,
    *,
    bucket: tuple[int, int],
    crop: str,
    resize_filter: str = "bicubic",
    beside: tuple[int, int] | None = None,
    mask_px: int = 0,
    variants: Sequence[Variant] = (),
) -> tuple[np.ndarray, tuple[int, int]]:
    """Decode an image, and resize and crop it to its bucket.

    Args:
      data: the file's bytes.
      bucket: (height_px, width_px).
      crop: "adm" or "bucket".
      resize_filter: of the last resize, one of RESAMPLING.
      beside: of a companion, height and width in pixels of its record's image.
      mask_px: of a mask, side of the squares whose mean grey is returned; 0 for an image.
      variants: further crops.
    Returns: (height_px, width_px, 3) uint8, of a mask (H, W) uint8; with variants all crops, (1 + variants, ...); and
      the height and width in pixels of the image before the resize, as ``read_size`` has them.
    Raises: RecordRejected: stage "decode".
    """
    with _rejects("decode"):
        with _open(data) as opened:
            orientation = _orientation(opened, data)
            _check_layout(opened)
            tile = opened.tile[0] if opened.tile else None  # lost by loading
            opened.load()
            image = _to_rgb(opened, tile)
        if orientation in UPRIGHT:
            image = image.transpose(UPRIGHT[orientation])
        size = image.height, image.width
        crops = [
            crop_mask(image, bucket, crop, mask_px, beside or size, variant)
            if mask_px
            else crop_image(image, bucket, crop, resize_filter, beside, variant)
            for variant in (None, *variants)
        ]
        return np.stack(crops) if variants else crops[0], size


def variant_draws(key: str, count: int, zoom: float) -> list[Variant]:
    """The further crops of a record, ``count`` with the planned one; a function of its key and of each number alone.

    Args:
      zoom: largest enlargement.
    """
    draws = list[Variant]()
    for number in range(1, count):
        bits = xxhash.xxh3_128_intdigest(key.encode("utf-8", "surrogatepass"), seed=number)
        shares = [(bits >> shift & 0xFFFFFFFF) / 2**32 for shift in (0, 32, 64)]
        draws.append((1 + (zoom - 1) * shares[0], shares[1], shares[2]))
    return draws


@contextmanager
def _rejects(stage: str) -> Iterator[None]:
    """Turn what a decoder raises into a reject of the stage; mistakes in the code stay errors."""
    try:
        yield
    except RecordRejected as reject:
        raise RecordRejected(stage, reject.reason, reject.detail) from reject
    except PROGRAMMING_ERRORS:
        raise
    except UnidentifiedImageError as error:
        raise RecordRejected(stage, "not_an_image", "no known image format") from error
    except Exception as error:
        reason = "decode_error"
        if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError)):
            reason = "too_large"
        elif isinstance(error, OSError) and "truncated" in str(error).lower():
            reason = "truncated"
        raise RecordRejected(stage, reason, f"{type(error).__name__}: {error}"[:200]) from error


def crop_geometry(
    height_px: int, width_px: int, bucket: tuple[int, int], crop: str, variant: Variant | None = None
) -> tuple[list[tuple[int, int]], int, int]:
    """Sizes and corner of the planned crop, as ``centre_crop`` returns them, or of a variant.

    Source of variants: the random crop of the published data loader of Dhariwal and Nichol 2021, which resizes the
    image to a random size that is at least the crop's, and crops anywhere.
    """
    if variant is None:
        return centre_crop(height_px, width_px, bucket, crop)
    zoom, *shares = variant
    height, width = (round(zoom * side_px) for side_px in bucket)
    sizes = [cover_size(height_px, width_px, (height, width))]
    if crop == "adm":
        sizes = adm_sizes(height_px, width_px, height)
    top, left = (int(share * (sizes[-1][i] - bucket[i] + 1)) for i, share in enumerate(shares))
    return sizes, top, left


def crop_image(
    image: Image.Image,
    bucket: tuple[int, int],
    crop: str,
    resize_filter: str = "bicubic",
    beside: tuple[int, int] | None = None,
    variant: Variant | None = None,
) -> np.ndarray:
    """Resize and crop an RGB image, at its center or as a variant; (height_px, width_px, 3) uint8.

    Args:
      beside: of a companion, the size of its record's image: it is resized to the same size and cropped at the same
        place.
    Raises: RecordRejected: the image is so long that it would exceed MAX_PIXELS before the crop; or a companion has
      another aspect.
    """
    sizes, top, left = crop_geometry(image.height, image.width, bucket, crop, variant)
    if beside:
        check_aspect((image.height, image.width), beside)
        (*_, last), top, left = crop_geometry(*beside, bucket, crop, variant)
        sizes = [*sizes[:-1], last]
    if problem := resize_problem(image.height, image.width, sizes[-1]):
        raise RecordRejected("decode", "aspect", problem)
    for height, width in sizes[:-1]:
        image = image.resize((width, height), resample=Image.Resampling.BOX)
    height, width = sizes[-1]
    image = image.resize((width, height), resample=RESAMPLING[resize_filter])
    return np.asarray(image)[top : top + bucket[0], left : left + bucket[1]]


def resize_problem(height_px: int, width_px: int, resized: tuple[int, int]) -> str:
    """Why an image is too long for its bucket; "" if it isn't."""
    if resized[0] * resized[1] <= MAX_PIXELS:
        return ""
    return f"{height_px}x{width_px} px would be resized to {resized[0]}x{resized[1]} px before the crop"


def crop_mask(
    image: Image.Image,
    bucket: tuple[int, int],
    crop: str,
    mask_px: int,
    beside: tuple[int, int],
    variant: Variant | None = None,
) -> np.ndarray:
    """Mean grey of each square of ``mask_px`` in the crop of the record's image; (H, W) uint8.

    Args:
      beside: size of the record's image, in pixels.
    Raises: RecordRejected: the mask has another aspect.
    """
    check_aspect((image.height, image.width), beside)
    (*_, resized), top, left = crop_geometry(*beside, bucket, crop, variant)
    shape = bucket[0] // mask_px, bucket[1] // mask_px
    return area_means(np.asarray(image.convert("L")), resized, (top, left), shape, mask_px)


def check_aspect(size: tuple[int, int], beside: tuple[int, int]) -> None:
    """Raise RecordRejected unless a companion has the aspect of its record's image, within a pixel of rounding."""
    if abs(size[0] * beside[1] - size[1] * beside[0]) > max(beside):
        detail = "{}x{} px, the record's image has {}x{} px; expected the same aspect ratio".format(*size, *beside)
        raise RecordRejected("decode", "wrong_size", detail)


def area_means(
    grey: np.ndarray, resized: tuple[int, int], corner: tuple[int, int], shape: tuple[int, int], step_px: int
) -> np.ndarray:
    """Mean gray of the squares of a grid; a pixel that lies in two squares counts with its area in each.

    All sums are integers, so the result is the same on every machine.

    Args:
      grey: (height_px, width_px) uint8.
      resized: height and width in pixels to which the image would be resized.
      corner: top and left of the grid in that size.
      shape: (H, W) squares of the grid.
      step_px: side of a square in that size.
    Returns: (H, W) uint8, rounded, halves up.
    """
    sums, total = grey, 1
    for axis in range(2):
        moved = np.moveaxis(sums, axis, 0)
        sums = np.moveaxis(_interval_sums(moved, resized[axis], corner[axis], shape[axis], step_px), 0, axis)
        total *= step_px * grey.shape[axis]
    return ((2 * sums + total) // (2 * total)).astype(np.uint8)


def _interval_sums(values: np.ndarray, resized: int, first: int, count: int, step: int) -> np.ndarray:
    """Sums over intervals of the first axis, (count, ...) int64.

    The unit of length is one pixel divided by ``resized``: a pixel is ``resized`` units long, and a pixel of the
    resized image as many as ``values`` has pixels.
    """
    length = len(values)
    # 32 bits hold the sum of 16 million bytes, and half the memory of 64.
    ends = np.zeros((length + 1, *values.shape[1:]), np.uint32 if values.dtype == np.uint8 else np.int64)
    np.cumsum(values, axis=0, out=ends[1:])
    whole, rest = np.divmod((first + step * np.arange(count + 1, dtype=np.int64)) * length, resized)
    part = rest.reshape(-1, *[1] * (values.ndim - 1)) * values[np.minimum(whole, length - 1)]
    return np.diff(resized * ends[whole].astype(np.int64) + part, axis=0)


def _open(data: bytes) -> ImageFile.ImageFile:
    image = Image.open(io.BytesIO(data), formats=(*FORMATS, *_heif_format(data)))
    if image.width * image.height > MAX_PIXELS:
        raise RecordRejected(
            "decode", "too_large", f"{image.width}x{image.height} px, the limit is {MAX_PIXELS} pixels"
        )
    return image


def _heif_format(data: bytes) -> tuple[str, ...]:
    """The format of HEIC and HEIF, if the bytes begin like one; pillow-heif reads it, and turns it upright.

    Raises: RecordRejected: it is not installed.
    """
    if data[4:8] != b"ftyp" or data[8:12] not in HEIF_BRANDS:
        return ()
    try:
        importlib.import_module(HEIF_LIBRARY).register_heif_opener()
    except ModuleNotFoundError as error:
        if b"avif" in data[8:64]:  # one of its brands: Pillow reads it
            return ()
        detail = "HEIC or HEIF, which pillow-heif reads: pip install 'leandit[heif]'"
        raise RecordRejected("decode", "not_an_image", detail) from error
    return ("HEIF",)


def _orientation(image: Image.Image, data: bytes) -> int:
    if image.format in ("TIFF", "HEIF"):
        return 1  # their readers apply it
    # EXIF may follow the pixels of a PNG, and Pillow would decode them all to look: only if there is some.
    known = {"exif", "Raw profile type exif", "XML:com.adobe.xmp"} & image.info.keys()
    if image.format == "PNG" and not known and b"eXIf" not in data and b"Raw profile type exif" not in data:
        return 1
    try:
        return int(image.getexif().get(ORIENTATION_TAG, 1))
    except (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error):
        return 1  # broken EXIF is common in the wild; the pixels are still good


def _check_layout(image: Any) -> None:
    """Reject layouts that Pillow misreads."""
    if image.format != "TIFF":
        return
    if image.mode not in ("I", "F") and any(kind != 1 for kind in image.tag_v2.get(SAMPLE_FORMAT_TAG, (1,))):
        raise RecordRejected("decode", "unsupported_mode", "samples that are not unsigned integers")
    # TIFF 6.0, section 21: 2x2 by default. Pillow reads uncompressed pixels as if it were 1x1.
    if image.mode == "YCbCr" and image.tag_v2.get(SUBSAMPLING_TAG, (2, 2)) != (1, 1):
        raise RecordRejected("decode", "unsupported_mode", "uncompressed YCbCr with subsampled color")


def _to_rgb(image: Image.Image, tile: Any) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _from_grey16(image, np.asarray(image))
    if image.mode == "I":
        values = np.asarray(image)
        if image.format not in ("PNG", "PPM") or values.min() < 0 or values.max() > 65535:
            raise RecordRejected("decode", "unsupported_mode", "32-bit integer pixels")
        return _from_grey16(image, values)
    if image.mode not in OPAQUE_MODES + ALPHA_MODES:
        kind = "floating-point" if image.mode == "F" else image.mode
        raise RecordRejected("decode", "unsupported_mode", f"{kind} pixels")
    if image.mode == "P" and not image.getpalette():
        raise RecordRejected("decode", "decode_error", "a palette image without its palette")
    if image.mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        return ImageChops.invert(image).convert("RGB")  # Pillow assumes Adobe's inverted inks
    if image.format == "PNG" and "transparency" in image.info:
        _scale_transparent_colour(image, tile[3])
    if image.mode in ALPHA_MODES or "transparency" in image.info:
        # Pillow converts La to RGBA only through LA.
        with_alpha = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        white = Image.new("RGBA", with_alpha.size, "white")
        rgb = Image.alpha_composite(white, with_alpha).convert("RGB")
    else:
        rgb = image.convert("RGB")
    if image.format == "GIF" and tile[1] != (0, 0, *image.size):
        # The canvas outside of the first frame is empty; Pillow fills it with the first color of the palette.
        canvas = Image.new("RGB", rgb.size, "white")
        canvas.paste(rgb.crop(tile[1]), tile[1])
        return canvas
    return rgb


def _scale_transparent_colour(image: Image.Image, raw_mode: str) -> None:
    """Scale a PNG's transparent color from the depth of the file to 8 bits, as Pillow does with the pixels."""
    if raw_mode == "RGB;16B":
        raise RecordRejected("decode", "unsupported_mode", "a transparent color in 16-bit RGB")
    if raw_mode in ("L;2", "L;4"):
        depth = int(raw_mode[-1])
        image.info["transparency"] = (image.info["transparency"] & (1 << depth) - 1) * (255 // ((1 << depth) - 1))


def _from_grey16(image: Any, values: np.ndarray) -> Image.Image:
    tags = image.tag_v2 if image.format == "TIFF" else {}
    largest = (1 << tags.get(BITS_TAG, (16,))[0]) - 1  # a TIFF may hold 12 bits a sample
    scaled = np.round(np.minimum(np.arange(1 << 16), largest) / (largest / 255)).astype(np.uint8)
    if tags.get(PHOTOMETRIC_TAG) == 0:  # white is zero
        scaled = 255 - scaled
    grey = scaled[values]  # a look-up table is much faster than arithmetic on every pixel
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return Image.fromarray(grey).convert("RGB")
