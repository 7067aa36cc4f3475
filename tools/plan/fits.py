"""``leandit plan train --fits GIB``: which models and methods fit a GPU of a size, and how fast, in one table."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from ...datasets.errors import RecipeError, RunError
from ...datasets.recipe import shipped_recipes
from ...train.config import PACKAGE, TrainRecipe, load
from ...train.metrics.gpus import GPUS, Gpu
from ..terminal.text import aligned
from .scaling import step_time
from .step_memory import MAX_PROCESSES, Strategy, trace_steps
from .strategies import SINGLE, strategy_rows
from .training import GIB, find_gpu, fit, step_work, workspace
from .workload import TrainingWorkload, workload_at_resolution, workload_of_stores

RESOLUTION = re.compile(r"-(\d{3,4})(?:-|$)")  # in the name of a recipe
NOMINAL = 0.87, 1.02  # memory that a GPU has free, of what it is sold with
LORA_RANK = 16
ZERO = Strategy("zero-2", zero={"stage": 2})


def fits(
    recipe: str | None,
    overrides: Sequence[str],
    *,
    store: str | None,
    resolution: int | None,
    gib: float,
    gpu: str | None,
) -> dict[str, Any]:
    """What fits, as JSON values, in bytes.

    Args:
      recipe: shown with its variants; None: every shipped recipe as it is, whose name has a resolution.
      store: to train on; without it at a resolution.
      resolution: of all; None: as the recipe's name says.
      gib: memory of the GPU, as it is sold.
      gpu: whose rate is shown; None: the fastest known of that size.
    Raises: RecipeError: the GPU is unknown, or the recipe's resolution; TraceError.
    """
    chosen = find_gpu(gpu, "fp32") if gpu else fastest_gpu(gib)
    room = min(gib, chosen.memory_gib) if chosen else gib
    if recipe is None:
        cases = [(name, []) for name in shipped_recipes(PACKAGE) if resolution or RESOLUTION.search(name)]
    else:
        cases = [(recipe, changes) for changes in variants()]

    def rows(case: tuple[str, list[str]]) -> list[dict[str, Any]]:
        name, changes = case
        try:
            workload = _workload(name, load(name, [*overrides, *changes]), store, resolution)
        except (RecipeError, RunError):
            if not any("lora" in change for change in changes):
                raise
            return []  # adapters are not for every model
        return _rows(name, workload, chosen, room, offloads=recipe is not None)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_PROCESSES)) as pool:
        table = [row for part in pool.map(rows, cases) for row in part]
    return {"gib": gib, "room_gib": room, "gpu": chosen.name if chosen else None, "rows": table}


def _workload(name: str, recipe: TrainRecipe, store: str | None, resolution: int | None) -> TrainingWorkload:
    if store:
        return workload_of_stores(recipe, store)
    named = RESOLUTION.search(name.removesuffix(".toml"))
    if not (resolution or named):
        raise RecipeError(
            "plan train --fits: the recipe's name has no resolution. Give --resolution PX or --store PATH."
        )
    return workload_at_resolution(recipe, resolution or int(named[1]))  # pyright: ignore[reportOptionalSubscript]


def variants() -> list[list[str]]:
    """Overrides of a recipe: weights that train, precision, activation checkpointing."""
    return [
        [f"run.precision={precision}", f"run.activation_checkpointing={kept}", *lora]
        for lora in ([], [f"lora.rank={LORA_RANK}"])
        for precision in ("bf16", "fp32")
        for kept in ("none", "selective", "blocks")
    ]


def fastest_gpu(gib: float) -> Gpu | None:
    """The fastest known GPU that is sold with so much memory."""
    of_size = [gpu for gpu in GPUS if NOMINAL[0] * gib <= gpu.memory_gib <= NOMINAL[1] * gib]
    return max(of_size, key=lambda gpu: (gpu.peak_flops("bf16"), gpu.memory_gib), default=None)


def _rows(name: str, workload: TrainingWorkload, gpu: Gpu | None, room_gib: float, *, offloads: bool) -> list[Any]:
    """The rows of a training: on the GPU alone, and with the optimizer on the host."""
    recipe, run = workload.recipe, workload.recipe.run
    with_zero = offloads and not recipe.lora.rank and run.precision != "fp32" and bool(find_spec("deepspeed"))
    kinds = [SINGLE, ZERO] if with_zero else [SINGLE]
    traced = trace_steps(workload, workload.largest_bucket, kinds, precision=run.precision)
    rows = []
    for method, (memory, host) in strategy_rows(traced, 1).items():
        batch = run.global_batch
        microbatch, step = fit(workload, memory, room_gib, batch)
        total = step.total(max(1, microbatch), batch=batch) + workspace(workload, batch)
        rate = None
        if gpu and microbatch and method == "single" and gpu.peak_flops(run.precision):
            work = step_work(workload, traced["single"])
            rate = batch / step_time(work, gpu, method, 1, batch, microbatch).seconds
        rows.append(
            {
                "recipe": name,
                "bucket": workload.largest_bucket,
                "weights": f"LoRA {recipe.lora.rank}" if recipe.lora.rank else "full",
                "precision": run.precision,
                "checkpointing": run.activation_checkpointing,
                "method": method,
                "fits": microbatch > 0,
                "microbatch": microbatch,
                "batch": batch,
                "total": round(total),
                "host": host,
                "images_per_second": rate,
            }
        )
    return rows


def render_fits(result: Mapping[str, Any]) -> str:
    """The table as text."""
    name = result["gpu"] or "no known GPU of this size"
    table = [["recipe", "px", "weights", "precision", "kept", "method", "fits", "images", "GiB", "host", "images/s"]]
    for row in result["rows"]:
        rate, host = row["images_per_second"], row["host"]
        table.append(
            [
                *(row[key] for key in ("recipe", "bucket", "weights", "precision", "checkpointing", "method")),
                "yes" if row["fits"] else "no",
                str(row["microbatch"] or "-"),
                f"{row['total'] / GIB:.1f}",
                f"{host / GIB:.1f}" if host else "-",
                f"{rate:,.1f}" if rate else "-",
            ]
        )
    return "\n".join(
        [
            f"one GPU of {result['gib']:g} GB, of which {result['room_gib']:.1f} GiB are free ({name})",
            *aligned(table),
            "images: the largest microbatch, with its GiB (of one image where none fits); kept: checkpointing",
            "images/s: predicted, not measured; '-': unknown, as for an optimizer on the host.",
        ]
    )
