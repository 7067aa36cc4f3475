"""Small sources and stores, made by the real code with the small encoders that ship with leandit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.config import load as load_precompute
from leandit.train.config import TrainRecipe
from leandit.train.config import load as load_train

CPU = torch.device("cpu")
SHIPPED = ["vae.model=shipped:vae", "vae.dtype=float32", "vae.batch_size=8"]
LABEL_RECIPE = ["images.resolution=32", *SHIPPED]
CAPTION_RECIPE = ['images.buckets=["48x80", "64x64", "80x48"]', "vae.batch_size=8", "text.batch_size=8"]
TRAIN_RECIPE = [
    "run.steps=6",
    "run.global_batch=8",
    "run.precision=fp32",
    "run.log_every=1",
    "run.checkpoint_every=3",
    "run.ema_decay=0.9",
    "optimizer.lr=1e-3",
]


def picture(seed: int, height_px: int = 40, width_px: int = 56) -> Image.Image:
    """A smooth random picture, RGB."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
    return coarse.resize((width_px, height_px), Image.Resampling.BICUBIC)


def make_class_folder(root: Path, *, classes: int = 3, per_class: int = 5) -> Path:
    """An image folder of PNGs."""
    for c in range(classes):
        folder = root / f"n{c:03d}"
        folder.mkdir(parents=True)
        for i in range(per_class):
            picture(100 * c + i).save(folder / f"{i}.png")
    return root


def make_caption_folder(root: Path, *, count: int = 14) -> Path:
    """Pictures of three aspect ratios with a metadata.jsonl, two captions each, some captions shared."""
    (root / "images").mkdir(parents=True)
    shapes = ("circle", "square", "triangle")
    with open(root / "metadata.jsonl", "w") as lines:
        for i in range(count):
            height_px, width_px = ((64, 64), (60, 100), (100, 60))[i % 3]
            picture(i, height_px, width_px).save(root / f"images/{i}.png")
            captions = [f"a red {shapes[i % 3]}", f"a big blue {shapes[i % 3]} above a tiny green {shapes[i % 2]}"]
            lines.write(json.dumps({"file_name": f"images/{i}.png", "captions": captions}) + "\n")
    return root


def no_progress(stage: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


def label_recipe(*overrides: str) -> PrecomputeRecipe:
    """imagenet-256 at 32 px with the shipped VAE."""
    return load_precompute("imagenet-256", [*LABEL_RECIPE, *overrides])


def caption_recipe(*overrides: str) -> PrecomputeRecipe:
    """The demo's recipe with small batches."""
    return load_precompute("demo", [*CAPTION_RECIPE, *overrides])


def train_recipe(name: str = "dit-s-4", *overrides: str) -> TrainRecipe:
    """A recipe that trains in a second: a DiT with few tokens, or the small PixArt."""
    base = {
        "dit-s-4": ("dit-s-2-256", ["model.name=DiT-S/4", "model.num_classes=0", "run.compile=false"]),
        "pixart-tiny": ("demo", []),
    }[name]
    return load_train(base[0], [*base[1], *TRAIN_RECIPE, *overrides])


def tree_digest(root: Path) -> dict[str, bytes]:
    """All files below a folder, by relative path."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
