"""Weights to fine-tune from: a run, a hub id or folder in diffusers' layout, or a file of a DiT in the official layout.

Only safetensors are read from folders. A folder may be a pipeline, or the transformer of one. Of a run it is the newest
snapshot, with its averaged weights, so that training goes on at another resolution.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from ...datasets.disk.hashing import read_json
from ...datasets.errors import DamageError, RunError
from ...datasets.format.class_names import imagenet_names
from ..models.diffusers_models import Family, family_of, transformer_class
from ..models.spec import ModelSpec
from . import checkpoint
from .dit_checkpoints import POSITIONS, computed_positions, from_diffusers, read_official, read_safetensors

CONFIG, WEIGHTS, SUBFOLDER = "config.json", "diffusion_pytorch_model*.safetensors", "transformer"
MAX_CONFIG_BYTES = 1 << 20
MAX_DEPTH, MAX_NUMBER = (
    256,
    1 << 16,
)  # of blocks, and of anything else in a config: the largest models have 60 and 18432


def is_file(source: str) -> bool:
    """A file of weights, not a folder or a hub id."""
    return source.endswith((".pt", ".pth", ".safetensors"))


def read_snapshot(source: str) -> checkpoint.Saved | None:
    """The newest snapshot of a run, or the snapshot whose folder it is; None where the source is neither.

    Raises: DamageError.
    """
    folder = Path(source).expanduser()
    found = checkpoint.find(checkpoint.SNAPSHOT, folder) if folder.is_dir() else []
    if not found and folder in checkpoint.find(checkpoint.SNAPSHOT, folder.parent):
        found = [folder]
    return checkpoint.read(found[-1]) if found else None


def model_folder(source: str, *, files: tuple[str, ...] = (CONFIG, WEIGHTS)) -> Path:
    """Folder of a transformer: of a folder here, else fetched from the hub.

    Args:
      files: that are fetched, if they must be.
    Raises: RunError: there is none.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if source.startswith((".", "/", "~")) or source.count("/") != 1:
            raise RunError(f"model.init_from '{source}': there is no such folder, and it is no hub id.")
        folder = _fetched(source, files)
    if not (folder / CONFIG).is_file():
        folder = folder / SUBFOLDER
    if not (folder / CONFIG).is_file():
        raise RunError(
            f"model.init_from '{source}': there is no '{CONFIG}' and no '{SUBFOLDER}/{CONFIG}'. Needed a folder or "
            "hub id of a diffusers pipeline, or of its transformer."
        )
    return folder


