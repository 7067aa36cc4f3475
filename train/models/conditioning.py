"""Conditioning of a batch, and its null for classifier-free guidance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .spec import ModelSpec


class Conditioning(NamedTuple):
    """Labels, or captions with their mask.

    Args:
      labels: (B,) int64; null is the number of classes.
      captions: (B, L, D).
      caption_mask: (B, L) true for valid tokens.
      source_sizes: (B, 2) float32 height and width of the source pictures in pixels, for models that use them.
    """

    labels: Tensor | None = None
    captions: Tensor | None = None
    caption_mask: Tensor | None = None
    source_sizes: Tensor | None = None

    def part(self, rows: slice) -> Conditioning:
        """The conditioning of a microbatch."""
        return Conditioning(*(None if tensor is None else tensor[rows] for tensor in self))

    def repeated(self, times: int) -> Conditioning:
        """Each image's conditioning so many times, one after the other."""
        return Conditioning(*(None if tensor is None else tensor.repeat_interleave(times, 0) for tensor in self))

    def dummy(self) -> Conditioning:
        """Zeros for one image, with one valid token."""
        labels, captions, mask, sizes = self
        return Conditioning(
            labels=None if labels is None else labels.new_zeros(1),
            captions=None if captions is None else captions.new_zeros(1, 1, captions.shape[2]),
            caption_mask=None if mask is None else mask.new_ones(1, 1),
            source_sizes=None if sizes is None else sizes.new_ones(1, 2),
        )


class Extras(NamedTuple):
    """What a forward takes and gives beside latents, times and conditioning.

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


class ModelOutput(NamedTuple):
    """What a forward with ``Extras`` gives.

    Args:
      output: (B, out_channels, H, W).
      class_velocity: (B, D) of the class token, if there is one.
      projected: (B, T or K, D) by name of the feature; the class token, if there is one, comes first.
      watched: (B, T or K, E) output of the watched block, without the class token.
    """

    output: Tensor
    class_velocity: Tensor | None
    projected: dict[str, Tensor]
    watched: Tensor | None


@dataclass(frozen=True)
class Conditioner:
    """Makes the conditioning of a batch.

    Args:
      spec: of the model.
      null_caption: (max_tokens, D) embedding of the empty caption, for a model with text.
      source_sizes: (records, 2) float32 pixels of each store, on the device of the batches, for models that use
        them; at eight bytes a record, batches need not carry them.
      caption_step: pad captions to a multiple of it, at most to the length of null, so that compiled blocks see few
        lengths.
    """

    spec: ModelSpec
    null_caption: Tensor | None
    source_sizes: Sequence[Tensor] = ()
    caption_step: int = 1

    def __call__(
        self,
        labels: Tensor | None,
        captions: Tensor | None,
        lengths: Tensor | None,
        records: Tensor | None = None,
        *,
        store: int = 0,
        widen: bool = True,
    ) -> Conditioning:
        """Conditioning of a batch, without dropping.

        Args:
          labels: (B,) int64, -1 for none.
          captions: (B, L, D), with their (B,) lengths.
          records: (B,) int64 positions in the records table.
          store: index of the store of these records.
          widen: convert 16-bit captions to float32, which the model needs without autocast.
        """
        if not self.spec.takes_text:
            assert labels is not None
            return Conditioning(labels=torch.where(labels < 0, self.spec.num_classes, labels))
        assert captions is not None
        assert lengths is not None
        if missing := self._padding(captions.shape[1]):
            captions = F.pad(captions, (0, 0, 0, missing))
        places = torch.arange(captions.shape[1], device=captions.device)
        mask = places[None] < lengths.to(captions.device)[:, None]  # (B, L)
        sizes = self.source_sizes[store][records] if self.source_sizes and records is not None else None
        captions = captions.float() if widen else captions
        return Conditioning(captions=captions, caption_mask=mask, source_sizes=sizes)

    def _padding(self, length: int) -> int:
        """Rows of padding to add to captions of this length."""
        longest = length if self.null_caption is None else max(length, len(self.null_caption))
        return min(-(-length // self.caption_step) * self.caption_step, longest) - length

    def drop(self, conditioning: Conditioning, where: Tensor) -> Conditioning:
        """Replace the conditioning of some images by null.

        A dropped caption keeps its mask, as in PixArt and Sana: the first rows of null replace its tokens.

        Args:
          where: (B,) bool.
        """
        if conditioning.labels is not None:
            return Conditioning(labels=torch.where(where, self.spec.num_classes, conditioning.labels))
        captions, null = conditioning.captions, self.null_caption
        assert captions is not None
        assert null is not None
        rows = null[: captions.shape[1]].to(captions)
        return conditioning._replace(captions=torch.where(where[:, None, None], rows, captions))
