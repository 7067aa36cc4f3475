"""What ``loader_peers.py`` reads, and how peers are driven that have no order or workers of their own.

Letters of shapes: N records, B batch, C latent channels, H W latent size, L caption tokens, D caption width.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from noise_store import make_store
from torch.utils.data import DataLoader, Dataset, default_collate

from leandit.datasets.format.schema import FeatureSpec, TextSpec
from leandit.datasets.store import LatentStore

RAGGED = ("text", "scales")  # a row for each token of a caption
CLIP, CLIP_TOKENS, FEATURE = "clip_l", 77, "dinov2"  # names in the store
# Around 1024 x 1024 pixels, as in PixArt's table: each latent is about 128 KiB.
ASPECT_BUCKETS = ("832x1216", "896x1152", "1024x1024", "1152x896", "1216x832")
MIN_TOKENS, MAX_TOKENS = 20, 120  # of a caption; the mean is 60
RECORDS = {"latents": 100_000, "captions": 2_000, "aligned": 2_000}

Record = dict[str, np.ndarray]
"""Arrays by the names of ``Batch``, without its first axis."""
Batch = dict[str, Any]
"""Arrays or tensors by name: latent (B, C, H, W), label (B,); with captions text (sum L, D), scales (sum L,) of int8
text, lengths (B,); with a second text encoder clip_l (B, 77, D); with image features patches and patch_scales."""
Epochs = Callable[[int], Iterator[Batch]]
"""An open peer: the batches of an epoch, by its number."""


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

    def plan(self, epoch: int, seed: int) -> list[tuple[str, np.ndarray]]:
        """Bucket and (B,) rows of each batch, for peers without an order of their own: each bucket is shuffled."""
        random, batches = np.random.default_rng((seed, epoch)), []
        for bucket, count in self.buckets.items():
            order = random.permutation(count)
            batches += [(bucket, order[start : start + self.batch]) for start in range(0, count, self.batch)]
        return batches if len(self.buckets) == 1 else [batches[i] for i in random.permutation(len(batches))]


def make_workload(name: str, records: int) -> Workload:
    """ImageNet at 256 pixels (8 KiB a record); PixArt at 1024 with captions (600 KiB); SD3 at 256 with REPA (555 KiB).

    Raises: BadParameter: an unknown name.
    """
    if name not in RECORDS:
        raise typer.BadParameter(f"'{name}': expected some of {', '.join(RECORDS)}.")
    if name == "latents":
        return Workload(name, {"256x256": records}, batch=256)
    spread = np.random.default_rng(0).beta(2, 3, records)  # its mean is 0.4
    lengths = tuple((MIN_TOKENS + (MAX_TOKENS - MIN_TOKENS) * spread).round().astype(int).tolist())
    names = ["256x256"] if name == "aligned" else [*ASPECT_BUCKETS]
    counts = np.diff(np.linspace(0, records, len(names) + 1).astype(int)).tolist()
    return Workload(name, dict(zip(names, counts, strict=True)), batch=32, token_counts=lengths)


def write_store(workload: Workload, folder: Path) -> LatentStore:
    """The store of noise that every peer's files are made from; an existing one is kept."""
    how: dict[str, Any] = {}
    if workload.name == "aligned":
        clip: dict[str, Any] = {"kind": "clip", "width": 768, "max_tokens": CLIP_TOKENS, "full_length": True}
        clip |= {"dtype": "float16", "template": "", "batch_size": 64}
        patches: dict[str, Any] = {"output": "patches", "layer": -1, "width": 768, "patch_px": 16, "dtype": "int8"}
        patches |= {"resolution_px": 256, "images_px": 256}
        how = {"text_dtype": "int8", "texts": {CLIP: TextSpec(**clip)}, "features": {FEATURE: FeatureSpec(**patches)}}
    make_store(folder, workload.buckets, token_counts=workload.token_counts, **how)
    return LatentStore(folder)


def records_of(store: LatentStore) -> dict[str, list[Record]]:
    """The records of every bucket, in the order of its rows; latents and features are views of the store."""
    parts = {}
    for bucket in store.buckets:
        index, latents = store.index(bucket), store.latents(bucket)
        records = [
            {"label": label, "latent": latents[row]}
            for label, row in zip(index.labels.astype(np.int64), index.rows.tolist(), strict=True)
        ]
        for name in store.texts:
            text = store.text(name)
            for key, array in zip((name,) if name else RAGGED, text.arrays, strict=False):
                for record, caption in zip(records, index.caption_ids, strict=True):
                    start = int(text.starts[caption])
                    record[key] = array.read(start, start + int(text.lengths[caption]))
        if FEATURE in store.features:
            arrays = store.feature(FEATURE, bucket).arrays("patches")
            for record, row in zip(records, index.rows.tolist(), strict=True):
                record |= {key: array[row] for key, array in zip(("patches", "patch_scales"), arrays, strict=True)}
        parts[bucket] = records
    return parts


# ------------------------------------------------------------------------------------------------- how peers are driven


class Loaded(Dataset):
    """A map-style dataset whose items a function loads."""

    def __init__(self, load: Callable[[Any], Any]) -> None:
        self._load = load

    def __getitem__(self, key: Any) -> Any:
        return self._load(key)


def in_loader(load: Callable[[Any], Any], workload: Workload, seed: int, workers: int) -> Epochs:
    """A DataLoader of the samples that ``load`` returns for a (bucket, row)."""
    order: list[Any] = []
    how: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": collate}
    loader = DataLoader(Loaded(load), batch_sampler=order, **how)

    def epoch(number: int) -> Iterator[Batch]:
        order[:] = [[(bucket, row) for row in rows.tolist()] for bucket, rows in workload.plan(number, seed)]
        return iter(loader)

    return epoch


def in_threads(read: Callable[[str, np.ndarray], Batch], workload: Workload, seed: int, threads: int) -> Epochs:
    """Whole batches, read in this thread, or ahead by a pool: one batch for each thread."""

    def epoch(number: int) -> Iterator[Batch]:
        plan = workload.plan(number, seed)
        if not threads:
            yield from itertools.starmap(read, plan)
            return
        ahead: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            for bucket, rows in plan:
                ahead.append(pool.submit(read, bucket, rows))
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
