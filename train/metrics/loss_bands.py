"""Mean loss in equal bands of the time, summed on the device."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_BANDS = 10


def band_sums(share: Tensor, losses: Tensor) -> Tensor:
    """Sums of losses and counts by band; add them over microbatches, steps and ranks.

    Every image is compared with every band, so that shapes and order of the sum are fixed, which atomic additions on a
    GPU are not. No matrix product, because TF32 would round it.

    Args:
      share: (B,) float32 position between data, 0, and noise, 1 (``losses.time_share``).
      losses: (B,).
    Returns: (2, NUM_BANDS) float32 on their device: sums of losses, counts. A loss that is not finite affects
      only its band.
    """
    band = (share.float() * NUM_BANDS).long().clamp(0, NUM_BANDS - 1)
    inside = band[:, None] == torch.arange(NUM_BANDS, device=share.device)  # (B, NUM_BANDS)
    sums = torch.where(inside, losses.detach().float()[:, None], 0.0).sum(0)
    return torch.stack([sums, inside.sum(0).float()])


def band_means(sums: Tensor) -> list[float | None]:
    """Mean loss of each band, None for a band without images; waits for the device."""
    totals, counts = sums.tolist()
    return [total / count if count else None for total, count in zip(totals, counts, strict=True)]
