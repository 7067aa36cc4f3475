"""Contrastive flow matching: away from the velocity of another image of the global batch.

Source: Stoica et al. 2025, "Contrastive Flow Matching", arXiv 2506.05350, equation 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..data_recipe import Objective
from .technique import Technique, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.conditioning import Extras, Microbatch, ModelOutput
    from ..run.state import Run

NEGATIVE = "contrastive"  # name of the target of another image


class Keys(Objective):
    """Keys of [objective]."""

    contrastive_weight: Weight = 0.0
    """For "flow": weight of minus the error to the target of another image (contrastive flow matching: 0.05)."""


class Contrastive(Technique):
    """Contrast between the images of a global batch, in which neighbors are random records."""

    key = "objective.contrastive_weight"
    compares_images, reads_blocks = True, False

    def __init__(self, recipe: Any) -> None:
        self.weight: float = recipe.objective.contrastive_weight
        self.is_on = self.weight > 0

    def contradictions(self, recipe: Any) -> Iterator[str]:
        if recipe.objective.kind == "ddpm":
            yield 'objective.contrastive_weight is a key of kind = "flow"; "ddpm" has no velocity'

    def teach(
        self, run: Run, images: Microbatch, parts: Sequence[slice], step: int, *, global_size: int
    ) -> dict[str, Tensor]:
        """The target of the image before each, (B, C, H, W); before the first image is the last one."""
        from .other_images import previous_rows

        if global_size == 1:  # a short last batch may have no other image
            return {}
        return {NEGATIVE: previous_rows(run, images.noise - images.latents, global_size)}

    def terms(self, images: Microbatch, extras: Extras, output: ModelOutput, step: int) -> dict[str, Tensor]:
        if NEGATIVE not in images.targets:
            return {"contrastive": output.output.new_zeros(len(output.output))}
        return {"contrastive": self.weight * contrast(output.output, images.targets[NEGATIVE])}


def contrast(velocity: Tensor, negative: Tensor) -> Tensor:
    """Minus the squared error to the target of another image.

    Args:
      velocity, negative: (B, C, H, W).
    Returns: (B,).
    """
    return -(velocity - negative).square().flatten(1).mean(1)
