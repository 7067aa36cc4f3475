"""The peers of ``loader_peers.py``: how each stores the records of a leandit store and reads them in random order.

Each is used as its documentation advises, the fastest way that it offers. Letters of shapes: N records, B batch,
C latent channels, H W latent size, L caption tokens, D caption width.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from leandit.datasets.batches.row_checks import RowCheck
from leandit.datasets.loader import make_loader
from leandit.datasets.store import LatentStore

STORE = "store"  # its folder, next to those of the peers
RAGGED = ("text", "scales")  # a row for each token of a caption
CLIP, CLIP_TOKENS, FEATURE = "clip_l", 77, "dinov2"  # names in the store
CACHE_LINE = 64  # bytes: numpy copies a fifth slower into unaligned memory
SHARD_RECORDS, SHARD_BYTES = 10_000, 1 << 30  # of safetensors; LightningDiT's
TAR_RECORDS, CHUNK_BYTES, MIN_SHARDS = 1000, 1 << 26, 4  # a shard is full at either; each of two workers has several
SHUFFLE_RECORDS, SHUFFLE_BYTES = 5000, 1 << 27  # of WebDataset's shuffle buffer, whichever is smaller

Batch = dict[str, Any]
"""Arrays or tensors by name: latent (B, C, H, W), label (B,); with captions text (sum L, D), scales (sum L,) of int8
text, lengths (B,); with a second text encoder clip_l (B, 77, D); with image features patches and patch_scales."""
Epochs = Callable[[int], Iterator[Batch]]
"""An open peer: the batches of an epoch, by its number."""


class Planned(NamedTuple):
    """One batch of an order: (B,) rows of one bucket."""

    bucket: str
    rows: np.ndarray


@dataclass(frozen=True)
class Workload:
    """What is read.

    Args:
      buckets: records of each, by "HxW" in pixels.
      batch: B, records of a full batch; every batch is of one bucket.
      token_counts: L of each record's caption; empty without captions.
    """

    name: str
    buckets: dict[str, int]
    batch: int
    token_counts: tuple[int, ...] = ()

    @property
    def num_records(self) -> int:
        """Records of all buckets."""
        return sum(self.buckets.values())

    def plan(self, epoch: int, seed: int) -> list[Planned]:
        """The batches of an epoch, for peers without an order of their own: a global shuffle of every bucket."""
        random = np.random.default_rng((seed, epoch))
        batches = []
        for bucket, count in self.buckets.items():
            order = random.permutation(count)
            batches += [Planned(bucket, order[start : start + self.batch]) for start in range(0, count, self.batch)]
        return batches if len(self.buckets) == 1 else [batches[i] for i in random.permutation(len(batches))]


class Column(NamedTuple):
    """One array of the store, and where each record of a bucket lies in it: a row, or ``lengths`` rows."""

    array: Any
    starts: np.ndarray
    lengths: np.ndarray | None = None


class Records:
    """The records of one bucket, in the order of its rows."""

    def __init__(self, store: LatentStore, bucket: str) -> None:
        index = store.index(bucket)
        self.bucket, self.labels = bucket, index.labels  # (N,) int64
        self.columns = {"latent": Column(store.latents(bucket), index.rows)}
        for name in store.texts:
            text, arrays = store.text(name), store.text(name).arrays
            spans = text.offsets[index.caption_ids], text.lengths[index.caption_ids].astype(np.int64)
            names = (name,) if name else RAGGED
            self.columns |= {key: Column(array, *spans) for key, array in zip(names, arrays, strict=False)}
        if FEATURE in store.features:
            arrays = store.feature(FEATURE, bucket).arrays("patches")
            self.columns |= {
                key: Column(array, index.rows) for key, array in zip(("patches", "patch_scales"), arrays, strict=True)
            }

    def __len__(self) -> int:
        return len(self.labels)

    def record(self, row: int) -> dict[str, np.ndarray]:
        """The arrays of a record, views of the store, by the names of ``Batch``."""
        arrays = {"label": self.labels[row]}
        for name, (array, starts, lengths) in self.columns.items():
            start = int(starts[row])
            arrays[name] = array[start] if lengths is None else array.read(start, start + int(lengths[row]))
        return arrays

    def fields(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each array of a record; of one token where it is ragged."""
        return {name: (str(a.dtype), a.shape[name in RAGGED :]) for name, a in self.record(0).items()}


