"""``leandit plan train``: memory, microbatch and time of a training on each GPU. Nothing is allocated or computed.

The memory of a step is traced from the real model, optimizer and strategy (``tracing.py``). What CUDA adds are
constants from documentation and code: none of them was measured.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ...errors import RecipeError
from ...train.config import TrainRecipe
from ...train.metrics.flops import meta_model, shortened
from ...train.metrics.gpus import GPUS, Gpu, gpu_by_name
from ...train.metrics.history import read_history
from ...train.weights.folders import METRICS
from ...units import plural, readable_size, readable_time
from ..terminal.text import aligned
from .scaling import (
    GPUS_PER_MACHINE,
    LAUNCH_SECONDS,
    NETWORK_GBIT,
    StepTime,
    StepWork,
    readable_rate,
    render_scaling,
    scaling,
    step_time,
)
from .step_memory import ACTIVATIONS, EMA, GRADIENTS, OPTIMIZER, PARAMETERS, Progress, StepMemory, Traced, trace_steps
from .strategies import recipe_memory, strategies, strategy_rows
from .workload import TrainingWorkload

MIB, GIB = 2**20, 2**30
CONTEXT_BYTES = 600 * MIB  # a guess: a CUDA 12 context with cuBLAS, cuDNN and NCCL; not seen by the allocator
CUBLAS_BYTES = 2 * 32 * MIB  # for the forward's and the backward's thread; 32 MiB is torch's default on Hopper
UNUSABLE = 0.04  # a guess: share of a GPU lost to fragmentation in the caching allocator
RECOMPUTED = 4 / 3  # forward and backward with checkpointed blocks: a second forward


def plan(
    workload: TrainingWorkload,
    *,
    gpu: str,
    num_gpus: int,
    images: int,
    run: Path | None,
    network_gbit: float = NETWORK_GBIT,
    changes: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """The plan as JSON values, in bytes and seconds.

    Args:
      gpu: name of the GPU to compare the strategies on.
      images: to train on; 0: those of the recipe's steps.
      run: gives a measured MFU.
      network_gbit: Gbit/s of each GPU between machines.
      changes: lines that list what a ds_config.json changes in the recipe.
      progress: as in ``trace_steps``, which takes nearly all of the time.
    Raises: RecipeError: the GPU is unknown, or lacks the precision; TraceError.
    """
    recipe, section = workload.recipe, workload.recipe.parallel
    precision, batch = recipe.run.precision, recipe.run.global_batch
    chosen, measured = find_gpu(gpu, precision), measured_mfu(run) if run else None
    images, local_batch = images or recipe.run.steps * batch, -(-batch // num_gpus)

    # Trace every strategy; all that follows is arithmetic.
    known = strategies(recipe, num_gpus)
    traced = trace_steps(workload, workload.largest_bucket, known, precision=precision, progress=progress)
    whole, work = traced["single"].whole.states, step_work(workload, traced["single"])
    on_gpu = strategy_rows(traced, num_gpus)
    checkpoint_bytes = sum(whole[name] for name in (GRADIENTS, OPTIMIZER, EMA))

    def time(gpu: Gpu, ranks: int, images: int, mfu: float | None = None) -> StepTime | None:
        name, memory = recipe_memory(recipe, traced, num_gpus, ranks)
        microbatch, _ = fit(workload, memory, gpu.memory_gib, images)
        how = {"network_gbit": network_gbit, "mfu": mfu}
        return step_time(work, gpu, name, ranks, images, microbatch, **how) if microbatch else None

    def gpu_row(gpu: Gpu) -> dict[str, Any]:
        peak, rate, step = gpu.peak_flops(precision), 0.0, None
        if peak and measured:  # it already contains all that takes time
            rate = peak * measured / workload.flops * num_gpus
        elif peak and (step := time(gpu, num_gpus, local_batch)):
            rate = batch / step.seconds
        fits = [fit(workload, memory, gpu.memory_gib, local_batch)[0] for memory, _ in [*on_gpu.values()][:2]]
        return {
            "gpu": gpu.name,
            "memory_gib": gpu.memory_gib,
            "microbatch_whole": fits[0] if peak else None,
            "microbatch_sharded": fits[1] if peak and len(fits) > 1 else None,
            "images_per_second": rate,
            "launch_bound": bool(step and step.is_launch_bound),
            "seconds": images / rate if rate else None,
        }

    def strategy_row(name: str, memory: Traced, host: int) -> dict[str, Any]:
        """At the largest microbatch, or of one image if none fits."""
        microbatch, step = fit(workload, memory, chosen.memory_gib, local_batch)
        sizes = step.peak(max(1, microbatch), batch=local_batch) | {"workspace": workspace(workload, local_batch)}
        return {
            "strategy": name,
            "microbatch": microbatch,
            "bytes": {part: round(size) for part, size in sizes.items()},
            "total": round(sum(sizes.values())),
            "host": host,
        }

    known_gpus = {known.name: gpu_row(known) for known in GPUS}
    rate = known_gpus[chosen.name]["images_per_second"]
    name, _ = recipe_memory(recipe, traced, num_gpus, max(num_gpus, GPUS_PER_MACHINE))
    table = scaling(
        lambda ranks, images: time(chosen, ranks, images, measured), name, batch=batch, images=images, gpus=num_gpus
    )
    return {
        "model": workload.spec.name,
        "bucket": workload.largest_bucket,
        "caption_tokens": workload.tokens,
        "parameters": sum(parameter.numel() for parameter in meta_model(workload.spec).parameters()),
        "lora_rank": recipe.lora.rank,
        "lora_frozen": recipe.lora.frozen,
        "trained_parameters": whole[GRADIENTS] // 4,
        "checkpoint_bytes": checkpoint_bytes,
        "run_bytes": run_bytes(recipe, checkpoint_bytes, whole[GRADIENTS]),
        "mirror_bytes": workload.mirror_bytes,
        "flops_per_image": workload.flops,
        "precision": precision,
        "compiled": recipe.run.compile,
        "global_batch": batch,
        "gpus": num_gpus,
        "gpu": chosen.name,
        "images": images,
        "asked": f"deepspeed with '{section.deepspeed_config}'" if section.deepspeed_config else section.strategy,
        "changes": list(changes),
        "mfu": measured or rate * workload.flops / (num_gpus * chosen.peak_flops(precision)),
        "mfu_is_measured": run is not None,
        "strategies": [strategy_row(name, *held) for name, held in on_gpu.items()],
        "known_gpus": list(known_gpus.values()),
        "scaling": {"gpu": chosen.name, "network_gbit": network_gbit} | table,
    }


def run_bytes(recipe: TrainRecipe, checkpoint: int, snapshot: int) -> int:
    """Bytes of the folder of a finished run: its checkpoints, one more while it is written, and all snapshots.

    Args:
      checkpoint, snapshot: bytes of one.
    """
    run = recipe.run
    saved = -(-run.steps // run.checkpoint_every)
    kept = min(saved, run.keep_checkpoints + 1) + (run.steps // run.keep_every if run.keep_every else 0)
    return min(saved, kept) * checkpoint + saved * snapshot


def step_work(workload: TrainingWorkload, traced: Traced) -> StepWork:
    """What a step of the workload computes and holds.

    Args:
      traced: the step on one GPU.
    """
    memory, run = traced.whole, workload.recipe.run
    states = memory.states
    weights, gradients = states[PARAMETERS], states[GRADIENTS]
    narrow = 2 if run.precision in ("bf16", "fp16") else 1
    return StepWork(
        flops=workload.flops,
        weights=weights,
        gradients=gradients,
        states=sum(states.values()) - (weights - gradients),  # an update leaves frozen weights alone
        gathered=(weights - memory.outside_blocks) / narrow + memory.outside_blocks,
        precision=run.precision,
        launches=traced.launches,
        recomputed=RECOMPUTED if run.activation_checkpointing == "blocks" else 1.0,
    )


def workspace(workload: TrainingWorkload, images: int) -> float:
    """Bytes of a GPU that no step sees: the context, cuBLAS, and batches of so many images read ahead."""
    return CONTEXT_BYTES + CUBLAS_BYTES + workload.recipe.run.prefetch * workload.batch_bytes(images)


def fit(workload: TrainingWorkload, memory: Traced, gib: float, images: int) -> tuple[int, StepMemory]:
    """Largest microbatch of a rank's images on a GPU of so many GiB, 0 if none fits, and the memory of its step."""
    room = gib * GIB * (1 - UNUSABLE) - workspace(workload, images)
    return memory.fit(room, images, min(workload.recipe.run.microbatch or images, images))


