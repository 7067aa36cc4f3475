"""The images that a step computes losses of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only

from ...datasets.batches.captions import Captions
from ..models.conditioning import Conditioning


@dataclass(frozen=True)
class Microbatch:
    """Some images of a rank's batch, and all that a forward and its losses need of them.

    Args:
      latents, noise: (B, C, H, W).
      times: (B,) as the objective draws them.
      draws, targets: (B, ...) of the techniques, by name.
    """

    latents: Tensor
    noise: Tensor
    times: Tensor
    conditioning: Conditioning
    draws: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.latents)

    def placeholder(self) -> Microbatch:
        """One image of ones, for a rank without images: collective calls need a forward of every rank."""

        def ones(part: Tensor) -> Tensor:
            return part.new_ones((1, *(max(1, size) for size in part.shape[1:])))

        def one(part: Tensor | Captions) -> Tensor | Captions:
            if isinstance(part, Tensor):
                return ones(part)
            return Captions(ones(part.tokens), (1,), torch.arange(2, dtype=torch.int32, device=part.device))

        return tree_map_only((Tensor, Captions), one, self)


register_dataclass(Microbatch)
