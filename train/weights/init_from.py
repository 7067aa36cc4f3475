"""Weights to fine-tune from: a run, a hub id or folder in diffusers' layout, or a file of a DiT in the official layout.

Only safetensors are read from folders. A folder may be a pipeline, or its transformer. Of a run the newest snapshot is
used, with its averaged weights. Training can continue at another resolution, that of a DiT with another patch size too.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from torch import Tensor

from ...datasets.disk.hashing import read_json
from ...datasets.errors import DamageError, RunError
from ...datasets.format.class_names import imagenet_names
from ...datasets.format.schema import LatentSpec
from ...datasets.order.alike import raw_scale_and_shift
from ..models.build import Denoiser
from ..models.diffusers_models.adapters import adapter_shapes
from ..models.diffusers_models.families import Family, family_of, transformer_class
from ..models.dit import size_of
from ..models.spec import ModelSpec
from . import checkpoint
from .dit_checkpoints import POSITIONS, PROJECTORS, computed_positions, from_diffusers, read_official, read_safetensors
from .merging import FrozenWeights, hash_of, merge
from .patch_size import with_patches
from .sit_checkpoints import from_lightningdit, without_variance

CONFIG, WEIGHTS, SUBFOLDER = "config.json", "diffusion_pytorch_model*.safetensors", "transformer"
MAX_CONFIG_BYTES = 1 << 20
MAX_DEPTH, MAX_NUMBER = (
    256,
    1 << 16,
)  # of blocks, and of anything else in a config: the largest models have 60 and 18432


def is_file(source: str) -> bool:
    """Whether a source is a file of weights, not a folder or a hub id."""
    return source.endswith((".pt", ".pth", ".safetensors"))


def read_snapshot(source: str) -> checkpoint.Saved | None:
    """The newest snapshot of a run, or the snapshot of a folder; None if the source is neither.

    Raises: DamageError.
    """
    folder = Path(source).expanduser()
    snapshots = checkpoint.find(checkpoint.SNAPSHOT, folder) if folder.is_dir() else []
    if not snapshots and folder in checkpoint.find(checkpoint.SNAPSHOT, folder.parent):
        snapshots = [folder]
    return checkpoint.read(snapshots[-1]) if snapshots else None


def model_folder(source: str, *, files: tuple[str, ...] = (CONFIG, WEIGHTS)) -> Path:
    """Folder of a transformer: local, else fetched from the hub.

    Args:
      files: to fetch from the hub.
    Raises: RunError: it does not exist.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if source.startswith((".", "/", "~")) or source.count("/") != 1:
            raise RunError(f"model.init_from '{source}': no such folder, and not a hub id.")
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
            f"model.init_from '{hub_id}': not a local folder, and not available from the hub ({reason}). Check the "
            "name, log in with 'hf auth login', or give a folder."
        ) from error


def read_config(source: str, family: Family) -> dict[str, Any]:
    """All arguments of diffusers' class, with the class's defaults for those that the config lacks.

    Empty for a run that was trained from scratch: the recipe names its model.

    Raises: RunError: the config is of another class, has unknown arguments, or is of a distilled model.
    """
    if snapshot := read_snapshot(source):
        return _spec_of(snapshot).config
    folder, cls = model_folder(source, files=(CONFIG,)), transformer_class(family)
    loaded = _json_object(folder / CONFIG)
    if loaded.get("_class_name") != cls.__name__:
        raise RunError(
            f"model.init_from '{source}': its config is of {str(loaded.get('_class_name'))[:80]!r}, the model needs "
            f"{cls.__name__}. Check model.name."
        )
    loaded = {key: value for key, value in loaded.items() if not key.startswith("_")}
    known = {p.name: p.default for p in inspect.signature(cls.__init__).parameters.values() if p.name != "self"}
    if unknown := sorted(loaded.keys() - known.keys()):
        raise RunError(
            f"model.init_from '{source}': its config has '{unknown[0]}', which {cls.__name__} does not know."
        )
    config = {key: list(value) if isinstance(value, tuple) else value for key, value in (known | loaded).items()}
    numbers = {key: value for key, value in config.items() if isinstance(value, int | float)}
    for key, value in numbers.items():
        if abs(value) > (MAX_DEPTH if key == "num_layers" else MAX_NUMBER):
            raise RunError(f"model.init_from '{source}': its config has {key} = {value}, which no model has.")
    if config.get("guidance_embeds"):
        raise RunError(f"model.init_from '{source}': it is distilled and takes the guidance as an input. Use its base.")
    if family == "pixart" and config["use_additional_conditions"] is None:
        config["use_additional_conditions"] = config["sample_size"] == 128  # as the class decides it
    return config


