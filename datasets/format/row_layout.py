"""The arrays of a store: paths, and shape and dtype of a row. Pure functions of the spec.

Arrays come in groups. A record has a row in each array of a group of its bucket (latents, a feature, a companion), a
caption has rows in each array of its text encoder; these rows share one checksum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from .buckets import bucket_size
from .schema import CompanionSpec, FeatureSpec, StoreSpec, TextSpec
from .token_dtypes import ON_DISK, SCALE_DTYPE, scale_shape

BUCKETS = "buckets"  # folder of all buckets
LATENTS = ""  # the group of the latents, which every record has
FEATURES, COMPANIONS = "features", "companions"  # folders of the other groups
MASK = "mask"  # array of a companion that is a mask
FLIP = "_flip"  # suffix of the arrays of flipped images
VARIANT = "_v"  # suffix, with its number from 1, of the arrays of a further crop
CAPTION_PART = "captions"  # folder of all text encoders
EMBEDDINGS, SCALES, POOLED = "embeddings", "scales", "pooled"  # arrays of a text encoder
NULL_EMBEDDING, NULL_SCALES, NULL_POOLED = "null", "null_scales", "null_pooled"  # the same for the empty caption
CAPTION_ARRAYS = {EMBEDDINGS, SCALES, POOLED, NULL_EMBEDDING, NULL_SCALES, NULL_POOLED}

MAX_SHARD_ROWS = 8192  # more make reads no faster; a shard's index (16 bytes a row) and results (33) stay small
# Of an array that would have more shards, these are larger: a process maps some 30,000 files at most, and a manifest
# names each. A process that encodes holds a shard in memory.
MAX_SHARDS, LARGEST_SHARD_MIB = 4096, 512

Row = tuple[tuple[int, ...], str]
"""Shape and dtype of a row."""


@dataclass(frozen=True)
class ArrayGroup:
    """Arrays whose rows of a record or caption share a checksum.

    Args:
      rows: row of each array, by path within the store, in the order of the checksum.
      bucket: of records; "" for captions.
      name: of the text encoder, the feature or the companion; LATENTS.
      is_null: it holds the empty caption.
    """

    rows: Mapping[str, Row]
    bucket: str
    name: str
    is_null: bool = False


def array_groups(spec: StoreSpec, buckets: Iterable[str]) -> dict[str, ArrayGroup]:
    """The group of each array that a store of these buckets may have, by path."""
    groups = list[ArrayGroup]()
    for bucket in buckets:
        for name in (LATENTS, *spec.groups):
            rows = {f"{bucket_part(bucket)}/{path}": row for path, row in row_arrays(spec, bucket, name).items()}
            groups.append(ArrayGroup(rows, bucket, name))
    for one in spec.text_encoders:
        folder, rows = caption_folder(one.name), caption_rows(one.spec)
        groups.append(ArrayGroup({f"{folder}/{name}": row for name, row in rows.items()}, "", one.name))
        null = {f"{folder}/{null_array(name)}": row for name, row in rows.items()}
        groups.append(ArrayGroup(null, "", one.name, is_null=True))
    return {path: group for group in groups for path in group.rows}


def bucket_part(bucket: str) -> str:
    """Name of the part, and folder, of a bucket."""
    return f"{BUCKETS}/{bucket}"


def buckets_of(arrays: Iterable[str]) -> set[str]:
    """Buckets that have one of some arrays, which are named by their paths."""
    return {path.split("/")[1] for path in arrays if path.startswith(f"{BUCKETS}/")}


def row_arrays(spec: StoreSpec, bucket: str, group: str) -> dict[str, Row]:
    """The row of each array of a group, by path within the bucket's folder, in order.

    Args:
      group: LATENTS, or the name of a feature or of a companion.
    """
    latents = {spec.latent.array: (latent_shape(spec, bucket), spec.latent.dtype)}
    arrays = latents if group == LATENTS else {}
    for one in spec.features:
        if one.name == group:
            arrays = {f"{FEATURES}/{group}/{name}": row for name, row in feature_rows(one.spec, bucket).items()}
    for one in spec.companions:
        if one.name == group:
            arrays = {f"{COMPANIONS}/{group}/{name}": row for name, row in companion_rows(spec, one, bucket).items()}
    return {f"{path}{suffix}": row for suffix in view_suffixes(spec) for path, row in arrays.items()}


def view_suffix(variant: int = 0, *, flipped: bool = False) -> str:
    """Suffix of the arrays of a crop of the images, 0 for the planned one, or of the same crop flipped."""
    return f"{f'{VARIANT}{variant}' if variant else ''}{FLIP if flipped else ''}"


def view_suffixes(spec: StoreSpec) -> list[str]:
    """Suffixes of the arrays of all views of an image, in order: each crop, then the same flipped if that is stored."""
    flips = (False, True) if spec.latent.flip else (False,)
    return [view_suffix(variant, flipped=flipped) for variant in range(spec.images.variants) for flipped in flips]


def latent_shape(spec: StoreSpec, bucket: str) -> tuple[int, int, int]:
    """Shape of a row of latents: channels, height, width."""
    height_px, width_px = bucket_size(bucket)
    latent = spec.latent
    return latent.row_channels, height_px // latent.downscale, width_px // latent.downscale


def feature_rows(spec: FeatureSpec, bucket: str) -> dict[str, Row]:
    """The row of each array of a feature, by name, in order.

    ``patches`` (T, D) and ``cls`` (D,); for int8 also ``patch_scales`` (T, 1, groups) and ``cls_scales`` (1, groups).
    """
    rows, columns = spec.grid(*bucket_size(bucket))
    arrays: dict[str, Row] = {}
    for name, scales, shape in (("patches", "patch_scales", (rows * columns,)), ("cls", "cls_scales", ())):
        if spec.output in (name, "both"):
            arrays[name] = (*shape, spec.width), spec.dtype
            if spec.dtype == "int8":
                arrays[scales] = (*shape, *scale_shape(spec.width)), SCALE_DTYPE
    return arrays


def companion_rows(spec: StoreSpec, image: CompanionSpec, bucket: str) -> dict[str, Row]:
    """The row of the array of a companion, by name: as the latents, or ``mask`` (H, W)."""
    shape = latent_shape(spec, bucket)
    if image.kind == MASK:
        return {MASK: (shape[1:], "uint8")}
    return {spec.latent.array: (shape, spec.latent.dtype)}


def caption_folder(name: str) -> str:
    """Folder of a text encoder's arrays; ``name`` is empty for that of ``[text]``."""
    return f"{CAPTION_PART}/{name}" if name else CAPTION_PART


