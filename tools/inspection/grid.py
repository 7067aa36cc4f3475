"""Images in a grid with their captions below."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..terminal.text import printable

CELL_PX = 192
COLUMNS = 6
CAPTION_LINES = 3
FONT_PX, LINE_PX = 13, 17
MARGIN_PX, GAP_PX = 12, 4  # between cells; inside a cell
ORIGINAL, DECODED = "original", "decoded"  # below the two pictures of a cell
MAX_CHARS, DOTS = 1000, "..."  # of a text that is measured; in place of what is cut
FRAME, EMPTY, KEY_COLOUR = (190, 190, 190), (236, 236, 236), (110, 110, 110)


def spread(total: int, count: int) -> np.ndarray:
    """Positions of ``count`` of ``total`` items, or of all, spread evenly from the first to the last."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(int)


@dataclass(frozen=True)
class Cell:
    """A picture of a sheet.

    Args:
      pixels: (height, width, 3) uint8, of any size; None draws a grey field.
      caption: below the picture, cut after ``CAPTION_LINES`` lines.
      key: one line in grey above the caption; a long key loses its middle.
      original: the source picture, for the frame on the left.
    """

    pixels: np.ndarray | None
    caption: str = ""
    key: str = ""
    original: np.ndarray | None = None


def draw_sheet(cells: Sequence[Cell], *, columns: int = COLUMNS, with_originals: bool = False) -> Image.Image:
    """Lay out pictures in a grid, each scaled to its frame, with its key and caption below.

    Args:
      columns: largest number of pictures in a row; half as many with originals.
      with_originals: each cell has two labelled frames, the original on the left.
    """
    font: Any = ImageFont.load_default(FONT_PX)
    frames = 2 if with_originals else 1
    columns = min(max(1, columns // frames), len(cells))
    width = frames * CELL_PX + (frames - 1) * GAP_PX
    texts = [_wrapped(cell.caption, font, width) for cell in cells]
    keys = [_shortened(cell.key, font, width) for cell in cells]
    side_lines, key_lines, text_lines = frames - 1, int(any(keys)), max(map(len, texts))
    height = CELL_PX + GAP_PX + (side_lines + key_lines + text_lines) * LINE_PX
    rows = -(-len(cells) // columns)
    step_x, step_y = width + MARGIN_PX, height + MARGIN_PX
    sheet = Image.new("RGB", (columns * step_x + MARGIN_PX, rows * step_y + MARGIN_PX), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (cell, key, lines) in enumerate(zip(cells, keys, texts, strict=True)):
        left, top = MARGIN_PX + i % columns * step_x, MARGIN_PX + i // columns * step_y
        sides = [(ORIGINAL, cell.original), (DECODED, cell.pixels)] if with_originals else [("", cell.pixels)]
        below = top + CELL_PX + GAP_PX
        for number, (side, pixels) in enumerate(sides):
            x = left + number * (CELL_PX + GAP_PX)
            _paste(sheet, pixels, x, top)
            draw.text((x, below), side, fill=KEY_COLOUR, font=font)
        below += side_lines * LINE_PX
        draw.text((left, below), key, fill=KEY_COLOUR, font=font)
        for number, text in enumerate(lines, key_lines):
            draw.text((left, below + number * LINE_PX), text, fill="black", font=font)
    return sheet


def _paste(sheet: Image.Image, pixels: np.ndarray | None, left: int, top: int) -> None:
    """Draw a framed picture in the middle of its square; a grey square without one."""
    box = (left, top, left + CELL_PX - 1, top + CELL_PX - 1)
    if pixels is None:
        ImageDraw.Draw(sheet).rectangle(box, fill=EMPTY, outline=FRAME)
        return
    picture, room = Image.fromarray(pixels), CELL_PX - 2
    scale = room / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    picture = picture.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
    x, y = left + (CELL_PX - size[0]) // 2, top + (CELL_PX - size[1]) // 2
    ImageDraw.Draw(sheet).rectangle((x - 1, y - 1, x + size[0], y + size[1]), outline=FRAME)
    sheet.paste(picture, (x, y))


def _wrapped(text: str, font: Any, width_px: int) -> list[str]:
    """Lines of at most this width, broken between words where possible; the last one ends in dots if text is cut."""
    rest, lines = printable(" ".join(text[:MAX_CHARS].split())), []
    while rest and len(lines) < CAPTION_LINES:
        end = _num_fitting(rest, font, width_px)
        if end < len(rest) and " " in rest[: end + 1]:
            end = rest.rindex(" ", 0, end + 1)
        lines.append(rest[:end])
        rest = rest[end:].strip()
    if rest:
        lines[-1] = lines[-1][: _num_fitting(lines[-1], font, width_px - font.getlength(DOTS))].rstrip() + DOTS
    return lines


def _shortened(text: str, font: Any, width_px: int) -> str:
    """One line; dots replace its middle if it is too wide, since the ends of a key identify it."""
    text = printable(text[:MAX_CHARS])
    if font.getlength(text) <= width_px:
        return text
    half_px = (width_px - font.getlength(DOTS)) / 2
    return text[: _num_fitting(text, font, half_px)] + DOTS + text[-_num_fitting(text[::-1], font, half_px) :]


def _num_fitting(text: str, font: Any, width_px: float) -> int:
    """Number of characters from the start of a text that fit into a width, at least 1."""
    return max(1, bisect_right(range(1, len(text) + 1), width_px, key=lambda end: font.getlength(text[:end])))
