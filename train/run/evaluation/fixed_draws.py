"""Losses that can be compared over the steps of a run: at eight fixed times, with noise fixed for each record."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ....datasets.batches.batch import Batch
from ....datasets.batches.latents import keyed_noise
from ....datasets.order.shuffle import mix
from ...data_recipe import Objective
from ...objectives.losses import PLAIN, TRAIN_STEPS, objective_losses
from ...techniques.images import Microbatch
from ..state import Run

NUM_TIMES = 8
SHARES = tuple((number + 0.5) / NUM_TIMES for number in range(NUM_TIMES))  # of the way from data to noise


def fixed_times(section: Objective, device: torch.device) -> Tensor:
    """The eight times, (8,) float32 as of ``draw_times``."""
    if section.kind == "ddpm":
        return torch.tensor([float(int(share * TRAIN_STEPS)) for share in SHARES], device=device)
    return torch.tensor(SHARES, device=device)


def posterior_keys(hashes: np.ndarray) -> np.ndarray:
    """Keys of the posterior draws of records, (B,) int64 of their (B,) uint64 hashes."""
    return mix(hashes).view(np.int64)


def noise_keys(hashes: np.ndarray) -> np.ndarray:
    """Keys of the noise at each time, (B, 8) int64 of (B,) uint64 hashes."""
    numbers = np.arange(1, NUM_TIMES + 1, dtype=np.uint64)
    return mix(mix(hashes)[:, None] + numbers).view(np.int64)


@torch.no_grad()
def losses_at_fixed_times(run: Run, batch: Batch, noise: Tensor) -> Tensor:
    """Plain loss of each record of a batch at each of the eight times, in one forward with all tokens in all blocks.

    The run does not change. Blocks are not compiled for it: they would be for each of its shapes.

    Args:
      batch: on the run's device.
      noise: (B, 8) int64 keys, there too.
    Returns: (B, 8) float32.
    """
    objective, count, keys, width = run.recipe.objective, len(batch), noise.flatten(), run.spec.class_width
    conditioning = run.conditioner(
        batch.labels, batch.texts, batch.records, store=batch.store, widen=run.autocast_dtype is None
    )
    targets = run.read_targets(batch, run.token_grid(batch.latents), trains=False)
    latents, conditioning, targets = tree_map_only(
        Tensor, lambda tensor: tensor.repeat_interleave(NUM_TIMES, 0), (batch.latents, conditioning, targets)
    )
    images = Microbatch(
        latents,
        noise=keyed_noise(keys, tuple(latents.shape[1:])),
        times=fixed_times(objective, run.device).repeat(count),
        conditioning=conditioning,
        draws={"class_noise": keyed_noise(keys + 1, (width,))} if width else {},
        targets=targets,
    )
    run.engine.model.eval()
    with torch.compiler.set_stance("force_eager"):
        output = run.predict(images, run.inputs(images)).output
    losses = objective_losses(objective, output, images.latents, images.noise, images.times)
    return losses[PLAIN].view(count, NUM_TIMES)
