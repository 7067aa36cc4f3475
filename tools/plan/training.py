"""``leandit plan train``: memory, microbatch and time of a training on each GPU. Nothing is allocated or computed.

The memory of a step is traced from the real model (``step_memory.py``); a strategy holds shares of it
(``strategies.py``). What CUDA adds are constants from documentation and code: none of them was measured.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ...datasets.errors import RecipeError
from ...datasets.units import readable_size, readable_time
from ...train.metrics.flops import shortened
from ...train.metrics.gpus import GPUS, Gpu, gpu_by_name
from ...train.metrics.reader import read_metrics
from ...train.weights.folders import METRICS
from .memory_tracker import ACTIVATIONS, EMA, GRADIENTS, OPTIMIZER, PARAMETERS
from .scaling import LAUNCH_SECONDS, NETWORK_GBIT, Cluster, step_time
from .scaling_table import recipe_strategy, render_scaling, scaling, step_work
from .step_memory import StepMemory, step_memory
from .strategies import Strategy, keeps_on_host, strategies, zero_section
from .workload import TrainingWorkload

MIB, GIB = 2**20, 2**30
CONTEXT_BYTES = 600 * MIB  # a guess: a CUDA 12 context with cuBLAS, cuDNN and NCCL; not seen by the allocator
CUBLAS_BYTES = 2 * 32 * MIB  # for the forward's and the backward's thread; 32 MiB is torch's default on Hopper
UNUSABLE = 0.04  # a guess: share of a GPU lost to fragmentation in the caching allocator


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
    precision = recipe.run.precision
    chosen = find_gpu(gpu, precision)
    traces, batch = _Traces(workload), recipe.run.global_batch
    planner = _Planner(workload, num_gpus, -(-batch // num_gpus), traces)
    images = images or recipe.run.steps * batch
    measured = measured_mfu(run) if run else None
    rows = [planner.gpu_row(known, images, measured, network_gbit) for known in GPUS]
    rate = next(row["images_per_second"] for row in rows if row["gpu"] == chosen.name)
    mfu = measured or rate * workload.flops / (num_gpus * chosen.peak_flops(precision))

    def fits(ranks: int, local_batch: int) -> tuple[str, int]:
        return _Planner(workload, ranks, local_batch, traces).recipe_fit(chosen)

    return {
        "model": workload.spec.name,
        "bucket": workload.largest_bucket,
        "caption_tokens": workload.tokens,
        "parameters": traces.whole.states[PARAMETERS] // 4,
        "lora_rank": recipe.lora.rank,
        "trained_parameters": traces.whole.states[GRADIENTS] // 4,
        "checkpoint_bytes": sum(traces.whole.states[name] for name in (GRADIENTS, OPTIMIZER, EMA)),
        "flops_per_image": workload.flops,
        "precision": precision,
        "compiled": recipe.run.compile,
        "global_batch": recipe.run.global_batch,
        "gpus": num_gpus,
        "gpu": chosen.name,
        "images": images,
        "asked": _recipe_strategy(workload),
        "changes": list(changes),
        "mfu": mfu,
        "mfu_is_measured": run is not None,
        "strategies": [planner.strategy_row(chosen, *pair) for pair in planner.strategies],
        "known_gpus": rows,
        "scaling": scaling(
            step_work(workload, traces.whole, traces.launches),
            Cluster(chosen, network_gbit),
            fits,
            batch=batch,
            images=images,
            gpus=num_gpus,
            mfu=measured,
        ),
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


class _Traces:
    """The traced steps of a workload, for any number of GPUs and images."""

    def __init__(self, workload: TrainingWorkload) -> None:
        self.whole, self.split = trace_workload(workload, accumulates=False), trace_workload(workload, accumulates=True)
        self.zero_whole, self.zero_split = self.whole, self.split
        if keeps_on_host(workload.recipe):
            self.zero_whole = trace_workload(workload, accumulates=False, to_host=True)
            self.zero_split = trace_workload(workload, accumulates=True, to_host=True)

    @property
    def launches(self) -> tuple[int, int]:
        """Operations of a step with one microbatch, and of each further one: those that allocate, which is nearly all.

        Compiled or captured code has fewer.
        """
        first = len(self.whole.base)
        return first, len(self.split.base) - first


class _Planner:
    """What fits on a GPU of several.

    Args:
      local_batch: images of the rank with most images.
    """

    def __init__(self, workload: TrainingWorkload, num_gpus: int, local_batch: int, traces: _Traces) -> None:
        self.workload, self.num_gpus, self.local_batch, self.traces = workload, num_gpus, local_batch, traces
        self.read_ahead = workload.recipe.run.prefetch * workload.batch_bytes(local_batch)
        self.strategies = self._strategies()

    def _strategies(self) -> list[tuple[Strategy, Strategy]]:
        """Each strategy for a batch in one microbatch, and in several."""
        zero = zero_section(self.workload.recipe)
        at_once = strategies(self.traces.whole, self.num_gpus, zero)
        in_parts = strategies(self.traces.split, self.num_gpus, zero, accumulates=True)
        pairs = list(zip(at_once, in_parts, strict=True))
        if self.num_gpus > 1:
            return pairs[1:]  # all but "single"
        on_one_gpu = ("single", *(f"zero-{stage}, offloaded" for stage in (1, 2, 3)))
        return [pair for pair in pairs if pair[0].name in on_one_gpu]

    def fit(self, gpu: Gpu, at_once: Strategy, in_parts: Strategy) -> tuple[int, StepMemory, Strategy]:
        """Largest microbatch with the memory of its step: the whole batch if it fits, else several microbatches."""
        traces, batch = self.traces, self.local_batch
        is_zero = at_once.name.startswith("zero")
        most = min(self.workload.recipe.run.microbatch or batch, batch)
        whole, split = (traces.zero_whole, traces.zero_split) if is_zero else (traces.whole, traces.split)
        room = self._room(gpu, at_once)
        if whole.largest(room, most=most, shares=at_once.shares) == batch:
            return batch, whole, at_once
        room = self._room(gpu, in_parts)
        return split.largest(room, batch=batch, most=most, shares=in_parts.shares), split, in_parts

    def _room(self, gpu: Gpu, strategy: Strategy) -> float:
        """Bytes of a GPU that a step can allocate."""
        return gpu.memory_gib * GIB * (1 - UNUSABLE) - self._workspace(strategy)

    def _workspace(self, strategy: Strategy) -> float:
        return CONTEXT_BYTES + CUBLAS_BYTES + strategy.buffers + self.read_ahead

    def strategy_row(self, gpu: Gpu, at_once: Strategy, in_parts: Strategy) -> dict[str, Any]:
        """Memory of a strategy at its largest microbatch, or of one image if none fits."""
        microbatch, memory, strategy = self.fit(gpu, at_once, in_parts)
        peak = memory.peak(max(1, microbatch), batch=self.local_batch, shares=strategy.shares)
        workspace = self._workspace(strategy)
        return {
            "strategy": strategy.name,
            "microbatch": microbatch,
            "bytes": {**{name: round(value) for name, value in peak.items()}, "workspace": round(workspace)},
            "total": round(sum(peak.values()) + workspace),
            "host": round(strategy.host) + memory.on_host(max(1, microbatch)),
        }

    def recipe_fit(self, gpu: Gpu) -> tuple[str, int]:
        """The recipe's strategy, and its largest microbatch; 0: not even one image fits."""
        name = recipe_strategy(self.workload.recipe, self.num_gpus)
        pair = next((pair for pair in self.strategies if pair[0].name == name), self.strategies[0])
        return name, self.fit(gpu, *pair)[0]

    def gpu_row(self, gpu: Gpu, images: int, mfu: float | None, network_gbit: float) -> dict[str, Any]:
        """Largest microbatches on a GPU and its rate. A measured MFU already contains all that takes time."""
        run, is_launch_bound, rate = self.workload.recipe.run, False, 0.0
        peak_flops = gpu.peak_flops(run.precision)
        whole, sharded = (self.fit(gpu, *pair)[0] if peak_flops else None for pair in self.strategies[:2])
        if peak_flops and mfu:
            rate = peak_flops * mfu / self.workload.flops * self.num_gpus
        elif peak_flops:
            work = step_work(self.workload, self.traces.whole, self.traces.launches)
            name, microbatch = self.recipe_fit(gpu)
            cluster = Cluster(gpu, network_gbit)
            if microbatch:
                time = step_time(work, cluster, name, self.num_gpus, self.local_batch, microbatch)
                rate, is_launch_bound = run.global_batch / time.seconds, time.is_launch_bound
        return {
            "gpu": gpu.name,
            "memory_gib": gpu.memory_gib,
            "microbatch_whole": whole,
            "microbatch_sharded": sharded,
            "images_per_second": rate,
            "launch_bound": is_launch_bound,
            "seconds": images / rate if rate else None,
        }


def trace_workload(workload: TrainingWorkload, *, accumulates: bool, to_host: bool = False) -> StepMemory:
    """Memory of a step on the largest bucket, in the precision of the recipe."""
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(workload.recipe.run.precision)
    return step_memory(
        workload,
        workload.largest_bucket,
        autocast=autocast,
        accumulates=accumulates,
        check_linear=not accumulates,
        to_host=to_host,
    )


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
        f"{row['microbatch_whole']:>8}{row['microbatch_sharded']:>9}{row['images_per_second']:>10,.0f}"
        f"{readable_time(row['seconds']):>14}{' *' if row['launch_bound'] else ''}"
    )
