"""``leandit bench planner``: the memory that the planner says, beside the memory that the real step takes.

Each configuration trains some real steps in a process of its own. On a GPU torch's allocator tells the peak; on a CPU
the profiler tells every allocation and every release, so the peak is exact there too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from ..datasets.errors import ResourceError
from ..train.config import load
from ..train.memory import trace_step
from ..train.precision import autocast_dtype
from ..train.step import train_step
from ..train.synthetic import synthetic_batch, synthetic_learner
from .bench_meters import hardware
from .planner import CUBLAS_BYTES, Work, work_at_resolution
from .progress import ProgressLine

STEPS = 3  # the first makes the optimizer's state, and is not counted
MEASURED = "leandit: measured"  # mark in the profile from which on the peak counts
CHECKPOINTED = "run.activation_checkpointing=blocks"
# Recipe, pixels, microbatch, microbatches of a step, overrides.
Case = tuple[str, int, int, int, tuple[str, ...]]
ON_CPU: tuple[Case, ...] = (
    ("dit-s-2-256", 256, 1, 1, ()),
    ("dit-s-2-256", 256, 4, 1, ()),
    ("dit-s-2-256", 256, 4, 2, ()),
    ("dit-s-2-256", 256, 16, 1, (CHECKPOINTED,)),
    ("dit-b-2-256", 256, 2, 1, ()),
    ("dit-b-2-256", 256, 2, 2, (CHECKPOINTED,)),
    ("dit-b-2-256", 256, 4, 1, ("model.name=DiT-B/4",)),
    ("demo", 256, 1, 1, ()),
    ("demo", 128, 16, 1, ("objective.kind=ddpm",)),
    ("demo", 256, 4, 2, (CHECKPOINTED,)),
    ("dit-s-2-256", 256, 4, 1, ("run.activation_checkpointing=selective",)),
    ("dit-s-2-256", 256, 2, 1, ("optimizer.name=adamw8bit",)),
    ("dit-s-2-256", 256, 2, 1, ("optimizer.name=came",)),
    ("dit-s-2-256", 256, 2, 1, ("optimizer.name=muon",)),
    ("dit-s-2-256", 256, 2, 1, ("ema.kind=power", "run.grad_clip=0")),
    ("dit-s-2-256", 256, 20, 1, ("model.name=DiT-S/4", "objective.kind=flow")),
    ("dit-s-2-256", 256, 4, 1, ("model.qk_norm=true", "model.norm=rms", "model.mlp=swiglu", "model.positions=rope")),
    ("dit-s-2-256", 256, 2, 1, ("conditioning.kind=caption",)),
    ("sana-600m-512", 512, 2, 1, ("model.name=sana-tiny",)),
)
ON_GPU: tuple[Case, ...] = (
    ("dit-s-2-256", 256, 256, 1, ()),
    ("dit-b-2-256", 256, 128, 1, ()),
    ("dit-b-2-256", 256, 128, 2, ()),
    ("dit-xl-2-256", 256, 64, 1, ()),
    ("dit-xl-2-256", 256, 64, 2, (CHECKPOINTED,)),
    ("dit-xl-2-512", 512, 16, 1, ()),
    ("pixart-sigma-512", 512, 16, 1, ()),
)


def run(device: torch.device, overrides: list[str], cases: tuple[Case, ...], progress: ProgressLine) -> dict[str, Any]:
    """Predict and measure each configuration.

    Raises: ResourceError: a step did not run.
    """
    rows = []
    for number, (recipe, side_px, microbatch, count, changes) in enumerate(cases):
        job = {
            "recipe": recipe,
            "side_px": side_px,
            "microbatch": microbatch,
            "count": count,
            "overrides": [*changes, *overrides, "run.compile=false"],
            "device": str(device),
        }
        predicted, measured = predict(job), measure_apart(job)
        rows.append(job | {"predicted": predicted, "measured": measured, "ratio": predicted / measured})
        progress("planner", number + 1, len(cases), f"{recipe}: {predicted / measured:.3f}")
    return {"hardware": hardware(), "torch": torch.__version__, "device": str(device), "rows": rows}


def render(result: dict[str, Any]) -> str:
    """The comparison as aligned text."""
    lines = [f"{'recipe':<18}{'px':>5}{'images':>9}{'predicted':>12}{'measured':>12}{'ratio':>8}  MiB; overrides"]
    for row in result["rows"]:
        images = f"{row['count']} x {row['microbatch']}"
        numbers = f"{row['predicted'] / 2**20:>12.1f}{row['measured'] / 2**20:>12.1f}{row['ratio']:>8.3f}"
        lines.append(f"{row['recipe']:<18}{row['side_px']:>5}{images:>9}{numbers}  {' '.join(row['overrides'][:-1])}")
    ratios = [row["ratio"] for row in result["rows"]]
    lines.append(f"least {min(ratios):.3f}, most {max(ratios):.3f}; the goal is 0.97 to 1.05")
    return "\n".join(lines)


def predict(job: dict[str, Any]) -> int:
    """Bytes that the planner says torch's allocator hands out at the peak."""
    work, device = _work(job), torch.device(job["device"])
    trace = trace_step(
        work.recipe,
        work.store,
        work.spec,
        work.largest_bucket,
        work.tokens,
        microbatch=job["microbatch"],
        count=job["count"],
        autocast=autocast_dtype(work.recipe.run.precision, device),
        device_type=device.type,
    )
    return trace.peak + (CUBLAS_BYTES if device.type == "cuda" else 0)


def measure_apart(job: dict[str, Any]) -> int:
    """Peak of real steps, in a fresh process.

    Raises: ResourceError: it failed.
    """
    command = [sys.executable, "-m", __name__, json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(f"bench planner: {job['recipe']} did not run: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(job: dict[str, Any]) -> int:
    """Peak of real steps in this process, in bytes."""
    return _on_gpu(job) if torch.device(job["device"]).type == "cuda" else _on_cpu(job)


def _on_gpu(job: dict[str, Any]) -> int:
    device = torch.device(job["device"])
    steps = _steps(job, device)
    next(steps)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in steps:
        pass
    return torch.cuda.max_memory_allocated(device)


def _on_cpu(job: dict[str, Any]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        steps = _steps(job, torch.device("cpu"))
        next(steps)
        with torch.profiler.record_function(MEASURED):  # the profiler's clock may be off from that of Python
            for _ in steps:
                pass
    assert profiler.profiler is not None
    found: list[Any] = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    begin = next(event.start_ns() for event in found if event.name() == MEASURED)
    changes = sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]")
    total = peak = 0
    for moment, num_bytes in changes:
        total += num_bytes
        peak = max(peak, total) if moment >= begin else peak
    return peak


def _steps(job: dict[str, Any], device: torch.device) -> Any:
    """Train on noise; one turn a step."""
    work = _work(job)
    learner = synthetic_learner(work.recipe, work.spec, work.tokens, device)
    size = job["microbatch"] * job["count"]
    batch = synthetic_batch(work.store, work.largest_bucket, size, work.tokens, device)
    for _ in range(STEPS):
        train_step(learner, batch)
        yield


def _work(job: dict[str, Any]) -> Work:
    settings = [*job["overrides"], f"run.microbatch={job['microbatch']}"]
    return work_at_resolution(load(job["recipe"], settings), job["side_px"])


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
