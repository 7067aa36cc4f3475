"""Ranks that train together: whatever the strategy, the run is that of one process; who differs or dies is named."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
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


# checkpoint of -> resumed with, at how many ranks
CHAIN = [("one", "fsdp", 2), ("fsdp", "zero-3", 2), ("zero-3", "ddp", 2), ("ddp", "zero-1", 2), ("zero-1", "one", 1)]


def at_ten(run: Path, copy: Path) -> Path:
    """A run as it was after ten steps."""
    copy.mkdir()
    shutil.copy(run / "run.json", copy)
    shutil.copytree(run / "checkpoint-10", copy / "checkpoint-10")
    return copy


def test_a_checkpoint_of_one_strategy_resumes_in_another(
    one: Path, runs: dict[str, Path], label_store: LatentStore, tmp_path: Path
) -> None:
    strategies, all_runs, jobs = TWO | ZERO, {"one": one} | runs, []
    for was, now, world_size in CHAIN:
        run = at_ten(all_runs[was], tmp_path / f"{was} to {now}")
        if world_size == 1:
            alone(label_store, run)
        else:
            settings = (entry.format(folder=runs["ddp"].parent) for entry in strategies[now])
            jobs.append(job(label_store, run, *settings))
    for said in run_ranks(jobs, 2):
        assert [line["step"] for line in said] == [STEPS] * len(jobs)
    for was, now, _ in CHAIN:
        assert losses(tmp_path / f"{was} to {now}") == pytest.approx(losses(one)[10:], abs=1e-5), (was, now)


@pytest.mark.parametrize("was", ["fsdp", "hsdp"])
def test_a_sharded_checkpoint_resumes_in_one_process_bit_for_bit_as_often_as_one_likes(
    was: str, runs: dict[str, Path], label_store: LatentStore, tmp_path: Path
) -> None:
    found = [alone(label_store, at_ten(runs[was], tmp_path / str(i))) for i in range(2)]
    assert found[0] == found[1]
    assert len(found[0]) == STEPS - 10


def test_ranks_with_other_settings_or_another_store_are_refused_at_start(
    label_store: LatentStore, caption_store: LatentStore, tmp_path: Path
) -> None:
    jobs = [
        job(label_store, tmp_path / "a", set_1=["optimizer.lr=2e-3"]),
        job(label_store, tmp_path / "b", store_1=str(caption_store.path)),
    ]
    for said in run_ranks(jobs, 2):
        assert "rank 1: optimizer.lr is 0.002, that of rank 0 is 0.001. Start all ranks" in said[0]["error"]
        assert "rank 1: root hash is" in said[1]["error"]
    assert not (tmp_path / "a").exists()


def test_a_stop_on_one_rank_stops_all_after_the_same_step_and_the_run_goes_on(
    one: Path, label_store: LatentStore, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    jobs = [job(label_store, run, stop_at=5), job(label_store, run)]
    for said in run_ranks(jobs, 2):
        assert [line["step"] for line in said if "step" in line] == [6, STEPS]  # known to all a step later
    assert losses(run) == pytest.approx(losses(one), abs=1e-5)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_rank_ends_the_others_within_a_minute_with_its_name(
    victim: int, label_store: LatentStore, tmp_path: Path
) -> None:
    ranks = start_ranks([job(label_store, tmp_path / "run", "run.steps=100000")], 2)
    wait_for(tmp_path / "run/metrics.jsonl", ranks)
    ranks[victim].kill()
    killed = time.monotonic()
    out, _ = ranks[1 - victim].communicate(timeout=90)
    assert time.monotonic() - killed < 60
    assert ranks[1 - victim].returncode == 5
    said = [json.loads(line)["warn"] for line in out.splitlines() if "warn" in line]
    assert f"rank {victim}" in said[-1]
    assert "start the same command again" in said[-1]
    ranks[victim].communicate()


def test_a_rank_that_fails_alone_ends_the_others_with_its_message(label_store: LatentStore, tmp_path: Path) -> None:
    ranks = start_ranks([job(label_store, tmp_path / "run", "run.steps=100000", fail_1=5)], 2)
    ended = [rank.communicate(timeout=90) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [5, 1]
    said = [json.loads(line)["warn"] for line in ended[0][0].splitlines() if "warn" in line]
    assert "rank 1" in said[-1]
    assert "ended: a disk that is full" in said[-1]


def wait_for(path: Path, ranks: list[subprocess.Popen[str]]) -> None:
    """Until a file has content."""
    deadline = time.monotonic() + 120
    while not (path.is_file() and path.stat().st_size):
        assert time.monotonic() < deadline, [rank.poll() for rank in ranks]
        time.sleep(0.1)
