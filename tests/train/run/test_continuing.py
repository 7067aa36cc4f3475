"""Runs that go on with other settings: ``leandit train --continue-with``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from making import TRAIN_RECIPE, Leandit, tree_digest
from runs import bits, lines

from leandit.datasets.disk.hashing import read_json
from leandit.datasets.store import LatentStore
from leandit.train.metrics.history import read_starts

pytestmark = pytest.mark.usefixtures("tiny_models")

Train = Callable[..., Any]
BASE = ("model.name=DiT-S/4", "model.num_classes=0", *TRAIN_RECIPE, "run.compile=false", "run.checkpoint_every=2")
FIXED = ("schedule.kind=constant", "schedule.warmup_steps=0")


@pytest.fixture
def train(leandit: Leandit, label_store: LatentStore) -> Train:
    """Train to a number of steps, with settings, and others to continue with."""

    def run(
        folder: Path, steps: int, *settings: str, on: tuple[str, ...] = (), schedule: tuple[str, ...] = FIXED
    ) -> Any:
        sets = [part for each in (*BASE, *schedule, f"run.steps={steps}", *settings) for part in ("--set", each)]
        options = [part for each in on for part in ("--continue-with", each)]
        where = ("--store", label_store.path, "--run", folder, "--device", "cpu")
        return leandit("train", "dit-s-2-256", *where, *sets, *options)

    return run


CHANGES = {
    "optimizer.lr": "5e-4",
    "optimizer.weight_decay": "0.1",
    "optimizer.betas": "[0.9, 0.95, 0.99]",
    "run.grad_clip": "0.1",
    "run.seed": "3",
    "schedule.kind": "cosine",
    "schedule.warmup_steps": "9",
    "conditioning.drop": "0.9",
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_run_goes_on_with_another_value_from_its_checkpoint_alone(key: str, train: Train, tmp_path: Path) -> None:
    run, plain, setting = tmp_path / "run", tmp_path / "plain", f"{key}={CHANGES[key]}"
    assert train(run, 2).code == 0
    shutil.copytree(run, plain)
    refused = train(run, 4, setting)
    assert refused.code == 3
    assert f"--continue-with {key}=VALUE" in refused.err
    ended = train(run, 4, on=(setting,))
    assert ended.code == 0, ended.err
    assert train(plain, 4).code == 0
    assert bits(run, 2) == bits(plain, 2)  # the state before is kept
    assert bits(run, 4) != bits(plain, 4)
    start = read_starts(run)[-1]
    assert start.from_step == 2
    assert list(start.changed) == [key]
    assert (
        json.loads(json.dumps(start.changed[key][1]))
        == read_json(run / "run.json")["recipe"][key.split(".")[0]][key.split(".")[1]]
    )
    assert train(run, 4).code == 3  # the next command names the new value
    assert train(run, 4, setting).code == 0


def test_what_is_changed_to_the_same_value_changes_no_bit(train: Train, tmp_path: Path) -> None:
    for name, on in (("run", ("optimizer.lr=1e-3", "run.seed=0")), ("whole", ())):
        assert train(tmp_path / name, 2).code == 0
        assert train(tmp_path / name, 4, on=on).code == 0
    assert bits(tmp_path / "run", 4) == bits(tmp_path / "whole", 4)
    assert read_starts(tmp_path / "run")[-1].changed == {}


def test_a_new_rate_is_the_rate_of_the_steps_that_follow(train: Train, tmp_path: Path) -> None:
    assert train(tmp_path / "run", 2).code == 0
    assert train(tmp_path / "run", 4, on=("optimizer.lr=5e-4",)).code == 0
    assert [line["learning_rate"] for line in lines(tmp_path / "run")] == [1e-3, 1e-3, 5e-4, 5e-4]


def test_a_decaying_run_gets_more_steps(train: Train, tmp_path: Path) -> None:
    decaying = ("schedule.kind=linear", "schedule.warmup_steps=0")
    assert train(tmp_path / "run", 2, schedule=decaying).code == 0
    assert train(tmp_path / "run", 4, schedule=decaying).code == 3
    assert train(tmp_path / "run", 2, on=("run.steps=4",), schedule=decaying).code == 0
    assert lines(tmp_path / "run")[-1]["step"] == 4


@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_that_is_killed_after_a_change_goes_on_with_it(steps: int, train: Train, tmp_path: Path) -> None:
    """Also of a seed, whose order the checkpoint does not have."""
    on = ("run.seed=7", "optimizer.lr=5e-4")
    assert train(tmp_path / "run", 2).code == 0
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    assert train(tmp_path / "whole", 4, on=on).code == 0
    assert train(tmp_path / "run", 3, on=on).code == 0
    if steps == 2:  # as if it had been killed before its next checkpoint
        shutil.rmtree(tmp_path / "run/checkpoint-3")
    assert train(tmp_path / "run", 4, on=on).code == 0
    assert bits(tmp_path / "run", 4) == bits(tmp_path / "whole", 4)


REFUSED = {
    "model.name=DiT-S/2": "the saved weights are of this model",
    "model.qk_norm=true": "the saved weights are of this model",
    "optimizer.name=came": "the saved state is that of this optimizer",
    "run.global_batch=4": "counts batches of this size",
    "run.ema_decay=0.5": "averages",
    "ema.kind=power": "averages",
    "latent.normalise=store": "latents",
    "objective.kind=flow": "learned",
    "data.leftovers=drop": "order",
    "data.holdout=0.5": "order",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_changes_the_meaning_of_the_state_is_refused_with_the_reason(
    setting: str, train: Train, tmp_path: Path
) -> None:
    if setting == next(iter(REFUSED)):
        assert train(tmp_path / "run", 2).code == 0
    before = tree_digest(tmp_path)
    ended = train(tmp_path / "run", 4, on=(setting,))
    assert ended.code == 2
    assert f"--continue-with {setting.partition('=')[0]}" in ended.err
    assert REFUSED[setting] in ended.err
    assert tree_digest(tmp_path) == before


@pytest.mark.parametrize(
    ("setting", "code", "named"),
    [
        ("optimizer.lr", 2, "expected SECTION.KEY=VALUE"),
        ("optimizer={lr=1}", 2, "expected SECTION.KEY=VALUE"),
        ("optimizer.lrr=1e-4", 2, "did you mean 'optimizer.lr'"),
        ("optimizer.lr=fast", 2, "optimizer.lr"),
        ("optimizer.lr=1e-4", 3, "goes on from a checkpoint, and there is none"),
    ],
)
def test_a_change_that_cannot_be_is_named(setting: str, code: int, named: str, train: Train, tmp_path: Path) -> None:
    ended = train(tmp_path / "run", 2, on=(setting,))
    assert (ended.code, named in ended.err, (tmp_path / "run").exists()) == (code, True, False), ended.err


def test_the_report_shows_what_was_changed(train: Train, leandit: Leandit, tmp_path: Path) -> None:
    assert train(tmp_path / "run", 2).code == 0
    assert train(tmp_path / "run", 4, on=("optimizer.lr=5e-4",)).code == 0
    assert leandit("report", tmp_path / "run", "--out", tmp_path / "report.html").code == 0
    assert "continued with" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("first", "can_be_guided"), [("0.1", True), ("0", False)])
def test_a_run_that_goes_on_without_dropping_keeps_the_null_that_it_has_learned(
    first: str, can_be_guided: bool, train: Train, leandit: Leandit, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train(run, 2, f"conditioning.drop={first}").code == 0
    assert train(run, 4, on=("conditioning.drop=0",)).code == 0
    assert train(run, 6, "conditioning.drop=0").code == 0
    ended = leandit("sample", run, "--out", tmp_path / "out", "--label", "0", "--steps", 1, "--guidance", 2)
    assert ended.code == (0 if can_be_guided else 2), ended.err
    assert can_be_guided or "has not learned the null condition" in ended.err


def test_a_key_that_does_not_exist_is_named_as_such(train: Train, tmp_path: Path) -> None:
    ended = train(tmp_path / "run", 2, on=("optimiser.lr=1e-4",))
    assert ended.code == 2
    assert "optimizer" in ended.err
    assert "cannot change" not in ended.err
