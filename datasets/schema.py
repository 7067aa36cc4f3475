"""What a store says of itself: the attributes of its root group, its commit records, its manifest, its tables.

``FORMAT.md`` is the norm; these models are its reading in Python.
"""

from __future__ import annotations

from typing import Any, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from .files import sha256_of

FORMAT_VERSION = 1

REJECT_REASONS = {
    "unreadable": "the file cannot be opened or read",
    "missing_file": "the metadata names a file that is not there",
    "bad_metadata": "the metadata of the record is not usable",
    "duplicate_key": "an earlier record has the same key",
    "no_caption": "the recipe wants captions and the record has none",
    "not_an_image": "the bytes are no picture of a known format",
    "truncated": "the picture ends too early",
    "decode_error": "the decoder refused the picture",
    "unsupported_mode": "the pixels have no defined meaning as RGB (32-bit or float)",
    "too_large": "more pixels than the limit",
    "aspect": "the ratio of height to width is outside the bucket table",
    "source_changed": "the file is not the one that was planned",
    "nonfinite": "the encoder gave NaN or infinity, in its own dtype and in float32",
}

RECORDS_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("bucket", pa.string()),  # "HxW" in pixels; null where the record was rejected at scan
        ("row", pa.int64()),  # row of the bucket's arrays; -1 where rejected at scan
        ("label", pa.int64()),  # class index, -1 for none
        ("caption_ids", pa.list_(pa.int32())),
        ("height_px", pa.int32()),  # of the source picture, upright
        ("width_px", pa.int32()),
        ("resized_height_px", pa.int32()),  # after the resize, before the crop
        ("resized_width_px", pa.int32()),
        ("crop_top_px", pa.int32()),  # of the crop, in the resized picture
        ("crop_left_px", pa.int32()),
        ("status", pa.string()),  # "stored" or "rejected" ("planned" while the store is incomplete)
        ("stage", pa.string()),  # of a reject: "scan", "decode" or "encode"
        ("reason", pa.string()),  # of a reject: one of REJECT_REASONS
        ("detail", pa.string()),
        ("checksum", pa.uint64()),  # XXH3-64 of the record's row in each latent array, in order; null if not stored
    ]
)

CAPTIONS_SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("num_tokens", pa.int32()),  # as the tokenizer counts them, cut at max_tokens
        ("truncated", pa.bool_()),  # the caption had more tokens than max_tokens
        ("checksum", pa.uint64()),  # XXH3-64 of its rows
    ]
)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class EncoderIdentity(_Model):
    """Which encoder made the bytes. ``model`` and ``revision`` say where it came from; the hashes say what it was."""

    model: str
    revision: str | None
    class_name: str
    config: dict[str, Any]
    weights_sha256: str
    tokenizer_sha256: str | None
    dtype: str
    libraries: dict[str, str]


class ImageSpec(_Model):
    """How a picture became pixels."""

    resolution_px: int
    crop: str
    buckets: list[str]
    resize_filter: str
    colour: str


class LatentSpec(_Model):
    """What the rows of the latent arrays are, and how a row becomes the model's input: (z - shift) * scale."""

    array: Literal["moments", "latents"]
    kind: Literal["mean_logvar", "mean", "sample", "latent"]
    channels: int
    stored_channels: int
    downscale: int
    dtype: str
    shift: list[float]
    scale: list[float]
    flip: bool
    batch_size: int


class TextSpec(_Model):
    """What the caption embeddings are."""

    kind: Literal["t5"]
    width: int
    max_tokens: int
    dtype: str
    template: str
    batch_size: int


class StoreSpec(_Model):
    """The ``leandit`` attribute of the store's root group."""

    format_version: int
    leandit_version: str
    fingerprint: str
    images: ImageSpec
    latent: LatentSpec
    text: TextSpec | None
    vae: EncoderIdentity
    text_encoder: EncoderIdentity | None
    classes: list[str] | None
    shard_mib: int
    codec: str
    recipe: dict[str, Any]

    def identity(self) -> dict[str, Any]:
        """Everything that changes the bytes of a record, and nothing else: what the fingerprint hashes."""
        elsewhere = {"fingerprint", "leandit_version", "classes", "recipe"}
        where_from = {"model", "revision"}
        return self.model_dump(exclude=elsewhere | {"vae", "text_encoder"}) | {
            "vae": self.vae.model_dump(exclude=where_from),
            "text_encoder": self.text_encoder and self.text_encoder.model_dump(exclude=where_from),
        }

    def with_fingerprint(self) -> StoreSpec:
        """The same spec with its fingerprint filled in."""
        return self.model_copy(update={"fingerprint": sha256_of(self.identity())})


class FileEntry(_Model):
    """One file of the store: its path relative to the store, its size and its XXH3-128."""

    path: str
    bytes: int
    xxh3_128: str


class Reject(_Model):
    """One record refused after the plan was frozen; its row holds NaN."""

    row: int
    key: str
    stage: str
    reason: str
    detail: str


class CommitRecord(_Model):
    """Written last, after all files of one shard task: these rows are there, and this is what they are."""

    format_version: int
    fingerprint: str
    plan: str  # hash of the frozen plan
    part: str  # "buckets/HxW", "captions" or "null_caption"
    shard: int
    files: list[FileEntry]
    checksums: list[str]  # 16 hex digits per row (or caption) of the shard; "" where rejected
    rejects: list[Reject]


class Manifest(_Model):
    """The sorted merge of all commit records: readers open the store through it."""

    format_version: int
    fingerprint: str
    plan: str
    num_planned: int
    num_stored: int
    num_rejected: int
    buckets: dict[str, int]  # stored records per bucket
    num_captions: int
    num_caption_tokens: int
    files: list[FileEntry]
    root_hash: str

    def with_root_hash(self) -> Manifest:
        """The same manifest with the hash of all the rest filled in."""
        return self.model_copy(update={"root_hash": sha256_of(self.model_dump(exclude={"root_hash"}))})
