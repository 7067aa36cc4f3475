"""Losses, gradients and weights that are not finite: what is skipped, what is never saved, and what is said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from making import ADAMW, TRAIN_RECIPE, Leandit, tree_digest
from ranks import run_ranks
from runs import bits, lines
from stores import copy_of

from leandit.datasets.disk.hashing import read_json
from leandit.datasets.store import LatentStore
from leandit.train import step as step_module

pytestmark = pytest.mark.usefixtures("tiny_models")

Train = Callable[..., Any]
BASE = (
    "model.name=DiT-S/4",
    "model.num_classes=0",
    *TRAIN_RECIPE,
    ADAMW,
    "run.compile=false",
    "run.checkpoint_every=2",
)
FIXED = ("schedule.kind=constant", "schedule.warmup_steps=0", "run.precision=bf16")


@pytest.fixture
def train(leandit: Leandit, label_store: LatentStore) -> Train:
    def run(folder: Path, steps: int, *settings: str, options: tuple[str, ...] = ()) -> Any:
        sets = [part for each in (*BASE, *FIXED, f"run.steps={steps}", *settings) for part in ("--set", each)]
        where = ("--store", label_store.path, "--run", folder, "--device", "cpu")
        return leandit("train", "dit-s-2-256", *where, *sets, *options)

    return run


@pytest.mark.parametrize("rate", ["1e39", "3.4e38"])  # infinite as float32; finite, but not after the next update
def test_weights_that_are_not_finite_are_not_saved_and_named_and_earlier_ones_stay(
    rate: str, train: Train, tmp_path: Path
) -> None:
    run, overflows = tmp_path / "run", f"optimizer.lr={rate}"
    assert train(run, 2).code == 0
    before = bits(run, 2)
    for steps in (3, 4, 6):  # at the last step, and at the step of a checkpoint
        ended = train(run, steps, "run.checkpoint_every=1", options=("--continue-with", overflows))
        assert (ended.code, "not finite" in ended.err) == (3, True), ended.err
        assert sorted(path.name for path in run.glob("*-[0-9]*")) == ["checkpoint-2", "snapshot-2"]
        assert bits(run, 2) == before
    if rate == "1e39":
        assert "'model " in ended.err
        assert "--continue-with optimizer.lr" in ended.err
    ended = train(run, 4, options=("--continue-with", "optimizer.lr=1e-3"))
    assert ended.code == 0, ended.err


def test_a_new_run_whose_first_update_overflows_saves_nothing(train: Train, tmp_path: Path) -> None:
    ended = train(tmp_path / "run", 1, "optimizer.lr=1e39")
    assert ended.code == 3
    assert list((tmp_path / "run").glob("*-[0-9]*")) == []


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Spoil the losses of some steps: with NaN, which gradients get too, or by infinity that no gradient has."""
    image_losses = step_module.image_losses

    def at(*steps: int, only_loss: bool = False) -> None:
        def spoiled(learner: Any, images: Any, step: int) -> dict[str, torch.Tensor]:
            losses = image_losses(learner, images, step)
            if step not in steps:
                return losses
            if only_loss:
                return {name: loss + torch.tensor(float("inf")) for name, loss in losses.items()}
            return {name: loss * float("nan") for name, loss in losses.items()}

        monkeypatch.setattr(step_module, "image_losses", spoiled)

    return at


OPTIMIZERS = ("adamw", "came", "muon", "adamw8bit")


