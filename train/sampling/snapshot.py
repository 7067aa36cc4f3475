"""A snapshot of a run, loaded and ready to sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...datasets.format.buckets import bucket_size
from ...datasets.format.class_names import ClassNames
from ...datasets.format.schema import LatentSpec, TextSpec
from ...errors import RunError
from ...recipe import parse_stored
from ..models.blocks import compile_blocks
from ..models.build import Denoiser, build_model
from ..models.conditioning import Conditioner, null_length
from ..models.spec import OFF, ModelSpec
from ..techniques.registry import ObjectiveSection
from ..weights import checkpoint
from ..weights.checkpoint import MODEL, NULL_CAPTION
from ..weights.folders import CHECKPOINT, SNAPSHOT, steps
from ..weights.init_from import merged_weights
from .guided import SamplingModel

Weights = Literal["averaged", "raw"]


@dataclass(frozen=True)
class Snapshot(SamplingModel):
    """The weights of a run, ready to sample.

    Args:
      model: in evaluation mode, on its device; adapters are merged into its weights.
      state: the rest of what was saved (encoders, classes, buckets).
      weights_hash: XXH3-128 of the file that the weights were read from.
      weights: "averaged", or those of the checkpoint of the same step.
      unknown: keys of its objective that this release does not have, such as those of a removed technique.
    """

    model: Denoiser
    path: Path
    step: int
    latent: LatentSpec
    text: TextSpec | None
    state: dict
    weights_hash: str = ""
    weights: Weights = "averaged"
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weights_path(self) -> Path:
        """The folder that the weights were read from."""
        return self.path if self.weights == "averaged" else self.path.with_name(f"{CHECKPOINT}-{self.step}")

    @property
    def warning(self) -> str | None:
        """What the user should know: the average is young, or this release does not have all it was trained with."""
        young = checkpoint.young_average(self.path, self.state) if self.weights == "averaged" else None
        used = {key: value for key, value in self.unknown.items() if value not in OFF}
        if not used:
            return young
        keys = ", ".join(f"objective.{key} = {value!r}" for key, value in used.items())
        removed = f"snapshot '{self.path}': it was trained with {keys}, which this release does not have"
        return f"{removed}. {young}" if young else removed

    @property
    def class_names(self) -> ClassNames:
        """The classes of the training store by name: ``.find("tench")`` is a label."""
        return ClassNames(self.state["classes"], self.state.get("class_names"))


def load_snapshot(
    run: Path,
    device: torch.device,
    step: int = 0,
    *,
    compiled: bool = False,
    frozen: str = "",
    weights: Weights = "averaged",
) -> Snapshot:
    """Load a snapshot of a run.

    Args:
      step: the snapshot's; 0: the newest.
      compiled: the blocks go through torch.compile.
      frozen: path of the weights that the run's adapters were trained on; empty: where they were.
      weights: "averaged", or "raw": the trained ones, of a step whose checkpoint still exists.
    Raises: RunError: there is none, or its state is not valid; DamageError.
    """
    saved, source = _read(run, step, weights)
    try:
        spec = ModelSpec.model_validate(saved.state["spec"])
        objective, unknown = parse_stored("objective", ObjectiveSection, saved.state["objective"])
        latent = LatentSpec.model_validate(saved.state["latent"])
        text = saved.state["text"] and TextSpec.model_validate(saved.state["text"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"snapshot '{saved.path}': its state is not valid ({error}).") from error
    model = build_model(spec.plain, seed=0)
    if spec.adapter:
        model.load_state_dict(merged_weights(source, model, spec, frozen))
    else:
        model.load_state_dict(source.tensors(MODEL, model.state_dict()))
    null = _null_caption(saved, spec, text)
    return Snapshot(
        path=saved.path,
        step=saved.state["step"],
        model=prepare_model(model, device, compiled=compiled),
        spec=spec,
        objective=objective,
        latent=latent,
        text=text,
        conditioner=Conditioner(
            spec,
            null["embedding"].to(device) if null else None,
            null_pooled=null["pooled"].to(device) if "pooled" in null else None,
        ),
        state=saved.state,
        weights_hash=source.files[f"{MODEL}.safetensors"].xxh3_128,
        weights=weights,
        sample_shift=saved.state.get("sample_shift", "auto"),
        unknown=unknown,
    )


def _read(run: Path, step: int, weights: Weights) -> tuple[checkpoint.Saved, checkpoint.Saved]:
    """The snapshot of a step, or the newest, and what has the weights to sample."""
    snapshots = dict(steps(SNAPSHOT, run))
    if not snapshots:
        raise RunError(f"run '{run}': there is no snapshot. Train first: a checkpoint saves one too.")
    kind = SNAPSHOT if weights == "averaged" else CHECKPOINT
    places = {at: path for at, path in steps(kind, run) if at in snapshots}
    if not places:
        raise RunError(
            f"run '{run}': without a checkpoint it has no raw weights. Use the averaged ones, or the folder "
            "that the run was trained in."
        )
    if step and step not in places:
        raise RunError(f"run '{run}': no {kind} of step {step}; there are {', '.join(map(str, sorted(places)))}.")
    step = step or max(places)
    saved = checkpoint.read(snapshots[step])
    return saved, saved if kind == SNAPSHOT else replace(checkpoint.read(places[step]), state=saved.state)


def _null_caption(saved: checkpoint.Saved, spec: ModelSpec, text: TextSpec | None) -> dict[str, Tensor]:
    """The tensors of the empty caption by name, for a model with text."""
    tokens = spec.joined_tokens or (null_length(spec, text) if spec.takes_text else 0)
    shapes = {"embedding": (tokens, spec.caption_width)} if tokens else {}
    shapes |= {"pooled": (spec.pooled_width,)} if spec.pooled_width else {}
    wanted = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return saved.tensors(NULL_CAPTION, wanted) if wanted else {}


def text_encoders(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The text encoders that the model of a snapshot reads, by name.

    Returns: of each its section of the precompute recipe, "model", and "weights_sha256".
    """
    if several := state.get("texts"):
        return several
    return {"": state["text_encoder"]} if state["text_encoder"] else {}


def resolution_of(state: Mapping[str, Any]) -> int:
    """Side in pixels of a square image as large as those that a snapshot was trained on.

    Args:
      state: of the snapshot. One of before it named the resolution has the sizes of its buckets.
    """
    if "resolution_px" in state:
        return state["resolution_px"]
    buckets = state["buckets"]
    height_px, width_px = bucket_size(max(buckets, key=buckets.__getitem__))
    return round(math.sqrt(height_px * width_px))


def prepare_model(model: Denoiser, device: torch.device, *, compiled: bool) -> Denoiser:
    """Move the model to its device, in evaluation mode, compiled or not."""
    model.to(device).eval().requires_grad_(False)
    if compiled:
        compile_blocks(model.blocks)
    return model
