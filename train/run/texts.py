"""The captions that a model reads when there is no batch: the empty caption, and zeros of full length."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...datasets.batches.captions import CaptionBatch
from ...datasets.format.schema import StoreSpec
from ...datasets.store import LatentStore
from ..models.conditioning import join_texts
from ..models.spec import ModelSpec


def longest_caption(spec: ModelSpec, store: StoreSpec) -> int:
    """Caption tokens of an image, at most; 0 for a class-conditional model."""
    if not spec.takes_text:
        return 0
    return spec.joined_tokens or (store.text.max_tokens if store.text else 0)


def null_captions(spec: ModelSpec, store: LatentStore) -> tuple[Tensor | None, Tensor | None]:
    """The empty caption as the model sees it, (max_tokens, D) and (P,) float32; None for what it does not read."""
    if not spec.takes_text:
        return None, None
    if not spec.texts:
        return torch.from_numpy(store.null_caption).float(), None
    nulls = {}
    for one in spec.texts:
        stored = store.text(one.name)
        nulls[one.name] = null_batch(
            torch.from_numpy(stored.null) if one.tokens else None,
            torch.from_numpy(stored.null_pooled) if one.pooled_width else None,
        )
    return joined_null(spec, nulls)


def null_batch(tokens: Tensor | None, pooled: Tensor | None) -> CaptionBatch:
    """A batch of one empty caption, of its tokens (max_tokens, D) and its pooled vector (P,)."""
    first = (None if part is None else part[None].float() for part in (tokens, pooled))
    return CaptionBatch(tokens=next(first), lengths=None, pooled=next(first))


def joined_null(spec: ModelSpec, nulls: Mapping[str, CaptionBatch]) -> tuple[Tensor, Tensor | None]:
    """The empty caption of several text encoders, (max_tokens, D) and (P,) float32."""
    captions, pooled = join_texts(spec, nulls)
    return captions[0], None if pooled is None else pooled[0]
