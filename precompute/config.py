"""The precompute recipe: one frozen model per section, one line of meaning under each key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from ..datasets.format.row_layout import CAPTION_ARRAYS, CAPTION_PART, COMPANIONS, FEATURES
from ..datasets.format.schema import Name
from ..datasets.format.token_dtypes import MIN_TEXT_COSINE
from ..effects import check_overrides, unread_notes
from ..errors import RecipeError
from ..recipe import UNNAMED, Caption, Section, load_recipe
from .effects import CONDITIONS
from .images.bucket_tables import DOWNSCALE, MAX_RATIO, Table, area_step, bucket_table, largest_crop

PACKAGE = "leandit.precompute"
MAX_CROP_SHARE = 0.3  # of an image's area, above which a computed table is warned of
PATHS = {"buckets", CAPTION_PART, FEATURES, COMPANIONS, "c"}  # folders of every store; "c" holds the shards of an array
TextName = Annotated[str, Field(pattern=r"^([a-z][a-z0-9_]{0,39})?$")]  # a ``Name``, or "" of [text]
MIN_STEP_PX = 8  # that is advised; the downscale of most VAEs

Dtype = Literal["float32", "bfloat16", "float16"]
Kind = Literal["auto", "imagefolder", "sidecars", "metadata", "manifest", "webdataset", "imagenet", "parquet", "arrow"]


class SourceSection(Section):
    """How to read the source, which the command line names."""

    kind: Kind = "auto"
    """"auto" detects it: a table of paths, *.parquet, *.tar, texts next to the images, else class folders."""
    image: str = ""
    """Column of image paths (in Parquet and Arrow: of image bytes; in tars: a field, such as left.jpg); empty: guessed
    from the usual names."""
    caption: str = ""
    """Column, or field of .json in tars and beside images, of captions, text or a list; empty: the usual names."""
    label: str = ""
    """Column, or field of .json in tars and beside images, of the labels; empty: guessed from the usual names."""
    text_file: Literal["auto", "lines", "whole"] = "auto"
    """A text of several lines beside an image: "lines": a caption each. "whole": one caption. "auto": one if it is JSON
    or has an empty line between texts."""
    root: str = ""
    """Folder of the images that a table names, absolute or relative to the table; empty: searched near the table."""
    split: str = ""
    """The split to store (train, validation, test, or unnamed), if there are several; "all": all of them."""
    labels: Literal["auto", "wnid", "none"] = "auto"
    """"wnid": from file names, as in n01440764_18.JPEG. "none": none; no column or field of labels is read."""
    class_names: str = ""
    """Display names of the classes: "imagenet", or a text file; empty: the names of the source."""
    sizes: Literal["header", "manifest"] = "header"
    """"manifest" trusts a table's height and width and opens no image for planning; wrong ones are rejected."""
    check: Literal["stat", "content"] = "stat"
    """When a store grows: "stat" rereads a file only if its size, time or location differs; "content" rereads all."""
    missing_caption: Literal["reject", "null"] = "reject"
    """An image without a caption, if text is encoded: "null" stores it with the null caption."""
    max_reject_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Stop when rejects exceed this share of all records, and also ten (or half of all, if that is fewer)."""
    max_rejects_in_a_row: Annotated[int, Field(ge=1)] = 100
    """Stop after this many rejects in a row."""


class ImagesSection(Section):
    """How an image becomes pixels."""

    resolution: Annotated[int, Field(ge=16, le=8192)] = 256
    """Side of the square in pixels, or of a square with the buckets' area."""
    crop: Literal["adm", "bucket"] = "adm"
    """"adm": DiT's center crop, bit-exact. "bucket": cover-resize, center crop."""
    buckets: str | list[str] = "square"
    """"square", "pixart" (the published tables), "area" (computed), or a list such as ["512x768", "768x512"]."""
    step_px: Annotated[int, Field(ge=0, le=1024)] = 0
    """For "area": every side is a multiple of this; 0: an eighth of the resolution, at most 64, to fit the VAE."""
    max_ratio: Annotated[float, Field(ge=1, le=16)] = MAX_RATIO
    """Largest long side / short side: with several buckets, longer images are rejected; also the limit of "area"."""
    min_px: Annotated[int, Field(ge=1, le=8192)] = 1
    """Images whose shorter side has fewer pixels are rejected (too_small)."""
    max_megapixels: Annotated[int, Field(ge=1, le=2000)] = 256
    """Images with more pixels are rejected (too_large). A decoder may use 12 bytes of memory for each pixel."""
    color: Literal["srgb", "as_stored"] = "srgb"
    """"srgb": embedded color profiles are applied. "as_stored": they are ignored, as in most published trainers."""
    variants: Annotated[int, Field(ge=1, le=16)] = 1
    """Crops to store per image, one drawn each epoch: the planned crop, then random ones."""
    variant_zoom: Annotated[float, Field(ge=1, le=2)] = 1.25
    """Random crops are taken from the image enlarged by a factor between 1 and this; 1: only positions differ."""

    @property
    def table(self) -> Table:
        """Rows (ratio, height_px, width_px) of the bucket table; a step of 0 is that for a VAE of 8 px a latent."""
        step_px = self.for_vae().step_px
        return bucket_table(self.buckets, self.resolution, step_px=step_px, max_ratio=self.max_ratio)

    def for_vae(self, downscale: int = DOWNSCALE) -> ImagesSection:
        """The same with the step that an autoencoder needs, unless the recipe sets one.

        Args:
          downscale: of the autoencoder, in pixels a latent.
        """
        return self.model_copy(update={"step_px": self.step_px or area_step(self.resolution, downscale)})

    def warnings(self) -> list[str]:
        """What to say where "area" makes so few buckets that an image between two of them loses much."""
        if self.buckets != "area":
            return []
        share, ratio = largest_crop(self.table, self.max_ratio)
        if share <= MAX_CROP_SHARE:
            return []
        step_px = self.for_vae().step_px
        finer = (
            self.model_copy(update={"step_px": step_px >> halvings}) for halvings in range(1, step_px.bit_length())
        )
        step = next((one.step_px for one in finer if one.step_px >= MIN_STEP_PX and not one.warnings()), None)
        advice = (
            f"Set a smaller step that is a multiple of the VAE's downscale, for example --set images.step_px={step}."
        )
        return [
            f"images.buckets 'area' at {self.resolution} px with images.step_px = {step_px} makes few buckets: an "
            f"image of height / width {ratio:.2f} loses {share:.0%} of its area to the crop. "
            f"{advice if step else 'Use a larger images.resolution.'}"
        ]

    @model_validator(mode="after")
    def _check(self) -> ImagesSection:
        if not self.table:
            raise ValueError("expected at least one bucket, such as ['512x768']")
        if self.crop == "adm" and self.buckets != "square":
            raise ValueError("crop 'adm' makes squares; use crop = \"bucket\" with these buckets")
        return self


