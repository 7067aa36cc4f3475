"""leandit's loader and its peers, side by side on the same records, in one run.

    python benchmarks/loader_peers.py --scratch bench --workload latents --peers "leandit,npy,webdataset"

The limit is one gather a batch from a flat mapped file. Every cell is a fresh process that reads its files into the
page cache, times its peer and then the limit, so that a ratio is of two figures taken seconds apart. Rounds go through
the cells in alternating order. One epoch of each peer is compared with the store before it is timed: a loader that
loses or widens records does other work, and its time says nothing.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import itertools
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
import xxhash
from measuring import (
    FOLDER_PREFIX,
    alternate,
    in_child,
    log,
    machine,
    median_and_range,
    print_table,
    tree_cpu_seconds,
    tree_memory_mb,
)
from peers import LIMIT, PEERS, STORE
from workloads import RAGGED, RECORDS, Batch, Epochs, Record, Workload, make_workload, records_of, write_store

from leandit.datasets.store import LatentStore

MODES = {"in process": 0, "2 workers": 2}  # processes, or threads where a peer reads in threads
CELL_SECONDS = 900  # limit of a cell, plus a second for every MB of the store: a peer may hang when it fails
FIRST_EPOCH_SECONDS, MIN_BATCHES = 2.5, 8  # a slow peer's first epoch is cut; a window has as many batches
READ_BYTES = 1 << 24
Figures = dict[str, Any]


def write(peer: str, workload: str, records: int, folder: str) -> Figures:
    """Write a peer's files from the store, and the store first; files made from this same store are kept."""
    work, chosen, files = make_workload(workload, records), PEERS[peer], Path(folder) / PEERS[peer].folder
    version = importlib.import_module(chosen.module).__version__ if chosen.module else ""
    store, made_from = write_store(work, Path(folder) / STORE), Path(folder) / f"{chosen.folder}.made-from"
    if chosen.write and not (made_from.is_file() and made_from.read_text() == store.root_hash):
        shutil.rmtree(files, ignore_errors=True)
        chosen.write(records_of(store), files)
        made_from.write_text(str(store.root_hash))  # outside the folder: some peers read every file in it
    kib = {name: disk_kib(Path(folder) / name) / records for name in (STORE, chosen.folder)}
    return {"version": version, "kib": kib[chosen.folder], "store_kib": kib[STORE]}


def disk_kib(folder: Path) -> float:
    """KiB that the files of a folder occupy, in whole blocks of the file system."""
    return sum(path.stat().st_blocks for path in folder.rglob("*") if path.is_file()) / 2


# ------------------------------------------------------------------------------------ what a process does: check, time


def check(peer: str, workload: str, records: int, folder: str, workers: int) -> Figures:
    """Compare one epoch with the store: the faults in words, whether batches are altered, and how well it shuffles."""
    work = make_workload(workload, records)
    epochs = PEERS[peer].read(work, Path(folder) / PEERS[peer].folder, 0, workers)
    return check_epoch(records_of(LatentStore(Path(folder) / STORE)), work.batch, epochs(0))


