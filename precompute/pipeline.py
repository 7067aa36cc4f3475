"""Stage 1 as a story: list the source, load the encoders, freeze the plan, encode what is missing, seal.

Decoding runs ahead in threads, encoding runs here, writing runs behind in a thread. Running the same command again goes
on where the last one stopped: a shard with a valid commit record is never made twice.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute
import torch

from .. import __version__
from ..datasets.buckets import bucket_name, bucket_size, bucket_table
from ..datasets.commits import FrozenPlan, read_plan
from ..datasets.errors import (
    DamageError,
    FingerprintMismatch,
    RecipeError,
    RecordRejected,
    ResourceError,
    SourceError,
    StoreError,
)
from ..datasets.files import read_json, sweep_strays
from ..datasets.layout import CAPTION_PART, EMBEDDINGS, MANIFEST, NULL_PART, PLAN, bucket_part, latent_layouts
from ..datasets.schema import FORMAT_VERSION, ImageSpec, Manifest, StoreSpec
from ..datasets.store import LatentStore, read_spec
from ..datasets.writer import StoreWriter, freeze_plan
from .config import PrecomputeRecipe
from .encoders import CaptionEncoder, CaptionTokenizer, ImageEncoder
from .images import COLOUR, RESIZE_FILTER, decode_picture
from .plan import plan_captions, plan_pictures, plan_records
from .shard_task import PackedShard, ShardBuilder, encode_caption_shard, encode_null_caption
from .sources import Source, list_source, read_record

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

BATCHES_AHEAD = 3  # decoded batches that wait for the encoder
WRITES_BEHIND = 2  # shards that wait for the disk

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) whenever something was done."""


@dataclass
class StageClock:
    """Seconds spent in each stage, summed over threads."""

    seconds: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Report:
    """What a precompute did.

    Args:
      manifest: of the sealed store.
      num_encoded: pictures encoded by this call; 0 where the store was complete already.
      seconds: of the whole call, and of each stage (decode and write run beside the encoder).
      num_ignored: files of the source that are no pictures by their name.
    """

    manifest: Manifest
    num_encoded: int
    total_seconds: float
    seconds: dict[str, float]
    num_ignored: int

    @property
    def bound_by(self) -> str:
        """The stage that the run waited for."""
        waits = {"decode": self.seconds.get("wait_decode", 0.0), "write": self.seconds.get("wait_write", 0.0)}
        encode = self.seconds.get("encode", 0.0) + self.seconds.get("text", 0.0)
        slowest = max(waits, key=lambda stage: waits[stage])
        return slowest if waits[slowest] > encode else "encode"


@dataclass(frozen=True)
class Encoders:
    """The loaded encoders; no caption encoder where the recipe wants no text."""

    image: ImageEncoder
    caption: CaptionEncoder | None

    @property
    def tokenizer(self) -> CaptionTokenizer | None:
        """Of the caption encoder."""
        return self.caption and self.caption.tokenizer


def precompute(
    recipe: PrecomputeRecipe, *, source_path: Path, store_path: Path, device: torch.device, progress: Progress
) -> Report:
    """Run every picture and caption of a source through the encoders, exactly once, into a store.

    Raises: LeanditError: of the class that says what to mend; the store then resumes with the same command.
    """
    start = time.perf_counter()
    clock = StageClock()

    # Scan: list the source, load the encoders.
    source = list_source(source_path, recipe.source.kind)
    encoders = load_encoders(recipe, device)
    spec = describe_store(recipe, source, encoders)

    # Plan: freeze it, or take up the one that is there.
    with clock.measure("plan"):
        writer = open_writer(store_path, spec, source, recipe, encoders, progress)
    missing = writer.missing_tasks()
    if not missing and (manifest := _sealed(writer)):
        return Report(manifest, 0, time.perf_counter() - start, clock.seconds, source.num_ignored)
    check_disk(writer, missing)

    # Encode: decoding ahead, writing behind.
    num_encoded = 0
    with Background(writer, clock) as background:
        for shard in encode_captions(writer, encoders, missing, clock, progress):
            background.commit(shard)
        for shard in encode_pictures(writer, encoders, source, missing, clock, progress):
            background.commit(shard)
            num_encoded += len(shard.checksums)

    # Seal: merge the commit records.
    if not writer.num_stored:
        raise SourceError(
            f"source '{source.root}': not one of {len(source.records)} pictures could be encoded, so the store is not "
            f"sealed. Look at one of them; the reasons are in '{store_path / 'commits'}'."
        )
    manifest = writer.seal()
    return Report(manifest, num_encoded, time.perf_counter() - start, clock.seconds, source.num_ignored)


