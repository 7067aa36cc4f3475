"""How a pipeline decodes the latents of a run: which settings of its VAE undo the run's normalisation.

A model's input is (latent of the VAE - shift) * scale. A pipeline undoes it with numbers of its VAE. They are those of
the run only if it trains with ``latent.normalise = "encoder"`` and with the factors that the VAE is published with.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...datasets.disk.hashing import canonical_json
from ...datasets.format.schema import LatentSpec
from ...datasets.order.alike import raw_scale_and_shift
from ...errors import RunError
from ...precompute.encoders.autoencoders import FAMILIES as AUTOENCODERS
from ...precompute.encoders.model_files import CONFIG, VAE_WEIGHTS, read_config, read_weight, weight_files
from ...train.models.diffusers.model import Normalisation

# Normalisation of a class in ``autoencoders.FAMILIES`` that a pipeline of each normalisation can undo.
SOURCES = {"scale": "factors", "scale and shift": "factors", "mean and std": "statistics", "batch norm": "batch norm"}
TOLERANCE = 1e-5  # relative: numbers of a config that were rounded to float32


def decoder_settings(latent: LatentSpec, normalisation: Normalisation) -> dict[str, Any] | None:
    """The keys of a VAE's config with which a pipeline undoes the normalisation of a run.

    Args:
      latent: of the run, with the shift and scale that it trained with.
      normalisation: that the pipeline undoes.
    Returns: None if no config does: the pipeline has one number for all channels, no shift, or reads weights.
    """
    scale, shift = raw_scale_and_shift(latent)
    if normalisation == "mean and std":
        return {"latents_mean": shift.tolist(), "latents_std": (1 / scale).tolist()}
    is_uniform = _alike(scale, scale[:1]) and _alike(shift, shift[:1])
    if normalisation == "batch norm" or not is_uniform:
        return None
    if normalisation == "scale":
        return {"scaling_factor": float(scale[0])} if _alike(shift, np.zeros(1)) else None
    return {"scaling_factor": float(scale[0]), "shift_factor": float(shift[0])}


def trains_as_the_vae_does(latent: LatentSpec, vae: Mapping[str, Any]) -> bool:
    """Whether a run's latents are normalised with the numbers of its VAE.

    Args:
      vae: of the snapshot's state; its shift and scale are None for an import that does not know them.
    """
    if vae.get("shift") is None or vae.get("scale") is None:
        return False
    scale, shift = raw_scale_and_shift(latent)
    return _alike(scale, np.array(vae["scale"])) and _alike(shift, np.array(vae["shift"]))


def vae_config(folder: Path, latent: LatentSpec, normalisation: Normalisation, pipeline: str) -> bytes:
    """The config.json of a VAE for the pipeline of a run: the VAE's own where it already decodes the run's latents.

    Args:
      folder: of the VAE, in diffusers' layout.
      normalisation: that the pipeline undoes.
      pipeline: its name, for messages.
    Raises: RunError: the pipeline cannot decode the latents of the run with this VAE.
    """
    path = folder / CONFIG
    config = read_config(folder, what="--encoders: vae")
    name = str(config.get("_class_name"))
    family = AUTOENCODERS.get(name)
    instead = (
        'Leave --encoders out, request the pipeline\'s latents (output_type="latent"), undo shift and scale and decode '
        "yourself."
    )
    if family is None or family.normalised != SOURCES[normalisation]:
        raise RunError(f"--encoders: {pipeline} does not decode the latents of an {name}. {instead}")
    if latent.decoding and latent.decoding.zero_to_one:
        raise RunError(
            f"--encoders: the VAE '{folder}' gives images from 0 to 1, {pipeline} expects -1 to 1. {instead}"
        )
    if normalisation == "batch norm":
        if not _has_batch_norm(folder, config, latent):
            raise RunError(
                f"--encoders: the run's latents are not normalized with the batch norm of the VAE '{folder}', which is "
                f"all that {pipeline} undoes. {instead}"
            )
        return path.read_bytes()
    settings = decoder_settings(latent, normalisation)
    if settings is None:
        scale, shift = raw_scale_and_shift(latent)
        raise RunError(
            f"--encoders: the run's latents have the shift {_short(shift)} and the scale {_short(scale)}, {pipeline} "
            f"undoes {_undone(normalisation)}. {instead}"
        )
    effective = _with_defaults(name, config)
    if all(_same(effective.get(key), value) for key, value in settings.items()):
        return path.read_bytes()
    others = {key: value for key, value in config.items() if key not in family.keys}
    return canonical_json(others | settings)


def _undone(normalisation: Normalisation) -> str:
    if normalisation == "scale":
        return "one scaling_factor for all channels and no shift"
    return "one scaling_factor and one shift_factor for all channels"


def _with_defaults(class_name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the defaults of its class for the keys that it lacks."""
    import diffusers  # takes seconds

    parameters = inspect.signature(getattr(diffusers, class_name).__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items()} | dict(config)


def _has_batch_norm(folder: Path, config: Mapping[str, Any], latent: LatentSpec) -> bool:
    """Whether a run's latents are normalised by the running statistics among the weights of a VAE."""
    epsilon = _with_defaults(str(config["_class_name"]), config)["batch_norm_eps"]
    files = weight_files(folder, VAE_WEIGHTS, what="--encoders: vae")
    mean, variance = read_weight(files, "bn.running_mean"), read_weight(files, "bn.running_var")
    if mean is None or variance is None:
        return False
    scale, shift = raw_scale_and_shift(latent)
    deviation = np.sqrt(variance.double().numpy() + epsilon)
    return _alike(scale, 1 / deviation) and _alike(shift, mean.double().numpy())


def _same(value: Any, expected: Any) -> bool:
    """Whether a value of a config is a number, or a list of numbers, as expected; None is not 0."""
    return value is not None and _alike(np.array(value, float), np.array(expected, float))


def _alike(first: np.ndarray, second: np.ndarray) -> bool:
    same_shape = first.shape == second.shape or 1 in (first.size, second.size)
    return same_shape and bool(np.allclose(first, second, rtol=TOLERANCE, atol=TOLERANCE))


def _short(numbers: np.ndarray) -> str:
    distinct = [f"{number:.5g}" for number in dict.fromkeys(numbers.tolist())]
    return distinct[0] if len(distinct) == 1 else f"{', '.join(distinct[:2])}, ... by channel"
