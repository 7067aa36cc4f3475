"""The captions of a batch by one text encoder: gathered as stored, converted to numbers on the device of the batch.

So the stored bytes are copied to the device: of int8 half those of float16, plus a scale per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch

from ..arrays.caption_tokens import CaptionTokens
from ..arrays.sharded_array import ShardedArray
from ..disk.cached import cached_property
from ..errors import RecipeError
from .buffer_pool import BufferPool

TextForm = Literal["padded", "packed", "none"]


@dataclass(frozen=True, eq=False, repr=False)
class CaptionBatch:
    """Captions of a batch by one text encoder, in the dtype of the store.

    Args:
      tokens: (B, L, D) padded with zeros to the longest, or (sum L, D) packed; None if only pooled vectors are stored.
      lengths: (B,) int64 stored tokens of each, or None likewise.
      scales: (B, L) or (sum L,) float32 of int8 tokens, 0 where padded; else None.
      pooled: (B, P) pooled vectors, or None.
      host_lengths: the lengths again, which stay on the host, where nothing waits to read them; or None.
    """

    tokens: torch.Tensor | None
    lengths: torch.Tensor | None
    scales: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    host_lengths: tuple[int, ...] | None = None

    @cached_property
    def embeddings(self) -> torch.Tensor | None:
        """Tokens as numbers, on their device: as stored, or float32 of int8, one exact product each."""
        if self.tokens is None or self.scales is None:
            return self.tokens
        return self.tokens * self.scales[..., None]

    def to(self, device: torch.device) -> CaptionBatch:
        """The same captions on a device."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        tensors = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **tensors)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """(B + 1,) int32 where each packed caption begins, then the end: cu_seqlens of variable-length attention."""
        if self.lengths is None:
            raise RecipeError("this text encoder stores only pooled vectors, so its captions have no lengths.")
        zero = torch.zeros(1, dtype=torch.int64, device=self.lengths.device)
        return torch.cat([zero, self.lengths.cumsum(0)]).int()


def read_captions(tokens: CaptionTokens, caption_ids: np.ndarray, form: TextForm, buffers: BufferPool) -> CaptionBatch:
    """Gather captions of a text encoder.

    Args:
      caption_ids: (B,).
      form: "padded" or "packed".
    """
    pooled = None
    if tokens.spec.pooled_width:
        rows = buffers.take((len(caption_ids), tokens.spec.pooled_width), tokens.pooled.dtype)
        pooled = _as_tensor(tokens.pooled.take(tokens.pooled_rows[caption_ids], out=rows), tokens.spec.pooled_dtype)
    if not tokens.spec.has_tokens:
        return CaptionBatch(None, None, pooled=pooled)
    starts, lengths = tokens.starts[caption_ids], tokens.lengths[caption_ids]
    read = _packed if form == "packed" else _padded
    gathered = [read(array, starts, lengths, buffers) for array in tokens.arrays]
    return CaptionBatch(
        tokens=_as_tensor(gathered[0], tokens.spec.dtype),
        lengths=torch.from_numpy(lengths),
        scales=torch.from_numpy(gathered[1]) if len(gathered) == 2 else None,
        pooled=pooled,
        host_lengths=tuple(lengths.tolist()),
    )


def captions_of(tokens: CaptionTokens, caption_ids: Sequence[int]) -> CaptionBatch:
    """Some captions of a text encoder in float32, padded to the longest."""
    pooled = (
        [torch.from_numpy(np.array(tokens.pooled_vector(i))) for i in caption_ids] if tokens.spec.pooled_width else []
    )
    rows = [torch.from_numpy(np.array(tokens[i])) for i in caption_ids] if tokens.spec.has_tokens else []
    return padded_captions([row.float() for row in rows], [vector.float() for vector in pooled])


def padded_captions(rows: Sequence[torch.Tensor], pooled: Sequence[torch.Tensor]) -> CaptionBatch:
    """A batch of tokens (L, D) each, padded to the longest, and of pooled vectors (P,) each; there may be none."""
    return CaptionBatch(
        tokens=torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True) if rows else None,
        lengths=torch.tensor([len(row) for row in rows]) if rows else None,
        pooled=torch.stack(list(pooled)) if pooled else None,
    )


def _padded(array: ShardedArray, starts: np.ndarray, lengths: np.ndarray, buffers: BufferPool) -> np.ndarray:
    """(B, L, ...) rows of each caption, padded with zeros to the longest."""
    longest = int(lengths.max(initial=0))
    padded = buffers.take((len(starts), longest, *array.row_shape), array.dtype)
    for row, start, length in zip(padded, starts.tolist(), lengths.tolist(), strict=True):
        row[:length] = array.read(start, start + length)
        row[length:] = 0
    return padded


def _packed(array: ShardedArray, starts: np.ndarray, lengths: np.ndarray, buffers: BufferPool) -> np.ndarray:
    """(sum L, ...) rows of each caption, one after the other."""
    packed = buffers.take((int(lengths.sum()), *array.row_shape), array.dtype)
    return array.take_ranges(starts, lengths, out=packed)


def _as_tensor(rows: np.ndarray, dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(rows)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