class VaeSection(Section):
    """The image encoder: an autoencoder of diffusers, of a family in ``encoders/autoencoders.py``."""

    model: str = "stabilityai/sd-vae-ft-ema"
    """Hub id, folder, or "shipped:vae"."""
    subfolder: str = ""
    """Folder inside the model, such as "vae" in a pipeline; empty if the model is the folder itself."""
    revision: str = ""
    """Commit of the hub's repository; empty: the newest, which the store records."""
    dtype: Dtype = "float32"
    """Precision of the encoder; a CPU always computes in float32, which the store records."""
    keep: Literal["auto", "moments", "mean", "sample"] = "auto"
    """"auto": moments if the VAE has a posterior, else its latent."""
    flip: bool = False
    """Also store the flipped image's latent."""
    batch_size: Annotated[int, Field(ge=0)] = 32
    """Images per forward, part of the fingerprint because it changes the bits of a convolution; 0: as many as fit."""
    tile_px: Annotated[int, Field(ge=0, le=8192)] = 0
    """Encode larger images in overlapping tiles with this side, to save memory; 0: no tiles."""
    min_psnr: Annotated[float, Field(ge=0, le=100)] = 15.0
    """Stop before anything is written if the PSNR (dB) of images reconstructed by the VAE is lower; 0: no check."""


