"""Checkpoints are there whole or not at all, and damage is seen before anything is used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from making import CPU, train_recipe

from leandit.datasets.errors import DamageError, LeanditError, ResourceError, RunError
from leandit.datasets.files import canonical_json, read_json
from leandit.datasets.store import LatentStore
from leandit.train import checkpoint, loop
from leandit.train.loop import StopRequest, train

FILES = ("state.json", "model.safetensors", "ema.safetensors", "optimizer.safetensors")


pytestmark = pytest.mark.usefixtures("tiny_models")


def go(store: LatentStore, run: Path, steps: int, name: str = "dit-s-4") -> loop.Outcome:
    recipe = train_recipe(name, "schedule.kind=constant", f"run.steps={steps}", "run.checkpoint_every=1")
    return train(recipe, store_path=store.path, run=run, device=CPU, report=lambda _: None, stop=StopRequest())


@pytest.fixture(scope="module")
def finished(label_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with both checkpoints; do not change it."""
    run = tmp_path_factory.mktemp("finished") / "run"
    go(label_store, run, 2)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return shutil.copytree(finished, tmp_path / "run")


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("place", [0.02, 0.5, 0.97])
@pytest.mark.parametrize("name", FILES[1:])
def test_a_flipped_bit_in_a_tensor_file_is_refused_before_anything_is_used(
    name: str, place: float, run: Path, label_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied = []
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *_a, **_k: applied.append(1))
    path = run / "checkpoint-2" / name
    flip_bit(path, int(place * path.stat().st_size))
    with pytest.raises(DamageError, match=f"checkpoint-2.*{name}"):
        go(label_store, run, 3)
    assert not applied


def test_a_flipped_bit_anywhere_in_the_state_is_refused(run: Path) -> None:
    path = run / "checkpoint-2/state.json"
    whole, unseen = path.read_bytes(), []
    for position in range(len(whole)):
        flip_bit(path, position)
        try:
            checkpoint.read(path.parent)
            unseen.append(whole[max(0, position - 12) : position + 6])
        except LeanditError:
            pass
        except (KeyError, AttributeError, TypeError) as error:
            unseen.append(f"{type(error).__name__} at {whole[max(0, position - 12) : position + 6]!r}")
        path.write_bytes(whole)
    assert not unseen, f"{len(unseen)} of {len(whole)}, as {unseen[:3]}"


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_is_refused_and_the_checkpoint_before_it_is_usable(
    name: str, run: Path, label_store: LatentStore
) -> None:
    (run / "checkpoint-2" / name).unlink()
    with pytest.raises(DamageError, match=name):
        go(label_store, run, 2)
    shutil.rmtree(run / "checkpoint-2")
    assert go(label_store, run, 2).first_step == 2


def test_a_folder_without_state_is_no_checkpoint(run: Path) -> None:
    (run / "checkpoint-2/state.json").unlink()
    with pytest.raises(RunError, match="no checkpoint"):
        checkpoint.read(run / "checkpoint-2")


def test_another_format_version_is_refused(run: Path) -> None:
    path = run / "checkpoint-2/state.json"
    path.write_bytes(canonical_json(read_json(path) | {"format_version": 99}))
    with pytest.raises(RunError, match="format version 99, this release reads 1"):
        checkpoint.read(path.parent)


class Crash(BaseException):
    """A process that dies: nothing catches it."""


@pytest.mark.parametrize(
    ("error", "raised"), [(Crash(), Crash), (OSError(28, "No space left on device"), ResourceError)]
)
def test_a_crash_while_saving_leaves_the_older_checkpoint_and_no_half_one(
    error: BaseException,
    raised: type[BaseException],
    run: Path,
    label_store: LatentStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit = checkpoint.commit_folder

    def die(temporary: Path, final: Path) -> None:
        if final.name == "checkpoint-3":
            raise error
        commit(temporary, final)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "commit_folder", die)
        with pytest.raises(raised):
            go(label_store, run, 3)
    assert [path.name for path in checkpoint.find(checkpoint.CHECKPOINT, run)] == ["checkpoint-1", "checkpoint-2"]
    assert go(label_store, run, 3).first_step == 3
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    for step in (10, 9, 100, 1):
        checkpoint.save(checkpoint.CHECKPOINT, tmp_path, step, {"model": {"w": torch.ones(1)}}, {})
    (tmp_path / "checkpoint-12-old").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    found = [path.name for path in checkpoint.find(checkpoint.CHECKPOINT, tmp_path)]
    assert found == ["checkpoint-1", "checkpoint-9", "checkpoint-10", "checkpoint-100"]
    checkpoint.prune(tmp_path, 2)
    assert checkpoint.find(checkpoint.CHECKPOINT, tmp_path)[0].name == "checkpoint-10"
    assert (tmp_path / "checkpoint-12-old").is_dir()


def test_saved_tensors_come_back_with_their_dtype(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).t(), "b": torch.tensor(7), "c": torch.randn(2).bfloat16()}
    saved = checkpoint.read(checkpoint.save(checkpoint.SNAPSHOT, tmp_path, 5, {"model": tensors}, {"spec": {"x": 1}}))
    assert (saved.state["step"], saved.state["spec"]) == (5, {"x": 1})
    for name, tensor in saved.tensors("model").items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        checkpoint.save(checkpoint.CHECKPOINT, tmp_path, 1, {"model": {"w": torch.tensor([value])}}, {})
    assert checkpoint.read(tmp_path / "checkpoint-1").tensors("model")["w"].item() == 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


@pytest.mark.parametrize("name", ["dit-s-4", "pixart-tiny"])
def test_nothing_in_a_run_is_pickled(name: str, finished: Path, caption_store: LatentStore, tmp_path: Path) -> None:
    run = finished
    if name == "pixart-tiny":
        run = tmp_path / "run"
        go(caption_store, run, 1, name)
    kinds = {path.suffix for path in run.rglob("*") if path.is_file() and ".tfevents." not in path.name}
    assert kinds == {".safetensors", ".json", ".jsonl", ".toml"}
    for path in run.rglob("*.safetensors"):
        size = int.from_bytes(path.read_bytes()[:8], "little")
        assert path.read_bytes()[8 : 8 + size].strip().startswith(b"{")
