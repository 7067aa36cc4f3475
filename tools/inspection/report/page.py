"""The page of a report: one HTML file that loads nothing, whose every text is escaped.

Templates extend ``templates/page.html``. What a template prints is escaped and its control characters are made visible;
``value | isolated`` also keeps right-to-left text inside its place. Only ``Markup``, which charts are, is printed as it
is.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape
from PIL import Image

from .... import __version__
from ....datasets.disk.files import write_atomic
from ....datasets.units import readable_size
from ...terminal.text import printable

mib = readable_size  # the filter's name
TEMPLATES = Path(__file__).parent / "templates"
MAX_CHARS = 2000  # of one text, so that a caption of megabytes does not fill the page
SIDE_PX = 192  # of a thumbnail, at most
QUALITIES = (80, 60, 40, 20)  # of WebP: the first that fits
MOST_BYTES = 400_000  # of a picture
STRETCH = (2.0, 98.0)  # percentiles of a latent that become black and white
RGB = 3


@dataclass(frozen=True)
class Alert:
    """Something that a reader must know first.

    Args:
      text: one sentence.
      section: id of the section that shows more; "" for none.
    """

    text: str
    section: str = ""


@dataclass(frozen=True)
class Section:
    """A section of a report, for the list of contents: the id of its element, and its title."""

    id: str
    title: str


def render_page(
    template: str,
    *,
    title: str,
    sections: Sequence[Section],
    alerts: Sequence[Alert] = (),
    page_version: str = "",
    **values: Any,
) -> str:
    """Fill in a template.

    Args:
      template: name of a file in ``templates/`` that extends ``page.html``.
      title: of the page; it may hold any text.
      sections: for the list of contents, in order.
      alerts: shown above everything else.
      page_version: of a page that ``leandit view`` serves, which reloads itself when there is another; "": a file.
      values: what the template prints; it may print nothing else.
    """
    page = environment().get_template(template)
    values |= {"title": title, "sections": sections, "alerts": alerts, "page_version": page_version}
    return page.render(version=__version__, **values)


def write_page(path: Path, html: str) -> int:
    """Write a report; returns its bytes."""
    content = html.encode()
    write_atomic(path, content)
    return len(content)


def environment() -> jinja2.Environment:
    """The templates' environment, with the filters ``isolated``, ``count``, ``mib`` and ``number``."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    found.filters |= {"isolated": isolated, "count": count, "mib": mib, "number": number}
    return found


def visible(value: Any) -> Any:
    """A text with its control characters and bidirectional marks escaped, cut at ``MAX_CHARS``; other values as is."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    shown = printable(value[:MAX_CHARS])
    return shown if len(value) <= MAX_CHARS else f"{shown}… ({count(len(value))} characters)"


def isolated(value: object) -> Markup:
    """A text of a store or run as an element of its own, whose direction leaves its surroundings alone."""
    return Markup(f"<bdi>{escape(visible(str(value)))}</bdi>")


def count(value: int) -> str:
    """A whole number with separators: 1,281,167."""
    return f"{value:,}"


def several(number: int, thing: str) -> str:
    """A count of things: "1 record", "1,281,167 records"."""
    return f"{count(number)} {thing}{'' if number == 1 else 's'}"


def number(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits; a hyphen for None."""
    return "-" if value is None else f"{value:.{digits}g}"


# ----------------------------------------------------------------------------------------------------- images of a page


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