class TextSection(Section):
    """The caption encoder."""

    kind: Literal["none", "t5", "umt5", "clip", "gemma2", "causal_lm"] = "none"
    """"t5", "umt5": the encoder. "clip": the text model. "gemma2": as in Sana. "causal_lm": any language model."""
    model: str = "google/t5-v1_1-xxl"
    """Hub id, folder, or "shipped:t5"."""
    subfolder: str = ""
    """Folder of the text encoder inside the model."""
    tokenizer_subfolder: str = ""
    """Folder of the tokenizer inside the model."""
    revision: str = ""
    """Commit of the hub's repository."""
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 300
    """Longer captions are truncated, and counted."""
    dtype: Dtype = "bfloat16"
    """Precision of the encoder; a CPU always computes in float32, which the store records."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Captions of equal length per forward; part of the fingerprint."""
    instruction: str = ""
    """Prompt before each caption, for gemma2: "sana" (as in Sana's training), "sana-diffusers", or a text."""
    output: Literal["tokens", "pooled", "both"] = "tokens"
    """What to store with "clip": an embedding for each token, one for the caption ("pooled"), or both."""
    full_length: bool = False
    """Also store the encoder's output for padding, for models that read it: max_tokens rows for every caption."""
    attend_padding: bool = False
    """Captions attend to their padding, as in SD3 and Flux: no mask. Requires full_length; "clip" always attends."""
    padding_side: Literal["auto", "left", "right"] = "auto"
    """Side of the padding with full_length; "auto": the tokenizer's own, which varies with its library's release."""
    layers: list[int] = Field(default=[])
    """Hidden states to store, concatenated: 0: the first layer's input, -1: the last. Empty: -2 for "clip", else -1."""
    template: str = ""
    """Text around "{caption}", for causal_lm: a chat template written out, special tokens included."""
    drop_prefix_tokens: Annotated[int, Field(ge=0, le=4096)] = 0
    """Number of leading template tokens to drop; max_tokens counts the rest."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> TextSection:
        if self.instruction and self.kind not in ("none", "gemma2"):
            raise ValueError('an instruction is for a language model; use kind = "gemma2", or no instruction')
        if (self.template or self.drop_prefix_tokens) and self.kind not in ("none", "causal_lm"):
            raise ValueError('a template is for a language model; use kind = "causal_lm", or no template')
        if self.template and self.template.count("{caption}") != 1:
            raise ValueError("template needs {caption} exactly once, where the caption belongs")
        return self

    @model_validator(mode="after")
    def _gives_what_is_stored(self) -> TextSection:
        if self.output != "tokens" and self.kind not in ("none", "clip"):
            raise ValueError('only kind "clip" has a pooled vector; use output = "tokens"')
        if self.output == "both" and not self.full_length:
            raise ValueError('output "both" needs full_length = true, so that a shard holds both of the same captions')
        if self.output == "pooled" and self.layers:
            raise ValueError("layers apply to tokens, and a pooled vector comes from the last layer; leave out layers")
        if self.padding_side != "auto" and not self.full_length:
            raise ValueError("padding_side needs full_length = true; without it nothing is padded but the null caption")
        if self.attend_padding and not (self.full_length and self.kind in ("none", "t5", "umt5", "causal_lm")):
            raise ValueError(
                "attend_padding needs full_length = true, and kind t5, umt5 or causal_lm, because uncomputed "
                "padding cannot be attended to"
            )
        return self


class CaptionsSection(Section):
    """Captions that belong to no image."""

    sample: list[Caption] = Field(default=[])
    """Your own prompts to sample while a run trains (run.sample_captions): encoded like every caption."""


class FeatureSection(Section):
    """Tokens of a vision model, to align the training with: any DINOv2, DINOv3, SigLIP or CLIP of transformers."""

    model: str
    """Hub id, or folder."""
    subfolder: str = ""
    """Folder inside the model; empty if the model is the folder itself."""
    revision: str = ""
    """Commit of the hub's repository; empty: the newest, which the store records."""
    output: Literal["patches", "cls", "both", "embedding"] = "patches"
    """"patches": a token each, for REPA. "cls": class token. "both": for REG. "embedding": CLIP's, read as "cls"."""
    layer: Annotated[int, Field(ge=-1, le=1000)] = -1
    """Hidden state to store, 0 before the first block; -1: the model's output, after the final norm."""
    resolution: Annotated[int, Field(ge=0, le=8192)] = 0
    """Side of the model's input in pixels, for a square of images.resolution; 0: one patch per 16 px, as in REPA."""
    encoder_dtype: Dtype = "float32"
    """Precision of the encoder; a CPU always computes in float32, which the store records."""
    dtype: Literal["float16", "int8"] = "float16"
    """Dtype of the stored tokens; "int8" has a scale for each 64 numbers."""


