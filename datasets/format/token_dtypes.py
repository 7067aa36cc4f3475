"""Converts caption tokens to the dtype of the store and back, and measures the error. Pure numpy.

numpy and most Zarr readers lack bfloat16, so its bits are stored as uint16. int8 tokens have a scale each.
``batches/captions.py`` converts the tokens of a batch on its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ON_DISK = {"float16": "float16", "float32": "float32", "bfloat16": "uint16", "int8": "int8"}
INT8_LIMIT = 127  # symmetric: -128 is never used
BFLOAT16_NAN = 0x7FC0  # bits of the quiet NaN
SCALE_CHANNELS = 4  # of a row of int8 latents, the last: the bytes of each position's scale


class StoredTokens(NamedTuple):
    """Stored tokens.

    Args:
      rows: (..., D) in the dtype on disk.
      scales: (...) float32 for int8 tokens, else None.
    """

    rows: np.ndarray
    scales: np.ndarray | None

    @property
    def parts(self) -> list[np.ndarray]:
        """Rows, and scales if there are any, in the order of the arrays."""
        return [self.rows] if self.scales is None else [self.rows, self.scales]

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> StoredTokens:
        """From ``parts``."""
        return cls(parts[0], parts[1] if len(parts) == 2 else None)


def token_bytes(width: int, dtype: str) -> int:
    """Bytes of a token on disk, its scale included."""
    return width * np.dtype(ON_DISK[dtype]).itemsize + (4 if dtype == "int8" else 0)


def narrow(tokens: np.ndarray, dtype: str) -> StoredTokens:
    """Convert tokens to the dtype of the store, rounding to nearest, ties to even.

    Args:
      tokens: (..., D) float32, finite: captions (L, D), image features (N, T, D).
      dtype: a key of ON_DISK.
    Returns: rows, and for int8 the scales: each token's largest magnitude over 127. Numbers beyond the range of float16
      become infinity.
    """
    if dtype == "int8":
        scales = (np.abs(tokens).max(axis=-1) / INT8_LIMIT).astype(np.float32)  # (...)
        divisor = np.where(scales > 0, scales, 1)[..., None]  # a token of zeros stays zero
        # Clipped, because the scale of very small numbers is itself rounded.
        rows = np.clip(np.rint(tokens / divisor), -INT8_LIMIT, INT8_LIMIT)
        return StoredTokens(rows.astype(np.int8), scales)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(tokens, np.float32).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return StoredTokens((rounded >> np.uint32(16)).astype(np.uint16), None)
    with np.errstate(over="ignore"):
        return StoredTokens(tokens.astype(dtype), None)


def widen(stored: StoredTokens, dtype: str) -> np.ndarray:
    """Tokens as numbers again.

    Args:
      dtype: a key of ON_DISK.
    Returns: (..., D): float16 and float32 unchanged, bfloat16 and int8 as float32.
    """
    if dtype == "int8":
        assert stored.scales is not None, "int8 tokens have scales"
        return stored.rows * stored.scales[..., None]
    if dtype == "bfloat16":
        return (stored.rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.rows


def narrow_latents(latents: np.ndarray) -> np.ndarray:
    """Latents as int8 with a scale for each position.

    Args:
      latents: (B, C, H, W) float32, finite.
    Returns: (B, C + SCALE_CHANNELS, H, W) int8; the last channels are the bytes of the scale, float32, little-endian.
    """
    rows, scales = narrow(np.moveaxis(latents, 1, -1), "int8")
    assert scales is not None, "int8 tokens have scales"
    scale_bytes = scales.astype("<f4")[..., None].view(np.int8)  # (B, H, W, SCALE_CHANNELS)
    return np.ascontiguousarray(np.moveaxis(np.concatenate([rows, scale_bytes], axis=-1), -1, 1))


def widen_latents(rows: np.ndarray) -> np.ndarray:
    """Latents as numbers again: int8 rows as (..., C, H, W) float32, others unchanged.

    Args:
      rows: (..., channels, H, W) as stored.
    """
    if rows.dtype != np.int8:
        return rows
    channels_last = np.moveaxis(rows, -3, -1)
    scales = np.ascontiguousarray(channels_last[..., -SCALE_CHANNELS:]).view("<f4").astype(np.float32)
    return np.moveaxis(channels_last[..., :-SCALE_CHANNELS] * scales, -1, -3)


def is_storable(stored: StoredTokens, dtype: str) -> bool:
    """Whether all numbers are finite."""
    if dtype == "int8":
        return stored.scales is not None and bool(np.isfinite(stored.scales).all())
    return bool(np.isfinite(widen(stored, dtype)).all())


def quality(tokens: np.ndarray, stored: StoredTokens, dtype: str) -> tuple[float, float]:
    """Compare stored tokens with those of the encoder.

    Args:
      tokens: (L, D) float32, from the encoder.
    Returns: the smallest cosine between a token and its stored form (1 if both are zero), and the largest absolute
      difference, both rounded to float32.
    """
    after = widen(stored, dtype).astype(np.float32, copy=False)
    largest = np.maximum(tokens.max(axis=1), -tokens.min(axis=1))
    ordinary = bool(
        np.all((largest == 0) | (largest > 1e-12) & (largest < 1e12))
    )  # else squares overflow or underflow float32
    before, after = (one.astype(np.float32 if ordinary else np.float64, copy=False) for one in (tokens, after))
    difference = before - after
    norms = [np.sqrt(np.einsum("ld,ld->l", one, one).astype(np.float64)) for one in (before, after)]  # (L,) each
    distance = np.einsum("ld,ld->l", difference, difference).astype(np.float64)
    # 1 - cosine by the law of cosines: for close vectors, the dot product would only show rounding errors.
    product = norms[0] * norms[1]
    from_one = (distance - (norms[0] - norms[1]) ** 2) / (2 * np.where(product > 0, product, 1))
    cosines = np.where(product > 0, 1 - from_one, np.where(distance == 0, 1.0, 0.0))
    error = max(difference.max(), -difference.min())
    return float(np.float32(np.clip(cosines.min(), -1, 1))), float(np.float32(error))
