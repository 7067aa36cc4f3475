"""Conditioning of a batch, and its null for classifier-free guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from ...datasets.batches.captions import CaptionBatch
from .spec import ModelSpec

COMPILED_CAPTION_STEP = 64  # tokens, so that captions of 300 have five lengths
ImagesT = TypeVar("ImagesT")


class Conditioning(NamedTuple):
    """Labels, or captions with their mask.

    Args:
      labels: (B,) int64; null is the number of classes.
      captions: (B, L, D).
      caption_mask: (B, L) true for valid tokens; None for models that read padding.
      source_sizes: (B, 2) float32 height and width of the source pictures in pixels, for models that use them.
      pooled: (B, P) float32, for models that read pooled vectors.
      mean_tokens: at least the mean of the valid tokens of any microbatch's captions; None: unknown.
    """

    labels: Tensor | None = None
    captions: Tensor | None = None
    caption_mask: Tensor | None = None
    source_sizes: Tensor | None = None
    pooled: Tensor | None = None
    mean_tokens: int | None = None

    def part(self, rows: slice | Tensor | list[int]) -> Conditioning:
        """The conditioning of some images."""
        return select(self, rows)

    def followed_by(self, other: Conditioning) -> Conditioning:
        """These images, then others with the same kinds of conditioning."""
        both = {name: (value, getattr(other, name)) for name, value in self._asdict().items()}
        return self._replace(**{n: torch.cat(pair) for n, pair in both.items() if isinstance(pair[0], Tensor)})


def select(images: ImagesT, rows: slice | Tensor | list[int]) -> ImagesT:
    """Some images, in this order, of all tensors (B, ...) in a tuple, dictionary or registered dataclass."""
    return tree_map_only(Tensor, lambda tensor: tensor[rows], images)


class Extras(NamedTuple):
    """What a forward takes beside latents, times and conditioning, and what it gives beside its output.

    Args:
      class_token: (B, D) noisy class token, for a model that denoises one.
      kept: (B, K) int64 image tokens, in their order, that go through the routed blocks; None: all.
      watched: a block, from 1, whose output is wanted.
      projected: tokens of each image that are projected, from the first; None: all.
    """

    class_token: Tensor | None = None
    kept: Tensor | None = None
    watched: int = 0
    projected: int | None = 0


NO_EXTRAS = Extras()


class ModelOutput(NamedTuple):
    """What a forward gives.

    Args:
      output: (B, out_channels, H, W).
      class_velocity: (B, D) of the class token, if there is one.
      projected: (B, T or K, D) by name of the projector; the class token, if there is one, comes first.
      watched: (B, T or K, E) output of the watched block, without the class token.
    """

    output: Tensor
    class_velocity: Tensor | None = None
    projected: Mapping[str, Tensor] = {}
    watched: Tensor | None = None


@dataclass(frozen=True)
class Conditioner:
    """Makes the conditioning of a batch.

    Args:
      spec: of the model.
      null_caption: (max_tokens, D) embedding of the empty caption, for a model with text; joined, where it reads
        several text encoders.
      source_sizes: (records, 2) float32 pixels of each store, on the device of the batches, for models that use
        them; at eight bytes a record, batches need not carry them.
      caption_step: pad captions to a multiple of it, at most to the length of null, so that compiled blocks see few
        lengths.
      null_pooled: (P,) joined pooled vectors of the empty caption, for a model that reads them.
    """

    spec: ModelSpec
    null_caption: Tensor | None
    source_sizes: Sequence[Tensor] = ()
    caption_step: int = 1
    null_pooled: Tensor | None = None

    def __call__(
        self,
        labels: Tensor | None,
        texts: Mapping[str, CaptionBatch],
        records: Tensor | None = None,
        *,
        store: int = 0,
        widen: bool = True,
    ) -> Conditioning:
        """Conditioning of a batch, without dropping.

        Args:
          labels: (B,) int64, -1 for none.
          texts: captions of each text encoder, by name.
          records: (B,) int64 positions in the records table.
          store: index of the store of these records.
          widen: convert 16-bit captions to float32, which the model needs without autocast.
        """
        if not self.spec.takes_text:
            assert labels is not None
            return Conditioning(labels=torch.where(labels < 0, self.spec.num_classes, labels))
        sizes = self.source_sizes[store][records] if self.source_sizes and records is not None else None
        if self.spec.texts:
            captions, pooled = join_texts(self.spec, texts)
            mask = None
        else:
            captions, mask = self._masked(next(iter(texts.values())))
            pooled = None
        captions = captions.float() if widen else captions
        return Conditioning(captions=captions, caption_mask=mask, source_sizes=sizes, pooled=pooled)

    def _masked(self, text: CaptionBatch) -> tuple[Tensor, Tensor]:
        """Captions of one text encoder, (B, L, D), and the mask of their valid tokens, (B, L)."""
        captions, lengths = text.embeddings, text.lengths
        assert captions is not None
        assert lengths is not None
        if missing := self._padding(captions.shape[1]):
            captions = F.pad(captions, (0, 0, 0, missing))
        places = torch.arange(captions.shape[1], device=captions.device)
        return captions, places[None] < lengths.to(captions.device)[:, None]

    def _padding(self, length: int) -> int:
        """Rows of padding to add to captions of this length."""
        longest = length if self.null_caption is None else max(length, len(self.null_caption))
        return min(-(-length // self.caption_step) * self.caption_step, longest) - length

    def drop(self, conditioning: Conditioning, where: Tensor) -> Conditioning:
        """Replace the conditioning of some images by null.

        A dropped caption keeps its mask, as in PixArt and Sana: the first rows of null replace its tokens. Those of
        several text encoders, and their pooled vectors, are dropped together.

        Args:
          where: (B,) bool.
        """
        if conditioning.labels is not None:
            return Conditioning(labels=torch.where(where, self.spec.num_classes, conditioning.labels))
        captions, null = conditioning.captions, self.null_caption
        assert captions is not None
        assert null is not None
        rows, pooled = null[: captions.shape[1]].to(captions), conditioning.pooled
        if pooled is not None:
            assert self.null_pooled is not None
            pooled = torch.where(where[:, None], self.null_pooled.to(pooled), pooled)
        return conditioning._replace(captions=torch.where(where[:, None, None], rows, captions), pooled=pooled)


def join_texts(spec: ModelSpec, texts: Mapping[str, CaptionBatch]) -> tuple[Tensor, Tensor | None]:
    """The captions of all text encoders that a model reads, as one sequence, and their pooled vectors as one.

    Inputs that stand beside each other are joined by their features; all are widened with zeros to the model's width,
    and follow each other.

    Args:
      texts: by name; each at full length.
    Returns: (B, L, D) as stored, or float32 of int8; (B, P) float32, or None.
    Source: Esser et al. 2024 (SD3), appendix B.1.
    """
    rows: list[list[Tensor]] = []
    for one in spec.texts:
        tokens = texts[one.name].embeddings if one.tokens else None
        if tokens is None:
            continue
        if one.beside:
            rows[-1].append(tokens)
        else:
            rows.append([tokens])
    sequences = [torch.cat(beside, dim=2) for beside in rows]
    captions = torch.cat([F.pad(each, (0, spec.caption_width - each.shape[2])) for each in sequences], dim=1)
    pooled = [texts[one.name].pooled for one in spec.texts if one.pooled_width]
    return captions, torch.cat([vector.float() for vector in pooled if vector is not None], dim=1) if pooled else None
