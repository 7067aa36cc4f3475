"""Checkpoints beside the next steps: of the right step, whole, none of a damaged row; errors are not lost."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from faults import flip
from making import train_recipe
from ranks import start_ranks
from runs import bits, run_to

from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, ResourceError
from leandit.train import loop
from leandit.train.run import checkpoints
from leandit.train.weights import checkpoint
from leandit.train.weights.checkpoint import CHECKPOINT, find

pytestmark = pytest.mark.usefixtures("tiny_models")


def train(store: LatentStore, run: Path, *overrides: str) -> None:
    run_to(train_recipe("dit-s-4", "schedule.kind=constant", *overrides), store, run)


def test_the_newest_stay_and_those_of_every_so_many_steps(label_store: LatentStore, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(label_store, run, "run.steps=10", "run.checkpoint_every=1", "run.keep_checkpoints=2", "run.keep_every=4")
    assert [path.name for path in find(CHECKPOINT, run)] == [f"checkpoint-{step}" for step in (4, 8, 9, 10)]
    assert [path.name for path in find("snapshot", run)] == [f"snapshot-{step}" for step in range(1, 11)]


def test_a_state_is_written_beside_the_next_step_and_before_the_next_state_is_copied(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("run.steps=6", "run.checkpoint_every=2", "run.keep_checkpoints=9")
    train(label_store, tmp_path / "at once", *settings, "run.async_checkpoint=false")
    order, stepped, take = list[str](), threading.Event(), loop.train_step
    capture, write = checkpoints.capture, checkpoints.write

    def write_late(folders: list[checkpoints.Folder], step: int, *arguments: Any) -> None:
        assert step == 6 or stepped.wait(60)  # a step is made meanwhile
        write(folders, step, *arguments)
        order.append("written")

    monkeypatch.setattr(loop, "train_step", lambda *given: (take(*given), stepped.set())[0])
    monkeypatch.setattr(
        checkpoints, "capture", lambda *of, **how: (order.append("capture"), stepped.clear(), capture(*of, **how))[2]
    )
    monkeypatch.setattr(checkpoints, "write", write_late)
    train(label_store, tmp_path / "beside", *settings)
    assert order == ["capture", "written"] * 3
    assert [bits(tmp_path / "beside", n) for n in (2, 4, 6)] == [bits(tmp_path / "at once", n) for n in (2, 4, 6)]


@pytest.mark.parametrize("failing", [2, 6])
def test_a_disk_that_fills_up_beside_the_steps_ends_the_run(
    failing: int, label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_write = checkpoints.write

    def write(folders: list[checkpoints.Folder], step: int, *arguments: Any) -> None:
        if step == failing:
            raise ResourceError("the disk is full")
        really_write(folders, step, *arguments)

    monkeypatch.setattr(checkpoints, "write", write)
    with pytest.raises(ResourceError, match="the disk is full"):
        train(label_store, tmp_path / "run", "run.steps=6", "run.checkpoint_every=2")
    assert not (tmp_path / f"run/checkpoint-{failing}").exists()


SETTINGS = ("run.steps=4", "run.checkpoint_every=1", "run.keep_checkpoints=4", "run.global_batch=4", "run.prefetch=0")
SETTINGS += ("run.async_checkpoint=false",)


def run_on(store: Path, run: Path, *overrides: str) -> None:
    run_to(train_recipe("dit-s-4", *SETTINGS, *overrides), LatentStore(store), run)


@pytest.fixture
def intact(label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Records of each step of a run over the intact store."""
    steps, step = list[list[int]](), loop.train_step
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", lambda run, it: (steps.append(it.records.tolist()), step(run, it))[1])
        run_on(label_store.path, tmp_path / "intact")
    return steps


@pytest.fixture
def damaged(label_store: LatentStore, tmp_path: Path, intact: list[list[int]]) -> Path:
    """A copy of the store, with a changed byte in the last record that the third step reads."""
    store = LatentStore(shutil.copytree(label_store.path, tmp_path / "store"))
    record = store.record_at(intact[2][-1])
    path, first, _ = store.latents(record.bucket).place(record.row)
    flip(store.path / path, 8 * (first + 9))
    return store.path


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in run.glob("checkpoint-*"))


def test_the_run_stops_before_the_checkpoint_of_the_damaged_row_and_goes_on_once_it_is_repaired(
    damaged: Path, label_store: LatentStore, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for _ in range(2):  # the same command finds it again
        with pytest.raises(DamageError, match=r"does not match its checksum.*leandit verify .*--repair"):
            run_on(damaged, run)
        assert saved_steps(run) == [1, 2]
    run_on(damaged, tmp_path / "unchecked", "data.check=never")
    assert saved_steps(tmp_path / "unchecked") == [1, 2, 3, 4]
    shutil.rmtree(damaged)
    shutil.copytree(label_store.path, damaged)
    run_on(damaged, run)
    assert saved_steps(run) == [1, 2, 3, 4]
    assert bits(run, 4) == bits(tmp_path / "intact", 4)


def test_a_rank_that_reads_it_ends_all_before_the_first_one_saves(damaged: Path, tmp_path: Path) -> None:
    """The damaged row is in the last rank's slice."""
    job = {"recipe": "dit-s-4", "set": list(SETTINGS), "store": str(damaged), "run": str(tmp_path / "run")}
    ranks = start_ranks([job], 2)
    ended = [rank.communicate(timeout=120) for rank in ranks]
    other, reader = (json.loads(out.splitlines()[-1])["error"] for out, _ in ended)
    assert "does not match its checksum" in reader
    assert "lost the connection to another rank" in other
    assert saved_steps(tmp_path / "run") == [1, 2]
    assert checkpoint.read(tmp_path / "run/checkpoint-2").state["step"] == 2
