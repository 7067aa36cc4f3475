"""leandit's loader and its peers, side by side on the same records, in one run.

    python benchmarks/loader_peers.py --scratch bench --workload latents --peers "leandit,npy,webdataset"

The limit is one gather a batch from a flat mapped file. Every cell is a fresh process that reads its files into the
page cache, times its peer and then the limit, so that a ratio is of two figures taken seconds apart. Rounds go through
the cells in alternating order. One epoch of each peer is compared with the store before it is timed: a loader that
loses or widens records does other work, and its time says nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
import xxhash
from measuring import (
    FOLDER_PREFIX,
    alternating_rounds,
    disk_bytes,
    hardware,
    in_child,
    log,
    median_and_range,
    print_table,
    read_into_page_cache,
    tree_cpu_seconds,
    tree_memory_mb,
)
from peers import CLIP, CLIP_TOKENS, FEATURE, LIMIT, PEERS, RAGGED, STORE, Batch, Epochs, Workload, records_of

from leandit.datasets.format.schema import FeatureSpec, TextSpec
from leandit.datasets.store import LatentStore
from leandit.tools.synthetic.store import make_store

# Around 1024 x 1024 pixels, as in PixArt's table: each latent is about 128 KiB.
ASPECT_BUCKETS = ("832x1216", "896x1152", "1024x1024", "1152x896", "1216x832")
MIN_TOKENS, MAX_TOKENS = 20, 120  # of a caption; the mean is 60
RECORDS = {"latents": 100_000, "captions": 2_000, "aligned": 2_000}
MODES = {"in process": 0, "2 workers": 2}  # processes, or threads where a peer reads in threads
CELL_SECONDS = 900  # limit of a cell, plus a second for every MB of the store: some peers hang when they fail
FIRST_EPOCH_SECONDS, MIN_BATCHES = 2.5, 8  # a slow peer's first epoch is cut; a window has as many batches
HEAD = ("peer", *(f"{what}, {mode}" for mode in MODES for what in ("ratio", "records/s")))
HEAD += ("CPU us", "first ms", "MB", "KiB", "shuffle")

# ----------------------------------------------------------------------------------------------------------- workloads


def make_workload(name: str, records: int) -> Workload:
    """ImageNet at 256 pixels (8 KiB a record); PixArt at 1024 with captions (600 KiB); SD3 at 256 with REPA (555 KiB).

    Raises: BadParameter: an unknown name.
    """
    if name not in RECORDS:
        raise typer.BadParameter(f"'{name}': expected some of {', '.join(RECORDS)}.")
    if name == "latents":
        return Workload(name, {"256x256": records}, batch=256)
    spread = np.random.default_rng(0).beta(2, 3, records)  # its mean is 0.4
    lengths = tuple((MIN_TOKENS + (MAX_TOKENS - MIN_TOKENS) * spread).round().astype(int).tolist())
    shares = np.diff(np.linspace(0, records, len(ASPECT_BUCKETS) + 1).astype(int)).tolist()
    buckets = {"256x256": records} if name == "aligned" else dict(zip(ASPECT_BUCKETS, shares, strict=True))
    return Workload(name, buckets, batch=32, token_counts=lengths)


def write_store(workload: Workload, folder: Path) -> LatentStore:
    """The store of noise that every peer's files are made from; an existing one is kept."""
    how: dict[str, Any] = {}
    if workload.name == "aligned":
        clip: dict[str, Any] = {"kind": "clip", "width": 768, "max_tokens": CLIP_TOKENS, "full_length": True}
        clip |= {"dtype": "float16", "template": "", "batch_size": 64}
        patches: dict[str, Any] = {"output": "patches", "layer": -1, "width": 768, "patch_px": 16, "dtype": "int8"}
        patches |= {"resolution_px": 256, "images_px": 256}
        how = {"text_dtype": "int8", "texts": {CLIP: TextSpec(**clip)}, "features": {FEATURE: FeatureSpec(**patches)}}
    make_store(folder, workload.buckets, token_counts=workload.token_counts, **how)
    return LatentStore(folder)


# ---------------------------------------------------------------------------- what one process does: write, check, time


