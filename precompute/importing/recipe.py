"""The settings of an import: one frozen model per section, one line of meaning under each key.

Defaults of a kind of features (VAE, scale) are defined by its reader; they apply where a setting is empty or 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator

from ...effects import Condition, unread_keys
from ...errors import RecipeError
from ...recipe import Section, parse_with_overrides
from ..config import SourceSection

Kind = Literal["fast-dit", "lightningdit", "mar", "edm2", "pixart", "mds", "mlperf-flux", "nemo"]


class ImportSource(Section):
    """How to read the features."""

    num_classes: Annotated[int, Field(ge=0)] = 0
    """Number of classes; 0: one more than the largest label."""
    max_reject_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Stop when rejects exceed this share of all records, and also ten (or half of all, if that is fewer)."""
    max_rejects_in_a_row: Annotated[int, Field(ge=1)] = 100
    """Stop after this many rejects in a row."""

    def limits(self) -> SourceSection:
        """The same limits as a section of a precompute recipe."""
        return SourceSection(max_reject_share=self.max_reject_share, max_rejects_in_a_row=self.max_rejects_in_a_row)


class ImportVae(Section):
    """The VAE that encoded the features."""

    model: str = ""
    """Hub id or folder, for decoding; empty: the one that the kind was published with."""
    subfolder: str = ""
    """Folder inside the model."""
    downscale: Annotated[int, Field(ge=0, le=4096)] = 0
    """Pixels per latent position, along each side; 0: the kind's."""
    shift: list[float] = Field(default=[])
    """The model's input is (z - shift) * scale: one number, or one per channel; empty: the kind's."""
    scale: list[float] = Field(default=[])
    """As shift. For features that were scaled before storing: the scale that was applied."""
    multiplier: Annotated[float, Field(gt=0)] = 1.0
    """An additional factor on the scale, like LightningDiT's latent_multiplier."""
    pixels: Literal["auto", "-1..1", "0..1"] = "auto"
    """Range of the VAE's input pixels; "auto": the kind's."""

    @field_validator("scale")
    @classmethod
    def _not_zero(cls, value: list[float]) -> list[float]:
        if 0 in value:
            raise ValueError("a scale of 0 would erase the latents")
        return value


class ImportText(Section):
    """The text encoder."""

    model: str = ""
    """Hub id or folder; empty: the one that the kind was published with."""
    check: Literal["content", "mask"] = "content"
    """What planning reads of a caption: all of it, so that a damaged one is rejected, or only its mask."""


class ImportLayout(Section):
    """Names of folders or columns in a source; empty: those of the kind's own programs."""

    latents: str = ""
    """PixArt: folder of the VAE features. MDS: the column of the latents, such as "latents_256"."""
    captions: str = ""
    """PixArt: folder of the caption features. MDS: the column of the embeddings, such as "caption_latents"."""
    text: str = ""
    """Column of the captions' text: for MDS, such as "caption"; for mlperf-flux, if your data has one."""
    label: str = ""
    """MDS: the column of the label."""
    mask: str = ""
    """MDS: the column of the captions' attention mask; empty: all tokens are kept."""
    dtype: Literal["float16", "float32"] = "float16"
    """MDS: dtype of arrays stored as plain bytes."""
    channels: Annotated[int, Field(ge=1, le=1024)] = 4
    """MDS: latent channels of arrays stored as plain bytes; their latents are square."""
    width: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    """MDS: width of caption embeddings stored as plain bytes."""


class ImportStore(Section):
    """The format on disk."""

    dtype: Literal["source", "float16", "float32"] = "source"
    """Dtype of latents and caption embeddings; "source": as in the source, exactly (bfloat16 latents: float32)."""
    text_dtype: Literal["same", "source", "float16", "bfloat16", "float32", "int8"] = "same"
    """Dtype of caption embeddings: "same" as store.dtype; "int8", with a scale per 64 numbers, halves bfloat16."""
    shard_mib: Annotated[int, Field(ge=1, le=4096)] = 64
    """Size at which a shard is full."""
    codec: Literal["none", "blosc"] = "none"
    """As in a precompute recipe."""


class ImportRecipe(Section):
    """A complete description of an import, except for its kind and paths."""

    source: ImportSource = ImportSource()
    vae: ImportVae = ImportVae()
    text: ImportText = ImportText()
    layout: ImportLayout = ImportLayout()
    store: ImportStore = ImportStore()


KIND_KEYS: dict[str, tuple[str, ...]] = {  # keys that only some kinds read, with the kinds
    "layout.latents": ("pixart", "mds"),
    "layout.captions": ("pixart", "mds"),
    "layout.text": ("mds", "mlperf-flux"),
    "layout.label": ("mds",),
    "layout.mask": ("mds",),
    "layout.dtype": ("mds",),
    "layout.channels": ("mds",),
    "layout.width": ("mds",),
    "text.check": ("pixart", "mlperf-flux", "nemo"),
}


def check_keys(kind: str, recipe: ImportRecipe, *, has_captions: bool, has_labels: bool) -> None:
    """Raise if a setting is not read.

    Args:
      kind: of the features.
      has_captions, has_labels: whether these features have some.
    Raises: RecipeError.
    """
    of_captions = ("text.model", "store.text_dtype", "layout.text", "layout.mask", "layout.width")
    conditions = [
        Condition(key, lambda *_, kinds=kinds: kind in kinds, f"an import of {' or '.join(kinds)}, and this is {kind}")
        for key, kinds in KIND_KEYS.items()
    ]
    conditions += [Condition(key, lambda *_: has_captions, "features with captions") for key in of_captions]
    conditions.append(Condition("source.num_classes", lambda *_: has_labels, "features with labels"))
    for unread in unread_keys(recipe, conditions):
        raise RecipeError(f"import: {unread}. Leave it out.")


def load(overrides: Sequence[str]) -> ImportRecipe:
    """The settings of an import from ``section.key=value`` overrides."""
    return parse_with_overrides("import", ImportRecipe, {}, overrides)
