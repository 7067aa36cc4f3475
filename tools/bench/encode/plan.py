"""``leandit bench plan``: time and memory to plan a manifest, to open the plan, and to seal the store.

The manifest is synthetic: rows as PixArt's, whose paths name a few small pictures by a different name for each row.
The commit records are synthetic too: checksums of every row and a few rejects, as workers write them. A seal reads no
latents, so shards are files of one byte. Not measured: reading back all shards, which a seal does where several
processes made them; that time is the disk's.
Each measurement runs in a fresh process. Memory is that of the process and its decoders, anonymous and shared (PSS),
above the memory after imports and loading the tokenizer; mapped files do not count.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from PIL import Image

from ....datasets.disk.files import write_atomic
from ....datasets.disk.hashing import canonical_json
from ....datasets.errors import RecipeError
from ....datasets.format.buckets import bucket_name
from ....datasets.format.layout import CAPTIONS, PLAN, RECORDS, commit_path, is_picture_part
from ....datasets.format.schema import Reject
from ....datasets.revisions.commits import commit_record, file_entry
from ....datasets.revisions.plan import read_plan
from ....datasets.revisions.writer import StoreWriter
from ....precompute.config import PrecomputeRecipe, load
from ....precompute.encoders.text.tokenizer import CaptionTokenizer
from ....precompute.images.decoders import Decoders
from ....precompute.planning.pictures import num_threads
from ....precompute.planning.planner import Planner
from ....precompute.sources.source import list_source
from ...synthetic.store import noise_spec
from ..harness.fresh_process import run_in_fresh_process
from ..harness.meters import PeakMemory, hardware, tree_cpu_seconds
from ..harness.scratch import benchmark_folder, fresh_folder

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

OWN_FOLDER = "bench-plan"
SHAPES = ((256, 256), (224, 336), (336, 224), (200, 400), (30, 256))  # the last fits no bucket
RARE = 1000  # one row in 1000 has the last shape, or is rejected
REPEATED = 10  # one caption in ten repeats an earlier one
WORDS = ("a", "photo", "of", "the", "small", "red", "house", "near", "old", "green", "river", "under", "blue", "sky")
SCHEMA = [("path", pa.string()), ("height", pa.int32()), ("width", pa.int32()), ("prompt", pa.string())]
BLOCK_ROWS = 1 << 16
LOOK_SECONDS = 2.0  # between samples of the memory, which take longer the more is mapped
OVERRIDES = ['images.buckets="pixart"', "images.resolution=256", 'images.crop="bucket"', "text.max_tokens=120"]
SIZES = ("header", "manifest")
STAGES = ("plan", "open", "commit", "seal")  # each a process


def run(scratch: Path, records: int, sizes: str, *, captions: bool) -> dict[str, Any]:
    """Make the manifest if it is missing, plan it, open the plan, and seal.

    Raises:
      RecipeError: unknown ``sizes``, or the scratch folder holds a folder that no benchmark made.
      ResourceError: a measurement failed.
    """
    if sizes not in SIZES:
        raise RecipeError(f"--sizes '{sizes}': needed one of {', '.join(SIZES)}.")
    folder = benchmark_folder(scratch, OWN_FOLDER)
    kind = "captions" if captions else "labels"
    source, store = folder / f"{kind}-{records}", fresh_folder(folder, "store", make=False)
    if not (source / "manifest.parquet").is_file():
        shutil.rmtree(source, ignore_errors=True)
        make_manifest(source, records, captions=captions)
    measured = {}
    for stage in STAGES:
        paths = str(source / "manifest.parquet"), str(store)
        measured[stage] = run_in_fresh_process(__name__, stage, kind, sizes, *paths, command=f"bench plan, {stage}")
    size = sum(path.stat().st_size for path in (store / PLAN).iterdir())
    tables = sum((store / name).stat().st_size for name in (RECORDS, CAPTIONS))
    return {
        "records": records,
        "sizes": sizes,
        "captions": captions,
        "hardware": hardware(),
        "plan": measured["plan"],
        "open": measured["open"],
        "seal": measured["seal"],
        "plan_bytes": size,
        "table_bytes": tables,
    }


def make_manifest(folder: Path, records: int, *, captions: bool) -> None:
    """Write pictures of a few shapes, and a Parquet manifest with many names for each.

    The folder holds a hundred links to itself, so "12/34/0.jpg" is "0.jpg": a file for each row would measure the disk
    more than the plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(100):
        (folder / f"{number:02d}").symlink_to(".")
    rng = np.random.default_rng(0)
    for i, (height_px, width_px) in enumerate(SHAPES):
        Image.fromarray(rng.integers(0, 256, (height_px, width_px, 3), np.uint8)).save(folder / f"{i}.jpg")
    temporary, blocks = folder / "manifest.parquet.part", _blocks(records, captions=captions)
    with pq.ParquetWriter(temporary, pa.schema(SCHEMA if captions else SCHEMA[:-1]), compression="zstd") as writer:
        for block in blocks:
            writer.write_batch(block)
    temporary.rename(folder / "manifest.parquet")


