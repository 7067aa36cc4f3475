"""What it costs to grow a store of millions of images by one in a hundred.

    python benchmarks/growth.py --scratch bench --records 30000000

The first revision is planned and sealed with made-up commit records and shards of one byte, since neither seal nor
growth reads latents. Each stage runs in a process of its own; memory as in ``scale.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from measuring import fresh_folder, machine, measure_in_child, print_table
from scale import IMAGENET, RARE, SETTINGS, Figures, Scratch, measured, planner_of, write_manifest

from leandit.datasets.disk.files import write_atomic
from leandit.datasets.disk.hashing import canonical_json
from leandit.datasets.format.layout import commit_path, rows_path
from leandit.datasets.format.row_layout import latent_shape
from leandit.datasets.format.schema import FORMAT_VERSION, CommitRecord, LatentStatistics, Reject
from leandit.datasets.format.table_schemas import REJECTED, STORED
from leandit.datasets.revisions.catalog import file_entry
from leandit.datasets.revisions.commits import new_results
from leandit.datasets.revisions.plan import read_plan
from leandit.datasets.revisions.writer import StoreWriter
from leandit.precompute.images.decoders import Decoders
from leandit.precompute.planning.compare import Options
from leandit.precompute.planning.images import num_threads

app = typer.Typer(add_completion=False)


@app.command()
def grow(
    scratch: Scratch,
    records: Annotated[int, typer.Option(min=100, help="Images of the first revision.")] = IMAGENET,
    captions: Annotated[bool, typer.Option(help="With captions; else class labels alone.")] = True,
) -> None:
    """Plan and seal a store, then list a source with one image in a hundred more, compare and plan."""
    folder = scratch.resolve() / f"growth-{'captions' if captions else 'labels'}-{records}"
    store = str(fresh_folder(scratch.resolve(), "store") / "store")
    settings = [*SETTINGS, *([] if captions else ["text.kind=none"])]
    first, second = (
        str(write_manifest(folder / f"{name}.parquet", count, captions=captions))
        for name, count in (("first", records), ("second", records + records // 100))
    )
    planned = measure_in_child("scale", "measure_plan", settings=settings, source=first, store=store)
    measure_in_child("growth", "write_commits", store=store)
    sealed = measure_in_child("growth", "measure_seal", store=store)
    grown = measure_in_child("growth", "measure_growth", settings=settings, source=second, store=store)
    print(f"{machine()}; {records} images{'' if captions else ', no captions'}\n")
    rows = [("list and plan", planned), (f"seal {sealed['shards']:.0f} shards", sealed)]
    rows.append((f"list, compare and plan {grown['added']:.0f} more", grown))
    shown = [(label, f"{figures['seconds']:.1f}", f"{figures['mb']:.0f}") for label, figures in rows]
    print_table([("", "s", "MB beyond the start"), *shown])


def write_commits(store: str) -> None:
    """Write made-up commit records of all shards, as workers do, with shards of one byte."""
    root, rng = Path(store), np.random.default_rng(0)
    plan = read_plan(root, 1)
    for part, shard in plan.layout.tasks():
        paths = [array.shard_path(shard) for array in plan.layout.parts[part].arrays]
        for path in paths:
            write_atomic(root / path, b"x")
        rows, is_rows = plan.layout.parts[part].items(shard), bool(plan.layout.parts[part].bucket)
        results = new_results(plan.layout.parts[part], len(rows))
        results["state"] = STORED
        results["checksum"] = results["source_checksum"] = rng.integers(1, 1 << 63, results.shape)
        rejected = rows[::RARE] if is_rows else ()
        statistics = None
        if is_rows:
            results["state"][::RARE] = REJECTED
            _, height, width = latent_shape(plan.spec, plan.layout.parts[part].bucket)
            count = height * width * (len(rows) - len(rejected))  # any other, and the seal would read these shards
            statistics = LatentStatistics(count=count, channel_mean=[0.0] * 4, channel_std=[1.0] * 4)
        results_file = file_entry(rows_path(1, part, shard), results.tobytes())
        record = CommitRecord(
            format_version=FORMAT_VERSION,
            plan=plan.hash,
            part=part,
            shard=shard,
            files=[*(file_entry(path, b"x") for path in paths), results_file],
            rejects=[Reject(row=r, key=f"{r}", stage="encode", reason="nonfinite", detail="made up") for r in rejected],
            fallbacks=[],
            statistics=statistics,
            record_hash="",
        ).with_hash()
        write_atomic(root / rows_path(1, part, shard), [results.tobytes()])
        write_atomic(root / commit_path(1, part, shard), canonical_json(record.model_dump()))


def measure_seal(store: str) -> Figures:
    """Seal, as the last process does after opening the plan."""
    plan = read_plan(Path(store), 1)
    with measured() as figures:
        StoreWriter(Path(store), plan, own=()).seal()
    return figures | {"shards": len(plan.layout.tasks())}


def measure_growth(settings: list[str], source: str, store: str) -> Figures:
    """List a source that has grown, compare it with the store, and plan the next revision."""
    with measured() as figures, Decoders(num_threads()) as decoders:
        plan, comparison = planner_of(settings, source, store, decoders).plan_next(Options())
    assert plan is not None
    assert comparison is not None
    return figures | {"added": comparison.num_added}


if __name__ == "__main__":
    app()
