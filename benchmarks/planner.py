"""The memory that ``leandit plan train`` predicts, beside the peak of real steps.

    python benchmarks/planner.py

Each configuration trains for some steps in a process of its own. On a GPU torch's allocator reports the peak; on a CPU
the profiler records every allocation and release, so it is exact too. Of several ranks only one runs, with its real
strategy: torch's "fake" collectives return at once, so memory does not depend on the timing of other processes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from measuring import log, measure_in_child, print_table
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from leandit.tools.plan.step_memory import Strategy, trace_steps
from leandit.tools.plan.strategies import SINGLE, zero_section
from leandit.tools.plan.synthetic import synthetic_batch, synthetic_run
from leandit.tools.plan.training import CUBLAS_BYTES
from leandit.tools.plan.workload import TrainingWorkload, workload_at_resolution
from leandit.train.config import ParallelSection, load
from leandit.train.optim.precision import autocast_dtype
from leandit.train.parallel.ranks import ALONE, Ranks
from leandit.train.step import train_step


class Case(NamedTuple):
    """A configuration whose memory is predicted and measured.

    Args:
      microbatch: images of a forward.
      microbatches: of a step.
      changes: overrides of the recipe.
      strategy: one of ``STRATEGIES``.
      ranks: of a strategy other than "single".
    """

    recipe: str
    side_px: int
    microbatch: int
    microbatches: int = 1
    changes: tuple[str, ...] = ()
    strategy: str = "single"
    ranks: int = 1


ADAMW = "optimizer.name=adamw"  # the demo takes Muon
CHECKPOINTED = "run.activation_checkpointing=blocks"
BUCKET_ELEMENTS = 10_000_000  # of DeepSpeed's bucket; the default of 5e8 would take most of the memory
# Overrides that select each strategy of the planner; for DeepSpeed the file of its config.
STRATEGIES: dict[str, tuple[str, ...]] = {
    "single": (),
    "ddp": ("parallel.strategy=ddp",),
    "fsdp": ("parallel.strategy=fsdp",),
    "fsdp, gradients": ("parallel.strategy=fsdp", "parallel.shard=gradient"),
    **{f"zero-{stage}": (f"parallel.deepspeed_config={{folder}}/zero-{stage}.json",) for stage in (1, 2, 3)},
}
CASES = (
    Case("dit-s-2-256", 256, 1),
    Case("dit-s-2-256", 256, 4),
    Case("dit-s-2-256", 256, 4, 2),
    Case("dit-s-2-256", 256, 16, 1, (CHECKPOINTED,)),
    Case("dit-b-2-256", 256, 2),
    Case("dit-b-2-256", 256, 2, 2, (CHECKPOINTED,)),
    Case("dit-b-2-256", 256, 4, 1, ("model.name=DiT-B/4",)),
    Case("demo", 256, 1, 1, (ADAMW,)),
    Case("demo", 128, 16, 1, (ADAMW, "objective.kind=ddpm")),
    Case("demo", 256, 4, 2, (ADAMW, CHECKPOINTED)),
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
    Case("dit-s-2-256", 256, 4, 2, strategy="ddp", ranks=8),
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
STEPS = 3  # the first allocates the optimizer's state, and is not counted
MEASURED = "leandit: measured"  # marks the start of the measured steps in the profile


def planner_job(case: Case, device: torch.device, folder: Path, *overrides: str) -> dict[str, Any]:
    """A case as JSON values; writes the config of DeepSpeed into the folder."""
    if case.strategy.startswith("zero-"):
        zero = {"stage": int(case.strategy.removeprefix("zero-")), "reduce_bucket_size": BUCKET_ELEMENTS}
        (folder / f"{case.strategy}.json").write_text(json.dumps({"zero_optimization": zero}))
    parallel = [setting.format(folder=folder) for setting in STRATEGIES[case.strategy]]
    return case._asdict() | {"changes": [*case.changes, *overrides], "parallel": parallel, "device": str(device)}


def predicted_peak(job: dict[str, Any]) -> int:
    """Bytes that the planner predicts for the peak of torch's allocator."""
    work, device = _planner_work(job), torch.device(job["device"])
    zero = zero_section(work.recipe) if job["strategy"].startswith("zero-") else None
    section = ParallelSection() if zero else work.recipe.parallel
    known = [SINGLE] if job["ranks"] == 1 else [SINGLE, Strategy(job["strategy"], section, job["ranks"], zero=zero)]
    dtype = autocast_dtype(work.recipe.run.precision, device)
    traced = trace_steps(
        work, work.largest_bucket, known, precision="bf16" if dtype else "fp32", device_type=device.type
    )[known[-1].name]
    step, size = traced.split if job["microbatches"] > 1 else traced.whole, job["microbatch"] * job["microbatches"]
    return round(step.total(job["microbatch"], batch=size)) + (CUBLAS_BYTES if device.type == "cuda" else 0)


