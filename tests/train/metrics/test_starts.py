"""``starts.jsonl``: when, where and from which step a run was started."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from making import CPU, train_recipe

from leandit import __version__
from leandit.datasets.errors import DamageError
from leandit.datasets.store import LatentStore
from leandit.train.loop import StopRequest, train
from leandit.train.metrics.starts import read_starts

pytestmark = pytest.mark.usefixtures("tiny_models")


def run_to(steps: int, store: LatentStore, run: Path, name: str = "dit-s-2-256") -> None:
    recipe = train_recipe("dit-s-4", f"run.steps={steps}", "run.checkpoint_every=2")
    path = store.path
    train(recipe, store_path=path, run=run, device=CPU, report=lambda _: None, stop=StopRequest(), recipe_name=name)


def test_each_start_is_noted_and_a_finished_run_notes_none(label_store: LatentStore, tmp_path: Path) -> None:
    for steps in (2, 3, 3):
        run_to(steps, label_store, tmp_path / "run")
    first, second = read_starts(tmp_path / "run")
    assert (first.from_step, first.reached_step, second.from_step, second.reached_step) == (0, 0, 2, 2)
    assert (first.recipe, first.strategy, first.precision, first.world_size) == ("dit-s-2-256", "single", "fp32", 1)
    assert first.versions["leandit"] == __version__
    assert {"torch", "python"} <= first.versions.keys()
    assert datetime.fromisoformat(first.time) <= datetime.fromisoformat(second.time)
    assert "CPU" in first.device


def test_steps_that_were_lost_are_told(label_store: LatentStore, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_to(3, label_store, run)
    shutil.rmtree(run / "checkpoint-3")  # as if it had been killed before it was written
    run_to(4, label_store, run)
    assert [(start.from_step, start.reached_step) for start in read_starts(run)] == [(0, 0), (2, 3)]


def test_a_line_that_is_no_start_is_named(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []
    for line in ("{", "[]", json.dumps({"time": 3}), "[" * 100_000):
        (tmp_path / "starts.jsonl").write_text(line + "\n")
        with pytest.raises(DamageError, match="line 1 is not a start"):
            read_starts(tmp_path)


def test_the_precision_of_a_start_is_the_one_that_it_computes_in(label_store: LatentStore, tmp_path: Path) -> None:
    recipe = train_recipe("dit-s-4", "run.steps=1", "run.precision=bf16")
    train(recipe, store_path=label_store.path, run=tmp_path, device=CPU, report=lambda _: None, stop=StopRequest())
    assert [start.precision for start in read_starts(tmp_path)] == ["fp32"]
