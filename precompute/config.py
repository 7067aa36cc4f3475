"""The precompute recipe: one frozen model per section, one line of meaning under each key."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from ..datasets.format.buckets import MAX_RATIO, STEP_PX, Table, bucket_table, largest_crop
from ..datasets.format.zarr_shard import check_codec
from ..datasets.recipe import Section, load_recipe

PACKAGE = "leandit.precompute"
MAX_CROP_SHARE = 0.3  # of a picture's area, above which a computed table is warned of
MIN_STEP_PX = 8  # that is advised; the downscale of most VAEs

Dtype = Literal["float32", "bfloat16", "float16"]
Kind = Literal["auto", "imagefolder", "sidecars", "metadata", "manifest", "webdataset", "imagenet", "parquet", "arrow"]


class SourceSection(Section):
    """Where the pictures come from is said on the command line; this is how to read it."""

    kind: Kind = "auto"
    """"auto" looks: a table of paths, *.parquet, *.tar, texts beside the pictures, else class folders."""
    image: str = ""
    """Column that names the pictures, in Parquet and Arrow the one that holds them; empty: guessed from usual names."""
    caption: str = ""
    """Column of the captions, text or a list of texts; empty: guessed from the usual names."""
    label: str = ""
    """Column of the labels; empty: guessed from the usual names."""
    root: str = ""
    """Folder of the pictures that a table names, absolute or from the table's folder; empty: looked for beside it."""
    split: str = ""
    """Which of several splits (train, validation, test) is stored; "all": whatever the names say, all of it."""
    labels: Literal["auto", "none"] = "auto"
    """"none": no labels, whatever folders and columns say; loose pictures beside folders are then taken too."""
    class_names: str = ""
    """Names of the classes for people: "imagenet", or a text, TSV or JSON file; empty: none but the source's own."""
    sizes: Literal["header", "manifest"] = "header"
    """"manifest" believes a table's height and width, and opens no picture to plan it; one that lies is rejected."""
    check: Literal["stat", "content"] = "stat"
    """When a store grows: "stat" reads a file again only if its size, time or place differs; "content" reads all."""
    missing_caption: Literal["reject", "null"] = "reject"
    """A picture without a caption, where text is encoded: "null" stores it with the null caption."""
    max_reject_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Stop when more than this share of all records is rejected (and more than ten, or than half of all)."""
    max_rejects_in_a_row: Annotated[int, Field(ge=1)] = 100
    """Stop when so many records in a row are rejected."""


class ImagesSection(Section):
    """How a picture becomes pixels."""

    resolution: Annotated[int, Field(ge=16, le=8192)] = 256
    """Pixels; side of the square, or of the square of equal area for buckets."""
    crop: Literal["adm", "bucket"] = "adm"
    """"adm": DiT's centre crop, bit-exact. "bucket": cover-resize, centre crop."""
    buckets: str | list[str] = "square"
    """"square", "pixart" (the published tables), "area" (computed), or your own list, as ["512x768", "768x512"]."""
    step_px: Annotated[int, Field(ge=1, le=1024)] = STEP_PX
    """Of "area": every side is a multiple of it."""
    max_ratio: Annotated[float, Field(ge=1, le=16)] = MAX_RATIO
    """Longer pictures, either way, are rejected where there are several buckets; "area" makes no longer bucket."""
    min_px: Annotated[int, Field(ge=1, le=8192)] = 1
    """Pictures whose shorter side has fewer pixels are rejected (too_small)."""
    exif_orientation: bool = True
    """Turn pictures upright as their EXIF says; false: as they are stored, as ADM's loader and ImageFolder do."""

    @property
    def table(self) -> Table:
        """Rows (ratio, height_px, width_px) of the bucket table."""
        return bucket_table(self.buckets, self.resolution, step_px=self.step_px, max_ratio=self.max_ratio)

    def warnings(self) -> list[str]:
        """What to say where "area" makes so few buckets that a picture between two of them loses much."""
        share, ratio = largest_crop(self.table, self.max_ratio)
        if self.buckets != "area" or share <= MAX_CROP_SHARE:
            return []
        finer = (self.model_copy(update={"step_px": self.step_px >> halvings}) for halvings in range(1, 11))
        step = next((one.step_px for one in finer if one.step_px >= MIN_STEP_PX and not one.warnings()), None)
        advice = f"Set a smaller step that is a multiple of the VAE's downscale, as --set images.step_px={step}."
        return [
            f"images.buckets 'area' at {self.resolution} px with images.step_px = {self.step_px} makes few buckets: a "
            f"picture of height / width {ratio:.2f} loses {share:.0%} of its area to the crop. "
            f"{advice if step else 'Take a larger images.resolution.'}"
        ]

    @model_validator(mode="after")
    def _check(self) -> ImagesSection:
        if not self.table:
            raise ValueError("needed at least one bucket, as ['512x768']")
        if self.crop == "adm" and self.buckets != "square":
            raise ValueError("crop 'adm' makes squares; use crop = \"bucket\" with these buckets")
        return self


