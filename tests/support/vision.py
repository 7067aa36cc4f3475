"""A tiny random vision model as a folder, as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Dinov2Config, Dinov2Model


def make_dinov2(folder: Path, *, width: int = 8, deviation: float = 0.02) -> Path:
    """A random DINOv2 of two blocks with patches of 14 px; with larger weights, pictures differ more."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    config = Dinov2Config(**sizes, initializer_range=deviation)
    model = Dinov2Model(config)
    with torch.no_grad():
        model.embeddings.position_embeddings.normal_()
    model.save_pretrained(folder, safe_serialization=True)
    preprocessor = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder
