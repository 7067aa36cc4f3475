"""A tiny random CLIP of two towers as a folder, as the hub has them; and its score by transformers alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from tiny_text_models import SIZES, save_clip
from torch.nn.functional import interpolate
from transformers import AutoTokenizer, CLIPConfig, CLIPModel

CLIP_TEXTS = ["a red circle", "a cat"]
SIDE_PX = 32


class TinyClip:
    """A CLIP in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model = CLIPModel.from_pretrained(folder).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def score(self, pixels: np.ndarray, caption: str) -> float:
        """100 * max(cosine, 0) of a square picture (height, width, 3) uint8 and its caption, without padding."""
        batch = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float()
        batch = interpolate(batch, (SIDE_PX, SIDE_PX), mode="bicubic", antialias=True).clamp(0, 255) / 127.5 - 1
        with torch.no_grad():
            output = self._model(pixel_values=batch, **self._tokenizer([caption], return_tensors="pt"))
        return 100 * max(0.0, float((output.image_embeds * output.text_embeds).sum()))


def make_clip(folder: Path) -> TinyClip:
    """A random CLIP for pictures of 32 px."""
    save_clip(folder / "parts", projected=True)
    for path in (folder / "parts/tokenizer").iterdir():
        shutil.copy(path, folder / path.name)
    text = json.loads((folder / "parts/text_encoder/config.json").read_text())
    vision = {key: value for key, value in SIZES.items() if key != "initializer_range"}
    vision |= {"image_size": SIDE_PX, "patch_size": 16, "initializer_factor": 4.0, "projection_dim": 24}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)).eval()
    model.save_pretrained(folder)
    said = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "crop_size": SIDE_PX}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    shutil.rmtree(folder / "parts")
    return TinyClip(folder)
