"""The weights that a run begins with, for its model: read, converted, resized, checked.

Of a run its averaged weights are used. Training can continue at another resolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from ...datasets.disk.hashing import xxh3_parts
from ...errors import RunError
from ..models.build import Denoiser, family_of
from ..models.diffusers.adapters import DOWN, UP, adapter_shapes
from ..models.dit_dh import is_dit_dh
from ..models.spec import ModelSpec
from . import checkpoint, published
from .sources import is_file, model_folder, read_folder, read_snapshot, spec_of


class FrozenWeights(BaseModel):
    """Which weights adapters were trained on.

    Args:
      source: as ``model.init_from``: a snapshot of a run, a folder, or a hub id.
      xxh3_128: of all names, shapes and values.
    """

    model_config = ConfigDict(frozen=True)  # keys of a newer release are left out

    source: str
    xxh3_128: str


def initial_weights(source: str, model: Denoiser, spec: ModelSpec) -> tuple[dict[str, Tensor], str]:
    """The weights of ``model.init_from`` for a model, and where they come from and what was converted, in words.

    Args:
      model: built from the spec without adapters, on any device; only names and shapes are used, and new projectors.
    Returns: tensors under the names of the model's state dict, float32 on the CPU.
    Raises: RunError: they are of another model; the message names the difference.
    """
    origin = [f"the weights of '{source}'"]
    is_dit = not family_of(spec.name)
    wanted = {name.removeprefix("net."): tensor for name, tensor in model.state_dict().items()}
    if snapshot := read_snapshot(source):
        learned = spec_of(snapshot)
        _check_model(learned, spec, source)
        read = merged_weights(snapshot, model, learned) if learned.adapter else snapshot.read(checkpoint.MODEL)
        weights = {name.removeprefix("net."): tensor for name, tensor in read.items()}
        adapted = ", its adapters merged" if learned.adapter else ""
        origin = [f"the averaged weights of '{snapshot.path}', step {snapshot.state['step']}{adapted}"]
    elif not is_dit:
        weights = read_folder(model_folder(source))
    elif is_file(source):
        read = published.read_official(Path(source).expanduser())
        if is_dit_dh(spec.name):
            weights = published.without_tables(read)
        else:
            weights = published.from_lightningdit(read, spec, source)
            origin += ["norms and rotation converted from LightningDiT"] if weights.keys() != read.keys() else []
    else:
        weights = published.from_diffusers(read_folder(model_folder(source)), source)
    if is_dit:
        weights, changes = published.fitted(weights, wanted, spec)
        origin += changes
    check_fit(weights, wanted, source)
    prefix = "" if is_dit else "net."
    return {prefix + name: tensor.float() for name, tensor in weights.items()}, ", ".join(origin)


def _check_model(saved: ModelSpec, spec: ModelSpec, source: str) -> None:
    """Raise RunError if a run is of another model, or of other options.

    Most options change no tensor, so the weights would load and compute something else.
    """
    if saved.name != spec.name:
        raise RunError(f"model.init_from '{source}': it is of model '{saved.name}', the recipe has '{spec.name}'.")
    theirs, ours = saved.options.model_dump(), spec.options.model_dump()
    if differing := [f"model.{key}={theirs[key]}".lower() for key in theirs if theirs[key] != ours[key]]:
        raise RunError(
            f"model.init_from '{source}': it was trained with {', '.join(differing)}, the recipe has other values. "
            f"Use {' '.join(f'--set {one}' for one in differing)}."
        )


def check_fit(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor], source: str) -> None:
    """Raise RunError if the weights are of another model, naming the first tensor that differs."""
    table = f"{published.LABEL_TABLE}.weight"
    if table in weights and table in wanted and weights[table].shape[0] != wanted[table].shape[0]:
        num_classes, needed = weights[table].shape[0] - 1, wanted[table].shape[0] - 1
        raise RunError(
            f"model.init_from '{source}': its label table has {num_classes} classes, the model {needed}. Use "
            f"--set model.num_classes={num_classes} with a store of at most as many classes."
        )
    if names := sorted(weights.keys() ^ wanted.keys()):
        side = "which the model does not have" if names[0] in weights else "is missing"
        raise RunError(
            f"model.init_from '{source}': {len(names)} tensors do not fit the model: '{names[0]}' {side}. "
            "Check model.name, its options and conditioning.kind."
        )
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise RunError(
                f"model.init_from '{source}': '{name}' is {tuple(tensor.shape)}, the model needs "
                f"{tuple(wanted[name].shape)}. Check model.name, the store's latent channels and objective.kind."
            )


# ----------------------------------------------------------------------------------------------------------- adapters


def hash_of(weights: Mapping[str, Tensor]) -> str:
    """XXH3-128 of weights on the CPU, with their names and shapes."""

    def parts() -> Iterator[bytes | np.ndarray]:
        for name, tensor in sorted(weights.items()):
            yield f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
            yield np.ascontiguousarray(tensor.numpy())

    return xxh3_parts(parts())[1]


def merged_weights(snapshot: checkpoint.Saved, model: Denoiser, spec: ModelSpec, frozen: str = "") -> dict[str, Tensor]:
    """The weights of a run with adapters: those they were trained on, plus the products scale * B A.

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
            "If they have moved, say where with --base PATH. To train further, start from merged weights: 'leandit "
            f"export {snapshot.path.parent} --out FOLDER --merged --base PATH', then --set model.init_from=FOLDER."
        )
    weights, _ = initial_weights(source, model, spec.plain)
    if (digest := hash_of(weights)) != trained_on.xxh3_128:
        raise RunError(
            f"snapshot '{snapshot.path}': its adapters were trained on the weights of '{trained_on.source}' with hash "
            f"{trained_on.xxh3_128}, those of '{source}' have {digest}. Pass the former with --base."
        )
    for name, down in adapters.items():
        if name.endswith(DOWN):
            layer = name.removesuffix(DOWN)
            product = adapters[layer + UP] @ down
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + spec.adapter.scale * product
    return weights
