"""The captions of a batch: gathered as stored, converted to numbers on the device of the batch.

So the stored bytes are copied to the device: of int8 half those of float16, plus a scale per token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..store import LatentStore
from .buffer_pool import BufferPool


class StoredCaptions(NamedTuple):
    """Captions of a batch as they are stored.

    Args:
      tokens: (B, L, D) padded with zeros to the longest, or (sum L, D) packed; float16, float32, bfloat16 or int8.
      lengths: (B,) int64 valid tokens.
      scales: (B, L) or (sum L,) float32 of int8 tokens, 0 where padded; else None.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    scales: torch.Tensor | None


def final_captions(tokens: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Caption embeddings for a model, on the device of the tokens.

    Returns: float32 of int8 tokens, one exact product each, so equal on every device; other tokens unchanged.
    """
    return tokens if scales is None else tokens * scales[..., None]


def read_padded(store: LatentStore, caption_ids: np.ndarray, buffers: BufferPool) -> StoredCaptions:
    """Gather caption embeddings, padded with zeros to the longest."""
    lengths = store.tokens.lengths[caption_ids]
    longest = int(lengths.max(initial=0))
    starts, gathered = store.tokens.offsets[caption_ids].tolist(), []
    for array in store.tokens.arrays:
        padded = buffers.take((len(caption_ids), longest, *array.row_shape), array.dtype)
        for row, start, length in zip(padded, starts, lengths.tolist(), strict=True):
            row[:length] = array.read(start, start + length)
            row[length:] = 0
        array.check_unchanged()
        gathered.append(padded)
    return _as_tensors(store, gathered, lengths)


def read_packed(store: LatentStore, caption_ids: np.ndarray, buffers: BufferPool) -> StoredCaptions:
    """Gather caption embeddings, one after the other."""
    lengths = store.tokens.lengths[caption_ids]
    starts, gathered = store.tokens.offsets[caption_ids], []
    for array in store.tokens.arrays:
        packed = buffers.take((int(lengths.sum()), *array.row_shape), array.dtype)
        gathered.append(array.take_ranges(starts, lengths, out=packed))
    return _as_tensors(store, gathered, lengths)


def _as_tensors(store: LatentStore, gathered: list[np.ndarray], lengths: np.ndarray) -> StoredCaptions:
    assert store.spec.text is not None
    tensors = [torch.from_numpy(array) for array in gathered]
    tokens = tensors[0].view(torch.bfloat16) if store.spec.text.dtype == "bfloat16" else tensors[0]
    return StoredCaptions(tokens, torch.from_numpy(lengths), tensors[1] if len(tensors) == 2 else None)
