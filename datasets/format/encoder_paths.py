"""Where the encoders of a store lie: how the store names their folders, and how a reader finds them.

A folder beside the store, or below the store's parent, is named relative to the store, so both may move together; any
other by its absolute path. So a store is read from any working directory. Hub ids and shipped encoders stay as typed.
No fingerprint covers where an encoder lies.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .schema import EncoderIdentity, StoreSpec

ROLES = ("vae", "text")


def with_stored_encoder_paths(spec: StoreSpec, store: Path) -> StoreSpec:
    """What a store says of itself, with the folders of its encoders as a store names them.

    Args:
      spec: with folders as the user typed them.
    """
    recipe = dict(spec.recipe)
    for role in ROLES:
        if isinstance(section := recipe.get(role), dict) and "model" in section:
            recipe[role] = section | {"model": _named(section["model"], store)}
    found: dict[str, Any] = {"recipe": recipe, "vae": _identity_named(spec.vae, store)}
    if spec.text_encoder:
        found["text_encoder"] = _identity_named(spec.text_encoder, store)
    return spec.model_copy(update=found)


def encoder_section(spec: StoreSpec, role: str, store: Path) -> dict[str, Any]:
    """[vae] or [text] of a store's recipe, with its folder as this process finds it.

    A relative path is looked for from the store, then, as earlier releases stored it, from the working directory.

    Args:
      role: "vae" or "text".
      store: folder of the store.
    """
    section = dict(spec.recipe.get(role) or {})
    model = section.get("model")
    return section | {"model": _found(model, store)} if isinstance(model, str) else section


def with_moved_encoder_paths(spec: StoreSpec, store: Path, copy: Path) -> StoreSpec:
    """What a store says of itself, for a copy of it in another folder, which finds the same encoders."""
    recipe = dict(spec.recipe) | {role: encoder_section(spec, role, store) for role in ROLES if role in spec.recipe}
    found: dict[str, Any] = {"recipe": recipe}
    for name in ("vae", "text_encoder"):
        if identity := getattr(spec, name):
            found[name] = identity.model_copy(update={"model": _found(identity.model, store)})
    return with_stored_encoder_paths(spec.model_copy(update=found), copy)


def _found(model: str, store: Path) -> str:
    """Absolute path of a folder that a store names; anything else as it is."""
    path = Path(model).expanduser()
    folders = () if ":" in model else (path,) if path.is_absolute() else (store / path, path)
    return next((os.path.abspath(folder) for folder in folders if folder.is_dir()), model)


def _identity_named(identity: EncoderIdentity, store: Path) -> EncoderIdentity:
    return identity.model_copy(update={"model": _named(identity.model, store)})


def _named(model: str, store: Path) -> str:
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model
    absolute, root = os.path.abspath(folder), os.path.abspath(store)
    if not Path(absolute).is_relative_to(os.path.dirname(root)):
        return absolute
    relative = os.path.relpath(absolute, root)
    return relative if relative.startswith(".") else f"./{relative}"
