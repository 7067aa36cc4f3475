"""The train recipe: one frozen model per section, one line of meaning under each key."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ..effects import check_overrides, unread_notes
from ..errors import RecipeError
from ..recipe import Caption, Count, Positive, Section, Share, load_recipe
from .data_recipe import DataSection, SampleGuidance, SampleShift, StoreSection
from .effects import CONDITIONS
from .techniques.registry import ObjectiveSection, TechniqueSections, techniques_of

PACKAGE = "leandit.train"


def _checkpointing(value: object) -> object:
    """True and false are "blocks" and "none"."""
    return {True: "blocks", False: "none"}[value] if isinstance(value, bool) else value


class ModelSection(Section):
    """The diffusion transformer."""

    name: str = "DiT-XL/2"
    """"DiT-{Ti,S,B,L,XL}/{1,2,4,8}", "DiTDH-{S,XL}/1", "pixart-sigma", "pixart-tiny", "sana-600m", "sana-1600m",
    "sana-tiny", "sd3-medium", "sd3.5-medium", "sd3.5-large", "sd3-tiny", "flux1-dev", "flux1-schnell", "flux1-tiny",
    "flux2-klein-4b", "flux2-klein-9b", "flux2-dev", "flux2-tiny", "qwen-image", "qwen-image-tiny", "z-image",
    "z-image-tiny"."""
    init_from: str = ""
    """Weights to start from: a run, a hub id or folder in diffusers' layout, for DiT also an official file."""
    channels: Count = 0
    """Latent channels the model is built for; 0: the store's."""
    guidance: Annotated[float, Field(ge=0)] = 1.0
    """FLUX.1-dev, FLUX.2-dev: the guidance scale that these distilled models take as an input."""
    reference: str = ""
    """FLUX.1, FLUX.2, Qwen-Image: companion to edit; the model sees its latents beside the noisy ones."""
    num_classes: Count = 0
    """Classes the label table is built for; 0: the store's."""
    qk_norm: bool = False
    """DiT: RMS norm of queries and keys."""
    norm: Literal["layer", "rms"] = "layer"
    """DiT: norm of tokens; "layer" as published."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """DiT: feed-forward; "gelu" as published."""
    positions: Literal["sincos", "rope", "both"] = "sincos"
    """DiT: positions; "sincos": added once, as published; "rope": rotate queries and keys, along both axes; "both"."""
    time: Literal["steps", "share", "to_data"] = "steps"
    """DiT: the time it embeds; "steps": 0 to 1000, as published. "share": 0 to 1 (REPA). "to_data": 1 at the data, 0 at
    the noise, and the model predicts the velocity towards the data (SiT, LightningDiT); objective and sampler do not
    change."""
    value_residual: bool = False
    """DiT: each block mixes the values of its attention with those of the first block, by a learned share."""


class LoraSection(Section):
    """Low-rank adapters (LoRA) of a model of diffusers: they train, the weights of model.init_from are frozen."""

    rank: Count = 0
    """Rank of the adapters; 0: none, all weights are trained."""
    alpha: Annotated[float, Field(ge=0)] = 0.0
    """The adapters' output is scaled by alpha / rank; 0: alpha = rank."""
    targets: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Name suffixes of the linear layers that get adapters; empty: queries, keys, values, outputs of attention."""
    frozen: Literal["float32", "bf16", "int8"] = "float32"
    """How the blocks' frozen linear layers are stored. "bf16": half the memory and the same results, where matmuls are
    in bf16. "int8": a quarter of the memory, rounded with a scale for each row, by torchao; not with FSDP or
    DeepSpeed."""


class ConditioningSection(Section):
    """What the model is conditioned on, and classifier-free guidance."""

    kind: Literal["auto", "label", "caption"] = "auto"
    """What a DiT is conditioned on; "auto": labels. Other models always take captions."""
    texts: list[str] = Field(default=[])
    """The store's text encoders that SD3 (CLIP-L, CLIP-G, T5), FLUX.1 (CLIP-L, T5) and FLUX.2 (one) read, by name; ""
    is [text]. Empty: all, in the order of the store's recipe."""
    drop: Share = 0.1
    """Share of labels or captions replaced by null; a caption of several text encoders is replaced in all of them."""


