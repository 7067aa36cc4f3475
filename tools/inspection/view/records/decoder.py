"""Decoders of a store's pictures, at their size or as smaller previews."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .....datasets.errors import EncoderError
from .....datasets.format.buckets import bucket_size
from .....datasets.store import LatentStore

PREVIEW_PX, PREVIEW_LATENTS = 128, 16  # sides that a preview has at least, of its picture and of its latent

Decode = Callable[[np.ndarray, int], np.ndarray]
"""From rows as stored, (B, 2C, H, W) or (B, C, H, W), and a divisor of the sides, 1 for none, to pictures
(B, height_px, width_px, 3) uint8."""


def preview_divisor(store: LatentStore, bucket: str) -> int:
    """Sides of a picture of a bucket over those of its preview: a power of two, 1 where it is small already."""
    side_px, divisor = min(bucket_size(bucket)), 1
    smallest_px = max(PREVIEW_PX, PREVIEW_LATENTS * store.spec.latent.downscale)
    while side_px >= 2 * divisor * smallest_px:
        divisor *= 2
    return divisor


def decoder_of(store: LatentStore, vae: str | None, device: Callable[[], Any]) -> Decode:
    """The decoder of a store, or the one that the user names.

    Args:
      vae: hub id or folder of a VAE for the same latents, such as a tiny one; None: the store's own.
      device: returns that of the decoder.
    Raises: EncoderError: it cannot be loaded, or is for other latents.
    """
    try:
        from ...decoder import LatentDecoder
    except ModuleNotFoundError as error:
        raise EncoderError(
            f"{error.name} is not installed. Install it with: pip install 'leandit[precompute]'."
        ) from error

    decoder = LatentDecoder.of_store(store, vae, device())

    def decode(rows: np.ndarray, divisor: int) -> np.ndarray:
        raw = decoder.raw(rows)
        return decoder.decode(raw if decoder.fixed_side_px else shrunk(raw, divisor))

    return decode


def shrunk(latents: np.ndarray, divisor: int) -> np.ndarray:
    """(B, C, H / divisor, W / divisor), the means of squares; rows and columns that fill no square are left out."""
    height, width = (side // divisor for side in latents.shape[2:])
    whole = latents[:, :, : height * divisor, : width * divisor].astype(np.float32)
    return whole.reshape(*latents.shape[:2], height, divisor, width, divisor).mean((3, 5))