def load_encoders(recipe: PrecomputeRecipe, device: torch.device) -> Encoders:
    """Load what the recipe names.

    Raises: EncoderError; RecipeError: a kind of text encoder that this release does not have.
    """
    if recipe.text.kind == "gemma2":
        raise RecipeError("text.kind 'gemma2': this release encodes captions with T5 only. Use text.kind = \"t5\".")
    if recipe.text.kind == "none":
        return Encoders(ImageEncoder(recipe.vae, device), None)
    tokenizer = CaptionTokenizer(recipe.text)
    return Encoders(ImageEncoder(recipe.vae, device), CaptionEncoder(recipe.text, tokenizer, device))


def describe_store(recipe: PrecomputeRecipe, source: Source, encoders: Encoders) -> StoreSpec:
    """What the store will say of itself, with its fingerprint.

    Raises: RecipeError: a bucket does not fit the VAE's downscale.
    """
    table = bucket_table(recipe.images.buckets, recipe.images.resolution)
    latent = encoders.image.latent_spec(recipe.vae, recipe.store.dtype)
    for _, height_px, width_px in table:
        if height_px % latent.downscale or width_px % latent.downscale:
            raise RecipeError(
                f"bucket '{bucket_name(height_px, width_px)}': the VAE makes one latent of {latent.downscale} px, so "
                f"both sides must be multiples of {latent.downscale}. Use another resolution, table or VAE."
            )
    return StoreSpec(
        format_version=FORMAT_VERSION,
        leandit_version=__version__,
        fingerprint="",
        images=ImageSpec(
            resolution_px=recipe.images.resolution,
            crop=recipe.images.crop,
            buckets=[bucket_name(height_px, width_px) for _, height_px, width_px in table],
            resize_filter=RESIZE_FILTER if recipe.images.crop == "adm" else "bicubic",
            colour=COLOUR,
        ),
        latent=latent,
        text=encoders.caption and encoders.caption.text_spec(recipe.text, recipe.store.dtype),
        vae=encoders.image.identity,
        text_encoder=encoders.caption and encoders.caption.identity,
        classes=source.classes,
        shard_mib=recipe.store.shard_mib,
        codec=recipe.store.codec,
        recipe=recipe.model_dump(),
    ).with_fingerprint()


def open_writer(
    root: Path, spec: StoreSpec, source: Source, recipe: PrecomputeRecipe, encoders: Encoders, progress: Progress
) -> StoreWriter:
    """Take up the store at ``root`` if it is this one, else plan a new one.

    Raises: FingerprintMismatch, SourceError: another recipe or source made it; StoreError: something else is there.
    """
    if root.exists() and not root.is_dir():
        raise StoreError(f"store '{root}': a file is there; needed a folder, or nothing. Give another --store.")
    if root.exists():
        sweep_strays(root)
        if (root / PLAN).is_file():
            found = _spec_on_disk(root, spec)
            check_fingerprint(root, found, spec)
            plan = read_plan(root)
            check_source(root, plan, source)
            return StoreWriter(root, found, plan)
        if any(root.iterdir()):
            read_spec(root)  # refuses what is not ours
            if (root / MANIFEST).exists() or (root / "commits").exists():
                raise StoreError(
                    f"store '{root}': its 'plan' folder is gone, so nothing can be mended. Nothing was changed. "
                    "Restore the folder, or give another --store; a complete store can still be read."
                )
            for folder in ("buckets", "captions", "plan"):  # of a plan that was never finished: nothing is committed
                shutil.rmtree(root / folder, ignore_errors=True)
    return StoreWriter(root, spec, make_plan(root, spec, source, recipe, encoders, progress))


def _spec_on_disk(root: Path, wanted: StoreSpec) -> StoreSpec:
    """What the store says of itself; where that is damaged but the plan is of this fingerprint, what it said."""
    try:
        return read_spec(root)
    except (DamageError, StoreError):
        if read_json(root / PLAN).get("fingerprint") != wanted.fingerprint:
            raise
        return wanted


def make_plan(
    root: Path, spec: StoreSpec, source: Source, recipe: PrecomputeRecipe, encoders: Encoders, progress: Progress
) -> FrozenPlan:
    """Plan every record of the source and freeze the plan in the store.

    Raises: SourceError: not one record can be encoded.
    """
    total = len(source.records)
    pictures = plan_pictures(
        source, recipe, num_threads=num_threads(), progress=lambda done: progress("scan", done, total)
    )
    captions, caption_ids = plan_captions(source, pictures, encoders.tokenizer, recipe.text.max_tokens)
    records = plan_records(source, pictures, caption_ids)
    if all(picture.reject for picture in pictures):
        reasons = ", ".join(f"{e['values']}: {e['counts']}" for e in records["reason"].value_counts().to_pylist())
        raise SourceError(
            f"source '{source.root}': all {total} records are rejected ({reasons}); "
            f"the first is '{source.records[0].key}': {pictures[0].reject}. Nothing was written."
        )
    return freeze_plan(root, spec, records, captions, listing=source.listing_hash())


