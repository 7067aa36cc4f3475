"""Names and crops of buckets. Pure functions; sizes are height x width in pixels."""

from __future__ import annotations

import re

from ...errors import RecipeError


def bucket_name(height_px: int, width_px: int) -> str:
    """Name a bucket: height first, in pixels."""
    return f"{height_px}x{width_px}"


def bucket_size(name: str) -> tuple[int, int]:
    """Height and width in pixels of a named bucket.

    Raises: RecipeError: the name is not HxW.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", name)
    if not match:
        raise RecipeError(f"bucket '{name}': expected HEIGHTxWIDTH in pixels, such as '512x768'.")
    return int(match[1]), int(match[2])


def cover_size(height_px: int, width_px: int, bucket: tuple[int, int]) -> tuple[int, int]:
    """Smallest size that covers a bucket and keeps the ratio, as PixArt's trainer computes it: one side fits exactly.

    Returns: (height_px, width_px); integer arithmetic, so the longer side is never a pixel short.
    """
    bucket_height, bucket_width = bucket
    if bucket_height * width_px > bucket_width * height_px:
        return bucket_height, width_px * bucket_height // height_px
    return height_px * bucket_width // width_px, bucket_width


def adm_sizes(height_px: int, width_px: int, side_px: int) -> list[tuple[int, int]]:
    """Sizes of the resizes in ADM's crop: halvings while the short side is at least twice too long, then one fit.

    Returns: (height_px, width_px) after each resize; all but the last are box-filtered halvings.
    Source: Dhariwal and Nichol 2021, the published data loader; DiT, SiT and MAR use the same.
    """
    sizes = []
    while min(height_px, width_px) >= 2 * side_px:
        height_px, width_px = height_px // 2, width_px // 2
        sizes.append((height_px, width_px))
    scale = side_px / min(height_px, width_px)
    return [*sizes, (round(height_px * scale), round(width_px * scale))]


def centre_crop(
    height_px: int, width_px: int, bucket: tuple[int, int], crop: str
) -> tuple[list[tuple[int, int]], int, int]:
    """Sizes through which an image is resized, and the crop's top and left in the last of them, all in pixels.

    Args:
      crop: "adm" or "bucket".
    """
    if crop == "adm":
        sizes = adm_sizes(height_px, width_px, bucket[0])
        return sizes, (sizes[-1][0] - bucket[0]) // 2, (sizes[-1][1] - bucket[1]) // 2
    height, width = cover_size(height_px, width_px, bucket)
    # round() halves to even, as torchvision's CenterCrop, which PixArt's trainer uses.
    return [(height, width)], round((height - bucket[0]) / 2), round((width - bucket[1]) / 2)
