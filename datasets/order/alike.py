"""Check that one model can train on several stores: they are of the same encoders, and have the same classes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import RecipeError
from ..format.schema import UNKNOWN, EncoderIdentity, LatentSpec, StoreSpec

if TYPE_CHECKING:
    from ..store import LatentStore

ADVICE = {
    "captions": "Or read no captions (text='none').",
    "features": "Or leave them out (features=[]).",
    "classes": "Precompute both with the same classes, or condition the model on captions.",
}


def check_alike(
    stores: Sequence[tuple[str, StoreSpec]],
    *,
    captions: bool,
    classes: bool = False,
    features: Sequence[str] = (),
) -> None:
    """Check that one model can train on all stores.

    Args:
      stores: name (``store_names``) and spec of each.
      captions, classes: compare these too.
      features: compare these too, where both stores have them.
    Raises: RecipeError: names two stores and the difference.
    """
    for (first, spec), (second, other) in combinations(stores, 2):  # all: an unknown encoder is like any other
        facts: dict[str, Sequence[dict[str, Any]]] = {"latents": (_latents(spec), _latents(other))}
        if features:
            facts["features"] = _features(spec, features), _features(other, features)
        if captions:
            facts["captions"] = _captions(spec), _captions(other)
        if classes:
            facts["classes"] = _classes(spec, other)
        for what, (ours, theirs) in facts.items():
            values = [
                f"{name} {_short(ours[name])} and {_short(theirs[name])}"
                for name in ours
                if name in theirs and ours[name] != theirs[name] and UNKNOWN not in (ours[name], theirs[name])
            ]
            if values:
                raise RecipeError(
                    f"stores {first} and {second} cannot be mixed: {'; '.join(values)}. Expected stores of the "
                    f"same encoders{' and classes' if classes else ''}. {ADVICE.get(what, '')}".rstrip()
                )


def store_names(stores: Sequence[LatentStore]) -> list[str]:
    """What messages call each store: its path in quotes, with the revision where several of one path are read."""
    revisions: dict[Path, set[int]] = {}
    for store in stores:
        revisions.setdefault(store.path, set()).add(store.revision)
    names = list[str]()
    for store in stores:
        is_ambiguous = len(revisions[store.path]) > 1
        names.append(f"'{store.path}' (revision {store.revision})" if is_ambiguous else f"'{store.path}'")
    return names


def raw_scale_and_shift(latent: LatentSpec) -> tuple[np.ndarray, np.ndarray]:
    """(C,) scale and shift from raw latents, with what is already applied to the stored rows."""
    scale, shift = np.array(latent.scale), np.array(latent.shift)
    if latent.decoding:
        stored_scale, stored_shift = np.array(latent.decoding.scale), np.array(latent.decoding.shift)
        scale, shift = scale * stored_scale, stored_shift + shift / stored_scale
    return scale, shift


def _latents(spec: StoreSpec) -> dict[str, Any]:
    """What mixed stores share: the shape of latents, raw latent = input / scale + shift, and the VAE."""
    scale, shift = raw_scale_and_shift(spec.latent)
    return {
        "latent channels": spec.latent.channels,
        "downscale factor": spec.latent.downscale,
        "scale": [float(f"{value:.5g}") for value in scale],
        "shift": [float(f"{value:.5g}") for value in shift],
        "VAE weights": _weights(spec.vae),
    }


def _captions(spec: StoreSpec) -> dict[str, Any]:
    if not spec.text_encoders:
        return {"caption width": "no captions"}
    facts: dict[str, Any] = {"text encoders": [one.name for one in spec.text_encoders]}
    for one in spec.text_encoders:
        text, suffix = one.spec, f" of '{one.name}'" if one.name else ""
        values = {
            "caption width": text.width,
            "tokens of the longest caption": text.max_tokens,
            "instruction": repr(text.instruction),
            "text encoder weights": _weights(one.encoder),
            "template": UNKNOWN if text.template == UNKNOWN else repr(text.template),
            "layers": UNKNOWN if text.kind == "imported" else str(text.layers),
            "output": text.output,
            "full length": text.full_length,
            "padding attended to": text.attend_padding,
            "dropped prefix tokens": text.drop_prefix_tokens,
        }
        facts |= {f"{name}{suffix}": value for name, value in values.items()}
    return facts


def _features(spec: StoreSpec, names: Sequence[str]) -> dict[str, Any]:
    """Facts of the features to read, as far as the store has them; their dtypes may differ."""
    facts: dict[str, Any] = {}
    for one in spec.features:
        if one.name in names:
            values = one.spec.model_dump(exclude={"dtype"}) | {"weights": _weights(one.encoder)}
            facts |= {f"{key} of feature '{one.name}'": value for key, value in values.items()}
    return facts


def _classes(*specs: StoreSpec) -> list[dict[str, Any]]:
    """Number of classes, and the first class that differs."""
    names = [spec.classes or [] for spec in specs]
    first = next((number for number, pair in enumerate(zip(*names, strict=False)) if len(set(pair)) > 1), None)
    return [{"number of classes": len(n)} | ({} if first is None else {f"class {first}": n[first]}) for n in names]


def _weights(encoder: EncoderIdentity | None) -> str:
    """Hash of its weights, or UNKNOWN."""
    return encoder.weights_sha256[:12] if encoder else UNKNOWN


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]}" if len(set(value)) == 1 else f"{value[0]}, {value[1]}, ..."
    return str(value)
