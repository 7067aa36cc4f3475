"""What differs between machines that make the same store: paths of its encoders, recipe, versions (``local.json``).

The manifest has none of it, so equal data has an equal root hash. A folder below the store's parent is named relative
to the store, so both may move together; any other folder by its absolute path. A store can therefore be read from any
working directory. Hub ids and shipped encoders stay as typed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import DamageError
from ..format.layout import LOCAL, SOURCES, TWIN, revision_prefix
from ..format.schema import EncoderIdentity, LocalFile, Origin, StoreSpec
from .catalog import intact_copies, read_hashed

_ABSOLUTE = re.compile(r"(/|~|[A-Za-z]:[\\/]|file:/)[^\n]*")


def shared_spec(spec: StoreSpec) -> StoreSpec:
    """The spec as a manifest has it: without origins of the encoders, recipe and version."""
    shared = _with_encoders(spec, lambda _, one: one.model_copy(update={"model": "", "revision": None}))
    return shared.model_copy(update={"recipe": {}, "leandit_version": ""})


def local_file(spec: StoreSpec, **facts: Any) -> LocalFile:
    """The other part of a spec.

    Args:
      facts: ``listing``, ``plan``, ``planned_at`` and ``sources`` of ``LocalFile``.
    """
    encoders = {"vae": spec.vae, **{f"features.{one.name}": one.encoder for one in spec.features}}
    encoders |= {_text_section(one.name): one.encoder for one in spec.text_encoders}
    return LocalFile(
        leandit_version=spec.leandit_version,
        origins={section: Origin(model=one.model, revision=one.revision) for section, one in encoders.items()},
        recipe=spec.recipe,
        **facts,
        sha256="",
    ).with_hash()


def whole_spec(shared: StoreSpec, local: LocalFile | None) -> StoreSpec:
    """The spec of a store, from both parts; without the second one no origin is known."""
    if local is None:
        return shared
    origins = {section: origin.model_dump() for section, origin in local.origins.items()}
    whole = _with_encoders(shared, lambda section, one: one.model_copy(update=origins.get(section, {})))
    recipe, asked = dict(local.recipe), local.recipe.get("companions")
    if isinstance(asked, dict):  # in the order of the store: the file has its keys sorted
        places = {one.name: i for i, one in enumerate(shared.companions)}
        recipe["companions"] = {
            name: asked[name] for name in sorted(asked, key=lambda name: places.get(name, len(asked)))
        }
    return whole.model_copy(update={"recipe": recipe, "leandit_version": local.leandit_version})


def read_local(root: Path, revision: int) -> LocalFile | None:
    """Read ``local.json`` of a revision, or its second copy; None if neither is intact: training needs none of it."""
    return next(iter(intact_copies(read_local_file, root, revision)), None)


def read_local_file(root: Path, revision: int, *, twin: bool = False) -> LocalFile:
    """Read a copy of ``local.json`` of a revision. Raises: DamageError; OSError."""
    prefix = revision_prefix(revision)
    local = read_hashed(root, f"{prefix}{TWIN}/{LOCAL}" if twin else prefix + LOCAL, LocalFile, "")
    if local.sources.path != prefix + SOURCES:
        raise DamageError(
            f"store '{root}': '{prefix}{LOCAL}' is not of this revision: it names '{local.sources.path}'."
        )
    return local


def with_stored_encoder_paths(spec: StoreSpec, store: Path) -> StoreSpec:
    """The spec with encoder paths as a store names them.

    Args:
      spec: with paths as the user typed them, or that this process can open.
    """

    def stored(model: str) -> str:
        folder = Path(model).expanduser()
        if not folder.is_dir():
            return model
        absolute, root = os.path.abspath(folder), os.path.abspath(store)
        if not Path(absolute).is_relative_to(os.path.dirname(root)):
            return absolute
        relative = os.path.relpath(absolute, root)
        return relative if relative.startswith(".") else f"./{relative}"

    return _with_paths(spec, stored)


def openable(spec: StoreSpec, store: Path) -> StoreSpec:
    """The spec of a store with the paths of all encoders, also in its recipe, that this process can open.

    A relative path is resolved from the store, then from the working directory.
    """

    def resolved(model: str) -> str:
        path = Path(model).expanduser()
        folders = () if ":" in model else (path,) if path.is_absolute() else (store / path, path)
        return next((os.path.abspath(folder) for folder in folders if os.path.isdir(folder)), model)

    return _with_paths(spec, resolved)


def encoder_section(spec: StoreSpec, role: str, store: Path) -> dict[str, Any]:
    """A section of a store's recipe that names an encoder, with the path that this process can open.

    Args:
      role: "vae", "text", "text.NAME" or "features.NAME".
      store: folder of the store.
    """
    section: Any = openable(spec, store).recipe
    for key in role.split("."):
        section = section.get(key) or {}
    return {key: value for key, value in section.items() if not isinstance(value, dict)}


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


def _with_encoders(spec: StoreSpec, change: Callable[[str, EncoderIdentity], EncoderIdentity]) -> StoreSpec:
    """The spec with every encoder changed by a function, which gets its section of the recipe."""
    texts, features = (
        [one.model_copy(update={"encoder": change(f"{kind}.{one.name}", one.encoder)}) for one in encoders]
        for kind, encoders in (("text", spec.texts), ("features", spec.features))
    )
    update = {"vae": change("vae", spec.vae), "texts": texts, "features": features}
    return spec.model_copy(update=update | {"text_encoder": spec.text_encoder and change("text", spec.text_encoder)})


def _text_section(name: str) -> str:
    return f"text.{name}" if name else "text"


def _with_paths(spec: StoreSpec, change: Callable[[str], str]) -> StoreSpec:
    """The spec with the model of every encoder changed, in its identity and in the recipe."""

    def in_tables(values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        changed = {"model": change(values["model"])} if isinstance(values.get("model"), str) and values["model"] else {}
        return {key: in_tables(value) for key, value in values.items()} | changed

    changed = _with_encoders(spec, lambda _, one: one.model_copy(update={"model": change(one.model)}))
    return changed.model_copy(update={"recipe": in_tables(spec.recipe)})
