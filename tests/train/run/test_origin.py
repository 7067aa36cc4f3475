"""A run says what it begins from, what trains, and that its warm-up is longer than itself."""

from __future__ import annotations

import re
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


def test_a_run_says_what_it_begins_from_and_what_trains(caption_store: LatentStore, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    begin, trained = said_by(train_recipe("pixart-tiny", *PLAIN), caption_store, first)
    assert begin == f"run '{first}' starts from new weights"
    assert re.fullmatch("pixart-tiny: training all [0-9.]+ k parameters", trained)
    again = train_recipe("pixart-tiny", *PLAIN, "run.steps=2")
    assert said_by(again, caption_store, first)[0] == f"run '{first}' resumes after step 1"
    adapters = ["lora.rank=2", "lora.alpha=8", f"model.init_from={first}", "schedule.warmup_steps=1"]
    begin, trained, short = said_by(train_recipe("pixart-tiny", *PLAIN, *adapters), caption_store, second)
    source = first / "snapshot-2"
    assert begin == f"run '{second}' starts from the averaged weights of '{source}', step 2"
    # 16 matrices of 2 blocks, 32 x 32: each has 2 x 32 parameters in A and as many in B.
    assert trained.startswith("pixart-tiny: adapters of rank 2, alpha 8 train, 2.0 k of ")
    assert trained.endswith(f"parameters; '{source}' is frozen")
    assert short.startswith("schedule.warmup_steps 1: the learning rate still rises when the run ends at step 1,")
