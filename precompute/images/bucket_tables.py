"""Bucket tables and the assignment of an image to a bucket. Pure functions; sizes are height x width in pixels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import pairwise

from ...datasets.format.buckets import bucket_size
from ...errors import RecipeError

# PixArt-Sigma's and Sana's published table for 1024 px (ASPECT_RATIO_1024): ratio height/width, height, width.
# The tables for 256, 512, 2048 and 4096 px are exactly 1/4, 1/2, 2 and 4 times it.
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
# ASPECT_RATIO_2880, which is no multiple of the others.
PIXART_2880 = (
    (0.25, 1408, 5760), (0.26, 1408, 5568), (0.27, 1408, 5376), (0.28, 1408, 5184), (0.32, 1600, 4992),
    (0.33, 1600, 4800), (0.34, 1600, 4672), (0.4, 1792, 4480), (0.42, 1792, 4288), (0.47, 1920, 4096),
    (0.49, 1920, 3904), (0.51, 1920, 3776), (0.55, 2112, 3840), (0.59, 2112, 3584), (0.68, 2304, 3392),
    (0.72, 2304, 3200), (0.78, 2496, 3200), (0.83, 2496, 3008), (0.89, 2688, 3008), (0.93, 2688, 2880),
    (1.0, 2880, 2880), (1.07, 2880, 2688), (1.12, 3008, 2688), (1.21, 3008, 2496), (1.28, 3200, 2496),
    (1.39, 3200, 2304), (1.47, 3392, 2304), (1.7, 3584, 2112), (1.82, 3840, 2112), (2.03, 3904, 1920),
    (2.13, 4096, 1920), (2.39, 4288, 1792), (2.5, 4480, 1792), (2.92, 4672, 1600), (3.0, 4800, 1600),
    (3.12, 4992, 1600), (3.68, 5184, 1408), (3.82, 5376, 1408), (3.95, 5568, 1408), (4.0, 5760, 1408),
)  # fmt: skip
PIXART_RESOLUTIONS_PX = (256, 512, 1024, 2048, 2880, 4096)
LANCZOS_RESOLUTIONS_PX = (2048, 2880)  # PixArt's trainer resizes for these tables with Lanczos, else bicubically
MAX_RATIO = 4.5  # PixArt-Sigma drops images that are longer than this, either way
STEP_PX = 64  # of the sides of the published tables for 1024 px
DOWNSCALE = 8  # of most autoencoders: pixels a latent
MAX_BUCKETS = 2048  # published tables have 40; every image is compared with all

Table = tuple[tuple[float, int, int], ...]


def bucket_table(
    buckets: str | Sequence[str], resolution_px: int, *, step_px: int = STEP_PX, max_ratio: float = MAX_RATIO
) -> Table:
    """Rows (ratio, height_px, width_px) of a bucket table, in order of the ratio height / width.

    Args:
      buckets: "square", "pixart", "area", or a list of bucket names.
      resolution_px: side of the square, or of the square of equal area.
      step_px: for "area": every side is a multiple of it.
      max_ratio: for "area": longest side over shortest.
    Raises: RecipeError: no table is published for this resolution, a name is not HxW, or too many buckets.
    """
    table = _table(buckets if isinstance(buckets, str) else tuple(buckets), resolution_px, step_px, max_ratio)
    if len(table) > MAX_BUCKETS:
        advice = "a larger images.step_px" if buckets == "area" else "fewer"
        raise RecipeError(f"images.buckets: {len(table)} buckets. Expected at most {MAX_BUCKETS}: use {advice}.")
    return table


def area_step(resolution_px: int, downscale: int = DOWNSCALE) -> int:
    """Step of "area" where the recipe sets none: at most 64 px and an eighth of the resolution, and a divisor of it.

    Args:
      downscale: of the autoencoder; the step is a multiple of two latents, which a model's patch takes, up to 64 px.
    Returns: in pixels; 64 from 512 px on.
    """
    if resolution_px >= 8 * STEP_PX:
        return STEP_PX
    patch_px = min(STEP_PX, 2 * downscale)
    largest = max(patch_px, resolution_px // 8 // patch_px * patch_px)
    return next((step for step in range(largest, 0, -patch_px) if resolution_px % step == 0), largest)


@functools.cache  # called for every planned image
def _table(buckets: str | tuple[str, ...], resolution_px: int, step_px: int, max_ratio: float) -> Table:
    if buckets == "square":
        return ((1.0, resolution_px, resolution_px),)
    if buckets == "area":
        return _area_table(resolution_px, step_px, max_ratio)
    if buckets == "pixart":
        if resolution_px not in PIXART_RESOLUTIONS_PX:
            raise RecipeError(
                f"images.buckets 'pixart' with images.resolution {resolution_px}: "
                f"the published tables are for {', '.join(map(str, PIXART_RESOLUTIONS_PX))} px; "
                "for other resolutions use images.buckets 'area'."
            )
        if resolution_px == 2880:
            return PIXART_2880
        return tuple((r, h * resolution_px // 1024, w * resolution_px // 1024) for r, h, w in PIXART_1024)
    if isinstance(buckets, str):
        raise RecipeError(
            f"images.buckets '{buckets}': expected 'square', 'pixart', 'area' or a list such as ['512x768']."
        )
    return _by_ratio({bucket_size(name) for name in buckets})


def _area_table(resolution_px: int, step_px: int, max_ratio: float) -> Table:
    """The square, and for each height the widest bucket of at most its area, each with its transpose.

    All sides are multiples of the step, and no bucket exceeds the ratio.
    """
    if resolution_px < step_px:
        raise RecipeError(
            f"images.buckets 'area' with images.resolution {resolution_px}: expected at least images.step_px, "
            f"which is {step_px}. Use a smaller step."
        )
    square = resolution_px // step_px * step_px
    sizes = {(square, square)}
    for height in range(square, int(resolution_px * max_ratio**0.5) + 1, step_px):
        width = resolution_px**2 // height // step_px * step_px
        if width and max(height, width) <= max_ratio * min(height, width):
            sizes |= {(height, width), (width, height)}
    return _by_ratio(sizes)


def _by_ratio(sizes: set[tuple[int, int]]) -> Table:
    ordered = sorted(sizes, key=lambda size: (size[0] / size[1], size))
    return tuple((height / width, height, width) for height, width in ordered)


def resize_filter(buckets: str | Sequence[str], resolution_px: int) -> str:
    """Filter for resizing an image to its bucket, as in PixArt's trainer: "bicubic" or "lanczos"."""
    return "lanczos" if buckets == "pixart" and resolution_px in LANCZOS_RESOLUTIONS_PX else "bicubic"