def caption_rows(spec: TextSpec) -> dict[str, Row]:
    """The row of each array of a text encoder, by name, in the order of a caption's checksum."""
    rows: dict[str, Row] = {}
    if spec.has_tokens:
        rows[EMBEDDINGS] = (spec.width,), ON_DISK[spec.dtype]
        if spec.dtype == "int8":
            rows[SCALES] = scale_shape(spec.width, spec.num_layers), SCALE_DTYPE
    if spec.pooled_width:
        rows[POOLED] = (spec.pooled_width,), ON_DISK[spec.pooled_dtype]
    return rows


def row_bytes(row: Row) -> int:
    """Bytes of a row before compression."""
    shape, dtype = row
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def shard_rows(row_bytes: int, shard_mib: int, num_rows: int) -> int:
    """Most rows of a shard, for an array of so many rows."""
    return larger_shard(max(1, min(MAX_SHARD_ROWS, (shard_mib << 20) // row_bytes)), row_bytes, num_rows)


def larger_shard(rows: int, row_bytes: int, num_rows: int) -> int:
    """Rows of a shard, doubled while the array would have more than MAX_SHARDS and they fit LARGEST_SHARD_MIB."""
    while num_rows > MAX_SHARDS * rows and 2 * rows * row_bytes <= LARGEST_SHARD_MIB << 20:
        rows *= 2
    return rows


def null_array(name: str) -> str:
    """The array of the empty caption beside one of EMBEDDINGS, SCALES and POOLED."""
    return {EMBEDDINGS: NULL_EMBEDDING, SCALES: NULL_SCALES, POOLED: NULL_POOLED}[name]


def num_stored_tokens(spec: TextSpec, num_tokens: pa.ChunkedArray) -> np.ndarray:
    """(num_captions,) rows of each caption: its tokens, or max_tokens where the padding is stored too.

    Args:
      num_tokens: (num_captions,) from the captions table.
    """
    return np.full(len(num_tokens), spec.max_tokens, np.int32) if spec.full_length else num_tokens.to_numpy()


def pooled_rows(spec: TextSpec, starts: np.ndarray) -> np.ndarray:
    """Row of each caption's pooled vector, from its start: captions that have both are stored at full length."""
    return starts // spec.max_tokens if spec.has_tokens else starts
