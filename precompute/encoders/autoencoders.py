"""The supported autoencoders of diffusers: how each takes pixels, and how it normalises its latents for a model.

    latent of the model = (latent of the encoder - shift) * scale

Unknown autoencoders are rejected by name: stored without their normalisation, their latents would train a model on the
wrong scale.

Source: ``prepare_latents``, ``_encode_vae_image`` and the decoding of diffusers' pipelines (Stable Diffusion XL and 3,
Flux, Flux2, Sana, QwenImage, Wan), and ``AutoencoderRAE.encode``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

import numpy as np

from ...errors import EncoderError, RecipeError


@dataclass(frozen=True)
class Family:
    """How the models of one class of diffusers are used.

    Args:
      normalised: where shift and scale come from. "factors": shift_factor and scaling_factor of the config, or
        latents_mean and latents_std / scaling_factor. "statistics": latents_mean and latents_std of the config.
        "batch norm": the running statistics of the model's ``bn``. "inside": the model's own encode applies them.
      keys: the normalisation keys that its config may have.
      zero_to_one: pixels range from 0 to 1, not from -1 to 1.
      rank: dimensions of a batch: 4, or 5 with one frame between channels and height.
      patchify: side of the squares of latent positions that become channels; 1 for none.
    """

    normalised: Literal["factors", "statistics", "batch norm", "inside"]
    keys: tuple[str, ...]
    has_posterior: bool
    zero_to_one: bool = False
    rank: int = 4
    patchify: int = 1


RAE = "AutoencoderRAE"
RAE_POSITIONS = "decoder.decoder_pos_embed"  # the table of its decoder in a file of weights
MEAN_STD = ("latents_mean", "latents_std")
FAMILIES = {
    "AutoencoderKL": Family("factors", ("scaling_factor", "shift_factor", *MEAN_STD), has_posterior=True),
    "AutoencoderTiny": Family("factors", ("scaling_factor", "shift_factor"), has_posterior=False),
    "AutoencoderDC": Family("factors", ("scaling_factor",), has_posterior=False),
    "AutoencoderKLFlux2": Family("batch norm", (), has_posterior=True, patchify=2),
    "AutoencoderKLQwenImage": Family("statistics", MEAN_STD, has_posterior=True, rank=5),
    "AutoencoderKLWan": Family("statistics", MEAN_STD, has_posterior=True, rank=5),
    RAE: Family("inside", ("scaling_factor", *MEAN_STD), has_posterior=False, zero_to_one=True),
}
SD_CHANNELS = 4  # the default of AutoencoderKL, 0.18215, is that of Stable Diffusion's
DECODER = ("decoder.", "post_quant_conv.")  # weights that encoding does not use


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of an autoencoder whose config determines how it is used.

    Args:
      config: of its config.json.
      where: for the message.
    Raises: EncoderError: not in the table, not of red, green and blue, or its normalisation is not determined.
    """
    name = str(config.get("_class_name"))
    if name not in FAMILIES:
        raise EncoderError(
            f"{where}: its config.json says '{name[:80]}', expected {', '.join(FAMILIES)}. leandit does not know how "
            "other classes normalize their latents."
        )
    family = FAMILIES[name]
    _check_channels(config, name, where)
    strange = sorted({"shift_factor", *MEAN_STD} - set(family.keys))
    if given := [key for key in strange if config.get(key)]:
        raise EncoderError(f"{where}: its config.json has '{given[0]}', which {name} does not know. Check the config.")
    has_mean, has_std = (bool(config.get(key)) for key in MEAN_STD)
    if has_mean != has_std:
        raise EncoderError(
            f"{where}: its config.json has one of 'latents_mean' and 'latents_std', expected both or none."
        )
    if family.normalised == "factors":
        _check_factors(config, name, where)
    elif family.normalised == "statistics" and not has_mean:
        raise EncoderError(f"{where}: its config.json has no 'latents_mean' and 'latents_std'. Add those of its model.")
    elif family.normalised == "batch norm" and list(config.get("patch_size", (2, 2))) != [family.patchify] * 2:
        raise EncoderError(
            f"{where}: its config.json has the patch_size {str(config['patch_size'])[:80]}, expected [2, 2]: the "
            "pipeline of Flux2 makes no other patches."
        )
    elif name == RAE and config.get("reshape_to_2d") is False:
        raise EncoderError(f"{where}: its config.json has reshape_to_2d = false, expected true: latents of (C, H, W).")
    return family


