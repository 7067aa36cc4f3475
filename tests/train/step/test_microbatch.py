"""Microbatches: all ranks split alike, and a GPU halves them until a step fits."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda, gradients_of_zeros
from hypothesis import given
from hypothesis import strategies as st
from making import CPU, train_recipe
from runs import run_to
from tiny_steps import TinySteps

from leandit.datasets.batches.batch import Batch
from leandit.datasets.order.slices import rank_slice
from leandit.datasets.store import LatentStore
from leandit.errors import ResourceError, RunError
from leandit.train import loop
from leandit.train import step as step_module
from leandit.train.metrics.meter import StepResult
from leandit.train.optim import process
from leandit.train.optim.process import set_allocator
from leandit.train.run.state import Run
from leandit.train.step import fit_microbatch, image_losses, microbatches


@given(size=st.integers(1, 500), world_size=st.integers(1, 9), limit=st.integers(0, 60))
def test_microbatches_cover_every_rank_and_are_as_many_on_all(size: int, world_size: int, limit: int) -> None:
    parts = microbatches(size, world_size, limit)
    sizes = {part.stop - part.start for part in parts}
    assert len(sizes) == 1
    assert not limit or max(sizes) <= limit
    for rank in range(world_size):
        images = range(*rank_slice(size, rank, world_size).indices(size))
        assert [i for part in parts for i in images[part]] == list(images)
    most = math.ceil(size / world_size)
    assert len(parts) == (math.ceil(most / limit) if limit else 1)


@pytest.mark.usefixtures("tiny_models")
def test_a_gpu_halves_the_images_until_a_step_fits_and_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, room, updates = [], 2, []

    def losses(learner: Any, images: Any, step: int) -> Any:
        tried.append(len(images.latents))
        if tried[-1] > room:
            raise torch.OutOfMemoryError
        return image_losses(learner, images, step)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with fake_cuda(monkeypatch):
        gradients_of_zeros(monkeypatch)
        steps = TinySteps("labels", CUDA)
        learner: Any = steps.learner
        monkeypatch.setattr("leandit.train.step.image_losses", losses)
        monkeypatch.setattr(learner.engine.ema, "update", lambda *_: updates.append(learner.step))
        batch = steps.batch(7).to(CUDA)
        fit_microbatch(learner, steps.batch(2).to(CUDA))  # a short batch comes first, and limits nothing
        assert (learner.microbatches, tried) == ({}, [2])
        tried.clear()
        fit_microbatch(learner, batch)
        assert (learner.step, learner.num_images, updates) == (0, 0, [])
        assert all(parameter.grad is None for parameter in learner.engine.model.parameters())
        for _ in range(3):
            fit_microbatch(learner, batch)
            steps.step_on(batch)
    assert learner.microbatches == {batch.bucket: 2}
    assert tried[:3] == [7, 4, 2]
    assert updates == [0, 1, 2]
    assert len(tried) == 2 + 6 * 4  # one trial, then three steps of which the first two are tried before


@pytest.mark.usefixtures("tiny_models")
def test_what_cannot_fit_or_is_set_by_the_user_is_not_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "_fits", lambda *_: False)
    for settings in (["run.microbatch=3"], []):
        steps = TinySteps("labels", CPU, *settings)
        fit_microbatch(steps.learner, steps.batch())  # a CPU is never tried
        assert steps.learner.microbatches == {}
        steps.learner.device = CUDA
        if settings:
            fit_microbatch(steps.learner, steps.batch())
        else:
            with pytest.raises(ResourceError, match=r"1 image of bucket '64x64' do not fit.*smaller model"):
                fit_microbatch(steps.learner, steps.batch())


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
