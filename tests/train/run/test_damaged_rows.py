"""A run that reads a damaged row stops with exit code 4, and keeps the checkpoints from before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from faults import flip
from making import train_recipe
from ranks import start_ranks
from runs import bits, run_to

from leandit.datasets.errors import DamageError
from leandit.datasets.store import LatentStore
from leandit.train import loop
from leandit.train.weights import checkpoint

pytestmark = pytest.mark.usefixtures("tiny_models")

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
    assert record.bucket is not None
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