def check_fingerprint(root: Path, found: StoreSpec, wanted: StoreSpec) -> None:
    """Refuse a store that other encoders or settings made, naming each field.

    Raises: FingerprintMismatch.
    """
    if found.fingerprint == wanted.fingerprint:
        return
    there, here = _flatten(found.identity()), _flatten(wanted.identity())
    differing = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
    fields = "; ".join(f"{key} is {there.get(key)!r} in the store, {here.get(key)!r} now" for key in differing[:6])
    raise FingerprintMismatch(
        f"store '{root}': made with other encoders or settings: {fields}. Nothing was changed. "
        "Give another --store, or the settings that made this one."
    )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat = {}
    for key, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{key}" if prefix else key)
    return flat


def check_source(root: Path, plan: FrozenPlan, source: Source) -> None:
    """Refuse to go on when the source is not the one that was planned.

    Raises: SourceError: saying how many records were added, are gone, or were written anew.
    """
    if source.listing_hash() == plan.listing:
        return
    columns = ("key", "source_path", "source_offset", "source_bytes", "source_mtime_ns", "label")
    planned = {row["key"]: row for row in plan.records.select(columns).to_pylist()}
    now = {record.key: record for record in source.records}
    changed = [
        key
        for key in planned.keys() & now.keys()
        if (planned[key]["source_bytes"], planned[key]["source_mtime_ns"]) != (now[key].num_bytes, now[key].mtime_ns)
    ]
    added, gone = sorted(now.keys() - planned.keys()), sorted(planned.keys() - now.keys())
    examples = [*added, *gone, *sorted(changed)][:3]
    raise SourceError(
        f"source '{source.root}': it is not what store '{root}' planned: {len(added)} records new, {len(gone)} gone, "
        f"{len(changed)} written anew"
        + (f" ({', '.join(examples)})" if examples else ", or labels or captions differ")
        + ". Restore the source, or precompute into another --store."
    )


def _sealed(writer: StoreWriter) -> Manifest | None:
    """Manifest of a store that is sealed and whole; None where it has to be sealed (again)."""
    if not writer.is_sealed:
        return None
    try:
        store = LatentStore(writer.root)
        _ = store.records, store.captions  # checks the hashes of the tables
        return store.manifest
    except DamageError:
        return None


def check_disk(writer: StoreWriter, missing: list[tuple[str, int]]) -> None:
    """Refuse to start when the disk cannot hold what is missing.

    Raises: ResourceError.
    """
    needed = 0
    for layout in writer.layouts.values():
        part = {EMBEDDINGS: CAPTION_PART}.get(layout.path, layout.path.rsplit("/", 1)[0])
        needed += sum(len(layout.rows_of(shard)) * layout.row_bytes for p, shard in missing if p == part)
    free = shutil.disk_usage(writer.root).free
    if needed > free:
        raise ResourceError(
            f"store '{writer.root}': the disk has {free / 2**30:.1f} GiB free, the store needs {needed / 2**30:.1f} "
            "GiB more. Free some space, or give a --store on another disk; the same command then goes on."
        )


class Background:
    """Commits finished shards in a thread; an error there is raised here at the next commit or at the end."""

    def __init__(self, writer: StoreWriter, clock: StageClock) -> None:
        self._writer, self._clock = writer, clock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="leandit-write")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Background:
        return self

    def commit(self, shard: PackedShard) -> None:
        """Queue a shard; waits while too many are queued."""
        self._pending.append(self._pool.submit(self._write, shard))
        with self._clock.measure("wait_write"):
            while len(self._pending) > WRITES_BEHIND:
                self._pending.popleft().result()

    def _write(self, shard: PackedShard) -> None:
        with self._clock.measure("write"):
            self._writer.commit(shard.part, shard.shard, shard.arrays, checksums=shard.checksums, rejects=shard.rejects)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                with self._clock.measure("wait_write"):
                    while self._pending:
                        self._pending.popleft().result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)


