"""A run says what it begins from, what trains, and that its warm-up is longer than itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from making import CPU, train_recipe

from leandit.datasets.store import LatentStore
from leandit.train.config import TrainRecipe
from leandit.train.loop import StopRequest, train

pytestmark = pytest.mark.usefixtures("tiny_models")

PLAIN = ["run.steps=1", "run.ema_decay=0.0", "schedule.kind=constant", "schedule.warmup_steps=0"]


def said_by(recipe: TrainRecipe, store: LatentStore, run: Path) -> list[str]:
    said: list[str] = []
    options = {"report": lambda _: None, "stop": StopRequest(), "say": said.append}
    train(recipe, store_path=store.path, run=run, device=CPU, **options)
    return said


def test_a_run_says_whether_its_weights_are_new_or_of_what_and_what_was_converted(
    label_store: LatentStore, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    begin, trained = said_by(train_recipe("dit-s-4", *PLAIN), label_store, first)
    assert begin == f"run '{first}' begins from new weights"
    assert trained.startswith("DiT-S/4: training all ")
    assert trained.endswith(" k parameters")
    again = train_recipe("dit-s-4", *PLAIN, "run.steps=2")
    assert said_by(again, label_store, first)[0] == f"run '{first}' resumes after step 1"
    tuned = train_recipe("dit-s-4", *PLAIN, f"model.init_from={first}")
    assert said_by(tuned, label_store, second)[0] == (
        f"run '{second}' begins from the averaged weights of '{first / 'snapshot-2'}', step 2"
    )


def test_adapters_say_what_trains_and_what_is_frozen(caption_store: LatentStore, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base, run = tmp_path / "base", tmp_path / "run"
    said_by(train_recipe("pixart-tiny", *PLAIN), caption_store, base)
    adapters = train_recipe("pixart-tiny", *PLAIN, f"model.init_from={base}", "lora.rank=2", "lora.alpha=8")
    begin, trained = said_by(adapters, caption_store, run)
    assert begin == f"run '{run}' begins from the averaged weights of '{base / 'snapshot-1'}', step 1"
    # 16 matrices of 2 blocks, 32 x 32: each has 2 x 32 parameters in A and as many in B.
    assert trained.startswith("pixart-tiny: adapters of rank 2, alpha 8 train, 2.0 k of ")
    assert trained.endswith(f"parameters; '{base / 'snapshot-1'}' is frozen")


def test_a_warm_up_that_the_run_does_not_end_is_said(label_store: LatentStore, tmp_path: Path) -> None:
    short = train_recipe("dit-s-4", *PLAIN, "schedule.warmup_steps=1")
    said = said_by(short, label_store, tmp_path / "run")
    assert said[-1].startswith("schedule.warmup_steps 1: the learning rate rises until then, the run ends at step 1,")