class CompanionSection(Section):
    """A second image of every record, from another column of the table: a control image, an edit source, a mask."""

    column: str = ""
    """Table column of its path (in Parquet and Arrow: of its bytes; in tars: a field, such as seg.png; in folders: the
    ending of its name, such as -mask, or its folder); empty: the name of the section."""
    kind: Literal["image", "mask"] = "image"
    """"image": encoded like the record's own. "mask": gray, 0 to 255, averaged over each latent position."""


EncoderSection = VaeSection | TextSection | FeatureSection


class StoreSection(Section):
    """The format on disk."""

    dtype: Literal["float16", "float32", "int8"] = "float16"
    """Dtype of latents, and of caption embeddings unless text_dtype is set. "int8" has a scale for each 64
    channels of a position: for latents of many channels without a posterior, such as an RAE's."""
    text_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8"] = "auto"
    """Dtype of caption embeddings; "auto": as for latents; "int8" has a scale for each 64 numbers."""
    min_text_cosine: Annotated[float, Field(ge=0, lt=1)] = MIN_TEXT_COSINE
    """A caption is of low quality if the cosine of a stored token to the encoder's, without the largest 1 %, is below;
    0: none."""
    on_low_quality: Literal["warn", "reject", "float16"] = "warn"
    """"warn" counts such captions; "reject" rejects them and their records; "float16" stores all captions of an encoder
    in float16, not int8, if a sample of them is of low quality."""
    shard_mib: Annotated[int, Field(ge=1, le=4096)] = 64
    """Size at which a shard is full."""
    codec: Literal["none", "blosc"] = "none"
    """"none" is read by memory map; "blosc" saves 7 to 14 %, and each batch is decoded, at 1 GB a second of a core."""

    @property
    def caption_dtype(self) -> str:
        """Dtype of caption embeddings, before store.on_low_quality is decided."""
        return self.dtype if self.text_dtype == "auto" else self.text_dtype


