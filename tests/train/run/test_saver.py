"""Checkpoints that are written during the next steps: of the right step, whole, and their errors are not lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from making import train_recipe
from runs import bits, run_to

from leandit.datasets.errors import ResourceError
from leandit.datasets.store import LatentStore
from leandit.train import loop
from leandit.train.run import checkpoints
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
