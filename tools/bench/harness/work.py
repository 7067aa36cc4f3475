"""What the loader benchmark reads: two workloads, their records and the order of batches.

Letters of shapes: B batch, C latent channels, H W latent size, L caption tokens, D caption width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ....datasets.format.buckets import bucket_size
from ....datasets.store import LatentStore

STORE = "store"  # its folder, next to those of the peers
CHANNELS, CLASSES, DOWNSCALE = 4, 1000, 8  # of the VAEs and the data sets that DiT and PixArt are trained with
TEXT_WIDTH = 4096  # D of T5-XXL
MIN_TOKENS, MAX_TOKENS = 20, 120  # of a caption; the mean is 60
# Around 1024 x 1024 pixels, as in PixArt's table: each latent is about 128 KiB.
ASPECT_BUCKETS = ("832x1216", "896x1152", "1024x1024", "1152x896", "1216x832")


class Planned(NamedTuple):
    """One batch of an order: (B,) rows of one bucket."""

    bucket: str
    rows: np.ndarray


class Served(NamedTuple):
    """One batch as a peer delivers it; numpy arrays or tensors.

    latents (B, C, H, W), labels (B,); with captions also text (sum L, D), packed, and lengths (B,).
    """

    latents: Any
    labels: Any
    text: Any = None
    lengths: Any = None


Epochs = Callable[[int], Iterator[Served]]
"""An open peer: the batches of an epoch, by its number."""


@dataclass(frozen=True)
class Workload:
    """What is read.

    Args:
      name: "latents" or "captions".
      buckets: records of each, by its size in pixels.
      batch: B, records of a full batch; every batch is of one bucket.
      token_counts: L of each record's caption; empty without captions.
      text_width: D.
    """

    name: str
    buckets: Mapping[str, int]
    batch: int
    token_counts: tuple[int, ...] = ()
    text_width: int = TEXT_WIDTH

    @property
    def num_records(self) -> int:
        """Records of all buckets."""
        return sum(self.buckets.values())

    @property
    def record_bytes(self) -> float:
        """Mean bytes of a record's latent and caption, float16."""
        latents = sum(count * int(np.prod(self.latent_shape(name))) for name, count in self.buckets.items())
        return 2 * (latents + sum(self.token_counts) * self.text_width) / self.num_records

    def latent_shape(self, bucket: str) -> tuple[int, int, int]:
        """(C, H, W) of a bucket."""
        height_px, width_px = bucket_size(bucket)
        return CHANNELS, height_px // DOWNSCALE, width_px // DOWNSCALE

    def plan(self, epoch: int, seed: int) -> list[Planned]:
        """The batches of an epoch, for peers without an order of their own: a global shuffle of every bucket."""
        random = np.random.default_rng((seed, epoch))
        batches = []
        for bucket, count in self.buckets.items():
            order = random.permutation(count)
            batches += [Planned(bucket, order[start : start + self.batch]) for start in range(0, count, self.batch)]
        return batches if len(self.buckets) == 1 else [batches[i] for i in random.permutation(len(batches))]


def largest_latent(workload: Workload) -> int:
    """Values of the largest bucket's latents."""
    return max(int(np.prod(workload.latent_shape(bucket))) for bucket in workload.buckets)


def latent_workload(records: int = 100_000) -> Workload:
    """ImageNet at 256 pixels: 8 KiB a record."""
    return Workload("latents", {"256x256": records}, batch=256)


def caption_workload(records: int = 2_000) -> Workload:
    """PixArt at 1024 pixels: about 128 KiB of latent and 480 KiB of caption a record."""
    shares = np.diff(np.linspace(0, records, len(ASPECT_BUCKETS) + 1).astype(int)).tolist()
    spread = np.random.default_rng(0).beta(2, 3, records)  # its mean is 0.4
    lengths = (MIN_TOKENS + (MAX_TOKENS - MIN_TOKENS) * spread).round().astype(int)
    buckets: dict[str, int] = dict(zip(ASPECT_BUCKETS, shares, strict=True))
    return Workload("captions", buckets, batch=32, token_counts=tuple(lengths.tolist()))


def write_store(workload: Workload, folder: Path) -> LatentStore:
    """The store that every peer's files are made from; an existing one is kept."""
    from ...synthetic.store import make_store

    make_store(
        folder,
        workload.buckets,
        channels=CHANNELS,
        num_classes=CLASSES,
        token_counts=workload.token_counts,
        text_width=workload.text_width,
    )
    return LatentStore(folder)


class Rows:
    """The records of one bucket, in the order of its rows, for a peer to write."""

    def __init__(self, store: LatentStore, bucket: str) -> None:
        index = store.index(bucket)
        self.bucket, self._store, self._latents, self._rows = bucket, store, store.latents(bucket), index.rows
        self.labels = index.labels  # (N,) int64
        self.caption_ids = index.caption_ids if store.spec.text else None

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def lengths(self) -> np.ndarray:
        """(N,) int64 tokens of each caption."""
        return self._store.tokens.lengths[self.caption_ids].astype(np.int64)

    @property
    def spans(self) -> np.ndarray:
        """(N, 2) int64 first row of each caption in the store's captions/embeddings, and the row after its last."""
        starts = self._store.tokens.offsets[self.caption_ids]
        return np.stack([starts, starts + self.lengths], axis=1).astype(np.int64)

    def latents(self, rows: np.ndarray) -> np.ndarray:
        """(B, C, H, W) float16."""
        return self._latents.take(self._rows[rows])

    def latent(self, row: int) -> np.ndarray:
        """(C, H, W) float16, a view."""
        return self._latents[int(self._rows[row])]

    def text(self, row: int) -> np.ndarray | None:
        """(L, D) float16, a view; None without captions."""
        return None if self.caption_ids is None else self._store.caption_embedding(int(self.caption_ids[row]))


def rows_of(store: LatentStore) -> list[Rows]:
    """Every bucket's records."""
    return [Rows(store, bucket) for bucket in store.buckets]
