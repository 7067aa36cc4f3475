"""Paths of a store's encoders: how the store names them, and how a reader finds them.

A folder below the store's parent is named relative to the store, so both may move together; any other folder by its
absolute path. A store can therefore be read from any working directory. Hub ids and shipped encoders stay as typed. The
fingerprint does not cover paths.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .schema import EncoderIdentity, StoreSpec

ROLES = ("vae", "text")
PATHS = ("model", "config")  # keys of a section; the config is that of a single file of weights


def with_stored_encoder_paths(spec: StoreSpec, store: Path) -> StoreSpec:
    """The spec with encoder paths as a store names them.

    Args:
      spec: with paths as the user typed them.
    """
    recipe = dict(spec.recipe)
    for role in ROLES:
        if isinstance(section := recipe.get(role), dict) and "model" in section:
            recipe[role] = section | {key: _stored_path(section[key], store) for key in PATHS if section.get(key)}
    changed: dict[str, Any] = {"recipe": recipe, "vae": _stored_identity(spec.vae, store)}
    if spec.text_encoder:
        changed["text_encoder"] = _stored_identity(spec.text_encoder, store)
    return spec.model_copy(update=changed)


def encoder_section(spec: StoreSpec, role: str, store: Path) -> dict[str, Any]:
    """[vae] or [text] of a store's recipe, with the path that this process can open.

    A relative path is resolved from the store, then, for stores of earlier releases, from the working directory.

    Args:
      role: "vae" or "text".
      store: folder of the store.
    """
    section = dict(spec.recipe.get(role) or {})
    paths = {key: section[key] for key in PATHS if isinstance(section.get(key), str) and section[key]}
    return section | {key: _resolved(path, store) for key, path in paths.items()}


def with_moved_encoder_paths(spec: StoreSpec, store: Path, copy: Path) -> StoreSpec:
    """The spec for a copy of a store in another folder, with paths to the same encoders."""
    recipe = dict(spec.recipe) | {role: encoder_section(spec, role, store) for role in ROLES if role in spec.recipe}
    changed: dict[str, Any] = {"recipe": recipe}
    for name in ("vae", "text_encoder"):
        if identity := getattr(spec, name):
            changed[name] = identity.model_copy(update={"model": _resolved(identity.model, store)})
    return with_stored_encoder_paths(spec.model_copy(update=changed), copy)


def _resolved(model: str, store: Path) -> str:
    """Absolute path of a folder or file that a store names; other names unchanged."""
    path = Path(model).expanduser()
    folders = () if ":" in model else (path,) if path.is_absolute() else (store / path, path)
    return next((os.path.abspath(folder) for folder in folders if _is_there(folder)), model)


def _stored_identity(identity: EncoderIdentity, store: Path) -> EncoderIdentity:
    return identity.model_copy(update={"model": _stored_path(identity.model, store)})


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
