"""The images that a step computes losses of, and losses that techniques share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import register_dataclass, tree_map_only

from ..models.conditioning import Conditioning, Extras, ModelOutput


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


def misalignment(projected: Tensor, target: Tensor) -> Tensor:
    """1 - cosine between projected tokens and target tokens, the mean over the tokens.

    Args:
      projected, target: (B, T, D).
    Returns: (B,).
    Source: Yu et al. 2024 (REPA), equation 8.
    """
    return (1 - F.cosine_similarity(projected.float(), target.float(), dim=2)).mean(1)


def alignment(name: str, target: Tensor, extras: Extras, output: ModelOutput, cls: Tensor | None = None) -> Tensor:
    """(B,) misalignment of the tokens that a projector gives; image tokens that skip its block are left out.

    Args:
      name: of the projector.
      target: (B, T, D) for each image token.
      cls: (B, D) for the class token, to align it too.
    """
    projected, has_class = output.projected[name], output.class_velocity is not None
    if extras.kept is not None and projected.shape[1] - has_class < target.shape[1]:
        target = target.gather(1, extras.kept[:, :, None].expand(-1, -1, target.shape[2]))
    if cls is not None:
        target = torch.cat([cls[:, None], target], dim=1)
    return misalignment(projected[:, projected.shape[1] - target.shape[1] :], target)


def no_loss(name: str, output: ModelOutput) -> Tensor:
    """(B,) zeros that give a projector a gradient of zero: ranks reduce the same gradients at every step."""
    return 0 * output.projected[name].float().flatten(1).sum(1)