def _check_channels(config: Mapping[str, Any], name: str, where: str) -> None:
    """Raise unless it encodes red, green and blue. A Wan with patches names the channels of a patch."""
    key = {"AutoencoderKLQwenImage": "input_channels", RAE: "num_channels"}.get(name, "in_channels")
    patch = config.get("patch_size") if name == "AutoencoderKLWan" else None
    per_channel = patch**2 if isinstance(patch, int) else 1
    if config.get(key, 3 * per_channel) != 3 * per_channel:
        raise EncoderError(f"{where}: it encodes {str(config[key])[:80]} channels, expected 3: red, green and blue.")


def _check_factors(config: Mapping[str, Any], name: str, where: str) -> None:
    if "scaling_factor" in config:
        is_known = config["scaling_factor"] is not None
    else:  # the default of the class: right for Stable Diffusion's, and for the tiny ones
        is_known = name == "AutoencoderTiny" or (
            name == "AutoencoderKL" and config.get("latent_channels", SD_CHANNELS) == SD_CHANNELS
        )
    if not is_known:
        raise EncoderError(f"{where}: its config.json has no 'scaling_factor'. Add the one that it was trained with.")
    if config.get("latents_mean") and config.get("shift_factor"):
        raise EncoderError(f"{where}: its config.json has 'latents_mean' and 'shift_factor', expected one of them.")


def shift_and_scale(model: Any, family: Family, channels: int, where: str) -> tuple[list[float], list[float]]:
    """Shift and scale of each channel, as the pipelines of diffusers apply them.

    Args:
      model: loaded in float32; its config has the defaults of its class.
      channels: of a latent, after patchify.
    Raises: EncoderError: not finite numbers, or not one for each channel.
    """
    try:
        shifts, scales = (np.array(each, float) for each in _numbers(model, family, channels))
        if not len(shifts) == len(scales) == channels:
            raise ValueError(f"{len(shifts)} and {len(scales)} numbers")
        if not (np.isfinite(shifts).all() and np.isfinite(scales).all() and (scales > 0).all()):
            raise ValueError("not finite, or not above 0")
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise EncoderError(
            f"{where}: scaling_factor, shift_factor, latents_mean or latents_std of its config, or its batch norm: "
            f"expected one number, or one for each of {channels} channels ({error})."
        ) from error
    return shifts.tolist(), scales.tolist()


def _numbers(model: Any, family: Family, channels: int) -> tuple[list[float], list[float]]:
    config = model.config
    if family.normalised == "inside":
        return [0.0] * channels, [1.0] * channels
    if family.normalised == "batch norm":
        epsilon = config["batch_norm_eps"]
        deviations = [sqrt(variance + epsilon) for variance in model.bn.running_var.tolist()]
        return model.bn.running_mean.tolist(), [1 / deviation for deviation in deviations]
    means, stds = config.get("latents_mean"), config.get("latents_std")
    factor = config.get("scaling_factor") if family.normalised == "factors" else 1.0
    shifts = means or [config.get("shift_factor") or 0.0] * channels
    return shifts, [factor / std for std in stds] if stds else [factor] * channels


def fixed_side_px(config: Mapping[str, Any]) -> int | None:
    """Side of the only images that a model takes, or None for any: a RAE resizes all others to its own square."""
    if config.get("_class_name") != RAE:
        return None
    patches = config.get("encoder_input_size", 224) // config.get("encoder_patch_size", 14)
    return config.get("image_size") or config.get("patch_size", 16) * patches


