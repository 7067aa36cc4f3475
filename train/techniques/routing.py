"""Routing: some tokens of each image skip the middle blocks of a DiT in training (TREAD, SPRINT).

The model does the routing (``models/dit.py``); here is which tokens and which blocks.
Source: Krause et al. 2025 (TREAD), arXiv 2501.04765; Park et al. 2025 (SPRINT), arXiv 2510.21986.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ...effects import Condition
from ...errors import RecipeError
from ...recipe import Count, Positive, Section, Share
from .technique import Draw, Technique, is_active

if TYPE_CHECKING:
    from ..models.conditioning import Extras, Microbatch
    from ..models.spec import ModelSpec


class RoutingSection(Section):
    """Some tokens skip the middle blocks of a DiT in training; each image has its own random ones."""

    kind: Literal["none", "tread", "sprint"] = "none"
    """"tread": skipped tokens return unchanged. "sprint": the outputs of both paths are fused, with a mask token for
    skipped tokens; a fused model keeps this layer when it samples."""
    share: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the tokens that skip; the number is the same for all images, so compiled shapes stay the same."""
    first_block: Positive = 3
    """The first block that these tokens skip, from 1."""
    last_block: Count = 0
    """The last block that they skip; 0: three blocks follow it for "tread", as published, two for "sprint"."""
    stop_step: Count = 0
    """Last step with routing, before steps with all tokens; 0: all."""
    path_drop: Share = 0.0
    """For "sprint": share of the images that skip the middle blocks entirely (published: 0.05). The unconditional
    branch of guidance then skips them too (path-drop guidance), which strengthens guidance."""


class Keys(Section):
    """Keys of a recipe."""

    routing: RoutingSection = RoutingSection()
    """Its section."""


class Routing(Technique):
    """Tokens that skip blocks."""

    key = "routing"
    conditions = (
        *(
            Condition(
                f"routing.{key}",
                lambda _, section: section.kind != "none",
                'routing.kind "tread" or "sprint"',
                switches=("routing.kind",),
            )
            for key in ("share", "first_block", "last_block", "stop_step")
        ),
        Condition(
            "routing.path_drop",
            lambda _, section: section.kind == "sprint",
            'routing.kind = "sprint"',
            switches=("routing.kind",),
        ),
    )

    def __init__(self, recipe: Any) -> None:
        self.section: RoutingSection = recipe.routing
        self.is_on, self.fuses = self.section.kind != "none", self.section.kind == "sprint"
        self.drops_path = self.fuses and self.section.path_drop > 0

    def contradictions(self, recipe: Any) -> Iterator[str]:
        if self.section.path_drop and not self.fuses:
            yield 'routing: path_drop needs kind = "sprint", whose mask token stands for the blocks'
        if self.is_on and self.section.first_block == 1 and recipe.model.value_residual:
            yield "routing: first_block 1 has only the values of kept tokens; model.value_residual needs at least 2"

    def routed(self, depth: int) -> tuple[int, int]:
        section = self.section
        behind = 3 if section.kind == "tread" else 2  # TREAD's configuration of DiT-B: blocks 3 to 9 of 12
        first, last = section.first_block, section.last_block or max(0, depth - behind)
        if not first <= last <= depth:
            raise RecipeError(
                f"routing.first_block {first}, routing.last_block {last}: the model has {depth} blocks. Expected 1 <= "
                "first <= last <= the number of blocks."
            )
        return first, last

    def draws(self, spec: ModelSpec, num_tokens: int, step: int) -> dict[str, Draw]:
        draws = dict[str, Draw]()
        if self.drops_path:
            draws["path"] = ("uniform", ())
        if is_active(self.section.stop_step, step):
            draws["token_order"] = ("uniform", (num_tokens,))
        return draws

    def asks(self, extras: Extras, images: Microbatch, step: int) -> Extras:
        """Keep the tokens with the smallest draws, in their order."""
        if self.drops_path:
            extras = extras._replace(without_path=images.draws["path"] < self.section.path_drop)
        if not is_active(self.section.stop_step, step):
            return extras
        order = images.draws["token_order"]
        count = order.shape[1] - int(order.shape[1] * self.section.share)  # rounded as in TREAD's code
        return extras._replace(kept=order.argsort(1)[:, :count].sort(1).values)