def _fetched(hub_id: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    names = [f"{place}{name}" for place in ("", f"{SUBFOLDER}/") for name in files]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=names, ignore_patterns=["*.fp16.*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RunError(
            f"model.init_from '{hub_id}': not a folder here, and the hub does not give it ({reason}). Check the name, "
            "log in with 'hf auth login', or give a folder."
        ) from error


def read_config(source: str, family: Family) -> dict[str, Any]:
    """Arguments of diffusers' class, complete: what the config does not say is the class's default.

    Empty for a run that began from scratch: its model is the one that the recipe names.

    Raises: RunError: it is the config of another class, has arguments that the class has not, or asks for what is not
      trained here.
    """
    if snapshot := read_snapshot(source):
        return _spec_of(snapshot).config
    folder, cls = model_folder(source, files=(CONFIG,)), transformer_class(family)
    said = _json_object(folder / CONFIG)
    if said.get("_class_name") != cls.__name__:
        raise RunError(
            f"model.init_from '{source}': its config is of {str(said.get('_class_name'))[:80]!r}, the model needs "
            f"{cls.__name__}. Check model.name."
        )
    said = {key: value for key, value in said.items() if not key.startswith("_")}
    known = {p.name: p.default for p in inspect.signature(cls.__init__).parameters.values() if p.name != "self"}
    if unknown := sorted(said.keys() - known.keys()):
        raise RunError(
            f"model.init_from '{source}': its config has '{unknown[0]}', which {cls.__name__} does not know."
        )
    config = known | said
    numbers = {key: value for key, value in config.items() if isinstance(value, int | float)}
    for key, value in numbers.items():
        if abs(value) > (MAX_DEPTH if key == "num_layers" else MAX_NUMBER):
            raise RunError(f"model.init_from '{source}': its config has {key} = {value}, which no model has.")
    if config.get("guidance_embeds"):
        raise RunError(f"model.init_from '{source}': it is distilled and takes the guidance as an input. Use its base.")
    if family == "pixart" and config["use_additional_conditions"] is None:
        config["use_additional_conditions"] = config["sample_size"] == 128  # as the class decides it
    return config


def initial_weights(source: str, model: nn.Module, spec: ModelSpec) -> dict[str, Tensor]:
    """The weights of ``model.init_from`` under the names of a model's state dict, float32 on the CPU.

    Args:
      model: built from the spec, on any device; only its names and shapes are looked at.
    Raises: RunError: they are of another model; what differs is named.
    """
    wanted = {name.removeprefix("net."): tensor for name, tensor in model.state_dict().items()}
    if snapshot := read_snapshot(source):
        if (name := _spec_of(snapshot).name) != spec.name:
            raise RunError(f"model.init_from '{source}': it is of model '{name}', the recipe of '{spec.name}'.")
        found = {name.removeprefix("net."): tensor for name, tensor in snapshot.read(checkpoint.MODEL).items()}
    elif family_of(spec.name):
        found = read_folder(model_folder(source))
    elif is_file(source):
        found = read_official(Path(source).expanduser())
    else:
        found = from_diffusers(read_folder(model_folder(source)), source)
    if not family_of(spec.name):
        found = _with_positions(found, wanted)
    check_fit(found, wanted, source)
    return {f"net.{name}": tensor.float() for name, tensor in found.items()}


def _spec_of(snapshot: checkpoint.Saved) -> ModelSpec:
    try:
        return ModelSpec.model_validate(snapshot.state["spec"])
    except (KeyError, ValidationError) as error:
        raise checkpoint.CheckpointDamage(snapshot.path, f"its spec is not valid ({error})") from error


def class_map_warning(source: str, num_classes: int, classes: Sequence[str]) -> str | None:
    """What to say where published weights know ImageNet's labels, and the store's labels are others.

    Args:
      num_classes: of the model.
      classes: of the store, in order of its labels.
    """
    wnids = list(imagenet_names())
    if num_classes != len(wnids) or read_snapshot(source):
        return None
    other = [i for i, name in enumerate(classes) if name not in (wnids[i], str(i))]
    if not other:
        return None
    label, name = other[0], classes[other[0]]
    there = f", ImageNet's label {wnids.index(name)}" if name in wnids else ""
    return (
        f"model.init_from '{source}' has learned ImageNet's 1000 labels, {len(other)} of the store's {len(classes)} "
        f"differ: labels are positions of sorted class names, so label {label} is '{name}'{there}. For ImageNet's own "
        "labels use a store of all classes; data.labels chooses which of them train."
    )


def _with_positions(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The position table of another base size is computed; diffusers' layout has none."""
    needed, there = wanted.get(POSITIONS), found.get(POSITIONS)
    if needed is None or (there is not None and there.shape == needed.shape):
        return dict(found)
    return {**found, POSITIONS: computed_positions(needed.shape)}


def check_fit(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], source: str) -> None:
    """Refuse weights of another model.

    Raises: RunError: naming the first tensor that differs.
    """
    table = "y_embedder.embedding_table.weight"
    if table in found and table in wanted and found[table].shape[0] != wanted[table].shape[0]:
        there, needed = found[table].shape[0] - 1, wanted[table].shape[0] - 1
        raise RunError(
            f"model.init_from '{source}': its label table has {there} classes, the model {needed}. Use "
            f"--set model.num_classes={there} with a store of no more classes."
        )
    if names := sorted(found.keys() ^ wanted.keys()):
        side = "which the model does not have" if names[0] in found else "is missing"
        raise RunError(
            f"model.init_from '{source}': {len(names)} tensors do not fit the model: '{names[0]}' {side}. "
            "Check model.name, its options and conditioning.kind."
        )
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise RunError(
                f"model.init_from '{source}': '{name}' is {tuple(tensor.shape)}, the model needs "
                f"{tuple(wanted[name].shape)}. Check model.name, the store's latent channels and objective.kind."
            )


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors.

    Raises: RunError: there are none; DamageError: a file is none.
    """
    files = sorted(path for path in folder.glob(WEIGHTS) if ".fp16." not in path.name)
    if not files:
        raise RunError(
            f"model.init_from '{folder}': there are no weights '{WEIGHTS}'. Only safetensors are read; convert other "
            "weights with save_pretrained(..., safe_serialization=True)."
        )
    return {name: tensor for path in files for name, tensor in read_safetensors(path).items()}


def _json_object(path: Path) -> dict[str, Any]:
    found = read_json(path, max_bytes=MAX_CONFIG_BYTES)
    if not isinstance(found, dict):
        raise DamageError(f"model.init_from '{path}': needed a JSON object. Fetch it again.")
    return found
