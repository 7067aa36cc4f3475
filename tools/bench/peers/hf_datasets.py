"""Hugging Face Datasets: latents and captions in columns of bytes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..harness.work import Epochs, Planned, Rows, Served, Workload
from .loops import by_batch


def write_hf_binary(rows: list[Rows], folder: Path) -> None:
    """Write one dataset a bucket, with a column of bytes for the latent and one for the caption."""
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


class BatchesOfBytes(Dataset):
    """Read the rows of a batch at once, join their bytes and view them as float16."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        load: Any = importlib.import_module("datasets").load_from_disk
        self._datasets = {bucket: load(str(folder / bucket)) for bucket in workload.buckets}
        self._workload = workload

    def __getitem__(self, planned: Planned) -> Served:
        columns = self._datasets[planned.bucket][planned.rows]
        latents = _joined(columns["latent"]).view(-1, *self._workload.latent_shape(planned.bucket))
        if "text" not in columns:
            return Served(latents, torch.tensor(columns["label"]))
        width = self._workload.text_width
        lengths = torch.tensor([len(text) // (2 * width) for text in columns["text"]])
        return Served(latents, torch.tensor(columns["label"]), _joined(columns["text"]).view(-1, width), lengths)


def _joined(parts: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray().join(parts), dtype=torch.float16)


def open_hf_binary(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """A DataLoader of whole batches."""
    return by_batch(BatchesOfBytes(workload, folder), workload, seed, workers)
