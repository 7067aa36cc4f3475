"""Paths of a store's encoders: how the store names them, and how a reader finds them.

A folder below the store's parent is named relative to the store, so both may move together; any other folder by its
absolute path. A store can therefore be read from any working directory. Hub ids and shipped encoders stay as typed. The
fingerprint does not cover paths.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..format.schema import EncoderIdentity, StoreSpec

PATHS = ("model", "config")  # keys of a section; the config is that of a single file of weights
_ABSOLUTE = re.compile(r"(/|~|[A-Za-z]:[\\/]|file:/)[^\n]*")


def with_stored_encoder_paths(spec: StoreSpec, store: Path) -> StoreSpec:
    """The spec with encoder paths as a store names them.

    Args:
      spec: with paths as the user typed them.
    """
    return _with_paths(spec, lambda model: _stored_path(model, store))


def encoder_section(spec: StoreSpec, role: str, store: Path) -> dict[str, Any]:
    """A section of a store's recipe that names an encoder, with the path that this process can open.

    A relative path is resolved from the store, then, for stores of earlier releases, from the working directory.

    Args:
      role: "vae", "text", "text.NAME" or "features.NAME".
      store: folder of the store.
    """
    section: Any = spec.recipe
    for key in role.split("."):
        section = section.get(key) or {}
    return _with_paths_changed(
        {key: value for key, value in section.items() if not isinstance(value, dict)}, _resolver(store)
    )


def vae_of(spec: StoreSpec, store: Path) -> dict[str, Any]:
    """The VAE of a store, as a snapshot names it: ``encoder_section``, class, weights, and its shift and scale.

    Shift and scale are None if an import has raw latents and the numbers of a model, not those of the VAE.
    """
    latent = spec.latent
    normalization = latent.decoding or latent
    is_known = latent.decoding is None or not (any(latent.shift) or set(latent.scale) - {1.0})
    return {
        "model": encoder_section(spec, "vae", store),
        "class_name": spec.vae.class_name,
        "weights_sha256": spec.vae.weights_sha256,
        "shift": normalization.shift if is_known else None,
        "scale": normalization.scale if is_known else None,
    }


def openable_recipe(spec: StoreSpec, store: Path) -> dict[str, Any]:
    """The recipe of a store, with the paths of all encoders that this process can open, as of ``encoder_section``."""
    return {key: _with_paths_changed(section, _resolver(store)) for key, section in spec.recipe.items()}


def with_moved_encoder_paths(spec: StoreSpec, store: Path, copy: Path) -> StoreSpec:
    """The spec for a copy of a store in another folder, with paths to the same encoders."""
    return with_stored_encoder_paths(_with_paths(spec, _resolver(store)), copy)


def _with_paths(spec: StoreSpec, changed: Callable[[str], str]) -> StoreSpec:
    """The spec with the model of every encoder changed, in its identity and in the recipe."""

    def identity(one: EncoderIdentity) -> EncoderIdentity:
        return one.model_copy(update={"model": changed(one.model)})

    def named(encoders: Sequence[Any]) -> list[Any]:
        return [one.model_copy(update={"encoder": identity(one.encoder)}) for one in encoders]

    update: dict[str, Any] = {
        "recipe": {key: _with_paths_changed(section, changed) for key, section in spec.recipe.items()},
        "vae": identity(spec.vae),
        "text_encoder": spec.text_encoder and identity(spec.text_encoder),
        "texts": named(spec.texts),
        "features": named(spec.features),
    }
    return spec.model_copy(update=update)


def _with_paths_changed(section: Any, changed: Callable[[str], str]) -> Any:
    """A section of a recipe, and the tables in it, with every path of PATHS changed."""
    if not isinstance(section, dict):
        return section
    values = {key: _with_paths_changed(value, changed) for key, value in section.items()}
    paths = {key: values[key] for key in PATHS if isinstance(values.get(key), str) and values[key]}
    return values | {key: changed(path) for key, path in paths.items()}


def _resolver(store: Path) -> Callable[[str], str]:
    return lambda model: _resolved(model, store)


def _resolved(model: str, store: Path) -> str:
    """Absolute path of a folder or file that a store names; other names unchanged."""
    path = Path(model).expanduser()
    folders = () if ":" in model else (path,) if path.is_absolute() else (store / path, path)
    return next((os.path.abspath(folder) for folder in folders if _is_there(folder)), model)


def _stored_path(model: str, store: Path) -> str:
    folder = Path(model).expanduser()
    if not _is_there(folder):
        return model
    absolute, root = os.path.abspath(folder), os.path.abspath(store)
    if not Path(absolute).is_relative_to(os.path.dirname(root)):
        return absolute
    relative = os.path.relpath(absolute, root)
    return relative if relative.startswith(".") else f"./{relative}"


def _is_there(path: Path) -> bool:
    """A folder, or a single file of weights."""
    return path.is_dir() or (path.suffix == ".safetensors" and path.is_file())


def without_local_folders(value: Any) -> Any:
    """Plain values in which every absolute path of a machine is its last name alone, as in ``sd-vae``."""
    if isinstance(value, dict):
        return {key: without_local_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_local_folders(inner) for inner in value]
    if isinstance(value, str) and _ABSOLUTE.fullmatch(value):
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return value


def portable_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """A spec, as plain values, whose recipe and encoders name no folder of this machine; its fingerprint stays.

    Args:
      spec: as ``StoreSpec`` dumps it.
    """

    def identity(encoder: dict[str, Any]) -> dict[str, Any]:
        return encoder | {"model": without_local_folders(encoder["model"])}

    changed = spec | {"recipe": without_local_folders(spec["recipe"])}
    changed |= {role: identity(spec[role]) for role in ("vae", "text_encoder") if spec[role]}
    for kind in ("texts", "features"):
        if kind in spec:
            changed[kind] = [one | {"encoder": identity(one["encoder"])} for one in spec[kind]]
    return changed
