"""The specification of a model, stored with every checkpoint and snapshot."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from .layers import DiTOptions


class ModelSpec(BaseModel):
    """Everything needed to build a model.

    Args:
      num_classes: of the label table; 0 with captions.
      caption_width: 0 with labels.
      options: of our DiT.
      config: arguments of diffusers' class, if the model came from a folder or the hub.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    channels: int
    out_channels: int
    num_classes: int
    caption_width: int
    base_size: int
    options: DiTOptions = DiTOptions()
    config: dict[str, Any] = {}

    @property
    def takes_text(self) -> bool:
        """Conditioned on captions, not on labels."""
        return self.caption_width > 0

    @property
    def takes_sizes(self) -> bool:
        """Conditioned on the sizes of the source pictures too (PixArt-alpha at 1024 px)."""
        return bool(self.config.get("use_additional_conditions"))
