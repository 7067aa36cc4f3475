"""Dispersive loss: the tokens of different images of a global batch are driven apart.

The loss is of all pairs of a global batch. Where a rank has all of its images in one forward, it is computed there.
Otherwise a forward without gradients gives the tokens of all images, from which each rank computes the gradient of the
loss with respect to the tokens of its own ones, and each microbatch carries its part through the model (Gao et al.
2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", arXiv 2101.06983, section 3).

Source: Wang and He 2025, "Diffuse and Disperse", arXiv 2506.09027, equation 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ...effects import Condition
from ...errors import RecipeError
from ...recipe import Count
from ..data_recipe import Objective
from .technique import Technique, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.conditioning import Extras, Microbatch, ModelOutput
    from ..run.state import Run

BLOCK = "objective.dispersive_block"
VALUE = "dispersion"  # names of targets
GRADIENT = "dispersion_gradient"


class Keys(Objective):
    """Keys of [objective]."""

    dispersive_weight: Weight = 0.0
    """DiT: weight of the loss that pushes the tokens of different images apart (dispersive loss: 0.5)."""
    dispersive_block: Count = 0
    """The block whose output is dispersed, from 1; 0: after a quarter of the depth."""
    dispersive_temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the dispersive loss; the published code has none, which equals 1."""


class Dispersive(Technique):
    """Dispersion of a block's tokens."""

    key = "objective.dispersive_weight"
    compares_images = True
    conditions = tuple(
        Condition(
            f"objective.{key}",
            lambda _, objective: objective.dispersive_weight > 0,
            "objective.dispersive_weight above 0",
            is_refused=False,
        )
        for key in ("dispersive_block", "dispersive_temperature")
    )

    def __init__(self, recipe: Any) -> None:
        self.keys: Keys = recipe.objective
        self.model: str = recipe.model.name
        self.is_on = self.keys.dispersive_weight > 0

    def blocks(self, depth: int) -> dict[str, int]:
        return {BLOCK: self.keys.dispersive_block or max(1, depth // 4)}

    def check_model(self, name: str, depth: int, others: Sequence[Technique]) -> None:
        super().check_model(name, depth, others)
        block = self.blocks(depth)[BLOCK]
        first, last = max(one.routed(depth) for one in others)
        if first <= block <= last:
            raise RecipeError(
                f"{BLOCK} {block}: its tokens are at different positions in each image, since some skip "
                f"the blocks {first} to {last} (routing). Expected a block before or after them."
            )

    def asks(self, extras: Extras, images: Microbatch, step: int) -> Extras:
        from ..models.dit import size_of

        return extras._replace(watched=self.blocks(size_of(self.model)[0])[BLOCK])

    def teach(
        self, run: Run, images: Microbatch, parts: Sequence[slice], step: int, *, global_size: int
    ) -> dict[str, Tensor]:
        """The loss of the global batch, (B,), and its gradient with respect to the tokens of each image, (B, T, E)."""
        if run.ranks.world_size == 1 and len(parts) == 1:
            return {}
        import torch

        from ..models.conditioning import select_part
        from .other_images import all_rows

        with torch.no_grad():
            tokens_of_parts = [self._tokens(run, select_part(images, part), step) for part in parts]
            tokens = torch.cat(tokens_of_parts)[: len(images)]
        all_tokens, rows = all_rows(run, tokens, global_size)
        tokens.requires_grad_()
        all_tokens = torch.cat([all_tokens[: rows.start], tokens, all_tokens[rows.stop :]])
        loss = dispersion(all_tokens, self.keys.dispersive_temperature)[0]  # the same for each image
        (gradient,) = torch.autograd.grad(loss, tokens)
        return {VALUE: loss.detach().expand(len(tokens)), GRADIENT: global_size * gradient}

    def _tokens(self, run: Run, images: Microbatch, step: int) -> Tensor:
        """Tokens (B, T, E) float32 of the watched block, as the forward of the loss computes them."""
        extras = run.inputs(images)
        for technique in run.techniques:
            extras = technique.asks(extras, images, step)
        watched = run.predict(images, extras).watched
        assert watched is not None
        return watched.float()

    def terms(self, images: Microbatch, extras: Extras, output: ModelOutput, step: int) -> dict[str, Tensor]:
        assert output.watched is not None
        if GRADIENT not in images.targets:
            dispersed = dispersion(output.watched, self.keys.dispersive_temperature)
        else:  # the mean over the global batch has the value and the gradient of its loss
            carried = (output.watched.float() * images.targets[GRADIENT]).flatten(1).sum(1)
            dispersed = images.targets[VALUE] + carried - carried.detach()
        return {"dispersive": self.keys.dispersive_weight * dispersed}


def dispersion(tokens: Tensor, temperature: float) -> Tensor:
    """Logarithm of the mean similarity of all pairs of images, each with itself too: exp(-distance / temperature).

    The squared distance is divided by the number of entries, and temperature 1 is the published code, which has none.

    Args:
      tokens: (B, T, E) output of a block.
    Returns: (B,), the same value for each image.
    """
    flat = tokens.float().flatten(1)
    flat = flat - flat.mean(0)  # no distance changes, but what all images share no longer rounds them away
    squares = flat.square().sum(1)
    distance = (squares[:, None] + squares[None] - 2 * flat @ flat.T).clamp_min(0) / flat.shape[1]
    similarity = (-distance / temperature).exp().mean()
    return similarity.log().expand(len(flat))