def set_decoder_positions(model: Any, stored: Any = None) -> None:
    """Give the decoder of diffusers' AutoencoderRAE the positions that it was trained with.

    They are those of its file, else a sinusoidal table of whole rows and columns, as in MAE, whose decoder it is.
    diffusers reads no table from the file, and makes one that spreads 16 positions over any grid, so that images of
    other sides than 16 tokens, 256 px, would be decoded with wrong positions.

    Args:
      model: an AutoencoderRAE.
      stored: (1, 1 + num_patches, width) table of its file; None: it has none. A torch tensor.
    Raises: EncoderError: the stored table has another shape.
    Source: He et al. 2022 (MAE), "get_2d_sincos_pos_embed" of its code; Zheng et al. 2025 (RAE), arXiv 2510.11690.
    """
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    decoder = model.decoder
    table = decoder.decoder_pos_embed
    if stored is None:
        side = round(sqrt(decoder.num_patches))
        whole: Any = get_2d_sincos_pos_embed(
            table.shape[-1], side, cls_token=True, extra_tokens=1, base_size=side, output_type="pt"
        )
        stored = whole[None]
    if stored.shape != table.shape:
        raise EncoderError(
            f"vae.model: its file has decoder positions of shape {tuple(stored.shape)}, its config.json needs "
            f"{tuple(table.shape)}. Fetch or save the model again."
        )
    table.copy_(stored)


def name_siglip_layers() -> None:
    """Let diffusers' AutoencoderRAE load SigLIP2 with a transformers that no longer has the layers it names.

    Its weights are called ``encoder.vision_model.*``, and its constructor reads ``vision_model.post_layernorm``; since
    transformers 5 these layers may be those of ``SiglipVisionModel`` itself.
    """
    import torch
    from diffusers.models.autoencoders import autoencoder_rae
    from transformers import SiglipVisionModel

    class NamedLayers(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            model = SiglipVisionModel(config)
            self.vision_model = getattr(model, "vision_model", model)

        def forward(self, *inputs: Any, **how: Any) -> Any:
            return self.vision_model(*inputs, **how)

    setattr(autoencoder_rae, SiglipVisionModel.__name__, NamedLayers)


def patchify(latents: Any, side: int) -> Any:
    """Squares of latent positions to channels: (B, C, H, W) to (B, C * side * side, H / side, W / side).

    Channel (c * side + row) * side + column, as in diffusers' Flux2Pipeline. ``latents``: a torch tensor.
    """
    count, channels, height, width = latents.shape
    squares = latents.reshape(count, channels, height // side, side, width // side, side)
    return squares.permute(0, 1, 3, 5, 2, 4).reshape(count, channels * side * side, height // side, width // side)


def unpatchify(latents: Any, side: int) -> Any:
    """Undo ``patchify``."""
    count, channels, height, width = latents.shape
    squares = latents.reshape(count, channels // (side * side), side, side, height, width)
    return squares.permute(0, 1, 4, 2, 5, 3).reshape(count, channels // (side * side), height * side, width * side)


def set_tiling(model: Any, tile_px: int, downscale: int) -> None:
    """Make a diffusers autoencoder encode large images in tiles that overlap by a quarter.

    Args:
      downscale: of the model, without patchify.
    Raises: RecipeError: its class cannot, or the tile size is not divisible into latent positions.
    """
    if tile_px % (4 * downscale):
        raise RecipeError(f"vae.tile_px {tile_px}: expected a multiple of {4 * downscale}, 4 latent positions.")
    # A Wan with patches counts its tiles in pixels when it decodes, and in patches when it encodes.
    is_patched_wan = type(model).__name__ == "AutoencoderKLWan" and model.config.get("patch_size")
    if hasattr(model, "tile_sample_min_height") and hasattr(model, "tile_sample_stride_height") and not is_patched_wan:
        stride_px = 3 * tile_px // 4
        model.enable_tiling(tile_px, tile_px, stride_px, stride_px)
    elif hasattr(model, "tile_sample_min_size") and type(model).__name__ != "AutoencoderTiny":
        model.tile_sample_min_size, model.tile_latent_min_size = tile_px, tile_px // downscale
        model.tile_overlap_factor = 0.25
        model.enable_tiling()
    else:  # AutoencoderTiny's tiling always makes four channels
        raise RecipeError(
            f"vae.tile_px {tile_px}: {type(model).__name__} cannot encode in tiles. Set vae.tile_px = 0; a smaller "
            "vae.batch_size needs less memory too."
        )
