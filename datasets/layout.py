"""Where everything lies in a store: paths, arrays with their shard and chunk sizes, the list of shard tasks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .buckets import bucket_size
from .schema import StoreSpec
from .shards import ArrayLayout

MANIFEST = "manifest.json"
RECORDS = "records.parquet"
CAPTIONS = "captions.parquet"
PLAN = "plan/plan.json"
PLAN_RECORDS = "plan/records.parquet"
PLAN_CAPTIONS = "plan/captions.parquet"

CAPTION_PART = "captions"
NULL_PART = "null_caption"
EMBEDDINGS = "captions/embeddings"
NULL_EMBEDDING = "captions/null"
OFFSETS = "captions/offsets"
LENGTHS = "captions/lengths"

# More rows make no read faster; a shard's index (16 bytes a row) and commit record (19 bytes a row) stay small.
MAX_SHARD_ROWS = 8192
TOKEN_CHUNK_BYTES = 1 << 16  # tokens are small: 64 KiB of them share a Zarr chunk


def bucket_part(bucket: str) -> str:
    """Name of the part, and folder, of a bucket."""
    return f"buckets/{bucket}"


def commit_path(part: str, shard: int) -> str:
    """Path of a shard task's commit record within the store."""
    return f"commits/{part}/{shard:06d}.json"


def latent_layouts(spec: StoreSpec, bucket: str, num_rows: int) -> list[ArrayLayout]:
    """Arrays of one bucket: the latents or moments, then the flipped ones where the store has them."""
    height_px, width_px = bucket_size(bucket)
    latent = spec.latent
    shape = (num_rows, latent.stored_channels, height_px // latent.downscale, width_px // latent.downscale)
    row_bytes = int(np.prod(shape[1:])) * np.dtype(latent.dtype).itemsize
    shard_rows = max(1, min(MAX_SHARD_ROWS, (spec.shard_mib << 20) // row_bytes))
    names = [latent.array, f"{latent.array}_flip"] if latent.flip else [latent.array]
    return [
        ArrayLayout(f"{bucket_part(bucket)}/{name}", shape, latent.dtype, shard_rows, codec=spec.codec)
        for name in names
    ]


def embedding_layout(spec: StoreSpec, num_token_rows: int) -> ArrayLayout:
    """Array of all caption tokens, (rows, D)."""
    assert spec.text is not None
    row_bytes = spec.text.width * np.dtype(spec.text.dtype).itemsize
    chunk_rows = max(1, TOKEN_CHUNK_BYTES // row_bytes)
    # A shard holds at least one caption of full length, since no caption straddles two shards.
    shard_rows = max((spec.shard_mib << 20) // row_bytes, spec.text.max_tokens)
    shard_rows = -(-shard_rows // chunk_rows) * chunk_rows
    shape = (num_token_rows, spec.text.width)
    return ArrayLayout(EMBEDDINGS, shape, spec.text.dtype, shard_rows, chunk_rows, spec.codec)


def null_layout(spec: StoreSpec) -> ArrayLayout:
    """Array of the null caption at full length, (max_tokens, D): one shard of one chunk."""
    assert spec.text is not None
    tokens = spec.text.max_tokens
    return ArrayLayout(NULL_EMBEDDING, (tokens, spec.text.width), spec.text.dtype, tokens, tokens)


def index_layouts(num_captions: int) -> list[ArrayLayout]:
    """Arrays that say where each caption's tokens lie: first row, and number of rows."""
    rows = max(num_captions, 1)
    return [
        ArrayLayout(OFFSETS, (num_captions,), "int64", rows, rows),
        ArrayLayout(LENGTHS, (num_captions,), "int64", rows, rows),
    ]


def place_captions(num_tokens: Sequence[int] | np.ndarray, shard_rows: int) -> np.ndarray:
    """First row of each caption's tokens: one after the other, but none straddles two shards.

    A caption that does not fit into the rest of a shard begins the next one; the rows between hold NaN and belong to no
    caption. So each shard can be encoded alone, and each caption is one contiguous view.

    Returns: (num_captions,) int64.
    """
    offsets = np.empty(len(num_tokens), np.int64)
    position = 0
    for i, length in enumerate(num_tokens):
        room = shard_rows - position % shard_rows
        if length > room:
            position += room
        offsets[i] = position
        position += int(length)
    return offsets


def store_layouts(
    spec: StoreSpec, bucket_rows: Mapping[str, int], offsets: np.ndarray, num_tokens: np.ndarray
) -> list[ArrayLayout]:
    """All arrays of a store, given the rows of each bucket and where the captions lie."""
    layouts = [layout for bucket, rows in bucket_rows.items() for layout in latent_layouts(spec, bucket, rows)]
    if spec.text:
        num_token_rows = int(offsets[-1] + num_tokens[-1]) if len(offsets) else 0
        layouts += [embedding_layout(spec, num_token_rows), null_layout(spec), *index_layouts(len(offsets))]
    return layouts


def shard_tasks(spec: StoreSpec, bucket_rows: Mapping[str, int], num_token_rows: int) -> list[tuple[str, int]]:
    """All (part, shard) that a store needs, in the order in which they are made."""
    tasks = []
    if spec.text:
        tasks.append((NULL_PART, 0))
        tasks += [(CAPTION_PART, i) for i in range(embedding_layout(spec, num_token_rows).num_shards)]
    for bucket, rows in bucket_rows.items():
        tasks += [(bucket_part(bucket), i) for i in range(latent_layouts(spec, bucket, rows)[0].num_shards)]
    return tasks
