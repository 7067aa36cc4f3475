"""The specification of a model, stored with every checkpoint and snapshot."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from .layers import DiTOptions


class ProjectorSpec(BaseModel):
    """A projector of tokens to an image feature.

    Args:
      block: whose output it takes, from 1.
      width: of its hidden layers.
      feature_width: of a token of the feature.
      has_class: the model denoises the feature's class token.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    block: int
    width: int
    feature_width: int
    has_class: bool = False


class AdapterSpec(BaseModel):
    """Low-rank adapters of a model whose other weights are frozen.

    Args:
      rank: of the product that is added to a weight.
      alpha: the product is multiplied by alpha / rank.
      targets: ends of the names of the linear layers that have one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Of the product."""
        return self.alpha / self.rank


class ModelSpec(BaseModel):
    """Everything needed to build a model.

    Args:
      num_classes: of the label table; 0 with captions.
      caption_width: 0 with labels.
      options: of our DiT.
      projectors: by name of the feature.
      fused: blocks around which the outputs of routed and other tokens are fused (SPRINT), from 1.
      config: arguments of diffusers' class, if the model came from a folder or the hub.
      adapter: low-rank adapters, which train alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    channels: int
    out_channels: int
    num_classes: int
    caption_width: int
    base_size: int
    options: DiTOptions = DiTOptions()
    projectors: dict[str, ProjectorSpec] = {}
    fused: tuple[int, int] | None = None
    config: dict[str, Any] = {}
    adapter: AdapterSpec | None = None

    @property
    def plain(self) -> ModelSpec:
        """The model without adapters."""
        return self.model_copy(update={"adapter": None})

    @property
    def class_width(self) -> int:
        """Of the class token that the model denoises beside the latent (REG); 0: it denoises none."""
        return next((one.feature_width for one in self.projectors.values() if one.has_class), 0)

    @property
    def takes_text(self) -> bool:
        """Conditioned on captions, not on labels."""
        return self.caption_width > 0

    @property
    def takes_sizes(self) -> bool:
        """Conditioned on the sizes of the source pictures too (PixArt-alpha at 1024 px)."""
        return bool(self.config.get("use_additional_conditions"))
