"""A run: a model with its optimizer, its averages, its data, and everything else that a step reads or changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...datasets.batches.batch import Batch
from ...datasets.batches.stream import BatchStream
from ...datasets.format.schema import EncoderIdentity, FeatureSpec, LatentSpec, LatentStatistics, StoreSpec
from ...datasets.revisions.local import encoder_section, vae_of
from ...datasets.store import LatentStore
from ...errors import RecipeError, RunError
from ..config import TrainRecipe
from ..models.blocks import checkpoint_blocks, compile_blocks
from ..models.build import build_model, patch_of
from ..models.conditioning import NO_EXTRAS, Conditioner, Conditioning, Extras, Microbatch, ModelOutput, null_length
from ..models.diffusers.adapters import add_adapters, narrow_frozen
from ..models.dit import DiT
from ..models.spec import ModelSpec
from ..objectives.losses import noised
from ..optim.precision import autocast_dtype, check_fp8, set_precision, use_fp8
from ..parallel.deepspeed_config import may_compile
from ..parallel.deepspeed_engine import DeepSpeedEngine
from ..parallel.engine import SHARDED, Engine, build_engine, first_device
from ..parallel.ranks import ALONE, Ranks, choose_strategy, from_first
from ..sampling.guided import guidance_scale
from ..techniques.registry import features_of, routed_blocks, techniques_of
from ..techniques.technique import Technique
from ..weights.folders import knows_null
from ..weights.init_from import FrozenWeights, hash_of, initial_weights
from ..weights.sources import lasting_source, read_snapshot, source_warnings
from .data import buckets_of_stores, build_stream, null_captions, stored_null
from .fit import model_for_stores
from .manifest import StoreRead


@dataclass(kw_only=True)
class Run:
    """Everything that a step reads or changes, and what the loop saves.

    Args:
      techniques: that the recipe uses.
      autocast_dtype: of the model's forward and backward; None: float32.
      step, num_images: made and seen so far.
      num_nonfinite: updates so far that were skipped because the loss or the gradient was not finite.
      microbatches: most images of a forward, by bucket where not all of a rank's fit, as tried on a GPU.
      tried: images of the largest trial with the optimizer's state, by bucket.
      compiled: the blocks are.
      feature_specs: of the image features that the techniques read, by name.
      frozen: the weights that adapters belong to.
      origin: description of the first weights.
      reads: the stores as ``run.json`` records them, in the same order.
      stores: of the recipe, in order; none in a measurement on synthetic batches, which has no batches either.
      stream: reads the batches of this rank.
      extra: what a snapshot stores beside its tensors.
      changed: settings that this start has changed by ``--continue-with``: by key, the old and the new value.
    """

    recipe: TrainRecipe
    spec: ModelSpec
    engine: Engine
    ranks: Ranks
    conditioner: Conditioner
    device: torch.device
    autocast_dtype: torch.dtype | None
    techniques: list[Technique]
    step: int = 0
    num_images: int = 0
    num_nonfinite: int = 0
    microbatches: dict[str, int] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)
    compiled: bool = False
    feature_specs: Mapping[str, FeatureSpec] = field(default_factory=dict)
    frozen: FrozenWeights | None = None
    origin: str = ""
    stores: list[LatentStore] = field(default_factory=list)
    reads: list[StoreRead] = field(default_factory=list)
    stream: BatchStream | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        recipe: TrainRecipe,
        stores: Sequence[LatentStore],
        device: torch.device,
        warn: Callable[[str], None],
        ranks: Ranks = ALONE,
        *,
        statistics: LatentStatistics | None = None,
        learned: ModelSpec | None = None,
    ) -> Run:
        """A run on stores, at step 0; nothing is written. ``opening.open_run`` opens it at its newest checkpoint.

        Args:
          stores: those that the recipe names, in order, else the only one.
          warn: called with each part of the stores that does not train.
          ranks: of this process; ``ranks.connected`` has connected it.
          statistics: of the latents, as the run began; None for a new run.
          learned: the model of a run that has a checkpoint, which holds all weights: those of ``model.init_from`` are
            not read, but where adapters train on them.
        Raises: RecipeError, StoreError, RunError: recipe and stores do not fit.
        """
        source = recipe.model.init_from
        if recipe.lora.rank and not source:
            raise RecipeError(
                f"lora.rank {recipe.lora.rank}: adapters need weights that they adapt. Name them with model.init_from: "
                "a run, or a hub id or folder in diffusers' layout."
            )
        spec, store = model_for_stores(recipe, stores, learned)
        is_pretrained = bool(source) and (learned is None or spec.adapter is not None)
        stream = build_stream(recipe, stores, spec, device, warn, ranks, statistics)
        latent = stream.reader.latent_specs[0]
        if is_pretrained:
            for warning in source_warnings(source, spec, store.spec.classes or [], latent):
                warn(warning)
        check_null(recipe, spec, store)
        nulls = null_captions(spec, store.spec, lambda name: stored_null(store, name))
        run = build_run(
            recipe,
            spec,
            device,
            nulls=nulls,
            ranks=ranks,
            store=store.spec,
            compiled=recipe.run.compile and device.type == "cuda",
            pretrained=is_pretrained,
        )
        run.extra = snapshot_state(
            recipe,
            store.spec,
            spec,
            latent=latent,
            place=store.path,
            buckets=buckets_of_stores(stores),
            root_hashes=[each.root_hash for each in stores],
            base_knows_null=adapts_a_null(recipe),
        )
        if run.frozen:
            run.extra["frozen"] = run.frozen.model_dump()
        run.stores = list(stores)
        run.stream = stream
        return run

    @property
    def loader(self) -> BatchStream:
        """The batches of this rank."""
        assert self.stream is not None, "a run on synthetic batches has no loader"
        return self.stream

    def token_grid(self, latents: Tensor) -> tuple[int, int]:
        """Rows and columns of the model's tokens for latents (..., H, W)."""
        patch = patch_of(self.spec)
        return latents.shape[-2] // patch, latents.shape[-1] // patch

    def read_targets(self, batch: Batch, grid: tuple[int, int], *, trains: bool) -> dict[str, Tensor]:
        """What techniques read of a batch; not ``trains``: only what the model needs in every forward."""
        targets = dict[str, Tensor]()
        for technique in self.techniques:
            targets |= technique.read(batch, grid, self.feature_specs, trains=trains)
        return targets

    def conditioning(self, batch: Batch) -> Conditioning:
        """What the model reads of a batch beside its latents, nothing dropped."""
        conditioning = self.conditioner(batch.labels, batch.texts, widen=self.autocast_dtype is None)
        name = self.spec.reference
        return conditioning._replace(reference=batch.companions[name]) if name else conditioning

    def inputs(self, images: Microbatch) -> Extras:
        """What the model reads in every forward beside latents, times and conditioning."""
        extras = NO_EXTRAS
        for technique in self.techniques:
            extras = technique.inputs(extras, images)
        return extras

    def predict(self, images: Microbatch, extras: Extras) -> ModelOutput:
        """The model's output for images at their times, in the precision of the run; ``output`` is float32."""
        noisy, time = noised(self.recipe.objective, images.latents, images.noise, images.times)
        more = () if extras is NO_EXTRAS else (extras,)
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            output: Tensor | ModelOutput = self.engine.forward(noisy, time, images.conditioning, *more)
        return ModelOutput(output.float()) if isinstance(output, Tensor) else output._replace(output=output[0].float())