def records_of(store: LatentStore) -> list[Records]:
    """Every bucket's records."""
    return [Records(store, bucket) for bucket in store.buckets]


# ------------------------------------------------------------------------------------------------- how peers are driven


class PlannedOrder:
    """Sampler with the batches of an epoch, either whole or as lists of (bucket, row)."""

    def __init__(self, workload: Workload, seed: int, *, whole: bool) -> None:
        self.epoch, self._workload, self._seed, self._whole = 0, workload, seed, whole

    def __iter__(self) -> Iterator[Any]:
        for planned in self._workload.plan(self.epoch, self._seed):
            yield planned if self._whole else [(planned.bucket, row) for row in planned.rows.tolist()]


def in_loader(
    dataset_of: Callable[[Workload, Path], Dataset],
    workload: Workload,
    folder: Path,
    seed: int,
    workers: int,
    *,
    whole: bool = False,
) -> Epochs:
    """A map-style dataset behind a DataLoader, keyed by (bucket, row), or by ``Planned`` for whole batches."""
    order = PlannedOrder(workload, seed, whole=whole)
    how: dict[str, Any] = {"batch_sampler": order, "collate_fn": collate}
    if whole:
        how = {"sampler": order, "batch_size": None, "collate_fn": _unchanged}
    loader = DataLoader(dataset_of(workload, folder), num_workers=workers, persistent_workers=workers > 0, **how)

    def epoch(number: int) -> Iterator[Batch]:
        order.epoch = number
        return iter(loader)

    return epoch


def in_threads(read: Callable[[Planned], Batch], workload: Workload, seed: int, threads: int) -> Epochs:
    """Whole batches, read in this thread, or ahead by a pool: one batch for each thread."""

    def epoch(number: int) -> Iterator[Batch]:
        plan = workload.plan(number, seed)
        if not threads:
            yield from map(read, plan)
            return
        ahead: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            for planned in plan:
                ahead.append(pool.submit(read, planned))
                if len(ahead) > threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    return epoch


def collate(samples: list[dict[str, Any]]) -> Batch:
    """A batch of samples: arrays stacked, those of captions one after the other."""
    batch: Batch = {"label": torch.tensor([int(sample["label"]) for sample in samples])}
    for name in samples[0].keys() - batch.keys():
        tensors = [torch.as_tensor(sample[name]) for sample in samples]
        batch[name] = torch.cat(tensors) if name in RAGGED else default_collate(tensors)
        if name == "text":
            batch["lengths"] = torch.tensor([len(text) for text in tensors])
    return batch


def collate_mixed(samples: list[dict[str, Any]]) -> list[Batch]:
    """A batch for each latent shape among the samples."""
    shapes: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for sample in samples:
        shapes.setdefault(tuple(sample["latent"].shape), []).append(sample)
    return [collate(group) for group in shapes.values()]


def aligned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An empty array that starts on a cache line."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _unchanged(batch: Any) -> Any:
    return batch


# ---------------------------------------------------------------------------- flat files: the limit, and memory mapping


def write_flat(parts: list[Records], folder: Path) -> None:
    """One file an array and bucket, record after record; ``fields.json`` has their dtypes and shapes."""
    for records in parts:
        home, fields = folder / records.bucket, records.fields()
        home.mkdir(parents=True)
        (home / "fields.json").write_text(json.dumps(fields))
        with contextlib.ExitStack() as stack:
            files = {name: stack.enter_context((home / f"{name}.bin").open("wb")) for name in fields}
            for row in range(len(records)):
                for name, array in records.record(row).items():
                    files[name].write(array.tobytes())
        if "text" in records.columns:
            np.save(home / "starts.npy", np.concatenate([[0], np.cumsum(records.columns["text"].lengths)]))


