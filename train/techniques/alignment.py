"""What REPA and SRA share: a block's tokens, through a projector, are aligned with a target until a last step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...recipe import Count, Positive, Section
from .technique import Technique, is_active

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.conditioning import Extras, Microbatch, ModelOutput
    from ..models.spec import ProjectorSpec


class AlignmentKeys(Section):
    """Keys of an alignment; each technique adds ``block`` and ``weight``."""

    stop_step: Count = 0
    """Last step with alignment (HASTE); 0: all."""
    projector_width: Positive = 2048
    """Hidden width of a projector of three linear maps with SiLU between."""


class Alignment(Technique):
    """Base of techniques that align."""

    sections: Mapping[str, Any]
    """``AlignmentKeys`` by the name of their projector, which is that of their target too."""

    def projector(self, name: str, feature_width: int, *, has_class: bool = False) -> ProjectorSpec:
        """The projector to a target of so many channels."""
        from ..models.spec import ProjectorSpec

        section, shape = self.sections[name], {"feature_width": feature_width, "has_class": has_class}
        kind: Any = getattr(section, "projector", "mlp")
        return ProjectorSpec(block=section.block, width=section.projector_width, kind=kind, **shape)

    def asks(self, extras: Extras, images: Microbatch, step: int) -> Extras:
        """Project all tokens; after the last step one, so that ranks reduce the same gradients at every step."""
        aligns = any(is_active(section.stop_step, step) for section in self.sections.values())
        return extras._replace(projected=None if aligns or extras.projected is None else 1)

    def loss(
        self,
        name: str,
        images: Microbatch,
        extras: Extras,
        output: ModelOutput,
        step: int,
        class_token: Tensor | None = None,
    ) -> Tensor:
        """(B,) weighted misalignment of what a projector gives; zero after the last step.

        Image tokens that skip the projector's block are left out.

        Args:
          class_token: (B, D), to align it too.
        """
        import torch

        section, projected = self.sections[name], output.projected[name]
        if not is_active(section.stop_step, step):
            return 0 * projected.float().flatten(1).sum(1)  # a gradient of zero
        target, has_class = images.targets[name], output.class_velocity is not None
        if extras.kept is not None and projected.shape[1] - has_class < target.shape[1]:
            target = target.gather(1, extras.kept[:, :, None].expand(-1, -1, target.shape[2]))
        if class_token is not None:
            target = torch.cat([class_token[:, None], target], dim=1)
        return section.weight * misalignment(projected[:, projected.shape[1] - target.shape[1] :], target)


def misalignment(projected: Tensor, target: Tensor) -> Tensor:
    """1 - cosine between projected tokens and target tokens, the mean over the tokens.

    Args:
      projected, target: (B, T, D).
    Returns: (B,).
    Source: Yu et al. 2024 (REPA), equation 8.
    """
    from torch.nn import functional as F

    return (1 - F.cosine_similarity(projected.float(), target.float(), dim=2)).mean(1)
