"""The encoders of a recipe: of pictures and their companions, of features, and of captions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...datasets.format.row_layout import MASK
from ...datasets.format.schema import LatentSpec
from ..config import PrecomputeRecipe
from .forwards import FeatureRows, LatentRows, MaskRows, RowsEncoder, VisionEncoder
from .text.encoder import CaptionEncoder
from .text.tokenizer import CaptionTokenizer, of_table
from .vae import ImageEncoder


@dataclass(frozen=True)
class Encoders:
    """The encoders of a recipe; caption encoders, features and the kinds of companion pictures by name."""

    image: ImageEncoder
    captions: Mapping[str, CaptionEncoder] = field(default_factory=dict)
    features: Mapping[str, VisionEncoder] = field(default_factory=dict)
    pictures: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokenizers(self) -> dict[str, CaptionTokenizer]:
        """Of the caption encoders."""
        return {name: encoder.tokenizer for name, encoder in self.captions.items()}

    def rows_encoders(self, latent: LatentSpec) -> list[RowsEncoder]:
        """The encoders of each group of a record's arrays.

        Nothing is drawn of a companion: where a sample of each posterior is stored, its mean is.
        """
        features = [FeatureRows(encoder, name) for name, encoder in self.features.items()]
        mean = latent.model_copy(update={"kind": "mean"}) if latent.kind == "sample" else latent
        pictures = [
            MaskRows(name) if kind == MASK else LatentRows(self.image, mean, name)
            for name, kind in self.pictures.items()
        ]
        return [LatentRows(self.image, latent), *features, *pictures]


def load_encoders(recipe: PrecomputeRecipe, device: torch.device) -> Encoders:
    """Load the encoders of a recipe; those of captions load their weights when they encode.

    Raises: EncoderError.
    """
    sections, tokenizers, captions, features = recipe.text_sections, {}, {}, {}
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
    return Encoders(image, captions, features, {name: one.kind for name, one in recipe.pictures.items()})
