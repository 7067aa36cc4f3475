"""Readers of the store's own Zarr arrays: leandit, zarr-python, tensorstore."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ....datasets.batches.batch import Batch
from ....datasets.batches.row_checks import RowCheck
from ....datasets.loader import make_loader
from ....datasets.store import LatentStore
from ..harness.work import (
    CLIP,
    CLIP_TOKENS,
    FEATURE,
    PATCH_SCALES,
    PATCHES,
    SCALES,
    STORE,
    Epochs,
    Planned,
    Rows,
    Served,
    Workload,
    largest_latent,
)
from .loops import aligned, by_batch, in_threads, packed

LINK = "store"


def load_leandit() -> None:
    """Import pandas if it is installed: pyarrow would do so when a column first becomes an array."""
    if importlib.util.find_spec("pandas"):
        importlib.import_module("pandas")


def open_leandit(workload: Workload, folder: Path, seed: int, workers: int, check: RowCheck = "first") -> Epochs:
    """``make_loader``, as the training loop uses it; "workers" are the threads that read ahead."""
    store = LatentStore(folder)
    loader = make_loader(store, global_batch=workload.batch, seed=seed, text="packed", prefetch=workers, check=check)

    def epoch(_number: int) -> Iterator[Served]:
        return map(served, loader)  # every pass is the next epoch

    return epoch


def served(batch: Batch) -> Served:
    """The parts of the loader's batch that peers deliver too, as they are stored."""
    if batch.text is None:
        return Served(batch.stored, batch.labels)
    beside: dict[str, Any] = {} if batch.text.scales is None else {SCALES: batch.text.scales}
    if CLIP in batch.texts and (packed := batch.texts[CLIP].tokens) is not None:
        beside[CLIP] = packed.unflatten(0, (-1, CLIP_TOKENS))
    if FEATURE in batch.features:
        feature = batch.features[FEATURE]
        beside |= {PATCHES: feature.stored_patches, PATCH_SCALES: feature.patch_scales}
    return Served(batch.stored, batch.labels, batch.text.tokens, batch.text.lengths, beside or None)


def open_take(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """The store's own gather alone: no loader, no torch, no captions."""
    store = LatentStore(folder)
    buffer = aligned((workload.batch * largest_latent(workload),), "float16")

    def read(planned: Planned) -> Served:
        array = store.latents(planned.bucket)
        shape = (len(planned.rows), *array.row_shape)
        out = array.take(planned.rows, out=buffer[: int(np.prod(shape))].reshape(shape))
        return Served(out, store.index(planned.bucket).labels[planned.rows])

    return in_threads(read, workload, seed, workers)


def write_beside(rows: list[Rows], folder: Path) -> None:
    """Write a link to the store, and what a reader of its arrays needs besides them.

    Labels (N,) of each bucket, and the first and last row of each record's caption in captions/embeddings, (N, 2).
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LINK).symlink_to(Path("..") / STORE, target_is_directory=True)
    for part in rows:
        np.save(folder / f"labels-{part.bucket}.npy", part.labels)
        if part.caption_ids is not None:
            np.save(folder / f"captions-{part.bucket}.npy", part.spans)


class StoreArrays:
    """The store's arrays as another library opens them, each at its first use.

    Args:
      open_array: opens the array at a path.
    """

    def __init__(self, workload: Workload, folder: Path, open_array: Callable[[str], Any]) -> None:
        self._folder, self._open, self._arrays = folder, open_array, dict[str, Any]()
        self._labels = {bucket: np.load(folder / f"labels-{bucket}.npy") for bucket in workload.buckets}
        captioned = workload.buckets if workload.token_counts else ()
        self._spans = {bucket: np.load(folder / f"captions-{bucket}.npy") for bucket in captioned}

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            self._arrays[name] = self._open(str(self._folder / LINK / name))
        return self._arrays[name]

    def latents(self, bucket: str) -> Any:
        """(N, C, H, W) of a bucket."""
        return self._array(f"buckets/{bucket}/latents")

    def labels(self, bucket: str, rows: Any) -> np.ndarray:
        """(B,) int64."""
        return self._labels[bucket][rows]

    def text_reads(self, planned: Planned) -> list[Any] | None:
        """Each record's caption (L, D), as a slice of the library's array; None without captions."""
        if not self._spans:
            return None
        text = self._array("captions/embeddings")
        return [text[start:end] for start, end in self._spans[planned.bucket][planned.rows].tolist()]


class ZarrBatches(Dataset):
    """zarr-python: one orthogonal selection a batch, and one slice a caption."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._workload, self._folder = workload, folder

    @cached_property
    def arrays(self) -> StoreArrays:
        """The arrays, opened in the process that reads: an array of the parent does not work in a worker."""
        zarr: Any = importlib.import_module("zarr")
        return StoreArrays(self._workload, self._folder, partial(zarr.open_array, mode="r"))

    def __getitem__(self, planned: Planned) -> Served:
        latents = self.arrays.latents(planned.bucket).oindex[planned.rows]
        labels = self.arrays.labels(planned.bucket, planned.rows)
        batch = packed(latents, labels, self.arrays.text_reads(planned))
        tensors: list[Any] = [None if array is None else torch.from_numpy(array) for array in batch[:4]]
        return Served(*tensors)


def open_zarr(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """A selection a batch; workers are spawned, because zarr-python's thread does not survive a fork."""
    return by_batch(ZarrBatches(workload, folder), workload, seed, workers, start="spawn")


def open_tensorstore(workload: Workload, folder: Path, seed: int, workers: int) -> Epochs:
    """tensorstore: one indexed read a batch and all its captions at once, in the library's own threads."""
    tensorstore: Any = importlib.import_module("tensorstore")

    def open_array(path: str) -> Any:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
        return tensorstore.open(spec, read=True, open=True).result()

    arrays = StoreArrays(workload, folder, open_array)

    def read(planned: Planned) -> Served:
        latents = arrays.latents(planned.bucket)[planned.rows].read()
        slices = arrays.text_reads(planned)
        reads = None if slices is None else [each.read() for each in slices]  # start all, then wait
        labels = arrays.labels(planned.bucket, planned.rows)
        return packed(latents.result(), labels, None if reads is None else [each.result() for each in reads])

    return in_threads(read, workload, seed, workers)
