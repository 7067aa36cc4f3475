"""Stores of noise for benchmarks, of any size, written by the real plan and writer without an encoder.

Each row is Gaussian noise that begins with its row number, so a reader can check that it got the right row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from leandit.datasets.format.layout import Part
from leandit.datasets.format.row_layout import LATENTS, POOLED
from leandit.datasets.format.schema import FeatureSpec, Manifest, StoreSpec, TextSpec
from leandit.datasets.format.table_schemas import PLAN_SCHEMA, STORED, plan_schema
from leandit.datasets.format.token_dtypes import INT8_LIMIT
from leandit.datasets.format.zarr_shard import ArrayLayout
from leandit.datasets.revisions.commits import new_results
from leandit.datasets.revisions.plan import FrozenPlan, first_plan, freeze_plan
from leandit.datasets.revisions.writer import StoreWriter, row_checksum
from leandit.tools.plan.noise_spec import DOWNSCALE, RESOLUTION_PX, noise_spec

NUMBER_BASE = 2048  # integers up to this are exact in float16
NUMBER_DIGITS = 4
POOL_ROWS = 257  # of noise; a prime, so shards do not repeat each other


def make_store(
    root: Path,
    buckets: Mapping[str, int],
    *,
    channels: int = 4,
    num_classes: int = 1000,
    token_counts: Sequence[int] = (),
    text_width: int = 4096,
    text_dtype: str = "float16",
    texts: Mapping[str, TextSpec] = {},
    features: Mapping[str, FeatureSpec] = {},
    shard_mib: int = 64,
    codec: str = "none",
    downscale: int = DOWNSCALE,
    resolution_px: int = RESOLUTION_PX,
    seed: int = 0,
) -> Manifest:
    """Write a store of noise: float16 latents, one label and, with ``token_counts``, one caption for each record.

    Args:
      root: of the store; the same arguments resume an unfinished one.
      buckets: number of records by "HxW" in pixels.
      downscale: pixels of a side of a latent place.
      resolution_px: that the store says it was made for.
      token_counts: of the captions, which records take in turn; empty: no captions.
      text_width, text_dtype: of ``[text]``; "float16" or "int8". A width of 0: there is no ``[text]``.
      texts: further text encoders, by name, of the same captions; float16, float32 or int8.
      features: image features, by name.
    """
    images: dict[str, Any] = {"downscale": downscale, "resolution_px": resolution_px}
    text: dict[str, Any] = {"text_dtype": text_dtype, "texts": texts, "features": features}
    longest = max(token_counts, default=0)
    spec = noise_spec(buckets, channels, num_classes, longest, text_width, shard_mib, codec, **text, **images)
    plan = freeze_plan(root, _plan(spec, buckets, num_classes, token_counts, seed))
    writer = StoreWriter(root, plan)
    for name, shard in writer.missing_tasks():
        part = plan.layout.parts[name]
        if part.is_null:
            rows = {array.path: np.zeros(array.shape, array.dtype) for array in part.arrays}
            writer.commit(name, shard, rows, _results(part, [row_checksum(*rows.values())]))
        elif part.captions:
            _commit_captions(writer, part, shard, seed)
        else:
            _commit_images(writer, part, shard, seed)
    return writer.seal()


def _noise(array: ArrayLayout, numbers: np.ndarray, seed: int) -> np.ndarray:
    """(N, ...) rows of an array in its dtype: scales, int8 tokens, or floats that begin with the row's number."""
    shape, rng = (len(numbers), *array.shape[1:]), np.random.default_rng(seed)
    pool_shape = POOL_ROWS, int(np.prod(shape[1:]))
    if array.path.endswith("scales"):
        scales = ((1 + numbers % POOL_ROWS) / POOL_ROWS).astype(array.dtype)
        return np.broadcast_to(scales.reshape(-1, *[1] * (len(shape) - 1)), shape).copy()
    if array.dtype == "int8":
        return rng.integers(-INT8_LIMIT, INT8_LIMIT + 1, pool_shape, np.int8)[numbers % POOL_ROWS].reshape(shape)
    rows = rng.standard_normal(pool_shape).astype(np.float16)[numbers % POOL_ROWS]
    for digit in range(NUMBER_DIGITS):
        rows[:, digit] = numbers // NUMBER_BASE**digit % NUMBER_BASE
    return rows.reshape(shape).astype(array.dtype, copy=False)


