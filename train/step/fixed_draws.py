"""Losses that can be compared over the steps of a run: at eight fixed times, with noise fixed for each record."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...datasets.batches.batch import Batch
from ...datasets.batches.latents import keyed_noise
from ...datasets.order.shuffle import mix
from ..objective_recipe import ObjectiveSection
from ..objectives.draws import Draws
from ..objectives.losses import TRAIN_STEPS
from .image_losses import Microbatch, Teacher, plain_losses, teachers_of
from .learner import Learner

NUM_TIMES = 8
SHARES = tuple((number + 0.5) / NUM_TIMES for number in range(NUM_TIMES))  # of the way from data to noise


def fixed_times(section: ObjectiveSection, device: torch.device) -> Tensor:
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
def losses_at_fixed_times(learner: Learner, batch: Batch, noise: Tensor) -> Tensor:
    """Loss of each record of a batch at each of the eight times, in one forward; the learner does not change.

    Blocks are not compiled for it: they would be for each of its shapes.

    Args:
      batch: on the learner's device.
      noise: (B, 8) int64 keys, there too.
    Returns: (B, 8) float32.
    """
    count, x = len(batch), batch.latents.repeat_interleave(NUM_TIMES, 0)
    inputs = batch.labels, batch.texts, batch.records
    conditioning = learner.conditioner(*inputs, store=batch.store, widen=learner.autocast_dtype is None)
    keys, width = noise.flatten(), learner.spec.class_width
    draws = Draws(
        noise=keyed_noise(keys, tuple(x.shape[1:])),
        times=fixed_times(learner.recipe.objective, learner.device).repeat(count),
        dropped=torch.zeros(len(x), dtype=torch.bool, device=learner.device),
        class_noise=keyed_noise(keys + 1, (width,)) if width else None,
    )
    found = teachers_of(learner, batch) if width else {}
    teachers = {
        name: Teacher(None, None if teacher.cls is None else teacher.cls.repeat_interleave(NUM_TIMES, 0))
        for name, teacher in found.items()
    }
    learner.engine.model.eval()
    with torch.compiler.set_stance("force_eager"):
        losses = plain_losses(learner, Microbatch(x, draws, conditioning.repeated(NUM_TIMES), teachers))
    return losses.view(count, NUM_TIMES)
