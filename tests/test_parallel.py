"""Ranks that train together: whatever the strategy, the run is that of one process; who differs or dies is named."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from making import CPU, train_recipe
from safetensors.torch import load_file

from leandit.datasets.errors import RecipeError
from leandit.datasets.store import LatentStore
from leandit.train.config import ParallelSection
from leandit.train.loop import train
from leandit.train.parallel import choose_strategy
from leandit.train.ranks import ALONE, Ranks, read_ranks
from leandit.train.stop import StopRequest

MAIN = Path(__file__).parent / "rank_main.py"
STEPS = 20
# 15 records in batches of 4, the last of 3: unequal slices, and microbatches of which one rank has fewer.
SETTINGS = [
    f"run.steps={STEPS}",
    "run.global_batch=4",
    "run.microbatch=1",
    "optimizer.lr=1e-3",
    "run.checkpoint_every=10",
    "run.keep_checkpoints=3",
    "run.log_every=1",
    "schedule.kind=constant",
]
Job = dict[str, Any]

pytestmark = pytest.mark.usefixtures("tiny_models")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_ranks(jobs: list[Job], world_size: int) -> list[subprocess.Popen[str]]:
    """Start a process for each rank, with what torchrun says to each."""
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(world_size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        size = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        command = [sys.executable, str(MAIN), json.dumps(jobs)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env=common | place | size, **pipes))
    return ranks


def run_ranks(jobs: list[Job], world_size: int) -> list[list[dict[str, Any]]]:
    """What each rank said of each job; all must end well."""
    ranks = start_ranks(jobs, world_size)
    ended = [rank.communicate(timeout=280) for rank in ranks]
    for rank, (_, errors) in zip(ranks, ended, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in ended]


def job(store: LatentStore, run: Path, *overrides: str, recipe: str = "dit-s-4", **more: Any) -> Job:
    return {"recipe": recipe, "set": [*SETTINGS, *overrides], "store": str(store.path), "run": str(run), **more}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def alone(store: LatentStore, run: Path, *overrides: str, recipe: str = "dit-s-4") -> list[float]:
    """Losses of the same training in this process."""
    settings = train_recipe(recipe, *SETTINGS, *overrides)
    train(settings, store_path=store.path, run=run, device=CPU, report=lambda _: None, stop=StopRequest())
    return losses(run)


TWO = {
    "ddp": ["parallel.strategy=ddp"],
    "fsdp": ["parallel.strategy=fsdp"],
    "fsdp-gradient": ["parallel.strategy=fsdp", "parallel.shard=gradient"],
    "fsdp-offload": ["parallel.strategy=fsdp", "parallel.cpu_offload=true"],
}
ZERO = {f"zero-{stage}": [f"parallel.deepspeed_config={{folder}}/zero-{stage}.json"] for stage in (1, 2, 3)}
FOUR = {"hsdp": ["parallel.strategy=hsdp", "parallel.replicas=2"]}


@pytest.fixture(scope="module")
def one(label_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 steps in one process."""
    run = tmp_path_factory.mktemp("one") / "run"
    alone(label_store, run)
    return run


@pytest.fixture(scope="module")
def runs(label_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """20 steps with each strategy."""
    folder = tmp_path_factory.mktemp("many")
    made = {name: folder / name for name in (*TWO, *ZERO, *FOUR)}
    for stage in (1, 2, 3):
        config = {"zero_optimization": {"stage": stage}, "gradient_clipping": "auto", "train_batch_size": "auto"}
        (folder / f"zero-{stage}.json").write_text(json.dumps(config))
    for strategies, world_size in ((TWO | ZERO, 2), (FOUR, 4)):
        jobs = []
        for name, overrides in strategies.items():
            jobs.append(job(label_store, made[name], *(entry.format(folder=folder) for entry in overrides)))
        for said in run_ranks(jobs, world_size):
            assert [line["step"] for line in said] == [STEPS] * len(jobs)
    return made


@pytest.mark.parametrize("name", [*TWO, *ZERO, *FOUR])
def test_the_losses_are_those_of_one_process(name: str, one: Path, runs: dict[str, Path]) -> None:
    assert len(losses(runs[name])) == STEPS
    assert losses(runs[name]) == pytest.approx(losses(one), abs=1e-5)


@pytest.mark.parametrize("name", [*TWO, *ZERO, *FOUR])
def test_a_checkpoint_has_the_names_and_shapes_of_one_process(name: str, one: Path, runs: dict[str, Path]) -> None:
    for folder in ("checkpoint-20", "snapshot-20"):
        for path in sorted((one / folder).glob("*.safetensors")):
            expected, found = load_file(path), load_file(runs[name] / folder / path.name)
            assert {k: (v.shape, v.dtype) for k, v in found.items()} == {
                k: (v.shape, v.dtype) for k, v in expected.items()
            }
            for key, tensor in expected.items():
                torch.testing.assert_close(found[key], tensor, atol=2e-4, rtol=0)


def test_auto_is_one_process_alone_and_ddp_together() -> None:
    two = Ranks(0, 2, 0, 2)
    assert choose_strategy(ParallelSection(), ALONE) == "single"
    assert choose_strategy(ParallelSection(), two) == "ddp"
    assert choose_strategy(ParallelSection(deepspeed_config="ds.json"), two) == "deepspeed"


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({"strategy": "single"}, Ranks(0, 2, 0, 2), "2 ranks were started"),
        ({"strategy": "fsdp"}, ALONE, "there is one rank. Start more"),
        ({"strategy": "ddp", "cpu_offload": True}, Ranks(0, 2, 0, 2), "keeps all on the GPU"),
        ({"strategy": "hsdp", "replicas": 3}, Ranks(0, 4, 0, 4), "are not 3 groups"),
        ({"strategy": "hsdp"}, Ranks(0, 4, 0, 4), "on 1 machines are not 1 groups"),
        ({"strategy": "deepspeed"}, Ranks(0, 2, 0, 2), "path of a ds_config.json"),
        ({"strategy": "ddp", "deepspeed_config": "x.json"}, Ranks(0, 2, 0, 2), "or neither"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused(settings: dict[str, Any], ranks: Ranks, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        choose_strategy(ParallelSection(**settings), ranks)


PLACES = {
    "torchrun": {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
    "srun": {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    },
}
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("launcher", PLACES)
def test_the_place_is_read_from_the_launcher(launcher: str) -> None:
    ranks = read_ranks(PLACES[launcher] | MEETING)
    assert ranks == Ranks(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert ranks.num_machines == 2


@pytest.mark.parametrize(
    "environment", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}]
)
def test_without_a_launcher_there_is_one_rank(environment: dict[str, str]) -> None:
    assert read_ranks(environment) == ALONE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "there is no such rank"),
        ({"LOCAL_RANK": "4"}, "there is no such rank"),
        ({"RANK": "one"}, "needed the rank of this process"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
    ],
)
def test_an_environment_that_says_nonsense_is_refused(changes: dict[str, str | None], message: str) -> None:
    environment = {k: v for k, v in (PLACES["torchrun"] | MEETING | changes).items() if v is not None}
    with pytest.raises(RecipeError, match=message):
        read_ranks(environment)
