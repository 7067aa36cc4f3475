"""Numbers of a record as pictures: channels of a latent, tokens of a vision model."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

STRETCH = (2.0, 98.0)  # percentiles of a plane that become black and white
RGB = 3
SMALLEST_PX = 128  # shorter sides are enlarged by a whole number, in squares
QUALITY, EFFORT = 88, 2  # of WebP


def webp(pixels: np.ndarray) -> bytes:
    """A picture as WebP; small ones are enlarged, so that each number is a square.

    Args:
      pixels: (height, width, 3) uint8.
    """
    image = Image.fromarray(pixels)
    times = -(-SMALLEST_PX // max(image.size))
    if times > 1:
        image = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    stream = io.BytesIO()
    image.save(stream, "WEBP", quality=QUALITY, method=EFFORT, lossless=times > 1)
    return stream.getvalue()


def channel(plane: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 of one channel (H, W): grey, the darkest and lightest 2 % as black and white."""
    return np.repeat(_stretched(plane)[..., None], RGB, axis=2)


def principal_colours(tokens: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """(rows, columns, 3) uint8: the first three principal components of a picture's tokens as red, green and blue.

    Args:
      tokens: (T, D), finite.
      grid: rows and columns of tokens, T in all.
    """
    centred = tokens.astype(np.float64) - tokens.mean(0, dtype=np.float64)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    scores = np.zeros((len(tokens), RGB))
    scores[:, : min(RGB, len(sizes))] = (left * sizes)[:, :RGB]
    scores *= np.where(np.abs(scores.max(0)) < np.abs(scores.min(0)), -1, 1)  # a sign that does not depend on chance
    return np.stack([_stretched(column.reshape(grid)) for column in scores.T], axis=2)


def _stretched(plane: np.ndarray) -> np.ndarray:
    values = plane.astype(np.float32)
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.zeros(values.shape, np.uint8)
    low, high = np.percentile(finite, STRETCH)
    shares = (np.nan_to_num(values, nan=low) - low) / max(high - low, 1e-6)
    return (shares.clip(0, 1) * 255).round().astype(np.uint8)
