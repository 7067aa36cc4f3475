"""Forwards of an image encoder: the largest batch that fits, and its outputs in the dtype of the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from ...datasets.errors import ResourceError
from ...datasets.format.schema import LOGVAR_RANGE, LatentSpec
from .vae import ImageEncoder

CPU_BATCH = 32  # on a CPU more rows in a forward are no faster
MAX_BATCH = 256
MAX_BATCH_BYTES = 96 << 20  # of decoded pixels: up to eight batches are in host memory

_Output = TypeVar("_Output")


def largest_batch(encoder: ImageEncoder, height_px: int, width_px: int) -> int:
    """The largest power of two of pictures of one size that fit into one forward, found by doubling.

    CPU_BATCH on a CPU; at most MAX_BATCH and MAX_BATCH_BYTES on any device.

    Raises: ResourceError: not even one fits.
    """
    max_rows = min(MAX_BATCH, max(1, MAX_BATCH_BYTES // (3 * height_px * width_px)))
    if encoder.device.type == "cpu":
        return min(CPU_BATCH, max_rows)
    fits, size = 0, 1
    while (
        size <= max_rows
        and encode_if_it_fits(encoder.encode, np.zeros((size, height_px, width_px, 3), np.uint8)) is not None
    ):
        fits, size = size, 2 * size
    if not fits:
        raise ResourceError(
            f"vae.batch_size 0: one picture of {height_px}x{width_px} px does not fit into the memory of "
            f"{encoder.device}. Use vae.tile_px, a smaller vae.dtype, or another device."
        )
    return fits


def to_stored(moments: np.ndarray, spec: LatentSpec, records: np.ndarray) -> np.ndarray:
    """The stored part of an encoder's output, in the store's dtype.

    Args:
      moments: (B, 2C, H, W) mean and log-variance, or (B, C, H, W) latents; float32.
      records: (B,) positions in the records table: the key of a stored sample.
    Returns: (B, stored_channels, H, W).
    """
    if spec.kind == "mean":
        moments = moments[:, : spec.channels]
    elif spec.kind == "sample":
        moments = sample_once(moments, records)
    with np.errstate(over="ignore"):  # overflow becomes infinity, which is rejected
        return moments.astype(spec.dtype)


def sample_once(moments: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Draw mean + std * noise once, (B, C, H, W) float32; the noise depends on the record alone.

    Args:
      moments: (B, 2C, H, W) float32, mean then log-variance.
      records: (B,) positions in the records table.
    Source: Kingma and Welling 2014, section 2.4 (reparameterization).
    """
    drawn = []
    for row, record in zip(moments, records, strict=True):  # alone, so its bits depend on no other row
        mean, logvar = np.split(row, 2)
        # Philox is counter-based, so any record can be drawn alone.
        generator = np.random.Generator(np.random.Philox(key=[0, 0], counter=[0, 0, 0, int(record)]))
        noise = generator.standard_normal(mean.shape, dtype=np.float32)
        drawn.append(mean + np.exp(0.5 * np.clip(logvar, *LOGVAR_RANGE)) * noise)
    return np.stack(drawn)


def encode_if_it_fits(encode: Callable[[np.ndarray], _Output], pixels: np.ndarray) -> _Output | None:
    """The encoder's output, or None if out of memory."""
    try:
        return encode(pixels)
    except torch.OutOfMemoryError:
        pass  # empty_cache below: the exception still holds the forward's tensors here
    torch.cuda.empty_cache()
    return None
