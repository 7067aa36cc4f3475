"""From the bytes of an image file to the pixels of its bucket: upright, RGB, cropped; or a reason why not."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image

from ...datasets.format.crops import Variant, crop_geometry
from ...datasets.format.crops import variant_draws as variant_draws
from ...errors import RecordRejected
from .opening import HEIF_LIBRARY, MAX_MEGAPIXELS, open_image, orientation_of
from .rgb import read_rgb
from .signatures import format_of

MAX_RESIZED_PIXELS = 89_478_485  # of an image before its crop: 256 MiB of RGB
ADM_FILTER = "box halvings, then bicubic"
RESAMPLING = {
    ADM_FILTER: Image.Resampling.BICUBIC,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
# What is done to an image before its crop, as the fingerprint of a store has it.
COLOUR = "exif orientation; white under alpha; 16-bit grey scaled; inverted inks in every CMYK JPEG"
PROFILES = {"srgb": "colour profiles to sRGB, perceptual", "as_stored": "no colour profile"}
PROFILE_IGNORED = "profile"  # note on an image; it is also part of the column ``fallback`` of a store

NO_SIZE = "not identified by this driver"  # in Pillow's words, also of a width or height of 0
MAX_DETAIL_CHARS = 240
MISTAKES = (TypeError, AttributeError, LookupError, NameError, AssertionError, ImportError, NotImplementedError)
READERS = ("PIL", HEIF_LIBRARY)


def colour_handling(color: str) -> str:
    """What is done to an image before its crop, in the words of a store's fingerprint.

    Args:
      color: ``images.color`` of the recipe, a key of PROFILES.
    """
    return f"{COLOUR}; {PROFILES[color]}"


def max_megapixels_of(recipe: Mapping[str, Any]) -> int:
    """``images.max_megapixels`` of a store's recipe; the default for one that has none, as an imported store."""
    return recipe.get("images", {}).get("max_megapixels", MAX_MEGAPIXELS)


def color_of(handling: str) -> str:
    """``images.color`` of a store with this handling; "as_stored" for one of an older release."""
    return "srgb" if handling.endswith(PROFILES["srgb"]) else "as_stored"


def read_size(data: bytes, *, max_megapixels: int = MAX_MEGAPIXELS) -> tuple[int, int]:
    """Height and width in pixels of an image, upright, from its header.

    Raises: RecordRejected: stage "scan"; not an image, damaged, or too large.
    """
    with _rejects("scan", data), open_image(data, max_megapixels=max_megapixels) as image:
        is_turned = orientation_of(image, data) in (5, 6, 7, 8)
        width_px, height_px = image.size
        return (width_px, height_px) if is_turned else (height_px, width_px)


def decode_image(
    data: bytes,
    *,
    bucket: tuple[int, int],
    crop: str,
    resize_filter: str = "bicubic",
    color: str = "srgb",
    max_megapixels: int = MAX_MEGAPIXELS,
    beside: tuple[int, int] | None = None,
    mask_px: int = 0,
    variants: Sequence[Variant] = (),
    notes: list[str] | None = None,
    on_header: Callable[[int], None] = lambda num_pixels: None,
) -> tuple[np.ndarray, tuple[int, int]]:
    """Decode an image, and resize and crop it to its bucket.

    Args:
      data: the file's bytes.
      bucket: (height_px, width_px).
      crop: "adm" or "bucket".
      resize_filter: of the last resize, one of RESAMPLING.
      color: "srgb" applies colour profiles, "as_stored" does not; a mask is always as stored.
      max_megapixels: of the image; larger ones are rejected.
      beside: of a companion, height and width in pixels of its record's image.
      mask_px: of a mask, side of the squares whose mean grey is returned; 0 for an image.
      variants: further crops.
      notes: PROFILE_IGNORED is appended if the colour profile could not be used.
      on_header: called with the number of pixels before they are decoded.
    Returns: (height_px, width_px, 3) uint8, of a mask (H, W) uint8; with variants all crops, (1 + variants, ...); and
      the height and width in pixels of the image before the resize, as ``read_size`` has them.
    Raises: RecordRejected: stage "decode".
    """
    with _rejects("decode", data):
        with open_image(data, max_megapixels=max_megapixels) as opened:
            on_header(opened.width * opened.height)
            decoded = read_rgb(opened, data, to_srgb=color == "srgb" and not mask_px)
        del opened  # with the pixels as they were decoded: a large image would be in memory twice
        image = decoded.image
        if decoded.ignores_profile and notes is not None:
            notes.append(PROFILE_IGNORED)
        size = image.height, image.width
        crops = []
        for variant in (None, *variants):
            if mask_px:
                crops.append(crop_mask(image, bucket, crop, mask_px, beside or size, variant))
            else:
                crops.append(crop_image(image, bucket, crop, resize_filter, beside, variant))
        pixels = np.stack(crops) if variants else crops[0]
        return pixels, size


@contextmanager
def _rejects(stage: str, data: bytes) -> Iterator[None]:
    """Turn what a decoder raises of some bytes into a reject of the stage; mistakes of this package stay errors."""
    try:
        yield
    except RecordRejected as reject:
        raise RecordRejected(stage, reject.reason, reject.detail) from reject
    except MemoryError as error:
        raise RecordRejected(stage, "too_large", "more memory than a decoder may use") from error
    except Exception as error:
        if isinstance(error, MISTAKES) and not is_raised_by_reader(error):
            raise
        words = str(error)
        if isinstance(error, (OSError, SyntaxError)) and "truncated" in words.lower():
            reason, problem = "truncated", "end too early"
        elif words == NO_SIZE:
            reason, problem = "decode_error", "have no size in their header, or are of a kind that Pillow does not read"
        else:
            reason, problem = "decode_error", "are damaged, or of a kind that Pillow does not read"
        detail = f"its {format_of(data)} data {problem} ({type(error).__name__}: {error})"
        raise RecordRejected(stage, reason, detail[:MAX_DETAIL_CHARS]) from error


def is_raised_by_reader(error: BaseException) -> bool:
    """Whether an exception comes from inside of a library that reads hostile bytes, not from a mistake here."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(module.partition(".")[0] in READERS for module in modules)


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
    Raises: RecordRejected: the image is so long that it would exceed MAX_RESIZED_PIXELS before the crop; or a companion
      has another aspect.
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
    if resized[0] * resized[1] <= MAX_RESIZED_PIXELS:
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
