"""A captioned folder whose table has columns for companion pictures: a copy, a larger picture, a mask."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from making import make_caption_folder, picture
from PIL import Image

SIZES = ((64, 64), (60, 100), (100, 60))  # of the pictures of make_caption_folder
PICTURES = ("companions.copy.kind=image", "companions.edit.column=source image", "companions.mask.kind=mask")


def grey(seed: int, height_px: int, width_px: int) -> Image.Image:
    """A mask of random greys, so that no two places of it are equal by chance."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height_px, width_px), np.uint8))


def make_companion_folder(root: Path, *, count: int = 8) -> Path:
    """``copy`` has the bytes of the picture, ``source image`` twice its size, ``mask`` 3/4 of it."""
    make_caption_folder(root, count=count)
    for folder in ("copies", "edits", "masks"):
        (root / folder).mkdir()
    rows = read_rows(root)
    for i, row in enumerate(rows):
        height_px, width_px = SIZES[i % 3]
        shutil.copyfile(root / f"images/{i}.png", root / f"copies/{i}.png")
        picture(100 + i, 2 * height_px, 2 * width_px).save(root / f"edits/{i}.png")
        grey(200 + i, height_px * 3 // 4, width_px * 3 // 4).save(root / f"masks/{i}.png")
        row |= {"copy": f"copies/{i}.png", "source image": f"edits/{i}.png", "mask": f"masks/{i}.png"}
    write_rows(root, rows)
    return root


def read_rows(root: Path) -> list[dict[str, Any]]:
    """The rows of the table."""
    return [json.loads(line) for line in (root / "metadata.jsonl").read_text().splitlines()]


def write_rows(root: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the table."""
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
