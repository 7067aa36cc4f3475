"""What a precompute will take, told by ``--dry-run``: bytes on disk, hours and memory, from a probe of some records."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ..datasets.buckets import resize_filter
from ..datasets.errors import RecordRejected, ResourceError
from ..datasets.layout import latent_layouts
from ..datasets.schema import StoreSpec
from ..datasets.text_dtypes import token_bytes
from ..precompute.caption_plan import plan_captions
from ..precompute.caption_task import caption_batches
from ..precompute.config import PrecomputeRecipe
from ..precompute.decoder import Decoders
from ..precompute.encoders import Encoders
from ..precompute.plan import PlannedPicture, num_threads
from ..precompute.source_record import SourceRecord, caption_texts
from ..precompute.sources import Source
from .bench_meters import files_below

PROBE_RECORDS = 64  # decoded and encoded to estimate the time
PROBE_CAPTION_BATCHES = 3  # a short, a middle and a long one
ROW_BYTES = (
    200  # of the tables and the commit records, a record, beside its names and captions: measured on small stores
)
CAPTION_ROW_BYTES = 60
INDEX_BYTES = 16  # of a chunk, in every shard's index, which is as long for a last shard that is not full
GIB = 2**30


@dataclass(frozen=True)
class Probe:
    """What some pictures and captions took.

    Args:
      pictures: that were decoded and encoded.
      decode_seconds, encode_seconds: for all of them, with all threads.
      seconds_per_token: of the text encoder; 0 without one.
      memory_bytes: peak, on a GPU of one whole batch of the largest bucket; else of this process.
    """

    pictures: int
    decode_seconds: float
    encode_seconds: float
    seconds_per_token: float
    memory_bytes: int

    def seconds_for(self, pictures: int, tokens: int, *, on_cpu: bool) -> float:
        """Of a whole run. On a CPU decoding and encoding share the cores, else they run beside each other."""
        decode, encode = (seconds / max(1, self.pictures) for seconds in (self.decode_seconds, self.encode_seconds))
        return pictures * (decode + encode if on_cpu else max(decode, encode)) + tokens * self.seconds_per_token


@dataclass(frozen=True)
class StoreBytes:
    """Bytes on disk, before any codec."""

    latents: int
    captions: int
    tables: int

    @property
    def total(self) -> int:
        """Of the whole store."""
        return self.latents + self.captions + self.tables


def predict_lines(
    recipe: PrecomputeRecipe,
    spec: StoreSpec,
    source: Source,
    pictures: Sequence[PlannedPicture],
    buckets: Counter[str],
    encoders: Encoders,
) -> tuple[list[str], StoreBytes]:
    """Lines about bytes, time and memory; and the bytes.

    Args:
      pictures: the plan of each record of the source.
      buckets: records of each.
    """
    records = list(source.records)
    texts = [[] if picture.reject else caption_texts(record) for record, picture in zip(records, pictures, strict=True)]
    captions, _ = plan_captions(texts, encoders.tokenizer, recipe.text.max_tokens)
    tokens = int(captions["num_tokens"].to_numpy().sum()) if spec.text else 0
    found = store_bytes(spec, buckets, records, captions, tokens)
    lines = [f"{'latents':<20}{found.latents / 2**20:>10.1f} MiB before any codec"]
    if spec.text:
        said = f"{found.captions / 2**20:>10.1f} MiB, {captions.num_rows} distinct, {tokens} tokens"
        lines.append(f"{'captions':<20}{said}")
    lines.append(f"{'tables':<20}{found.tables / 2**20:>10.1f} MiB, about")
    probe = run_probe(recipe, spec, source, pictures, encoders, captions)
    device = encoders.image.device
    if probe.pictures:
        seconds = probe.seconds_for(sum(buckets.values()), tokens, on_cpu=device.type == "cpu")
        rates = f"decoding {probe.pictures / probe.decode_seconds:.1f}, encoding "
        rates += f"{probe.pictures / probe.encode_seconds:.1f} images/s, from {probe.pictures} pictures"
        lines.append(f"{'time':<20}{seconds / 3600:>10.2f} h; {rates}")
        kind = "of the GPU, one batch of the largest bucket" if device.type == "cuda" else "of this machine, the probe"
        lines.append(f"{'memory':<20}{probe.memory_bytes / GIB:>10.2f} GiB {kind}")
    return lines, found


def store_bytes(
    spec: StoreSpec, buckets: Counter[str], records: Sequence[SourceRecord], captions: pa.Table, tokens: int
) -> StoreBytes:
    """What a store will take on disk.

    Args:
      captions: distinct ones.
      tokens: of all of them.
    """
    layouts = [layout for name, n in buckets.items() for layout in latent_layouts(spec, name, n)]
    latents = sum(
        one.row_bytes * one.shape[0] + one.num_shards * (INDEX_BYTES * one.shard_rows // one.chunk_rows)
        for one in layouts
    )
    names = sum(len(record.key.encode()) + len(record.path.encode()) for record in records)
    tables = ROW_BYTES * len(records) + names
    if spec.text is None:
        return StoreBytes(latents, 0, tables)
    tables += CAPTION_ROW_BYTES * captions.num_rows + captions["text"].nbytes
    with_null = tokens + spec.text.max_tokens
    return StoreBytes(latents, with_null * token_bytes(spec.text.width, spec.text.dtype), tables)


def check_room(needed: Mapping[Path, int]) -> None:
    """Refuse stores that their disk cannot hold together; what is there of them already counts.

    Args:
      needed: bytes of each store.
    Raises: ResourceError.
    """
    missing: Counter[int] = Counter()  # of each disk
    for store, num_bytes in needed.items():
        there = next(folder for folder in (store.absolute(), *store.absolute().parents) if folder.exists())
        written = sum(path.stat().st_size for path in files_below(store)) if store.is_dir() else 0
        disk = there.stat().st_dev
        free, missing[disk] = shutil.disk_usage(there).free, missing[disk] + max(0, num_bytes - written)
        if missing[disk] > free:
            raise ResourceError(
                f"store '{store}': the disk has {free / GIB:.1f} GiB free, {missing[disk] / GIB:.1f} GiB more are "
                "needed. Free some space, give a --store on another disk, or make it smaller (store.dtype, "
                "store.text_dtype, vae.flip)."
            )


def run_probe(
    recipe: PrecomputeRecipe,
    spec: StoreSpec,
    source: Source,
    pictures: Sequence[PlannedPicture],
    encoders: Encoders,
    captions: pa.Table,
) -> Probe:
    """Decode and encode records from all over the source, in batches as the run will; and a few captions."""
    planned = [(r, p.bucket) for r, p in zip(source.records, pictures, strict=True) if p.bucket]
    step = max(1, len(planned) // PROBE_RECORDS)
    by_bucket: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
    images = recipe.images
    how = resize_filter(images.buckets, images.resolution)

    def decode(one: tuple[SourceRecord, tuple[int, int]]) -> None:
        record, bucket = one
        try:
            place = source.place(record.path, record.offset, record.num_bytes, stage="decode")
            found = decoders.picture(*place, bucket=bucket, crop=images.crop, resize_filter=how)
        except RecordRejected:
            return
        by_bucket[bucket].append(found.pixels)

    with Decoders(num_threads()) as decoders, ThreadPoolExecutor(num_threads()) as pool:
        start = time.perf_counter()
        list(pool.map(decode, planned[::step][:PROBE_RECORDS]))
        decode_seconds = time.perf_counter() - start
    start, size = time.perf_counter(), spec.latent.batch_size
    for rows in by_bucket.values():
        for first in range(0, len(rows), size):
            encoders.image.encode(np.stack(rows[first : first + size]))
    encode_seconds = time.perf_counter() - start
    return Probe(
        sum(map(len, by_bucket.values())),
        decode_seconds,
        encode_seconds,
        _seconds_per_token(spec, encoders, captions),
        _peak_bytes(recipe, size, encoders),
    )


def _seconds_per_token(spec: StoreSpec, encoders: Encoders, captions: pa.Table) -> float:
    if not (spec.text and encoders.caption and captions.num_rows):
        return 0.0
    texts, lengths = captions["text"].to_pylist(), captions["num_tokens"].to_numpy()
    batches = caption_batches(lengths, spec.text, encoders.caption)
    chosen = [batches[len(batches) * (2 * i + 1) // (2 * PROBE_CAPTION_BATCHES)] for i in range(PROBE_CAPTION_BATCHES)]
    start = time.perf_counter()
    tokens = sum(encoders.caption.encode([texts[i] for i in batch])[..., 0].size for batch in chosen)
    return (time.perf_counter() - start) / tokens


def _peak_bytes(recipe: PrecomputeRecipe, batch_size: int, encoders: Encoders) -> int:
    device = encoders.image.device
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    _, height_px, width_px = max(recipe.images.table, key=lambda row: row[1] * row[2])
    torch.cuda.reset_peak_memory_stats(device)
    encoders.image.encode(np.zeros((batch_size, height_px, width_px, 3), np.uint8))
    return torch.cuda.max_memory_allocated(device)
