"""Made-up pictures with captions, as large to decode and to encode as real ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from ...demo.pictures import COLOURS, SHAPES

CELLS, GRAIN = 16, 6.0  # coarse colours on a side, deviation of the fine noise: about 2 bits a pixel as JPEG
WORDS = [*COLOURS, *SHAPES, "a", "and", "big", "small", "tiny", "above", "below"]  # each one token of the shipped T5
LARGER = 1.25  # than what is encoded, so that it is resized
MIN_TOKENS, MAX_TOKENS = 20, 120  # of a caption; the mean is 60


def draw_pictures(folder: Path, count: int, side_px: int) -> None:
    """Write JPEGs of smooth noise with fine grain, each with a caption of its own, of 20 to 120 words.

    Args:
      folder: empty.
      side_px: that they are encoded at.
    """
    random, rows = np.random.default_rng(0), []
    side = round(LARGER * side_px)
    for number in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (CELLS, CELLS, 3), np.uint8))
        smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), np.float32)
        grain = random.normal(0, GRAIN, (side, side, 1)).astype(np.float32)
        name = f"{number:05d}.jpg"
        Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(folder / name, quality=90)
        length = round(MIN_TOKENS + (MAX_TOKENS - MIN_TOKENS) * random.beta(2, 3))
        caption = " ".join(random.choice(WORDS, length))
        rows.append({"file_name": name, "captions": [caption], "label": number % 1000})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
