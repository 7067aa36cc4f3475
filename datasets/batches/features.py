"""One image feature of a batch: gathered as stored, converted to numbers on the device of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..arrays.sharded_array import ShardedArray
from ..disk.cached import cached_property
from ..store import LatentStore
from .buffer_pool import BufferPool


@dataclass(frozen=True, eq=False, repr=False)
class FeatureBatch:
    """A feature of the pictures of a batch, in the dtype of the store; what is not stored is None.

    Args:
      stored_patches, stored_cls: (B, T, D) tokens of the patches, row by row; (B, D) class tokens.
      patch_scales, cls_scales: (B, T) and (B,) float32 of int8 tokens.
    """

    stored_patches: torch.Tensor | None = None
    patch_scales: torch.Tensor | None = None
    stored_cls: torch.Tensor | None = None
    cls_scales: torch.Tensor | None = None

    @cached_property
    def patches(self) -> torch.Tensor | None:
        """(B, T, D) on the device of the batch: as stored, or float32 of int8, one exact product each."""
        return _final(self.stored_patches, self.patch_scales)

    @cached_property
    def cls(self) -> torch.Tensor | None:
        """(B, D), likewise."""
        return _final(self.stored_cls, self.cls_scales)


def read_feature(
    store: LatentStore, name: str, bucket: str, rows: np.ndarray, flipped: np.ndarray | None, buffers: BufferPool
) -> FeatureBatch:
    """Gather a feature of some records.

    Args:
      rows: (B,) of the bucket.
      flipped: (B,) bool, whether to read that of the flipped picture; None if the store has none.
    """
    feature, found = store.feature(name, bucket), {}
    for output in feature.outputs:
        names = ("stored_patches", "patch_scales") if output == "patches" else ("stored_cls", "cls_scales")
        arrays = feature.arrays(output)
        twins = feature.arrays(output, flipped=True) if flipped is not None else arrays
        for field, array, twin in zip(names, arrays, twins, strict=False):  # no scales unless int8
            found[field] = torch.from_numpy(_take(array, twin, rows, flipped, buffers))
    return FeatureBatch(**found)


def _take(
    array: ShardedArray, twin: ShardedArray, rows: np.ndarray, flipped: np.ndarray | None, buffers: BufferPool
) -> np.ndarray:
    """Rows of an array, of its flipped twin where asked for."""
    taken = array.take(rows, out=buffers.take((len(rows), *array.row_shape), array.dtype))
    if flipped is not None:
        taken[flipped] = twin.take(rows[flipped])
    return taken


def _final(stored: torch.Tensor | None, scales: torch.Tensor | None) -> torch.Tensor | None:
    return stored if stored is None or scales is None else stored * scales[..., None]
