"""The peers of ``loader_peers.py``: how each stores the records of a leandit store and reads them in random order.

Each is used as its documentation advises, the fastest way that it offers: by a function that writes its files, and one
that opens them.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from workloads import (
    CLIP,
    CLIP_TOKENS,
    FEATURE,
    RAGGED,
    Batch,
    Epochs,
    Record,
    Workload,
    collate,
    in_loader,
    in_threads,
)

from leandit.datasets.batches.row_checks import RowCheck
from leandit.datasets.loader import make_loader
from leandit.datasets.store import LatentStore

CACHE_LINE = 64  # bytes: numpy copies a fifth slower into unaligned memory
SHARD_RECORDS, SHARD_BYTES = 10_000, 1 << 30  # of safetensors; LightningDiT's
TAR_RECORDS, CHUNK_BYTES, MIN_SHARDS = 1000, 1 << 26, 4  # a shard is full at either; each of two workers has several
SHUFFLE_RECORDS, SHUFFLE_BYTES = 5000, 1 << 27  # of WebDataset's shuffle buffer, whichever is smaller

# ---------------------------------------------------------------------------- flat files: the limit, and memory mapping


def write_flat(parts: dict[str, list[Record]], folder: Path) -> None:
    """One .npy an array and bucket, record after record."""
    for bucket, records in parts.items():
        (folder / bucket).mkdir(parents=True)
        for name, array in stacked(records).items():
            np.save(folder / bucket / f"{name}.npy", array)


def stacked(records: list[Record]) -> dict[str, np.ndarray]:
    """(N, ...) of each name; ragged ones one after the other, with (N + 1,) their ``starts``."""
    arrays = {}
    for name in records[0]:
        each = [record[name] for record in records]
        arrays[name] = np.concatenate(each) if name in RAGGED else np.stack(each)
        if name == "text":
            arrays["starts"] = np.cumsum([0, *map(len, each)])
    return arrays


def open_flat(workload: Workload, folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """The mapped arrays of each bucket."""
    return {
        bucket: {path.stem: np.asarray(np.load(path, mmap_mode="r")) for path in (folder / bucket).iterdir()}
        for bucket in workload.buckets
    }


def read_gather(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """The limit: one gather a batch, from the maps into reused memory; with workers, in threads.

    The next batch overwrites a batch (with threads, some batches later), so no loader can do less work.
    """
    buckets, tokens = open_flat(workload, folder), workload.batch * max(workload.token_counts, default=0)
    sizes: dict[tuple[str, np.dtype], int] = {}
    for name, array in (item for arrays in buckets.values() for item in arrays.items()):
        rows = tokens if name in RAGGED else workload.batch
        sizes[name, array.dtype] = max(sizes.get((name, array.dtype), 0), rows * int(np.prod(array.shape[1:])))
    slots = [{name: aligned(size, dtype) for (name, dtype), size in sizes.items()} for _ in range(2 * workers + 1)]
    numbers = itertools.count()

    def read(bucket: str, rows: np.ndarray) -> Batch:
        arrays, buffers = buckets[bucket], slots[next(numbers) % len(slots)]
        batch: Batch = {}
        starts = arrays.get("starts", np.zeros(0, np.int64))
        for name, array in arrays.items():
            if name in RAGGED:  # a copy of each caption, whose rows are contiguous: faster than a gather
                out, end = buffers[name].reshape(-1, *array.shape[1:]), 0
                for first, last in zip(starts[rows].tolist(), starts[rows + 1].tolist(), strict=True):
                    out[end : end + last - first] = array[first:last]
                    end += last - first
                batch[name] = torch.from_numpy(out[:end])
            elif name != "starts":
                shape = (len(rows), *array.shape[1:])
                out = buffers[name][: int(np.prod(shape))].reshape(shape)
                np.take(array, rows, axis=0, out=out, mode="clip")  # the other modes buffer their output
                batch[name] = torch.from_numpy(out)
        if len(starts):
            batch["lengths"] = torch.from_numpy(starts[rows + 1] - starts[rows])
        return batch

    return in_threads(read, workload, seed, workers)


def aligned(size: int, dtype: np.dtype) -> np.ndarray:
    """An empty array that starts on a cache line."""
    memory = np.empty(size * dtype.itemsize + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size * dtype.itemsize].view(dtype)


def read_memmap(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """A map-style dataset over the flat files, as commonly written by hand."""
    buckets = open_flat(workload, folder)

    def load(key: tuple[str, int]) -> dict[str, Any]:
        arrays, row = buckets[key[0]], key[1]
        span = slice(*arrays["starts"][row : row + 2].tolist()) if "starts" in arrays else slice(0)
        return {
            name: int(array[row]) if name == "label" else array[span if name in RAGGED else row].copy()
            for name, array in arrays.items()
            if name != "starts"
        }

    return in_loader(load, workload, seed, workers)


# --------------------------------------------------------------------------------------------------- the store: leandit


def read_leandit(workload: Workload, folder: Path, seed: int, workers: int, check: RowCheck = "first") -> Epochs:
    """``make_loader``, as the training loop uses it; "workers" are the threads that read ahead."""
    how: dict[str, Any] = {"seed": seed, "text": "packed", "prefetch": workers, "check": check}
    loader = make_loader(LatentStore(folder), global_batch=workload.batch, **how)

    def as_stored(batch: Any) -> Batch:
        arrays = {"latent": batch.stored, "label": batch.labels}
        if batch.text is not None:
            arrays |= {"text": batch.text.tokens, "lengths": batch.text.lengths}
            arrays |= {} if batch.text.scales is None else {"scales": batch.text.scales}
        if CLIP in batch.texts:
            arrays[CLIP] = batch.texts[CLIP].tokens.unflatten(0, (-1, CLIP_TOKENS))
        if FEATURE in batch.features:
            feature = batch.features[FEATURE]
            arrays |= {"patches": feature.stored_patches, "patch_scales": feature.patch_scales}
        return arrays

    return lambda _number: map(as_stored, loader)  # every pass is the next epoch


# --------------------------------------------------------------------------------- files: one an image, and safetensors


def write_npy(parts: dict[str, list[Record]], folder: Path) -> None:
    """One file an image and one a label, as fast-DiT's extractor; the rest in an npz each, as PixArt's captions."""
    for bucket, records in parts.items():
        for kind in ("latents", "labels", "texts"):
            (folder / bucket / kind).mkdir(parents=True)
        for row, record in enumerate(records):
            home, rest = (
                folder / bucket,
                {name: array for name, array in record.items() if name not in ("latent", "label")},
            )
            np.save(home / f"latents/{row:07d}.npy", record["latent"])
            np.save(home / f"labels/{row:07d}.npy", record["label"])
            if rest:
                np.savez(home / f"texts/{row:07d}.npz", **rest)  # pyright: ignore[reportArgumentType]


def read_npy(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """As fast-DiT: list and sort the folders at the start, then open two or three files a sample."""
    files = {
        bucket: [sorted((folder / bucket / kind).iterdir()) for kind in ("latents", "labels", "texts")]
        for bucket in workload.buckets
    }

    def load(key: tuple[str, int]) -> dict[str, Any]:
        (latents, labels, texts), row = files[key[0]], key[1]
        sample = {"latent": np.load(latents[row]), "label": int(np.load(labels[row]))}
        if texts:
            with np.load(texts[row]) as arrays:
                sample |= {name: arrays[name] for name in arrays.files}
        return sample

    return in_loader(load, workload, seed, workers)


def write_safetensors(parts: dict[str, list[Record]], folder: Path) -> None:
    """Shards of stacked arrays; those of captions one after the other, with the first row of each."""
    from safetensors.numpy import save_file

    for bucket, records in parts.items():
        (folder / bucket).mkdir(parents=True)
        each = max(1, min(SHARD_RECORDS, SHARD_BYTES // sum(array.nbytes for array in records[0].values())))
        for first in range(0, len(records), each):
            save_file(stacked(records[first : first + each]), folder / bucket / f"{first:07d}.safetensors")


def read_safetensors(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """A table from image to shard, as LightningDiT's, with each shard opened once a process."""
    from safetensors import safe_open

    handles: dict[tuple[int, str], Any] = {}
    starts: dict[str, torch.Tensor] = {}
    places: dict[str, list[tuple[str, int]]] = {bucket: [] for bucket in workload.buckets}
    for bucket, of_bucket in places.items():
        for path in sorted(map(str, (folder / bucket).iterdir())):
            with safe_open(path, framework="pt", device="cpu") as shard:
                of_bucket += [(path, i) for i in range(shard.get_slice("label").get_shape()[0])]
                if "starts" in shard.keys():  # noqa: SIM118
                    starts[path] = shard.get_tensor("starts")

    def load(key: tuple[str, int]) -> dict[str, Any]:
        path, i = places[key[0]][key[1]]
        handle = os.getpid(), path  # a fork opens its own
        if handle not in handles:
            handles[handle] = safe_open(path, framework="pt", device="cpu")
        shard, sample = handles[handle], dict[str, Any]()
        for name in set(shard.keys()) - {"starts"}:
            first, last = starts[path][i : i + 2].tolist() if name in RAGGED else (i, i + 1)
            rows = shard.get_slice(name)[first:last]
            sample[name] = rows if name in RAGGED else rows[0]
        return sample

    return in_loader(load, workload, seed, workers)


