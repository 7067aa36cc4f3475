"""Memory allocators, precision on a GPU, and garbage that is collected between steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from making import CPU, train_recipe
from runs import run_to
from tiny_steps import TinySteps

from leandit.datasets.batches.batch import Batch
from leandit.datasets.errors import RunError
from leandit.datasets.store import LatentStore
from leandit.train import loop
from leandit.train.config import load
from leandit.train.metrics.meter import StepResult
from leandit.train.optim import process
from leandit.train.optim.process import set_allocator, set_precision
from leandit.train.run.state import Run

pytestmark = pytest.mark.usefixtures("tiny_models")


def test_segments_expand_unless_the_user_or_cuda_was_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    environment: dict[str, str] = {}
    set_allocator(cuda, environment)
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        chosen = {name: "max_split_size_mb:64"}
        set_allocator(cuda, chosen)
        assert chosen == {name: "max_split_size_mb:64"}
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    started: dict[str, str] = {}
    set_allocator(cuda, started)
    assert not started


@pytest.fixture
def backends() -> Iterator[tuple[Any, Any]]:
    """Those of matrix products and of convolutions, as before at the end."""
    both = torch.backends.cuda.matmul, torch.backends.cudnn
    before = *(backend.allow_tf32 for backend in both), torch.backends.cudnn.benchmark
    yield both
    both[0].allow_tf32, both[1].allow_tf32, both[1].benchmark = before


@pytest.mark.parametrize(("model", "timed"), [("sana-1600m", True), ("DiT-XL/2", False), ("pixart-sigma", False)])
def test_convolutions_are_timed_where_a_model_has_them_in_its_blocks(
    model: str, timed: bool, backends: tuple[Any, Any]
) -> None:
    torch.backends.cudnn.benchmark = not timed
    spec: Any = SimpleNamespace(name=model)
    for precision in ("bf16", "tf32"):
        set_precision(load("dit-s-2-256", [f"run.precision={precision}"]), spec)
        assert torch.backends.cudnn.benchmark == timed
        assert [backend.allow_tf32 for backend in backends] == [precision == "tf32"] * 2


def test_no_step_of_a_run_is_interrupted_by_a_collection_and_its_end_turns_collections_on(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    gc.unfreeze()  # what the session has frozen
    take, seen, collected, collect = loop.train_step, list[bool](), list[int](), gc.collect

    def step(state: Run, batch: Batch) -> StepResult:
        seen.append(gc.isenabled())
        if state.step == 5:
            raise RunError("no step")
        return take(state, batch)

    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr(process, "COLLECT_EVERY", 2)
    monkeypatch.setattr(gc, "collect", lambda *of: collected.append(len(seen)) or collect(*of))
    with pytest.raises(RunError, match="no step"):
        run_to(train_recipe("dit-s-4", "run.steps=9"), label_store, tmp_path / "run")
    assert gc.isenabled()
    assert seen == [False] * 6
    assert [at for at in collected if at] == [2, 4]
    gc.freeze()


@pytest.mark.parametrize(
    ("model", "setting"), [("labels", "run.activation_checkpointing=blocks"), ("sana", "run.microbatch=2")]
)
def test_a_step_leaves_no_cycle_that_holds_tensors(model: str, setting: str) -> None:
    steps = TinySteps(model, CPU, setting)
    steps.step(4)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(2):
            steps.step(4)
        gc.collect()
        left = [type(one).__name__ for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
