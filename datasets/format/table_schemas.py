"""The columns of a store's Parquet tables, and the closed list of reasons for a reject."""

from __future__ import annotations

import pyarrow as pa

REJECT_REASONS = {
    "unreadable": "the file cannot be opened or read",
    "missing_file": "the metadata names a file that is not there",
    "bad_metadata": "the metadata of the record is not usable",
    "duplicate_key": "an earlier record has the same key",
    "no_caption": "the recipe wants captions and the record has none",
    "not_an_image": "the bytes are no picture of a known format",
    "truncated": "the picture ends too early",
    "decode_error": "the decoder refused the picture",
    "decoder_crash": "the process that decoded the picture died of it",
    "decoder_timeout": "the decoder did not come to an end in its time",
    "unsupported_mode": "the pixels have no defined meaning as RGB (32-bit or float)",
    "too_small": "the shorter side has fewer pixels than images.min_px",
    "too_large": "more pixels, or more memory for them, than the limit",
    "aspect": "the ratio of height to width is outside the bucket table",
    "source_changed": "the file is not the one that was planned",
    "wrong_size": "the picture has not the size that it was planned with",
    "nonfinite": "the encoder gave NaN or infinity, in its own dtype and in float32; or what was imported holds them",
    "out_of_memory": "the device has not the memory to encode this picture alone",
    "wrong_shape": "what was imported has another shape or dtype than the other records",
    "no_label": "the other records that are imported have a label, this one has none",
}

RECORDS_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("revision", pa.int32()),  # that encoded or rejected it: its arrays hold the row
        ("bucket", pa.string()),  # "HxW" in pixels; null where the record was rejected at scan
        ("row", pa.int64()),  # row of the revision's arrays of the bucket; -1 where rejected at scan
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
        ("attempts", pa.int32()),  # how often it was tried; more than 1 after --retry-rejected
        ("checksum", pa.uint64()),  # XXH3-64 of the record's row in each latent array, in order; null if not stored
        ("source_checksum", pa.uint64()),  # XXH3-64 of the picture's file as it was encoded; null if not stored
        ("fallback", pa.string()),  # how it was encoded where not as planned (Fallback.how); else null
    ]
)

PLAN_SCHEMA = pa.schema(  # of the records table of a plan
    [
        *RECORDS_SCHEMA,
        ("source_path", pa.string()),  # where the picture lies, relative to the source
        ("source_offset", pa.int64()),
        ("source_bytes", pa.int64()),
        ("source_mtime_ns", pa.int64()),
    ]
)

CAPTIONS_SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("revision", pa.int32()),  # whose arrays hold its tokens
        ("num_tokens", pa.int32()),  # as the tokenizer counts them, cut at max_tokens
        ("truncated", pa.bool_()),  # the caption had more tokens than max_tokens
        ("checksum", pa.uint64()),  # XXH3-64 of its rows in each caption array, in order
        ("min_cosine", pa.float32()),  # smallest of a token with what is stored of it; null where nothing was narrowed
        ("max_error", pa.float32()),  # largest absolute difference of the same; null likewise
    ]
)
CAPTION_RESULTS = ("checksum", "min_cosine", "max_error")  # columns that encoding fills in
