"""``leandit bench planner``: the memory that the planner predicts, compared with the peak of real steps.

Each configuration trains some real steps in a fresh process. On a GPU torch's allocator reports the peak; on a CPU the
profiler records every allocation and release, so the peak is exact too. Of several ranks only one runs, with its real
strategy: torch's "fake" collectives return at once, so memory does not depend on the timing of other processes. (gloo
also copies what it gathers, and frees the copies whenever its threads happen to run.)
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from ....train.config import load
from ....train.optim.loss_scale import autocast_dtype
from ....train.parallel.ranks import ALONE, Ranks
from ....train.step.train_step import train_step
from ...plan.step_memory import trace_step
from ...plan.strategies import strategies, zero_section
from ...plan.training import CUBLAS_BYTES
from ...plan.workload import TrainingWorkload, workload_at_resolution
from ...synthetic.batches import synthetic_batch, synthetic_learner
from ...terminal.progress import ProgressLine
from ...terminal.text import aligned
from ..harness.fresh_process import run_in_fresh_process
from ..harness.meters import hardware

MIB = 2**20
STEPS = 3  # the first allocates the optimizer's state, and is not counted
MEASURED = "leandit: measured"  # marks the start of the measured steps in the profile
CHECKPOINTED = "run.activation_checkpointing=blocks"
BUCKET = 10_000_000  # elements of DeepSpeed's bucket; the default of 5e8 would take most of the memory
# Overrides that select each strategy of the planner; for DeepSpeed the file of its config.
STRATEGIES: dict[str, tuple[str, ...]] = {
    "single": (),
    "ddp": ("parallel.strategy=ddp",),
    "fsdp": ("parallel.strategy=fsdp",),
    "fsdp, gradients": ("parallel.strategy=fsdp", "parallel.shard=gradient"),
    **{f"zero-{stage}": (f"parallel.deepspeed_config={{folder}}/zero-{stage}.json",) for stage in (1, 2, 3)},
}


class Case(NamedTuple):
    """A configuration.

    Args:
      side_px: of the pictures.
      microbatch: images of a forward.
      count: microbatches of a step.
      changes: overrides of the recipe.
      strategy: one of ``STRATEGIES``.
      ranks: of a strategy that is not "single".
    """

    recipe: str
    side_px: int
    microbatch: int
    count: int = 1
    changes: tuple[str, ...] = ()
    strategy: str = "single"
    ranks: int = 1


ON_CPU = (
    Case("dit-s-2-256", 256, 1),
    Case("dit-s-2-256", 256, 4),
    Case("dit-s-2-256", 256, 4, 2),
    Case("dit-s-2-256", 256, 16, 1, (CHECKPOINTED,)),
    Case("dit-b-2-256", 256, 2),
    Case("dit-b-2-256", 256, 2, 2, (CHECKPOINTED,)),
    Case("dit-b-2-256", 256, 4, 1, ("model.name=DiT-B/4",)),
    Case("demo", 256, 1),
    Case("demo", 128, 16, 1, ("objective.kind=ddpm",)),
    Case("demo", 256, 4, 2, (CHECKPOINTED,)),
    Case("dit-s-2-256", 256, 4, 1, ("run.activation_checkpointing=selective",)),
    Case("dit-s-2-256", 256, 2, 1, ("optimizer.name=adamw8bit",)),
    Case("dit-s-2-256", 256, 2, 1, ("optimizer.name=came",)),
    Case("dit-s-2-256", 256, 2, 1, ("optimizer.name=muon",)),
    Case("dit-s-2-256", 256, 2, 1, ("ema.kind=power", "run.grad_clip=0")),
    Case("dit-s-2-256", 256, 20, 1, ("model.name=DiT-S/4", "objective.kind=flow")),
    Case(
        "dit-s-2-256", 256, 4, 1, ("model.qk_norm=true", "model.norm=rms", "model.mlp=swiglu", "model.positions=rope")
    ),
    Case("dit-s-2-256", 256, 2, 1, ("conditioning.kind=caption",)),
    Case("sana-600m-512", 512, 2, 1, ("model.name=sana-tiny",)),
    Case("dit-s-2-256", 256, 4, strategy="ddp", ranks=8),
    Case("dit-s-2-256", 256, 4, strategy="fsdp", ranks=2),
    Case("dit-s-2-256", 256, 4, 2, (CHECKPOINTED,), strategy="fsdp", ranks=8),
    Case("dit-s-2-256", 256, 4, strategy="fsdp, gradients", ranks=8),
    Case("dit-b-2-256", 256, 2, strategy="fsdp", ranks=2),
    Case("dit-b-2-256", 256, 2, strategy="fsdp", ranks=8),
    Case("dit-s-2-256", 256, 4, strategy="zero-1", ranks=2),
    Case("dit-s-2-256", 256, 4, 2, strategy="zero-1", ranks=8),
    Case("dit-s-2-256", 256, 4, strategy="zero-2", ranks=2),
    Case("dit-s-2-256", 256, 4, 2, (CHECKPOINTED,), strategy="zero-2", ranks=2),
    Case("dit-b-2-256", 256, 2, strategy="zero-2", ranks=8),
    Case("dit-s-2-256", 256, 4, strategy="zero-3", ranks=2),
    Case("dit-b-2-256", 256, 2, strategy="zero-3", ranks=2),
    Case("dit-b-2-256", 256, 4, strategy="zero-3", ranks=8),
)
ON_GPU = (
    Case("dit-s-2-256", 256, 256),
    Case("dit-b-2-256", 256, 128),
    Case("dit-b-2-256", 256, 128, 2),
    Case("dit-xl-2-256", 256, 64),
    Case("dit-xl-2-256", 256, 64, 2, (CHECKPOINTED,)),
    Case("dit-xl-2-512", 512, 16),
    Case("pixart-sigma-512", 512, 16),
)


def run(device: torch.device, overrides: list[str], cases: tuple[Case, ...], progress: ProgressLine) -> dict[str, Any]:
    """Predict and measure each configuration.

    Raises: ResourceError: a step failed.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="leandit-bench-") as folder:
        for number, case in enumerate(cases):
            job = job_of(case, device, Path(folder), *overrides)
            predicted, measured = predict(job), measure_apart(job)
            rows.append(job | {"predicted": predicted, "measured": measured, "ratio": predicted / measured})
            progress("planner", number + 1, len(cases), f"{case.recipe}: {predicted / measured:.3f}")
    return {"hardware": hardware(), "torch": torch.__version__, "device": str(device), "rows": rows}


