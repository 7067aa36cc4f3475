"""``leandit plan train``: memory, microbatch and time of a training on each GPU. Nothing is allocated or computed.

The memory of a step is traced from the real model, optimizer and strategy (``tracing.py``). What CUDA adds are
constants from documentation and code: none of them was measured.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ...datasets.errors import RecipeError
from ...datasets.units import readable_size, readable_time
from ...train.metrics.flops import shortened
from ...train.metrics.gpus import GPUS, Gpu, gpu_by_name
from ...train.metrics.reader import read_metrics
from ...train.weights.folders import METRICS
from .scaling import LAUNCH_SECONDS, NETWORK_GBIT, StepTime, StepWork, render_scaling, scaling, step_time
from .step_memory import ACTIVATIONS, EMA, GRADIENTS, OPTIMIZER, PARAMETERS, StepMemory, Traced, trace_steps
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
) -> dict[str, Any]:
    """The plan as JSON values, in bytes and seconds.

    Args:
      gpu: name of the GPU that the strategies are shown for.
      images: to train on; 0: those of the recipe's steps.
      run: gives a measured MFU.
      network_gbit: Gbit/s of each GPU between machines.
      changes: lines that list what a ds_config.json changes in the recipe.
    Raises: RecipeError: the GPU is unknown, or lacks the precision; TraceError.
    """
    recipe = workload.recipe
    precision, batch = recipe.run.precision, recipe.run.global_batch
    chosen = find_gpu(gpu, precision)
    measured = measured_mfu(run) if run else None
    images, local_batch = images or recipe.run.steps * batch, -(-batch // num_gpus)

    # Trace every strategy; all that follows is arithmetic.
    traced = trace_steps(workload, workload.largest_bucket, strategies(recipe, num_gpus), precision=precision)
    whole = traced["single"].whole.states
    work = step_work(workload, traced["single"])
    strategies_of_gpu = strategy_rows(traced, num_gpus)

    def time(gpu: Gpu, ranks: int, images: int, mfu: float | None = None) -> StepTime | None:
        name, memory = recipe_memory(recipe, traced, num_gpus, ranks)
        microbatch, _ = fit(workload, memory, gpu.memory_gib, images)
        how = {"network_gbit": network_gbit, "mfu": mfu}
        return step_time(work, gpu, name, ranks, images, microbatch, **how) if microbatch else None

    def gpu_row(gpu: Gpu) -> dict[str, Any]:
        peak, rate, step = gpu.peak_flops(precision), 0.0, None
        fits = [
            fit(workload, memory, gpu.memory_gib, local_batch)[0] for memory, _ in list(strategies_of_gpu.values())[:2]
        ]
        if peak and measured:  # it already contains all that takes time
            rate = peak * measured / workload.flops * num_gpus
        elif peak and (step := time(gpu, num_gpus, local_batch)):
            rate = batch / step.seconds
        return {
            "gpu": gpu.name,
            "memory_gib": gpu.memory_gib,
            "microbatch_whole": fits[0] if peak else None,
            "microbatch_sharded": fits[1] if peak and len(fits) > 1 else None,
            "images_per_second": rate,
            "launch_bound": bool(step and step.is_launch_bound),
            "seconds": images / rate if rate else None,
        }

    rows = [gpu_row(known) for known in GPUS]
    rate = next(row["images_per_second"] for row in rows if row["gpu"] == chosen.name)
    table = scaling(
        lambda ranks, images: time(chosen, ranks, images, measured),
        recipe_memory(recipe, traced, num_gpus, max(num_gpus, 8))[0],
        batch=batch,
        images=images,
        gpus=num_gpus,
    )
    return {
        "model": workload.spec.name,
        "bucket": workload.largest_bucket,
        "caption_tokens": workload.tokens,
        "parameters": whole[PARAMETERS] // 4,
        "lora_rank": recipe.lora.rank,
        "trained_parameters": whole[GRADIENTS] // 4,
        "checkpoint_bytes": sum(whole[name] for name in (GRADIENTS, OPTIMIZER, EMA)),
        "flops_per_image": workload.flops,
        "precision": precision,
        "compiled": recipe.run.compile,
        "global_batch": batch,
        "gpus": num_gpus,
        "gpu": chosen.name,
        "images": images,
        "asked": _recipe_strategy(workload),
        "changes": list(changes),
        "mfu": measured or rate * workload.flops / (num_gpus * chosen.peak_flops(precision)),
        "mfu_is_measured": run is not None,
        "strategies": [
            _strategy_row(workload, name, memory, host, chosen, local_batch)
            for name, (memory, host) in strategies_of_gpu.items()
        ],
        "known_gpus": rows,
        "scaling": {"gpu": chosen.name, "network_gbit": network_gbit} | table,
    }


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


def _strategy_row(
    workload: TrainingWorkload, name: str, memory: Traced, host: int, gpu: Gpu, images: int
) -> dict[str, Any]:
    """Memory of a strategy at its largest microbatch, or of one image if none fits."""
    microbatch, step = fit(workload, memory, gpu.memory_gib, images)
    peak = step.peak(max(1, microbatch), batch=images)
    sizes = {**peak, "workspace": workspace(workload, images)}
    return {
        "strategy": name,
        "microbatch": microbatch,
        "bytes": {part: round(size) for part, size in sizes.items()},
        "total": round(sum(sizes.values())),
        "host": host + step.on_host(max(1, microbatch)),
    }


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
    reported = [mfu for mfu in read_metrics(run).columns["mfu"].tolist() if mfu > 0]  # NaN: unknown
    if not reported:
        raise RecipeError(f"--run '{run}': its {METRICS} has no MFU; only runs on known GPUs report one.")
    return median(reported[len(reported) // 2 :])


def _recipe_strategy(workload: TrainingWorkload) -> str:
    section = workload.recipe.parallel
    return f"deepspeed with '{section.deepspeed_config}'" if section.deepspeed_config else section.strategy


def render(result: dict[str, Any]) -> str:
    """The plan as aligned text."""
    parts = (_render_workload, _render_strategies, _render_gpus)
    return "\n".join(line for part in parts for line in (*part(result), "")) + "\n".join(
        render_scaling(result["scaling"])
    )


def _render_workload(result: dict[str, Any]) -> list[str]:
    kind = "measured"
    if not result["mfu"]:
        kind = f"on {result['gpu']}: not one image fits; below are GPUs and strategies that have room"
    elif not result["mfu_is_measured"]:
        kind = f"on {result['gpu']}, an estimate, not measured: of published trainers; --run gives yours"
    text = f", {result['caption_tokens']} caption tokens" if result["caption_tokens"] else ""
    size = f"{shortened(result['parameters'])} parameters"
    size += f" of which {shortened(result['trained_parameters'])} train" if result["lora_rank"] else ""
    return [
        f"model       {result['model']}, {size}, {result['bucket']} px{text}",
        f"arithmetic  {result['flops_per_image'] / 1e12:.3g} TFLOP an image, {result['precision']}",
        f"batch       {result['global_batch']} images on {result['gpus']} GPUs",
        f"strategy    {result['asked']} by the recipe; below are all",
        *(f"{'':<12}{line}" for line in result["changes"]),
        f"MFU         {result['mfu']:.0%}, {kind}",
        f"checkpoint  {readable_size(result['checkpoint_bytes'])} of weights that train, optimizer and averages",
        f"memory      traced, not compiled{'; torch.compile takes less' if result['compiled'] else ''}",
    ]


def _render_strategies(result: dict[str, Any]) -> list[str]:
    lines = [
        f"GiB on each {result['gpu']}, at the largest microbatch that fits (0: none; then of one image)",
        f"{'strategy':<19}{'images':>7}{'params':>8}{'grads':>8}{'optim':>8}{'EMA':>8}{'activ.':>8}{'work':>8}"
        f"{'total':>8}{'host':>8}",
    ]
    for row in result["strategies"]:
        parts = [row["bytes"][name] for name in (PARAMETERS, GRADIENTS, OPTIMIZER, EMA, ACTIVATIONS, "workspace")]
        numbers = "".join(f"{value / GIB:>8.2f}" for value in (*parts, row["total"], row["host"]))
        lines.append(f"{row['strategy']:<19}{row['microbatch']:>7}{numbers}")
    return lines


def _render_gpus(result: dict[str, Any]) -> list[str]:
    rows = result["known_gpus"]
    lines = [
        f"largest microbatch on each GPU, and {result['images']:,} images on {result['gpus']} of them",
        f"{'GPU':<12}{'GiB':>7}{'whole':>8}{'sharded':>9}{'images/s':>10}{'time':>14}",
        *(f"{row['gpu']:<12}{row['memory_gib']:>7.1f}{_fit_columns(row)}" for row in rows),
    ]
    if any(row["launch_bound"] for row in rows):
        lines.append(
            f"*: bound by launching operations, {LAUNCH_SECONDS * 1e6:.0f} us each: a rule, not measured on a GPU. A "
            "larger batch on each GPU takes less time for an image."
        )
    if any(row["seconds"] is None for row in rows):
        lines.append(f"-: it has no {result['precision']}. Plan with the run.precision that you would train in.")
    return lines


def _fit_columns(row: Mapping[str, Any]) -> str:
    """Microbatches, images a second and time of a GPU; dashes if it lacks the precision."""
    if row["seconds"] is None:
        return f"{'-':>8}{'-':>9}{'-':>10}{'-':>14}"
    return (
        f"{row['microbatch_whole']:>8}{_number(row['microbatch_sharded']):>9}{row['images_per_second']:>10,.0f}"
        f"{readable_time(row['seconds']):>14}{' *' if row['launch_bound'] else ''}"
    )


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
