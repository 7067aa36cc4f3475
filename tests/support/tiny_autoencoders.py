"""Tiny random autoencoders of every family, saved as diffusers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch

from leandit.precompute.encoders.autoencoders import name_siglip_layers

KL: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 3}
KL |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
KL |= {"mid_block_add_attention": False}
TINY = {"encoder_block_out_channels": (8,) * 3, "decoder_block_out_channels": (8,) * 3, "latent_channels": 5}
TINY |= {"num_encoder_blocks": (1, 1, 1), "num_decoder_blocks": (1, 1, 1)}
DC = {"latent_channels": 8, "attention_head_dim": 4}
DC |= {f"{part}_block_types": ("ResBlock",) * 4 for part in ("encoder", "decoder")}
DC |= {f"{part}_block_out_channels": (8, 8, 16, 16) for part in ("encoder", "decoder")}
DC |= {f"{part}_layers_per_block": (1,) * 4 for part in ("encoder", "decoder")}
DC |= {f"{part}_qkv_multiscales": ((),) * 4 for part in ("encoder", "decoder")}
FRAMES = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]}
FRAMES |= {"latents_mean": [0.5, -1.0, 0.25, 2.0], "latents_std": [2.0, 0.5, 1.5, 3.0]}
WAN = FRAMES | {"scale_factor_spatial": 2}
WAN_PATCHED = WAN | {"dim_mult": [1, 1], "patch_size": 2, "in_channels": 12, "out_channels": 12, "is_residual": True}
RAE = {"encoder_hidden_size": 64, "encoder_num_hidden_layers": 1, "decoder_hidden_size": 32}
RAE |= {"decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 64}
RAE |= {"encoder_input_size": 56}  # of 14 px patches: 4 by 4
RAE |= {"latents_mean": [[[0.25 * channel]] for channel in range(64)]}
RAE |= {"latents_std": [[[1.0 + 0.125 * channel]] for channel in range(64)]}
FAMILIES: dict[str, tuple[Any, dict[str, Any], int]] = {  # class, config, downscale
    "kl": (diffusers.AutoencoderKL, KL, 2),
    "tiny": (diffusers.AutoencoderTiny, TINY, 4),
    "dc": (diffusers.AutoencoderDC, DC, 8),
    "flux2": (diffusers.AutoencoderKLFlux2, KL, 4),
    "qwen": (diffusers.AutoencoderKLQwenImage, FRAMES, 2),
    "wan": (diffusers.AutoencoderKLWan, WAN, 2),
    "wan_patched": (diffusers.AutoencoderKLWan, WAN_PATCHED, 4),
    "rae": (diffusers.AutoencoderRAE, RAE, 16),
}


def random_autoencoder(family: str, **config: Any) -> Any:
    """A random autoencoder of a family, with a batch norm that is not that of an untrained one."""
    torch.manual_seed(0)
    model_class, base, _ = FAMILIES[family]
    if config.get("encoder_type") == "siglip2":
        name_siglip_layers()
    model = model_class(**base | config).eval()
    if hasattr(model, "bn"):
        model.bn.running_mean.normal_()
        model.bn.running_var.uniform_(0.5, 4.0)
    return model


def save_autoencoder(folder: Path, family: str, **config: Any) -> Path:
    """Save ``random_autoencoder`` as a folder."""
    random_autoencoder(family, **config).save_pretrained(folder)
    return folder
