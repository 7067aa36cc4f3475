"""FLOPs of a model, counted from its matrix products, convolutions and attention.

A FLOP is one multiplication or one addition, so a multiply-accumulate is two: the "Gflops" of the DiT paper are half of
these. A training step of all weights is three forwards, as is usual for MFU (the backward has two products for each of
the forward's; that inputs of the model need no gradient is neglected). With adapters the backward is counted as it
runs: frozen weights have no gradient, and neither does what lies before the first adapter. Recomputation by activation
checkpointing is not counted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from ...datasets.batches.captions import Captions
from ...datasets.format.schema import LatentSpec
from ..models.build import Denoiser, build_model, caption_multiple, patch_of
from ..models.conditioning import Conditioning, Extras
from ..models.spec import ModelSpec

TRAIN_FORWARDS = 3  # forward, and the gradients of inputs and of weights

Counted = Literal["forward", "forward with projectors", "forward and backward"]


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


def forward_flops(spec: ModelSpec, latent_size: tuple[int, int], caption_tokens: int = 0) -> int:
    """FLOPs of one image's forward, without projectors, which training alone needs.

    Args:
      latent_size: height and width of the latent.
      caption_tokens: of its caption, for a model with text.
    """
    return _counted(spec, latent_size, caption_tokens, "forward")


def train_flops(spec: ModelSpec, latent_size: tuple[int, int], caption_tokens: int = 0) -> int:
    """FLOPs of one image's forward and backward, without recomputation.

    Args: as for ``forward_flops``.
    """
    if spec.adapter:
        return _counted(spec, latent_size, caption_tokens, "forward and backward")
    return TRAIN_FORWARDS * _counted(spec, latent_size, caption_tokens, "forward with projectors")


def mean_train_flops(spec: ModelSpec, latent_size: tuple[int, int], caption_lengths: Sequence[int]) -> float:
    """FLOPs of one image's forward and backward, the mean over images with captions of these lengths in tokens.

    Only a few lengths are counted, so that a run does not wait for a count at each new length. The others follow
    exactly: attention is quadratic in the padded length of a caption, and everything else is linear in it, or in the
    length without padding, for what embeds a caption before it is padded.
    """
    if not spec.takes_text:
        return train_flops(spec, latent_size)
    step = caption_multiple(spec)
    first, second, third = (train_flops(spec, latent_size, steps * step) for steps in (1, 2, 3))
    slope = second - first
    curvature = third - 2 * second + first
    per_token = 0  # of what is not padded
    if step > 1:
        per_token = (second - train_flops(spec, latent_size, step + 1)) // (step - 1)
    total = 0
    for length in caption_lengths:
        steps = max(1, -(-length // step))
        more = steps - 1
        total += first + more * slope + more * (more - 1) // 2 * curvature
        total -= (steps * step - length) * per_token
    return total / len(caption_lengths)


@functools.lru_cache(maxsize=4096)
def _counted(spec: ModelSpec, latent_size: tuple[int, int], caption_tokens: int, passes: Counted) -> int:
    model = meta_model(spec)
    has_backward = passes == "forward and backward"
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(has_backward), torch.device("meta"):
        inputs: list[Any] = [
            torch.empty(1, spec.channels, *latent_size),
            torch.empty(1),
            example_conditioning(spec, 1, caption_tokens, latent_size),
        ]
        if spec.projectors:  # of a DiT
            class_token = torch.empty(1, spec.class_width) if spec.class_width else None
            inputs.append(Extras(class_token, projected=0 if passes == "forward" else None))
        output = model(*inputs)
        if has_backward:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            torch.autograd.grad(output.sum(), trained, allow_unused=True)
    return counter.get_total_flops()


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
