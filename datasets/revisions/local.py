"""What differs between machines that make the same store: paths of its encoders, recipe, versions (``local.json``).

The manifest has none of it, so equal data has an equal root hash. A folder below the store's parent is named relative
to the store, so both may move together; any other folder by its absolute path. A store can therefore be read from any
working directory. Hub ids and shipped encoders stay as typed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..disk.hashing import read_json
from ..errors import DamageError, LeanditError
from ..format.layout import LOCAL, SOURCES, TWIN, revision_prefix
from ..format.schema import EncoderIdentity, LocalFile, Origin, StoreSpec

PATHS = ("model", "config")  # keys of a section; the config is that of a single file of weights
UNKNOWN_MODEL = ""  # of an encoder whose origin is not known
_ABSOLUTE = re.compile(r"(/|~|[A-Za-z]:[\\/]|file:/)[^\n]*")


def shared_spec(spec: StoreSpec) -> StoreSpec:
    """The spec as a manifest has it: without origins of the encoders, recipe and version."""
    nowhere = {role: Origin(model=UNKNOWN_MODEL, revision=None) for role in _encoders(spec)}
    return _with_origins(spec, nowhere).model_copy(update={"recipe": {}, "leandit_version": ""})


def local_file(spec: StoreSpec, **facts: Any) -> LocalFile:
    """The other part of a spec.

    Args:
      facts: ``listing``, ``plan``, ``planned_at`` and ``sources`` of ``LocalFile``.
    """
    origins = {role: Origin(model=one.model, revision=one.revision) for role, one in _encoders(spec).items()}
    return LocalFile(
        leandit_version=spec.leandit_version,
        origins=origins,
        recipe=spec.recipe,
        **facts,
        sha256="",
    ).with_hash()


def whole_spec(shared: StoreSpec, local: LocalFile | None) -> StoreSpec:
    """The spec of a store, from both parts; without the second one no origin is known."""
    if local is None:
        return shared
    update = {"recipe": local.recipe, "leandit_version": local.leandit_version}
    return _with_origins(shared, local.origins).model_copy(update=update)


def read_local(root: Path, revision: int) -> LocalFile | None:
    """Read ``local.json`` of a revision, or its second copy; None if neither is intact: training needs none of it."""
    return next(iter(intact_locals(root, revision)), None)


def intact_locals(root: Path, revision: int) -> list[LocalFile]:
    """Both copies of ``local.json`` of a revision, without damaged ones."""
    found = []
    for name in (LOCAL, f"{TWIN}/{LOCAL}"):
        with contextlib.suppress(LeanditError, OSError):
            found.append(read_local_file(root / (revision_prefix(revision) + name), revision))
    return found


def read_local_file(path: Path, revision: int) -> LocalFile:
    """Read a ``local.json`` of a revision. Raises: DamageError; OSError."""
    try:
        local = LocalFile.model_validate(read_json(path))
    except ValidationError as error:
        raise DamageError(f"'{path}' is not valid: {error.errors()[0]['msg']}.") from error
    if local != local.with_hash():
        raise DamageError(f"'{path}' does not match its own hash.")
    if local.sources.path != revision_prefix(revision) + SOURCES:
        raise DamageError(f"'{path}' is not of revision {revision}: it names '{local.sources.path}'.")
    return local


def _encoders(spec: StoreSpec) -> dict[str, EncoderIdentity]:
    """All encoders by the section of the recipe that names them."""
    texts = {f"text.{one.name}" if one.name else "text": one.encoder for one in spec.text_encoders}
    return {"vae": spec.vae, **texts, **{f"features.{one.name}": one.encoder for one in spec.features}}


def _with_origins(spec: StoreSpec, origins: Mapping[str, Origin]) -> StoreSpec:
    """The spec with other origins of the encoders that are named."""

    def changed(role: str, one: EncoderIdentity) -> EncoderIdentity:
        return one.model_copy(update=origins[role].model_dump()) if role in origins else one

    update: dict[str, Any] = {
        "vae": changed("vae", spec.vae),
        "text_encoder": spec.text_encoder and changed("text", spec.text_encoder),
        "texts": [one.model_copy(update={"encoder": changed(f"text.{one.name}", one.encoder)}) for one in spec.texts],
        "features": [
            one.model_copy(update={"encoder": changed(f"features.{one.name}", one.encoder)}) for one in spec.features
        ],
    }
    return spec.model_copy(update=update)


def with_stored_encoder_paths(spec: StoreSpec, store: Path) -> StoreSpec:
    """The spec with encoder paths as a store names them.

    Args:
      spec: with paths as the user typed them.
    """
    return _with_paths(spec, lambda model: _stored_path(model, store))


def encoder_section(spec: StoreSpec, role: str, store: Path) -> dict[str, Any]:
    """A section of a store's recipe that names an encoder, with the path that this process can open.

    A relative path is resolved from the store, then from the working directory.

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


def portable(local: LocalFile) -> LocalFile:
    """The same for another machine: it names no folder of this one."""
    origins = {
        role: one.model_copy(update={"model": without_local_folders(one.model)}) for role, one in local.origins.items()
    }
    update = {"origins": origins, "recipe": without_local_folders(local.recipe)}
    return local.model_copy(update=update).with_hash()
