"""``leandit bench loader``: how fast a store is read on this machine, beside the limit of the same rows.

Warm: a sample of the records that stays in the page cache, beside copies of the same bytes from a flat mapped file.
Cold: records of the whole store from the disk, beside plain reads of the same bytes at the same places. Both sides
follow the same plan and read in as many threads.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, cycle, repeat
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ...datasets.arrays.sharded_array import ShardedArray
from ...datasets.loader import make_loader
from ...datasets.order.batch_plan import BatchPlan, PlannedBatch
from ...datasets.order.filters import Selection
from ...datasets.store import LatentStore
from ...errors import ResourceError
from ...units import readable_size
from ..terminal.text import Rows

THREADS = 2  # that read ahead from the disk, as in a training run; warm, both sides read in this thread
ROUNDS, MIN_BATCHES = 3, 4  # of the warm measurement, and batches in each
SAMPLE_BYTES = 1 << 29  # beyond any CPU cache; with its copy 1 GiB
COLD_RECORDS = 1 << 14  # at most, of the plain reads
IO_COUNTERS = Path("/proc/self/io")

Parts = list[tuple[ShardedArray, np.ndarray, np.ndarray]]
"""What N records of a bucket hold in each array: from which row, and up to which, (N,) each."""
Place = tuple[Path, int, int]
"""A file, a first byte, and a number of bytes."""


def run(path: Path, *, batch: int, seconds: float, cold: bool, scratch: Path | None) -> dict[str, Any]:
    """Measure the loader and its limit, cold first: mapped pages stay in the page cache.

    Args:
      batch: records of a batch.
      seconds: of each window.
      scratch: folder for the flat copy, at most SAMPLE_BYTES; None: the system's.
    Raises: StoreError, DamageError: as ``LatentStore``; RunError: no records; ResourceError: the scratch folder is too
      small, or this system cannot read cold.
    """
    if cold and not IO_COUNTERS.is_file():
        raise ResourceError(f"--cold: expected Linux, whose '{IO_COUNTERS}' counts what came from the disk.")
    store = LatentStore(path, access="pread")  # not mapped
    parts = {bucket: parts_of(store, bucket) for bucket, size in store.buckets.items() if size}
    every = chain.from_iterable(parts.values())
    num_bytes = sum(int((ends - starts).sum()) * array.row_bytes for array, starts, ends in every)
    share = min(1.0, SAMPLE_BYTES / max(1, num_bytes))
    folder = scratch or Path(tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < num_bytes * share:
        expected = readable_size(num_bytes * share)
        raise ResourceError(f"'{folder}': {readable_size(free)} free, expected {expected}. Use another --scratch.")
    counts = {bucket: math.ceil(size * share) for bucket, size in store.buckets.items()}
    positions = {bucket: None if n == store.buckets[bucket] else np.arange(n) for bucket, n in counts.items()}
    sample = Selection(
        counts=counts,
        positions=positions,
        num_filtered={},
        identity={"first records": counts},
        content_hash=store.content_hash,
        num_stored=store.buckets,
    )
    result: dict[str, Any] = {"store": str(path), "records": len(store), "record_bytes": num_bytes / max(1, len(store))}
    result["batch"] = batch
    if cold:
        result["cold"] = _cold(store, parts, batch, seconds)
    return result | {"warm": _warm(path, sample, batch, seconds, folder)}


def parts_of(store: LatentStore, bucket: str) -> Parts:
    """What the loader reads of each record: one of two flips, one of several captions, all features and images."""
    index, features = store.index(bucket), [store.feature(name, bucket) for name in store.features]
    arrays = [store.latents(bucket), *(store.companion(name, bucket) for name in store.companions)]
    arrays += [array for one in features for output in one.outputs for array in one.arrays(output)]
    parts = [(array, index.rows, index.rows + 1) for array in arrays]
    for text in map(store.text, store.texts):
        captions = index.caption_ids[index.caption_starts[:-1]]  # the first of each record
        if text.spec.has_tokens:
            starts = text.starts[captions]
            parts += [(array, starts, starts + text.lengths[captions]) for array in text.arrays]
        if text.spec.pooled_width:
            rows = text.pooled_rows[captions]
            parts.append((text.pooled, rows, rows + 1))
    return parts


def _rate(sizes: Iterable[int], seconds: float, least: int = 1, start: float | None = None) -> float:
    """Records a second in batches of these sizes, over some seconds and at least so many batches, or to their end."""
    records, elapsed, start = 0, 1.0, time.perf_counter() if start is None else start
    for number, size in enumerate(sizes, 1):
        records, elapsed = records + size, time.perf_counter() - start
        if elapsed >= seconds and number >= least:
            break
    return records / elapsed


def _warm(path: Path, sample: Selection, batch: int, seconds: float, scratch: Path) -> dict[str, Any]:
    """The loader and the gather in turn, both from the page cache, after a pass that checks the rows."""
    how: dict[str, Any] = {"global_batch": batch, "text": "packed", "prefetch": 0, "selection": sample}
    loader = make_loader(store := LatentStore(path), **how)
    deque(loader, 0)
    start = time.perf_counter()
    _ = next(iter(make_loader(LatentStore(path), **how)))
    first_ms = (time.perf_counter() - start) * 1e3
    plan = BatchPlan(sample.counts, batch, 0, selection=sample)
    batches = cycle(map(plan.batch_at, range(plan.batches_per_epoch)))
    with tempfile.TemporaryDirectory(prefix="leandit-bench-", dir=scratch) as folder:
        gather, rates, limits = _gather(store, sample.counts, batch, Path(folder)), list[float](), list[float]()
        for _ in range(ROUNDS):
            rates.append(_rate(map(len, chain.from_iterable(repeat(loader))), seconds, MIN_BATCHES))
            limits.append(_rate(map(gather, batches), seconds, MIN_BATCHES))
    ratios = sorted(rate / limit for rate, limit in zip(rates, limits, strict=True))
    result = {"first_batch_ms": first_ms, "records_per_second": median(rates), "ratio": median(ratios)}
    result |= {"limit_records_per_second": median(limits), "sample_records": sample.num_records}
    return result | {"min_ratio": ratios[0], "max_ratio": ratios[-1]}


def _gather(store: LatentStore, counts: Mapping[str, int], batch: int, folder: Path) -> Callable[[PlannedBatch], int]:
    """What copies the bytes of each record of a batch, from one flat mapped file a bucket into reused memory."""
    flats: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # (bytes,) and (N + 1,) first byte of each record
    for bucket, size in counts.items():
        if not size:
            continue
        parts, starts = parts_of(store, bucket), [0]
        with (folder / bucket).open("wb") as file:
            for record in range(size):
                for array, first, last in parts:
                    file.write(array.read(int(first[record]), int(last[record])).tobytes())
                starts.append(file.tell())
        flats[bucket] = np.asarray(np.memmap(folder / bucket, np.uint8, "r")), np.array(starts)
    memory = np.empty(batch * max(int(np.diff(starts).max()) for _, starts in flats.values()), np.uint8)

    def copy(planned: PlannedBatch) -> int:
        (flat, starts), rows = flats[planned.bucket], planned.positions
        size = int(starts[1])
        if len(flat) == size * (len(starts) - 1) and not np.any(np.diff(starts, 2)):  # all of one size
            out = memory[: len(rows) * size].reshape(len(rows), size)
            np.take(flat.reshape(-1, size), rows, axis=0, out=out, mode="clip")  # other modes buffer the output
            return len(rows)
        end = 0
        for start, stop in zip(starts[rows].tolist(), starts[rows + 1].tolist(), strict=True):
            memory[end : end + stop - start] = flat[start:stop]
            end += stop - start
        return len(rows)

    return copy


def _cold(store: LatentStore, parts: dict[str, Parts], batch: int, seconds: float) -> dict[str, Any]:
    """Plain reads of the first records of an epoch, then the loader, each with the store's files out of the cache."""
    plan = BatchPlan(store.buckets, batch, 0)
    planned = map(plan.batch_at, range(min(plan.batches_per_epoch, max(MIN_BATCHES, COLD_RECORDS // batch))))
    reads = [(len(one.positions), _places(parts[one.bucket], one.positions, store.path)) for one in planned]
    _drop(store.path)
    with ThreadPoolExecutor(THREADS) as pool:
        limit = _rate(pool.map(_pread, reads), seconds)
    _drop(store.path)
    before, start = _disk_bytes(), time.perf_counter()
    loader = make_loader(store := LatentStore(store.path), global_batch=batch, text="packed", prefetch=THREADS)
    _ = [store.index(bucket) for bucket in parts]
    opened, batches = time.perf_counter(), iter(loader)
    first = next(batches)
    first_ms = (time.perf_counter() - start) * 1e3
    rate = _rate(map(len, chain([first], batches)), seconds, start=opened)  # read ahead of the first batch, so with it
    disk_bytes = _disk_bytes() - before
    result = {"first_batch_ms": first_ms, "records_per_second": rate, "limit_records_per_second": limit}
    result |= {"ratio": rate / limit, "disk_mb": disk_bytes / 1e6}
    return result | {"from_disk": disk_bytes > first.stored.nbytes / 2}


def _places(parts: Parts, positions: np.ndarray, folder: Path) -> list[Place]:
    """Where everything lies that records hold; if compressed, all its chunks."""
    places = []
    for record in positions.tolist():
        for array, starts, ends in parts:
            name, offset, _ = array.place(int(starts[record]))
            _, last, size = array.place(int(ends[record]) - 1)  # in the same shard
            places.append((folder / name, offset, last + size - offset))
    return places


def _pread(batch: tuple[int, list[Place]]) -> int:
    """Read byte ranges, without reading ahead."""
    for path, offset, size in batch[1]:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file, size, offset)
        os.close(file)
    return batch[0]


def _drop(folder: Path) -> None:
    """Ask the kernel to drop files from the page cache, which needs no root; pages that a process has mapped stay."""
    for path in filter(Path.is_file, folder.rglob("*")):
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)  # a page that is not written yet stays
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _disk_bytes() -> int:
    """Bytes that this process has had read from disks."""
    return int(dict(re.findall(r"(\w+): (\d+)", IO_COUNTERS.read_text()))["read_bytes"])


def render(result: dict[str, Any]) -> Rows:
    """Names and values of both measurements."""
    rows = [("store", f"{result['records']:,} records of {readable_size(result['record_bytes'])}")]
    rows.append(("read", f"in batches of {result['batch']}; cold in {THREADS} threads, warm in one"))
    limits = {"cold": "plain reads of the same bytes", "warm": "a gather of the same bytes from a flat file"}
    for name in filter(result.get, limits):
        figures = result[name]
        rate, limit = figures["records_per_second"], figures["limit_records_per_second"]
        rows.append((name, f"{rate:,.0f} records/s, {readable_size(rate * result['record_bytes'])}/s"))
        rows.append(("", f"{figures['ratio']:.2f} of {limits[name]}, {limit:,.0f} records/s"))
        rows.append(("", f"{figures['first_batch_ms']:.0f} ms to open the store and read the first batch"))
    if cold := result.get("cold"):
        rows.append(("page cache", f"dropped by posix_fadvise; {cold['disk_mb']:,.1f} MB came from the disk"))
        if not cold["from_disk"]:
            rows.append(("", "NOT COLD: the store is in memory, or another process has mapped it"))
    return rows
