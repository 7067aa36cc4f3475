"""Peers that read shards in their own order: WebDataset, MosaicML Streaming, LitData."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..harness.work import Epochs, Rows, Served, Workload
from .loops import Sample, collate

TAR_RECORDS, TAR_BYTES = 1000, 1 << 26  # a shard is full at either
MIN_SHARDS = 4  # so that each of two workers has several to shuffle
SHUFFLE_BYTES, SHUFFLE_RECORDS = 1 << 27, 5000  # of WebDataset's shuffle buffer, whichever is smaller
CHUNK_BYTES = 1 << 26


def write_webdataset(rows: list[Rows], folder: Path) -> None:
    """Tars of a .npy and a .cls a record, and a second .npy with its caption."""
    webdataset: Any = importlib.import_module("webdataset")
    folder.mkdir(parents=True, exist_ok=True)
    for part in rows:
        each = max(1, min(TAR_RECORDS, TAR_BYTES // part.latent(0).nbytes, -(-len(part) // MIN_SHARDS)))
        for start in range(0, len(part), each):
            with webdataset.TarWriter(str(folder / f"{part.bucket}-{start:07d}.tar")) as tar:
                for row in range(start, min(start + each, len(part))):
                    record = {"__key__": f"{part.bucket}-{row:07d}", "npy": part.latent(row)}
                    text = part.text(row)
                    captions = {} if text is None else {"text.npy": text}
                    tar.write(record | {"cls": int(part.labels[row])} | captions)


def open_webdataset(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """Shuffled shards, a shuffle buffer, batches made in the workers.

    Each worker also delivers its last, smaller batches, so no record is lost.
    """
    webdataset: Any = importlib.import_module("webdataset")
    urls = sorted(map(str, folder.glob("*.tar")))
    buffered = int(max(1, min(SHUFFLE_RECORDS, SHUFFLE_BYTES // workload.record_bytes)))
    shards = webdataset.WebDataset(urls, shardshuffle=len(urls), seed=seed, empty_check=False)
    fields = ("npy", "cls", "text.npy") if workload.token_counts else ("npy", "cls")
    samples = shards.shuffle(buffered).decode().to_tuple(*fields)
    batches = samples.compose(partial(batches_by_shape, size=workload.batch))
    loader = webdataset.WebLoader(batches, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return lambda _number: iter(loader)


def batches_by_shape(samples: Iterable[tuple[Any, ...]], size: int) -> Iterator[Served]:
    """Collect samples into batches of one shape; the rest at the end makes smaller batches."""
    waiting: dict[tuple[int, ...], list[Sample]] = {}
    for latent, label, *text in samples:
        group = waiting.setdefault(latent.shape, [])
        group.append((torch.from_numpy(latent), label, torch.from_numpy(text[0]) if text else None))
        if len(group) == size:
            yield collate(waiting.pop(latent.shape))
    yield from map(collate, waiting.values())


def write_litdata(rows: list[Rows], folder: Path) -> None:
    """Chunks of 64 MiB, a dataset for each bucket."""
    cache_of: Any = importlib.import_module("litdata.streaming.cache").Cache
    for part in rows:
        cache = cache_of(str(folder / part.bucket), chunk_bytes=CHUNK_BYTES)
        for row in range(len(part)):
            cache[row] = _tensors(part, row)
        cache.done()
        cache.merge()


def _tensors(part: Rows, row: int) -> dict[str, Any]:
    text = part.text(row)
    captions = {} if text is None else {"text": torch.from_numpy(text.copy())}
    return {"latent": torch.from_numpy(part.latent(row).copy()), "label": int(part.labels[row])} | captions


def open_litdata(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """A StreamingDataset with shuffle=True; several buckets are combined "per_stream", a batch of one each.

    At the end of a bucket the library fills the batch from another bucket; such batches are split.
    """
    litdata: Any = importlib.import_module("litdata")
    parts = [litdata.StreamingDataset(str(folder / bucket), shuffle=True, seed=seed) for bucket in workload.buckets]
    dataset = parts[0]
    if len(parts) > 1:
        dataset = litdata.CombinedStreamingDataset(
            parts, seed=seed, iterate_over_all=True, batching_method="per_stream"
        )
    loader = litdata.StreamingDataLoader(
        dataset,
        batch_size=workload.batch,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=collate_named,
    )
    return lambda _number: itertools.chain.from_iterable(loader)


def collate_named(samples: list[dict[str, Any]]) -> list[Served]:
    """Batches of samples with named fields, one for each shape among them."""
    shapes: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        group = shapes.setdefault(tuple(sample["latent"].shape), [])
        group.append((sample["latent"], int(sample["label"]), sample.get("text")))
    return [collate(group) for group in shapes.values()]


def write_mosaicml(rows: list[Rows], folder: Path) -> None:
    """MDS shards of 64 MiB, a stream for each bucket."""
    writer_of: Any = importlib.import_module("streaming").MDSWriter
    for part in rows:
        shape = ",".join(map(str, part.latent(0).shape))
        columns = {"latent": f"ndarray:float16:{shape}", "label": "int"}
        if part.caption_ids is not None:
            columns["text"] = "ndarray:float16"
        with writer_of(out=str(folder / part.bucket), columns=columns, size_limit=CHUNK_BYTES) as writer:
            for row in range(len(part)):
                text = part.text(row)
                captions = {} if text is None else {"text": text}
                writer.write({"latent": part.latent(row), "label": int(part.labels[row])} | captions)


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
    loader = DataLoader(
        dataset,
        batch_size=workload.batch,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=collate_arrays,
    )
    return lambda _number: itertools.chain.from_iterable(loader)


def collate_arrays(samples: list[dict[str, Any]]) -> list[Served]:
    """``collate_named`` for numpy fields, which may be read-only."""
    return collate_named([{k: torch.tensor(v) for k, v in sample.items()} for sample in samples])
