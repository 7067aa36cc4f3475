"""Cost of a precompute for ``--dry-run``: bytes on disk, hours and memory.

The bytes come from the plan that a run would freeze: array sizes are exact, tables are written to temporary files and
measured. Hours and memory come from encoding some records. Memory use does not grow with the number of records.
"""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ...datasets.disk.files import files_below
from ...datasets.disk.hashing import canonical_json
from ...datasets.errors import RecordRejected, ResourceError
from ...datasets.format.buckets import bucket_size, resize_filter
from ...datasets.format.layout import group_json, is_picture_task
from ...datasets.format.row_layout import LATENTS, MASK
from ...datasets.format.schema import StoreSpec
from ...datasets.format.table_schemas import suffixes
from ...datasets.format.tables import parquet_file
from ...datasets.format.zarr_shard import CRC_BYTES, ArrayLayout
from ...datasets.revisions.plan import FrozenPlan
from ...datasets.units import readable_size, readable_time
from ...precompute.config import PrecomputeRecipe
from ...precompute.encoders.loading import Encoders
from ...precompute.images.decoders import Decoders
from ...precompute.planning.compare import Comparison
from ...precompute.planning.pictures import num_threads
from ...precompute.shards.caption_shard import caption_batches
from ...precompute.sources.files.record import SourceRecord
from ...precompute.sources.listing.listing import Listing
from ...precompute.sources.source import Source

PROBE_RECORDS = 64  # decoded and encoded to estimate the time
PROBE_CAPTION_BATCHES = 3  # a short, a middle and a long one
INDEX_BYTES = 16  # of a chunk in a shard's index; a partly filled shard has a full index
CODEC_BYTES = 64  # largest growth of an incompressible chunk, with its checksum
RESULT_BYTES = 11  # of a number in a sealed table: 8, and its dictionary index
CHECKSUM_BYTES = 22  # a line of a commit record
NARROWED_BYTES = 48  # two more lines, for a caption stored in a narrower dtype
COMMIT_BYTES = 1024  # of a commit record without its rows
ENTRY_BYTES = 192  # of a file in the manifest and in its commit record
HEAD_BYTES = 2048  # of the manifest and of the plan's head, without spec and files
GIB = 2**30
Chosen = tuple[SourceRecord, tuple[int, int]]  # a record and its bucket


@dataclass(frozen=True)
class Probe:
    """Measured time and memory of some pictures and captions.

    Args:
      pictures: number decoded and encoded.
      decode_seconds, encode_seconds: for all of them, with all threads.
      seconds_per_token: of each text encoder, by name.
      memory_bytes: peak of a full batch of the largest bucket on a GPU; else of this process.
    """

    pictures: int
    decode_seconds: float
    encode_seconds: float
    seconds_per_token: dict[str, float]
    memory_bytes: int

    def seconds_for(self, pictures: int, tokens: Mapping[str, int], *, on_cpu: bool, num_devices: int = 1) -> float:
        """Seconds of a whole run.

        On a CPU, decoding and encoding share the cores. On GPUs they overlap: each device encodes its share, and all
        share the cores for decoding.
        """
        decode, encode = (seconds / max(1, self.pictures) for seconds in (self.decode_seconds, self.encode_seconds))
        texts = sum(tokens[name] * seconds for name, seconds in self.seconds_per_token.items())
        if on_cpu:
            return pictures * (decode + encode) + texts
        return pictures * max(decode, encode / num_devices) + texts / num_devices


@dataclass(frozen=True)
class StoreBytes:
    """Bytes on disk, before any codec.

    Args:
      texts: of each text encoder, by name.
      beside: of each feature and companion picture, as "feature NAME" and "picture NAME".
    """

    latents: int
    texts: dict[str, int]
    beside: dict[str, int]
    tables: int

    @property
    def captions(self) -> int:
        """Of all text encoders."""
        return sum(self.texts.values())

    @property
    def total(self) -> int:
        """Bytes of the whole store."""
        return self.latents + self.captions + sum(self.beside.values()) + self.tables


