"""A small vision model for the demo's images, in the layout of the hub: a DINOv2 that knows what lies in each patch.

It learns the share of each patch that every kind of object covers, and what the main object is. Its patches are a
teacher for alignment; with another seed it measures samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as safetensors_of
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Dinov2Config, Dinov2Model

from leandit.datasets.disk.files import write_atomic
from leandit.tools.demo.judge import nearest_colors
from leandit.tools.demo.scenes import COLORS, SHAPES, Scene, draw_scene, make_scenes

SIDE_PX, PATCH_PX = 64, 16
WIDTH, DEPTH, HEADS = 64, 4, 4
KINDS = [(color, shape) for color in COLORS for shape in SHAPES]
NORMALIZATION = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
BATCH, PEAK_LR = 64, 2e-3


def train_vision(out: Path, *, seed: int, steps: int, num_images: int, progress: Callable[[int, int], None]) -> float:
    """Train a model on images of its own and save it.

    Returns: share of patches of the last batches of which it knows what covers most.
    """
    pixels, shares, kinds = _examples(num_images, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Dinov2Config(
            hidden_size=WIDTH,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            image_size=SIDE_PX,
            patch_size=PATCH_PX,
            layerscale_value=0.1,
        )
        model, of_patch, of_image = (
            Dinov2Model(config),
            nn.Linear(WIDTH, len(KINDS) + 1),
            nn.Linear(WIDTH, len(KINDS)),
        )
        weights = [*model.parameters(), *of_patch.parameters(), *of_image.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=PEAK_LR)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=PEAK_LR, total_steps=steps)
        known = []
        for step in range(steps):
            rows = torch.randint(len(pixels), (BATCH,))
            tokens = model(pixels[rows]).last_hidden_state  # (B, 1 + T, D)
            patches, wanted = of_patch(tokens[:, 1:]).flatten(0, 1), shares[rows].flatten(0, 1)
            loss = F.cross_entropy(patches, wanted) + F.cross_entropy(of_image(tokens[:, 0]), kinds[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            known.append((patches.argmax(1) == wanted.argmax(1)).float().mean().item())
            progress(step + 1, steps)
    out.mkdir(exist_ok=True)
    write_atomic(out / "config.json", config.to_json_string().encode())
    write_atomic(out / "model.safetensors", safetensors_of(model.state_dict(), {"format": "pt"}))
    preprocessor = NORMALIZATION | {"size": {"height": SIDE_PX, "width": SIDE_PX}}
    write_atomic(out / "preprocessor_config.json", json.dumps(preprocessor).encode())
    return float(np.mean(known[-len(known) // 10 :]))


def _examples(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images (N, 3, 64, 64), shares of their patches (N, T, kinds + 1), the background first, and main kinds (N,)."""
    scenes = make_scenes(count, seed=1000 + seed)
    images = [np.asarray(draw_scene(scene).resize((SIDE_PX, SIDE_PX))) for scene in scenes]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 127.5 - 1
    shares = torch.stack([_shares(image, scene) for image, scene in zip(images, scenes, strict=True)])
    return pixels, shares, torch.tensor([KINDS.index((scene.color, scene.shape)) for scene in scenes])


def _shares(image: np.ndarray, scene: Scene) -> Tensor:
    """(T, kinds + 1) share of each patch that the scene's objects cover."""
    of_kind, colors = torch.zeros(len(KINDS) + 1, SIDE_PX, SIDE_PX), nearest_colors(image)
    objects = [(scene.color, scene.shape), (scene.other_color, scene.other_shape)]
    for color, shape in objects if scene.relation else objects[:1]:
        covered = colors == list(COLORS).index(color)
        of_kind[1 + KINDS.index((color, shape))] = torch.from_numpy(covered)
    of_kind[0] = 1 - of_kind.sum(0)
    return F.avg_pool2d(of_kind[None], PATCH_PX)[0].flatten(1).T
