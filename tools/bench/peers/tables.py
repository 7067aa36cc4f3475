"""Peers that read records by number from files of rows: Hugging Face Datasets, ArrayRecord, Grain."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..harness.work import Epochs, Planned, Rows, Served, Workload
from .loops import as_tensors, by_batch, packed

WRITING = "group_size:1,uncompressed"  # a record a read; noise cannot be compressed, and would only take time
RANDOM_ACCESS = "readahead_buffer_size:0,max_parallelism:0"  # as array_record's own help advises
LABEL_BYTES = 8


def write_hf_binary(rows: list[Rows], folder: Path) -> None:
    """A column of bytes for the latent, one for the caption."""
    datasets: Any = importlib.import_module("datasets")
    for part in rows:
        numbers = range(len(part))
        columns: dict[str, list[Any]] = {
            "latent": [part.latent(row).tobytes() for row in numbers],
            "label": part.labels.tolist(),
        }
        features = {"latent": datasets.Value("binary"), "label": datasets.Value("int64")}
        if part.caption_ids is not None:
            columns["text"] = [np.asarray(part.text(row)).tobytes() for row in numbers]
            features["text"] = datasets.Value("binary")
        dataset = datasets.Dataset.from_dict(columns, datasets.Features(features))
        dataset.save_to_disk(str(folder / part.bucket))


class HfBinary(Dataset):
    """Rows of a batch at once, joined and viewed as float16."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        load: Any = importlib.import_module("datasets").load_from_disk
        self._parts = {bucket: load(str(folder / bucket)) for bucket in workload.buckets}
        self._workload = workload

    def __getitem__(self, planned: Planned) -> Served:
        columns = self._parts[planned.bucket][planned.rows]
        latents = _joined(columns["latent"]).view(-1, *self._workload.latent_shape(planned.bucket))
        if "text" not in columns:
            return Served(latents, torch.tensor(columns["label"]))
        width = self._workload.text_width
        lengths = torch.tensor([len(text) // (2 * width) for text in columns["text"]])
        return Served(latents, torch.tensor(columns["label"]), _joined(columns["text"]).view(-1, width), lengths)


def _joined(parts: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray().join(parts), dtype=torch.float16)


def open_hf_binary(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """Whole batches by their rows."""
    return by_batch(HfBinary(workload, folder), workload, seed, workers)


def write_hf_array(rows: list[Rows], folder: Path) -> None:
    """The documented way for arrays: an Array3D column."""
    datasets: Any = importlib.import_module("datasets")
    for part in rows:
        features = {"latent": datasets.Array3D(part.latent(0).shape, "float16"), "label": datasets.Value("int64")}
        columns = {"latent": [part.latent(row) for row in range(len(part))], "label": part.labels.tolist()}
        datasets.Dataset.from_dict(columns, datasets.Features(features)).save_to_disk(str(folder / part.bucket))


class HfArrays(Dataset):
    """Rows of a batch at once, made tensors by the library; without the dtype it would widen them to float32."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        load: Any = importlib.import_module("datasets").load_from_disk
        self._parts = {
            bucket: load(str(folder / bucket)).with_format(
                "torch", columns=["latent"], output_all_columns=True, dtype=torch.float16
            )
            for bucket in workload.buckets
        }

    def __getitem__(self, planned: Planned) -> Served:
        columns = self._parts[planned.bucket][planned.rows]
        return Served(columns["latent"], torch.tensor(columns["label"]))


def open_hf_array(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """Whole batches by their rows."""
    return by_batch(HfArrays(workload, folder), workload, seed, workers)


def write_array_record(rows: list[Rows], folder: Path) -> None:
    """A file a bucket; a record is its label, its latent and its caption, one after the other."""
    module: Any = importlib.import_module("array_record.python.array_record_module")
    folder.mkdir(parents=True, exist_ok=True)
    for part in rows:
        writer = module.ArrayRecordWriter(str(folder / f"{part.bucket}.array_record"), WRITING)
        for row in range(len(part)):
            text = part.text(row)
            caption = b"" if text is None else text.tobytes()
            writer.write(part.labels[row : row + 1].tobytes() + part.latent(row).tobytes() + caption)
        writer.close()


class ArrayRecordBatches(Dataset):
    """One read of many records a batch; files are opened in the process that reads."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._workload, self._folder = workload, folder
        self._readers: dict[str, Any] = {}

    def __getitem__(self, planned: Planned) -> Served:
        bucket = planned.bucket
        if bucket not in self._readers:
            module: Any = importlib.import_module("array_record.python.array_record_module")
            self._readers[bucket] = module.ArrayRecordReader(
                str(self._folder / f"{bucket}.array_record"), RANDOM_ACCESS
            )
        shape, width = self._workload.latent_shape(bucket), self._workload.text_width
        with_text = bool(self._workload.token_counts)
        parts = [split_record(record, shape, width) for record in self._readers[bucket].read(planned.rows.tolist())]
        latents, labels, texts = zip(*parts, strict=True)
        return as_tensors(packed(np.stack(latents), np.array(labels), list(texts) if with_text else None))


def split_record(record: bytes, shape: tuple[int, ...], width: int) -> tuple[np.ndarray, int, np.ndarray]:
    """Latent (C, H, W), label, and caption (L, D), which has no rows where there is none."""
    count = int(np.prod(shape))
    values = np.frombuffer(record, np.float16, offset=LABEL_BYTES)
    label = int(np.frombuffer(record, np.int64, 1)[0])
    return values[:count].reshape(shape), label, values[count:].reshape(-1, width)


def open_array_record(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """Whole batches by their numbers."""
    return by_batch(ArrayRecordBatches(workload, folder), workload, seed, workers)


def open_grain(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """Grain's pipeline over the same file: shuffle, map, batch; with workers, its own read threads."""
    grain: Any = importlib.import_module("grain")
    (bucket,) = workload.buckets
    source = grain.sources.ArrayRecordDataSource([str(folder / f"{bucket}.array_record")])
    decode = partial(_latent_and_label, shape=workload.latent_shape(bucket))
    options = grain.ReadOptions() if workers else grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)

    def epoch(number: int) -> Iterator[Served]:
        records = grain.MapDataset.source(source).shuffle(seed=1000 * seed + number)
        for latents, labels in records.map(decode).batch(workload.batch).to_iter_dataset(options):
            yield Served(latents, labels)

    return epoch


def _latent_and_label(record: bytes, shape: tuple[int, ...]) -> tuple[np.ndarray, int]:
    latent, label, _ = split_record(record, shape, 1)
    return latent, label
