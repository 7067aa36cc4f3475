"""The specification of a model, stored with every checkpoint and snapshot."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

OFF = (None, False, 0, "", "none", [], {})  # values of an option that is not used


class Frozen(BaseModel):
    """A part of the specification.

    A stored specification may come from another release: an option that this release lacks is left out if it is off.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_options_that_are_off(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name in cls.model_fields or value not in OFF}


class DiTOptions(Frozen):
    """Options of our DiT; the defaults are the published model."""

    qk_norm: bool = False
    norm: Literal["layer", "rms"] = "layer"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    positions: Literal["sincos", "rope", "both"] = "sincos"
    time: Literal["steps", "share", "to_data"] = "steps"
    value_residual: bool = False


class ProjectorSpec(Frozen):
    """A projector of tokens to an image feature.

    Args:
      block: whose output it takes, from 1.
      width: of its hidden layers.
      feature_width: of a token of the feature.
      has_class: the model denoises the feature's class token.
      kind: three linear maps (REPA), or a convolution over the grid of tokens (iREPA).
    """

    block: int
    width: int
    feature_width: int
    has_class: bool = False
    kind: Literal["mlp", "conv"] = "mlp"


class AdapterSpec(Frozen):
    """Low-rank adapters of a model whose other weights are frozen.

    Args:
      rank: of the product that is added to a weight.
      alpha: the product is multiplied by alpha / rank.
      targets: ends of the names of the linear layers that have one.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor alpha / rank of the product."""
        return self.alpha / self.rank


class TextInput(Frozen):
    """What a model reads of one text encoder.

    Args:
      name: of the text encoder in the store, empty for that of ``[text]``; in a family's list, its display name.
      tokens: of each caption, padding included; 0: the pooled vector alone is read.
      width: of a token.
      pooled_width: 0: the pooled vector is not read.
      beside: its tokens are joined to those of the input before by their features, not after them.
    """

    name: str
    tokens: int
    width: int
    pooled_width: int = 0
    beside: bool = False


class ModelSpec(Frozen):
    """Everything needed to build a model.

    Args:
      num_classes: of the label table; 0 with captions.
      caption_width: of a token as the model sees it; 0 with labels.
      texts: of a model that reads several text encoders, each at full length; empty: the valid tokens of the store's
        first one.
      options: of our DiT.
      projectors: by name of the feature.
      fused: blocks around which the outputs of routed and other tokens are fused (SPRINT), from 1.
      drops_path: it has learned to do without these blocks, so its null does without them when it draws.
      config: arguments of diffusers' class, if the model came from a folder or the hub.
      adapter: low-rank adapters, which train alone.
      guidance: that a distilled model takes as an input.
      pads_null: a dropped caption keeps its length, and the first rows of the padded null replace its tokens (PixArt,
        Sana); else null's own tokens alone replace it, as the pipelines of Qwen-Image and Z-Image ask for it.
      scheduler: config of the scheduler that the weights came with, with ``_class_name``; empty: they came without one.
      reference: companion of the store whose latents it sees beside the noisy ones; empty: none.
    """

    name: str
    channels: int
    out_channels: int
    num_classes: int
    caption_width: int
    base_size: int
    options: DiTOptions = DiTOptions()
    projectors: dict[str, ProjectorSpec] = {}
    fused: tuple[int, int] | None = None
    drops_path: bool = False
    config: dict[str, Any] = {}
    adapter: AdapterSpec | None = None
    texts: tuple[TextInput, ...] = ()
    guidance: float = 1.0
    pads_null: bool = True
    scheduler: dict[str, Any] = {}
    reference: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.channels, self.base_size, self.caption_width, self.num_classes, self.adapter))

    @property
    def plain(self) -> ModelSpec:
        """The model without adapters."""
        return self.model_copy(update={"adapter": None})

    @property
    def class_width(self) -> int:
        """Width of the class token that the model denoises beside the latent (REG); 0: it denoises none."""
        return next((one.feature_width for one in self.projectors.values() if one.has_class), 0)

    @property
    def takes_text(self) -> bool:
        """Conditioned on captions, not on labels."""
        return self.caption_width > 0

    @property
    def joined_tokens(self) -> int:
        """Caption tokens of an image for a model that reads several text encoders, else 0."""
        return sum(one.tokens for one in self.texts if not one.beside)

    @property
    def pooled_width(self) -> int:
        """Width of the joined pooled vectors; 0: the model reads none."""
        return sum(one.pooled_width for one in self.texts)