class LatentSection(Section):
    """The latents as the model sees them."""

    normalise: Literal["encoder", "store", "none"] = "encoder"
    """"encoder": shift and scale of the VAE. "store": mean 0 and standard deviation 1 in each channel, by the
    statistics of all stores of the run, which it keeps (LightningDiT). "none": raw latents."""


class OptimizerSection(Section):
    """The optimizer."""

    name: Literal["adamw", "adamw8bit", "came", "muon"] = "adamw"
    """"adamw"; "adamw8bit": its moments in 8 bits; "came": as in Sana; "muon": for hidden matrices, else AdamW."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate."""
    lr_base_batch: Count = 0
    """Batch size that lr is meant for: lr is multiplied by sqrt(run.global_batch / lr_base_batch); 0: no scaling."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=3)] = Field(
        default=[0.9, 0.999, 0.9999]
    )
    """Decay of the first and second moment; only "came" reads the third, for its confidence."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to AdamW's denominator; "came" has its own."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Momentum of "muon"."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    decay_all: bool = True
    """All parameters decay, as in DiT and PixArt; false: only weights of linear layers and convolutions."""


class ScheduleSection(Section):
    """The learning rate over the steps."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or a linear or half-cosine decay until the last step."""
    warmup_steps: Count = 0
    """Steps of linear warm-up."""
    final_lr_share: Share = 0.0
    """Where "linear" and "cosine" end, as a share of the peak."""


class EmaSection(Section):
    """The averaged weights."""

    kind: Literal["exponential", "power"] = "exponential"
    """"exponential": run.ema_decay at each step. "power": lengthens with the run; choose the length later."""
    warmup: bool = True
    """For "exponential": the decay of update n is at most (1 + n) / (10 + n), so that a short run averages
    about its last tenth; false: run.ema_decay from the first update on, as in most papers."""
    lengths: Annotated[list[Annotated[float, Field(gt=0, lt=0.28)]], Field(min_length=1)] = Field(default=[0.05, 0.10])
    """For "power": an average for each, its standard deviation as a share of the run; snapshots hold the first."""
    keep_every: Count = 0
    """For "power": steps between stored averages, for `leandit average`; all are kept. 0: with each checkpoint."""