def find_gpu(name: str, precision: str) -> Gpu:
    """The GPU with this name.

    Raises: RecipeError: it is unknown, or lacks the precision.
    """
    gpu = gpu_by_name(name)
    if gpu is None:
        names = {known.name.casefold(): known.name for known in GPUS}
        wanted = name.casefold()
        near = [known for known in names if wanted in known] or difflib.get_close_matches(wanted, names, n=1)
        hint = f" Did you mean '{names[near[0]]}'?" if near else ""
        raise RecipeError(f"--gpu '{name}': not known.{hint} Expected one of {', '.join(names.values())}.")
    if not gpu.peak_flops(precision):
        raise RecipeError(
            f"--gpu '{name}': it has no {precision}, so training would use another precision. Plan with "
            "--set run.precision=fp16, or fp32."
        )
    return gpu


def measured_mfu(run: Path) -> float:
    """Median MFU over the later half of a run's reports.

    Raises: RecipeError: the run has no MFU; DamageError: a line is not a report.
    """
    if not run.is_dir():
        raise RecipeError(f"--run '{run}': no such folder. Check the path.")
    reported = [mfu for mfu in read_history(run).columns["mfu"].tolist() if mfu > 0]  # NaN: unknown
    if not reported:
        raise RecipeError(f"--run '{run}': its {METRICS} has no MFU; only runs on known GPUs report one.")
    return median(reported[len(reported) // 2 :])


def render(result: dict[str, Any]) -> str:
    """The plan as text: the training, its strategies, GPUs, and more of them."""
    kind = "measured"
    if not result["mfu"]:
        narrower = result["lora_rank"] and result["lora_frozen"] == "float32"
        kind = f"none: not even one image fits on {result['gpu']}" + (
            ", try --set lora.frozen=bf16, or int8" if narrower else ""
        )
    elif not result["mfu_is_measured"]:
        kind = f"on {result['gpu']}, estimated from published trainers; --run takes a measured one"
    text = f", {result['caption_tokens']} caption tokens" if result["caption_tokens"] else ""
    size = f"{shortened(result['parameters'])} parameters"
    size += f", {shortened(result['trained_parameters'])} of them trained" if result["lora_rank"] else ""
    parts = {PARAMETERS: "params", GRADIENTS: "grads", OPTIMIZER: "optim", EMA: "EMA", ACTIVATIONS: "activ."}
    parts |= {"workspace": "work"}
    memory = [["strategy", "images", *parts.values(), "total", "host"]]
    for row in result["strategies"]:
        sizes = (*(row["bytes"][part] for part in parts), row["total"], row["host"])
        memory.append([row["strategy"], str(row["microbatch"]), *(f"{size / GIB:.2f}" for size in sizes)])
    known, gpus = result["known_gpus"], [["GPU", "GiB", "whole", "sharded", "images/s", "time"]]
    for row in known:
        cells = ["-"] * 4
        if row["seconds"] is not None:
            cells = [str(row["microbatch_whole"]), _number(row["microbatch_sharded"])]
            time = readable_time(row["seconds"]) + (" *" if row["launch_bound"] else "")
            cells += [readable_rate(row["images_per_second"]), time]
        gpus.append([row["gpu"], f"{row['memory_gib']:.1f}", *cells])
    notes, mirrored = [], result["mirror_bytes"]
    if any(row["launch_bound"] for row in known):
        notes.append(
            f"*: bound by launching operations, {LAUNCH_SECONDS * 1e6:.0f} us each, a rule of thumb. A larger batch "
            "per GPU takes less time per image."
        )
    if any(row["seconds"] is None for row in known):
        notes.append(
            f"-: not even one image fits, or the GPU has no {result['precision']}: plan with another run.precision."
        )
    return "\n".join(
        [
            f"model       {result['model']}, {size}, {result['bucket']} px{text}",
            f"arithmetic  {result['flops_per_image'] / 1e12:.3g} TFLOP per image, {result['precision']}",
            f"batch       {result['global_batch']} images on {plural(result['gpus'], 'GPU')}",
            f"strategy    {result['asked']} in the recipe; all are listed below",
            *(f"{'':<12}{line}" for line in result["changes"]),
            f"MFU         {result['mfu']:.0%}, {kind}" if result["mfu"] else f"MFU         {kind}",
            f"checkpoint  {readable_size(result['checkpoint_bytes'])} of trained weights, optimizer and averages",
            f"disk        {readable_size(result['run_bytes'])} of checkpoints and snapshots at the end"
            + (f", {readable_size(mirrored)} of shards from URLs (run.remote_gib)" if mirrored else ""),
            f"memory      traced{' without torch.compile, which takes less' if result['compiled'] else ''}",
            "",
            f"GiB on each {result['gpu']}, at the largest microbatch that fits (0: none fits, bytes are of one image)",
            *aligned(memory),
            "",
            f"largest microbatch per GPU, and time of {result['images']:,} images on {plural(result['gpus'], 'GPU')}",
            *aligned(gpus),
            *notes,
            "",
            *render_scaling(result["scaling"]),
        ]
    )


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