def _commit_images(writer: StoreWriter, part: Part, shard: int, seed: int) -> None:
    latents = part.groups[LATENTS][0]
    numbers = writer.plan.positions_of(part)[latents.rows_of(shard)]
    arrays, checksums = {}, []
    for layouts in part.groups.values():
        rows = [_noise(array, numbers, seed) for array in layouts]
        arrays |= {array.path: values for array, values in zip(layouts, rows, strict=True)}
        checksums.append([row_checksum(*parts) for parts in zip(*rows, strict=True)])
    results = _results(part, np.array(checksums, np.uint64).T)
    results["source_checksum"] = results["checksum"]
    writer.commit(part.name, shard, arrays, results)


def _results(part: Part, checksums: Sequence[int] | np.ndarray) -> np.ndarray:
    """Results of stored rows, from their checksums, (rows,) or (rows, groups)."""
    results = new_results(part, len(checksums))
    results["state"] = STORED
    results["checksum"] = np.array(checksums, np.uint64).reshape(results.shape)
    return results


def _commit_captions(writer: StoreWriter, part: Part, shard: int, seed: int) -> None:
    of_captions = part.captions
    assert of_captions is not None, "a part of captions"
    arrays = {}
    for array in part.arrays:
        gap = np.nan if np.issubdtype(array.dtype, np.floating) else 0
        arrays[array.path] = np.full((len(array.rows_of(shard)), *array.shape[1:]), gap, array.dtype)
    checksums = []
    for caption in of_captions.captions_of(shard):
        written = []
        for array, start in zip(part.arrays, of_captions.starts_of(caption), strict=True):
            length = 1 if array.path.endswith(f"/{POOLED}") else int(of_captions.num_tokens[caption])
            first = start - array.rows_of(shard).start
            rows = _noise(array, np.full(length, caption), seed)
            arrays[array.path][first : first + length] = rows
            written.append(rows)
        checksums.append(row_checksum(*written))
    writer.commit(part.name, shard, arrays, _results(part, checksums))


def _plan(
    spec: StoreSpec, buckets: Mapping[str, int], num_classes: int, token_counts: Sequence[int], seed: int
) -> FrozenPlan:
    count, num_captions = sum(buckets.values()), len(token_counts)
    nothing, zeros, ones = pa.nulls(count), np.zeros(count, np.int64), np.ones(count, np.int64)
    filled = {
        "key": [f"noise/{number:09d}.jpg" for number in range(count)],
        "bucket": np.repeat(list(buckets), list(buckets.values())),
        "row": np.concatenate([np.arange(rows) for rows in buckets.values()]),
        "label": np.random.default_rng(seed).integers(0, num_classes, count) if num_classes else -ones,
        "caption_ids": [[i % num_captions] for i in range(count)] if num_captions else [[]] * count,
        "status": ["planned"] * count,
        "revision": ones,
        "attempts": ones,
        "source_path": [""] * count,
    }
    filled |= dict.fromkeys(("stage", "reason", "detail", "checksum", "source_checksum", "fallback"), nothing)
    schema = plan_schema(spec)
    columns = {name: filled.get(name, zeros if name in PLAN_SCHEMA.names else nothing) for name in schema.names}
    records = pa.table({name: pa.array(values) for name, values in columns.items()}).cast(schema)
    texts, lengths = [f"noise {caption}" for caption in range(num_captions)], sorted(token_counts)
    counts = {
        one.name: [one.spec.max_tokens if one.spec.full_length else min(n, one.spec.max_tokens) for n in lengths]
        for one in spec.text_encoders
    }
    of_first = counts.pop(next(iter(counts))) if counts else lengths
    return first_plan(spec, "synthetic", records, texts=texts, num_tokens=of_first, further=counts)
