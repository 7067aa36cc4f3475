"""Garbage is collected between steps, and as before once training ends."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from making import CPU, train_recipe

from leandit.datasets.batches.batch import Batch
from leandit.datasets.errors import RunError
from leandit.datasets.store import LatentStore
from leandit.tools.plan.workload import workload_at_resolution
from leandit.tools.synthetic.batches import synthetic_batch, synthetic_learner
from leandit.train import loop
from leandit.train.config import load
from leandit.train.metrics.window import StepResult
from leandit.train.parallel.stop import StopRequest
from leandit.train.run.state import TrainState
from leandit.train.step import garbage
from leandit.train.step.garbage import COLLECT_EVERY, collected_by_hand
from leandit.train.step.train_step import train_step

pytestmark = pytest.mark.usefixtures("tiny_models")


class FakeCollector(SimpleNamespace):
    """The part of ``gc`` that is used, which notes its calls."""

    def __init__(self, *, enabled: bool, frozen: int) -> None:
        self.enabled, self.frozen, self.calls = enabled, frozen, list[str]()

    def isenabled(self) -> bool:
        return self.enabled

    def get_freeze_count(self) -> int:
        return self.frozen

    def __getattr__(self, name: str) -> object:
        return lambda: self.calls.append(name)


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_as_before_at_the_end_also_after_an_error(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCollector(enabled=True, frozen=0)
    monkeypatch.setattr(garbage, "gc", fake)

    def steps() -> None:
        with collected_by_hand() as after_step:
            for step in range(1, 3 * COLLECT_EVERY + 1):
                fake.calls.append(str(step))
                after_step()
            if fails:
                raise ValueError("a step")

    if fails:
        with pytest.raises(ValueError, match="a step"):
            steps()
    else:
        steps()
    expected = ["collect", "freeze", "disable"]
    for step in range(1, 3 * COLLECT_EVERY + 1):
        expected += [
            str(step),
            *{1: ["collect", "freeze"], 2: ["collect"], 3: ["collect"]}.get(step / COLLECT_EVERY, []),
        ]
    assert fake.calls == [*expected, "unfreeze", "enable"]


def test_a_caller_who_collects_or_freezes_by_hand_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCollector(enabled=False, frozen=10)
    monkeypatch.setattr(garbage, "gc", fake)
    with collected_by_hand():
        pass
    assert fake.calls == ["collect", "disable"]


@pytest.mark.parametrize("fails", [False, True])
def test_no_step_of_a_run_is_interrupted_by_a_collection(
    fails: bool, label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, seen, collected = loop.train_step, list[bool](), list[int]()

    def step(state: TrainState, batch: Batch) -> StepResult:
        seen.append(gc.isenabled())
        if fails and state.step == 3:
            raise RunError("no step")
        return take(state, batch)

    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr(garbage, "COLLECT_EVERY", 2)
    really_collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda *of: collected.append(len(seen)) or really_collect(*of))
    recipe = train_recipe("dit-s-4", "run.steps=5")
    arguments = {"store_path": label_store.path, "run": tmp_path / "run", "device": CPU}
    assert gc.isenabled()
    if fails:
        with pytest.raises(RunError, match="no step"):
            loop.train(recipe, **arguments, report=lambda _: None, stop=StopRequest())
    else:
        loop.train(recipe, **arguments, report=lambda _: None, stop=StopRequest())
    assert gc.isenabled()
    assert seen == [False] * (4 if fails else 5)
    assert [at for at in collected if at] == ([2] if fails else [2, 4])


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("dit-s-2-256", "run.microbatch=2"),
        ("dit-s-2-256", "run.activation_checkpointing=blocks"),
        ("sana-600m-512", "model.name=sana-tiny"),
    ],
)
def test_a_step_leaves_no_cycle_that_holds_tensors(name: str, override: str) -> None:
    tiny = ["run.global_batch=4", "run.precision=fp32", "run.compile=false", "model.num_classes=3"]
    it = workload_at_resolution(load(name, [*tiny, override]), 64)
    learner = synthetic_learner(it.recipe, it.spec, it.tokens, CPU)
    batch = synthetic_batch(it.store, it.largest_bucket, 4, it.tokens, CPU)
    train_step(learner, batch)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        train_step(learner, batch)
        train_step(learner, batch)
        gc.collect()
        left = [type(one).__name__ for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