def adapts_a_null(recipe: TrainRecipe) -> bool:
    """Whether adapters train on weights that have learned the null condition: published ones, or a run's that did."""
    if not recipe.lora.rank:
        return False
    snapshot = read_snapshot(recipe.model.init_from)
    return snapshot is None or knows_null(snapshot.state)


def check_null(recipe: TrainRecipe, spec: ModelSpec, store: LatentStore) -> None:
    """Check that there is a null condition for all that needs it: dropped captions, and grids with guidance.

    Raises: RecipeError: the model has not learned it; RunError: the store does not say how long it is.
    """
    drops = recipe.conditioning.drop > 0
    guidance = guidance_scale(spec, recipe.run.sample_guidance)
    guides = recipe.run.sample_every > 0 and guidance != 1
    if guides and not drops and not adapts_a_null(recipe):
        raise RecipeError(
            f"run.sample_guidance {guidance:g}: the weights of model.init_from "
            f"'{recipe.model.init_from}' were trained with conditioning.drop = 0, so they have not learned the null "
            "condition that guidance needs. Set it to 1, or conditioning.drop above 0."
        )
    reads_one_text = spec.takes_text and not spec.texts
    if (drops or guides) and reads_one_text and not null_length(spec, store.spec.text):
        raise RunError(
            f"store '{store.path}': it does not say how many tokens its null caption has, of which model "
            f"'{spec.name}' reads no padding, because an earlier release made it. Precompute it into another folder, "
            "or train without it: conditioning.drop = 0, run.sample_guidance = 1."
        )


