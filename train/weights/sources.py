"""What ``model.init_from`` can name, and what that records of itself.

A source is a run, whose newest snapshot is used; a hub id or folder in diffusers' layout, a pipeline or its
transformer, of which only safetensors are read, as diffusers chooses them; or a file of a DiT in the official layout.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from torch import Tensor

from ...datasets.disk.hashing import read_json
from ...datasets.disk.weight_files import WeightFilesError, weight_files, weight_names
from ...datasets.format.class_names import imagenet_names
from ...datasets.format.schema import LatentSpec
from ...datasets.order.alike import raw_scale_and_shift
from ...errors import DamageError, RunError
from ..models.build import FAMILIES, family_of, transformer_class
from ..models.dit import size_of
from ..models.spec import ModelSpec
from ..objectives.shift import parse_scheduler, scheduler_shift
from . import checkpoint
from .published import POSITIONS, position_span, read_official, read_safetensors, without_wrappers

CONFIG, WEIGHTS, SUBFOLDER = "config.json", "diffusion_pytorch_model", "transformer"
SCHEDULER = "scheduler/scheduler_config.json"  # in the folder of a pipeline
FILES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
ADAPTER_FILES = ("pytorch_lora_weights.safetensors", "adapter_config.json")
# What diffusers' EMAModel.save_pretrained adds to the config of the averaged model.
EMA_KEYS = {
    "decay",
    "inv_gamma",
    "min_decay",
    "optimization_step",
    "power",
    "update_after_step",
    "use_ema_warmup",
}
MAX_CONFIG_BYTES = 1 << 20
MAX_DEPTH = 256  # blocks in a config: the largest models have 60
MAX_NUMBER = 1 << 16  # of anything else in it: the largest is 18432


def is_file(source: str) -> bool:
    """Whether a source is a file of weights, not a folder or a hub id."""
    path = Path(source).expanduser()
    return path.is_file() or (source.endswith(FILES) and not path.is_dir())


def read_snapshot(source: str) -> checkpoint.Saved | None:
    """The newest snapshot of a run, or the snapshot of a folder; None if the source is neither.

    Raises: DamageError.
    """
    folder = Path(source).expanduser()
    snapshots = checkpoint.find(checkpoint.SNAPSHOT, folder) if folder.is_dir() else []
    if not snapshots and folder in checkpoint.find(checkpoint.SNAPSHOT, folder.parent):
        snapshots = [folder]
    return checkpoint.read(snapshots[-1]) if snapshots else None


def spec_of(snapshot: checkpoint.Saved) -> ModelSpec:
    """The model of a snapshot.

    Raises: CheckpointDamage.
    """
    try:
        return ModelSpec.model_validate(snapshot.state["spec"])
    except (KeyError, ValidationError) as error:
        raise checkpoint.CheckpointDamage(snapshot.path, f"its spec is not valid ({error})") from error


def model_folder(source: str, *, files: tuple[str, ...] = (CONFIG, *weight_names(WEIGHTS))) -> Path:
    """Folder of a transformer: local, else fetched from the hub.

    Args:
      files: to fetch from the hub.
    Raises: RunError: it does not exist.
    """
    folder = Path(source).expanduser()
    if folder.is_file():
        raise RunError(
            f"model.init_from '{source}': it is a file. Expected a folder or hub id of a diffusers pipeline, or of its "
            "transformer: load the file with from_single_file of diffusers' class, and save it with save_pretrained."
        )
    if not folder.is_dir():
        if source.startswith((".", "/", "~")) or source.count("/") != 1:
            raise RunError(
                f"model.init_from '{source}': no such folder, and not a hub id. Check the path. If weights "
                "that adapters were trained on have moved, pass their path with --set model.init_from=PATH to "
                "their run, with --base PATH to other commands."
            )
        folder = _fetch(source, files)
    for candidate in (folder, folder / SUBFOLDER):
        if (candidate / CONFIG).is_file():
            return candidate
    problem = f"model.init_from '{source}': there is no '{CONFIG}' and no '{SUBFOLDER}/{CONFIG}'"
    if any((folder / name).is_file() for name in ADAPTER_FILES):
        raise RunError(
            f"{problem}, but adapters (LoRA). Merge them into the weights that they belong to, with fuse_lora and "
            "save_pretrained of diffusers or 'leandit export RUN --merged', and name that folder."
        )
    others = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    advice = f" There is one in {', '.join(others)}: name the one that is meant." if others else ""
    raise RunError(f"{problem}. Expected a folder or hub id of a diffusers pipeline, or of its transformer.{advice}")


def _fetch(hub_id: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    names = [SCHEDULER]
    for name in files:
        names += [name, f"{SUBFOLDER}/{name}"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=names))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RunError(
            f"model.init_from '{hub_id}': not a local folder, and not available from the hub ({reason}). Check the "
            "name, log in with 'hf auth login', or pass a folder."
        ) from error


def _read_config(source: str) -> dict[str, Any]:
    path = model_folder(source, files=(CONFIG,)) / CONFIG
    content = read_json(path, max_bytes=MAX_CONFIG_BYTES)
    if not isinstance(content, dict):
        raise DamageError(f"model.init_from '{path}': expected a JSON object. Fetch it again.")
    return content


def read_config(source: str, family: str) -> dict[str, Any]:
    """All arguments of diffusers' class, with the class's defaults for those that the config lacks.

    Empty for a run that was trained from scratch: the recipe names its model.

    Raises: RunError: the config is of another class, has unknown arguments, or is of a distilled model.
    """
    if snapshot := read_snapshot(source):
        return spec_of(snapshot).config
    loaded, cls = _read_config(source), transformer_class(family)
    if loaded.get("_class_name") != cls.__name__:
        raise RunError(
            f"model.init_from '{source}': its config is of {str(loaded.get('_class_name'))[:80]!r}, the model needs "
            f"{cls.__name__}. Check model.name."
        )
    loaded = {key: value for key, value in loaded.items() if not key.startswith("_") and key not in EMA_KEYS}
    known = {p.name: p.default for p in inspect.signature(cls.__init__).parameters.values() if p.name != "self"}
    if unknown := sorted(loaded.keys() - known.keys()):
        raise RunError(
            f"model.init_from '{source}': its config has '{unknown[0]}', which {cls.__name__} does not know."
        )
    config = {key: list(value) if isinstance(value, tuple) else value for key, value in (known | loaded).items()}
    for key, value in config.items():
        if isinstance(value, int | float) and abs(value) > (MAX_DEPTH if key == "num_layers" else MAX_NUMBER):
            raise RunError(f"model.init_from '{source}': its config has {key} = {value}, which is out of range.")
    if config.get("guidance_embeds") and not FAMILIES[family].takes_guidance:
        raise RunError(f"model.init_from '{source}': it is distilled and takes the guidance as an input. Use its base.")
    if family == "pixart":
        takes_sizes = config["use_additional_conditions"]
        if takes_sizes or (takes_sizes is None and config["sample_size"] == 128):  # as the class decides it
            raise RunError(
                f"model.init_from '{source}': PixArt-alpha of 1024 px is conditioned on the sizes of source images, "
                "which is not supported. Use PixArt-Sigma."
            )
        config["use_additional_conditions"] = False
    return config


def read_scheduler(source: str) -> dict[str, Any]:
    """The config of the scheduler that weights came with, ``_class_name`` included; empty: they came without one.

    It lies in the folder of a pipeline beside that of the transformer. A run has that of its own first weights.

    Raises: RunError: it is no scheduler that diffusers has, or its shift is not valid; DamageError.
    """
    if snapshot := read_snapshot(source):
        return spec_of(snapshot).scheduler
    if is_file(source):
        return {}
    transformer = model_folder(source, files=(CONFIG,)).absolute()
    path = transformer.parent / SCHEDULER
    if not transformer.name.startswith(SUBFOLDER) or not path.is_file():  # "transformer_ema" too
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            config = parse_scheduler(file.read(MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise DamageError(f"model.init_from '{path}': no JSON object ({error}). Fetch it again.") from error
    name = config.get("_class_name")
    if not (isinstance(name, str) and re.fullmatch(r"\w+Scheduler", name)):
        raise RunError(
            f"model.init_from '{path}': its '_class_name' is {str(name)[:80]!r}, expected a scheduler of diffusers. "
            "Restore it, or remove the file: times are then shifted by objective.shift."
        )
    try:
        scheduler_shift(config, None)
    except ValueError as error:
        raise RunError(f"model.init_from '{path}': {error}. Restore it.") from error
    return config


def read_folder(folder: Path) -> dict[str, Tensor]:
    """The tensors that diffusers loads from a folder without a variant, by their names without wrappers.

    Raises: RunError: no such files, or a tensor is in two of them; DamageError: a file cannot be read.
    """
    try:
        files = weight_files(folder, WEIGHTS, library="diffusers")
    except WeightFilesError as error:
        raise RunError(f"model.init_from '{folder}': {error}.") from error
    tensors: dict[str, Tensor] = {}
    file_of: dict[str, str] = {}
    for path in files:
        for name, tensor in without_wrappers(read_safetensors(path), str(path)).items():
            if name in tensors:
                raise RunError(
                    f"model.init_from '{folder}': '{name}' is in '{file_of[name]}' and in '{path.name}'. Fetch or save "
                    "the model again."
                )
            tensors[name] = tensor
            file_of[name] = path.name
    return tensors


def position_grid(source: str) -> int:
    """Side, in tokens, of the grid whose positions the weights of a DiT have learned; 0: they do not say.

    Raises: as ``initial_weights``.
    """
    if snapshot := read_snapshot(source):
        spec = spec_of(snapshot)
        return 0 if family_of(spec.name) else spec.base_size // size_of(spec.name)[-1]
    if is_file(source):
        positions = read_official(Path(source).expanduser()).get(POSITIONS)
        return 0 if positions is None else position_span(positions)
    config = _read_config(source)
    side, patch = config.get("sample_size"), config.get("patch_size")
    return side // patch if isinstance(side, int) and isinstance(patch, int) and patch > 0 else 0


def lasting_source(source: str) -> str:
    """A source by a path that does not depend on the working folder; of a run its newest snapshot."""
    if snapshot := read_snapshot(source):
        return str(snapshot.path.resolve())
    folder = Path(source).expanduser()
    return str(folder.resolve()) if folder.is_dir() else source


def source_warnings(source: str, spec: ModelSpec, classes: Sequence[str], latent: LatentSpec) -> Iterator[str]:
    """What the weights have learned otherwise than this run trains.

    Args:
      spec: of the run's model.
      classes: of the store, in order of its labels.
      latent: as this run reads it.
    """
    snapshot = read_snapshot(source)
    if not spec.takes_text:
        yield from _other_labels(source, snapshot, spec.num_classes, classes)
    if snapshot is None:
        return
    learned = LatentSpec.model_validate(snapshot.state["latent"])
    pairs = zip(raw_scale_and_shift(learned), raw_scale_and_shift(latent), strict=True)
    if learned.channels == latent.channels and not all(
        np.allclose(theirs, ours, rtol=1e-3, atol=1e-3) for theirs, ours in pairs
    ):
        yield (
            f"model.init_from '{source}' was trained on latents with a different shift or scale from this run's. The "
            'first steps adapt to them. latent.normalise = "encoder" and the same VAE avoid this.'
        )
    if young := checkpoint.young_average(snapshot.path, snapshot.state):
        yield young


def _other_labels(
    source: str, snapshot: checkpoint.Saved | None, num_classes: int, classes: Sequence[str]
) -> Iterator[str]:
    """A run has learned the classes of its store; published weights of 1000 classes those of ImageNet.

    A class of the store that is named by its own number fits any.
    """
    wnids = list(imagenet_names())
    if snapshot:
        learned, whose = snapshot.state["classes"] or [], "another store's"
    else:
        learned, whose = wnids if num_classes == len(wnids) else [], "ImageNet's"
    differing = [i for i, name in enumerate(classes) if name not in (str(i), *learned[i : i + 1])]
    if learned and differing:
        first = differing[0]
        was = f"learned as '{learned[first]}'" if first < len(learned) else "not learned"
        yield (
            f"model.init_from '{source}' has learned {whose} {len(learned)} labels, {len(differing)} of this store's "
            f"{len(classes)} differ: labels are positions of sorted class names, so '{classes[first]}' is label "
            f"{first}, which was {was}. To keep the labels it has learned, use a store of all these classes; "
            "data.labels chooses which of them train."
        )
