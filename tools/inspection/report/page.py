"""The page of a report: one HTML file that loads nothing, whose every text is escaped; and the images in it."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from PIL import Image

from .... import __version__
from ....datasets.disk.strays import write_output
from ....units import readable_size
from ..templating import environment
from .rules import Alert

SIDE_PX = 192  # of a thumbnail, at most
QUALITIES = (80, 60, 40, 20)  # of WebP: the first that fits
MOST_BYTES = 400_000  # of an image
STRETCH = (2.0, 98.0)  # percentiles of a latent that become black and white
RGB = 3


def render_page(
    template: str,
    *,
    title: str,
    sections: Mapping[str, str],
    alerts: Sequence[Alert] = (),
    page_version: str = "",
    **values: Any,
) -> str:
    """Fill in a template.

    Args:
      template: name of a template that extends ``page.html``.
      title: of the page; it may hold any text.
      sections: for the list of contents, in order: the title by the id of its element.
      alerts: shown above everything else.
      page_version: of a page that ``leandit view`` serves, which reloads itself when there is another; "": a file.
      values: what the template prints; it may print nothing else.
    """
    values |= {"title": title, "sections": sections, "alerts": alerts, "page_version": page_version}
    return environment().get_template(template).render(version=__version__, **values)


def write_page(path: Path, html: str, alerts: Sequence[Alert]) -> list[tuple[str, str]]:
    """Write a report; returns rows for the user."""
    content = html.encode()
    write_output(path, content)
    return [("size", readable_size(len(content))), *[("warning", alert.text) for alert in alerts]]


class Thumbnail(NamedTuple):
    """An image of a page.

    Args:
      uri: of its bytes; None: there is no image, and a gray field takes its place.
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
    """An image at its size or smaller; (height, width, 3) uint8, or None."""
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