def check_epoch(parts: dict[str, list[Record]], batch_size: int, batches: Iterable[Batch]) -> Figures:
    """The faults of an epoch; a latent is recognized by its bits, which are unique.

    Returns: "problems", in words; "altered", whether a record had other bits, dtypes or captions than the store's, so
      that the time means nothing; "shuffle", blocks of B neighbouring records that a batch draws from, as a share of
      those of a global shuffle.
    """
    places = {
        _hash(record["latent"]): (records, row) for records in parts.values() for row, record in enumerate(records)
    }
    assert len(places) == sum(map(len, parts.values())), "two records of the store are equal"
    seen, wrong, shuffles = Counter[int](), Counter[str](), list[float]()
    for batch in batches:
        arrays = {name: np.asarray(array) for name, array in batch.items()}
        keys = [_hash(latent.astype(np.float16)) for latent in arrays["latent"]]
        rows, ends, records = [], np.cumsum(arrays.get("lengths", np.zeros(len(keys), int))), list[Record]()
        for i, key in enumerate(keys):
            if key not in places:
                wrong["altered"] += 1
                continue
            seen[key] += 1
            records, row = places[key]
            rows.append(row)
            for name, expected in records[row].items():
                span = slice(ends[i] - arrays["lengths"][i], ends[i]) if name in RAGGED else i
                if name not in arrays or not _equal(arrays[name][span], expected):
                    wrong[f"with a wrong {name}"] += 1
        num_blocks = -(-len(records) // batch_size)
        if len(rows) == batch_size and num_blocks > 1:
            blocks = len(np.unique(np.array(rows) // batch_size))
            shuffles.append(blocks / (num_blocks * (1 - (1 - 1 / num_blocks) ** batch_size)))
    faults = {"lost": len(places) - len(seen), "doubled": sum(count > 1 for count in seen.values()), **wrong}
    problems = [f"{count} of {len(places)} records {what}" for what, count in faults.items() if count]
    altered = bool(wrong) or not seen
    return {"problems": problems, "altered": altered, "shuffle": float(np.mean(shuffles)) if shuffles else None}


def _hash(latent: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(latent).data)


def _equal(array: np.ndarray, expected: np.ndarray) -> bool:
    return array.dtype == expected.dtype and array.shape == expected.shape and array.tobytes() == expected.tobytes()


def measure(peer: str, workload: str, records: int, folder: str, workers: int, seed: int, seconds: float) -> Figures:
    """Time a peer, then the limit in the same process, with as many threads as the peer has workers."""
    torch.set_num_threads(1)  # nothing is computed here, so torch's threads would only interfere
    for module in filter(importlib.util.find_spec, ("pandas",)):  # pyarrow does when a column first becomes an array
        importlib.import_module(module)
    work, chosen, limit = make_workload(workload, records), PEERS[peer], PEERS[LIMIT]
    files, flat = Path(folder) / chosen.folder, Path(folder) / limit.folder
    read_into_page_cache(files)
    read_into_page_cache(flat)
    memory_before = tree_memory_mb()
    if chosen.module:
        importlib.import_module(chosen.module)
    figures = _timed(lambda: chosen.read(work, files, seed, workers), seconds)
    figures["MB"] = max(0.0, figures["MB"] - memory_before)
    gc.collect()  # ends worker processes
    of_limit = _timed(lambda: limit.read(work, flat, seed, workers), seconds)["records/s"]
    return figures | {"ratio": figures["records/s"] / of_limit}


def read_into_page_cache(folder: Path) -> None:
    """Read every file below a folder."""
    buffer = bytearray(READ_BYTES)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _timed(open_peer: Callable[[], Epochs], seconds: float) -> dict[str, float]:
    """Open a peer; time its first batch, the rest of the first epoch, and then a window of some seconds."""
    start = time.perf_counter()
    batches = _endless(open_peer())
    _, batch = next(batches)
    first_seconds = time.perf_counter() - start
    count, start = 0, time.perf_counter()
    for epoch, batch in batches:  # a batch stays referenced until the next, as in a training step
        if epoch or time.perf_counter() - start > FIRST_EPOCH_SECONDS:
            break
        count += len(batch["latent"])
    first_epoch = count / (time.perf_counter() - start)
    records, elapsed, cpu, start = 0, 0.0, tree_cpu_seconds(), time.perf_counter()
    for number, (_, batch) in enumerate(batches, 1):
        records += len(batch["latent"])
        elapsed = time.perf_counter() - start
        if elapsed >= seconds and number >= MIN_BATCHES:
            break
    cpu = tree_cpu_seconds() - cpu
    memory = tree_memory_mb()
    batches.close()
    figures = {"records/s": records / elapsed, "CPU us": cpu / records * 1e6, "MB": memory}
    return figures | {"first ms": first_seconds * 1e3, "first pass": first_epoch}


def _endless(epochs: Epochs) -> Generator[tuple[int, Batch], None, None]:
    """Batches of epoch after epoch, each with the epoch's number."""
    for number in itertools.count():
        batch = None
        for batch in epochs(number):
            yield number, batch
        if batch is None:
            raise ValueError(f"epoch {number} has no batch")


# --------------------------------------------------------------------------------------------------------- the command


def compare(folder: Path, work: Workload, peers: list[str], rounds: int, seconds: float) -> None:
    """Write, check and time every peer of a workload, each job in a process of its own; print the table."""
    num_records = sum(work.buckets.values())
    asked = {"workload": work.name, "records": num_records, "folder": str(folder)}
    limit, remarks, seeds = float(CELL_SECONDS), list[str](), itertools.count()

    def job(function: str, peer: str, mode: str = "", **how: Any) -> Figures | None:
        log(f"{work.name}: {function} {peer} {mode}")
        arguments = asked | {"peer": peer} | ({"workers": MODES[mode]} if mode else {}) | how
        outcome = in_child("loader_peers", function, arguments, limit_seconds=limit)
        if outcome.status != "done":
            remarks.append(f"{peer}{mode and f', {mode}'}: {function} {outcome.status}: {outcome.message}")
        return outcome.result

    written = {name: done for name in dict.fromkeys([LIMIT, *peers]) if (done := job("write", name))}
    kib = written[LIMIT]["store_kib"]
    limit += kib * num_records / 1000
    cells, shuffles = dict[tuple[str, str], Callable[[], Figures | None]](), dict[str, float]()
    for name, mode in itertools.product(written, MODES):
        checked = job("check", name, mode)
        if checked is None:
            continue
        remarks += [f"{name}, {mode}: {problem}" for problem in checked["problems"]]
        if checked["shuffle"] is not None:
            shuffles[name] = min(checked["shuffle"], shuffles.get(name, 1e9))
        if not checked["altered"]:
            cells[name, mode] = lambda name=name, mode=mode: job(
                "measure", name, mode, seed=next(seeds), seconds=seconds
            )
    found = {cell: good for cell, figures in alternate(cells, rounds).items() if (good := [*filter(None, figures)])}

    def middle(cell: tuple[str, str], key: str, form: str = ",.0f") -> str:
        return format(median(figures[key] for figures in found[cell]), form) if cell in found else "-"

    rows = []
    for name in written:
        ratios = {mode: [figures["ratio"] for figures in found.get((name, mode), ())] for mode in MODES}
        row = [name]
        for mode, values in ratios.items():
            row += [median_and_range(values, "{:.2g}".format) if values else "-"]
            row += [middle((name, mode), key) for key in ("records/s", "first pass")]
        plain = name, "in process"
        row += [middle(plain, "CPU us", ",.1f"), middle(plain, "first ms")]
        row += ["/".join(middle((name, mode), "MB") for mode in MODES), f"{written[name]['kib']:.2f}"]
        rows.append(
            (max(map(median, filter(None, ratios.values())), default=0.0), [*row, f"{shuffles.get(name, 0):.2f}"])
        )
    versions = ", ".join(f"{name} {done['version']}" for name, done in written.items() if done["version"])
    print(
        f"\n{work.name}: {num_records:,} records of {kib:.1f} KiB, {len(work.buckets)} buckets, batches of {work.batch}"
    )
    print(f"{machine()}. {versions}\n")
    of_mode = [f"{what}, {mode}" for mode in MODES for what in ("ratio", "records/s", "first pass")]
    print_table(
        [("peer", *of_mode, "CPU us", "first ms", "MB", "KiB", "shuffle"), *(row for _, row in sorted(rows)[::-1])]
    )
    print("\n".join(["", *remarks]))


def main(
    scratch: Annotated[Path, typer.Option(help="Folder for the stores and the peers' files, which are kept.")],
    workload: Annotated[str, typer.Option(metavar="A,B", help=f"Some of {', '.join(RECORDS)}.")] = "latents,captions",
    peers: Annotated[str, typer.Option(metavar="A,B", help="Only these, and the limit.")] = ",".join(PEERS),
    records: Annotated[int, typer.Option(help="Of each workload; 0: 100000 latents, 2000 of the others.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every cell is measured.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of a measured window.")] = 1.0,
) -> None:
    """Read the same records through leandit and its peers, side by side."""
    names = [name.strip() for name in peers.split(",")]
    if unknown := set(names) - set(PEERS):
        raise typer.BadParameter(f"'{min(unknown)}': unknown peer, expected some of {', '.join(PEERS)}.")
    for work in [make_workload(name, records or RECORDS.get(name, 1)) for name in workload.split(",")]:
        folder = scratch.resolve() / f"{FOLDER_PREFIX}{work.name}-{sum(work.buckets.values())}"
        compare(folder, work, names, rounds, seconds)


if __name__ == "__main__":
    typer.run(main)
