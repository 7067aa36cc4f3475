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
from torch.utils.data import DataLoader
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
    streamed,
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


# ------------------------------------------------------------ shards in an order of their own: WebDataset, MDS, LitData


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


def write_mosaicml(parts: dict[str, list[Record]], folder: Path) -> None:
    """MDS shards of 64 MiB, a stream for each bucket."""
    from streaming import MDSWriter  # pyright: ignore[reportMissingImports]

    for bucket, records in parts.items():
        columns = {
            name: f"ndarray:{array.dtype}" + ("" if name in RAGGED else f":{','.join(map(str, array.shape))}")
            for name, array in records[0].items()
        } | {"label": "int"}
        with MDSWriter(out=str(folder / bucket), columns=columns, size_limit=CHUNK_BYTES) as writer:
            for record in records:
                writer.write(record | {"label": int(record["label"])})


def read_mosaicml(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """A StreamingDataset with shuffle=True; several buckets are streams, batched "per_stream"."""
    import streaming  # pyright: ignore[reportMissingImports]

    streaming.base.util.clean_stale_shared_memory()  # of a run that was killed
    dataset = streaming.StreamingDataset(
        streams=[streaming.Stream(local=str(folder / bucket)) for bucket in workload.buckets],
        batch_size=workload.batch,
        shuffle=True,
        shuffle_seed=seed,
        num_canonical_nodes=1,
        batching_method="per_stream" if len(workload.buckets) > 1 else "random",
    )
    return streamed(DataLoader, dataset, workload, workers)


def write_litdata(parts: dict[str, list[Record]], folder: Path) -> None:
    """Chunks of 64 MiB, a dataset for each bucket."""
    from litdata.streaming.cache import Cache  # pyright: ignore[reportMissingImports]

    for bucket, records in parts.items():
        cache = Cache(str(folder / bucket), chunk_bytes=CHUNK_BYTES)
        for row, record in enumerate(records):
            tensors = {name: torch.from_numpy(array.copy()) for name, array in record.items() if name != "label"}
            cache[row] = {"label": int(record["label"])} | tensors
        cache.done()
        cache.merge()


def read_litdata(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """A StreamingDataset with shuffle=True; several buckets are combined "per_stream", a batch of one each.

    At the end of a bucket the library fills the batch from another bucket; such batches are split.
    """
    import litdata  # pyright: ignore[reportMissingImports]

    parts = [litdata.StreamingDataset(str(folder / bucket), shuffle=True, seed=seed) for bucket in workload.buckets]
    how: dict[str, Any] = {"seed": seed, "iterate_over_all": True, "batching_method": "per_stream"}
    dataset = litdata.CombinedStreamingDataset(parts, **how) if len(parts) > 1 else parts[0]
    return streamed(litdata.StreamingDataLoader, dataset, workload, workers)


# ----------------------------------------------------------------------------------- Hugging Face Datasets, and FFCV


def write_hf_datasets(parts: dict[str, list[Record]], folder: Path) -> None:
    """One dataset a bucket, with a column of bytes for each array, and the first record beside it, for dtypes."""
    datasets: Any = importlib.import_module("datasets")

    for bucket, records in parts.items():
        columns = {name: [record[name].tobytes() for record in records] for name in records[0]}
        features = datasets.Features({name: datasets.Value("binary") for name in columns})
        datasets.Dataset.from_dict(columns, features).save_to_disk(str(folder / bucket))
        np.savez(folder / f"{bucket}.npz", **records[0])  # pyright: ignore[reportArgumentType]


def read_hf_datasets(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """Read the rows of a batch at once, join the bytes of each column and view them in its dtype."""
    datasets: Any = importlib.import_module("datasets")

    tables = {bucket: datasets.load_from_disk(str(folder / bucket)) for bucket in workload.buckets}
    examples = {bucket: dict(np.load(folder / f"{bucket}.npz")) for bucket in workload.buckets}

    def load(key: tuple[str, np.ndarray]) -> Batch:
        bucket, rows = key
        batch, columns = {}, tables[bucket][rows]
        for name, array in examples[bucket].items():
            shape, dtype = array.shape[name in RAGGED :], getattr(torch, str(array.dtype))
            batch[name] = torch.frombuffer(bytearray().join(columns[name]), dtype=dtype).view(-1, *shape)
            if name == "text":
                batch["lengths"] = torch.tensor([len(text) // batch[name][0].nbytes for text in columns[name]])
        return batch

    return in_loader(load, workload, seed, workers, whole=True)


def write_ffcv(parts: dict[str, list[Record]], folder: Path) -> None:
    """One .beton file. Not tried: written after docs.ffcv.io."""
    from ffcv.fields import IntField, NDArrayField  # pyright: ignore[reportMissingImports]
    from ffcv.writer import DatasetWriter  # pyright: ignore[reportMissingImports]

    folder.mkdir(parents=True)
    (records,) = parts.values()
    latent = records[0]["latent"]
    columns = {"latent": NDArrayField(latent.dtype, latent.shape), "label": IntField()}
    samples = [(np.array(record["latent"]), int(record["label"])) for record in records]
    DatasetWriter(str(folder / "all.beton"), columns).from_indexed_dataset(samples)


def read_ffcv(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """FFCV's Loader in random order, from the page cache; it always reads in threads."""
    from ffcv.fields.decoders import IntDecoder, NDArrayDecoder  # pyright: ignore[reportMissingImports]
    from ffcv.loader import Loader, OrderOption  # pyright: ignore[reportMissingImports]
    from ffcv.transforms import ToTensor  # pyright: ignore[reportMissingImports]

    how: dict[str, Any] = {"batch_size": workload.batch, "num_workers": max(1, workers), "seed": seed}
    how |= {"order": OrderOption.RANDOM, "os_cache": True, "drop_last": False}
    pipelines = {"latent": [NDArrayDecoder(), ToTensor()], "label": [IntDecoder(), ToTensor()]}
    loader = Loader(str(folder / "all.beton"), pipelines=pipelines, **how)
    return lambda _number: ({"latent": latent, "label": label.flatten()} for latent, label in loader)


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
    "mosaicml": Peer("mosaicml", write_mosaicml, read_mosaicml, "streaming"),
    "litdata": Peer("litdata", write_litdata, read_litdata, "litdata"),
    "hf datasets": Peer("hf-datasets", write_hf_datasets, read_hf_datasets, "datasets"),
    "ffcv": Peer("ffcv", write_ffcv, read_ffcv, "ffcv"),  # latents alone
}