@pytest.mark.parametrize("only_loss", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_update_changes_neither_weights_nor_averages_nor_moments(
    name: str, only_loss: bool, train: Train, spoil: Callable[..., None], tmp_path: Path
) -> None:
    optimizer = [f"optimizer.name={name}"]
    if name == "came":
        optimizer.append("optimizer.betas=[0.9, 0.999, 0.9999]")
    spoil(3, only_loss=only_loss)
    settings = (*optimizer, "run.skip_nonfinite=1", "run.checkpoint_every=1", "run.keep_checkpoints=9")
    ended = train(tmp_path / "run", 4, *settings)
    assert ended.code == 0, ended.err
    tensors = [
        {path.name: path.read_bytes() for path in (tmp_path / f"run/checkpoint-{step}").glob("*.safetensors")}
        for step in (2, 3, 4)
    ]
    assert tensors[0] == tensors[1] != tensors[2]
    assert [line["skipped_steps"] for line in lines(tmp_path / "run")] == [0, 0, 1, 0]
    assert [line["loss"] is None for line in lines(tmp_path / "run")] == [False, False, True, False]
    assert "1 of at most 1" in ended.out
    assert "step 3: the loss of records" in ended.err


def test_the_means_of_a_line_leave_out_what_was_skipped(
    train: Train, spoil: Callable[..., None], tmp_path: Path
) -> None:
    assert train(tmp_path / "each", 2).code == 0
    spoil(3)
    assert train(tmp_path / "run", 3, "run.skip_nonfinite=1", "run.log_every=3", "run.checkpoint_every=9").code == 0
    (line,) = lines(tmp_path / "run")
    assert line["loss"] == pytest.approx(sum(each["loss"] for each in lines(tmp_path / "each")) / 2)
    assert line["skipped_steps"] == 1


def test_one_more_than_may_be_skipped_ends_the_run_also_after_it_resumed(
    train: Train, spoil: Callable[..., None], leandit: Leandit, tmp_path: Path
) -> None:
    run, skip = tmp_path / "run", "run.skip_nonfinite=2"
    spoil(1, 3, 5)
    assert train(run, 2, skip).code == 0
    assert train(run, 4, skip).code == 0
    assert read_json(run / "checkpoint-4/state.json")["num_nonfinite"] == 2
    before = bits(run, 4)
    ended = train(run, 6, skip)
    assert ended.code == 3
    assert "step 5: the loss of records" in ended.err
    assert "run.skip_nonfinite is 2" in ended.err
    assert bits(run, 4) == before
    assert leandit("report", run, "--out", tmp_path / "report.html").code == 0
    assert train(run, 6, "run.skip_nonfinite=3").code == 0


def test_by_default_the_first_one_ends_the_run(train: Train, spoil: Callable[..., None], tmp_path: Path) -> None:
    assert train(tmp_path / "run", 2).code == 0
    shutil.rmtree(tmp_path / "run/tensorboard")
    spoil(3)
    assert train(tmp_path / "run", 4).code == 3
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_run_that_skips_nothing_has_the_bits_of_one_that_may_not(train: Train, tmp_path: Path) -> None:
    for name, settings in (("plain", ()), ("may", ("run.skip_nonfinite=5",))):
        assert train(tmp_path / name, 2, *settings).code == 0
    assert bits(tmp_path / "plain", 2) == bits(tmp_path / "may", 2)


def test_fp16_has_its_loss_scale(train: Train, tmp_path: Path) -> None:
    before = tree_digest(tmp_path)
    ended = train(tmp_path / "run", 2, "run.skip_nonfinite=1", "run.precision=fp16")
    assert (ended.code, "run.skip_nonfinite" in ended.err) == (2, True)
    assert tree_digest(tmp_path) == before


def test_ranks_skip_the_same_updates_whichever_reads_the_record(label_store: LatentStore, tmp_path: Path) -> None:
    """A record of a damaged row is in one rank's slice of a step of each pass."""
    store = LatentStore(copy_of(label_store.path, tmp_path / "store"))
    record = store.record_at(4)
    path, first, num_bytes = store.latents(record.bucket).place(record.row)
    with open(store.path / path, "r+b") as file:
        file.seek(first)
        file.write(b"\xff" * num_bytes)  # NaN in each format
    sets = [*FIXED, "run.steps=4", "run.global_batch=8", "data.check=never", "run.skip_nonfinite=2"]
    job = {"recipe": "dit-s-4", "set": sets, "store": str(store.path)}
    for world_size in (1, 2):
        run_ranks([job | {"run": str(tmp_path / f"{world_size}")}], world_size)
    one, two = (lines(tmp_path / f"{world_size}") for world_size in (1, 2))
    assert [line["skipped_steps"] for line in one] == [line["skipped_steps"] for line in two]
    assert sum(line["skipped_steps"] for line in one) == 2  # the fourth step ends the second pass
    losses = [[line["loss"] for line in each if not line["skipped_steps"]] for each in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