class Flat(NamedTuple):
    """The mapped files of a bucket.

    Args:
      arrays: (N, ...) of each name; ragged ones have a row for each token of all captions.
      starts: (N + 1,) first token of each caption, and the end; None without captions.
    """

    arrays: dict[str, np.ndarray]
    starts: np.ndarray | None

    @classmethod
    def open(cls, home: Path) -> Flat:
        """Map the files of a bucket."""
        fields = json.loads((home / "fields.json").read_text())
        mapped = {
            name: np.asarray(np.memmap(home / f"{name}.bin", dtype, "r")).reshape(-1, *shape)
            for name, (dtype, shape) in fields.items()
        }
        starts = home / "starts.npy"
        return cls(mapped, np.load(starts) if starts.exists() else None)


class Gather:
    """The limit: one gather a batch, from the maps into reused memory.

    The next batch overwrites a batch (with threads, some batches later), so no loader can do less work.
    """

    def __init__(self, workload: Workload, folder: Path, slots: int) -> None:
        self._flats = {bucket: Flat.open(folder / bucket) for bucket in workload.buckets}
        self._next = itertools.count().__next__
        tokens = workload.batch * max(workload.token_counts, default=0)
        sizes: dict[str, int] = {}
        for name, array in (item for flat in self._flats.values() for item in flat.arrays.items()):
            rows = tokens if name in RAGGED else workload.batch
            sizes[name] = max(sizes.get(name, 0), rows * int(np.prod(array.shape[1:])))
        dtypes = {name: str(array.dtype) for name, array in next(iter(self._flats.values())).arrays.items()}
        self._buffers = [{name: aligned((size,), dtypes[name]) for name, size in sizes.items()} for _ in range(slots)]

    def __call__(self, planned: Planned) -> Batch:
        flat, rows = self._flats[planned.bucket], planned.rows
        buffers, batch = self._buffers[self._next() % len(self._buffers)], dict[str, torch.Tensor]()
        starts = lengths = rows
        if flat.starts is not None:
            starts = flat.starts[rows]
            lengths = flat.starts[rows + 1] - starts
            batch["lengths"] = torch.from_numpy(lengths)
        for name, array in flat.arrays.items():
            if name in RAGGED:
                out = _copied(array, starts, lengths, buffers[name].reshape(-1, *array.shape[1:]))
            else:
                shape = (len(rows), *array.shape[1:])
                out = buffers[name][: int(np.prod(shape))].reshape(shape)
                np.take(array, rows, axis=0, out=out, mode="clip")  # the other modes buffer their output
            batch[name] = torch.from_numpy(out)
        return batch