class RunSection(Section):
    """The run."""

    steps: Positive = 400_000
    """Optimizer updates."""
    global_batch: Positive = 256
    """Images per update."""
    microbatch: Count = 0
    """Images per forward on each rank; 0: the most that fit."""
    seed: Count = 0
    """Seed of the weights, the order, the noise and every draw."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "bf16"
    """Arithmetic of forward and backward; weights and optimizer stay float32. A device without bf16 uses fp32."""
    residual: Literal["float32", "bf16"] = "float32"
    """Residual stream under bf16: "float32"; "bf16", as in diffusers' scripts: less memory, larger rounding errors."""
    fp8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """Linear layers of blocks in FP8 (Ada, Hopper or newer), scaled by torchao; "tensorwise": per matrix; "rowwise":
    per row; "rowwise_with_gw_hp": the same, with weight gradients in bf16."""
    compile: bool = True
    """torch.compile per block, on a GPU; not with DeepSpeed's ZeRO-3."""
    activation_checkpointing: Annotated[Literal["none", "blocks", "selective"], BeforeValidator(_checkpointing)] = (
        "none"
    )
    """Recompute in the backward pass to save memory: "blocks" (or true): all of each block. "selective": only what is
    cheap to recompute, not matrix products."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest gradient norm; 0: no clipping."""
    skip_nonfinite: Count = 0
    """Most updates of the run that may be skipped because the loss or the gradient is not finite; one more ends it. Not
    with fp16, whose loss scale skips them."""
    ema_decay: Share = 0.9999
    """Decay of the averaged weights per step, for ema.kind = "exponential"."""
    checkpoint_every: Positive = 5000
    """Steps between checkpoints; the last step and an interruption save one too."""
    keep_checkpoints: Positive = 2
    """Number of newest checkpoints to keep."""
    keep_every: Count = 0
    """Also keep checkpoints at multiples of this step; 0: none."""
    async_checkpoint: bool = True
    """Write checkpoints while the next steps run; needs memory for a copy of all state."""
    prefetch: Count = 2
    """Batches read ahead, each by one thread; 0 reads them on demand."""
    remote_gib: Annotated[float, Field(gt=0)] = 64.0
    """Space in the local folder for the shards of a store at a URL, in GiB."""
    remote_folder: str = ""
    """That local folder; empty: one per URL in ~/.cache/leandit. A store at a path is copied there too: name one
    in /dev/shm to train from memory."""
    log_every: Positive = 10
    """Steps between lines of metrics.jsonl."""
    evaluate_every: Count = 2000
    """Steps between held-out losses (data.holdout); 0: none. The last step has one too."""
    evaluate_images: Positive = 64
    """Largest number of held-out records to evaluate; always the same ones."""
    evaluate_times: Literal["all", "mlperf"] = "all"
    """"all": each record at eight times, the midpoints of eighths. "mlperf": each at one of 0, 1/8 ... 7/8 in turn, as
    MLPerf Training measures FLUX.1."""
    sample_every: Count = 0
    """Steps between grids (samples/step-N.png) sampled with the averaged weights; 0: none. The last step has one."""
    sample_count: Positive = 16
    """Images of a grid: classes, or captions of held-out records, spread evenly; always the same ones."""
    sample_captions: list[Caption] = Field(default=[])
    """Captions for the grid instead of held-out ones: captions of the store, or your own prompts that captions.sample
    of the precompute recipe has added to it."""
    sample_steps: Positive = 20
    """Sampler steps of the grid."""
    sample_guidance: SampleGuidance = "auto"
    """Classifier-free guidance scale of the grid; 1: none. "auto": 4, or 1 for a model with guidance as an input
    (FLUX.1 dev, FLUX.2 dev)."""
    sample_shift: SampleShift = "auto"
    """Shift of the times of grids, `leandit sample` and exports, for "flow". "auto": by the scheduler of
    model.init_from where it has one, else objective.shift. "resolution": as in objective.shift."""
    wandb: str = ""
    """Weights & Biases project to log to as well; empty: none."""
    revision: Count = 0
    """Revision of --store; 0: the newest when the run starts, which the run then keeps."""
    allow_incomplete: bool = False
    """Train on a store whose precompute has not finished."""


class ParallelSection(Section):
    """How many processes share the work."""

    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp", "deepspeed"] = "auto"
    """"auto": "single" with one rank, "ddp" with more, "deepspeed" where its config is given. "fsdp" shards parameters,
    gradients, optimizer and averages over all ranks, "hsdp" within groups of ranks, each with a full copy."""
    shard: Literal["full", "gradient"] = "full"
    """For "fsdp" and "hsdp": "full" gathers each block when it is used (ZeRO-3); "gradient" keeps gathered parameters
    from forward to backward, with more memory and less traffic (ZeRO-2)."""
    replicas: Count = 0
    """For "hsdp": groups of ranks, each with the whole model; 0: one per machine."""
    cpu_offload: bool = False
    """For "fsdp" and "hsdp": parameters, gradients, optimizer and averages are kept and updated in host memory."""
    deepspeed_config: str = ""
    """Path of a ds_config.json for DeepSpeed's engine; its settings override the recipe."""


class _ModelRecipe(Section):
    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    objective: ObjectiveSection = ObjectiveSection()
    conditioning: ConditioningSection = ConditioningSection()
    latent: LatentSection = LatentSection()


