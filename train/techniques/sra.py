"""SRA: a block's tokens are aligned with those of a later block of the averaged model, which sees less noise.

Source: Jiang et al. 2025, "No Other Representation Component Is Needed: Diffusion Transformers Can Provide
Representation Guidance by Themselves", arXiv 2505.02831, section 3.2: the same noise, at an earlier time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ...datasets.format.schema import StoreSpec
from ...effects import Condition
from ...recipe import Positive, Section
from .alignment import Alignment, AlignmentKeys
from .technique import Draw, Weight, is_active

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.conditioning import Extras, Microbatch, ModelOutput
    from ..models.spec import ModelSpec, ProjectorSpec
    from ..run.state import Run

SELF = "self-alignment"  # a name that no image feature can have


class SelfAlignSection(AlignmentKeys):
    """Alignment of a block's tokens with those of a later block of the averaged model at less noise (SRA)."""

    block: Positive = 4
    """The block whose output is projected, from 1."""
    weight: Weight = 0.0
    """Weight of 1 - cosine, averaged over the tokens (SRA: 0.5); 0: none."""
    teacher_block: Positive = 8
    """The block of the averaged model whose output is the target."""
    less_time: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The averaged model's time is lower by a uniform draw from 0 to this, for each image."""


class Keys(Section):
    """Keys of a recipe."""

    self_align: SelfAlignSection = SelfAlignSection()
    """Its section."""


class SelfAlignment(Alignment):
    """Alignment with the averaged model."""

    key = "self_align"
    conditions = tuple(
        Condition(
            f"self_align.{key}",
            lambda _, section: section.weight > 0,
            "self_align.weight above 0",
            switches=("self_align.weight",),
        )
        for key in ("block", "teacher_block", "less_time", "stop_step", "projector_width")
    )

    def __init__(self, recipe: Any) -> None:
        self.section: SelfAlignSection = recipe.self_align
        self.sections, self.is_on = {SELF: self.section}, self.section.weight > 0

    def contradictions(self, recipe: Any) -> Iterator[str]:
        if recipe.objective.kind == "ddpm":
            yield 'self_align needs objective.kind = "flow"'

    def blocks(self, depth: int) -> dict[str, int]:
        return {"self_align.block": self.section.block, "self_align.teacher_block": self.section.teacher_block}

    def projectors(self, store: StoreSpec, width: int) -> dict[str, ProjectorSpec]:
        return {SELF: self.projector(SELF, width)}

    def draws(self, spec: ModelSpec, num_tokens: int, step: int) -> dict[str, Draw]:
        return {"less_time": ("uniform", ())}

    def teach(
        self, run: Run, images: Microbatch, parts: Sequence[slice], step: int, *, global_size: int
    ) -> dict[str, Tensor]:
        """Tokens (B, T, E) of the averaged model, in the microbatches of the step."""
        if not is_active(self.section.stop_step, step):
            return {}
        import torch

        from ..models.conditioning import select_part

        tokens = []
        with torch.no_grad(), run.engine.averaged():
            for rows in parts:
                part = select_part(images, rows)
                times = (part.times - self.section.less_time * part.draws["less_time"]).clamp_min(0)
                earlier = replace(part, times=times)
                output = run.predict(earlier, run.inputs(earlier)._replace(watched=self.section.teacher_block))
                assert output.watched is not None
                tokens.append(output.watched.float())
        return {SELF: torch.cat(tokens)[: len(images)]}

    def terms(self, images: Microbatch, extras: Extras, output: ModelOutput, step: int) -> dict[str, Tensor]:
        return {f"align.{SELF}": self.loss(SELF, images, extras, output, step)}
