"""What a store of millions of records costs: to plan, write, open and read.

    python benchmarks/scale.py plan --scratch bench --records 10000000 --no-captions
    python benchmarks/scale.py store --scratch bench --records 100000000
    python benchmarks/scale.py start --scratch bench

Each stage of **plan** and each opening runs in a process of its own. Memory is anonymous and shared memory (PSS) of the
process and its decoders beyond what it had before; mapped files do not count. Files are in the page cache.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import typer
from measuring import PeakMemory, fresh_folder, machine, measure_in_child, print_table, tree_cpu_seconds
from PIL import Image

from leandit.datasets.batches.reader import PLANNED_AHEAD
from leandit.datasets.disk.files import write_atomic
from leandit.datasets.disk.hashing import canonical_json, xxh3_file
from leandit.datasets.disk.spill import map_table
from leandit.datasets.format.buckets import bucket_name
from leandit.datasets.format.layout import (
    CAPTIONS,
    MANIFEST,
    PLAN,
    RECORDS,
    RevisionLayout,
    index_path,
    revision_prefix,
)
from leandit.datasets.format.schema import FORMAT_VERSION, FileEntry, Manifest
from leandit.datasets.format.table_schemas import (
    CAPTIONS_SCHEMA,
    RECORDS_SCHEMA,
    STORED,
    index_names,
    plan_schema,
)
from leandit.datasets.format.tables import parquet_file
from leandit.datasets.format.zarr_shard import ABSENT, CRC_BYTES, ArrayLayout
from leandit.datasets.loader import make_loader
from leandit.datasets.order.batch_plan import BatchPlan
from leandit.datasets.revisions.catalog import file_entry
from leandit.datasets.revisions.commits import new_results
from leandit.datasets.revisions.plan import first_plan, freeze_plan, read_plan
from leandit.datasets.revisions.writer import StoreWriter, row_checksum
from leandit.datasets.store import LatentStore
from leandit.precompute.config import load
from leandit.precompute.encoders.text.tokenizer import CaptionTokenizer
from leandit.precompute.images.decoders import Decoders
from leandit.precompute.planning.images import num_threads
from leandit.precompute.planning.planner import Planner
from leandit.precompute.run.clock import Progress
from leandit.precompute.sources.source import list_source
from leandit.tools.plan.noise_spec import noise_spec

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them
IMAGENET = 1_281_167
Scratch = Annotated[Path, typer.Option(help="Folder for manifests and stores.")]
Figures = dict[str, float]
app = typer.Typer(no_args_is_help=True, add_completion=False)

# ---------------------------------------------------------------------------------------------------------------- plan

SHAPES = np.array([(256, 256), (224, 336), (336, 224), (200, 400), (30, 256)], np.int32)  # the last fits no bucket
RARE = 1000  # one row in 1000 has the last shape; one is rejected by a worker
WORDS = ("a", "photo", "of", "the", "small", "red", "house", "near", "old", "green", "river", "under", "blue", "sky")
BLOCK_ROWS = 1 << 16
EVERY_SECONDS = 2.0  # a sample of the memory takes longer the more is mapped
SETTINGS = ['images.buckets="pixart"', "images.resolution=256", 'images.crop="bucket"', "text.max_tokens=120"]
SETTINGS += ["source.sizes=manifest"]


@app.command("plan")
def plan_command(
    scratch: Scratch,
    records: Annotated[int, typer.Option(min=1, help="Rows of the manifest.")] = IMAGENET,
    captions: Annotated[bool, typer.Option(help="Plan captions too; else class labels alone.")] = True,
) -> None:
    """Plan a manifest, whose rows name a few small images by a different path each, and open the plan."""
    folder = scratch.resolve() / f"manifest-{'captions' if captions else 'labels'}-{records}"
    source = str(write_manifest(folder / "manifest.parquet", records, captions=captions))
    store = fresh_folder(scratch.resolve(), "store") / "store"
    settings = [*SETTINGS, *([] if captions else ["text.kind=none"])]
    planned = measure_in_child("scale", "measure_plan", settings=settings, source=source, store=str(store))
    opened = measure_in_child("scale", "measure_plan_open", store=str(store))
    plan_mib = sum(path.stat().st_size for path in (store / revision_prefix(1) / PLAN).iterdir()) / 2**20
    print(f"{machine()}; {records} rows{'' if captions else ', no captions'}\n")
    print_table(
        [
            ("", "s", "MB beyond the start"),
            (f"plan ({plan_mib:.1f} MiB)", f"{planned['seconds']:.1f}", f"{planned['mb']:.0f}"),
            ("of that: listing", f"{planned['list_seconds']:.1f}", ""),
            ("of that: sizes and buckets", f"{planned['scan_seconds']:.1f}", ""),
            ("of that: captions and tables", f"{planned['rest_seconds']:.1f}", ""),
            ("processor, with imports and decoders", f"{planned['cpu_seconds']:.1f}", ""),
            ("open the plan", f"{opened['seconds']:.1f}", f"{opened['mb']:.0f}"),
        ]
    )


@contextlib.contextmanager
def measured() -> Iterator[Figures]:
    """Adds the "seconds" of its block, and the "mb" of memory beyond the start, to what it yields."""
    figures: Figures = {}
    with PeakMemory(every_seconds=EVERY_SECONDS) as memory:
        start = time.perf_counter()
        yield figures
        figures["seconds"] = time.perf_counter() - start
    figures["mb"] = memory.beyond_mb


def write_manifest(manifest: Path, records: int, *, captions: bool) -> Path:
    """Write images of a few shapes, and beside them a Parquet manifest with many names for each, unless it is there.

    The folder holds a hundred links to itself, so "12/34/0.jpg" is "0.jpg": a file for each row would measure the disk
    more than the plan.
    """
    folder = manifest.parent
    folder.mkdir(parents=True, exist_ok=True)
    if manifest.is_file():
        return manifest
    for number in range(100):
        if not (link := folder / f"{number:02d}").is_symlink():
            link.symlink_to(".")
    for i, (height_px, width_px) in enumerate(SHAPES):
        pixels = np.random.default_rng(i).integers(0, 256, (height_px, width_px, 3), np.uint8)
        if not (folder / f"{i}.jpg").is_file():
            Image.fromarray(pixels).save(folder / f"{i}.jpg")
    blocks, half = manifest_blocks(records, captions=captions), manifest.with_suffix(".half")
    first = next(blocks)
    with pq.ParquetWriter(half, first.schema, compression="zstd") as writer:
        for block in (first, *blocks):
            writer.write_table(block)
    return half.rename(manifest)


def manifest_blocks(records: int, *, captions: bool) -> Iterator[pa.Table]:
    """The rows; one caption in ten repeats an earlier one."""
    links, names = pa.array([f"{i:02d}" for i in range(100)]), pa.array([f"{i}.jpg" for i in range(len(SHAPES))])
    for start in range(0, records, BLOCK_ROWS):
        numbers = np.arange(start, min(start + BLOCK_ROWS, records))
        shapes = np.where(numbers % RARE == RARE - 1, len(SHAPES) - 1, numbers % (len(SHAPES) - 1))
        folders = [links.take(pa.array(numbers // step % 100)) for step in (10**6, 10**4, 100, 1)]
        path = pc.binary_join_element_wise(*folders, names.take(pa.array(shapes)), "/")
        columns = {"path": path, "height": SHAPES[shapes, 0], "width": SHAPES[shapes, 1]}
        if captions:
            columns["prompt"] = pa.array([caption(i // 2 if i % 10 == 0 else i) for i in numbers.tolist()])
        yield pa.table(columns)


def caption(number: int) -> str:
    """A caption of 6 to 17 words, different for each number."""
    words = [WORDS[(number >> shift) % len(WORDS)] for shift in range(5 + number % 12)]
    return f"{' '.join(words)} {number}"


def planner_of(
    settings: list[str], source: str, store: str, decoders: Decoders, progress: Progress = lambda *_: None
) -> Planner:
    """List a source, for a plan."""
    recipe = load("demo", settings)
    tokenizers = {name: CaptionTokenizer(section) for name, section in recipe.text.items()}
    buckets = [bucket_name(height_px, width_px) for _, height_px, width_px in recipe.images.table]
    max_tokens = max((section.max_tokens for section in recipe.text.values()), default=0)
    spec = noise_spec(dict.fromkeys(buckets, 1), 4, 0, max_tokens, 64, 64, "none")
    listing = list_source(source, "manifest", progress=lambda done: None)
    return Planner(Path(store), spec, listing, recipe, tokenizers, decoders, progress)


def measure_plan(settings: list[str], source: str, store: str) -> Figures:
    """List and plan a source."""
    last: Figures = {}

    def progress(stage: str, done: int, total: int) -> None:
        last[stage] = time.perf_counter()

    with measured() as figures, Decoders(num_threads()) as decoders:
        start = time.perf_counter()
        planner = planner_of(settings, source, store, decoders, progress)
        listed = time.perf_counter()
        planner.plan_first()
        end = time.perf_counter()
    stages = {
        "list": listed - start,
        "scan": last["scan"] - listed,
        "rest": end - last["scan"],
        "cpu": tree_cpu_seconds(),
    }
    return figures | {f"{stage}_seconds": seconds for stage, seconds in stages.items()} | {"seconds": end - start}


def measure_plan_open(store: str) -> Figures:
    """Open a plan, as every worker does."""
    with measured() as figures:
        read_plan(Path(store), 1).layout.tasks()
    return figures


# --------------------------------------------------------------------------------------------------------------- store

SMALL_BUCKET, SMALL_CHANNELS = "8x8", 32  # one latent of 32 float16 numbers: 64 bytes a row
BATCH, BATCHES_READ = 256, 200


@app.command("store")
def store_command(
    scratch: Scratch, records: Annotated[int, typer.Option(min=1000, help="Of noise, 64 bytes each.")] = IMAGENET
) -> None:
    """Plan, commit, seal, open and read a store of many small rows; each stage is a process of its own."""
    store = str(fresh_folder(scratch.resolve(), f"rows-{records}") / "store")
    stages = ("freeze_rows", "commit_rows", "seal_rows", "open_rows", "read_rows")
    figures = {stage: measure_in_child("scale", stage, store=store, records=records) for stage in stages}
    shards = figures["commit_rows"]["shards"]
    total = sum(path.stat().st_size for path in Path(store).rglob("*") if path.is_file())
    print(f"{machine()}; {records} records of 64 bytes in {shards} shards, {total / 2**30:.1f} GiB\n")
    labels = (
        "plan and freeze",
        "commit all shards",
        "seal",
        "open, with indexes",
        f"read {BATCHES_READ} batches of {BATCH}",
    )
    rows = [
        (label, f"{one['seconds']:.1f}", f"{one['mb']:.0f}")
        for label, one in zip(labels, figures.values(), strict=True)
    ]
    print_table([("", "s", "MB beyond the start"), *rows])


def freeze_rows(store: str, records: int) -> Figures:
    """Write the plan of a store of noise."""
    spec = noise_spec({SMALL_BUCKET: records}, SMALL_CHANNELS, 1000, 0, 0, 64, "none")
    schema = plan_schema(spec)

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, records, BLOCK_ROWS):
            numbers = np.arange(start, min(start + BLOCK_ROWS, records))
            keys = pc.binary_join_element_wise("noise", pa.array(numbers).cast(pa.string()), "/")
            yield pa.record_batch([row_column(field, numbers, keys) for field in schema], schema=schema)

    with measured() as figures:
        plan = first_plan(spec, "synthetic", map_table(schema, batches(), "records"), texts=[], num_tokens=[])
        freeze_plan(Path(store), plan)
    return figures


def row_column(field: pa.Field, numbers: np.ndarray, keys: pa.Array) -> pa.Array:
    """A column of the plan for consecutive records of one bucket."""
    count = len(numbers)
    known = {"key": keys, "row": numbers, "label": numbers % 1000, "source_path": keys}
    known |= {"bucket": pa.array([SMALL_BUCKET]).take(pa.array(np.zeros(count, np.int8)))}
    known |= {"status": pa.array(["planned"]).take(pa.array(np.zeros(count, np.int8)))}
    known |= {"caption_ids": pa.ListArray.from_arrays(np.zeros(count + 1, np.int32), pa.array([], pa.int32()))}
    known |= dict.fromkeys(("revision", "attempts"), np.ones(count, np.int64))
    if field.name in known:
        return pa.array(known[field.name]).cast(field.type)
    return pa.nulls(count, field.type) if field.nullable else pa.array(np.zeros(count)).cast(field.type)


def commit_rows(store: str, records: int) -> Figures:
    """Commit every shard, as one worker does."""
    plan, rng = read_plan(Path(store), 1), np.random.default_rng(0)
    noise = rng.standard_normal((BLOCK_ROWS, SMALL_CHANNELS, 1, 1)).astype(np.float16)
    with measured() as figures:
        writer = StoreWriter(Path(store), plan, own=())
        tasks = writer.missing_tasks()
        for name, shard in tasks:
            (array,) = plan.layout.parts[name].arrays
            rows = np.roll(noise, shard, axis=0)[: len(array.rows_of(shard))]
            results = new_results(plan.layout.parts[name], len(rows))
            results["state"] = STORED
            results["checksum"][:, 0] = [row_checksum(row) for row in rows]
            results["source_checksum"] = results["checksum"]
            writer.commit(name, shard, {array.path: rows}, results)
    return figures | {"shards": len(tasks)}


def seal_rows(store: str, records: int) -> Figures:
    """Seal, as the last worker does."""
    plan = read_plan(Path(store), 1)
    with measured() as figures:
        StoreWriter(Path(store), plan, own=()).seal()
    return figures


def open_rows(store: str, records: int) -> Figures:
    """Open the store, with the indexes of its buckets."""
    with measured() as figures:
        assert len(LatentStore(store).index(SMALL_BUCKET)) == records
    return figures


def read_rows(store: str, records: int) -> Figures:
    """Read shuffled batches of an open store."""
    loader = iter(make_loader(LatentStore(store), global_batch=BATCH))
    with measured() as figures:
        for _ in range(min(BATCHES_READ, records // BATCH)):
            next(loader)
    return figures


# --------------------------------------------------------------------------------------------------------------- start


BUCKET, PLANNED_BATCHES = "256x256", 4096


@app.command("start")
def start_command(
    scratch: Scratch, records: Annotated[int, typer.Option(min=1000, help="Of 8 KiB each.")] = 1_000_000_000
) -> None:
    """Start a worker on a store whose manifest and index are real; its shards are sparse files of zeros."""
    store = fresh_folder(scratch.resolve(), f"start-{records}") / "store"
    num_shards, num_bytes = write_without_rows(store, records)
    started = [measure_in_child("scale", "start_worker", store=str(store)) for _ in range(3)]
    middle = {name: median(figures[name] for figures in started) for name in started[0]}
    print(f"{machine()}; {records} records in {num_shards} shards, an index of {num_bytes / 2**30:.1f} GiB\n")
    print_table(
        [
            ("", "s", "MB beyond the start"),
            ("open the store, with indexes", f"{middle['seconds']:.2f}", f"{middle['mb']:.0f}"),
            ("first batch after that", f"{middle['first_batch']:.2f}", ""),
            (f"plan a batch of {BATCH}", f"{plan_seconds(records):.6f}", ""),
        ]
    )


def write_without_rows(store: Path, records: int) -> tuple[int, int]:
    """Write a sealed store whose shards, tables and hashes have no content. Returns: its shards, bytes of the index."""
    spec = noise_spec({BUCKET: records}, 4, 1000, 0, 0, 64, "none")
    layout = RevisionLayout(spec, 1, {BUCKET: records}, {})
    entries = list[FileEntry]()
    for array in layout.arrays.values():
        for shard in array.shards.tolist():
            size = len(array.rows_of(shard)) * array.row_bytes
            path = store / array.shard_path(shard)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_sparse(path, size, shard_index(array, shard))
            entries.append(FileEntry(path=array.shard_path(shard), bytes=path.stat().st_size, xxh3_128="0" * 32))
    num_shards, num_bytes = len(entries), 0
    for name in index_names(spec):
        path = store / index_path(1, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in ("keys", "checksum"):
            write_sparse(path, 8 * records)
        else:
            write_numbers(path, name, records)
        num_bytes += path.stat().st_size
        entries.append(FileEntry(path=index_path(1, name), bytes=path.stat().st_size, xxh3_128=xxh3_file(path)))
    for name, schema in ((RECORDS, RECORDS_SCHEMA), (CAPTIONS, CAPTIONS_SCHEMA)):
        path = revision_prefix(1) + name
        write_atomic(store / path, [parquet_file(schema.empty_table())])
        entries.append(file_entry(path, (store / path).read_bytes()))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        revision=1,
        base="",
        copies=False,
        fingerprint=spec.fingerprint,
        spec=spec,
        num_planned=records,
        num_stored=records,
        num_rejected=0,
        buckets={BUCKET: records},
        num_captions=0,
        num_caption_tokens=0,
        arrays=[layout.arrays[path] for path in sorted(layout.arrays)],
        files=sorted(entries, key=lambda entry: entry.path),
        root_hash="",
    ).with_hash()
    write_atomic(store / revision_prefix(1) / MANIFEST, canonical_json(manifest.model_dump()))
    return num_shards, num_bytes


def write_sparse(path: Path, size: int, end: bytes = b"") -> None:
    """A file of zeros that takes no space, then some bytes."""
    with path.open("wb") as file:
        file.seek(size)
        file.write(end)
        file.truncate()


def shard_index(array: ArrayLayout, shard: int) -> bytes:
    """What follows the rows of a shard."""
    index = np.full((array.shard_rows, 2), ABSENT, "<u8")
    count = len(array.rows_of(shard))
    index[:count, 0], index[:count, 1] = np.arange(count) * array.row_bytes, array.row_bytes
    return index.tobytes() + google_crc32c.value(index.tobytes()).to_bytes(CRC_BYTES, "little")


def write_numbers(path: Path, name: str, records: int) -> None:
    """An array of the index, for records without captions in order of their rows."""
    counts = {"caption_starts": records + 1, "caption_ids": 0}
    with path.open("wb") as file:
        for start in range(0, counts.get(name, records), 1 << 24):
            numbers = np.arange(start, min(start + (1 << 24), counts.get(name, records)), dtype=np.int32)
            numbers = numbers % 1000 if name == "labels" else numbers * (name in ("rows", "records"))
            file.write(numbers.astype("<i4").data)


def start_worker(store: str) -> Figures:
    """Open the store, with its indexes, and read a batch of zeros."""
    with measured() as figures:
        opened = LatentStore(store)
        assert len(opened.index(BUCKET)) == len(opened)
    start = time.perf_counter()
    next(iter(make_loader(opened, global_batch=BATCH, check="never")))
    return figures | {"first_batch": time.perf_counter() - start}


def plan_seconds(size: int) -> float:
    """Seconds to plan one batch as the loader does, in the mean over many."""
    plan = BatchPlan({BUCKET: size}, BATCH, seed=0)
    plan.batches(0, PLANNED_AHEAD)
    start = time.perf_counter()
    for first in range(0, PLANNED_BATCHES, PLANNED_AHEAD):
        plan.batches(first, PLANNED_AHEAD)
    return (time.perf_counter() - start) / PLANNED_BATCHES


if __name__ == "__main__":
    app()
