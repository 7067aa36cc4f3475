"""The weights that a run begins with, for its model: converted, resized, checked.

Of a run its averaged weights are used. Training can continue at another resolution, that of a DiT with another patch
size too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from torch import Tensor

from ...datasets.errors import RunError
from ..models.build import Denoiser
from ..models.diffusers.adapters import adapter_shapes
from ..models.diffusers.families import family_of
from ..models.dit import size_of
from ..models.spec import ModelSpec
from . import checkpoint
from .dit_checkpoints import POSITIONS, PROJECTORS, computed_positions, from_diffusers, read_official
from .merging import FrozenWeights, hash_of, merge
from .patch_size import INPUT, OUTPUT, with_patches
from .sit_checkpoints import from_lightningdit, without_variance
from .sources import is_file, model_folder, read_folder, read_snapshot, spec_of


class FirstWeights(NamedTuple):
    """What a run begins with.

    Args:
      weights: under the names of a model's state dict, float32 on the CPU.
      origin: where they come from, and what was converted, in words.
    """

    weights: dict[str, Tensor]
    origin: str


def initial_weights(source: str, model: Denoiser, spec: ModelSpec) -> dict[str, Tensor]:
    """The weights of ``first_weights``.

    Raises: as ``first_weights``.
    """
    return first_weights(source, model, spec).weights


def first_weights(source: str, model: Denoiser, spec: ModelSpec) -> FirstWeights:
    """The weights of ``model.init_from`` for a model.

    Args:
      model: built from the spec without adapters, on any device; only names and shapes are used, and new projectors.
    Raises: RunError: they are of another model; the message names the difference.
    """
    origin = [f"the weights of '{source}'"]
    wanted = {name.removeprefix("net."): tensor for name, tensor in model.state_dict().items()}
    if snapshot := read_snapshot(source):
        learned = spec_of(snapshot)
        _check_model(learned, spec, source)
        read = merged_weights(snapshot, model, learned) if learned.adapter else snapshot.read(checkpoint.MODEL)
        weights = {name.removeprefix("net."): tensor for name, tensor in read.items()}
        adapted = ", its adapters merged" if learned.adapter else ""
        origin = [f"the averaged weights of '{snapshot.path}', step {snapshot.state['step']}{adapted}"]
    elif family_of(spec.name):
        weights = read_folder(model_folder(source))
    elif is_file(source):
        read = read_official(Path(source).expanduser())
        weights = from_lightningdit(read, spec, source)
        origin += ["norms and rotation converted from LightningDiT"] if weights.keys() != read.keys() else []
    else:
        weights = from_diffusers(read_folder(model_folder(source)), source)
    if not family_of(spec.name):
        before = weights
        weights = _with_own_projectors(with_patches(_with_positions(weights, wanted), wanted), wanted)
        origin += _converted(before, weights)
    if spec.options.time == "to_data":
        rows = len(weights.get(f"{OUTPUT}.bias", ()))
        weights = without_variance(weights, spec)
        origin += ["without outputs for a variance"] if len(weights.get(f"{OUTPUT}.bias", ())) != rows else []
    check_fit(weights, wanted, source)
    return FirstWeights({f"net.{name}": tensor.float() for name, tensor in weights.items()}, ", ".join(origin))


def _converted(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """What a DiT's weights for another patch and other features have become."""
    said = []
    if INPUT in before and (old := before[INPUT].shape[-1]) != (new := after[INPUT].shape[-1]):
        said.append(f"patch embedding and output layer resized from patch {old} to {new}")
    names = [name for name in after if name.startswith(PROJECTORS)]
    if names and any(after[name] is not before.get(name) for name in names):
        said.append("with new projectors")
    return said


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
            "If they have moved, say where with --base PATH. To train further, begin from merged weights: 'leandit "
            f"export {snapshot.path.parent} --out FOLDER --merged --base PATH', then --set model.init_from=FOLDER."
        )
    weights = initial_weights(source, model, spec.plain)
    if (found := hash_of(weights)) != trained_on.xxh3_128:
        raise RunError(
            f"snapshot '{snapshot.path}': its adapters were trained on the weights of '{trained_on.source}' with hash "
            f"{trained_on.xxh3_128}, those of '{source}' have {found}. Give the former with --base."
        )
    return merge(weights, adapters, spec.adapter.scale)


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
