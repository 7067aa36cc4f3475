"""Contrastive flow matching: away from the velocity of another image of the microbatch.

Source: Stoica et al. 2025, "Contrastive Flow Matching", arXiv 2506.05350, equation 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..data_recipe import Objective
from .technique import Technique, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.conditioning import Extras, Microbatch, ModelOutput


class Keys(Objective):
    """Keys of [objective]."""

    contrastive_weight: Weight = 0.0
    """For "flow": weight of minus the error to the target of another image (contrastive flow matching: 0.05)."""


class Contrastive(Technique):
    """Contrast between the images of a microbatch."""

    key = "objective.contrastive_weight"
    compares_images, reads_blocks = True, False

    def __init__(self, recipe: Any) -> None:
        self.weight: float = recipe.objective.contrastive_weight
        self.is_on = self.weight > 0

    def contradictions(self, recipe: Any) -> Iterator[str]:
        if recipe.objective.kind == "ddpm":
            yield 'objective.contrastive_weight is a key of kind = "flow"; "ddpm" has no velocity'

    def terms(self, images: Microbatch, extras: Extras, output: ModelOutput, step: int) -> dict[str, Tensor]:
        return {"contrastive": self.weight * contrast(output.output, images.noise - images.latents)}


def contrast(velocity: Tensor, target: Tensor) -> Tensor:
    """Minus the squared error to the target of the next image of the microbatch; zero for an image alone.

    Args:
      velocity, target: (B, C, H, W).
    Returns: (B,).
    """
    if len(velocity) == 1:
        return velocity.new_zeros(1)
    return -(velocity - target.roll(1, 0)).square().flatten(1).mean(1)
