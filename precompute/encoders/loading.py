"""The encoders of a recipe: of images and their companions, of features, and of captions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..config import PrecomputeRecipe
from .text.encoder import CaptionEncoder
from .text.tokenizer import CaptionTokenizer, of_table
from .vae import ImageEncoder

if TYPE_CHECKING:  # transformers takes seconds to import
    from .vision.features import FeatureEncoder


@dataclass(frozen=True)
class Encoders:
    """The encoders of a recipe; caption encoders, features and the kinds of companions by name."""

    image: ImageEncoder
    captions: Mapping[str, CaptionEncoder] = field(default_factory=dict)
    features: Mapping[str, FeatureEncoder] = field(default_factory=dict)
    companions: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokenizers(self) -> dict[str, CaptionTokenizer]:
        """Of the caption encoders."""
        return {name: encoder.tokenizer for name, encoder in self.captions.items()}


def load_encoders(recipe: PrecomputeRecipe, device: torch.device) -> Encoders:
    """Load the encoders of a recipe; those of captions load their weights when they encode.

    Raises: EncoderError.
    """
    sections, tokenizers, captions, features = recipe.text, {}, {}, {}
    for name, section in sections.items():
        with of_table(name):
            tokenizers[name] = CaptionTokenizer(section)
    image = ImageEncoder(recipe.vae, device)
    for name, section in sections.items():
        with of_table(name):
            captions[name] = CaptionEncoder(section, tokenizers[name], device)
    for name, section in recipe.features.items():
        from .vision.features import FeatureEncoder

        features[name] = FeatureEncoder(section, recipe.images.resolution, device, name=name)
    return Encoders(image, captions, features, {name: one.kind for name, one in recipe.companions.items()})
