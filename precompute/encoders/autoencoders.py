"""The supported autoencoders of diffusers, and how each normalises its latents for a model.

    latent of the model = (latent of the encoder - shift) * scale

Unknown autoencoders are rejected by name: stored without their normalisation, their latents would train a model on the
wrong scale.

Source: ``prepare_latents`` and the decoding of diffusers' pipelines (Stable Diffusion XL, SD3, Flux, Sana).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...datasets.errors import EncoderError

# Normalisation keys in the config of each class. Other classes, as AutoencoderKLFlux2 (a batch norm over patches) or
# AutoencoderRAE (pixels from 0 to 1), keep it elsewhere.
NORMALISATION = {
    "AutoencoderKL": ("scaling_factor", "shift_factor", "latents_mean", "latents_std"),
    "AutoencoderTiny": ("scaling_factor", "shift_factor"),
    "AutoencoderDC": ("scaling_factor",),
}
SD_CHANNELS = 4  # the default of AutoencoderKL, 0.18215, is that of Stable Diffusion's
DECODER = ("decoder.", "post_quant_conv.")  # weights that encoding does not use


def check_normalisation(config: Mapping[str, Any], where: str) -> None:
    """Raise if the config of an autoencoder does not determine the normalisation of its latents.

    Args:
      config: of its config.json.
      where: for the message.
    Raises: EncoderError.
    """
    name = str(config.get("_class_name"))
    if name not in NORMALISATION:
        raise EncoderError(
            f"{where}: its config.json says '{name[:80]}', needed {', '.join(NORMALISATION)}. How any other "
            "normalises its latents is not known here."
        )
    if config.get("in_channels", 3) != 3:
        raise EncoderError(
            f"{where}: it encodes {str(config['in_channels'])[:80]} channels, needed 3: red, green and blue."
        )
    if "scaling_factor" in config:
        is_known = config["scaling_factor"] is not None
    else:  # the default of the class: right for Stable Diffusion's, and for the tiny ones
        is_known = name == "AutoencoderTiny" or (
            name == "AutoencoderKL" and config.get("latent_channels", SD_CHANNELS) == SD_CHANNELS
        )
    if not is_known:
        raise EncoderError(f"{where}: its config.json has no 'scaling_factor'. Add the one that it was trained with.")
    strange = sorted({"latents_mean", "latents_std", "shift_factor"} - set(NORMALISATION[name]))
    if given := [key for key in strange if config.get(key)]:
        raise EncoderError(f"{where}: its config.json has '{given[0]}', which {name} does not know. Check the config.")
    if bool(config.get("latents_mean")) != bool(config.get("latents_std")):
        raise EncoderError(
            f"{where}: its config.json has one of 'latents_mean' and 'latents_std', needed both or none."
        )
    if config.get("latents_mean") and config.get("shift_factor"):
        raise EncoderError(f"{where}: its config.json has 'latents_mean' and 'shift_factor', needed one of them.")


def shift_and_scale(config: Mapping[str, Any], channels: int, where: str) -> tuple[list[float], list[float]]:
    """Shift and scale of each channel of an autoencoder that has passed ``check_normalisation``.

    Args:
      config: of the loaded model, with the defaults of its class.
    Raises: EncoderError: not finite numbers, or not one for each channel.
    """
    try:
        factor = config.get("scaling_factor")
        means, stds = config.get("latents_mean"), config.get("latents_std")
        shifts = np.array(means or [config.get("shift_factor") or 0.0] * channels, float)
        scales = np.array([factor / std for std in stds] if stds else [factor] * channels, float)
        if not len(shifts) == len(scales) == channels:
            raise ValueError(f"{len(shifts)} and {len(scales)} numbers")
        if not (np.isfinite(shifts).all() and np.isfinite(scales).all() and (scales > 0).all()):
            raise ValueError("not finite, or not above 0")
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise EncoderError(
            f"{where}: scaling_factor, shift_factor, latents_mean or latents_std of its config are not a number each, "
            f"or one for each of {channels} channels ({error})."
        ) from error
    return shifts.tolist(), scales.tolist()