class VaeSection(Section):
    """The image encoder: an AutoencoderKL, AutoencoderTiny or AutoencoderDC of diffusers."""

    model: str = "stabilityai/sd-vae-ft-ema"
    """Hub id, folder, or "shipped:vae"."""
    subfolder: str = ""
    """Folder inside the model, as "vae" in a pipeline; a folder that is the model itself needs none."""
    revision: str = ""
    """Commit of the hub's repository; empty: the newest, and what that was is recorded."""
    dtype: Dtype = "float32"
    """Arithmetic of the encoder; a CPU always computes in float32, and the store says so."""
    keep: Literal["auto", "moments", "mean", "sample"] = "auto"
    """"auto": moments where the VAE has a posterior, else its latent."""
    flip: bool = False
    """Also store the flipped picture's latent."""
    batch_size: Annotated[int, Field(ge=0)] = 32
    """Pictures per forward, part of the fingerprint because it changes the bits of a convolution; 0: as many as fit."""
    tile_px: Annotated[int, Field(ge=0, le=8192)] = 0
    """Encode larger pictures in overlapping tiles of this side, which takes less memory; 0: whole."""
    compile: bool = False
    """torch.compile the encoder, once for each shape of a batch; other bits than without, so in the fingerprint."""

    @model_validator(mode="after")
    def _has_a_batch(self) -> VaeSection:
        if self.compile and not self.batch_size:
            raise ValueError("compile needs a batch_size: finding the largest would compile every size that is tried")
        return self


class TextSection(Section):
    """The caption encoder."""

    kind: Literal["none", "t5", "gemma2"] = "none"
    """"t5": the encoder of a T5. "gemma2": a Gemma-2, as Sana uses it."""
    model: str = "google/t5-v1_1-xxl"
    """Hub id, folder, or "shipped:t5"."""
    subfolder: str = ""
    """Folder of the text encoder inside the model."""
    tokenizer_subfolder: str = ""
    """Folder of the tokenizer inside the model."""
    revision: str = ""
    """Commit of the hub's repository."""
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 300
    """Longer captions are cut here, and counted."""
    dtype: Dtype = "bfloat16"
    """Arithmetic of the encoder; a CPU always computes in float32, and the store says so."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Captions of equal length per forward; part of the fingerprint."""
    batch_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """Tokens per forward, so that short captions go in larger batches; 0: batch_size captions. In the fingerprint."""
    instruction: str = ""
    """Before each caption, of gemma2: "sana" (as Sana trains), "sana-diffusers" (as diffusers samples), or a text."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> TextSection:
        if self.instruction and self.kind == "t5":
            raise ValueError('an instruction is for a language model; use kind = "gemma2", or no instruction')
        return self


class StoreSection(Section):
    """What lies on disk."""

    dtype: Literal["float16", "float32"] = "float16"
    """Of latents, and of caption embeddings unless text_dtype says otherwise."""
    text_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8"] = "auto"
    """Of caption embeddings; "auto": that of latents; "int8" has a scale for each token."""
    shard_mib: Annotated[int, Field(ge=1, le=4096)] = 64
    """Size at which a shard is full."""
    codec: str = "none"
    """"none" is read by memory map; "zstd", "gzip", "blosc-lz4", "blosc-zstd" are smaller and slower."""

    @field_validator("codec")
    @classmethod
    def _known(cls, value: str) -> str:
        check_codec(value)
        return value


class PrecomputeRecipe(Section):
    """A precompute, fully described; only where the source and the store lie is said elsewhere."""

    source: SourceSection = SourceSection()
    images: ImagesSection = ImagesSection()
    vae: VaeSection = VaeSection()
    text: TextSection = TextSection()
    store: StoreSection = StoreSection()

    @property
    def needs_captions(self) -> bool:
        """A record without a caption is rejected."""
        return self.text.kind != "none" and self.source.missing_caption == "reject"

    @property
    def null_captions(self) -> bool:
        """A record without a caption is stored, with the null caption."""
        return self.text.kind != "none" and not self.needs_captions


def load(name: str, overrides: list[str]) -> PrecomputeRecipe:
    """Load a precompute recipe by name or path."""
    return load_recipe(name, PrecomputeRecipe, package=PACKAGE, overrides=overrides)
