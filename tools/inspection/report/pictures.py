"""Pictures of a report, as WebP inside the page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from PIL import Image

SIDE_PX = 192  # of a thumbnail, at most
QUALITIES = (80, 60, 40, 20)  # of WebP: the first that fits
MOST_BYTES = 400_000  # of a picture
STRETCH = (2.0, 98.0)  # percentiles of a latent that become black and white
RGB = 3


@dataclass(frozen=True)
class Thumbnail:
    """A picture of a page.

    Args:
      uri: of its bytes; None: there is no picture, and a grey field takes its place.
      key: of the record; it may hold any text.
      text: its caption or class; likewise.
      is_coarse: few pixels, which are shown as squares.
    """

    uri: Markup | None
    width_px: int
    height_px: int
    key: str = ""
    text: str = ""
    is_coarse: bool = False


def thumbnail(
    pixels: np.ndarray | None, *, key: str = "", text: str = "", side_px: int = SIDE_PX, most_bytes: int = MOST_BYTES
) -> Thumbnail:
    """A picture at its size or smaller.

    Args:
      pixels: (height, width, 3) uint8, or None.
      side_px, most_bytes: as for ``webp_uri``.
    """
    if pixels is None:
        return Thumbnail(None, side_px, side_px, key, text)
    height_px, width_px = pixels.shape[:2]
    uri = webp_uri(pixels, side_px=side_px, most_bytes=most_bytes)
    return Thumbnail(uri, width_px, height_px, key, text, max(height_px, width_px) < side_px // 2)


def webp_uri(pixels: np.ndarray, *, side_px: int = SIDE_PX, most_bytes: int = MOST_BYTES) -> Markup:
    """An image as a ``data:`` URI, which a template prints as it is.

    Args:
      pixels: (height, width, 3) uint8; made smaller if its longest side is longer than ``side_px``.
      most_bytes: of the URI; an image that needs more gets a lower quality, and then fewer pixels.
    """
    image = Image.fromarray(pixels)
    while True:
        image.thumbnail((side_px, side_px), Image.Resampling.LANCZOS)
        for quality in QUALITIES:
            stream = io.BytesIO()
            image.save(stream, "WEBP", quality=quality, method=4)
            uri = Markup(f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode()}")
            if len(uri) <= most_bytes or side_px == 1:
                return uri
        side_px = max(1, max(image.size) * 2 // 3)


def latent_pixels(latent: np.ndarray) -> np.ndarray:
    """The first three channels of a latent as red, green and blue, each stretched over its own range.

    Args:
      latent: (C, H, W).
    Returns: (H, W, 3) uint8.
    """
    channels = np.nan_to_num(latent[:RGB].astype(np.float32))
    channels = np.concatenate([channels, *[channels[-1:]] * (RGB - len(channels))])
    low, high = np.percentile(channels, STRETCH, axis=(1, 2), keepdims=True)
    shares = (channels - low) / np.maximum(high - low, 1e-6)
    return (shares.clip(0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0)
