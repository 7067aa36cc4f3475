"""Bucket tables and the assignment of a picture to a bucket. Pure functions; sizes are height x width in pixels."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .errors import RecipeError

# PixArt-Sigma's and Sana's published table for 1024 px (ASPECT_RATIO_1024): ratio height/width, height, width.
# The tables for 256, 512 and 2048 px are exactly 1/4, 1/2 and 2 times it.
PIXART_1024 = (
    (0.25, 512, 2048), (0.26, 512, 1984), (0.27, 512, 1920), (0.28, 512, 1856), (0.32, 576, 1792),
    (0.33, 576, 1728), (0.35, 576, 1664), (0.4, 640, 1600), (0.42, 640, 1536), (0.48, 704, 1472),
    (0.5, 704, 1408), (0.52, 704, 1344), (0.57, 768, 1344), (0.6, 768, 1280), (0.68, 832, 1216),
    (0.72, 832, 1152), (0.78, 896, 1152), (0.82, 896, 1088), (0.88, 960, 1088), (0.94, 960, 1024),
    (1.0, 1024, 1024), (1.07, 1024, 960), (1.13, 1088, 960), (1.21, 1088, 896), (1.29, 1152, 896),
    (1.38, 1152, 832), (1.46, 1216, 832), (1.67, 1280, 768), (1.75, 1344, 768), (2.0, 1408, 704),
    (2.09, 1472, 704), (2.4, 1536, 640), (2.5, 1600, 640), (2.89, 1664, 576), (3.0, 1728, 576),
    (3.11, 1792, 576), (3.62, 1856, 512), (3.75, 1920, 512), (3.88, 1984, 512), (4.0, 2048, 512),
)  # fmt: skip
PIXART_RESOLUTIONS_PX = (256, 512, 1024, 2048)
MAX_RATIO = 4.5  # PixArt-Sigma drops pictures that are longer than this, either way

Table = tuple[tuple[float, int, int], ...]


def bucket_name(height_px: int, width_px: int) -> str:
    """Name a bucket: height first, in pixels."""
    return f"{height_px}x{width_px}"


def bucket_size(name: str) -> tuple[int, int]:
    """Height and width in pixels of a named bucket.

    Raises: RecipeError: the name is not HxW.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", name)
    if not match:
        raise RecipeError(f"bucket '{name}': needed HEIGHTxWIDTH in pixels, as in '512x768'.")
    return int(match[1]), int(match[2])


def bucket_table(buckets: str | Sequence[str], resolution_px: int) -> Table:
    """Rows (ratio, height_px, width_px) of a bucket table.

    Args:
      buckets: "square", "pixart", or bucket names of the user's own.
      resolution_px: side of the square, or of the square of equal area.
    Raises: RecipeError: there is no published table for this resolution, or a name is not HxW.
    """
    if buckets == "square":
        return ((1.0, resolution_px, resolution_px),)
    if buckets == "pixart":
        if resolution_px not in PIXART_RESOLUTIONS_PX:
            raise RecipeError(
                f"images.buckets 'pixart' with images.resolution {resolution_px}: "
                f"the published tables are for {', '.join(map(str, PIXART_RESOLUTIONS_PX))} px."
            )
        return tuple((r, h * resolution_px // 1024, w * resolution_px // 1024) for r, h, w in PIXART_1024)
    if isinstance(buckets, str):
        raise RecipeError(f"images.buckets '{buckets}': needed 'square', 'pixart' or a list such as ['512x768'].")
    sizes = sorted({bucket_size(name) for name in buckets}, key=lambda size: (size[0] / size[1], size))
    return tuple((height / width, height, width) for height, width in sizes)


def assign_bucket(height_px: int, width_px: int, table: Table) -> tuple[int, int] | None:
    """Choose the bucket whose ratio is nearest, linearly, as PixArt does.

    A table of one row takes every picture (that is DiT's centre crop).

    Returns: (height_px, width_px) of the bucket, or None where the ratio is beyond MAX_RATIO either way.
    """
    if len(table) == 1:
        return table[0][1:]
    ratio = height_px / width_px
    if not 1 / MAX_RATIO <= ratio <= MAX_RATIO:
        return None
    _, bucket_height, bucket_width = min(table, key=lambda row: abs(row[0] - ratio))
    return bucket_height, bucket_width


def cover_size(height_px: int, width_px: int, bucket: tuple[int, int]) -> tuple[int, int]:
    """Size that covers a bucket and keeps the ratio, as PixArt's trainer computes it: one side fits exactly.

    Returns: (height_px, width_px), in integers so that the longer side is never a pixel short.
    """
    bucket_height, bucket_width = bucket
    if bucket_height * width_px > bucket_width * height_px:
        return bucket_height, width_px * bucket_height // height_px
    return height_px * bucket_width // width_px, bucket_width


def adm_sizes(height_px: int, width_px: int, side_px: int) -> list[tuple[int, int]]:
    """Sizes through which ADM's crop takes a picture: halvings while the short side is twice too long, then one fit.

    Returns: (height_px, width_px) after each resize; all but the last are box-filtered halvings.
    Source: Dhariwal and Nichol 2021, the published data loader; DiT, SiT and MAR use the same.
    """
    sizes = []
    while min(height_px, width_px) >= 2 * side_px:
        height_px, width_px = height_px // 2, width_px // 2
        sizes.append((height_px, width_px))
    scale = side_px / min(height_px, width_px)
    return [*sizes, (round(height_px * scale), round(width_px * scale))]
