"""FLOPs of a model, counted from its matrix products, convolutions and attention.

A FLOP is one multiplication or one addition, so a multiply-accumulate is two: the "Gflops" of the DiT paper are half of
these. A training step is three forwards (the backward has two products for each of the forward's). Recomputation by
activation checkpointing is not counted, as is usual for MFU. Frozen weights have no gradient, so their layers take two
forwards.
"""

from __future__ import annotations

import functools

import torch
from torch.utils.flop_counter import FlopCounterMode

from ...datasets.batches.captions import Captions
from ...datasets.format.schema import LatentSpec
from ..models.build import Denoiser, build_model, patch_of
from ..models.conditioning import Conditioning, Extras
from ..models.spec import ModelSpec

TRAIN_FORWARDS = 3  # forward, and the gradients of inputs and of weights
OF_WEIGHTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution)


def shortened(count: int) -> str:
    """A number of parameters in the unit that fits: 592, 18.4 k, 8.3 M."""
    if count < 1000:
        return str(count)
    return f"{count / 1e3:.1f} k" if count < 999_950 else f"{count / 1e6:.1f} M"


@functools.lru_cache(maxsize=4)
def meta_model(spec: ModelSpec) -> Denoiser:
    """A model on the meta device, without memory."""
    with torch.device("meta"):
        return build_model(spec, seed=0)


def forward_flops(spec: ModelSpec, latent_size: tuple[int, int], caption_tokens: float = 0) -> int:
    """FLOPs of one image's forward.

    Args:
      latent_size: height and width of the latent.
      caption_tokens: of its caption, for a model with text; a mean may be a fraction.
    """
    return _flops(spec, latent_size, caption_tokens)[0]


def train_flops(spec: ModelSpec, latent_size: tuple[int, int], caption_tokens: float = 0) -> int:
    """FLOPs of one image's forward and backward, without recomputation."""
    flops = TRAIN_FORWARDS * forward_flops(spec, latent_size, caption_tokens)
    frozen = _flops(spec.plain, latent_size, caption_tokens)[1] if spec.adapter else 0
    return flops - frozen  # their gradients are not computed


def _flops(spec: ModelSpec, latent_size: tuple[int, int], caption_tokens: float) -> tuple[int, int]:
    """FLOPs of all operations, and of those with weights: linear layers and convolutions.

    Cross-attention is linear in the length of the caption: fixed FLOPs, and more for each token. A model that joins
    text encoders has one length.
    """
    if not caption_tokens or spec.texts:
        return _counted(spec, latent_size, int(caption_tokens))
    eight, sixteen = _counted(spec, latent_size, 8), _counted(spec, latent_size, 16)
    flops, of_weights = (round(a + (b - a) / 8 * (caption_tokens - 8)) for a, b in zip(eight, sixteen, strict=True))
    return flops, of_weights


@functools.lru_cache(maxsize=4096)
def _counted(spec: ModelSpec, latent_size: tuple[int, int], caption_tokens: int) -> tuple[int, int]:
    model = meta_model(spec)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.device("meta"):
        x = torch.empty(1, spec.channels, *latent_size)
        extras = [Extras(torch.empty(1, spec.class_width))] if spec.class_width else []
        model(x, torch.empty(1), example_conditioning(spec, 1, caption_tokens, latent_size), *extras)
    operations = counter.get_flop_counts()["Global"]
    return counter.get_total_flops(), sum(operations.get(operation, 0) for operation in OF_WEIGHTS)


def tokens_per_image(spec: ModelSpec, latent_size: tuple[int, int]) -> int:
    """Image tokens of one image."""
    return latent_size[0] * latent_size[1] // patch_of(spec) ** 2


def latent_size_of(bucket: str, latent: LatentSpec) -> tuple[int, int]:
    """Height and width of the latents of a bucket "HxW" in pixels."""
    height, width = (int(side) // latent.downscale for side in bucket.split("x"))
    return height, width


def example_conditioning(
    spec: ModelSpec, count: int, caption_tokens: int, latent_size: tuple[int, int]
) -> Conditioning:
    """Conditioning of ``count`` images, with captions of equal length, on the default device."""
    if not spec.takes_text:
        return Conditioning(labels=torch.zeros(count, dtype=torch.long))
    captions = Captions.packed(torch.zeros(count * caption_tokens, spec.caption_width), [caption_tokens] * count)
    return Conditioning(
        captions=captions.padded if spec.texts else captions,
        pooled=torch.zeros(count, spec.pooled_width) if spec.pooled_width else None,
        reference=torch.zeros(count, spec.channels, *latent_size) if spec.reference else None,
    )
