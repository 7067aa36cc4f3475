"""What the loader benchmark reads: three workloads, their records and the order of batches.

Letters of shapes: B batch, C latent channels, H W latent size, L caption tokens, D caption width, T patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ....datasets.format.buckets import bucket_size
from ....datasets.format.schema import FeatureSpec, TextSpec
from ....datasets.format.token_dtypes import ON_DISK, StoredTokens
from ....datasets.store import LatentStore

STORE = "store"  # its folder, next to those of the peers
CHANNELS, CLASSES, DOWNSCALE = 4, 1000, 8  # of the VAEs and the data sets that DiT and PixArt are trained with
TEXT_WIDTH = 4096  # D of T5-XXL
CLIP_TOKENS, CLIP_WIDTH = 77, 768  # of CLIP-L, whose captions all have the full length
FEATURE_WIDTH, PATCH_PX = 768, 16  # of DINOv2-B as REPA uses it: a token for every 16 px
TEXT, SCALES, CLIP, PATCHES, PATCH_SCALES = "text", "scales", "clip_l", "patches", "patch_scales"
FEATURE = "dinov2"  # its name in the store
MIN_TOKENS, MAX_TOKENS = 20, 120  # of a caption; the mean is 60
# Around 1024 x 1024 pixels, as in PixArt's table: each latent is about 128 KiB.
ASPECT_BUCKETS = ("832x1216", "896x1152", "1024x1024", "1152x896", "1216x832")


class Planned(NamedTuple):
    """One batch of an order: (B,) rows of one bucket."""

    bucket: str
    rows: np.ndarray


class Served(NamedTuple):
    """One batch as a peer delivers it; numpy arrays or tensors.

    latents (B, C, H, W), labels (B,); with captions also text (sum L, D), packed, and lengths (B,); beside them what
    ``Workload.fields`` names, packed where it has a row for each token.
    """

    latents: Any
    labels: Any
    text: Any = None
    lengths: Any = None
    beside: Mapping[str, Any] | None = None


class Field(NamedTuple):
    """An array beside latents and labels.

    Args:
      name: "text", or its key in ``Served.beside``.
      shape: of a record's rows; of one row where the field is ragged.
      dtype: of numpy.
      ragged: it has a row for each token of the caption.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    ragged: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of a record; of a token where it is ragged."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


Epochs = Callable[[int], Iterator[Served]]
"""An open peer: the batches of an epoch, by its number."""


