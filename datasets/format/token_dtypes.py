"""Converts tokens and latents to the dtype of the store and back, and measures the error. Pure numpy.

numpy and most Zarr readers lack bfloat16, so its bits are stored as uint16. int8 numbers come in groups that share a
scale: GROUP_WIDTH numbers along the width of a token, the last group of a layer may be shorter, and none crosses a
layer. So a channel that is much larger than the others costs the numbers of its group, not those of the whole token.
``batches/latents.py`` converts a batch on its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ON_DISK = {"float16": "float16", "float32": "float32", "bfloat16": "uint16", "int8": "int8"}
INT8_LIMIT = 127  # symmetric: -128 is never used
GROUP_WIDTH = 64  # int8 numbers that share a scale
SCALE_DTYPE = "float16"
SCALE_BYTES = 2
INT8_RANGE = 65504.0 * INT8_LIMIT  # largest magnitude that int8 holds: that of float16 for a scale
BFLOAT16_NAN = 0x7FC0  # bits of the quiet NaN
MIN_TEXT_COSINE = 0.99  # of a token's ordinary numbers, below which a caption is of low quality
LARGEST_SHARE = 100  # the largest of so many numbers of a token is left out of its cosine


class StoredTokens(NamedTuple):
    """Stored tokens.

    Args:
      rows: (..., D) in the dtype on disk.
      scales: (..., layers, groups) float16 for int8 tokens, else None.
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


class TokenQuality(NamedTuple):
    """What it cost to store tokens in a narrower dtype.

    Args:
      min_cosine: the smallest cosine of ``ordinary_cosines``, of all tokens and layers.
      max_error: the largest absolute difference of a number.
    """

    min_cosine: float
    max_error: float


