"""The rule that decides whether an image shows what its caption says: it counts pixels, and learns nothing.

The first object of a caption is the larger one, so the main object of an image has the color that covers most pixels.
"""

from __future__ import annotations

import numpy as np
from matplotlib.colors import rgb_to_hsv

from .scenes import COLORS, SHAPES

MIN_CHROMA = 0.25  # below it a pixel is background, which is gray; the palette's own chroma is 0.55 or more
MIN_COLORED = 0.01  # share of the pixels; below it there is no object
# Area over bounding box of drawn images at 64 px: square 0.99 to 1, circle 0.75 to 0.84, triangle 0.56 to 0.67.
SQUARE_FILL = 0.91
CIRCLE_FILL = 0.71


def match_rates(images: list[np.ndarray], captions: list[str]) -> dict[str, float]:
    """Shares of the images whose main object has the color and the shape of the caption: "colour" and "shape".

    Args:
      images: (height, width, 3) uint8 each.
    """
    expected = [main_object_of(caption) for caption in captions]
    matches = [np.equal(read_main_object(image), pair) for image, pair in zip(images, expected, strict=True)]
    color, shape = np.mean(matches, axis=0)
    return {"colour": float(color), "shape": float(shape)}


def main_object_of(caption: str) -> tuple[str, str]:
    """The first color and the first shape in a caption."""
    words = caption.split()
    return next(word for word in words if word in COLORS), next(word for word in words if word in SHAPES)


def read_main_object(image: np.ndarray) -> tuple[str, str]:
    """The color and the shape of an image's main object; two empty names if it has none.

    Args:
      image: (height, width, 3) uint8.
    """
    nearest = nearest_colors(image)
    if (nearest >= 0).mean() < MIN_COLORED:
        return "", ""
    main = int(np.bincount(nearest[nearest >= 0], minlength=len(COLORS)).argmax())
    return list(COLORS)[main], _read_shape(nearest == main)


def nearest_colors(image: np.ndarray) -> np.ndarray:
    """The color of each pixel by its hue: (height, width) positions in ``COLORS``, -1 for the gray background."""
    rgb = image.astype(np.float32) / 255
    hues = rgb_to_hsv(np.array([*COLORS.values()]) / 255)[:, 0]
    distance = np.abs(rgb_to_hsv(rgb)[..., :1] - hues)
    nearest = np.minimum(distance, 1 - distance).argmin(axis=2)
    return np.where(np.ptp(rgb, axis=2) > MIN_CHROMA, nearest, -1)


def _read_shape(mask: np.ndarray) -> str:
    # A row or column belongs to the object when it holds more than a stray pixel or two of it.
    rows, columns = (np.flatnonzero(mask.sum(axis=axis) > 2) for axis in (1, 0))
    if not len(rows) or not len(columns):
        return SHAPES[0]
    fill = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].mean()
    return "square" if fill > SQUARE_FILL else "circle" if fill > CIRCLE_FILL else "triangle"
