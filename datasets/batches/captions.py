"""The captions of a batch by one text encoder: gathered as stored, converted to numbers on the device of the batch.

So the stored bytes are copied to the device: of int8 half those of float16, plus the scales. Captions follow each
other without padding, as they lie in the store and as variable-length attention reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..arrays.tokens import CaptionTokens
from ..disk.cached import cached_property
from ..format.row_layout import EMBEDDINGS, POOLED, SCALES
from ..format.schema import TextSpec
from .gather import GatheredCaptions
from .latents import widen_int8

TextForm = Literal["padded", "packed", "none"]


@dataclass(frozen=True, eq=False, repr=False)
class Captions:
    """Captions of B images by one text encoder, one after the other: n tokens in all.

    Args:
      tokens: (n, D) in the dtype of the store; (0, 0) if only pooled vectors are stored.
      lengths: tokens of each caption, on the host, where nothing waits to read them.
      offsets: (B + 1,) int32 where each caption begins, then the end: cu_seqlens of variable-length attention.
      scales: (n, layers, groups) float16 of int8 tokens, or None.
      pooled: (B, P) pooled vectors, or None.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    offsets: Tensor
    scales: Tensor | None = None
    pooled: Tensor | None = None

    @classmethod
    def packed(
        cls, tokens: Tensor, lengths: Sequence[int], scales: Tensor | None = None, pooled: Tensor | None = None
    ) -> Captions:
        """Captions of some lengths, with offsets on the device of the tokens."""
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tokens, tuple(lengths), offsets.to(tokens.device), scales, pooled)

    @classmethod
    def of(cls, rows: Sequence[Tensor], pooled: Sequence[Tensor] = ()) -> Captions:
        """Captions of tokens (L, D) each and of pooled vectors (P,) each; either may be missing."""
        vectors = torch.stack(list(pooled)) if pooled else None
        tokens = torch.cat(list(rows)) if rows else torch.zeros(0, 0)
        return cls.packed(tokens, [len(row) for row in rows] or [0] * len(pooled), pooled=vectors)

    @classmethod
    def joined(cls, parts: Sequence[Captions]) -> Captions:
        """The captions of all parts, one part after the other, as numbers."""
        lengths = [length for part in parts for length in part.lengths]
        pooled = [part.pooled for part in parts if part.pooled is not None]
        tokens = torch.cat([part.embeddings for part in parts])
        return cls.packed(tokens, lengths, pooled=torch.cat(pooled) if pooled else None)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.tokens.device

    @property
    def has_tokens(self) -> bool:
        """Not only pooled vectors are stored."""
        return self.tokens.shape[1] > 0

    @cached_property
    def embeddings(self) -> Tensor:
        """(n, D) tokens as numbers, on their device: as stored, or float32 of int8, one exact product each."""
        return self.tokens if self.scales is None else widen_int8(self.tokens, self.scales)

    @cached_property
    def padded(self) -> Tensor:
        """(B, L, D) ``embeddings``, each caption padded with zeros to the longest."""
        if len(set(self.lengths)) == 1 or not len(self.tokens):
            return self.embeddings.view(len(self), max(self.lengths, default=0), self.tokens.shape[1])
        rows = (self.offsets[:-1, None] + self._places).clamp(max=len(self.tokens) - 1)
        return torch.where(self.mask[:, :, None], self.embeddings[rows], 0)

    @property
    def mask(self) -> Tensor:
        """(B, L) true for the tokens of each caption, false for the padding of ``padded``."""
        return self._places < self.offsets.diff()[:, None]

    @property
    def _places(self) -> Tensor:
        return torch.arange(max(self.lengths, default=0), device=self.device)

    @property
    def owners(self) -> tuple[Tensor, Tensor]:
        """The image of each token, and its place in the caption, (n,) int64 each."""
        numbers = torch.arange(len(self.tokens), device=self.device)
        images = torch.searchsorted(self.offsets[1:], numbers, right=True)
        return images, numbers - self.offsets[images]

    def with_tokens(self, tokens: Tensor) -> Captions:
        """Other numbers (n, D) for the same tokens, without pooled vectors."""
        return Captions(tokens, self.lengths, self.offsets)

    def __getitem__(self, images: slice | Sequence[int]) -> Captions:
        """The tokens of some captions, without pooled vectors; for a slice, nothing waits for the device."""
        starts, tokens = [0, *accumulate(self.lengths)], self.embeddings
        if isinstance(images, slice):
            first, stop, _ = images.indices(len(self))
            stop = max(first, stop)
            offsets = self.offsets[first : stop + 1] - self.offsets[first]
            return Captions(tokens[starts[first] : starts[stop]], self.lengths[first:stop], offsets)
        parts = [tokens[starts[image] : starts[image + 1]] for image in images]
        return Captions.packed(torch.cat(parts) if parts else tokens[:0], [len(part) for part in parts])

    def followed_by(self, other: Captions) -> Captions:
        """The tokens of these captions, then those of others."""
        offsets = torch.cat([self.offsets, self.offsets[-1] + other.offsets[1:]])
        return Captions(torch.cat([self.embeddings, other.embeddings]), self.lengths + other.lengths, offsets)

    def to(self, device: torch.device) -> Captions:
        """The same captions on a device."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})


def captions_from_rows(spec: TextSpec, gathered: GatheredCaptions, count: int) -> Captions:
    """The captions of ``count`` images from their gathered rows.

    Args:
      spec: describes the captions of the text encoder.
    """
    pooled = gathered.arrays.get(POOLED)
    vectors = None if pooled is None else _as_tensor(pooled, spec.pooled_dtype)
    if EMBEDDINGS not in gathered.arrays:
        return Captions.packed(torch.zeros(0, 0), [0] * count, pooled=vectors)
    scales = gathered.arrays.get(SCALES)
    return Captions.packed(
        _as_tensor(gathered.arrays[EMBEDDINGS], spec.dtype),
        gathered.lengths.tolist(),
        scales=None if scales is None else torch.from_numpy(scales),
        pooled=vectors,
    )


def caption_of(tokens: np.ndarray | None, pooled: np.ndarray | None) -> Captions:
    """One caption in float32: tokens (L, D) and a pooled vector (P,), None for what its encoder does not give."""
    return Captions.of(*([] if part is None else [torch.from_numpy(part).float()] for part in (tokens, pooled)))


def captions_of(tokens: CaptionTokens, caption_ids: Sequence[int]) -> Captions:
    """Some captions of a text encoder in float32."""
    pooled = [tokens.pooled_vector(i) for i in caption_ids] if tokens.spec.pooled_width else []
    rows = [tokens[i] for i in caption_ids] if tokens.spec.has_tokens else []
    return Captions.of(*([torch.from_numpy(np.array(one)).float() for one in part] for part in (rows, pooled)))


def _as_tensor(rows: np.ndarray, dtype: str) -> Tensor:
    tensor = torch.from_numpy(rows)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
