"""A model with its optimizer, its averages and everything else that a step reads or changes.

Runs, benchmarks and the memory planner build the same learner, so that all of them make the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...datasets.format.schema import FeatureSpec, StoreSpec
from ..config import TrainRecipe
from ..models.build import DiTDenoiser, build_model, routed_blocks
from ..models.conditioning import Conditioner
from ..models.diffusers.adapters import add_adapters
from ..models.diffusers.model import DiffusersModel
from ..models.numerics import use_onednn
from ..models.spec import ModelSpec
from ..optim.loss_scale import autocast_dtype
from ..parallel.build import build_engine
from ..parallel.engine import Engine
from ..parallel.ranks import ALONE, Ranks
from ..parallel.strategy import choose_strategy
from ..weights.init_from import FrozenWeights, first_weights, hash_of
from ..weights.sources import lasting_source
from .fp8 import check_fp8, use_fp8
from .gpu import choose_kernels

COMPILED_CAPTION_STEP = 64  # tokens, so that captions of 300 have five lengths


@dataclass(kw_only=True)
class Learner:
    """Everything that a step reads or changes.

    Args:
      autocast_dtype: of forward and backward; None: float32.
      step, num_images: made and seen so far.
      microbatches: measured limits of images in a forward, by bucket.
      attention_kernels: measured, the fastest first.
      compiled: the blocks are, for each shape, so that parts of a batch have one.
      feature_specs: of the image features that the recipe aligns with, by name.
      frozen: the weights that adapters belong to.
      origin: of the first weights, in words.
    """

    recipe: TrainRecipe
    spec: ModelSpec
    engine: Engine
    ranks: Ranks
    conditioner: Conditioner
    device: torch.device
    autocast_dtype: torch.dtype | None
    step: int = 0
    num_images: int = 0
    microbatches: dict[str, int] = field(default_factory=dict)
    attention_kernels: list[str] = field(default_factory=list)
    compiled: bool = False
    feature_specs: Mapping[str, FeatureSpec] = field(default_factory=dict)
    frozen: FrozenWeights | None = None
    origin: str = ""


def build_learner(
    recipe: TrainRecipe,
    spec: ModelSpec,
    device: torch.device,
    *,
    null_caption: Tensor | None,
    null_pooled: Tensor | None = None,
    source_sizes: Sequence[Tensor] = (),
    ranks: Ranks = ALONE,
    store: StoreSpec | None = None,
    compiled: bool = False,
    pretrained: bool = False,
    onednn: bool = True,
) -> Learner:
    """Build model, optimizer and averages.

    Args:
      null_caption, null_pooled: (max_tokens, D) and (P,), for a model with text.
      source_sizes: (records, 2) pixels of each store, for a model conditioned on them.
      ranks: of this process; ``ranks.connected`` has connected it.
      store: whose image features the recipe aligns with.
      compiled: the blocks go through torch.compile.
      pretrained: load the weights of ``model.init_from``.
      onednn: use oneDNN for matrix products on a CPU, if nothing is compiled.
    Raises: RecipeError, RunError: something does not fit.
    """
    check_fp8(recipe, ranks, device, compiled=compiled)
    compiled = compiled and choose_strategy(recipe.parallel, ranks) != "deepspeed"
    model, frozen, origin = build_model(spec.plain, seed=recipe.run.seed), None, "new weights"
    if pretrained and (source := recipe.model.init_from):
        weights, origin = first_weights(source, model, spec)
        model.load_state_dict(weights)
        frozen = FrozenWeights(source=lasting_source(source), xxh3_128=hash_of(weights)) if spec.adapter else None
    if spec.adapter:
        add_adapters(model, spec.adapter, seed=recipe.run.seed)
    model.checkpoint_activations(recipe.run.activation_checkpointing)
    if isinstance(model, DiffusersModel):
        model.residual = recipe.run.residual
    if isinstance(model, DiTDenoiser):
        model.net.residual = recipe.run.residual
        model.net.routed = routed_blocks(recipe.routing, len(model.blocks))
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # events and streams that name no device are of the current one
        choose_kernels(recipe, spec)
    if recipe.run.fp8 != "none":
        use_fp8(model, recipe.run.fp8)
    if device.type == "cpu" and onednn and not compiled:
        use_onednn(model)
    caption_step = COMPILED_CAPTION_STEP if compiled else 1
    return Learner(
        recipe=recipe,
        spec=spec,
        engine=build_engine(recipe, model, ranks, device, compiled=compiled),
        ranks=ranks,
        conditioner=Conditioner(spec, null_caption, source_sizes, caption_step, null_pooled),
        device=device,
        autocast_dtype=autocast_dtype(recipe.run.precision, device),
        compiled=compiled,
        feature_specs={one.name: one.spec for one in store.features if one.name in recipe.align} if store else {},
        frozen=frozen,
        origin=origin,
    )
