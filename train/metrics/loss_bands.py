"""Mean loss in equal bands of the time, so that a change of one part of the path shows. Added up on the device."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_BANDS = 10


def band_sums(share: Tensor, losses: Tensor) -> Tensor:
    """Losses and counts of a microbatch, by band; those of several are added, over steps as over ranks.

    Every image meets every band, so that the shapes are fixed and the order of the sum is: atomic additions on a GPU
    come in any order. No matrix product, which TF32 would round.

    Args:
      share: (B,) float32 of the way from data to noise, 0..1 (``objectives.time_share``).
      losses: (B,).
    Returns: (2, NUM_BANDS) float32 on their device: sums of losses, counts. A loss that is not finite spoils its own
      band alone.
    """
    band = (share.float() * NUM_BANDS).long().clamp(0, NUM_BANDS - 1)
    inside = band[:, None] == torch.arange(NUM_BANDS, device=share.device)  # (B, NUM_BANDS)
    sums = torch.where(inside, losses.detach().float()[:, None], 0.0).sum(0)
    return torch.stack([sums, inside.sum(0).float()])


def band_means(sums: Tensor) -> list[float | None]:
    """Mean loss of each band, None where no image was; the one place where the device is waited for."""
    totals, counts = sums.tolist()
    return [total / count if count else None for total, count in zip(totals, counts, strict=True)]