def _copied(array: np.ndarray, starts: np.ndarray, lengths: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Rows of captions, one after the other; by caption, whose rows are contiguous: faster than one by one."""
    end = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        out[end : end + length] = array[start : start + length]
        end += length
    return out[:end]


def open_gather(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """The limit; with workers, in threads."""
    return in_threads(Gather(workload, folder, slots=2 * workers + 1), workload, seed, workers)


class MappedSamples(Dataset):
    """A map-style dataset over the flat files, as commonly written by hand."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._folder, self._flats = folder, dict[str, Flat]()

    def __getitem__(self, key: tuple[str, int]) -> dict[str, Any]:
        bucket, row = key
        if bucket not in self._flats:
            self._flats[bucket] = Flat.open(self._folder / bucket)
        arrays, starts = self._flats[bucket]
        span = row if starts is None else slice(*starts[row : row + 2].tolist())
        return {
            name: int(array[row]) if name == "label" else array[span if name in RAGGED else row].copy()
            for name, array in arrays.items()
        }


# ------------------------------------------------------------------------------- the store: leandit, and tensorstore


def open_leandit(workload: Workload, folder: Path, seed: int, workers: int, check: RowCheck = "first") -> Epochs:
    """``make_loader``, as the training loop uses it; "workers" are the threads that read ahead."""
    how: dict[str, Any] = {"seed": seed, "text": "packed", "prefetch": workers, "check": check}
    loader = make_loader(LatentStore(folder), global_batch=workload.batch, **how)
    return lambda _number: map(_stored, loader)  # every pass is the next epoch


def _stored(batch: Any) -> Batch:
    """The arrays of leandit's batch that peers deliver too, as they are stored."""
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


def open_tensorstore(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """tensorstore on the store: one indexed read an array, all captions at once, in the library's own threads.

    Where records lie in the arrays is read through leandit.
    """
    tensorstore: Any = importlib.import_module("tensorstore")

    def open_array(path: str) -> Any:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder / path}/"}}
        return tensorstore.open(spec, read=True, open=True).result()

    of_bucket = {records.bucket: records for records in records_of(LatentStore(folder))}
    paths = {column.array.path for records in of_bucket.values() for column in records.columns.values()}
    arrays = {path: open_array(path) for path in paths}

    def read(planned: Planned) -> Batch:
        reads: dict[str, Any] = {}
        for name, (ours, starts, lengths) in of_bucket[planned.bucket].columns.items():  # start all, then wait
            array, firsts = arrays[ours.path], starts[planned.rows]
            if lengths is None:
                reads[name] = array[firsts].read()
            else:
                ends = firsts + lengths[planned.rows]
                reads[name] = [array[a:b].read() for a, b in zip(firsts.tolist(), ends.tolist(), strict=True)]
        batch: Batch = {"label": of_bucket[planned.bucket].labels[planned.rows]}
        for name, pending in reads.items():
            if not isinstance(pending, list):
                batch[name] = pending.result()
                continue
            parts = [part.result() for part in pending]
            batch[name] = np.concatenate(parts) if name in RAGGED else np.stack(parts)
            if name == "text":
                batch["lengths"] = np.array([len(part) for part in parts])
        return batch

    return in_threads(read, workload, seed, workers)


# --------------------------------------------------------------------------------- files: one an image, and safetensors


def write_npy(parts: list[Records], folder: Path) -> None:
    """One file an image and one a label, as fast-DiT's extractor; the rest in an npz each, as PixArt's captions."""
    for records in parts:
        for kind in ("latents", "labels", "texts"):
            (folder / records.bucket / kind).mkdir(parents=True)
        for row in range(len(records)):
            home, name, arrays = folder / records.bucket, f"{row:07d}", records.record(row)
            np.save(home / "latents" / f"{name}.npy", arrays.pop("latent"))
            np.save(home / "labels" / f"{name}.npy", arrays.pop("label"))
            if arrays:
                np.savez(home / "texts" / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]


class NpySamples(Dataset):
    """As fast-DiT: list and sort the folders at the start, then open two or three files a sample."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        kinds = ("latents", "labels", "texts")
        self._files = {
            bucket: [
                [folder / bucket / kind / name for name in sorted(os.listdir(folder / bucket / kind))] for kind in kinds
            ]
            for bucket in workload.buckets
        }

    def __getitem__(self, key: tuple[str, int]) -> dict[str, Any]:
        bucket, row = key
        latents, labels, texts = self._files[bucket]
        sample = {"latent": np.load(latents[row]), "label": int(np.load(labels[row]))}
        if texts:
            with np.load(texts[row]) as arrays:
                sample |= {name: arrays[name] for name in arrays.files}
        return sample


def write_safetensors(parts: list[Records], folder: Path) -> None:
    """Shards of stacked arrays; those of captions one after the other, with the first row of each."""
    save: Any = importlib.import_module("safetensors.numpy").save_file
    for records in parts:
        home, count = folder / records.bucket, len(records)
        home.mkdir(parents=True)
        each = max(1, min(SHARD_RECORDS, SHARD_BYTES // sum(array.nbytes for array in records.record(0).values())))
        for first in range(0, count, each):
            group = [records.record(row) for row in range(first, min(first + each, count))]
            tensors = {}
            for name in group[0]:
                arrays = [record[name] for record in group]
                tensors[name] = np.concatenate(arrays) if name in RAGGED else np.stack(arrays)
                if name == "text":
                    tensors["starts"] = np.cumsum([0, *map(len, arrays)])
            save(tensors, home / f"{first:07d}.safetensors")


class SafetensorsSamples(Dataset):
    """A table from image to shard, as LightningDiT's, with each shard opened once a process."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._open, self._handles = importlib.import_module("safetensors").safe_open, dict[tuple[int, str], Any]()
        self._places: dict[str, list[tuple[str, int]]] = {bucket: [] for bucket in workload.buckets}
        self._starts: dict[str, torch.Tensor] = {}
        for bucket, places in self._places.items():
            for path in sorted(map(str, (folder / bucket).glob("*.safetensors"))):
                with self._open(path, framework="pt", device="cpu") as shard:
                    places += [(path, i) for i in range(shard.get_slice("label").get_shape()[0])]
                    if "starts" in shard.keys():  # noqa: SIM118
                        self._starts[path] = shard.get_tensor("starts")

    def __getitem__(self, key: tuple[str, int]) -> dict[str, Any]:
        path, i = self._places[key[0]][key[1]]
        handle = os.getpid(), path  # a fork opens its own
        if handle not in self._handles:
            self._handles[handle] = self._open(path, framework="pt", device="cpu")
        shard, sample = self._handles[handle], dict[str, Any]()
        for name in set(shard.keys()) - {"starts"}:
            start, end = self._starts[path][i : i + 2].tolist() if name in RAGGED else (i, i + 1)
            rows = shard.get_slice(name)[start:end]
            sample[name] = rows if name in RAGGED else rows[0]
        return sample


# ------------------------------------------------------------ shards in an order of their own: WebDataset, MDS, LitData


def write_webdataset(parts: list[Records], folder: Path) -> None:
    """Tars of a .npy an array and a .cls a record."""
    webdataset: Any = importlib.import_module("webdataset")
    folder.mkdir(parents=True)
    for records in parts:
        count, latent_bytes = len(records), records.record(0)["latent"].nbytes
        each = max(1, min(TAR_RECORDS, CHUNK_BYTES // latent_bytes, -(-count // MIN_SHARDS)))
        for first in range(0, count, each):
            with webdataset.TarWriter(str(folder / f"{records.bucket}-{first:07d}.tar")) as tar:
                for row in range(first, min(first + each, count)):
                    arrays = records.record(row)
                    sample = {"__key__": f"{records.bucket}-{row:07d}", "cls": int(arrays.pop("label"))}
                    tar.write(sample | {f"{name}.npy": array for name, array in arrays.items()})


def open_webdataset(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """Shuffled shards, a shuffle buffer, batches made in the workers.

    Each worker also delivers its last, smaller batches, so no record is lost.
    """
    webdataset: Any = importlib.import_module("webdataset")
    tars = sorted(folder.glob("*.tar"))
    record_bytes = sum(tar.stat().st_size for tar in tars) // workload.num_records
    buffered = max(1, min(SHUFFLE_RECORDS, SHUFFLE_BYTES // record_bytes))
    shards = webdataset.WebDataset([*map(str, tars)], shardshuffle=len(tars), seed=seed, empty_check=False)
    batches = shards.shuffle(buffered).decode().compose(partial(_batches_by_shape, size=workload.batch))
    loader = webdataset.WebLoader(batches, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return lambda _number: iter(loader)


def _batches_by_shape(samples: Iterable[dict[str, Any]], size: int) -> Iterator[Batch]:
    """Collect samples into batches of one shape; the rest at the end makes smaller batches."""
    waiting: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for files in samples:
        sample = {name.removesuffix(".npy"): array for name, array in files.items() if name.endswith(".npy")}
        group = waiting.setdefault(sample["latent"].shape, [])
        group.append(sample | {"label": files["cls"]})
        if len(group) == size:
            yield collate(waiting.pop(sample["latent"].shape))
    yield from map(collate, waiting.values())


def write_mosaicml(parts: list[Records], folder: Path) -> None:
    """MDS shards of 64 MiB, a stream for each bucket."""
    writer_of: Any = importlib.import_module("streaming").MDSWriter
    for records in parts:
        columns = {
            name: f"ndarray:{dtype}" + ("" if name in RAGGED else f":{','.join(map(str, shape))}")
            for name, (dtype, shape) in records.fields().items()
        } | {"label": "int"}
        with writer_of(out=str(folder / records.bucket), columns=columns, size_limit=CHUNK_BYTES) as writer:
            for row in range(len(records)):
                writer.write(records.record(row) | {"label": int(records.labels[row])})


def open_mosaicml(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """A StreamingDataset with shuffle=True; several buckets are streams, batched "per_stream"."""
    library: Any = importlib.import_module("streaming")
    library.base.util.clean_stale_shared_memory()  # of a run that was killed
    dataset = library.StreamingDataset(
        streams=[library.Stream(local=str(folder / bucket)) for bucket in workload.buckets],
        batch_size=workload.batch,
        shuffle=True,
        shuffle_seed=seed,
        num_canonical_nodes=1,
        batching_method="per_stream" if len(workload.buckets) > 1 else "random",
    )
    return _streamed(DataLoader, dataset, workload, workers, collate_copied)


def collate_copied(samples: list[dict[str, Any]]) -> list[Batch]:
    """``collate_mixed`` of arrays that may be read-only."""
    return collate_mixed([{name: torch.tensor(value) for name, value in sample.items()} for sample in samples])


def _streamed(loader_of: Any, dataset: Any, workload: Workload, workers: int, collate_fn: Callable[..., Any]) -> Epochs:
    how: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": collate_fn}
    loader = loader_of(dataset, batch_size=workload.batch, **how)
    return lambda _number: itertools.chain.from_iterable(loader)


def write_litdata(parts: list[Records], folder: Path) -> None:
    """Chunks of 64 MiB, a dataset for each bucket."""
    cache_of: Any = importlib.import_module("litdata.streaming.cache").Cache
    for records in parts:
        cache = cache_of(str(folder / records.bucket), chunk_bytes=CHUNK_BYTES)
        for row in range(len(records)):
            arrays = records.record(row)
            label = int(arrays.pop("label"))
            cache[row] = {"label": label} | {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        cache.done()
        cache.merge()


def open_litdata(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """A StreamingDataset with shuffle=True; several buckets are combined "per_stream", a batch of one each.

    At the end of a bucket the library fills the batch from another bucket; such batches are split.
    """
    library: Any = importlib.import_module("litdata")
    parts = [library.StreamingDataset(str(folder / bucket), shuffle=True, seed=seed) for bucket in workload.buckets]
    how: dict[str, Any] = {"seed": seed, "iterate_over_all": True, "batching_method": "per_stream"}
    dataset = library.CombinedStreamingDataset(parts, **how) if len(parts) > 1 else parts[0]
    return _streamed(library.StreamingDataLoader, dataset, workload, workers, collate_mixed)


# ----------------------------------------------------------------------------------- Hugging Face Datasets, and FFCV


def write_hf_datasets(parts: list[Records], folder: Path) -> None:
    """One dataset a bucket, with a column of bytes for each array."""
    datasets: Any = importlib.import_module("datasets")
    for records in parts:
        fields = records.fields()
        columns: dict[str, list[Any]] = {name: [] for name in fields}
        for row in range(len(records)):
            for name, array in records.record(row).items():
                columns[name].append(array.tobytes())
        features = datasets.Features({name: datasets.Value("binary") for name in fields})
        datasets.Dataset.from_dict(columns, features).save_to_disk(str(folder / records.bucket))
        (folder / f"{records.bucket}.json").write_text(json.dumps(fields))


class BatchesOfBytes(Dataset):
    """Read the rows of a batch at once, join the bytes of each column and view them in its dtype."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        load: Any = importlib.import_module("datasets").load_from_disk
        self._datasets = {bucket: load(str(folder / bucket)) for bucket in workload.buckets}
        self._fields = {bucket: json.loads((folder / f"{bucket}.json").read_text()) for bucket in workload.buckets}

    def __getitem__(self, planned: Planned) -> Batch:
        batch: Batch = {}
        columns = self._datasets[planned.bucket][planned.rows]
        for name, (dtype, shape) in self._fields[planned.bucket].items():
            batch[name] = torch.frombuffer(bytearray().join(columns[name]), dtype=getattr(torch, dtype)).view(
                -1, *shape
            )
            if name == "text":
                token_bytes = batch[name][0].nbytes
                batch["lengths"] = torch.tensor([len(text) // token_bytes for text in columns[name]])
        return batch


class _Indexed:
    """Records as FFCV's writer reads them: tuples of latent and label, also in its worker processes."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        return np.array(self._records.record(row)["latent"]), int(self._records.labels[row])


def write_ffcv(parts: list[Records], folder: Path) -> None:
    """One .beton file a bucket. Not tried: written after docs.ffcv.io."""
    fields, writer = importlib.import_module("ffcv.fields"), importlib.import_module("ffcv.writer")
    folder.mkdir(parents=True)
    for records in parts:
        dtype, shape = records.fields()["latent"]
        columns = {"latent": fields.NDArrayField(np.dtype(dtype), shape), "label": fields.IntField()}
        writer.DatasetWriter(str(folder / f"{records.bucket}.beton"), columns).from_indexed_dataset(_Indexed(records))


def open_ffcv(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """FFCV's Loader in random order, from the page cache; it always reads in threads."""
    library, decoders = importlib.import_module("ffcv.loader"), importlib.import_module("ffcv.fields.decoders")
    to_tensor = importlib.import_module("ffcv.transforms").ToTensor
    (bucket,) = workload.buckets
    loader = library.Loader(
        str(folder / f"{bucket}.beton"),
        batch_size=workload.batch,
        num_workers=max(1, workers),
        order=library.OrderOption.RANDOM,
        seed=seed,
        os_cache=True,
        drop_last=False,
        pipelines={
            "latent": [decoders.NDArrayDecoder(), to_tensor()],
            "label": [decoders.IntDecoder(), to_tensor()],
        },
    )
    return lambda _number: ({"latent": latent, "label": label.flatten()} for latent, label in loader)


# -------------------------------------------------------------------------------------------------- the table of peers


@dataclass(frozen=True)
class Peer:
    """One way to keep and read records.

    Args:
      write: makes the files from the store's records; None if it reads the store itself.
      open: (workload, folder, seed, workers) to the batches of an epoch; workers are processes, or threads.
      folder: of its files, shared by peers of the same folder.
      module: library that it needs.
      distribution: of the module, where it has another name.
      workloads: those that it reads.
    """

    write: Callable[[list[Records], Path], None] | None
    open: Callable[[Workload, Path, int, int], Epochs]
    folder: str
    module: str = ""
    distribution: str = ""
    workloads: tuple[str, ...] = ("latents", "captions", "aligned")

    @property
    def missing(self) -> str:
        """The distribution that is not installed; empty if all are."""
        missing = self.module and importlib.util.find_spec(self.module) is None
        return self.distribution or self.module if missing else ""

    @property
    def version(self) -> str:
        """Of its library; empty without."""
        return metadata.version(self.distribution or self.module) if self.module else ""


LIMIT = "flat gather"
PEERS = {
    LIMIT: Peer(write_flat, open_gather, "flat"),
    "leandit": Peer(None, open_leandit, STORE),
    "leandit unchecked": Peer(None, partial(open_leandit, check="never"), STORE),
    "memmap dataset": Peer(write_flat, partial(in_loader, MappedSamples), "flat"),
    "npy": Peer(write_npy, partial(in_loader, NpySamples), "npy"),
    "safetensors": Peer(write_safetensors, partial(in_loader, SafetensorsSamples), "safetensors", "safetensors"),
    "webdataset": Peer(write_webdataset, open_webdataset, "webdataset", "webdataset"),
    "mosaicml": Peer(write_mosaicml, open_mosaicml, "mosaicml", "streaming", "mosaicml-streaming"),
    "litdata": Peer(write_litdata, open_litdata, "litdata", "litdata"),
    "hf datasets": Peer(write_hf_datasets, partial(in_loader, BatchesOfBytes, whole=True), "hf-datasets", "datasets"),
    "tensorstore": Peer(None, open_tensorstore, STORE, "tensorstore"),
    "ffcv": Peer(write_ffcv, open_ffcv, "ffcv", "ffcv", workloads=("latents",)),
}