def initial_weights(source: str, model: Denoiser, spec: ModelSpec) -> dict[str, Tensor]:
    """The weights of ``model.init_from`` under the names of a model's state dict, float32 on the CPU.

    Args:
      model: built from the spec without adapters, on any device; only names and shapes are used, and new projectors.
    Raises: RunError: they are of another model; the message names the difference.
    """
    wanted = {name.removeprefix("net."): tensor for name, tensor in model.state_dict().items()}
    if snapshot := read_snapshot(source):
        learned = _spec_of(snapshot)
        _check_model(learned, spec, source)
        read = merged_weights(snapshot, model, learned) if learned.adapter else snapshot.read(checkpoint.MODEL)
        weights = {name.removeprefix("net."): tensor for name, tensor in read.items()}
    elif family_of(spec.name):
        weights = read_folder(model_folder(source))
    elif is_file(source):
        weights = from_lightningdit(read_official(Path(source).expanduser()), spec, source)
    else:
        weights = from_diffusers(read_folder(model_folder(source)), source)
    if not family_of(spec.name):
        weights = _with_own_projectors(with_patches(_with_positions(weights, wanted), wanted), wanted)
    if spec.options.time == "to_data":
        weights = without_variance(weights, spec)
    check_fit(weights, wanted, source)
    return {f"net.{name}": tensor.float() for name, tensor in weights.items()}


def position_grid(source: str) -> int:
    """Side, in tokens, of the grid whose positions the weights of a DiT have learned; 0: they do not say.

    Raises: as ``initial_weights``.
    """
    if snapshot := read_snapshot(source):
        spec = _spec_of(snapshot)
        return 0 if family_of(spec.name) else spec.base_size // size_of(spec.name)[-1]
    if is_file(source):
        positions = read_official(Path(source).expanduser()).get(POSITIONS)
        return 0 if positions is None else math.isqrt(positions.shape[1])
    config = _json_object(model_folder(source, files=(CONFIG,)) / CONFIG)
    side, patch = config.get("sample_size"), config.get("patch_size")
    return side // patch if isinstance(side, int) and isinstance(patch, int) and patch > 0 else 0


def merged_weights(snapshot: checkpoint.Saved, model: Denoiser, spec: ModelSpec, frozen: str = "") -> dict[str, Tensor]:
    """The weights of a run with adapters: those that the adapters were trained on, with the adapters merged into them.

    Args:
      model: built from the spec without adapters, on any device; only its names and shapes are used.
      spec: of the snapshot.
      frozen: where the weights lie that the adapters were trained on; empty: where they were.
    Raises: RunError: there are other weights; DamageError.
    """
    assert spec.adapter is not None
    adapters = snapshot.tensors(checkpoint.MODEL, adapter_shapes(model, spec.adapter))
    try:
        trained_on = FrozenWeights.model_validate(snapshot.state.get("frozen"))
    except ValidationError as error:
        raise checkpoint.CheckpointDamage(snapshot.path, f"its frozen weights are not valid ({error})") from error
    source = frozen or trained_on.source
    if not frozen and Path(source).is_absolute() and not Path(source).is_dir():
        raise RunError(
            f"snapshot '{snapshot.path}': its adapters were trained on the weights of '{source}', which is not there. "
            "If they have moved, name their place with --base, or to train with model.init_from."
        )
    weights = initial_weights(source, model, spec.plain)
    if (found := hash_of(weights)) != trained_on.xxh3_128:
        raise RunError(
            f"snapshot '{snapshot.path}': its adapters were trained on the weights of '{trained_on.source}' with hash "
            f"{trained_on.xxh3_128}, those of '{source}' have {found}. Give the former with --base."
        )
    return merge(weights, adapters, spec.adapter.scale)


def lasting_source(source: str) -> str:
    """A source by a path that does not depend on the working folder; of a run its newest snapshot."""
    if snapshot := read_snapshot(source):
        return str(snapshot.path.resolve())
    folder = Path(source).expanduser()
    return str(folder.resolve()) if folder.is_dir() else source


def _spec_of(snapshot: checkpoint.Saved) -> ModelSpec:
    try:
        return ModelSpec.model_validate(snapshot.state["spec"])
    except (KeyError, ValidationError) as error:
        raise checkpoint.CheckpointDamage(snapshot.path, f"its spec is not valid ({error})") from error


