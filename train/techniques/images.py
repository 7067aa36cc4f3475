"""The images that a step computes losses of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only

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
        one: Microbatch = tree_map_only(
            Tensor, lambda tensor: tensor.new_ones((1, *(max(1, size) for size in tensor.shape[1:]))), self
        )
        return replace(one, conditioning=one.conditioning._replace(mean_tokens=None))


register_dataclass(Microbatch)
