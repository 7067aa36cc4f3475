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

from ...datasets.format.schema import LatentSpec
from ..models.build import Denoiser, build_model, patch_of
from ..models.conditioning import Conditioning, Extras
from ..models.spec import ModelSpec

COUNTED_TOKENS = (8, 16, 24)  # caption lengths that are counted; others are interpolated
TRAIN_FORWARDS = 3  # forward, and the gradients of inputs and of weights
OF_WEIGHTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution)


def shortened(count: int) -> str:
    """A number of parameters in the unit that fits: 592, 18.4 k, 8.3 M."""
    if count < 1000:
        return str(count)
    return f"{count / 1e3:.1f} k" if count < 999_950 else f"{count / 1e6:.1f} M"


def meta_model(spec: ModelSpec) -> Denoiser:
    """A model on the meta device, without memory."""
    return _meta_model(spec.model_dump_json())


@functools.lru_cache(maxsize=4)
def _meta_model(spec: str) -> Denoiser:
    with torch.device("meta"):
        return build_model(ModelSpec.model_validate_json(spec), seed=0)


def forward_flops(spec: ModelSpec, latent_size: tuple[int, int], caption_tokens: int = 0) -> int:
    """FLOPs of one image's forward.

    Counting takes a tenth of a second, and captions have hundreds of lengths. Counts are polynomials of the length, of
    degree two at most: three counts give every length exactly.

    Args:
      latent_size: height and width of the latent.
      caption_tokens: of its caption, for a model with text.
    """
    return _flops(spec, latent_size, caption_tokens, weights_alone=False)


def _flops(spec: ModelSpec, latent_size: tuple[int, int], caption_tokens: int, *, weights_alone: bool) -> int:
    key, which = spec.model_dump_json(), int(weights_alone)
    if not caption_tokens:
        return _counted(key, latent_size, 0)[which]
    x, (x0, x1, x2) = caption_tokens, COUNTED_TOKENS
    y0, y1, y2 = (_counted(key, latent_size, length)[which] for length in COUNTED_TOKENS)
    step = x1 - x0
    twice = y0 * (x - x1) * (x - x2) - 2 * y1 * (x - x0) * (x - x2) + y2 * (x - x0) * (x - x1)  # Lagrange
    return twice // (2 * step**2)


@functools.lru_cache(maxsize=4096)
def _counted(spec: str, latent_size: tuple[int, int], caption_tokens: int) -> tuple[int, int]:
    """FLOPs of all operations, and of those with weights: linear layers and convolutions."""
    model, shapes = _meta_model(spec), ModelSpec.model_validate_json(spec)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.device("meta"):
        x = torch.empty(1, shapes.channels, *latent_size)
        extras = [Extras(torch.empty(1, shapes.class_width))] if shapes.class_width else []
        model(x, torch.empty(1), example_conditioning(shapes, 1, caption_tokens), *extras)
    operations = counter.get_flop_counts()["Global"]
    return counter.get_total_flops(), sum(operations.get(operation, 0) for operation in OF_WEIGHTS)


def train_flops(spec: ModelSpec, latent_size: tuple[int, int], caption_tokens: int = 0) -> int:
    """FLOPs of one image's forward and backward, without recomputation."""
    flops = TRAIN_FORWARDS * forward_flops(spec, latent_size, caption_tokens)
    frozen = _flops(spec.plain, latent_size, caption_tokens, weights_alone=True) if spec.adapter else 0
    return flops - frozen  # their gradients are not computed


def tokens_per_image(spec: ModelSpec, latent_size: tuple[int, int]) -> int:
    """Image tokens of one image."""
    return latent_size[0] * latent_size[1] // patch_of(spec) ** 2


def latent_size_of(bucket: str, latent: LatentSpec) -> tuple[int, int]:
    """Height and width of the latents of a bucket "HxW" in pixels."""
    height, width = (int(side) // latent.downscale for side in bucket.split("x"))
    return height, width


def example_conditioning(spec: ModelSpec, count: int, caption_tokens: int) -> Conditioning:
    """Conditioning of ``count`` images on the default device; every token of a caption is real."""
    if not spec.takes_text:
        return Conditioning(labels=torch.zeros(count, dtype=torch.long))
    return Conditioning(
        captions=torch.zeros(count, caption_tokens, spec.caption_width),
        caption_mask=None if spec.texts else torch.ones(count, caption_tokens),
        pooled=torch.zeros(count, spec.pooled_width) if spec.pooled_width else None,
    )