def _check_model(saved: ModelSpec, spec: ModelSpec, source: str) -> None:
    """Raise RunError if a run is of another model, by more than the patch, or of other options.

    Most options change no tensor, so the weights would load and compute something else.
    """
    both_dit = not (family_of(saved.name) or family_of(spec.name))
    if saved.name != spec.name and not (both_dit and size_of(saved.name)[:-1] == size_of(spec.name)[:-1]):
        raise RunError(f"model.init_from '{source}': it is of model '{saved.name}', the recipe of '{spec.name}'.")
    theirs, ours = saved.options.model_dump(), spec.options.model_dump()
    if differing := [f"model.{key}={theirs[key]}".lower() for key in theirs if theirs[key] != ours[key]]:
        raise RunError(
            f"model.init_from '{source}': it has learned {', '.join(differing)}, the recipe has other values. "
            f"Use {' '.join(f'--set {one}' for one in differing)}."
        )


def class_map_warning(source: str, num_classes: int, classes: Sequence[str]) -> str | None:
    """A warning if published weights have ImageNet's labels and the store has other labels, else None.

    Args:
      num_classes: of the model.
      classes: of the store, in order of its labels.
    """
    wnids = list(imagenet_names())
    if num_classes != len(wnids) or read_snapshot(source):
        return None
    differing = [i for i, name in enumerate(classes) if name not in (wnids[i], str(i))]
    if not differing:
        return None
    label, name = differing[0], classes[differing[0]]
    known_label = f", ImageNet's label {wnids.index(name)}" if name in wnids else ""
    return (
        f"model.init_from '{source}' has learned ImageNet's 1000 labels, {len(differing)} of the store's "
        f"{len(classes)} differ: labels are positions of sorted class names, so label {label} is '{name}'{known_label}"
        ". For ImageNet's own labels use a store of all classes; data.labels chooses which of them train."
    )


def scale_warning(source: str, latent: LatentSpec) -> str | None:
    """A warning if a run has learned latents of another shift or scale than these, else None."""
    snapshot = read_snapshot(source)
    learned = LatentSpec.model_validate(snapshot.state["latent"]) if snapshot else latent
    if latent.channels != learned.channels:
        return None  # the weights do not fit either
    pairs = zip(raw_scale_and_shift(learned), raw_scale_and_shift(latent), strict=True)
    if all(np.allclose(theirs, ours, rtol=1e-3, atol=1e-3) for theirs, ours in pairs):
        return None
    return (
        f"model.init_from '{source}' has learned latents of another shift or scale than those of this run. Its first "
        'steps adapt to them. latent.normalise = "encoder" and the same VAE give the same ones.'
    )


def _with_positions(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with a computed position table if theirs is missing (diffusers' layout) or of another size."""
    needed, there = wanted.get(POSITIONS), found.get(POSITIONS)
    if needed is None or (there is not None and there.shape == needed.shape):
        return dict(found)
    return {**found, POSITIONS: computed_positions(needed.shape)}


def _with_own_projectors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with the projectors of this model: those of the source where they are the same, else new ones."""
    own = {name: tensor for name, tensor in wanted.items() if name.startswith(PROJECTORS)}
    fits = all(name in found and found[name].shape == tensor.shape for name, tensor in own.items())
    kept = {name: tensor for name, tensor in found.items() if not name.startswith(PROJECTORS)}
    return kept | ({name: found[name] for name in own} if fits else own)


def check_fit(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], source: str) -> None:
    """Raise RunError if the weights are of another model, naming the first tensor that differs."""
    table = "y_embedder.embedding_table.weight"
    if table in found and table in wanted and found[table].shape[0] != wanted[table].shape[0]:
        num_classes, needed = found[table].shape[0] - 1, wanted[table].shape[0] - 1
        raise RunError(
            f"model.init_from '{source}': its label table has {num_classes} classes, the model {needed}. Use "
            f"--set model.num_classes={num_classes} with a store of no more classes."
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

    Raises: RunError: no such files; DamageError: a file cannot be read.
    """
    files = sorted(path for path in folder.glob(WEIGHTS) if ".fp16." not in path.name)
    if not files:
        raise RunError(
            f"model.init_from '{folder}': there are no weights '{WEIGHTS}'. Only safetensors are read; convert other "
            "weights with save_pretrained(..., safe_serialization=True)."
        )
    return {name: tensor for path in files for name, tensor in read_safetensors(path).items()}


def _json_object(path: Path) -> dict[str, Any]:
    content = read_json(path, max_bytes=MAX_CONFIG_BYTES)
    if not isinstance(content, dict):
        raise DamageError(f"model.init_from '{path}': needed a JSON object. Fetch it again.")
    return content
