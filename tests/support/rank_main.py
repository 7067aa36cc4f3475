"""One rank of a training run: trains the jobs of its first argument (JSON), one after the other, on tiny models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from leandit.datasets.batches.batch import Batch
from leandit.errors import LeanditError
from leandit.train import loop
from leandit.train.loop import train
from leandit.train.metrics.history import StepReport
from leandit.train.metrics.meter import StepResult
from leandit.train.optim import precision
from leandit.train.parallel import deepspeed_engine, engine
from leandit.train.parallel.stop import StopRequest
from leandit.train.run import state as run_state
from leandit.train.run.evaluation.decoding import Decoding
from leandit.train.run.state import Run


def fail_at(step: int) -> None:
    """Let this rank fail after a step."""

    def made(state: Run, batch: Batch, take: Callable[..., StepResult] = loop.train_step) -> StepResult:
        trace = take(state, batch)
        if state.step == step:
            raise ValueError("a disk that is full")
        return trace

    loop.train_step = made


def compute_in_bf16() -> None:
    """From here on, as a GPU does; a CPU is asked for float32 else, because it is slow."""
    for module in (engine, deepspeed_engine, run_state):
        module.autocast_dtype = lambda *_: torch.bfloat16


def compile_eagerly() -> None:
    """From here on blocks are compiled, to graphs that run as they are."""
    real, build_run = torch.compile, run_state.build_run
    torch.compile = lambda function, **how: real(function, **how | {"backend": "eager"})
    run_state.build_run = lambda *args, **how: build_run(*args, **how | {"compiled": True})


def count_weights() -> None:
    """Print how many numbers of the model this rank has in memory before and after it is sharded."""
    shard = engine.shard

    def counted(model: torch.nn.Module, *args: Any) -> None:
        before = sum(p.numel() for p in model.parameters() if not p.is_meta)
        shard(model, *args)
        after = sum(p.to_local().numel() for p in model.parameters())  # pyright: ignore[reportAttributeAccessIssue]
        print(json.dumps({"weights": [before, after]}), flush=True)

    engine.shard = counted


def compile_nothing() -> None:
    """Let DeepSpeed sum over ranks by torch: on a CPU it would look for a compiler, and compile C++ for a minute."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}


def begin_with(run: Path, copy: Path, rank: str, step: int) -> None:
    """Go on from a step of another run."""
    if rank == "0":
        copy.mkdir()
        shutil.copy(run / "run.json", copy)
        shutil.copytree(run / f"checkpoint-{step}", copy / f"checkpoint-{step}")
    dist.barrier()


def main() -> None:
    """Train all that the first argument says; what is refused goes to stdout as JSON lines."""
    from making import shrink_models, train_recipe

    torch.set_num_threads(1)
    shrink_models(pytest.MonkeyPatch())
    jobs = json.loads(sys.argv[1])
    if os.environ.get("WORLD_SIZE", "1") != "1":
        dist.init_process_group("gloo")
    rank = os.environ.get("RANK", "0")
    for job in jobs:
        overrides = job["set"] + job.get(f"set_{rank}", [])
        stop = StopRequest()

        stop_at, kill_at = job.get("stop_at"), job.get("kill_at")

        def report(
            figures: StepReport, stop: StopRequest = stop, stop_at: int | None = stop_at, kill_at: int | None = kill_at
        ) -> None:
            if figures.step == stop_at:
                stop.set()
            if figures.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        if earlier := job.get("begin_with"):
            begin_with(Path(earlier), Path(job["run"]), rank, job["begin_at"])
        if job.get("bf16"):
            compute_in_bf16()
        if any("deepspeed_config" in entry for entry in overrides):
            compile_nothing()
        if job.get("compiled"):
            compile_eagerly()
        if job.get("counts"):
            count_weights()
        precision.FIRST_SCALE = job.get("first_scale", 2.0**16)
        if job.get("keeps_latents"):
            Decoding.start = lambda _: None
        if at := job.get(f"fail_{rank}"):
            fail_at(at)

        said = None
        try:
            outcome = train(
                train_recipe(job["recipe"], *overrides),
                store_path=job.get(f"store_{rank}", job["store"]),  # None: the recipe names its stores
                run=Path(job["run"]),
                device=torch.device("cpu"),
                report=report,
                stop=stop,
                warn=lambda line: print(json.dumps({"warn": line}), flush=True),
            )
        except LeanditError as error:
            said = str(error)
        print(json.dumps({"step": None if said else outcome.step, "error": said}), flush=True)  # pyright: ignore
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
