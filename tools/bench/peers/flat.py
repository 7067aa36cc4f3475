"""One memory-mapped flat file a bucket: the limit, and a hand-written Dataset on the same files."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from ..harness.work import TEXT, Epochs, Planned, Rows, Served, Workload, largest_latent
from .loops import Sample, aligned, by_sample, in_threads

WRITE_ROWS = 1024


class Flat(NamedTuple):
    """The mapped files of a bucket.

    Args:
      latents, labels: (N, C, H, W) and (N,).
      ragged: arrays with a row for each token of all captions, one caption after the other, by name.
      beside: (N, ...) arrays with a row for each record, by name.
      starts: (N + 1,) first token of each caption, and the end; None without captions.
    """

    latents: np.ndarray
    labels: np.ndarray
    ragged: dict[str, np.ndarray]
    beside: dict[str, np.ndarray]
    starts: np.ndarray | None


def write_flat(rows: list[Rows], folder: Path) -> None:
    """Write each bucket's latents, captions and labels, row after row."""
    for part in rows:
        home = folder / part.bucket
        home.mkdir(parents=True, exist_ok=True)
        with (home / "latents.bin").open("wb") as file:
            for start in range(0, len(part), WRITE_ROWS):
                file.write(part.latents(np.arange(start, min(start + WRITE_ROWS, len(part)))).data)
        np.save(home / "labels.npy", part.labels)
        if part.caption_ids is not None:
            np.save(home / "starts.npy", np.concatenate([[0], np.cumsum(part.lengths)]))
            with (home / f"{TEXT}.bin").open("wb") as file:
                for row in range(len(part)):
                    file.write(np.ascontiguousarray(part.text(row)).data)
        for name in part.beside(0):
            with (home / f"{name}.bin").open("wb") as file:
                for row in range(len(part)):
                    file.write(np.ascontiguousarray(part.beside(row)[name]).data)


def open_flat(workload: Workload, folder: Path, bucket: str) -> Flat:
    """Map the files of a bucket."""
    home = folder / bucket
    latents = np.memmap(home / "latents.bin", np.float16, "r").reshape(-1, *workload.latent_shape(bucket))
    labels = np.load(home / "labels.npy")
    ragged, beside = {}, {}
    for field in workload.fields(bucket):
        mapped = np.memmap(home / f"{field.name}.bin", field.dtype, "r").reshape(-1, *field.shape)
        (ragged if field.ragged else beside)[field.name] = np.asarray(mapped)
    starts = np.load(home / "starts.npy") if workload.token_counts else None
    return Flat(np.asarray(latents), labels, ragged, beside, starts)


def open_gather(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """The limit: one gather a batch, from the map into reused memory; with workers, in threads.

    The next batch overwrites a batch (with threads, some batches later), so no loader can do less work.
    """
    buckets = {bucket: open_flat(workload, folder, bucket) for bucket in workload.buckets}
    return in_threads(_Gather(workload, buckets, slots=2 * workers + 1), workload, seed, workers)


class _Gather:
    """Reads batches into a ring of buffers, each large enough for the largest bucket and the longest captions."""

    def __init__(self, workload: Workload, buckets: dict[str, Flat], slots: int) -> None:
        self._buckets, self._next = buckets, itertools.count().__next__
        self._latents = [aligned((workload.batch * largest_latent(workload),), "float16") for _ in range(slots)]
        self._fields = [_buffers(workload) for _ in range(slots)]

    def __call__(self, planned: Planned) -> Served:
        flat, slot, rows = self._buckets[planned.bucket], self._next() % len(self._latents), planned.rows
        shape = (len(rows), *flat.latents.shape[1:])
        latents = self._latents[slot][: int(np.prod(shape))].reshape(shape)
        np.take(flat.latents, rows, axis=0, out=latents, mode="clip")  # the other modes buffer their output
        labels, gathered = flat.labels[rows], dict[str, torch.Tensor]()
        for name, array in flat.beside.items():
            shape = (len(rows), *array.shape[1:])
            out = self._fields[slot][name][: int(np.prod(shape))].reshape(shape)
            gathered[name] = torch.from_numpy(np.take(array, rows, axis=0, out=out, mode="clip"))
        if flat.starts is None:
            return Served(torch.from_numpy(latents), torch.from_numpy(labels), beside=gathered or None)
        starts = flat.starts[rows]
        lengths = flat.starts[rows + 1] - starts
        for name, array in flat.ragged.items():
            out = self._fields[slot][name].reshape(-1, *array.shape[1:])
            gathered[name] = torch.from_numpy(_copied(array, starts, lengths, out))
        text = gathered.pop(TEXT)
        tensors = [torch.from_numpy(array) for array in (latents, labels, lengths)]
        return Served(tensors[0], tensors[1], text, tensors[2], gathered or None)


def _buffers(workload: Workload) -> dict[str, np.ndarray]:
    """Flat memory for each field of the largest batch."""
    tokens, buffers = workload.batch * max(workload.token_counts, default=0), dict[str, np.ndarray]()
    for bucket in workload.buckets:
        for field in workload.fields(bucket):
            size = (tokens if field.ragged else workload.batch) * int(np.prod(field.shape))
            if field.name not in buffers or buffers[field.name].size < size:
                buffers[field.name] = aligned((size,), field.dtype)
    return buffers


def _copied(array: np.ndarray, starts: np.ndarray, lengths: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Rows of captions, one after the other; by caption, whose rows are contiguous: faster than one by one."""
    end = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        out[end : end + length] = array[start : start + length]
        end += length
    return out[:end]


class MappedSamples(Dataset):
    """A map-style dataset over the flat files, as commonly written by hand."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._open = partial(open_flat, workload, folder)
        self._buckets: dict[str, Flat] = {}

    def __getitem__(self, key: tuple[str, int]) -> Sample:
        bucket, row = key
        if bucket not in self._buckets:
            self._buckets[bucket] = self._open(bucket)
        flat = self._buckets[bucket]
        latent = torch.from_numpy(flat.latents[row].copy())
        beside = {name: torch.from_numpy(array[row].copy()) for name, array in flat.beside.items()}
        if flat.starts is None:
            return latent, int(flat.labels[row]), None, beside
        span = slice(*flat.starts[row : row + 2].tolist())
        ragged = {name: torch.from_numpy(array[span].copy()) for name, array in flat.ragged.items()}
        return latent, int(flat.labels[row]), ragged.pop(TEXT), ragged | beside


def open_mapped(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """A memory map, a Dataset, a DataLoader."""
    return by_sample(MappedSamples(workload, folder), workload, seed, workers)
