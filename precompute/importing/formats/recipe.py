"""The settings of an import: one frozen model per section, one line of meaning under each key.

What a kind of features is by itself (its VAE, its scale) stands beside its reader; what is empty or 0 here is taken
from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator

from ....datasets.recipe import Section, parse_with_overrides
from ...config import SourceSection, StoreSection

Kind = Literal["fast-dit", "lightningdit", "mar", "edm2", "pixart", "mds"]


class ImportSource(Section):
    """How the features are read."""

    num_classes: Annotated[int, Field(ge=0)] = 0
    """Classes that there are; 0: one more than the largest label."""
    max_reject_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Stop when more than this share of all records is rejected (and more than ten, or than half of all)."""
    max_rejects_in_a_row: Annotated[int, Field(ge=1)] = 100
    """Stop when so many records in a row are rejected."""

    def limits(self) -> SourceSection:
        """The same limits as a section of a precompute recipe."""
        return SourceSection(max_reject_share=self.max_reject_share, max_rejects_in_a_row=self.max_rejects_in_a_row)


class ImportVae(Section):
    """What is known of the VAE that made the features."""

    model: str = ""
    """Hub id or folder of it, to decode with; empty: the one that the kind is published with."""
    subfolder: str = ""
    """Folder inside the model."""
    downscale: Annotated[int, Field(ge=0, le=4096)] = 0
    """Pixels of a latent's place; 0: as the kind has it."""
    shift: list[float] = Field(default=[])
    """The model's input is (z - shift) * scale: one number, or one a channel; empty: as the kind has it."""
    scale: list[float] = Field(default=[])
    """As shift. Of features that were scaled before they were stored: what they were scaled with."""
    multiplier: Annotated[float, Field(gt=0)] = 1.0
    """A further factor of the scale, as LightningDiT's latent_multiplier."""
    pixels: Literal["auto", "-1..1", "0..1"] = "auto"
    """Range of the pixels that the VAE was given; "auto": as the kind has it."""

    @field_validator("scale")
    @classmethod
    def _not_zero(cls, value: list[float]) -> list[float]:
        if 0 in value:
            raise ValueError("a scale of 0 leaves nothing of a latent")
        return value


class ImportText(Section):
    """What is known of the text encoder."""

    model: str = ""
    """Hub id or folder of it; empty: the one that the kind is published with."""
    check: Literal["content", "mask"] = "content"
    """What is read of a caption when planning: all of it, so that a broken one is a reject; or its mask only."""


class ImportLayout(Section):
    """Where things lie in a source; empty: where the kind's own programs put them."""

    latents: str = ""
    """PixArt: folder of the VAE features. MDS: the column of the latents, as "latents_256"."""
    captions: str = ""
    """PixArt: folder of the caption features. MDS: the column of the embeddings, as "caption_latents"."""
    text: str = ""
    """MDS: the column of the captions' text, as "caption"."""
    label: str = ""
    """MDS: the column of the label."""
    mask: str = ""
    """MDS: the column of the captions' attention mask; empty: all tokens are kept."""
    dtype: Literal["float16", "float32"] = "float16"
    """MDS: of arrays that are stored as plain bytes."""
    channels: Annotated[int, Field(ge=1, le=1024)] = 4
    """MDS: latent channels of arrays that are stored as plain bytes; their latents are squares."""
    width: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    """MDS: width of caption embeddings that are stored as plain bytes."""


class ImportStore(Section):
    """What lies on disk."""

    dtype: Literal["source", "float16", "float32"] = "source"
    """Of latents and caption embeddings; "source": as they are, so no number changes (bfloat16 becomes float32)."""
    shard_mib: Annotated[int, Field(ge=1, le=4096)] = 64
    """Size at which a shard is full."""
    codec: str = "none"
    """As in a precompute recipe."""

    @field_validator("codec")
    @classmethod
    def _known(cls, value: str) -> str:
        return StoreSection(codec=value).codec


class ImportRecipe(Section):
    """An import, fully described, but for its kind and where things lie."""

    source: ImportSource = ImportSource()
    vae: ImportVae = ImportVae()
    text: ImportText = ImportText()
    layout: ImportLayout = ImportLayout()
    store: ImportStore = ImportStore()


def load(overrides: Sequence[str]) -> ImportRecipe:
    """The settings of an import from ``section.key=value`` overrides."""
    return parse_with_overrides("import", ImportRecipe, {}, overrides)