def predict_lines(
    recipe: PrecomputeRecipe,
    plan: FrozenPlan,
    source: Source,
    comparison: Comparison,
    pictures: pa.Table,
    encoders: Encoders,
    *,
    num_devices: int = 1,
) -> tuple[list[str], StoreBytes]:
    """Lines on bytes, time and memory of a revision; and the bytes.

    Args:
      comparison: its new records, and those that it carries over.
      pictures: the plan of each new one (PICTURES_SCHEMA).
      num_devices: that encode in parallel.
    """
    spec, adds_texts = plan.spec, any(one.texts for one in plan.added)
    new_bytes, counts, num_captions = store_bytes(plan), *_token_counts(plan)
    lines = [f"{'latents':<20}{readable_size(new_bytes.latents):>10} before any codec"]
    for name, num_bytes in new_bytes.beside.items():
        lines.append(f"{name:<20}{readable_size(num_bytes):>10}")
    for name, num_bytes in new_bytes.texts.items():
        label = f"captions {name}".strip()
        distinct = f"{num_captions[name]:,} distinct, {counts[name]:,} tokens"
        lines.append(f"{label:<20}{readable_size(num_bytes):>10}, {distinct}")
    lines.append(f"{'tables':<20}{readable_size(new_bytes.tables):>10} at most")
    texts = {name: encoders.captions[name] for name, count in counts.items() if count}
    captions = plan.captions if adds_texts else plan.own_captions
    probe = run_probe(
        recipe, spec, source, choose(comparison.fresh, pictures), replace(encoders, captions=texts), captions
    )
    device, on_cpu = encoders.image.device, encoders.image.device.type == "cpu"
    speed = {"on_cpu": on_cpu, "num_devices": num_devices}
    seconds = probe.seconds_for(sum(plan.layout.bucket_rows.values()), counts, **speed)
    if num_completed := completed_rows(plan):
        groups = sorted({group for one in plan.added for group in one.groups})
        alone, kept = replace(encoders, captions={}), choose_kept(comparison)
        added = run_probe(recipe, spec, source, kept, alone, captions, groups=groups)
        seconds += added.seconds_for(num_completed, {}, **speed)
        probe = probe if probe.pictures else added
    if probe.pictures or texts:
        rates = ""
        if probe.pictures:
            rates = f"; decoding {probe.pictures / probe.decode_seconds:.1f}, encoding "
            rates += f"{probe.pictures / probe.encode_seconds:.1f} images/s, from {probe.pictures} pictures"
        devices = "" if on_cpu or num_devices == 1 else f" each of {num_devices} devices"
        lines.append(f"{'time':<20}{readable_time(seconds):>10}{rates}{devices}")
        kind = "of the GPU, one batch of the largest bucket" if device.type == "cuda" else "of this machine, the probe"
        lines.append(f"{'memory':<20}{readable_size(probe.memory_bytes):>10} {kind}")
    return lines, new_bytes


def completed_rows(plan: FrozenPlan) -> int:
    """Pictures of earlier revisions that get features or companions."""
    parts = plan.layout.parts.values()
    return sum(
        int((plan.positions_of(one) >= 0).sum()) for one in parts if one.bucket and one.revision != plan.revision
    )


def _token_counts(plan: FrozenPlan) -> tuple[dict[str, int], dict[str, int]]:
    """Tokens and captions that a plan encodes, by text encoder."""
    tokens, captions = ({one.name: 0 for one in plan.spec.text_encoders} for _ in range(2))
    for part in plan.layout.parts.values():
        if part.captions and not part.is_null:
            tokens[part.captions.name] += int(part.captions.num_tokens.sum())
            captions[part.captions.name] += len(part.captions.num_tokens)
    return tokens, captions


