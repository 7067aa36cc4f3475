"""What one fresh process of the loader benchmark does: write a peer's files, check an epoch, or time it.

    echo '{"job": "time", "peer": "npy", ...}' | python -m leandit.tools.bench.loader.cell

The last line of stdout is the result, as JSON. Every cell runs in a fresh process, so that no peer is affected by what
another imported, allocated or left running.
"""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ....datasets.store import LatentStore
from ..harness.meters import disk_bytes, read_all, tree_anonymous_mb, tree_cpu_seconds
from ..harness.work import STORE, Epochs, Served, Workload, rows_of
from ..peers.peers import LIMIT, NUM_WORKERS, PEERS, Peer
from .check import check_epoch

FIRST_EPOCH_SECONDS = 2.5  # a slow peer's first epoch is cut here
MIN_BATCHES = 8  # minimum in a window: worker processes deliver in pairs
WRITTEN = "written.json"


@dataclass(frozen=True)
class Job:
    """One cell.

    Args:
      job: "write", "check" or "time".
      peer: name in the table.
      workload: fields of a ``Workload``.
      folder: of the workload: holds the store and every peer's files.
      mode: "w0" or "w2".
      seconds: length of the measured window.
      seed: of the order of records.
    """

    job: str
    peer: str
    workload: dict[str, Any]
    folder: str
    mode: str = "w0"
    seconds: float = 1.0
    seed: int = 0

    @property
    def work(self) -> Workload:
        """The workload; its lists have become tuples again."""
        fields: dict[str, Any] = self.workload | {"token_counts": tuple(self.workload["token_counts"])}
        return Workload(**fields)


def run_cell(job: Job) -> dict[str, Any]:
    """Do one job; "missing" in the result names what is not installed."""
    peer = PEERS[job.peer]
    if peer.missing:
        return {"missing": peer.missing}
    result = {"write": write, "check": check, "time": measure}[job.job](job, peer)
    return result | {"versions": peer.versions}


def files_of(peer: Peer, folder: Path) -> Path:
    """Where a peer's files lie."""
    return folder / peer.files


def write(job: Job, peer: Peer) -> dict[str, Any]:
    """Write a peer's files from the store; files made from this same store are kept."""
    folder = files_of(peer, Path(job.folder))
    if peer.write is None:
        return {"disk_bytes": disk_bytes(folder)}
    store = LatentStore(Path(job.folder) / STORE)
    mark = folder.parent / f"{folder.name}.{WRITTEN}"  # outside the folder: some peers read every file in it
    if not (mark.is_file() and json.loads(mark.read_text()) == {"root_hash": store.root_hash}):
        shutil.rmtree(folder, ignore_errors=True)
        mark.unlink(missing_ok=True)
        peer.write(rows_of(store), folder)
        mark.write_text(json.dumps({"root_hash": store.root_hash}))
    return {"disk_bytes": disk_bytes(folder)}


def check(job: Job, peer: Peer) -> dict[str, Any]:
    """Compare one epoch with the store."""
    folder, work = Path(job.folder), job.work
    epochs = peer.open(work, files_of(peer, folder), job.seed, NUM_WORKERS[job.mode])
    faults = check_epoch(LatentStore(folder / STORE), work, epochs(0))
    return {"check": asdict(faults), "problems": faults.problems}


def measure(job: Job, peer: Peer) -> dict[str, Any]:
    """Time a peer, then the limit in the same process, with as many threads as the peer has workers."""
    folder, work, workers = Path(job.folder), job.work, NUM_WORKERS[job.mode]
    files, limit = files_of(peer, folder), PEERS[LIMIT]
    read_all(files)
    read_all(files_of(limit, folder))
    memory_before = tree_anonymous_mb()
    start = time.perf_counter()
    peer.import_libraries()
    result: dict[str, Any] = {"import_seconds": time.perf_counter() - start}
    result |= _timed(lambda: peer.open(work, files, job.seed, workers), job.seconds)
    gc.collect()  # ends worker processes
    of_limit = _timed(lambda: limit.open(work, files_of(limit, folder), job.seed, workers), job.seconds)
    memory = result.pop("memory_mb")
    result["memory_mb"] = None if memory is None or memory_before is None else memory - memory_before
    result["limit_records_per_second"] = of_limit["records_per_second"]
    result["ratio"] = result["records_per_second"] / of_limit["records_per_second"]
    return result


def _timed(opened: Callable[[], Epochs], seconds: float) -> dict[str, Any]:
    """Open a peer; time its first batch, the rest of the first epoch, and then a window of some seconds."""
    start = time.perf_counter()
    batches = endless(opened())
    _, batch = next(batches)
    first_seconds = time.perf_counter() - start
    count, start = 0, time.perf_counter()
    for epoch, batch in batches:  # a batch stays referenced until the next, as in a training step
        if epoch or time.perf_counter() - start > FIRST_EPOCH_SECONDS:
            break
        count += len(batch.latents)
    first_epoch = count / (time.perf_counter() - start)
    records = num_batches = 0
    cpu, start = tree_cpu_seconds(), time.perf_counter()
    for _, batch in batches:
        records, num_batches = records + len(batch.latents), num_batches + 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds and num_batches >= MIN_BATCHES:
            break
    cpu = tree_cpu_seconds() - cpu
    memory = tree_anonymous_mb()
    batches.close()
    return {
        "first_batch_seconds": first_seconds,
        "first_epoch_records_per_second": first_epoch,
        "records_per_second": records / elapsed,
        "cpu_seconds_per_record": cpu / records,
        "memory_mb": memory,
    }


def endless(epochs: Epochs) -> Generator[tuple[int, Served], None, None]:
    """Batches of epoch after epoch, each with the epoch's number."""
    for number in itertools.count():
        batch = None
        for batch in epochs(number):
            yield number, batch
        if batch is None:
            raise ValueError(f"epoch {number} has no batch")


def main() -> None:
    """Run the job on stdin, and print its result."""
    torch.set_num_threads(1)  # nothing is computed here, so torch's threads would only interfere
    result = run_cell(Job(**json.load(sys.stdin)))
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