def _blocks(records: int, *, captions: bool) -> Iterator[pa.RecordBatch]:
    links, names = pa.array([f"{i:02d}" for i in range(100)]), pa.array([f"{i}.jpg" for i in range(len(SHAPES))])
    sizes = np.array(SHAPES, np.int32)
    for start in range(0, records, BLOCK_ROWS):
        numbers = np.arange(start, min(start + BLOCK_ROWS, records))
        shapes = np.where(numbers % RARE == RARE - 1, len(SHAPES) - 1, numbers % (len(SHAPES) - 1))
        folders = [links.take(pa.array(numbers // step % 100)) for step in (10**6, 10**4, 100, 1)]
        path = pc.binary_join_element_wise(*folders, names.take(pa.array(shapes)), "/")
        columns = [path, pa.array(sizes[shapes, 0]), pa.array(sizes[shapes, 1])]
        if captions:
            columns.append(pa.array([_caption(i // 2 if i % REPEATED == 0 else i) for i in numbers.tolist()]))
        yield pa.RecordBatch.from_arrays(columns, schema=pa.schema(SCHEMA[: len(columns)]))


def _caption(number: int) -> str:
    """A caption of 6 to 17 words, different for each number."""
    words = [WORDS[(number >> shift) % len(WORDS)] for shift in range(5 + number % 12)]
    return f"{' '.join(words)} {number}"


def measure_plan(recipe: PrecomputeRecipe, source_path: Path, store: Path) -> dict[str, float]:
    """List and plan a source in this process."""
    tokenizers = {name: CaptionTokenizer(section) for name, section in recipe.text_sections.items()}
    buckets = [bucket_name(height_px, width_px) for _, height_px, width_px in recipe.images.table]
    spec = noise_spec(dict.fromkeys(buckets, 1), 4, 0, recipe.text.max_tokens, 64, 64, "none")
    last: dict[str, float] = {}

    def progress(stage: str, done: int, total: int) -> None:
        last[stage] = time.perf_counter()

    with PeakMemory(every_seconds=LOOK_SECONDS) as memory, Decoders(num_threads()) as decoders:
        start = time.perf_counter()
        source = list_source(source_path, "manifest", progress=lambda done: None)
        listed = time.perf_counter()
        Planner(store, spec, source, recipe, tokenizers, decoders, progress).plan_first()
        done = time.perf_counter()
    return {
        "seconds": done - start,
        "cpu_seconds": tree_cpu_seconds(),
        "list_seconds": listed - start,
        "scan_seconds": last["scan"] - listed,
        "rest_seconds": done - last["scan"],
        "anonymous_mb": memory.beyond_mb,
    }


def measure_open(store: Path) -> dict[str, float]:
    """Open a plan in this process, as every worker does."""
    with PeakMemory() as memory:
        start = time.perf_counter()
        plan = read_plan(store, 1)
        tasks = len(plan.layout.tasks())
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "tasks": tasks, "anonymous_mb": memory.beyond_mb}


def write_commits(store: Path) -> dict[str, float]:
    """Write synthetic commit records of all shards; the shards are files of one byte."""
    plan, rng = read_plan(store, 1), np.random.default_rng(0)
    for part, shard in plan.layout.tasks():
        entries = []
        for array in plan.layout.part_arrays(part):
            path = array.shard_path(shard)
            write_atomic(store / path, b"x")
            entries.append(file_entry(path, b"x"))
        rows, is_rows = plan.layout.rows_of(part, shard), is_picture_part(part)
        count = plan.layout.num_items(part, shard)
        checksums = [f"{number:016x}" for number in rng.integers(0, 1 << 63, count).tolist()]
        rejects = []
        for row in range(rows.start, rows.stop, RARE) if is_rows else ():
            checksums[row - rows.start] = ""
            rejects.append(Reject(row=row, key=f"{row}", stage="encode", reason="nonfinite", detail="made up"))
        record = commit_record(
            plan,
            part,
            shard,
            files=entries,
            checksums=checksums,
            source_checksums=checksums if is_rows else [],
            rejects=rejects,
            fallbacks=[],
        )
        write_atomic(store / commit_path(1, part, shard), canonical_json(record.model_dump()))
    return {}


def measure_seal(store: Path) -> dict[str, float]:
    """Read the commit records and seal, as the last coordinator does after opening the plan."""
    plan = read_plan(store, 1)
    with PeakMemory(every_seconds=LOOK_SECONDS) as memory:
        start = time.perf_counter()
        writer = StoreWriter(store, plan, doubted=())
        missing = writer.missing_tasks()
        read = time.perf_counter()
        assert not missing
        manifest = writer.seal()
        done = time.perf_counter()
    return {
        "seconds": done - start,
        "read_seconds": read - start,
        "shards": len(plan.layout.tasks()),
        "stored": manifest.num_stored,
        "anonymous_mb": memory.beyond_mb,
    }


def render(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each line."""
    planned, opened, machine, count = result["plan"], result["open"], result["hardware"], result["records"]
    sealed = result["seal"]
    return [
        ("machine", f"{machine['cpu']}, {machine['cores']} cores"),
        ("manifest", f"{count} rows, sizes from the {result['sizes']}{'' if result['captions'] else ', no captions'}"),
        ("plan", f"{planned['seconds']:.1f} s, {count / planned['seconds']:.0f} records/s"),
        (
            "of that",
            f"list {planned['list_seconds']:.1f} s, sizes {planned['scan_seconds']:.1f} s, "
            f"captions and tables {planned['rest_seconds']:.1f} s",
        ),
        ("processor", f"{planned['cpu_seconds']:.1f} s, with imports and decoders"),
        ("memory", f"{planned['anonymous_mb']:.0f} MB beyond the imports, decoders included"),
        ("plan size", f"{result['plan_bytes'] / 2**20:.1f} MiB"),
        ("opened", f"{opened['seconds']:.1f} s, {opened['anonymous_mb']:.0f} MB beyond the imports"),
        (
            "sealed",
            f"{sealed['seconds']:.1f} s, {sealed['anonymous_mb']:.0f} MB beyond the plan; {sealed['shards']} commit "
            f"records read in {sealed['read_seconds']:.1f} s of that, no latents",
        ),
        ("table size", f"{result['table_bytes'] / 2**20:.1f} MiB"),
    ]


def _main(arguments: Sequence[str]) -> None:
    stage, text, sizes, source, store = arguments
    kind = [] if text == "captions" else ["text.kind=none"]
    recipe = load("demo", [*OVERRIDES, *kind, f"source.sizes={sizes}"])
    match stage:
        case "plan":
            figures = measure_plan(recipe, Path(source), Path(store))
        case "open":
            figures = measure_open(Path(store))
        case "commit":
            figures = write_commits(Path(store))
        case _:
            figures = measure_seal(Path(store))
    print(json.dumps(figures))


if __name__ == "__main__":
    _main(sys.argv[1:])