@dataclass(frozen=True)
class Workload:
    """What is read.

    Args:
      name: "latents", "captions" or "aligned".
      buckets: records of each, by its size in pixels.
      batch: B, records of a full batch; every batch is of one bucket.
      token_counts: L of each record's caption; empty without captions.
      text_width, text_dtype: D, and how tokens are stored: "float16", or "int8" with a scale each.
      clip_width: D of a second text encoder of CLIP_TOKENS float16 tokens; 0 for none.
      feature_width: D of int8 features of the pictures, with a scale a token; 0 for none.
    """

    name: str
    buckets: Mapping[str, int]
    batch: int
    token_counts: tuple[int, ...] = ()
    text_width: int = TEXT_WIDTH
    text_dtype: str = "float16"
    clip_width: int = 0
    feature_width: int = 0

    @property
    def num_records(self) -> int:
        """Records of all buckets."""
        return sum(self.buckets.values())

    @property
    def record_bytes(self) -> float:
        """Mean bytes of a record: latent, captions, features."""
        total = 0
        for bucket, count in self.buckets.items():
            total += count * 2 * int(np.prod(self.latent_shape(bucket)))
            total += count * sum(field.row_bytes for field in self.fields(bucket) if not field.ragged)
        of_token = sum(field.row_bytes for field in self.fields(next(iter(self.buckets))) if field.ragged)
        return (total + sum(self.token_counts) * of_token) / self.num_records

    def fields(self, bucket: str) -> list[Field]:
        """What records of a bucket have beside latent and label."""
        fields = []
        if self.token_counts:
            fields.append(Field(TEXT, (self.text_width,), ON_DISK[self.text_dtype], ragged=True))
        if self.token_counts and self.text_dtype == "int8":
            fields.append(Field(SCALES, (), "float32", ragged=True))
        if self.clip_width:
            fields.append(Field(CLIP, (CLIP_TOKENS, self.clip_width), "float16", ragged=False))
        if self.feature_width:
            patches = int(np.prod([side // PATCH_PX for side in bucket_size(bucket)]))
            fields.append(Field(PATCHES, (patches, self.feature_width), "int8", ragged=False))
            fields.append(Field(PATCH_SCALES, (patches,), "float32", ragged=False))
        return fields

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


def aligned_workload(records: int = 2_000) -> Workload:
    """ImageNet's latents with captions by T5-XXL and CLIP-L and features of DINOv2-B, as SD3 trained with REPA."""
    lengths = caption_workload(records).token_counts
    how: dict[str, Any] = {"text_dtype": "int8", "clip_width": CLIP_WIDTH, "feature_width": FEATURE_WIDTH}
    return Workload("aligned", {"256x256": records}, batch=32, token_counts=lengths, **how)


def write_store(workload: Workload, folder: Path) -> LatentStore:
    """The store that every peer's files are made from; an existing one is kept."""
    from ...synthetic.store import make_store

    clip = TextSpec(
        kind="clip",
        width=workload.clip_width or 1,
        max_tokens=CLIP_TOKENS,
        dtype="float16",
        template="",
        batch_size=64,
        full_length=True,
    )
    # A grid of one token for each PATCH_PX of the picture, whatever its size.
    patches = FeatureSpec(
        output="patches",
        layer=-1,
        width=workload.feature_width or 1,
        patch_px=PATCH_PX,
        resolution_px=256,
        images_px=256,
        dtype="int8",
    )
    make_store(
        folder,
        workload.buckets,
        channels=CHANNELS,
        num_classes=CLASSES,
        token_counts=workload.token_counts,
        text_width=workload.text_width,
        text_dtype=workload.text_dtype,
        texts={CLIP: clip} if workload.clip_width else {},
        features={FEATURE: patches} if workload.feature_width else {},
    )
    return LatentStore(folder)


class Rows:
    """The records of one bucket, in the order of its rows, for a peer to write."""

    def __init__(self, store: LatentStore, bucket: str) -> None:
        index = store.index(bucket)
        self.bucket, self._store, self._latents, self._rows = bucket, store, store.latents(bucket), index.rows
        self.labels = index.labels  # (N,) int64
        self.caption_ids = index.caption_ids if store.spec.text else None
        self._features = store.feature(FEATURE, bucket).arrays(PATCHES) if FEATURE in store.features else []

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
        """(L, D) as stored, a view; None without captions."""
        return None if self.caption_ids is None else self._tokens(row).rows

    def beside(self, row: int) -> dict[str, np.ndarray]:
        """Everything else of a record but its label: views, by the names of ``Workload.fields``."""
        arrays: dict[str, np.ndarray] = {}
        if self.caption_ids is not None and (scales := self._tokens(row).scales) is not None:
            arrays[SCALES] = scales
        if self.caption_ids is not None and CLIP in self._store.texts:
            arrays[CLIP] = self._store.text(CLIP).stored(int(self.caption_ids[row])).rows
        for name, array in zip((PATCHES, PATCH_SCALES), self._features, strict=False):  # none without features
            arrays[name] = array[int(self._rows[row])]
        return arrays

    def _tokens(self, row: int) -> StoredTokens:
        assert self.caption_ids is not None, "a store with captions"
        return self._store.tokens.stored(int(self.caption_ids[row]))


def rows_of(store: LatentStore) -> list[Rows]:
    """Every bucket's records."""
    return [Rows(store, bucket) for bucket in store.buckets]
