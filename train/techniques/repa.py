"""REPA: the tokens of a block are aligned with an image feature of the store. With HASTE's last step and REG's token.

Shapes: B images, T image tokens, D width of the feature.
Source: Yu et al. 2024, "Representation Alignment for Generation", arXiv 2410.06940, section 3. stop_step: Wang et al.
2025 (HASTE), arXiv 2505.16792. class_weight: Wu et al. 2025 (REG), arXiv 2507.01467, in which the model denoises the
class token of the feature beside the latents. projector, spatial_norm: Singh et al. 2025 (iREPA), arXiv 2512.10794.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ...datasets.format.buckets import bucket_size
from ...datasets.format.schema import FeatureSpec, Name, StoreSpec
from ...effects import Condition
from ...errors import RecipeError
from ...recipe import Positive, Section, Share
from .alignment import Alignment, AlignmentKeys
from .technique import Draw, Technique, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from ...datasets.batches.batch import Batch
    from ..models.conditioning import Extras, Microbatch, ModelOutput
    from ..models.spec import ModelSpec, ProjectorSpec

DEVIATION_EPS = 1e-6  # added to a standard deviation; as published


class AlignSection(AlignmentKeys):
    """Alignment of a block's tokens with an image feature of the store (REPA), of which NAME is the name."""

    block: Positive = 8
    """The block whose output is projected and compared with the feature, from 1."""
    weight: Weight = 0.5
    """Weight of 1 - cosine, averaged over the tokens."""
    class_weight: Weight = 0.0
    """Above 0, the model denoises the feature's class token too (REG: 0.03): weight of the error of its velocity."""
    projector: Literal["mlp", "conv"] = "mlp"
    """"mlp": three linear maps (REPA). "conv": one convolution of 3 x 3 tokens (iREPA)."""
    spatial_norm: Share = 0.0
    """Above 0, subtract this share of the tokens' mean over the image, then divide by their std (iREPA: 0.6)."""


class Keys(Section):
    """Keys of a recipe."""

    align: dict[Name, AlignSection] = Field(default={})
    """A section for each feature, by name."""


class Repa(Alignment):
    """Alignment with image features of the store."""

    key = "align"
    conditions = (
        Condition("align.NAME.projector_width", lambda _, section: section.projector == "mlp", 'projector = "mlp"'),
    )

    def __init__(self, recipe: Any) -> None:
        self.sections = recipe.align
        self.is_on, self.features = bool(self.sections), list(self.sections)
        self.class_feature = next((name for name, one in self.sections.items() if one.class_weight), "")

    def contradictions(self, recipe: Any) -> Iterator[str]:
        if sum(section.class_weight > 0 for section in self.sections.values()) > 1:
            yield "align: two features have a class_weight; the model denoises the class token of one"
        if self.class_feature and recipe.objective.kind == "ddpm":
            yield 'align: class_weight needs objective.kind = "flow"'
        if any(section.projector == "conv" and section.class_weight for section in self.sections.values()):
            yield 'align: a class token has no place in the grid of projector "conv"; use "mlp" with class_weight'

    def blocks(self, depth: int) -> dict[str, int]:
        return {f"align.{name}.block": section.block for name, section in self.sections.items()}

    def check_model(self, name: str, depth: int, others: Sequence[Technique]) -> None:
        """Also raise if a convolution would see a part of the grid."""
        super().check_model(name, depth, others)
        first, last = max((technique.routed(depth) for technique in others), default=(0, 0))
        for feature, section in self.sections.items():
            if section.projector == "conv" and first <= section.block <= last:
                raise RecipeError(
                    f'align.{feature}.projector "conv": some tokens skip block {section.block} (routing), and it needs '
                    f'the whole grid. Use a block before {first} or after {last}, or "mlp".'
                )

    def lacks(self, store: StoreSpec) -> Iterator[str]:
        from torch import nn

        outputs = {one.name: one.spec.output for one in store.features}
        for name, section in self.sections.items():
            if hasattr(nn.ModuleDict, name):
                yield f"align.{name}: a model has an attribute of this name: precompute the feature under another"
            if name not in outputs:
                yield (
                    f"align.{name}: no image feature '{name}' (available: {', '.join(outputs) or 'none'}): "
                    f"precompute again with a recipe that has a table [features.{name}]"
                )
                continue
            needed = {"patches", "cls"} if section.class_weight else {"patches"}
            if needed - ({"patches", "cls"} if outputs[name] == "both" else {outputs[name]}):
                yield (
                    f"align.{name}: it has only its {outputs[name]}, expected {' and '.join(sorted(needed))}: "
                    f'precompute with features.{name}.output = "both", under another name'
                )

    def projectors(self, store: StoreSpec, width: int) -> dict[str, ProjectorSpec]:
        widths = {one.name: one.spec.width for one in store.features}
        return {
            name: self.projector(name, widths[name], has_class=section.class_weight > 0)
            for name, section in self.sections.items()
        }

    def draws(self, spec: ModelSpec, num_tokens: int, step: int) -> dict[str, Draw]:
        return {"class_noise": ("normal", (spec.class_width,))} if self.class_feature else {}

    def read(
        self, batch: Batch, grid: tuple[int, int], features: Mapping[str, FeatureSpec], *, trains: bool
    ) -> dict[str, Tensor]:
        targets = {}
        if self.class_feature:
            cls = batch.features[self.class_feature].cls
            assert cls is not None
            targets["class_token"] = cls
        for name in self.sections if trains else ():
            patches = batch.features[name].patches
            assert patches is not None
            target = resampled(patches, features[name].grid(*bucket_size(batch.bucket)), grid)
            share = self.sections[name].spatial_norm
            targets[name] = spatially_normalized(target, share) if share else target
        return targets

    def inputs(self, extras: Extras, images: Microbatch) -> Extras:
        """The noisy class token, at the times of the images."""
        if not self.class_feature:
            return extras
        from ..objectives.losses import on_path

        token = images.targets["class_token"].float()
        return extras._replace(class_token=on_path(token, images.draws["class_noise"], images.times))

    def terms(self, images: Microbatch, extras: Extras, output: ModelOutput, step: int) -> dict[str, Tensor]:
        from ..objectives.losses import velocity_error

        losses = {}
        for name, section in self.sections.items():
            cls = images.targets["class_token"].float() if section.class_weight else None
            losses[f"align.{name}"] = self.loss(name, images, extras, output, step, cls)
            if cls is not None:
                assert output.class_velocity is not None
                error = velocity_error(output.class_velocity, images.draws["class_noise"] - cls)
                losses[f"class.{name}"] = section.class_weight * error
        return losses


def spatially_normalized(tokens: Tensor, share: float) -> Tensor:
    """Tokens (B, T, D) less a share of their mean over the image, over their standard deviation there.

    Source: Singh et al. 2025 (iREPA), section 4.
    """
    tokens = tokens.float()
    return (tokens - share * tokens.mean(1, keepdim=True)) / (tokens.std(1, keepdim=True) + DEVIATION_EPS)


def resampled(feature: Tensor, grid: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """Tokens (B, T, D) of a grid of patches as those of another grid, bilinear; unchanged if they are the same."""
    if grid == wanted:
        return feature
    from torch.nn import functional as F

    image = feature.float().mT.unflatten(2, grid)
    return F.interpolate(image, wanted, mode="bilinear", antialias=True).flatten(2).mT