def measured_peak(job: dict[str, Any]) -> int:
    """Peak of real steps in this process, in bytes."""
    device = torch.device(job["device"])
    return _peak_on_gpu(job, device) if device.type == "cuda" else _peak_on_cpu(job)


def _peak_on_gpu(job: dict[str, Any], device: torch.device) -> int:
    steps = _real_steps(job, device)
    next(steps)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in steps:
        pass
    return torch.cuda.max_memory_allocated(device)


def _peak_on_cpu(job: dict[str, Any]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        steps = _real_steps(job, torch.device("cpu"))
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


def _real_steps(job: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Train on noise; yields after each step."""
    work, ranks, size = _planner_work(job), _one_of_ranks(job), job["microbatch"] * job["microbatches"]
    learner = synthetic_run(work.recipe, work.spec, work.tokens, device, ranks=ranks, store=work.store)
    if isinstance(forward := learner.engine.forward, DistributedDataParallel):
        forward.register_comm_hook(None, noop_hook)  # the default waits for a result that "fake" never returns
    batch = synthetic_batch(work.store, work.largest_bucket, size, work.tokens, device)
    batch = replace(batch, global_size=size * ranks.world_size).finish()
    for _ in range(STEPS):
        train_step(learner, batch)
        yield


def _one_of_ranks(job: dict[str, Any]) -> Ranks:
    """The rank of this process: the last one, whose part of the gradients is computed first."""
    if job["ranks"] == 1:
        return ALONE
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = 0 if job["strategy"] == "zero-3" else job["ranks"] - 1  # ZeRO-3 checks the ranks against rank 0
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job["ranks"])
    return Ranks(rank, job["ranks"], rank, job["ranks"])


def _planner_work(job: dict[str, Any]) -> TrainingWorkload:
    settings = [*job["changes"], *job["parallel"], "run.compile=false", f"run.microbatch={job['microbatch']}"]
    return workload_at_resolution(load(job["recipe"], settings), job["side_px"])


def measured_apart(job: dict[str, Any]) -> int:
    """``measured_peak`` in a process of its own.

    Raises: RuntimeError: it failed.
    """
    return measure_in_child("planner", "measured_peak", job=job)


def measure_planner(device: str, case: dict[str, Any], overrides: list[str] | None = None) -> dict[str, Any]:
    """Predicted and measured peak of a case, in bytes, and their ratio.

    Raises: RuntimeError: the measurement failed.
    """
    with tempfile.TemporaryDirectory(prefix="leandit-benchmark-") as folder:
        job = planner_job(Case(**case), torch.device(device), Path(folder), *(overrides or []))
        predicted, measured = predicted_peak(job), measured_apart(job)
    return {"predicted": [predicted], "measured": [measured], "ratio": [predicted / measured]}


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda:N.")] = "cpu",
    overrides: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key.")] = [],  # noqa: B006
) -> None:
    """Predicted and measured peaks of a list of configurations."""
    rows = [["recipe", "images", "overrides", "predicted MiB", "measured MiB", "ratio"]]
    for case in CASES:
        row = measure_planner(device, case._asdict(), overrides)
        strategy = [] if case.strategy == "single" else [f"{case.ranks} ranks, {case.strategy}"]
        sizes = [f"{row[key][0] / 2**20:.1f}" for key in ("predicted", "measured")]
        images, changes = f"{case.microbatches} x {case.microbatch}", " ".join([*strategy, *case.changes])
        rows.append([f"{case.recipe}, {case.side_px} px", images, changes, *sizes, f"{row['ratio'][0]:.3f}"])
        log(", ".join(rows[-1]))
    print_table(rows)


if __name__ == "__main__":
    typer.run(main)