def encode_captions(
    writer: StoreWriter, encoders: Encoders, missing: list[tuple[str, int]], clock: StageClock, progress: Progress
) -> Iterator[PackedShard]:
    """Encode the missing caption shards."""
    encoder, spec = encoders.caption, writer.spec
    if encoder is None or spec.text is None:
        return
    shards = [(part, shard) for part, shard in missing if part in (NULL_PART, CAPTION_PART)]
    for done, (part, shard) in enumerate(shards, 1):
        with clock.measure("text"):
            if part == NULL_PART:
                packed = encode_null_caption(encoder, spec.text.dtype)
            else:
                packed = encode_caption_shard(
                    shard,
                    writer.layouts[EMBEDDINGS],
                    writer.plan.captions,
                    writer.plan.offsets(spec),
                    encoder,
                    spec.text.batch_size,
                )
        yield packed
        progress("captions", done, len(shards))


def encode_pictures(
    writer: StoreWriter,
    encoders: Encoders,
    source: Source,
    missing: list[tuple[str, int]],
    clock: StageClock,
    progress: Progress,
) -> Iterator[PackedShard]:
    """Encode the missing latent shards, in the order of the plan, decoding ahead."""
    wanted = set(missing)
    work = [batch for batch in _batches(writer) if (batch.part, batch.shard) in wanted]
    total, done = sum(len(batch.rows) for batch in work), 0
    buckets = {batch.bucket: BucketRows(writer.plan, batch.bucket) for batch in work}
    builder: ShardBuilder | None = None
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="leandit-decode") as pool:
        for batch, pictures in _decode_ahead(pool, work, buckets, source, writer.spec, clock):
            if builder is None:
                rows = buckets[batch.bucket]
                layouts = latent_layouts(writer.spec, batch.bucket, len(rows.keys))
                builder = ShardBuilder(
                    batch.part, batch.shard, layouts, keys=rows.keys, records=rows.records, spec=writer.spec.latent
                )
            with clock.measure("wait_decode"):
                decoded = [future.result() for future in pictures]
            with clock.measure("encode"):
                builder.add(batch.rows, decoded, encoders.image)
            done += len(batch.rows)
            progress("pictures", done, total)
            if batch.is_last:
                yield builder.finish()
                builder = None


@dataclass(frozen=True)
class PictureBatch:
    """The next rows of a shard, encoded in one forward."""

    part: str
    bucket: str
    shard: int
    rows: range
    is_last: bool


def _batches(writer: StoreWriter) -> Iterator[PictureBatch]:
    """All picture batches of the plan: a batch never crosses two shards."""
    size = writer.spec.latent.batch_size
    for bucket, num_rows in writer.plan.bucket_rows.items():
        layout = latent_layouts(writer.spec, bucket, num_rows)[0]
        for shard in range(layout.num_shards):
            rows = layout.rows_of(shard)
            for start in range(rows.start, rows.stop, size):
                stop = min(start + size, rows.stop)
                yield PictureBatch(bucket_part(bucket), bucket, shard, range(start, stop), stop == rows.stop)


class BucketRows:
    """Where the pictures of a bucket lie in the source, by row."""

    def __init__(self, plan: FrozenPlan, bucket: str) -> None:
        wanted = pc.fill_null(pc.equal(plan.records["bucket"], bucket), False).to_numpy(zero_copy_only=False)
        positions = np.flatnonzero(wanted)  # rows follow the order of the table
        table = plan.records.take(positions)
        self.records = positions
        self.keys: list[str] = table["key"].to_pylist()
        self.paths: list[str] = table["source_path"].to_pylist()
        self.offsets: list[int] = table["source_offset"].to_pylist()
        self.sizes: list[int] = table["source_bytes"].to_pylist()


Picture = np.ndarray | RecordRejected


def _decode_ahead(
    pool: ThreadPoolExecutor,
    work: list[PictureBatch],
    buckets: dict[str, BucketRows],
    source: Source,
    spec: StoreSpec,
    clock: StageClock,
) -> Iterator[tuple[PictureBatch, list[Future[Picture]]]]:
    """Hand out batches in order while the pictures of the next ones are being decoded."""

    def decode(rows: BucketRows, row: int, size: tuple[int, int]) -> Picture:
        with clock.measure("decode"):
            try:
                data = read_record(source.root, rows.paths[row], rows.offsets[row], rows.sizes[row])
                return decode_picture(data, bucket=size, crop=spec.images.crop)
            except RecordRejected as reject:
                return reject

    ahead: deque[tuple[PictureBatch, list[Future[Picture]]]] = deque()
    try:
        for batch in work:
            rows, size = buckets[batch.bucket], bucket_size(batch.bucket)
            ahead.append((batch, [pool.submit(decode, rows, row, size) for row in batch.rows]))
            if len(ahead) > BATCHES_AHEAD:
                yield ahead.popleft()
        while ahead:
            yield ahead.popleft()
    finally:
        for _, futures in ahead:
            for future in futures:
                future.cancel()


def num_threads() -> int:
    """Threads for decoding: the cores of this process, at most 32."""
    return min(32, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
