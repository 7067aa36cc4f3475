"""The grey of a mask at the size of the latents: the exact mean over the area of each of their places.

All sums are integers, so the result is the same on every machine.
"""

from __future__ import annotations

import numpy as np


def area_means(
    grey: np.ndarray, resized: tuple[int, int], corner: tuple[int, int], shape: tuple[int, int], step_px: int
) -> np.ndarray:
    """Mean grey of the places of a grid, where a pixel that lies in two places counts with its area in each.

    Args:
      grey: (height_px, width_px) uint8.
      resized: height and width in pixels to which the picture would be resized.
      corner: top and left of the grid in that size.
      shape: (H, W) places of the grid.
      step_px: side of a place in that size.
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
    resized picture as many as ``values`` has pixels.
    """
    length = len(values)
    # 32 bits hold the sum of 16 million bytes, and half the memory of 64.
    ends = np.zeros((length + 1, *values.shape[1:]), np.uint32 if values.dtype == np.uint8 else np.int64)
    np.cumsum(values, axis=0, out=ends[1:])
    whole, rest = np.divmod((first + step * np.arange(count + 1, dtype=np.int64)) * length, resized)
    part = rest.reshape(-1, *[1] * (values.ndim - 1)) * values[np.minimum(whole, length - 1)]
    return np.diff(resized * ends[whole].astype(np.int64) + part, axis=0)
