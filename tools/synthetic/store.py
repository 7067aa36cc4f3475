"""Stores of noise for benchmarks, of any size, written by the real plan and writer without an encoder.

Each row is Gaussian noise that begins with its row number, so a reader can check that it got the right row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from ... import __version__
from ...datasets.format.caption_layout import CAPTION_PART, NULL_PART
from ...datasets.format.schema import (
    FORMAT_VERSION,
    EncoderIdentity,
    ImageSpec,
    LatentSpec,
    Manifest,
    StoreSpec,
    TextSpec,
)
from ...datasets.format.table_schemas import PLAN_SCHEMA
from ...datasets.revisions.plan import FrozenPlan, first_plan, freeze_plan
from ...datasets.revisions.writer import StoreWriter, row_checksum

NUMBER_BASE = 2048  # integers up to this are exact in float16
NUMBER_DIGITS = 4
POOL_ROWS = 257  # of noise; a prime, so shards do not repeat each other
DOWNSCALE = 8


def make_store(
    root: Path,
    buckets: Mapping[str, int],
    *,
    channels: int = 4,
    num_classes: int = 1000,
    token_counts: Sequence[int] = (),
    text_width: int = 4096,
    shard_mib: int = 64,
    codec: str = "none",
    seed: int = 0,
) -> Manifest:
    """Write a store of noise: float16 latents, one label and, with ``token_counts``, one caption for each record.

    Args:
      root: of the store; the same arguments resume an unfinished one.
      buckets: number of records by "HxW" in pixels; latents are 8 times smaller.
      token_counts: of the captions, which records take in turn; empty: no captions.
    """
    spec = noise_spec(buckets, channels, num_classes, max(token_counts, default=0), text_width, shard_mib, codec)
    plan = freeze_plan(root, _plan(spec, buckets, num_classes, token_counts, seed))
    writer, layout = StoreWriter(root, plan), plan.layout
    for part, shard in writer.missing_tasks():
        if part == NULL_PART:
            (array,) = layout.part_arrays(part)
            rows = np.zeros(array.shape, array.dtype)
            writer.commit(part, shard, {array.path: rows}, checksums=[row_checksum(rows)])
        elif part == CAPTION_PART:
            _commit_captions(writer, shard, seed)
        else:
            array = layout.part_arrays(part)[0]
            numbers = plan.bucket_positions[part.removeprefix("buckets/")][array.rows_of(shard)]
            rows = numbered_rows(numbers, array.shape[1:], seed)
            checksums = [row_checksum(row) for row in rows]
            writer.commit(part, shard, {array.path: rows}, checksums=checksums, source_checksums=checksums)
    return writer.seal()


def numbered_rows(numbers: np.ndarray, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Rows of noise, (N, *shape) float16, each beginning with its number."""
    pool = np.random.default_rng(seed).standard_normal((POOL_ROWS, int(np.prod(shape)))).astype(np.float16)
    rows = pool[numbers % POOL_ROWS]
    for digit in range(NUMBER_DIGITS):
        rows[:, digit] = numbers // NUMBER_BASE**digit % NUMBER_BASE
    return rows.reshape(len(numbers), *shape)


def _commit_captions(writer: StoreWriter, shard: int, seed: int) -> None:
    layout = writer.plan.layout
    (array,) = layout.part_arrays(CAPTION_PART)
    of_captions = layout.parts[CAPTION_PART].captions
    assert of_captions is not None, "a part of captions"
    first, captions = array.rows_of(shard).start, of_captions.captions_of(shard)
    rows = np.full((len(array.rows_of(shard)), *array.shape[1:]), np.nan, array.dtype)
    checksums = []
    for caption in captions:
        start, length = int(of_captions.offsets[caption]) - first, int(of_captions.num_tokens[caption])
        rows[start : start + length] = numbered_rows(np.full(length, caption), array.shape[1:], seed)
        checksums.append(row_checksum(rows[start : start + length]))
    writer.commit(CAPTION_PART, shard, {array.path: rows}, checksums=checksums)


def _plan(
    spec: StoreSpec, buckets: Mapping[str, int], num_classes: int, token_counts: Sequence[int], seed: int
) -> FrozenPlan:
    count, num_captions = sum(buckets.values()), len(token_counts)
    rows = np.concatenate([np.arange(rows) for rows in buckets.values()])
    nothing, zeros, ones = pa.nulls(count), np.zeros(count, np.int64), np.ones(count, np.int64)
    labels = np.random.default_rng(seed).integers(0, num_classes, count) if num_classes else -ones
    caption_ids = [[i % num_captions] for i in range(count)] if num_captions else [[]] * count
    filled = {
        "key": [f"noise/{number:09d}.jpg" for number in range(count)],
        "bucket": np.repeat(list(buckets), list(buckets.values())),
        "row": rows,
        "label": labels,
        "caption_ids": caption_ids,
        "status": ["planned"] * count,
        "revision": ones,
        "attempts": ones,
        "source_path": [""] * count,
    }
    unknown = {"stage", "reason", "detail", "checksum", "source_checksum", "fallback"}
    columns = {name: filled.get(name, nothing if name in unknown else zeros) for name in PLAN_SCHEMA.names}
    records = pa.table({name: pa.array(v) for name, v in columns.items()}).cast(PLAN_SCHEMA)
    texts = [f"noise {caption}" for caption in range(num_captions)]
    return first_plan(spec, "synthetic", records, texts=texts, num_tokens=sorted(token_counts))


def noise_spec(
    buckets: Mapping[str, int],
    channels: int,
    num_classes: int,
    max_tokens: int,
    text_width: int,
    shard_mib: int,
    codec: str,
) -> StoreSpec:
    """Description of a store of noise."""
    noise = EncoderIdentity(
        model="noise",
        revision=None,
        class_name="Noise",
        config={},
        weights_sha256="0" * 64,
        tokenizer_sha256=None,
        dtype="float32",
        libraries={},
    )
    text = None
    if max_tokens:
        text = TextSpec(kind="t5", width=text_width, max_tokens=max_tokens, dtype="float16", template="", batch_size=64)
    return StoreSpec(
        format_version=FORMAT_VERSION,
        leandit_version=__version__,
        fingerprint="",
        images=ImageSpec(
            resolution_px=256, crop="bucket", buckets=list(buckets), resize_filter="none", colour="none", libraries={}
        ),
        latent=LatentSpec(
            array="latents",
            kind="latent",
            channels=channels,
            stored_channels=channels,
            downscale=DOWNSCALE,
            dtype="float16",
            shift=[0.0] * channels,
            scale=[1.0] * channels,
            flip=False,
            batch_size=32,
            tile_px=0,
        ),
        text=text,
        vae=noise,
        text_encoder=noise if text else None,
        classes=[f"{label:04d}" for label in range(num_classes)] or None,
        shard_mib=shard_mib,
        codec=codec,
        recipe={"vae": {"model": "noise"}, "text": {"model": "noise"}},
    ).with_fingerprint()
