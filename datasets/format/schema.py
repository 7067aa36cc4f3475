"""The JSON of a store: attributes of its root group, commit records, manifest and plan.

``FORMAT.md`` is the norm; these models implement it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import PydanticUndefined

from ..disk.hashing import sha256_of
from .token_dtypes import latent_row_channels
from .zarr_shard import ArrayLayout, Count, Revision, StorePath

FORMAT_VERSION = 1
_BATCH = "batch:[1-9][0-9]{0,6}"
FALLBACK = f"^({_BATCH}|({_BATCH},)?(float32|profile|float32,profile))$"  # values of ``Fallback.how``
LOGVAR_RANGE = (-30.0, 20.0)  # of a stored log-variance, as diffusers' DiagonalGaussianDistribution clamps it
IMPORTED = "imported:"  # prefix of the class name of an encoder that is only known by its output
UNKNOWN = "unknown"  # hash of its weights
POSTERIORS = ("mean_logvar", "mean_std")  # kinds of latents that are drawn when they are read

# Stores are not trusted. These limits are far beyond any encoder, and keep products small.
Float32 = Annotated[float, Field(ge=-3.4e38, le=3.4e38)]  # the range of a float32 column
Side = Annotated[int, Field(ge=1, le=1 << 20)]
Dtype = Annotated[str, Field(pattern=r"^float(16|32)$")]
Name = Annotated[
    str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")
]  # of a text encoder, a feature or a companion: a folder and a column
LatentDtype = Annotated[str, Field(pattern=r"^(float(16|32)|int8)$")]
TextDtype = Annotated[str, Field(pattern=r"^(float(16|32)|bfloat16|int8)$")]
BucketName = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}x[1-9][0-9]{0,5}$")]


class _Model(BaseModel):
    """Base of all models: keys that a newer release has added stay, unread, and count in hashes."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())


class _Sparse(_Model):
    """A field with a default is absent from the JSON where it has that value."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        # A field that is required has the default PydanticUndefined, which equals nothing else.
        return {
            name: value for name, value in serialise(self).items() if value != defaults.get(name, PydanticUndefined)
        }


class HashedFile(_Sparse):
    """A whole JSON file. The field that HASH names has the SHA-256 of all the others, which detects flipped bits."""

    HASH: ClassVar[str] = "sha256"

    def with_hash(self) -> Self:
        """The file with its hash filled in."""
        return self.model_copy(update={self.HASH: sha256_of(self.model_dump(exclude={self.HASH}))})


class EncoderIdentity(_Model):
    """An encoder. ``model`` and ``revision`` are its origin, the hashes its identity."""

    model: str
    revision: str | None
    class_name: str
    config: dict[str, Any]
    weights_sha256: str
    tokenizer_sha256: str | None
    dtype: str
    libraries: dict[str, str]
    tokenizer_files_sha256: str | None = None  # of the files of the tokenizer; no part of the fingerprint


class ImageSpec(_Sparse):
    """How an image became pixels."""

    resolution_px: Side
    crop: str
    buckets: list[str]
    resize_filter: str
    colour: str
    libraries: dict[str, str]
    variants: Annotated[int, Field(ge=1, le=16)] = 1  # crops stored of each image, the first as above
    variant_zoom: Annotated[float, Field(ge=1, le=2)] = 1.0  # the further ones are of images enlarged by up to this


class Decoding(_Model):
    """How imported rows become raw latents of diffusers: row / scale + shift.

    Args:
      shift, scale: already applied by the other encoder, C numbers each.
      zero_to_one: images of the VAE range from 0 to 1, not from -1 to 1.
    """

    shift: list[float]
    scale: list[float]
    zero_to_one: bool


class LatentSpec(_Sparse):
    """The rows of the latent arrays, and their conversion to the model's input: (z - shift) * scale."""

    array: Literal["moments", "latents"]
    kind: Literal["mean_logvar", "mean_std", "mean", "sample", "latent"]
    channels: Side
    stored_channels: Side
    downscale: Side
    dtype: LatentDtype
    shift: list[float]
    scale: list[float]
    flip: bool
    batch_size: Side
    tile_px: Annotated[int, Field(ge=0, le=1 << 20)]
    decoding: Decoding | None = None  # None if rows are raw latents, as our encoders give them
    patchify: Annotated[int, Field(ge=1, le=16)] = 1  # side of the squares of positions made channels

    @property
    def has_posterior(self) -> bool:
        """Whether a row is a mean and its spread."""
        return self.kind in POSTERIORS

    @property
    def row_channels(self) -> int:
        """Channels of a row: those stored, and for int8 the bytes of the scales."""
        return latent_row_channels(self.stored_channels) if self.dtype == "int8" else self.stored_channels

    @model_validator(mode="after")
    def _fits_its_channels(self) -> LatentSpec:
        if self.dtype == "int8" and self.has_posterior:
            raise ValueError("int8 latents have no posterior")
        if self.stored_channels != self.channels * (2 if self.has_posterior else 1):
            raise ValueError(f"{self.stored_channels} stored channels, the latents have {self.channels}")
        per_channel = [self.shift, self.scale, *([self.decoding.shift, self.decoding.scale] if self.decoding else [])]
        if any(len(numbers) != self.channels for numbers in per_channel):
            raise ValueError("shift and scale need one number for each channel")
        return self


