"""The columns of a store's Parquet tables, and the closed list of reasons for a reject."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from .schema import StoreSpec

NONFINITE_CAPTION, LOW_QUALITY = "nonfinite_caption", "low_quality"  # rejects of captions, and so of their records
REJECT_REASONS = {
    "unreadable": "the file cannot be opened or read",
    "missing_file": "the metadata names a file that does not exist",
    "bad_metadata": "the metadata of the record is not valid",
    "duplicate_key": "an earlier record has the same key",
    "no_caption": "the recipe encodes captions and the record has none",
    "not_an_image": "the bytes are not an image of a known format",
    "truncated": "the image ends too early",
    "decode_error": "the decoder cannot read the image",
    "decoder_crash": "the process that decoded the image crashed",
    "decoder_timeout": "the decoder did not finish in time",
    "unsupported_mode": "the pixels have no defined meaning as RGB (32-bit or float)",
    "too_small": "the shorter side has fewer pixels than images.min_px",
    "too_large": "more pixels, or more memory, than the limit",
    "aspect": "the ratio of height to width is outside the bucket table",
    "source_changed": "the file has changed since it was planned",
    "wrong_size": "the image size differs from the planned one",
    "nonfinite": "the encoder produced NaN or infinity, in its own dtype and in float32; or imported features hold it",
    NONFINITE_CAPTION: "a text encoder produced NaN or infinity for one of the record's captions, in float32 too",
    LOW_QUALITY: "a caption loses more than store.min_text_cosine allows when it is stored in a narrower dtype",
    "out_of_memory": "the device lacks the memory to encode this image alone",
    "wrong_shape": "imported features differ in shape or dtype from the other records'",
    "no_label": "other imported records have a label, this one has none",
}

RECORDS_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("revision", pa.int32()),  # that encoded or rejected it
        ("bucket", pa.string()),  # "HxW" in pixels; null if the record was rejected at scan
        ("row", pa.int64()),  # of the arrays of the bucket; -1 if rejected at scan
        ("label", pa.int64()),  # class index, -1 for none
        ("caption_ids", pa.list_(pa.int32())),
        ("height_px", pa.int32()),  # of the source image, upright
        ("width_px", pa.int32()),
        ("resized_height_px", pa.int32()),  # after the resize, before the crop
        ("resized_width_px", pa.int32()),
        ("crop_top_px", pa.int32()),  # of the crop, in the resized image
        ("crop_left_px", pa.int32()),
        ("status", pa.string()),  # "stored" or "rejected" ("planned" while the store is incomplete)
        ("stage", pa.string()),  # of a reject: "scan", "decode" or "encode"
        ("reason", pa.string()),  # of a reject: one of REJECT_REASONS
        ("detail", pa.string()),
        ("attempts", pa.int32()),  # how often it was tried; more than 1 after --retry-rejected
        ("checksum", pa.uint64()),  # XXH3-64 of the record's row in each latent array, in order; null if not stored
        ("source_checksum", pa.uint64()),  # XXH3-64 of the image's file as it was encoded; null if not stored
        ("fallback", pa.string()),  # how it was encoded, if not as planned (Fallback.how); else null
    ]
)

PLAN_SCHEMA = pa.schema(  # of the records table of a plan
    [
        *RECORDS_SCHEMA,
        ("source_path", pa.string()),  # location of the image, relative to the source
        ("source_offset", pa.int64()),
        ("source_bytes", pa.int64()),
        ("source_mtime_ns", pa.int64()),
    ]
)

CAPTIONS_SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("revision", pa.int32()),  # that added it
        ("num_tokens", pa.int32()),  # by the tokenizer, at most max_tokens
        ("truncated", pa.bool_()),  # the caption had more tokens than max_tokens
        ("start", pa.int64()),  # first row of its tokens; of pooled vectors alone, its row; null in a plan
        ("checksum", pa.uint64()),  # XXH3-64 of its rows in each caption array, in order; null if they are not finite
        ("min_cosine", pa.float32()),  # smallest of ``ordinary_cosines``; null if stored exactly
        ("max_error", pa.float32()),  # largest absolute difference of a number; null likewise
    ]
)
# Columns of the source image and its crop.
PLACEMENT = ("height_px", "width_px", "resized_height_px", "resized_width_px", "crop_top_px", "crop_left_px")
CAPTION_RESULTS = ("checksum", "min_cosine", "max_error")  # columns that encoding fills in
CAPTION_COUNTS = ("num_tokens", "truncated")  # columns of a text encoder that planning fills in
CAPTION_START = "start"  # column that the layout fills in

COMPANION_RESULTS = ("checksum", "source_checksum")  # columns of a companion image, as those of the record itself
PLACES = ("source_path", "source_offset", "source_bytes", "source_mtime_ns")  # columns of a plan: of an image's file

# Results of one row of one group of arrays, in the binary files beside commit records.
ROW_RESULTS = np.dtype(
    [
        ("state", "u1"),  # of ROW_STATES
        ("checksum", "<u8"),  # XXH3-64 of its row in each array of the group, in order
        ("source_checksum", "<u8"),  # XXH3-64 of the image's file; 0 if it has none
        ("min_cosine", "<f4"),  # NaN if it was not narrowed
        ("max_error", "<f4"),
        ("height_px", "<i4"),  # of the source image as it was decoded; 0 if it has none
        ("width_px", "<i4"),
    ]
)
EMPTY, STORED, REJECTED = 0, 1, 2  # states: no record has the row; its results count; a reject names it


def index_names(spec: StoreSpec) -> list[str]:
    """Names of the arrays in the folder ``index`` of a revision (FORMAT.md, section 5)."""
    checksums = ["checksum", *(f"checksum_{name}" for name in spec.groups)]
    captions = [f"caption_{what}{s}" for s in suffixes(spec).values() for what in ("start", "length", "checksum")]
    return ["rows", "records", "labels", "caption_starts", "caption_ids", "keys", *checksums, *captions]


def suffixes(spec: StoreSpec) -> dict[str, str]:
    """Suffix of the columns of each text encoder in the captions table; the first one's have none."""
    return {one.name: f"_{one.name}" if i else "" for i, one in enumerate(spec.text_encoders)}


