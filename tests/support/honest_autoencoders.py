"""Autoencoders whose weights are constructed: pictures come back nearly exactly, with latents of a known scale.

A latent position is a pixel: channel c of the raw latent is LATENT_GAIN * pixel + LATENT_OFFSET[c]. All residual
branches are zero. The norm before the last convolution divides by a constant, which channels of large constants make,
and the SiLU after it works where it is the identity.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch

LATENT_GAIN = 4.0  # so raw latents deviate by about 2
LATENT_OFFSET = (10.0, -8.0, 20.0)
WIDTH = 8
STATISTICS = {"latents_mean": list(LATENT_OFFSET), "latents_std": [2.0, 2.0, 2.0]}
FLAT: dict[str, Any] = {
    "block_out_channels": (WIDTH,),
    "down_block_types": ("DownEncoderBlock2D",),
    "up_block_types": ("UpDecoderBlock2D",),
    "layers_per_block": 1,
    "norm_num_groups": 1,
    "latent_channels": 3,
    "mid_block_add_attention": False,
}
FRAMES: dict[str, Any] = {
    "base_dim": WIDTH,
    "z_dim": 3,
    "dim_mult": [1],
    "num_res_blocks": 1,
    "temperal_downsample": [],
    **STATISTICS,
}
HONEST: dict[str, tuple[Any, dict[str, Any]]] = {
    "kl": (diffusers.AutoencoderKL, FLAT | STATISTICS | {"scaling_factor": 1.0}),
    "flux2": (diffusers.AutoencoderKLFlux2, FLAT),
    "qwen": (diffusers.AutoencoderKLQwenImage, FRAMES),
    "wan": (diffusers.AutoencoderKLWan, FRAMES | {"scale_factor_spatial": 1}),
}
CONSTANT = 1000.0  # in two channels before the norm, which then divides by it
LINEAR = 20.0  # the SiLU is the identity near it


def honest_autoencoder(family: str, **config: Any) -> Any:
    """The autoencoder of a family; ``config`` replaces keys after the weights are constructed."""
    model_class, base = HONEST[family]
    model = model_class(**base).eval()
    gains, offsets = torch.full((3,), LATENT_GAIN), torch.tensor(LATENT_OFFSET)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.split(".")[-2] in ("conv2", "proj"):  # ends of residual branches
                parameter.zero_()
        _construct(model.encoder, torch.ones(3), torch.zeros(3), gains, offsets)
        _construct(model.decoder, 1 / gains, -offsets / gains, torch.ones(3), torch.zeros(3))
        for conv in (model.quant_conv, model.post_quant_conv):
            _affine(conv, torch.ones(len(conv.bias)), torch.zeros(len(conv.bias)))
        if hasattr(model, "bn"):
            model.bn.running_mean.copy_(offsets.repeat_interleave(4))
            model.bn.running_var.fill_(4.0)
    model.register_to_config(**config)
    return model


def save_honest(folder: Path, family: str, **config: Any) -> Path:
    """Save ``honest_autoencoder`` as a folder."""
    honest_autoencoder(family, **config).save_pretrained(folder)
    return folder


def _construct(half: Any, *affine: torch.Tensor) -> None:
    """Make an encoder or a decoder two affine maps of its first three channels; a log-variance is -20.

    Args:
      affine: gains and offsets of the first convolution, then of the last.
    """
    gains, offsets, last_gains, last_offsets = affine
    constants = torch.tensor([CONSTANT, -CONSTANT])
    norm = half.conv_norm_out if hasattr(half, "conv_norm_out") else half.norm_out
    if isinstance(norm, torch.nn.GroupNorm):  # the negatives keep its mean at 0
        _affine(half.conv_in, torch.cat([gains, -gains]), torch.cat([offsets, -offsets, constants]))
        norm.weight.fill_(CONSTANT * (2 / WIDTH) ** 0.5)
        norm.bias.fill_(LINEAR)
    else:  # root mean square of the channels, without a bias of its own
        _affine(half.conv_in, gains, torch.cat([offsets + LINEAR, torch.zeros(3), constants]))
        norm.gamma.fill_(float((2 * CONSTANT**2 + 3 * LINEAR**2) ** 0.5 / WIDTH**0.5))
    biases = torch.full_like(half.conv_out.bias, -20.0)
    biases[:3] = last_offsets - last_gains * LINEAR
    _affine(half.conv_out, last_gains, biases)


def _affine(conv: Any, gains: torch.Tensor, offsets: torch.Tensor) -> None:
    """Make a convolution gain * channel + offset, channels in turn; of frames only the newest counts."""
    conv.weight.zero_()
    middle = [size // 2 for size in conv.weight.shape[2:]]
    if len(middle) == 3:
        middle[0] = conv.weight.shape[2] - 1
    for channel, gain in enumerate(gains):
        conv.weight[(channel, channel % conv.weight.shape[1], *middle)] = gain
    conv.bias.copy_(offsets)