def assign_bucket(
    height_px: int, width_px: int, table: Table, *, max_ratio: float = MAX_RATIO
) -> tuple[int, int] | None:
    """Choose the bucket with the nearest ratio, by difference, as PixArt does.

    A table of one row takes every image (DiT's centre crop).

    Returns: (height_px, width_px) of the bucket; None if the image exceeds ``max_ratio``.
    """
    if len(table) == 1:
        return table[0][1:]
    ratio = height_px / width_px
    if not 1 / max_ratio <= ratio <= max_ratio:
        return None
    _, bucket_height, bucket_width = min(table, key=lambda row: abs(row[0] - ratio))
    return bucket_height, bucket_width


def largest_crop(table: Table, max_ratio: float) -> tuple[float, float]:
    """The image that loses most to the crop: its ratio is halfway between two buckets, or beyond the last one.

    Args:
      max_ratio: of the images, longest side over shortest; no bucket exceeds it.
    Returns: the share of its area that it loses, and its ratio height / width.
    """
    ratios = [row[0] for row in table]
    between = [(low + high) / 2 for low, high in pairwise(ratios)]
    crops = []
    for ratio in (1 / max_ratio, *between, max_ratio):
        # If two buckets are equally near, either may be chosen.
        nearest = min(abs(ratio - other) for other in ratios)
        candidates = [other for other in ratios if math.isclose(abs(ratio - other), nearest)]
        crops += [(1 - min(ratio / other, other / ratio), ratio) for other in candidates]
    return max(crops)
