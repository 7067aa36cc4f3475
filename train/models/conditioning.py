"""What a forward takes beside latents and times, and what it gives: conditioning with its null for classifier-free
guidance, and the extras of techniques."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import register_dataclass, tree_map_only

from ...datasets.batches.captions import Captions
from ...datasets.format.schema import TextSpec
from .spec import ModelSpec

ImagesT = TypeVar("ImagesT")


class Conditioning(NamedTuple):
    """Labels, or captions.

    Args:
      labels: (B,) int64; null is the number of classes.
      captions: the valid tokens of each caption; or (B, L, D) for models that read padding too.
      pooled: (B, P) float32, for models that read pooled vectors.
      reference: (B, C, H, W) latents of the image to edit, for models that read one.
    """

    labels: Tensor | None = None
    captions: Captions | Tensor | None = None
    pooled: Tensor | None = None
    reference: Tensor | None = None

    def images(self, x: Tensor) -> list[Tensor]:
        """The latents whose tokens a model sees: the noisy ones, and those of the reference."""
        return [x] if self.reference is None else [x, self.reference]

    @property
    def inputs(self) -> Captions | Tensor:
        """Labels or captions, whose length is the number of images."""
        inputs = self.captions if self.labels is None else self.labels
        assert inputs is not None, "a model has one of them"
        return inputs

    @property
    def valid_captions(self) -> Captions:
        """The captions of a model that reads valid tokens alone."""
        assert isinstance(self.captions, Captions)
        return self.captions

    def followed_by(self, other: Conditioning) -> Conditioning:
        """These images, then others with the same kinds of conditioning."""
        joined: dict[str, Any] = {}
        for name, value in self._asdict().items():
            more: Any = getattr(other, name)
            if value is not None:
                joined[name] = torch.cat([value, more]) if isinstance(value, Tensor) else value.followed_by(more)
        return Conditioning(**joined)


@dataclass(frozen=True)
class Microbatch:
    """Some images of a rank's batch, and all that a forward and its losses need of them.

    Args:
      latents, noise: (B, C, H, W).
      times: (B,) as the objective draws them.
      draws, targets: (B, ...) of the techniques, by name.
    """

    latents: Tensor
    noise: Tensor
    times: Tensor
    conditioning: Conditioning
    draws: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.latents)

    def placeholder(self) -> Microbatch:
        """One image of ones, for a rank without images: collective calls need a forward of every rank."""

        def ones(part: Tensor) -> Tensor:
            return part.new_ones((1, *(max(1, size) for size in part.shape[1:])))

        def one(part: Tensor | Captions) -> Tensor | Captions:
            if isinstance(part, Tensor):
                return ones(part)
            return Captions(ones(part.tokens), (1,), torch.arange(2, dtype=torch.int32, device=part.device))

        return tree_map_only((Tensor, Captions), one, self)


register_dataclass(Microbatch)


def select_part(images: Microbatch, part: slice) -> Microbatch:
    """Some images of a microbatch; a placeholder if there are none, because all ranks make the same forwards."""
    chosen = select(images, part)
    return chosen if len(chosen) else chosen.placeholder()


def select(images: ImagesT, rows: slice | list[int]) -> ImagesT:
    """Some images, in this order, of all tensors (B, ...) and captions in a tuple, dictionary or registered dataclass.

    Nothing waits for the device if they are a slice.
    """
    return tree_map_only((Tensor, Captions), lambda part: part[rows], images)


class Extras(NamedTuple):
    """What techniques ask of a forward.

    Args:
      class_token: (B, D) noisy class token, for a model that denoises one.
      kept: (B, K) int64 image tokens, in their order, that go through the routed blocks; None: all.
      without_path: (B,) bool, images whose routed blocks count for nothing (SPRINT's path drop); None: none.
      watched: a block, from 1, whose output is wanted.
      projected: tokens of each image that are projected, from the first; None: all.
    """

    class_token: Tensor | None = None
    kept: Tensor | None = None
    without_path: Tensor | None = None
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
        several text encoders; its valid tokens alone, unless ``spec.pads_null``. None too where a store does not say
        how many these are: nothing can be dropped then.
      null_pooled: (P,) joined pooled vectors of the empty caption, for a model that reads them.
    """

    spec: ModelSpec
    null_caption: Tensor | None
    null_pooled: Tensor | None = None

    def __call__(self, labels: Tensor | None, texts: Mapping[str, Captions], *, widen: bool = True) -> Conditioning:
        """Conditioning of a batch, without dropping.

        Args:
          labels: (B,) int64, -1 for none.
          texts: captions of each text encoder, by name.
          widen: convert 16-bit captions to float32, which the model needs without autocast.
        """
        if not self.spec.takes_text:
            assert labels is not None
            return Conditioning(labels=torch.where(labels < 0, self.spec.num_classes, labels))
        if self.spec.texts:
            tokens, pooled = join_texts(self.spec, texts)
            return Conditioning(captions=tokens.float() if widen else tokens, pooled=pooled)
        text = next(iter(texts.values()))
        captions = text.with_tokens(text.embeddings.float() if widen else text.embeddings)
        return Conditioning(captions=captions)

    @property
    def changes_lengths(self) -> bool:
        """Whether a dropped caption gets the length of null, which the host must know: ``drop`` takes a CPU tensor."""
        return self.spec.takes_text and not self.spec.pads_null

    def drop(self, conditioning: Conditioning, where: Tensor) -> Conditioning:
        """Replace the conditioning of some images by null.

        The tokens of several text encoders, and their pooled vectors, are dropped together.

        Args:
          where: (B,) bool, true for the images; on the CPU if ``changes_lengths``, else on the device.
        """
        labels, captions, pooled, _ = conditioning
        if labels is not None:
            return Conditioning(labels=torch.where(where, self.spec.num_classes, labels))
        null = self.null_caption
        assert null is not None
        assert captions is not None
        if isinstance(captions, Captions) and self.changes_lengths:
            return conditioning._replace(captions=_replaced(captions, null, where.tolist()))
        if isinstance(captions, Captions):
            images, places = captions.owners
            tokens = torch.where(where[images, None], null.to(captions.tokens)[places], captions.tokens)
            return conditioning._replace(captions=captions.with_tokens(tokens))
        captions = torch.where(where[:, None, None], null.to(captions), captions)
        if pooled is not None:
            assert self.null_pooled is not None
            pooled = torch.where(where[:, None], self.null_pooled.to(pooled), pooled)
        return conditioning._replace(captions=captions, pooled=pooled)


def null_length(spec: ModelSpec, text: TextSpec | None) -> int:
    """Tokens of the empty caption as a model sees it that reads one text encoder; 0: the store does not say it."""
    if text is None:
        return 0
    return text.max_tokens if spec.pads_null else text.null_length


def _replaced(captions: Captions, null: Tensor, dropped: Sequence[bool]) -> Captions:
    """Captions of which some are null, with its length.

    Args:
      null: (L, D).
    """
    if not any(dropped):
        return captions
    rows = list(captions.tokens.split(captions.lengths))
    null = null.to(captions.tokens)
    rows = [null if is_dropped else row for row, is_dropped in zip(rows, dropped, strict=True)]
    return Captions.packed(torch.cat(rows), [len(row) for row in rows])


def join_texts(spec: ModelSpec, texts: Mapping[str, Captions]) -> tuple[Tensor, Tensor | None]:
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
        if one.tokens:
            text = texts[one.name]  # a rank may have no image, so the length is that of the model
            tokens = text.embeddings.view(len(text), one.tokens, one.width)
            rows[-1].append(tokens) if one.beside else rows.append([tokens])
    sequences = [torch.cat(beside, dim=2) for beside in rows]
    captions = torch.cat([F.pad(each, (0, spec.caption_width - each.shape[2])) for each in sequences], dim=1)
    pooled = [texts[one.name].pooled for one in spec.texts if one.pooled_width]
    return captions, torch.cat([vector.float() for vector in pooled if vector is not None], dim=1) if pooled else None
