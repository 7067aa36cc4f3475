"""Checkpoints that are written beside the next steps: of the step they are of, whole, and their errors are not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from making import CPU, train_recipe, tree_digest

from leandit.datasets.errors import ResourceError
from leandit.datasets.store import LatentStore
from leandit.train import loop
from leandit.train.config import RunSection
from leandit.train.loop import train
from leandit.train.parallel.stop import StopRequest
from leandit.train.run import saver
from leandit.train.run.saver import Folder
from leandit.train.weights.checkpoint import CHECKPOINT, find

pytestmark = pytest.mark.usefixtures("tiny_models")


def run_to(store: LatentStore, run: Path, *overrides: str) -> None:
    recipe = train_recipe("dit-s-4", "schedule.kind=constant", *overrides)
    train(recipe, store_path=store.path, run=run, device=CPU, report=lambda _: None, stop=StopRequest())


def checkpoints(run: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree_digest(run).items() if name.startswith(("checkpoint", "snapshot"))}


def test_the_newest_stay_and_those_of_every_so_many_steps(label_store: LatentStore, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_to(label_store, run, "run.steps=10", "run.checkpoint_every=1", "run.keep_checkpoints=2", "run.keep_every=4")
    assert [path.name for path in find(CHECKPOINT, run)] == [f"checkpoint-{step}" for step in (4, 8, 9, 10)]


def test_what_is_written_late_is_of_the_step_at_which_it_was_taken(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("run.steps=6", "run.checkpoint_every=2", "run.keep_checkpoints=9")
    run_to(label_store, tmp_path / "at once", *settings, "run.async_checkpoint=false")
    stepped, take, really_write = threading.Event(), loop.train_step, saver.write
    order: list[str] = []

    def step(*arguments: object) -> object:
        trace = take(*arguments)  # pyright: ignore[reportArgumentType]
        order.append("step")
        stepped.set()
        return trace

    def write_late(folders: list[Folder], run: Path, section: RunSection) -> None:
        if folders[0].step < 6:
            stepped.clear()
            assert stepped.wait(60)  # a step is made meanwhile
        really_write(folders, run, section)
        order.append(f"wrote {folders[0].step}")

    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr(saver, "write", write_late)
    run_to(label_store, tmp_path / "beside", *settings)
    assert order.index("wrote 2") > 2
    assert checkpoints(tmp_path / "beside") == checkpoints(tmp_path / "at once")


@pytest.mark.parametrize("failing", [2, 6])
def test_a_disk_that_fills_up_beside_the_steps_ends_the_run(
    failing: int, label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_write = saver.write

    def write(folders: list[Folder], run: Path, section: RunSection) -> None:
        if folders[0].step == failing:
            raise ResourceError("the disk is full")
        really_write(folders, run, section)

    monkeypatch.setattr(saver, "write", write)
    with pytest.raises(ResourceError, match="the disk is full"):
        run_to(label_store, tmp_path / "run", "run.steps=6", "run.checkpoint_every=2")
    assert f"checkpoint-{failing}" not in [path.name for path in find(CHECKPOINT, tmp_path / "run")]


def test_a_state_is_copied_only_after_the_one_before_it_was_written(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            order.append(what)
            result = function(*arguments, **named)
            order.append(f"end of {what}")
            return result

        return call

    monkeypatch.setattr(saver, "write", noted("write", saver.write))
    monkeypatch.setattr(loop, "capture", noted("capture", loop.capture))
    run_to(label_store, tmp_path / "run", "run.steps=4", "run.checkpoint_every=1")
    assert order == ["capture", "end of capture", "write", "end of write"] * 4