def store_bytes(plan: FrozenPlan) -> StoreBytes:
    """Bytes of a plan on disk: exact for arrays, an upper bound close to the truth for tables."""
    spec, layout = plan.spec, plan.layout
    texts = {one.name: 0 for one in spec.text_encoders}
    groups = dict.fromkeys((LATENTS, *spec.groups), 0)
    for part in layout.parts.values():
        if part.captions:
            arrays = part.arrays if part.is_null else [*part.arrays, *part.captions.index]
            texts[part.captions.name] += sum(map(array_bytes, arrays))
        for group, arrays in part.groups.items():
            groups[group] += sum(map(array_bytes, arrays))
    tasks = layout.tasks()
    num_files = sum(array.num_shards + 1 for array in layout.arrays.values()) + 2 * len(layout.bucket_rows)
    num_files += len(tasks) + 8 + 2 * (len(texts) + len(spec.groups) * len(layout.bucket_rows))
    num_files += len(plan.carried)  # listed again
    heads = 2 * len(group_json(spec)) + 2 * HEAD_BYTES + 2 * ENTRY_BYTES * num_files
    sealed = RESULT_BYTES * (2 * plan.records.num_rows + 3 * plan.captions.num_rows)
    tables = 2 * (len(parquet_file(plan.records)) + len(parquet_file(plan.captions))) + sealed
    pictures = sum(len(layout.rows_of(*task)) for task in tasks if is_picture_task(task))
    commits = COMMIT_BYTES * len(tasks) + 2 * CHECKSUM_BYTES * pictures
    commits += (CHECKSUM_BYTES + NARROWED_BYTES) * pictures * len(spec.features)
    commits += 2 * CHECKSUM_BYTES * pictures * len(spec.pictures)
    for one in spec.text_encoders:
        narrowed = NARROWED_BYTES if one.spec.dtype != "float32" else 0
        commits += (CHECKSUM_BYTES + narrowed) * plan.captions.num_rows
    latents, features = groups.pop(LATENTS), {one.name for one in spec.features}
    beside = {f"{'feature' if name in features else 'picture'} {name}": size for name, size in groups.items()}
    return StoreBytes(latents, texts, beside, heads + tables + commits)


