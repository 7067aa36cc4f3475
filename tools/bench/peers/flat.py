"""One memory-mapped flat file a bucket: the limit, and a hand-written Dataset on the same files."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from ..harness.work import Epochs, Planned, Rows, Served, Workload, largest_latent
from .loops import Sample, aligned, by_sample, in_threads

WRITE_ROWS = 1024


class Flat(NamedTuple):
    """The mapped files of a bucket: latents (N, C, H, W), labels (N,), text (T, D) and starts (N + 1,) of captions."""

    latents: np.ndarray
    labels: np.ndarray
    text: np.ndarray | None
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
            with (home / "text.bin").open("wb") as file:
                for row in range(len(part)):
                    file.write(np.ascontiguousarray(part.text(row)).data)


def open_flat(workload: Workload, folder: Path, bucket: str) -> Flat:
    """Map the files of a bucket."""
    home = folder / bucket
    latents = np.memmap(home / "latents.bin", np.float16, "r").reshape(-1, *workload.latent_shape(bucket))
    labels = np.load(home / "labels.npy")
    if not workload.token_counts:
        return Flat(np.asarray(latents), labels, None, None)
    text = np.memmap(home / "text.bin", np.float16, "r").reshape(-1, workload.text_width)
    return Flat(np.asarray(latents), labels, np.asarray(text), np.load(home / "starts.npy"))


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
        tokens = workload.batch * max(workload.token_counts, default=0)
        self._texts = [aligned((tokens, workload.text_width), "float16") for _ in range(slots)]

    def __call__(self, planned: Planned) -> Served:
        flat, slot, rows = self._buckets[planned.bucket], self._next() % len(self._latents), planned.rows
        shape = (len(rows), *flat.latents.shape[1:])
        latents = self._latents[slot][: int(np.prod(shape))].reshape(shape)
        np.take(flat.latents, rows, axis=0, out=latents, mode="clip")  # the other modes buffer their output
        labels = flat.labels[rows]
        if flat.text is None or flat.starts is None:
            return Served(torch.from_numpy(latents), torch.from_numpy(labels))
        starts = flat.starts[rows]
        lengths = flat.starts[rows + 1] - starts
        text, end = self._texts[slot], 0
        # Copy by caption, whose rows are contiguous: faster than a gather of single rows.
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            text[end : end + length] = flat.text[start : start + length]
            end += length
        arrays = (latents, labels, text[:end], lengths)
        return Served(*map(torch.from_numpy, arrays))


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
        if flat.text is None or flat.starts is None:
            return latent, int(flat.labels[row]), None
        return (
            latent,
            int(flat.labels[row]),
            torch.from_numpy(flat.text[flat.starts[row] : flat.starts[row + 1]].copy()),
        )


def open_mapped(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """A memory map, a Dataset, a DataLoader."""
    return by_sample(MappedSamples(workload, folder), workload, seed, workers)
