"""``leandit plan train``: what a training takes on each GPU, before one is rented. Nothing is allocated or computed.

The memory of a step is traced from the real model (``step_memory.py``). What a strategy does to it is a share of each
category and buffers of its own, given below; ``leandit bench planner`` measures DDP, FSDP and ZeRO on two processes.
What CUDA takes beside are constants, read from documentation and code: none of them was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ...datasets.errors import RecipeError
from ...datasets.format.schema import StoreSpec
from ...datasets.store import LatentStore
from ...train.config import TrainRecipe
from ...train.metrics.flops import latent_size_of, tokens_per_image, train_flops
from ...train.metrics.gpus import GPUS, Gpu, gpu_named
from ...train.metrics.window import METRICS
from ...train.models.spec import ModelSpec
from ...train.parallel.deepspeed_config import read_config, resolve
from ...train.run.model_for_store import check_sizes, model_spec
from ..synthetic.store import noise_spec
from .memory_tracker import ACTIVATIONS, EMA, GRADIENTS, OPTIMIZER, PARAMETERS
from .step_memory import AT_UPDATE, MOST_GRADIENTS, REDUCED, StepMemory, Trace, step_memory

MIB, GIB = 2**20, 2**30
CONTEXT_BYTES = 600 * MIB  # a guess: a CUDA 12 context with cuBLAS, cuDNN and NCCL; not seen by the allocator
CUBLAS_BYTES = 2 * 32 * MIB  # for the forward's and the backward's thread; 32 MiB is torch's default on Hopper
UNUSABLE = 0.04  # a guess: share of a GPU that blocks of the caching allocator cannot hand out again
# DeepSpeed's defaults, in elements.
DEEPSPEED_ELEMENTS = {
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_max_live_parameters": 1e9,
}
GUESSED_MFU = 0.35  # an estimate, where no run says better
LAUNCH_SECONDS = 10e-6  # a rule, not measured on a GPU: what the host takes for an operation that is not compiled
GPUS_OF_A_MACHINE = 8
TOKENS, TEXT_WIDTH = 300, 4096  # of a caption where no store tells: PixArt-Sigma's
CHANNELS, CLASSES = 4, 1000  # of the latents and labels where neither recipe nor store tells: SD-VAE, ImageNet
STORED_BYTES = 2  # of a number in the store, at most: float16
WHOLE = {PARAMETERS: 1.0, GRADIENTS: 1.0, OPTIMIZER: 1.0, EMA: 1.0}


@dataclass(frozen=True)
class Work:
    """What is trained: all that a store decides.

    Args:
      store: the store's description, or one of a store that is to be made.
      buckets: records of each.
      tokens: longest caption, 0 for none.
    """

    recipe: TrainRecipe
    store: StoreSpec
    spec: ModelSpec
    buckets: Mapping[str, int]
    tokens: int

    @property
    def largest_bucket(self) -> str:
        """The bucket whose steps take most memory."""
        latent = self.store.latent
        return max(self.buckets, key=lambda bucket: tokens_per_image(self.spec, latent_size_of(bucket, latent)))

    def batch_bytes(self, images: int) -> int:
        """Bytes of a batch on the device: latents as stored and as float32, captions as stored and padded."""
        height, width = latent_size_of(self.largest_bucket, self.store.latent)
        latents = self.store.latent.channels * height * width * (STORED_BYTES + 4)
        return images * (latents + self.tokens * self.spec.caption_width * STORED_BYTES)

    @property
    def flops(self) -> float:
        """FLOPs of training on one image, the mean over the records."""
        sizes = {bucket: latent_size_of(bucket, self.store.latent) for bucket in self.buckets}
        total = sum(train_flops(self.spec, sizes[bucket], self.tokens) * n for bucket, n in self.buckets.items())
        return total / sum(self.buckets.values())


def work_on_store(recipe: TrainRecipe, path: Path | str) -> Work:
    """What the recipe trains on a store.

    Raises: StoreError, RecipeError, RunError: as training does.
    """
    store = LatentStore(path, revision=recipe.run.revision, allow_incomplete=True)
    spec = model_spec(recipe, store.spec, str(path))
    text = store.spec.text
    return Work(recipe, store.spec, spec, dict(store.buckets), text.max_tokens if text and spec.takes_text else 0)


def work_at_resolution(recipe: TrainRecipe, resolution_px: int) -> Work:
    """What the recipe trains on a store of square pictures that is still to be made."""
    bucket = f"{resolution_px}x{resolution_px}"
    channels = recipe.model.channels or CHANNELS
    classes = recipe.model.num_classes or CLASSES
    store = noise_spec({bucket: 1}, channels, classes, TOKENS, TEXT_WIDTH, 64, "none")
    images = store.images.model_copy(update={"resolution_px": resolution_px})
    store = store.model_copy(update={"images": images})
    spec = model_spec(recipe, store, "a store of this resolution")
    check_sizes(spec, store.latent, [bucket])
    return Work(recipe, store, spec, {bucket: 1}, TOKENS if spec.takes_text else 0)


@dataclass(frozen=True)
class Strategy:
    """What one GPU holds of a training, and what it needs to talk with the others.

    Args:
      shares: of each category.
      buffers: bytes for communication.
      host: bytes in the host's memory for each GPU.
    """

    name: str
    shares: Mapping[str, float]
    buffers: float
    host: float = 0.0


def strategies(
    memory: StepMemory | Trace, num_gpus: int, zero: Mapping[str, Any] | None = None, *, accumulates: bool = False
) -> list[Strategy]:
    """What each strategy makes of a step's memory.

    Sources: PyTorch's documentation of DistributedDataParallel and fully_shard; Rajbhandari et al. 2020 (ZeRO),
    figure 1; DeepSpeed's documentation of zero_optimization; and measured, as ``leandit bench planner`` shows. DDP's
    gradients are views of its buckets, which stay from step to step. Under FSDP two blocks are there in full, the one
    that computes and the next one, which comes in a buffer, beside what is in no block. DeepSpeed has float32 weights
    and gradients, in the optimizer a float32 copy of each rank's part, a bucket that is allocated whole, and at the
    update copies of its part of the gradients. ZeRO-2 holds gradients up to a bucket as they are made, and from then
    on its part of all of them; the last rank's comes first, and the figures are that rank's. ZeRO-3 gathers ahead into
    a buffer and copies from there; it lets nothing go before its limit of live parameters is reached.

    Args:
      zero: the section zero_optimization of a ds_config.json; DeepSpeed's defaults where it says nothing.
      accumulates: the step has several microbatches.
    """
    zero = zero or {}
    bucket, ahead, max_live = (4 * _elements(zero, key) for key in DEEPSPEED_ELEMENTS)  # float32
    n, m = num_gpus, min(num_gpus, GPUS_OF_A_MACHINE)
    states, block, other = memory.states, memory.block_bytes, memory.other_bytes
    params = states[PARAMETERS]
    gathered = 3 * block + other  # the block that computes, the next one, and the buffer that it comes in
    sharded = dict.fromkeys(WHOLE, 1 / n)
    in_machine = dict.fromkeys(WHOLE, 1 / m)
    on_host = dict.fromkeys(WHOLE, 0.0)
    adam = 1 / n * (1 + params / max(1, states[OPTIMIZER]))  # and a float32 copy of this rank's part of the weights
    zero1 = WHOLE | {OPTIMIZER: adam, EMA: 1 / n, AT_UPDATE: 3 / n}
    in_bucket = {MOST_GRADIENTS: min(1.0, bucket / max(1, states[GRADIENTS])), REDUCED: 1 / n}
    zero2 = zero1 | in_bucket | {AT_UPDATE: (1 if accumulates else 2) / n}
    zero3 = zero2 | {PARAMETERS: 1 / n, GRADIENTS: 0.0, AT_UPDATE: 0.0}
    live = min(params, max(max_live, 2 * block + other))
    last = params % ahead if live == params else ahead  # what was gathered last is there twice
    buffers3 = bucket + params / n + live + last  # the gradients of its part stay
    bucket *= 1 + bool(zero.get("overlap_comm"))
    earlier = states[GRADIENTS] / n * accumulates  # its part of those of the microbatches before
    off = {OPTIMIZER: 0.0, EMA: 0.0, AT_UPDATE: 0.0, REDUCED: 0.0}
    moved = (states[OPTIMIZER] + params + states[EMA]) / n
    return [
        Strategy("single", WHOLE, 0.0),
        Strategy("ddp", WHOLE | {GRADIENTS: 0.0}, states[GRADIENTS]),
        Strategy("fsdp", sharded, gathered),
        Strategy("fsdp, offloaded", on_host, gathered, sum(states.values()) / n),
        Strategy("fsdp, gradients", sharded, params + block),
        Strategy("hsdp", in_machine, gathered),
        Strategy("zero-1", zero1, bucket),
        Strategy("zero-1, offloaded", zero1 | off, bucket, moved),
        Strategy("zero-2", zero2, bucket + earlier),
        Strategy("zero-2, offloaded", zero2 | off, bucket, moved),
        Strategy("zero-3", zero3, buffers3),
        Strategy("zero-3, offloaded", zero3 | off, buffers3, moved),
    ]


def _elements(zero: Mapping[str, Any], key: str) -> float:
    """Elements that a key of zero_optimization says; the default where it is "auto" or missing.

    Raises: RecipeError: it is no number.
    """
    said = zero.get(key, "auto")
    if said == "auto":
        return DEEPSPEED_ELEMENTS[key]
    if isinstance(said, bool) or not isinstance(said, int | float) or said < 0:
        raise RecipeError(f"ds_config.json: zero_optimization.{key} is {said!r}, needed a number of elements.")
    return said


def asked_strategy(recipe: TrainRecipe) -> str:
    """What the section parallel says, in words."""
    section = recipe.parallel
    if section.deepspeed_config:
        return f"deepspeed with '{section.deepspeed_config}'"
    return section.strategy


def zero_section(recipe: TrainRecipe) -> dict[str, Any]:
    """What the recipe's ds_config.json says of ZeRO; nothing, where there is none."""
    path = recipe.parallel.deepspeed_config
    return read_config(path).get("zero_optimization", {}) if path else {}