def job_of(case: Case, device: torch.device, folder: Path, *overrides: str) -> dict[str, Any]:
    """A case as JSON values, for a fresh process; writes DeepSpeed's config into the folder."""
    if case.strategy.startswith("zero-"):
        zero = {"stage": int(case.strategy.removeprefix("zero-")), "reduce_bucket_size": BUCKET}
        (folder / f"{case.strategy}.json").write_text(json.dumps({"zero_optimization": zero}))
    parallel = [setting.format(folder=folder) for setting in STRATEGIES[case.strategy]]
    changes = [*case.changes, *overrides]
    return case._asdict() | {"changes": changes, "parallel": parallel, "device": str(device)}


def render(result: dict[str, Any]) -> str:
    """The comparison as aligned text."""
    numbers = [("recipe", "px", "images", "predicted", "measured", "ratio")]
    settings = ["MiB; overrides"]
    for row in result["rows"]:
        images, predicted, measured = (
            f"{row['count']} x {row['microbatch']}",
            row["predicted"] / MIB,
            row["measured"] / MIB,
        )
        size = str(row["side_px"])
        numbers.append((row["recipe"], size, images, f"{predicted:.1f}", f"{measured:.1f}", f"{row['ratio']:.3f}"))
        ranks = "" if row["strategy"] == "single" else f"{row['ranks']} ranks, {row['strategy']}; "
        settings.append(ranks + " ".join(row["changes"]))
    lines = [f"{left}  {right}".rstrip() for left, right in zip(aligned(numbers), settings, strict=True)]
    ratios = [row["ratio"] for row in result["rows"]]
    return "\n".join([*lines, f"least {min(ratios):.3f}, most {max(ratios):.3f}"])


def predict(job: dict[str, Any]) -> int:
    """Bytes that the planner predicts for the peak of torch's allocator."""
    work, device = _work(job), torch.device(job["device"])
    trace = trace_step(
        work,
        work.largest_bucket,
        microbatch=job["microbatch"],
        count=job["count"],
        autocast=autocast_dtype(work.recipe.run.precision, device),
        device_type=device.type,
    )
    fixed = CUBLAS_BYTES if device.type == "cuda" else 0
    if job["strategy"] == "single":
        return trace.peak() + fixed
    known_strategies = strategies(trace, job["ranks"], zero_section(work.recipe), accumulates=job["count"] > 1)
    strategy = next(known for known in known_strategies if known.name == job["strategy"])
    return round(trace.peak(strategy.shares) + strategy.buffers) + fixed


def measure_apart(job: dict[str, Any]) -> int:
    """Peak of real steps in bytes, in a fresh process.

    Raises: ResourceError: the process failed.
    """
    return run_in_fresh_process(__name__, json.dumps(job), command=f"bench planner, {job['recipe']}")


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
        with torch.profiler.record_function(MEASURED):  # the profiler's clock may differ from Python's
            for _ in steps:
                pass
    assert profiler.profiler is not None
    events: list[Any] = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    begin = next(event.start_ns() for event in events if event.name() == MEASURED)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    total = peak = 0
    for moment, num_bytes in changes:
        total += num_bytes
        peak = max(peak, total) if moment >= begin else peak
    return peak


def _steps(job: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Train on noise; yields after each step."""
    work, ranks = _work(job), _ranks(job)
    size = job["microbatch"] * job["count"]
    learner = synthetic_learner(work.recipe, work.spec, work.tokens, device, ranks=ranks, store=work.store)
    if isinstance(learner.engine.forward, DistributedDataParallel):
        learner.engine.forward.register_comm_hook(
            None, noop_hook
        )  # the default hook waits for a result that "fake" never returns
    batch = synthetic_batch(work.store, work.largest_bucket, size, work.tokens, device)
    batch = replace(batch, global_size=size * ranks.world_size).finish()
    for _ in range(STEPS):
        train_step(learner, batch)
        yield


def _ranks(job: dict[str, Any]) -> Ranks:
    """The rank of this process: the last one, whose part of the gradients is computed first."""
    if job["ranks"] == 1:
        return ALONE
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = 0 if job["strategy"] == "zero-3" else job["ranks"] - 1  # ZeRO-3 checks the ranks against rank 0
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job["ranks"])
    return Ranks(rank, job["ranks"], rank, job["ranks"])


def _work(job: dict[str, Any]) -> TrainingWorkload:
    settings = [*job["changes"], *job["parallel"], "run.compile=false", f"run.microbatch={job['microbatch']}"]
    return workload_at_resolution(load(job["recipe"], settings), job["side_px"])


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
