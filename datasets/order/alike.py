"""Check that one model can train on several stores: they are of the same encoders, and have the same classes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RecipeError
from ..format.schema import UNKNOWN, EncoderIdentity, LatentSpec, StoreSpec

Named = tuple[Path | str, StoreSpec]
ADVICE = {
    "captions": "Or read no captions (text='none').",
    "features": "Or leave them out (features=[]).",
    "classes": "Precompute both with the same classes, or condition the model on captions.",
}


def check_alike(
    stores: Sequence[Named], *, captions: bool, classes: bool = False, features: Sequence[str] = ()
) -> None:
    """Check that one model can train on all stores.

    Args:
      stores: place and description of each.
      captions, classes: compare these too.
      features: compare these too, where both stores have them.
    Raises: RecipeError: names two stores and the difference.
    """
    for (first, here), (other, there) in combinations(stores, 2):  # all: an unknown encoder is like any other
        compared = {"latents": (_latents(here), _latents(there))}
        if features:
            compared["features"] = _features(here, features), _features(there, features)
        if captions:
            compared["captions"] = _captions(here), _captions(there)
        if classes:
            compared["classes"] = _classes(here, there)
        for what, (ours, theirs) in compared.items():
            differing = [name for name in ours if name in theirs and _differ(ours[name], theirs[name])]
            if differing:
                values = "; ".join(f"{name} {_short(ours[name])} and {_short(theirs[name])}" for name in differing)
                raise RecipeError(
                    f"stores '{first}' and '{other}' cannot be mixed: {values}. Needed stores of the same encoders"
                    f"{' and classes' if classes else ''}. {ADVICE.get(what, '')}".rstrip()
                )


def _latents(spec: StoreSpec) -> dict[str, Any]:
    """What mixed stores share: the shape of latents, raw latent = input / scale + shift, and the VAE."""
    latent = spec.latent
    scale, shift = raw_scale_and_shift(latent)
    return {
        "latent channels": latent.channels,
        "pixels a latent place": latent.downscale,
        "scale": [float(f"{value:.5g}") for value in scale],
        "shift": [float(f"{value:.5g}") for value in shift],
        "VAE weights": _weights(spec.vae),
    }


def raw_scale_and_shift(latent: LatentSpec) -> tuple[np.ndarray, np.ndarray]:
    """(C,) scale and shift from raw latents, with what is already applied to the stored rows."""
    scale, shift = np.array(latent.scale), np.array(latent.shift)
    if latent.decoding:
        stored_scale, stored_shift = np.array(latent.decoding.scale), np.array(latent.decoding.shift)
        scale, shift = scale * stored_scale, stored_shift + shift / stored_scale
    return scale, shift


def _captions(spec: StoreSpec) -> dict[str, Any]:
    if not spec.text_encoders:
        return {"caption width": "no captions"}
    facts: dict[str, Any] = {"text encoders": [one.name for one in spec.text_encoders]}
    for one in spec.text_encoders:
        of_encoder = f" of '{one.name}'" if one.name else ""
        facts |= {
            f"caption width{of_encoder}": one.spec.width,
            f"tokens of the longest caption{of_encoder}": one.spec.max_tokens,
            f"instruction{of_encoder}": repr(one.spec.instruction),
            f"text encoder weights{of_encoder}": _weights(one.encoder),
            f"template{of_encoder}": UNKNOWN if one.spec.template == UNKNOWN else repr(one.spec.template),
            f"layers{of_encoder}": UNKNOWN if one.spec.kind == "imported" else str(one.spec.layers),
            f"output{of_encoder}": one.spec.output,
            f"full length{of_encoder}": one.spec.full_length,
            f"padding attended to{of_encoder}": one.spec.attend_padding,
            f"dropped prefix tokens{of_encoder}": one.spec.drop_prefix_tokens,
        }
    return facts


def _features(spec: StoreSpec, names: Sequence[str]) -> dict[str, Any]:
    """Of the features that are read, as far as the store has them; their dtypes may differ."""
    facts: dict[str, Any] = {}
    for one in spec.features:
        if one.name in names:
            values = one.spec.model_dump(exclude={"dtype"}) | {"weights": _weights(one.encoder)}
            facts |= {f"{key} of feature '{one.name}'": value for key, value in values.items()}
    return facts


def _classes(first: StoreSpec, second: StoreSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Number of classes, and the first class that differs."""
    ours, theirs = first.classes or [], second.classes or []
    number = next((number for number, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)

    def shown(names: list[str]) -> dict[str, Any]:
        return {"number of classes": len(names)} | ({} if number is None else {f"class {number}": names[number]})

    return shown(ours), shown(theirs)


def _weights(encoder: EncoderIdentity | None) -> str:
    """Hash of its weights, or UNKNOWN."""
    return encoder.weights_sha256[:12] if encoder else UNKNOWN


def _differ(one: Any, other: Any) -> bool:
    """Whether two values are known to differ; of imported features the encoders may be unknown."""
    return one != other and UNKNOWN not in (one, other)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]}" if len(set(value)) == 1 else f"{value[0]}, {value[1]}, ..."
    return str(value)
