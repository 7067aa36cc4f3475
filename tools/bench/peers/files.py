"""Peers that keep tensors in plain files: an ``.npy`` for each image, and safetensors shards."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..harness.work import Epochs, Rows, Workload
from .loops import Sample, by_sample

SHARD_RECORDS = 10_000  # LightningDiT's
SHARD_BYTES = 1 << 30


def write_npy(rows: list[Rows], folder: Path) -> None:
    """One file an image and one a label, as fast-DiT's extractor; captions as PixArt's, one npz each, with features."""
    for part in rows:
        for kind in ("latents", "labels", "texts"):
            (folder / part.bucket / kind).mkdir(parents=True, exist_ok=True)
        for row in range(len(part)):
            home, name = folder / part.bucket, f"{row:07d}"
            np.save(home / "latents" / f"{name}.npy", part.latent(row))
            np.save(home / "labels" / f"{name}.npy", part.labels[row : row + 1])
            text = part.text(row)
            if text is not None:
                arrays: dict[str, Any] = {"caption_feature": text, **part.beside(row)}
                np.savez(home / "texts" / f"{name}.npz", **arrays)


class NpySamples(Dataset):
    """As fast-DiT: list and sort the folders at the start, then open two or three files a sample."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._folder, self._with_text = folder, bool(workload.token_counts)
        self._names = {
            bucket: [sorted(os.listdir(folder / bucket / kind)) for kind in ("latents", "labels", "texts")]
            for bucket in workload.buckets
        }

    def __getitem__(self, key: tuple[str, int]) -> Sample:
        bucket, row = key
        home, (latents, labels, texts) = self._folder / bucket, self._names[bucket]
        latent = torch.from_numpy(np.load(home / "latents" / latents[row]))
        label = int(np.load(home / "labels" / labels[row])[0])
        if not self._with_text:
            return latent, label, None
        with np.load(home / "texts" / texts[row]) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
            return latent, label, tensors.pop("caption_feature"), tensors


def open_npy(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """A DataLoader over the files."""
    return by_sample(NpySamples(workload, folder), workload, seed, workers)


def write_safetensors(rows: list[Rows], folder: Path) -> None:
    """Shards of latents and labels, and the texts of their records in one tensor."""
    save: Any = importlib.import_module("safetensors.numpy").save_file
    for part in rows:
        home = folder / part.bucket
        home.mkdir(parents=True, exist_ok=True)
        for shard, numbers in enumerate(_shards(part)):
            tensors = {"latents": part.latents(numbers), "labels": part.labels[numbers]}
            if part.caption_ids is not None:
                tensors["starts"] = np.concatenate([[0], np.cumsum(part.lengths[numbers])])
                tensors["texts"] = np.concatenate([np.asarray(part.text(row)) for row in numbers.tolist()])
            save(tensors, home / f"{shard:05d}.safetensors")


def _shards(part: Rows) -> list[np.ndarray]:
    """Rows of each shard: at most as many as LightningDiT's, and at most ``SHARD_BYTES``."""
    row_bytes = part.latent(0).nbytes
    text = part.text(0)
    if text is not None:
        row_bytes += int(part.lengths.mean() * text[0].nbytes)
    each = max(1, min(SHARD_RECORDS, SHARD_BYTES // row_bytes))
    return [np.arange(start, min(start + each, len(part))) for start in range(0, len(part), each)]


class SafetensorsSamples(Dataset):
    """As LightningDiT: a table from image to shard, and the shard opened for every sample.

    Args:
      keep: open each shard once a process instead.
    """

    def __init__(self, workload: Workload, folder: Path, *, keep: bool) -> None:
        self._open, self._keep = importlib.import_module("safetensors").safe_open, keep
        self._handles: dict[tuple[int, str], Any] = {}
        self._places: dict[str, dict[int, tuple[str, int]]] = {}
        self._starts: dict[str, torch.Tensor] = {}
        for bucket in workload.buckets:
            places = self._places[bucket] = {}
            for path in sorted((folder / bucket).glob("*.safetensors")):
                with self._open(str(path), framework="pt", device="cpu") as shard:
                    count = shard.get_slice("latents").get_shape()[0]
                    places.update({len(places) + i: (str(path), i) for i in range(count)})
                    if workload.token_counts:
                        self._starts[str(path)] = shard.get_tensor("starts")

    def __getitem__(self, key: tuple[str, int]) -> Sample:
        path, i = self._places[key[0]][key[1]]
        if not self._keep:
            with self._open(path, framework="pt", device="cpu") as shard:
                return self._sample(shard, path, i)
        handle = os.getpid(), path  # a fork opens its own
        if handle not in self._handles:
            self._handles[handle] = self._open(path, framework="pt", device="cpu")
        return self._sample(self._handles[handle], path, i)

    def _sample(self, shard: Any, path: str, i: int) -> Sample:
        latent, label = shard.get_slice("latents")[i : i + 1][0], int(shard.get_slice("labels")[i : i + 1][0])
        if path not in self._starts:
            return latent, label, None
        start, end = self._starts[path][i : i + 2].tolist()
        return latent, label, shard.get_slice("texts")[start:end]


def open_safetensors(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """A shard opened for every sample."""
    return by_sample(SafetensorsSamples(workload, folder, keep=False), workload, seed, workers)


def open_safetensors_kept(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """The same shards, opened once."""
    return by_sample(SafetensorsSamples(workload, folder, keep=True), workload, seed, workers)