class FeatureSpec(_Model):
    """The stored tokens of a vision model: those of the patches, row by row, and (or) its class token.

    Args:
      layer: index of its hidden states, 0 before the first block; -1: its output, after the final norm.
      width: D, of a token.
      patch_px: side of a patch, in the input of the model.
      resolution_px: side of that input for a square image of ``images_px``.
    """

    output: Literal["patches", "cls", "both"]
    layer: Annotated[int, Field(ge=-1, le=1 << 20)]
    width: Side
    patch_px: Side
    resolution_px: Side
    images_px: Side
    dtype: Literal["float16", "int8"]

    def grid(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Rows and columns of patches for images of a bucket: their size for the model, in whole patches."""
        step = 2 * self.patch_px * self.images_px
        rows, columns = (
            max(1, (2 * side_px * self.resolution_px + step // 2) // step) for side_px in (height_px, width_px)
        )
        return rows, columns

    @model_validator(mode="after")
    def _has_a_token_a_pixel_at_most(self) -> FeatureSpec:
        if self.resolution_px > self.patch_px * self.images_px:
            raise ValueError(
                f"{self.resolution_px} px make more patches than an image of {self.images_px} px has pixels"
            )
        return self


class TextSpec(_Sparse):
    """The caption embeddings."""

    kind: Literal["t5", "umt5", "clip", "gemma2", "causal_lm", "imported"]
    width: Side
    max_tokens: Side
    dtype: TextDtype
    template: str
    batch_size: Side
    instruction: str = ""
    output: Literal["tokens", "pooled", "both"] = "tokens"
    full_length: bool = False  # every caption has max_tokens rows, padding included
    attend_padding: bool = False
    layers: Annotated[list[Annotated[int, Field(ge=-1000, le=1000)]], Field(max_length=100)] = []
    drop_prefix_tokens: Count = 0
    pooled_width: Annotated[int, Field(ge=0, le=1 << 20)] = 0  # of the pooled vectors; 0 if there are none
    null_tokens: Count = 0  # tokens of the null caption before its padding; 0 in stores that do not say it

    @property
    def null_length(self) -> int:
        """Tokens of the null caption for a model that reads valid tokens alone; 0: not known."""
        return self.max_tokens if self.full_length else min(self.null_tokens, self.max_tokens)

    @property
    def num_layers(self) -> int:
        """Hidden states of equal width that stand beside each other in a token."""
        return max(1, len(self.layers))

    @property
    def has_tokens(self) -> bool:
        """Whether a sequence of tokens is stored of each caption."""
        return self.output != "pooled"

    @property
    def pooled_dtype(self) -> str:
        """Dtype of the pooled vectors: that of the tokens, but never int8."""
        return "float16" if self.dtype == "int8" else self.dtype

    @model_validator(mode="after")
    def _has_whole_layers(self) -> TextSpec:
        if self.width % self.num_layers:
            raise ValueError(f"tokens of {self.width} numbers cannot hold {self.num_layers} layers of equal width")
        return self


class TextEncoder(_Model):
    """A text encoder of a store and what is stored of it; ``name`` is empty for that of ``[text]``."""

    name: Name | Literal[""]
    spec: TextSpec
    encoder: EncoderIdentity


class FeatureEncoder(_Model):
    """An encoder of image features of a store, and what is stored of it."""

    name: Name
    spec: FeatureSpec
    encoder: EncoderIdentity


class CompanionSpec(_Model):
    """A companion image of every record: a control image, an edit source or a mask.

    Args:
      column: of the source, that names or holds it.
      kind: "image" is encoded as the record's own image; of a "mask" the grey of each place of a latent is stored.
    """

    name: Name
    column: Annotated[str, Field(min_length=1, max_length=1000)]
    kind: Literal["image", "mask"]


class StoreSpec(_Sparse):
    """The ``leandit`` attribute of the store's root group."""

    format_version: int
    leandit_version: str
    fingerprint: str
    images: ImageSpec
    latent: LatentSpec
    text: TextSpec | None
    vae: EncoderIdentity
    text_encoder: EncoderIdentity | None
    texts: list[TextEncoder] = []  # those of [text.NAME]
    features: list[FeatureEncoder] = []  # those of [features.NAME]
    companions: list[CompanionSpec] = []  # those of [companions.NAME]
    classes: list[str] | None
    class_names: list[str] | None = None  # display names, one for each class
    sample_captions: list[str] = []  # own prompts, which no record needs; they are in the captions table
    shard_mib: Annotated[int, Field(ge=1, le=4096)]
    codec: str
    recipe: dict[str, Any]

    @property
    def is_imported(self) -> bool:
        """Whether another program encoded it, so leandit cannot encode it again."""
        return self.vae.class_name.startswith(IMPORTED)

    @property
    def groups(self) -> list[str]:
        """Names of all that is stored of a record beside its latents: features, then companion images."""
        return [one.name for one in (*self.features, *self.companions)]

    @property
    def text_encoders(self) -> list[TextEncoder]:
        """All text encoders. The first one's token counts order the captions, and its columns have no suffix."""
        unnamed = []
        if self.text and self.text_encoder:
            unnamed = [TextEncoder(name="", spec=self.text, encoder=self.text_encoder)]
        return [*unnamed, *self.texts]

    def text_encoder_of(self, name: str) -> TextEncoder:
        """The text encoder of a name. Raises: KeyError."""
        return {one.name: one for one in self.text_encoders}[name]

    def identity(self) -> dict[str, Any]:
        """Exactly what changes the bytes of a record: the input of the fingerprint."""
        elsewhere = {"fingerprint", "leandit_version", "classes", "class_names", "sample_captions", "recipe"}
        where_from = {"model", "revision", "tokenizer_files_sha256"}
        identity = self.model_dump(exclude=elsewhere | {"vae", "text", "text_encoder"}) | {
            "text": self.text and self.text.model_dump(exclude={"null_tokens"}),
            "vae": self.vae.model_dump(exclude=where_from),
            "text_encoder": self.text_encoder and self.text_encoder.model_dump(exclude=where_from),
        }
        for kind in ("texts", "features"):
            if named := getattr(self, kind):
                left_out = {"name": True, "encoder": where_from, "spec": {"null_tokens"}}
                identity[kind] = {one.name: one.model_dump(exclude=left_out) for one in named}
        return identity

    @model_validator(mode="after")
    def _has_a_name_for_each_class(self) -> StoreSpec:
        if self.class_names is not None and len(self.class_names) != len(self.classes or ()):
            raise ValueError(f"{len(self.class_names)} class names, there are {len(self.classes or ())} classes")
        return self

    @model_validator(mode="after")
    def _has_unique_names(self) -> StoreSpec:
        names = [one.name for one in (*self.texts, *self.features, *self.companions)]
        if len(set(names)) != len(names) or (self.text is None) != (self.text_encoder is None):
            raise ValueError("two text encoders, features or companions share a name, or [text] has half an encoder")
        return self

    def with_fingerprint(self) -> StoreSpec:
        """The same spec with its fingerprint filled in."""
        return self.model_copy(update={"fingerprint": sha256_of(self.identity())})


class FileEntry(_Model):
    """One file of the store: its path relative to the store, its size and its XXH3-128."""

    path: StorePath
    bytes: Count
    xxh3_128: str


class Reject(_Model):
    """One record rejected after the plan was frozen, or a caption whose embedding is not finite; its rows hold NaN.

    Args:
      row: of the bucket; of a caption its number, counted from the first of its part.
      key: of the record, or the text of the caption.
    """

    row: int
    key: str
    stage: str
    reason: str
    detail: str


class Fallback(_Model):
    """One stored row that was not encoded as planned, which changes its bytes.

    "batch:N": in forwards of N rows, because the batch ran out of memory; "float32": again, alone and in float32,
    because its latent was not finite; "profile": without its color profile, which is broken or of other pixels. Several
    are joined with commas, in this order.
    """

    row: int
    how: Annotated[str, Field(pattern=FALLBACK)]


class CheckedImage(_Model):
    """An image that went through the autoencoder and came back."""

    key: str
    psnr_db: Annotated[float, Field(ge=-100, le=100)]


class SelfCheck(_Model):
    """What came back of a few images of the source before the plan was frozen."""

    images: Annotated[list[CheckedImage], Field(min_length=1, max_length=64)]
    channel_mean: list[Float32]  # as the model sees them, of the posterior's mean
    channel_std: list[Float32]


class LayerQuality(_Model):
    """What int8 cost one layer of the tokens of a sample that was encoded before the plan was frozen.

    Args:
      group: "captions", "captions/NAME", "features/NAME", or "latents", whose tokens are the positions.
      layer: of those that stand beside each other in a token, from 0.
      num_tokens: of the sample.
      min_cosine, median_cosine: of the ordinary numbers of a token (``token_dtypes.ordinary_cosines``).
      median_channel_error, max_channel_error: root mean square of a channel's error over that of the channel.
      worst_channel: of the layer, the one with the largest error.
    """

    group: str
    layer: Count
    num_tokens: Count
    min_cosine: Float32
    median_cosine: Float32
    median_channel_error: Float32
    max_channel_error: Float32
    worst_channel: Count


class LatentStatistics(_Model):
    """Mean and standard deviation of each channel as the model sees it, with the variance of a stored posterior.

    ``count``: values of each channel.
    """

    count: Count
    channel_mean: list[Float32]
    channel_std: list[Annotated[float, Field(ge=0, le=3.4e38)]]


class CommitRecord(HashedFile):
    """One written shard: its files, and the rows that were not stored as planned.

    Written after all files of its task; it exists until the revision is sealed.
    """

    HASH = "record_hash"

    format_version: int
    plan: str  # hash of the frozen plan, which names the revision
    part: str  # "buckets/HxW", "captions" or "null_caption"
    shard: int
    files: list[FileEntry]  # shards of each array, then the results of its rows (ROW_RESULTS)
    rejects: list[Reject]
    fallbacks: list[Fallback]
    statistics: LatentStatistics | None = None  # of its latents; absent without latents
    record_hash: str


class Manifest(HashedFile):
    """The sorted merge of all commit records, through which readers open a revision."""

    HASH = "root_hash"

    format_version: int
    revision: Revision
    base: str  # root hash of the revision before, "" for the first
    copies: bool  # its rows were copied from the base, a revision of another store, not encoded
    fingerprint: str
    spec: StoreSpec  # without what differs between machines (``LocalFile``)
    num_planned: Count
    num_stored: Count
    num_rejected: Count
    buckets: dict[BucketName, Count]  # stored records per bucket
    num_captions: Count
    num_caption_tokens: Count
    arrays: list[ArrayLayout]
    files: list[FileEntry]
    root_hash: str
    self_check: SelfCheck | None = None
    quality: list[LayerQuality] = []  # of the int8 groups
    statistics: LatentStatistics | None = None  # of all latents

    def layouts(self) -> dict[str, ArrayLayout]:
        """All arrays by path."""
        return {layout.path: layout for layout in self.arrays}


class Origin(_Model):
    """Where an encoder was loaded from: a folder, relative to the store or absolute, or a hub id with its revision."""

    model: str
    revision: str | None


class LocalFile(HashedFile):
    """``local.json``: what differs between machines that make the same store, in no hash.

    Args:
      origins: of the encoders, by the section of the recipe: "vae", "text", "text.NAME" or "features.NAME".
      recipe: resolved, with the paths of encoders as a store names them.
      listing: hash of the source's listing (keys, sizes, times), to detect changes of the source.
      plan: hash of the plan, which commit records named.
      planned_at: when it was frozen, in seconds since 1970.
      sources: size and hash of the table of the images' places, which has times.
    """

    leandit_version: str
    origins: dict[str, Origin]
    recipe: dict[str, Any]
    listing: str
    plan: str
    planned_at: float
    sources: FileEntry
    sha256: str


class PlanFile(HashedFile):
    """``plan/plan.json``: the frozen plan of a revision, without its tables."""

    format_version: int
    revision: Revision
    base: str
    copies: bool
    listing: str
    plan: str
    spec: StoreSpec
    files: Annotated[list[FileEntry], Field(min_length=2, max_length=2)]
    self_check: SelfCheck | None = None
    shard_rows: dict[str, Count] = {}  # as ``RevisionLayout.shard_rows``
    quality: list[LayerQuality] = []
    sha256: str