def records_schema(spec: StoreSpec) -> pa.Schema:
    """RECORDS_SCHEMA and the columns of features and companions.

    Of a feature ``checksum_NAME``, ``min_cosine_NAME``, ``max_error_NAME``; of a companion image ``checksum_NAME``,
    ``source_checksum_NAME``.
    """
    return _with_groups(RECORDS_SCHEMA, spec, COMPANION_RESULTS)


def plan_schema(spec: StoreSpec) -> pa.Schema:
    """Columns of the records table of a plan: those of ``records_schema``, and the PLACES of each image."""
    return _with_groups(PLAN_SCHEMA, spec, (*COMPANION_RESULTS, *PLACES))


def sources_schema(spec: StoreSpec) -> pa.Schema:
    """PLACES of each record's image, then those of its companions: what a plan has beyond the records table."""
    schema = plan_schema(spec)
    return pa.schema([schema.field(name) for name in [*PLACES, *(name for one in place_columns(spec) for name in one)]])


def place_columns(spec: StoreSpec) -> list[list[str]]:
    """The PLACES of each companion image, by their names in a plan."""
    return [[f"{name}_{one.name}" for name in PLACES] for one in spec.companions]


def captions_schema(spec: StoreSpec) -> pa.Schema:
    """CAPTIONS_SCHEMA, and of each text encoder but the first the same columns with its name: ``num_tokens_NAME``."""
    return captions_schema_of(suffix for suffix in suffixes(spec).values() if suffix)


def captions_schema_of(further: Iterable[str]) -> pa.Schema:
    """``captions_schema`` from the suffixes of all text encoders but the first."""
    return _with_columns(CAPTIONS_SCHEMA, (*CAPTION_COUNTS, CAPTION_START, *CAPTION_RESULTS), further)


def _with_groups(schema: pa.Schema, spec: StoreSpec, of_companions: Iterable[str]) -> pa.Schema:
    features = _with_columns(schema, CAPTION_RESULTS, (f"_{one.name}" for one in spec.features))
    return _with_columns(features, of_companions, (f"_{one.name}" for one in spec.companions), PLAN_SCHEMA)


def _with_columns(
    schema: pa.Schema, columns: Iterable[str], suffixes: Iterable[str], types: pa.Schema = CAPTIONS_SCHEMA
) -> pa.Schema:
    columns = list(columns)
    added = [(f"{name}{suffix}", types.field(name).type) for suffix in suffixes for name in columns]
    return pa.schema([*schema, *added])