def array_bytes(layout: ArrayLayout) -> int:
    """Bytes of an array's files before its codec: chunks (the last one padded), indexes and metadata."""
    num_chunks = -(-layout.shape[0] // layout.chunk_rows)
    chunk_bytes = layout.chunk_bytes + (0 if layout.codec == "none" else CODEC_BYTES)
    index_bytes = INDEX_BYTES * layout.shard_rows // layout.chunk_rows + CRC_BYTES
    return num_chunks * chunk_bytes + layout.num_shards * index_bytes + len(canonical_json(layout.metadata()))


def check_room(store: Path, num_bytes: int) -> None:
    """Check that the disk can hold the rest of a store.

    Args:
      num_bytes: of the whole store, existing bytes included.
    Raises: ResourceError.
    """
    folder = next(folder for folder in (store.absolute(), *store.absolute().parents) if folder.exists())
    written = sum(path.stat().st_size for path in files_below(store)) if store.is_dir() else 0
    free, missing = shutil.disk_usage(folder).free, num_bytes - written
    if missing > free:
        raise ResourceError(
            f"store '{store}': the disk has {readable_size(free)} free, {readable_size(missing)} more are needed. Free "
            "some space, give a --store on another disk, or make it smaller (store.dtype, store.text_dtype, vae.flip)."
        )


def choose(fresh: Listing, pictures: pa.Table) -> list[Chosen]:
    """Records for the probe, spread evenly over the new ones.

    Args:
      pictures: the plan of each new record (PICTURES_SCHEMA).
    """
    planned = np.flatnonzero(pictures["row"].to_numpy() >= 0)
    step = max(1, len(planned) // PROBE_RECORDS)
    buckets = pictures["bucket"]
    return [(fresh[i], bucket_size(buckets[i].as_py())) for i in planned[::step][:PROBE_RECORDS].tolist()]


def choose_kept(comparison: Comparison) -> list[Chosen]:
    """The same of the records that are carried over."""
    buckets, stored = comparison.table["bucket"], comparison.table["status"].to_numpy() == "stored"
    planned = np.flatnonzero(stored)
    step = max(1, len(planned) // PROBE_RECORDS)
    taken = planned[::step][:PROBE_RECORDS].tolist()
    return [(comparison.kept[i].record, bucket_size(buckets[i].as_py())) for i in taken]


def run_probe(
    recipe: PrecomputeRecipe,
    spec: StoreSpec,
    source: Source,
    chosen: Sequence[Chosen],
    encoders: Encoders,
    captions: pa.Table,
    *,
    groups: Sequence[str] | None = None,
) -> Probe:
    """Decode and encode some records in batches of the run's size, and a few captions.

    Every step runs once before it is timed: starting decoders and compiling an encoder do not matter in a run of hours.

    Args:
      groups: features and companion pictures that are encoded; None: these and the latents.
    """
    by_bucket: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
    images, size = recipe.images, spec.latent.batch_size
    how = resize_filter(images.buckets, images.resolution)

    def decode(chosen: Chosen) -> np.ndarray | None:
        record, bucket = chosen
        try:
            places = {"": record.place, **dict(zip(source.pictures, record.pictures, strict=True))}
            decoded = [
                decoders.picture(
                    *source.place(*place[:3], stage="decode", picture=name),
                    bucket=bucket,
                    crop=images.crop,
                    resize_filter=how,
                    exif_orientation=images.exif_orientation,
                ).pixels
                for name, place in places.items()
            ]
            return decoded[0]
        except RecordRejected:
            return None

    with Decoders(num_threads()) as decoders, ThreadPoolExecutor(num_threads()) as pool:
        list(pool.map(decode, [*chosen[:1]] * (2 * num_threads())))
        start = time.perf_counter()
        decoded = list(pool.map(decode, chosen))
        decode_seconds = time.perf_counter() - start
    for (_, bucket), pixels in zip(chosen, decoded, strict=True):
        if pixels is not None:
            by_bucket[bucket].append(pixels)
    batches = [np.stack(rows[i : i + size]) for rows in by_bucket.values() for i in range(0, len(rows), size)]
    masks = {one.name for one in spec.pictures if one.kind == MASK}
    names = [LATENTS, *spec.groups] if groups is None else groups
    of_pictures = [encoders.features.get(name, encoders.image) for name in names if name not in masks]
    for batch in {batch.shape: batch for batch in batches}.values():
        for encoder in of_pictures:
            encoder.encode(batch)
    start = time.perf_counter()
    for batch in batches:
        for encoder in of_pictures:
            encoder.encode(batch)
    encode_seconds = time.perf_counter() - start
    return Probe(
        sum(map(len, batches)),
        decode_seconds,
        encode_seconds,
        _seconds_per_token(spec, encoders, captions),
        _peak_bytes(recipe, size, encoders),
    )


def _seconds_per_token(spec: StoreSpec, encoders: Encoders, captions: pa.Table) -> dict[str, float]:
    """Of each text encoder, one after the other."""
    found = {}
    for name, encoder in encoders.captions.items() if captions.num_rows else ():
        of_encoder, column = spec.text_encoder_of(name).spec, f"num_tokens{suffixes(spec)[name]}"
        counts = captions[column].to_numpy()
        counts = np.full(len(counts), of_encoder.max_tokens) if of_encoder.full_length else counts
        batches = caption_batches(counts, of_encoder, encoder)
        positions = [len(batches) * (2 * i + 1) // (2 * PROBE_CAPTION_BATCHES) for i in range(PROBE_CAPTION_BATCHES)]
        texts = [captions["text"].take(pa.array(batches[i])).to_pylist() for i in positions]
        for batch in texts:
            encoder.encode(batch)
        start = time.perf_counter()
        for batch in texts:
            encoder.encode(batch)
        found[name] = (time.perf_counter() - start) / int(sum(counts[batches[i]].sum() for i in positions))
        encoder.release()
    return found


def _peak_bytes(recipe: PrecomputeRecipe, batch_size: int, encoders: Encoders) -> int:
    device = encoders.image.device
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    _, height_px, width_px = max(recipe.images.for_vae(encoders.image.downscale).table, key=lambda row: row[1] * row[2])
    torch.cuda.reset_peak_memory_stats(device)
    encoders.image.encode(np.zeros((batch_size, height_px, width_px, 3), np.uint8))
    return torch.cuda.max_memory_allocated(device)