def build_run(
    recipe: TrainRecipe,
    spec: ModelSpec,
    device: torch.device,
    *,
    nulls: tuple[Tensor | None, Tensor | None],
    ranks: Ranks = ALONE,
    store: StoreSpec | None = None,
    compiled: bool = False,
    pretrained: bool = False,
) -> Run:
    """A run without stores: model, optimizer and averages, for a step on any batch.

    Args:
      nulls: the empty caption, as ``null_captions`` gives it.
      ranks: of this process; ``ranks.connected`` has connected it.
      store: whose image features the techniques read.
      compiled: the blocks go through torch.compile.
      pretrained: load the weights of ``model.init_from``.
    Raises: RecipeError, RunError: something does not fit.
    """
    strategy, techniques = choose_strategy(recipe.parallel, ranks), techniques_of(recipe)
    check_fp8(recipe, device, strategy, compiled=compiled)
    compiled = compiled and may_compile(recipe.parallel)
    with first_device(strategy, ranks):
        model = build_model(spec.plain, seed=recipe.run.seed)
    frozen, origin = None, "new weights"
    if pretrained and (source := recipe.model.init_from):

        def load() -> tuple[FrozenWeights | None, str]:
            weights, origin = initial_weights(source, model, spec)
            model.load_state_dict(weights)
            hashed = FrozenWeights(source=lasting_source(source), xxh3_128=hash_of(weights)) if spec.adapter else None
            return hashed, origin

        frozen, origin = from_first(ranks, load) if strategy in SHARDED else load()
    if spec.adapter:
        add_adapters(model, spec.adapter, seed=recipe.run.seed)
        products = autocast_dtype(recipe.run.precision, device)
        narrow_frozen(model.blocks, recipe.lora.frozen, products, sharded=strategy in (*SHARDED, "deepspeed"))
    checkpoint_blocks(model.blocks, recipe.run.activation_checkpointing)
    model.residual = recipe.run.residual
    if isinstance(model, DiT):
        model.routed = routed_blocks(techniques, len(model.blocks))
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # events and streams that name no device are of the current one
        set_precision(recipe, spec)
    if recipe.run.fp8 != "none":
        use_fp8(model, recipe.run.fp8)
    if compiled:
        compile_blocks(model.blocks)
    if strategy == "deepspeed":
        engine = DeepSpeedEngine(recipe, model.to(device), ranks, device)
    else:
        engine = build_engine(recipe, model, ranks, device)
    names, stored = features_of(recipe), store.features if store else ()
    null_caption, null_pooled = (part if part is None else part.to(device) for part in nulls)
    return Run(
        recipe=recipe,
        spec=spec,
        engine=engine,
        ranks=ranks,
        conditioner=Conditioner(spec, null_caption, null_pooled),
        device=device,
        autocast_dtype=autocast_dtype(recipe.run.precision, device),
        techniques=techniques,
        compiled=compiled,
        feature_specs={feature.name: feature.spec for feature in stored if feature.name in names},
        frozen=frozen,
        origin=origin,
    )


def snapshot_state(
    recipe: TrainRecipe,
    store: StoreSpec,
    spec: ModelSpec,
    *,
    latent: LatentSpec,
    place: Path,
    buckets: Mapping[str, int],
    root_hashes: Sequence[str | None],
    base_knows_null: bool = False,
) -> dict[str, Any]:
    """What a snapshot stores beside its tensors: all that sampling and export need of recipe and store.

    Args:
      latent: of the store, with the normalisation of the recipe.
      place: folder of the store, which relative paths of encoders start from.
      buckets: that train, with their number of records.
      root_hashes: of all stores.
      base_knows_null: frozen weights, or earlier steps of the run, have learned the null condition, whatever it drops.
    """
    encoder = store.text_encoder

    def text_encoder(name: str, identity: EncoderIdentity) -> dict[str, Any]:
        section = encoder_section(store, f"text.{name}" if name else "text", place)
        return {"model": section, "weights_sha256": identity.weights_sha256}

    read = {one.name: text_encoder(one.name, store.text_encoder_of(one.name).encoder) for one in spec.texts}
    return {
        "spec": spec.model_dump(),
        "objective": recipe.objective.model_dump(),
        "sample_shift": recipe.run.sample_shift,
        "drop": recipe.conditioning.drop,
        "base_knows_null": base_knows_null,
        "latent": latent.model_dump(),
        "resolution_px": store.images.resolution_px,
        "text": store.text and store.text.model_dump(),
        "vae": vae_of(store, place),
        "text_encoder": encoder and text_encoder("", encoder),
        "texts": read,
        "classes": store.classes,
        "class_names": store.class_names,
        "buckets": dict(buckets),
        "root_hashes": list(root_hashes),
    }