def write(peer: str, workload: str, records: int, folder: str) -> dict[str, Any]:
    """Write a peer's files from the store; files made from this same store are kept."""
    chosen, store = PEERS[peer], LatentStore(Path(folder) / STORE)
    if chosen.missing:
        return {"missing": chosen.missing}
    files, made_from = Path(folder) / chosen.folder, Path(folder) / f"{chosen.folder}.made-from"
    if chosen.write and not (made_from.is_file() and made_from.read_text() == store.root_hash):
        shutil.rmtree(files, ignore_errors=True)
        chosen.write(records_of(store), files)
        made_from.write_text(str(store.root_hash))  # outside the folder: some peers read every file in it
    return {"version": chosen.version, "kib_per_record": disk_bytes(files) / 1024 / records}


def check(peer: str, workload: str, records: int, folder: str, workers: int) -> dict[str, Any]:
    """Compare one epoch with the store."""
    work = make_workload(workload, records)
    epochs = PEERS[peer].open(work, Path(folder) / PEERS[peer].folder, 0, workers)
    return check_epoch(LatentStore(Path(folder) / STORE), work, epochs(0))


def check_epoch(store: LatentStore, workload: Workload, batches: Iterable[Batch]) -> dict[str, Any]:
    """The faults of an epoch, and how well it is shuffled; a latent is recognized by its bits, which are unique.

    Returns: "problems", in words; "altered", whether a record had other bits, dtypes or captions than the store's, so
      that the time means nothing; "shuffle", blocks of B neighbouring records that a batch draws from, as a share of
      those of a global shuffle.
    """
    parts = {records.record(0)["latent"].shape: records for records in records_of(store)}
    row_of = {
        _hash(records.record(row)["latent"]): (records, row)
        for records in parts.values()
        for row in range(len(records))
    }
    assert len(row_of) == workload.num_records, "two records of the store are equal"
    counts = dict.fromkeys(row_of, 0)
    wrong: dict[str, int] = {}
    shuffles = []
    for batch in batches:
        arrays = {name: np.asarray(array) for name, array in batch.items()}
        hashes = [_hash(latent.astype(np.float16)) for latent in arrays["latent"]]
        rows, ends = [], np.cumsum(arrays.get("lengths", np.zeros(len(hashes), int)))
        for i, key in enumerate(hashes):
            if key not in row_of:
                wrong["altered"] = wrong.get("altered", 0) + 1
                continue
            counts[key] += 1
            records, row = row_of[key]
            rows.append(row)
            for name, expected in records.record(row).items():
                span = slice(ends[i] - arrays["lengths"][i], ends[i]) if name in RAGGED else i
                if name not in arrays or not _equal(arrays[name][span], expected):
                    wrong[f"with a wrong {name}"] = wrong.get(f"with a wrong {name}", 0) + 1
        blocks = -(-len(parts[arrays["latent"].shape[1:]]) // workload.batch) if rows else 0
        if len(rows) == workload.batch and blocks > 1:
            expected_blocks = blocks * (1 - (1 - 1 / blocks) ** workload.batch)
            shuffles.append(len(np.unique(np.array(rows) // workload.batch)) / expected_blocks)
    seen = np.array(list(counts.values()))
    faults = {"lost": int(np.sum(seen == 0)), "doubled": int(np.sum(seen > 1))} | wrong
    problems = [f"{count} of {workload.num_records} records {what}" for what, count in faults.items() if count]
    altered = bool(wrong) or not seen.any()
    return {"problems": problems, "altered": altered, "shuffle": float(np.mean(shuffles)) if shuffles else None}


def _hash(latent: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(latent))


def _equal(delivered: np.ndarray, expected: np.ndarray) -> bool:
    return (delivered.dtype, delivered.shape, delivered.tobytes()) == (
        expected.dtype,
        expected.shape,
        expected.tobytes(),
    )


def measure(
    peer: str, workload: str, records: int, folder: str, workers: int, seed: int, seconds: float
) -> dict[str, Any]:
    """Time a peer, then the limit in the same process, with as many threads as the peer has workers."""
    torch.set_num_threads(1)  # nothing is computed here, so torch's threads would only interfere
    with contextlib.suppress(ImportError):  # pyarrow imports it when a column first becomes an array
        importlib.import_module("pandas")
    work, chosen, limit = make_workload(workload, records), PEERS[peer], PEERS[LIMIT]
    files, flat = Path(folder) / chosen.folder, Path(folder) / limit.folder
    read_into_page_cache(files)
    read_into_page_cache(flat)
    memory_before = tree_memory_mb()
    if chosen.module:
        importlib.import_module(chosen.module)
    figures = _timed(lambda: chosen.open(work, files, seed, workers), seconds)
    figures["memory_mb"] = max(0.0, figures["memory_mb"] - memory_before)
    gc.collect()  # ends worker processes
    of_limit = _timed(lambda: limit.open(work, flat, seed, workers), seconds)["records_per_second"]
    return figures | {"limit_records_per_second": of_limit, "ratio": figures["records_per_second"] / of_limit}


def _timed(open_peer: Callable[[], Epochs], seconds: float) -> dict[str, float]:
    """Open a peer; time its first batch, the rest of the first epoch, and then a window of some seconds."""
    start = time.perf_counter()
    batches = endless(open_peer())
    _, batch = next(batches)
    first_seconds = time.perf_counter() - start
    count, start = 0, time.perf_counter()
    for epoch, batch in batches:  # a batch stays referenced until the next, as in a training step
        if epoch or time.perf_counter() - start > FIRST_EPOCH_SECONDS:
            break
        count += len(batch["latent"])
    first_epoch = count / (time.perf_counter() - start)
    records, cpu, start = 0, tree_cpu_seconds(), time.perf_counter()
    for number, (_, batch) in enumerate(batches, 1):
        records += len(batch["latent"])
        elapsed = time.perf_counter() - start
        if elapsed >= seconds and number >= MIN_BATCHES:
            break
    cpu = tree_cpu_seconds() - cpu
    memory = tree_memory_mb()
    batches.close()
    return {
        "first_batch_ms": first_seconds * 1e3,
        "first_epoch_records_per_second": first_epoch,
        "records_per_second": records / elapsed,
        "cpu_us_per_record": cpu / records * 1e6,
        "memory_mb": memory,
    }


def endless(epochs: Epochs) -> Generator[tuple[int, Batch], None, None]:
    """Batches of epoch after epoch, each with the epoch's number."""
    for number in itertools.count():
        batch = None
        for batch in epochs(number):
            yield number, batch
        if batch is None:
            raise ValueError(f"epoch {number} has no batch")


# ------------------------------------------------------------------------------------------------- the run, its report


def compare(
    scratch: Path, workload: Workload, peers: list[str], rounds: int, seconds: float, pythons: dict[str, str]
) -> dict[str, Any]:
    """Write, check and time every peer of a workload; each job in a process of its own.

    Returns: for each peer "missing", "failed", or its "checks" and "cells" by mode; a cell is of one round.
    """
    folder = scratch / f"{FOLDER_PREFIX}{workload.name}-{workload.num_records}"
    store = write_store(workload, folder / STORE)
    store_mb = sum(entry.bytes for entry in store.manifest.files) / 1e6 if store.manifest else 0
    names = [name for name in dict.fromkeys([LIMIT, *peers]) if workload.name in PEERS[name].workloads]

    def job(function: str, peer: str, **how: Any) -> dict[str, Any]:
        log(f"{workload.name}: {function} {peer} {' '.join(f'{key}={value}' for key, value in how.items())}")
        asked = {"peer": peer, "workload": workload.name, "records": workload.num_records, "folder": str(folder)} | how
        python = pythons.get(peer, sys.executable)
        outcome = in_child("loader_peers", function, asked, limit_seconds=CELL_SECONDS + store_mb, python=python)
        return outcome.result if outcome.status == "done" else {"failed": outcome.message}

    states: dict[str, dict[str, Any]] = {name: job("write", name) | {"checks": {}, "cells": {}} for name in names}
    cells = []
    for name, mode in itertools.product(names, MODES):
        if "kib_per_record" in states[name]:
            checked = states[name]["checks"][mode] = job("check", name, workers=MODES[mode])
            cells += [] if checked.get("altered", True) else [(name, mode)]
    for number, (name, mode) in alternating_rounds(cells, rounds):
        timed = job("measure", name, workers=MODES[mode], seed=number, seconds=seconds)
        states[name]["cells"].setdefault(mode, []).append(timed)
    megabytes = {"store_mb": store_mb}
    return {
        "workload": workload.name,
        "buckets": workload.buckets,
        "batch": workload.batch,
        **megabytes,
        "peers": states,
    }


def report(result: dict[str, Any]) -> None:
    """Print the table of a workload, the fastest first, and remarks on peers below it."""
    records = sum(result["buckets"].values())
    buckets = f"{len(result['buckets'])} bucket{'s' if len(result['buckets']) > 1 else ''}"
    kib = result["store_mb"] * 1e6 / 1024 / records
    print(f"\n{result['workload']}: {records:,} records of {kib:.1f} KiB, {buckets}, batches of {result['batch']}\n")
    rows, remarks = [], []
    for name, state in result["peers"].items():
        if "kib_per_record" not in state:
            missing = f"not installed ({state['missing']})" if "missing" in state else state["failed"]
            remarks.append(f"{name}: {missing}")
            continue
        for mode, checked in state["checks"].items():
            faults = checked.get("problems") or [checked[key] for key in ("failed",) if key in checked]
            remarks += [f"{name}, {mode}: {fault}" for fault in faults]
        for mode, cells in state["cells"].items():
            remarks += [f"{name}, {mode}: a round failed: {cell['failed']}" for cell in cells if "failed" in cell]
        good = {mode: [c for c in cells if "failed" not in c] for mode, cells in state["cells"].items()}
        good = {mode: cells for mode, cells in good.items() if cells}
        if good:
            rows.append(_row(name, state, good))
    print_table([HEAD, *(cells for _, cells in sorted(rows, reverse=True))])
    print("\n".join(["", *remarks]))


def _row(name: str, state: dict[str, Any], good: dict[str, list[dict[str, Any]]]) -> tuple[float, list[str]]:
    """The median ratio of its better mode, and a row of the table."""
    figures = {mode: {key: [cell[key] for cell in cells] for key in cells[0]} for mode, cells in good.items()}
    either = next(iter(figures.values()))
    row = [name]
    for mode in MODES:
        found = figures.get(mode)
        ratio = median_and_range(found["ratio"], "{:.2g}") if found else "-"
        row += [ratio, f"{median(found['records_per_second']):,.0f}" if found else "-"]
    shuffles = [checked["shuffle"] for checked in state["checks"].values() if checked.get("shuffle") is not None]
    row += [f"{median(either[key]):,.{digits}f}" for key, digits in (("cpu_us_per_record", 1), ("first_batch_ms", 0))]
    row.append("/".join(f"{median(found['memory_mb']):.0f}" for found in figures.values()))
    row += [f"{state['kib_per_record']:.2f}", f"{min(shuffles):.2f}" if shuffles else "-"]
    return max(median(found["ratio"]) for found in figures.values()), row


def main(
    scratch: Annotated[Path, typer.Option(help="Folder for the stores and the peers' files, which are kept.")],
    workload: Annotated[str, typer.Option(metavar="A,B", help=f"Some of {', '.join(RECORDS)}.")] = "latents,captions",
    peers: Annotated[str, typer.Option(metavar="A,B", help="Only these, and the limit.")] = ",".join(PEERS),
    records: Annotated[int, typer.Option(help="Of each workload; 0: 100000 latents, 2000 of the others.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every cell is measured.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of a measured window.")] = 1.0,
    python: Annotated[list[str] | None, typer.Option(metavar="PEER=PATH", help="A peer's own interpreter.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every cell here too.")] = None,
) -> None:
    """Read the same records through leandit and its peers, side by side."""
    names = [name.strip() for name in peers.split(",")]
    pythons = {name: path for name, _, path in (entry.partition("=") for entry in python or [])}
    if unknown := {*names, *pythons} - set(PEERS):
        raise typer.BadParameter(f"'{min(unknown)}': unknown peer, expected some of {', '.join(PEERS)}.")
    workloads = [make_workload(name, records or RECORDS.get(name, 1)) for name in workload.split(",")]
    scratch = scratch.resolve()
    results = [compare(scratch, work, names, rounds, seconds, pythons) for work in workloads]
    found = {
        name: state["version"] for result in results for name, state in result["peers"].items() if state.get("version")
    }
    versions = {name: metadata.version(name) for name in ("leandit", "torch", "numpy")} | found
    now = datetime.now(UTC).isoformat(timespec="seconds")
    about = {"command": shlex.join(sys.argv), "date": now, "hardware": hardware(), "versions": versions}
    for key, value in about.items():
        print(f"{key}: {json.dumps(value)}")
    for result in results:
        report(result)
    if json_file:
        json_file.write_text(json.dumps(about | {"rounds": rounds, "seconds": seconds, "workloads": results}, indent=1))


if __name__ == "__main__":
    typer.run(main)