class PrecomputeRecipe(Section):
    """A complete description of a precompute, except for the paths of source and store."""

    source: SourceSection = SourceSection()
    images: ImagesSection = ImagesSection()
    vae: VaeSection = VaeSection()
    text: dict[TextName, TextSection] = Field(default={}, json_schema_extra=UNNAMED)
    captions: CaptionsSection = CaptionsSection()
    features: dict[Name, FeatureSection] = Field(default={})
    companions: dict[Name, CompanionSection] = Field(default={})
    store: StoreSection = StoreSection()

    @property
    def companion_columns(self) -> dict[str, str]:
        """Column of each companion image, by name."""
        return {name: section.column or name for name, section in self.companions.items()}

    @property
    def needs_labels(self) -> bool:
        """A record with an unusable label is rejected, also if its column is guessed: the store has nothing else."""
        return not self.text

    @property
    def needs_captions(self) -> bool:
        """A record without a caption is rejected."""
        return bool(self.text) and self.source.missing_caption == "reject"

    @property
    def null_captions(self) -> bool:
        """A record without a caption is stored, with the null caption."""
        return bool(self.text) and not self.needs_captions

    @model_validator(mode="before")
    @classmethod
    def _name_texts(cls, values: Any) -> Any:
        """[text] is the text encoder "", before those of [text.NAME]."""
        if not isinstance(values, dict) or not isinstance(text := values.get("text"), dict):
            return values
        named = {key: value for key, value in text.items() if isinstance(value, dict | TextSection)}
        unnamed = {key: value for key, value in text.items() if key not in named}
        return values | {"text": ({"": unnamed} if unnamed else {}) | named}

    @field_validator("text")
    @classmethod
    def _leave_out_none(cls, texts: dict[str, TextSection]) -> dict[str, TextSection]:
        """Leave out [text] where it turns text off. Raises: ValueError: it has keys, but no kind to read them."""
        unnamed = texts.get("")
        if unnamed and unnamed.kind == "none" and "kind" not in unnamed.model_fields_set and unnamed != TextSection():
            raise ValueError("[text] has keys but no kind, so no text would be encoded; add a kind")
        return {name: section for name, section in texts.items() if name or section.kind != "none"}

    @model_validator(mode="after")
    def _captions_are_encoded(self) -> PrecomputeRecipe:
        if self.captions.sample and not self.text:
            raise ValueError("captions.sample needs a text encoder; set text.kind, or leave it out")
        return self

    @model_validator(mode="after")
    def _named_encoders_differ(self) -> PrecomputeRecipe:
        if none := [name for name, section in self.text.items() if section.kind == "none"]:
            raise ValueError(f'[text.{none[0]}] needs a kind, such as kind = "clip"')
        if arrays := sorted(self.text.keys() & CAPTION_ARRAYS):
            raise ValueError(f"[text.{arrays[0]}] has the name of an array beside its folder; use another")
        names = [*self.text, *self.features, *self.companions]
        if taken := sorted(PATHS.intersection(names)):
            raise ValueError(
                f"'{taken[0]}' is a folder of every store, so no text encoder, feature or companion can have this "
                "name; use another"
            )
        if twice := sorted(name for name in set(names) if names.count(name) > 1):
            raise ValueError(
                f"two of the text encoders, features and companions have the name '{twice[0]}'; use two names"
            )
        return self

    @model_serializer(mode="wrap")
    def _write_as_the_file(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write a recipe as its file has it: the text encoder "" as [text], and no empty tables."""
        values = serialise(self)
        values["text"] = values["text"].pop("", {} if self.text else TextSection().model_dump()) | values["text"]
        return {key: value for key, value in values.items() if value or key not in ("features", "companions")}


def load(name: str, overrides: list[str]) -> PrecomputeRecipe:
    """Load a precompute recipe by name or path.

    Raises: RecipeError: as ``load_recipe``; or an override sets a key that has no effect.
    """
    recipe = load_recipe(name, PrecomputeRecipe, package=PACKAGE, overrides=overrides)
    check_overrides(recipe, CONDITIONS, overrides)
    names = [override.partition("=")[0].strip() for override in overrides]
    unread = [name for name in names if name.startswith("text.") and name.count(".") == 1]
    if unread and "" not in recipe.text and "text.kind" not in names:
        raise RecipeError(f'--set {unread[0]} has no effect: text.kind is "none". Set text.kind too, or leave it out.')
    return recipe


def notes(recipe: PrecomputeRecipe) -> list[str]:
    """What to say of keys of a recipe file that its other settings leave without effect."""
    return unread_notes(recipe, CONDITIONS)
