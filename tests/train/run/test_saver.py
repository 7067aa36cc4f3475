"""Checkpoints that are written beside the next steps: of the step they are of, whole, and their errors are not lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from making import CPU, train_recipe, tree_digest

from leandit.datasets.errors import ResourceError
from leandit.datasets.store import LatentStore
from leandit.train import loop
from leandit.train.config import RunSection
from leandit.train.loop import train
from leandit.train.parallel.stop import StopRequest
from leandit.train.run import saver
from leandit.train.run.saver import Captured, Staging
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

    def write_late(captured: Captured, run: Path, section: RunSection) -> None:
        if captured.step < 6:
            stepped.clear()
            assert stepped.wait(60)  # a step is made meanwhile
        really_write(captured, run, section)
        order.append(f"wrote {captured.step}")

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

    def write(captured: Captured, run: Path, section: RunSection) -> None:
        if captured.step == failing:
            raise ResourceError("the disk is full")
        really_write(captured, run, section)

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


class FakeGpu:
    """Stands for a GPU where there is none: its copies are made when an event after them is waited for."""

    started: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []
    allocated: ClassVar[list[int]] = []
    refuses = False

    class Event:
        def record(self) -> None:
            self.copies = list(FakeGpu.started)

        def synchronize(self) -> None:
            for target, source in self.copies:
                torch.Tensor.copy_(target, source)

    class Memory(torch.Tensor):
        def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            assert non_blocking
            plain = self.as_subclass(torch.Tensor)
            FakeGpu.started.append((plain, source.clone()))  # in the order of the stream: later steps come after it
            return plain


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> type[FakeGpu]:
    empty = torch.empty

    def allocate(*shape: int, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        if not pin_memory:
            return empty(*shape, **named)
        FakeGpu.allocated.append(shape[0])
        if FakeGpu.refuses:
            raise RuntimeError("out of page-locked memory")
        return empty(*shape, **named).fill_(7).as_subclass(FakeGpu.Memory)

    monkeypatch.setattr(FakeGpu, "started", [])
    monkeypatch.setattr(FakeGpu, "allocated", [])
    monkeypatch.setattr(FakeGpu, "refuses", False)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr("torch.cuda.Event", FakeGpu.Event)
    monkeypatch.setattr(saver, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(saver, "BLOCK_BYTES", 1 << 18)
    return FakeGpu


def test_copies_from_a_gpu_are_written_once_they_are_complete_and_their_memory_is_reused(
    label_store: LatentStore, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    settings = ("run.steps=6", "run.checkpoint_every=2", "run.keep_checkpoints=9")
    run_to(label_store, tmp_path / "cpu", *settings)
    gpu: type[FakeGpu] = request.getfixturevalue("fake_gpu")
    run_to(label_store, tmp_path / "gpu", *settings)
    assert checkpoints(tmp_path / "gpu") == checkpoints(tmp_path / "cpu")
    num_copies, rest = divmod(len(gpu.started), 3)
    assert num_copies > 50
    assert not rest
    addresses = [target.data_ptr() for target, _ in gpu.started]
    assert addresses[:num_copies] == addresses[num_copies : 2 * num_copies] == addresses[2 * num_copies :]
    assert len(set(addresses)) == num_copies
    assert len(gpu.allocated) > 1
    held = sum(target.nbytes for target, _ in gpu.started[:num_copies])
    assert sum(gpu.allocated) < 1.5 * held + saver.BLOCK_BYTES


def test_refused_page_locked_memory_is_logged_and_other_memory_is_used(
    fake_gpu: type[FakeGpu], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_gpu, "refuses", True)
    with caplog.at_level(logging.WARNING):
        copy = Staging().copy(torch.arange(5))
    assert copy.tolist() == [0, 1, 2, 3, 4]
    assert "262144 bytes of page-locked memory are refused (out of page-locked memory)" in caplog.text