def scale_shape(width: int, num_layers: int = 1) -> tuple[int, int]:
    """Shape of the scales of an int8 token: layers, groups of each layer.

    Args:
      width: D, of the token.
      num_layers: hidden states of equal width that stand beside each other in a token.
    """
    return num_layers, -(-(width // num_layers) // GROUP_WIDTH)


def token_bytes(width: int, dtype: str, num_layers: int = 1) -> int:
    """Bytes of a token on disk, its scales included."""
    num_bytes = width * np.dtype(ON_DISK[dtype]).itemsize
    if dtype == "int8":
        layers, groups = scale_shape(width, num_layers)
        num_bytes += layers * groups * SCALE_BYTES
    return num_bytes


def narrow(tokens: np.ndarray, dtype: str, num_layers: int = 1) -> StoredTokens:
    """Convert tokens to the dtype of the store, rounding to nearest, ties to even.

    Args:
      tokens: (..., D) float32, finite: captions (L, D), image features (N, T, D).
      dtype: a key of ON_DISK.
      num_layers: hidden states that stand beside each other in a token.
    Returns: rows, and for int8 the scales: each group's largest magnitude over 127, rounded up to float16, so that no
      number is clipped. Numbers beyond the range of the dtype, or of the scales, become infinity.
    """
    if dtype == "int8":
        return _narrow_int8(tokens, num_layers)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(tokens, np.float32).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return StoredTokens((rounded >> np.uint32(16)).astype(np.uint16), None)
    with np.errstate(over="ignore"):
        return StoredTokens(tokens.astype(dtype), None)


def _narrow_int8(tokens: np.ndarray, num_layers: int) -> StoredTokens:
    groups = _in_groups(tokens, num_layers)
    exact = np.abs(groups).max(axis=-1) / np.float32(INT8_LIMIT)  # (..., layers, groups)
    with np.errstate(over="ignore", invalid="ignore"):  # ``is_storable`` sees scales that are not finite
        scales = exact.astype(SCALE_DTYPE)
        scales = np.where(scales < exact, np.nextafter(scales, np.array(np.inf, SCALE_DTYPE)), scales)
        divisors = np.where(scales > 0, scales, 1).astype(np.float32)  # a group of zeros stays zero
        rows = np.rint(groups / divisors[..., None]).astype(np.int8)
    return StoredTokens(_without_groups(rows, tokens.shape[-1]), scales)


def _in_groups(rows: np.ndarray, num_layers: int) -> np.ndarray:
    """View (..., D) as (..., layers, groups, group width); a shorter last group of a layer is filled up with zeros."""
    layer_width = rows.shape[-1] // num_layers
    layers = rows.reshape(*rows.shape[:-1], num_layers, layer_width)
    group_width = min(GROUP_WIDTH, layer_width)
    num_missing = -layer_width % group_width
    if num_missing:
        layers = np.pad(layers, [(0, 0)] * (layers.ndim - 1) + [(0, num_missing)])
    return layers.reshape(*layers.shape[:-1], (layer_width + num_missing) // group_width, group_width)


def _without_groups(groups: np.ndarray, width: int) -> np.ndarray:
    """Undo ``_in_groups``: (..., D)."""
    num_layers, num_groups, group_width = groups.shape[-3:]
    layers = groups.reshape(*groups.shape[:-2], num_groups * group_width)[..., : width // num_layers]
    return layers.reshape(*layers.shape[:-2], width)


def widen(stored: StoredTokens, dtype: str) -> np.ndarray:
    """Tokens as numbers again.

    Args:
      dtype: a key of ON_DISK.
    Returns: (..., D): float16 and float32 unchanged, bfloat16 and int8 as float32.
    """
    if dtype == "int8":
        assert stored.scales is not None, "int8 tokens have scales"
        groups = _in_groups(stored.rows, stored.scales.shape[-2])
        return _without_groups(groups * stored.scales.astype(np.float32)[..., None], stored.rows.shape[-1])
    if dtype == "bfloat16":
        return (stored.rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.rows


def latent_row_channels(num_channels: int) -> int:
    """Channels of a row of int8 latents: the numbers, then the bytes of the scales."""
    return num_channels + SCALE_BYTES * scale_shape(num_channels)[1]


def num_latent_channels(row_channels: int) -> int:
    """Channels of latents of which a row of int8 has so many."""
    return row_channels - SCALE_BYTES * -(-row_channels // (GROUP_WIDTH + SCALE_BYTES))


def narrow_latents(latents: np.ndarray) -> np.ndarray:
    """Latents as int8 with a scale for each group of channels of a position.

    Args:
      latents: (B, C, H, W) float32, finite.
    Returns: (B, ``latent_row_channels``, H, W) int8: the numbers, then the bytes of the scales, float16, little-endian.
    """
    stored = _narrow_int8(np.moveaxis(latents, 1, -1), num_layers=1)
    assert stored.scales is not None, "int8 tokens have scales"
    scales = np.ascontiguousarray(stored.scales[..., 0, :], "<f2")
    scale_bytes = scales.view(np.int8)  # (B, H, W, SCALE_BYTES * groups)
    return np.ascontiguousarray(np.moveaxis(np.concatenate([stored.rows, scale_bytes], axis=-1), -1, 1))


def widen_latents(rows: np.ndarray) -> np.ndarray:
    """Latents as numbers again: int8 rows as (..., C, H, W) float32, others unchanged.

    Args:
      rows: (..., channels, H, W) as stored.
    """
    if rows.dtype != np.int8:
        return rows
    num_channels = num_latent_channels(rows.shape[-3])
    positions = np.moveaxis(rows, -3, -1)
    scales = np.ascontiguousarray(positions[..., num_channels:]).view("<f2").astype(SCALE_DTYPE)
    stored = StoredTokens(positions[..., :num_channels], scales[..., None, :])
    return np.moveaxis(widen(stored, "int8"), -1, -3)


def is_storable(stored: StoredTokens, dtype: str) -> bool:
    """Whether all numbers are finite."""
    if dtype == "int8":
        return stored.scales is not None and bool(np.isfinite(stored.scales).all())
    return bool(np.isfinite(widen(stored, dtype)).all())


def measure_quality(tokens: np.ndarray, stored: StoredTokens, dtype: str, num_layers: int = 1) -> TokenQuality:
    """Compare stored tokens with those of the encoder.

    Args:
      tokens: (L, D) float32, from the encoder.
      num_layers: hidden states that stand beside each other in a token.
    Returns: rounded to float32.
    """
    after = widen(stored, dtype).astype(np.float32, copy=False)
    error = np.abs(after - tokens).max()
    cosine = ordinary_cosines(tokens, after, num_layers).min()
    return TokenQuality(float(np.float32(cosine)), float(np.float32(error)))


def ordinary_cosines(before: np.ndarray, after: np.ndarray, num_layers: int = 1) -> np.ndarray:
    """Cosines of the ordinary numbers of tokens: those that are not among the largest 1 % of their layer.

    Of a layer of W numbers, those larger in magnitude than all but the W / 100 largest, rounded up, are left out. They
    dominate a cosine of all numbers, which hides that the others are lost.

    Args:
      before, after: (L, D) float32, from the encoder and as stored.
      num_layers: hidden states that stand beside each other in a token.
    Returns: (L, layers) float64; 1 where both are zero, 0 where one is.
    """
    layer_width = before.shape[-1] // num_layers
    before, after = _same_range(before.reshape(-1, layer_width), after.reshape(-1, layer_width))
    last = layer_width - 1
    num_left_out = min(last, -(-layer_width // LARGEST_SHARE))
    magnitudes = np.abs(before)
    limits = np.partition(magnitudes, last - num_left_out, axis=-1)[:, last - num_left_out]
    is_ordinary = magnitudes <= limits[:, None]
    before = before * is_ordinary
    after = after * is_ordinary
    norm_before = np.sqrt(_squares(before))
    norm_after = np.sqrt(_squares(after))
    # 1 - cosine by the law of cosines: for close vectors, the dot product would only show rounding errors.
    distance = _squares(before - after)
    product = norm_before * norm_after
    from_one = (distance - (norm_before - norm_after) ** 2) / (2 * np.where(product > 0, product, 1))
    cosines = np.where(product > 0, 1 - from_one, np.where(distance == 0, 1.0, 0.0))
    return np.clip(cosines, -1, 1).reshape(-1, num_layers)


def _same_range(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same numbers in float64 where squares of float32 could overflow or underflow."""
    largest = np.abs(before).max(axis=-1)
    if np.all((largest == 0) | ((largest > 1e-12) & (largest < 1e12))):
        return before, after
    return before.astype(np.float64), after.astype(np.float64)


def _squares(vectors: np.ndarray) -> np.ndarray:
    """(n,) sums of squares of (n, W) vectors, float64."""
    return np.einsum("nw,nw->n", vectors, vectors).astype(np.float64)
