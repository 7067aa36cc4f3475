"""A small vision model for the demo's pictures, in the layout of the hub: a DINOv2 that knows what lies in each patch.

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

from ...datasets.disk.files import write_atomic
from .pictures import COLOURS, SHAPES, Scene, draw_scene, make_scenes, nearest_colours

SIDE_PX, PATCH_PX = 64, 16
WIDTH, DEPTH, HEADS = 64, 4, 4
KINDS = [(colour, shape) for colour in COLOURS for shape in SHAPES]
NORMALISATION = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
BATCH, PEAK_LR = 64, 2e-3


def train_vision(out: Path, *, seed: int, steps: int, num_pictures: int, progress: Callable[[int, int], None]) -> float:
    """Train a model on pictures of its own and save it.

    Returns: share of patches of the last batches of which it knows what covers most.
    """
    pixels, shares, kinds = _examples(num_pictures, seed)
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
        model, of_patch, of_picture = (
            Dinov2Model(config),
            nn.Linear(WIDTH, len(KINDS) + 1),
            nn.Linear(WIDTH, len(KINDS)),
        )
        weights = [*model.parameters(), *of_patch.parameters(), *of_picture.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=PEAK_LR)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=PEAK_LR, total_steps=steps)
        known = []
        for step in range(steps):
            rows = torch.randint(len(pixels), (BATCH,))
            tokens = model(pixels[rows]).last_hidden_state  # (B, 1 + T, D)
            patches, wanted = of_patch(tokens[:, 1:]).flatten(0, 1), shares[rows].flatten(0, 1)
            loss = F.cross_entropy(patches, wanted) + F.cross_entropy(of_picture(tokens[:, 0]), kinds[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            known.append((patches.argmax(1) == wanted.argmax(1)).float().mean().item())
            progress(step + 1, steps)
    out.mkdir(exist_ok=True)
    write_atomic(out / "config.json", config.to_json_string().encode())
    write_atomic(out / "model.safetensors", safetensors_of(model.state_dict(), {"format": "pt"}))
    preprocessor = NORMALISATION | {"size": {"height": SIDE_PX, "width": SIDE_PX}}
    write_atomic(out / "preprocessor_config.json", json.dumps(preprocessor).encode())
    return float(np.mean(known[-len(known) // 10 :]))


def _examples(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures (N, 3, 64, 64), shares of their patches (N, T, kinds + 1), the background first, and main kinds (N,)."""
    scenes = make_scenes(count, seed=1000 + seed)
    pictures = [np.asarray(draw_scene(scene).resize((SIDE_PX, SIDE_PX))) for scene in scenes]
    pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 127.5 - 1
    shares = torch.stack([_shares(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)])
    return pixels, shares, torch.tensor([KINDS.index((scene.colour, scene.shape)) for scene in scenes])


def _shares(picture: np.ndarray, scene: Scene) -> Tensor:
    """(T, kinds + 1) share of each patch that the scene's objects cover."""
    of_kind, colours = torch.zeros(len(KINDS) + 1, SIDE_PX, SIDE_PX), nearest_colours(picture)
    objects = [(scene.colour, scene.shape), (scene.other_colour, scene.other_shape)]
    for colour, shape in objects if scene.relation else objects[:1]:
        covered = colours == list(COLOURS).index(colour)
        of_kind[1 + KINDS.index((colour, shape))] = torch.from_numpy(covered)
    of_kind[0] = 1 - of_kind.sum(0)
    return F.avg_pool2d(of_kind[None], PATCH_PX)[0].flatten(1).T