def keeps_on_host(recipe: TrainRecipe) -> bool:
    """Whether its ds_config.json lets what goes into blocks wait in the host's memory (``cpu_checkpointing``)."""
    path = recipe.parallel.deepspeed_config
    section = read_config(path).get("activation_checkpointing") if path else None
    return bool(section and section.get("cpu_checkpointing"))


def room_of(gpu: Gpu, strategy: Strategy, read_ahead: float) -> float:
    """Bytes of a GPU for what a step allocates."""
    return gpu.memory_gib * GIB * (1 - UNUSABLE) - CONTEXT_BYTES - CUBLAS_BYTES - strategy.buffers - read_ahead


def with_ds_config(recipe: TrainRecipe, num_gpus: int) -> tuple[TrainRecipe, list[str]]:
    """The recipe with the values of its ds_config.json, where it has one, and the table of what differs.

    DeepSpeed itself is not needed, nor the GPU that trains.

    Raises: RecipeError: the file cannot be read, or contradicts itself.
    """
    if not (path := recipe.parallel.deepspeed_config):
        return recipe, []
    resolved = resolve(read_config(path), recipe, num_gpus)
    return resolved.recipe, resolved.notes


def plan(
    work: Work, *, gpu: str, num_gpus: int, images: int, run: Path | None, changes: Sequence[str] = ()
) -> dict[str, Any]:
    """Everything that the command says, as JSON values; bytes, seconds.

    Args:
      changes: what a ds_config.json has changed in the recipe, in lines.
      gpu: name of the GPU that the strategies are shown for.
      images: to be trained on; 0: those of the recipe's steps.
      run: whose measured MFU is used.
    Raises: RecipeError: an unknown GPU, or one that cannot compute so; TraceError.
    """
    chosen = gpu_named(gpu)
    if chosen is None:
        raise RecipeError(f"--gpu '{gpu}': not known. Needed one of {', '.join(known.name for known in GPUS)}.")
    recipe = work.recipe
    precision = recipe.run.precision
    if not chosen.peak_flops(precision):
        raise RecipeError(
            f"--gpu '{gpu}': it has no {precision}, so it would be trained on in another precision. Plan with "
            "--set run.precision=fp16, or fp32."
        )
    local = -(-recipe.run.global_batch // num_gpus)  # of the rank that has most
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    whole = traced(work, autocast, accumulates=False)
    split = traced(work, autocast, accumulates=True)
    many = (False, True) if keeps_on_host(recipe) else ()
    of_zero = [traced(work, autocast, accumulates=accumulates, to_host=True) for accumulates in many]
    mfu, measured = (measured_mfu(run), True) if run else (GUESSED_MFU, False)
    read_ahead = recipe.run.prefetch * work.batch_bytes(local)
    images = images or recipe.run.steps * recipe.run.global_batch

    def fit(on: Gpu, at_once: Strategy, in_parts: Strategy) -> tuple[int, StepMemory, Strategy]:
        """Largest microbatch, and the memory of its step: the batch at once where it fits, else in parts."""
        first, each = of_zero if of_zero and at_once.name.startswith("zero") else (whole, split)
        room, most = room_of(on, at_once, read_ahead), min(recipe.run.microbatch or local, local)
        if first.largest(room, most=most, shares=at_once.shares) == local:
            return local, first, at_once
        room = room_of(on, in_parts, read_ahead)
        return each.largest(room, batch=local, most=most, shares=in_parts.shares), each, in_parts

    def shown(at_once: Strategy, in_parts: Strategy) -> dict[str, Any]:
        microbatch, memory, strategy = fit(chosen, at_once, in_parts)
        peak = memory.peak(max(1, microbatch), batch=local, shares=strategy.shares)
        workspace = strategy.buffers + CONTEXT_BYTES + CUBLAS_BYTES + read_ahead
        return {
            "strategy": strategy.name,
            "microbatch": microbatch,
            "bytes": {**{name: round(value) for name, value in peak.items()}, "workspace": round(workspace)},
            "total": round(sum(peak.values()) + workspace),
            "host": round(strategy.host) + memory.on_host(max(1, microbatch)),
        }

    zero = zero_section(recipe)
    known = list(
        zip(strategies(whole, num_gpus, zero), strategies(split, num_gpus, zero, accumulates=True), strict=True)
    )
    if num_gpus == 1:  # a shard of one is all of it
        alone = ("single", *(f"zero-{stage}, offloaded" for stage in (1, 2, 3)))
        known = [pair for pair in known if pair[0].name in alone]
    else:
        known = known[1:]
    on_gpus = []
    for each in GPUS:
        peak_flops = each.peak_flops(precision)
        most = [fit(each, *pair)[0] if peak_flops else None for pair in known[:2]]
        rate = peak_flops * mfu / work.flops * num_gpus
        parts = -(-local // max(1, most[0] or 1))
        fastest = recipe.run.global_batch / launch_seconds(whole, split, parts)
        launch_bound = rate > fastest and not measured
        rate = fastest if launch_bound else rate
        on_gpus.append(
            {
                "gpu": each.name,
                "memory_gib": each.memory_gib,
                "microbatch_whole": most[0],
                "microbatch_sharded": most[1],
                "images_per_second": rate,
                "launch_bound": launch_bound,
                "seconds": images / rate if rate else None,
            }
        )
    return {
        "model": work.spec.name,
        "bucket": work.largest_bucket,
        "caption_tokens": work.tokens,
        "parameters": whole.states[PARAMETERS] // 4,
        "flops_per_image": work.flops,
        "precision": precision,
        "compiled": recipe.run.compile,
        "global_batch": recipe.run.global_batch,
        "gpus": num_gpus,
        "gpu": chosen.name,
        "images": images,
        "asked": asked_strategy(recipe),
        "changes": list(changes),
        "mfu": mfu,
        "mfu_is_measured": measured,
        "strategies": [shown(*pair) for pair in known],
        "known_gpus": on_gpus,
    }


def launch_seconds(whole: StepMemory, split: StepMemory, parts: int) -> float:
    """Least seconds of a step: what the host takes to launch its operations, however small they are.

    Each operation that allocates counts, as the trace has them; what is compiled or captured in a graph has fewer.

    Args:
      whole, split: traces of one microbatch, and of two.
      parts: microbatches of the step.
    """
    first, each = len(whole.base), len(split.base) - len(whole.base)
    return (first + (parts - 1) * each) * LAUNCH_SECONDS


def traced(work: Work, autocast: torch.dtype | None, *, accumulates: bool, to_host: bool = False) -> StepMemory:
    """The memory of a step on the largest bucket."""
    return step_memory(
        work.recipe,
        work.store,
        work.spec,
        work.largest_bucket,
        work.tokens,
        autocast=autocast,
        accumulates=accumulates,
        proves=not accumulates,
        to_host=to_host,
    )


def measured_mfu(run: Path) -> float:
    """Median MFU of a run, of the later half of its reports.

    Raises: RecipeError: the run does not tell one.
    """
    if not run.is_dir():
        raise RecipeError(f"--run '{run}': there is no such folder.")
    path = run / METRICS
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [value for line in lines if (value := json.loads(line).get("mfu"))]
    if not found:
        raise RecipeError(f"--run '{run}': its {METRICS} tells no MFU, which only a run on a known GPU has.")
    return median(found[len(found) // 2 :])


def _fit_columns(row: Mapping[str, Any]) -> str:
    """Microbatches, images a second and days of one GPU; dashes where it cannot compute so."""
    if row["seconds"] is None:
        return f"{'-':>8}{'-':>9}{'-':>10}{'-':>9}"
    return (
        f"{row['microbatch_whole']:>8}{row['microbatch_sharded']:>9}{row['images_per_second']:>10.0f}"
        f"{row['seconds'] / 86400:>9.2f}{' *' if row['launch_bound'] else ''}"
    )


def render(result: dict[str, Any]) -> str:
    """The plan as aligned text."""
    kind = "measured" if result["mfu_is_measured"] else "an estimate, not measured; --run gives a measured one"
    text = f", {result['caption_tokens']} caption tokens" if result["caption_tokens"] else ""
    lines = [
        f"model       {result['model']}, {result['parameters'] / 1e6:.1f} M parameters, {result['bucket']} px{text}",
        f"arithmetic  {result['flops_per_image'] / 1e12:.3f} TFLOP an image, {result['precision']}",
        f"batch       {result['global_batch']} images on {result['gpus']} GPUs",
        f"strategy    {result['asked']} by the recipe; below are all",
        *(f"{'':<12}{line}" for line in result["changes"]),
        f"MFU         {result['mfu']:.0%}, {kind}",
        f"memory      traced, not compiled{'; torch.compile takes less' if result['compiled'] else ''}",
        "",
        f"GiB on each {result['gpu']}, at the largest microbatch that fits (0: none; then of one image)",
        f"{'strategy':<19}{'images':>7}{'params':>8}{'grads':>8}{'optim':>8}{'EMA':>8}{'activ.':>8}{'work':>8}"
        f"{'total':>8}{'host':>8}",
    ]
    for row in result["strategies"]:
        parts = [row["bytes"][name] for name in (PARAMETERS, GRADIENTS, OPTIMIZER, EMA, ACTIVATIONS, "workspace")]
        numbers = "".join(f"{value / GIB:>8.2f}" for value in (*parts, row["total"], row["host"]))
        lines.append(f"{row['strategy']:<19}{row['microbatch']:>7}{numbers}")
    lines += ["", f"largest microbatch on each GPU, and {result['images']:,} images on {result['gpus']} of them"]
    lines.append(f"{'GPU':<12}{'GiB':>7}{'whole':>8}{'sharded':>9}{'images/s':>10}{'days':>9}")
    for row in result["known_gpus"]:
        lines.append(f"{row['gpu']:<12}{row['memory_gib']:>7.1f}" + _fit_columns(row))
    if any(row["launch_bound"] for row in result["known_gpus"]):
        lines.append(
            f"*: bound by launching operations, {LAUNCH_SECONDS * 1e6:.0f} us each: a rule, not measured on a GPU. A "
            "larger batch on each GPU takes less time for an image."
        )
    if any(row["seconds"] is None for row in result["known_gpus"]):
        lines.append(f"-: it has no {result['precision']}. Plan with the run.precision that it would be trained in.")
    return "\n".join(lines)