class TrainRecipe(TechniqueSections, _ModelRecipe):
    """A training run, fully described, with the sections of all techniques; the command names store and run."""

    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    ema: EmaSection = EmaSection()
    data: DataSection = DataSection()
    run: RunSection = RunSection()
    parallel: ParallelSection = ParallelSection()

    @property
    def peak_lr(self) -> float:
        """The learning rate that the schedule starts from, scaled to the batch as PixArt's and Sana's ``auto_lr``."""
        base = self.optimizer.lr_base_batch
        return self.optimizer.lr * (math.sqrt(self.run.global_batch / base) if base else 1.0)

    @property
    def takes_captions(self) -> bool:
        """The model is conditioned on captions, not on labels; only a DiT can take labels."""
        return not self.model.name.startswith(("DiT-", "DiTDH-")) or self.conditioning.kind == "caption"

    def store_sections(self, store: Path | str | None) -> list[StoreSection]:
        """The stores to train on: those that the recipe names, else the one of ``--store``.

        Raises: RecipeError: both, or neither.
        """
        mixture = self.data.mixture
        if mixture and store is not None:
            raise RecipeError(
                f"--store '{store}': the recipe names its own, '{mixture[0].store}' first. Leave out --store, or "
                "data.mixture."
            )
        if store is not None:
            return [StoreSection(store=str(store), revision=self.run.revision, **self.data.of_records)]
        if not mixture:
            raise RecipeError("no store to train on: expected --store PATH, or data.mixture in the recipe.")
        return mixture

    @model_serializer(mode="wrap")
    def _without_empty_tables(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out [align] where it is empty, as a recipe file does."""
        return {key: value for key, value in serialise(self).items() if value or key != "align"}

    @model_validator(mode="after")
    def _sections_fit(self) -> TrainRecipe:
        for contradiction in _contradictions(self):
            raise ValueError(contradiction)
        return self


def _contradictions(recipe: TrainRecipe) -> Iterator[str]:
    """Where the sections of a recipe contradict each other, or themselves."""
    if recipe.run.revision and recipe.data.mixture:
        yield "run.revision applies to --store; a store that the recipe names has a key revision of its own"
    has_null = recipe.conditioning.drop > 0 or recipe.lora.rank > 0  # adapters: as far as their base has learned it
    if recipe.run.sample_every and recipe.run.sample_guidance != 1 and not has_null:
        yield "run.sample_guidance needs conditioning.drop above 0; without it set it to 1"
    if recipe.run.skip_nonfinite and recipe.run.precision == "fp16":
        yield "run.skip_nonfinite: with run.precision fp16 the loss scale skips updates; leave it 0, or use bf16"
    if recipe.run.sample_shift != "auto" and recipe.objective.kind != "flow":
        yield 'run.sample_shift is for objective.kind = "flow"; leave it out'
    if recipe.run.sample_captions and not recipe.takes_captions:
        yield f"run.sample_captions: model '{recipe.model.name}' takes labels; leave them out"
    if recipe.optimizer.lr_base_batch and recipe.data.batch_tokens:
        yield "optimizer.lr_base_batch scales by run.global_batch, which data.batch_tokens replaces"
    if not recipe.lora.rank and (recipe.lora.alpha or recipe.lora.targets):
        yield "lora: alpha and targets apply to adapters; set rank above 0"
    if recipe.optimizer.name == "came" and len(recipe.optimizer.betas) != 3:
        yield 'optimizer.betas: "came" needs three, such as [0.9, 0.999, 0.9999]'
    if len({f"{length:g}" for length in recipe.ema.lengths}) < len(recipe.ema.lengths):
        yield "ema.lengths: two are the same"
    for technique in techniques_of(recipe):
        yield from technique.contradictions(recipe)
        if technique.compares_images and recipe.run.global_batch == 1:
            yield f"{technique.key} compares the images of a global batch: run.global_batch must be at least 2"


def load(name: str, overrides: list[str]) -> TrainRecipe:
    """Load a train recipe by name or path.

    Raises: RecipeError: as ``load_recipe``; or an override sets a key that has no effect.
    """
    recipe = load_recipe(name, TrainRecipe, package=PACKAGE, overrides=overrides)
    check_overrides(recipe, CONDITIONS, overrides)
    return recipe


def notes(recipe: TrainRecipe) -> list[str]:
    """What to say of keys of a recipe file that its other settings leave without effect."""
    return unread_notes(recipe, CONDITIONS)
