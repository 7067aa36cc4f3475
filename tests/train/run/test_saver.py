"""Checkpoints that are written during the next steps: of the right step, whole, and their errors are not lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from making import train_recipe, tree_digest
from runs import run_to

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
    order, stepped, step = list[str](), threading.Event(), loop.train_step
    capture, write = checkpoints.capture, checkpoints.write

    def train_step(*arguments: Any) -> Any:
        order.append("step")
        result = step(*arguments)
        stepped.set()
        return result

    def capture_noted(*arguments: Any, **named: Any) -> Any:
        order.append("capture")
        stepped.clear()
        return capture(*arguments, **named)

    def write_late(folders: list[checkpoints.Folder], step: int, *arguments: Any) -> None:
        if step < 6:
            assert stepped.wait(60)  # a step is made meanwhile
        write(folders, step, *arguments)
        order.append("written")

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(checkpoints, "capture", capture_noted)
    monkeypatch.setattr(checkpoints, "write", write_late)
    train(label_store, tmp_path / "beside", *settings)
    assert [word for word in order if word != "step"] == ["capture", "written"] * 3
    kinds = ("checkpoint", "snapshot")
    one, other = (tree_digest(tmp_path / run) for run in ("at once", "beside"))
    assert {n: d for n, d in one.items() if n.startswith(kinds)} == {
        n: d for n, d in other.items() if n.startswith(kinds)
    }


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
    assert f"checkpoint-{failing}" not in [path.name for path in find(CHECKPOINT, tmp_path / "run")]