# ----------------------------------------------------------------------- shards in an order of their own: WebDataset


def write_webdataset(parts: dict[str, list[Record]], folder: Path) -> None:
    """Tars of a .npy an array and a .cls a record."""
    webdataset: Any = importlib.import_module("webdataset")

    folder.mkdir(parents=True)
    for bucket, records in parts.items():
        count = len(records)
        each = max(1, min(TAR_RECORDS, CHUNK_BYTES // records[0]["latent"].nbytes, -(-count // MIN_SHARDS)))
        for first in range(0, count, each):
            with webdataset.TarWriter(str(folder / f"{bucket}-{first:07d}.tar")) as tar:
                for row, record in enumerate(records[first : first + each], first):
                    files = {f"{name}.npy": array for name, array in record.items() if name != "label"}
                    tar.write({"__key__": f"{bucket}-{row:07d}", "cls": int(record["label"])} | files)


def read_webdataset(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """Shuffled shards, a shuffle buffer, batches made in the workers.

    Each worker also delivers its last, smaller batches, so no record is lost.
    """
    webdataset: Any = importlib.import_module("webdataset")

    def batches_by_shape(samples: Iterable[dict[str, Any]]) -> Iterator[Batch]:
        waiting: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        for files in samples:
            sample = {name.removesuffix(".npy"): array for name, array in files.items() if name.endswith(".npy")}
            group = waiting.setdefault(sample["latent"].shape, [])
            group.append(sample | {"label": files["cls"]})
            if len(group) == workload.batch:
                yield collate(waiting.pop(sample["latent"].shape))
        yield from map(collate, waiting.values())

    tars = sorted(folder.iterdir())
    record_bytes = sum(tar.stat().st_size for tar in tars) // sum(workload.buckets.values())
    buffered = max(1, min(SHUFFLE_RECORDS, SHUFFLE_BYTES // record_bytes))
    shards = webdataset.WebDataset([*map(str, tars)], shardshuffle=len(tars), seed=seed, empty_check=False)
    batches = shards.shuffle(buffered).decode().compose(batches_by_shape)
    loader = webdataset.WebLoader(batches, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return lambda _number: iter(loader)


# -------------------------------------------------------------------------------------------------- the table of peers


class Peer(NamedTuple):
    """One way to keep and read records.

    Args:
      folder: of its files, shared by peers of the same folder.
      write: makes the files from the store's records; None if it reads the store itself.
      read: (workload, folder, seed, workers) to the batches of an epoch; workers are processes, or threads.
      module: library that it needs.
    """

    folder: str
    write: Callable[[dict[str, list[Record]], Path], None] | None
    read: Callable[[Workload, Path, int, int], Epochs]
    module: str = ""


LIMIT, STORE = "flat gather", "store"
PEERS = {
    LIMIT: Peer("flat", write_flat, read_gather),
    "leandit": Peer(STORE, None, read_leandit),
    "leandit unchecked": Peer(STORE, None, partial(read_leandit, check="never")),
    "memmap dataset": Peer("flat", write_flat, read_memmap),
    "npy": Peer("npy", write_npy, read_npy),
    "safetensors": Peer("safetensors", write_safetensors, read_safetensors, "safetensors"),
    "webdataset": Peer("webdataset", write_webdataset, read_webdataset, "webdataset"),
}
