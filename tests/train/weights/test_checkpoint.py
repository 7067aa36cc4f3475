"""Checkpoints are there whole or not at all; damage and malice are seen before anything is used; the run goes on."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from faults import flip, start
from making import CPU, train_recipe, tree_digest
from runs import read_all

from leandit.datasets.disk import files
from leandit.datasets.disk.files import Failpoint
from leandit.datasets.disk.hashing import canonical_json, read_json, sha256_of, xxh3_parts
from leandit.datasets.disk.strays import find_strays
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, ResourceError, RunError
from leandit.train.config import TrainRecipe
from leandit.train.loop import Outcome, StopRequest, train
from leandit.train.run.checkpoints import GROUPS, capture, due, start_or_resume, write
from leandit.train.run.data import endless
from leandit.train.run.manifest import open_stores, read_run_manifest
from leandit.train.run.state import Run
from leandit.train.sampling.snapshot import load_snapshot
from leandit.train.step import train_step
from leandit.train.weights import checkpoint
from leandit.train.weights.checkpoint import Saved

FILES = ("state.json", "model.safetensors", "ema.safetensors", "optimizer.safetensors")

pytestmark = pytest.mark.usefixtures("tiny_models")


def recipe_of(steps: int) -> TrainRecipe:
    kept = ("run.checkpoint_every=1", "run.keep_checkpoints=2")
    return train_recipe("pixart-tiny", "schedule.kind=constant", f"run.steps={steps}", *kept)


def go(store: LatentStore, run: Path, steps: int, said: list[str] | None = None) -> Outcome:
    warn, stop = (said if said is not None else []).append, StopRequest()
    return train(recipe_of(steps), store_path=store.path, run=run, device=CPU, report=print, stop=stop, warn=warn)


def silent(_: str) -> None:
    """For warnings that a test does not look at."""


def new_state(store: LatentStore, run: Path, steps: int) -> Run:
    """A state as a call of ``train`` builds it, nothing loaded yet."""
    recipe = recipe_of(steps)
    return Run.open(recipe, open_stores(recipe, store.path, run, read_run_manifest(run), silent), CPU, silent)


def resume(trained: Run, run: Path, warn: Callable[[str], None] = silent) -> None:
    start_or_resume(trained, run, warn)


def save_now(trained: Run, run: Path) -> None:
    write(capture(trained, due(trained.recipe, trained.step)), trained.step, run, trained.recipe.run)


def tensors_of(trained: Run) -> dict[str, torch.Tensor]:
    """A copy of every tensor that a checkpoint could change."""
    groups = {group: dict(trained.engine.tensors(group)) for group in GROUPS}
    return {f"{group}/{name}": t.detach().clone() for group, tensors in groups.items() for name, t in tensors.items()}


def assert_untouched(trained: Run, before: dict[str, torch.Tensor]) -> None:
    now = tensors_of(trained)
    assert now.keys() == before.keys()
    assert [name for name in now if not torch.equal(now[name], before[name])] == []
    assert trained.step == 0
    assert trained.loader.state_dict()["number"] == 0


@pytest.fixture(scope="module")
def whole(finished: Path, caption_store: LatentStore) -> Path:
    """A run of four steps in one go; do not change it."""
    go(caption_store, finished.with_name("whole"), 4)
    return finished.with_name("whole")


@pytest.fixture(scope="module")
def finished(caption_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with both checkpoints; do not change it."""
    run = tmp_path_factory.mktemp("finished") / "run"
    go(caption_store, run, 2)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return shutil.copytree(finished, tmp_path / "run")


def saved_bytes(run: Path, step: int) -> dict[str, dict[str, bytes]]:
    """Every byte of a checkpoint and its snapshot."""
    return {kind: tree_digest(run / f"{kind}-{step}") for kind in ("checkpoint", "snapshot")}


# --- Damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_each_flipped_bit_is_seen_before_a_tensor_is_applied(count: int, run: Path, caption_store: LatentStore) -> None:
    """In a run with one checkpoint and one snapshot; before the reading, or, every third time, after a check."""
    shutil.rmtree(run / "checkpoint-1")
    shutil.rmtree(run / "snapshot-1")
    trained, draw = new_state(caption_store, run, 3), random.Random(7)
    before, whole = tensors_of(trained), tree_digest(run)
    files = [path for kind in ("checkpoint-2", "snapshot-2") for path in sorted((run / kind).iterdir())]

    def read(path: Path, saved: Saved | None, said: str) -> None:
        if saved:
            saved.tensors(path.stem, trained.engine.state(path.stem))
        else:
            resume(trained, run) if path.parent.name == "checkpoint-2" else load_snapshot(run, CPU)
        pytest.fail(f"not seen: {said}")

    for number in range(count):
        path, folder = (one := draw.choice(files)), one.parent
        size, bit = path.stat().st_size, draw.randrange(8)
        place = 8 * draw.randrange(size if draw.random() < 0.7 else min(size, 4096)) + bit  # often in the header
        said, saved = f"{folder.name}/{path.name}, bit {place} of {size} bytes", None
        if number % 3 == 0 and path.suffix == ".safetensors" and folder.name == "checkpoint-2":
            saved = read_all(folder)
        flip(path, place)
        with pytest.raises(DamageError, match=path.name if saved else folder.name):
            read(path, saved, said)
        flip(path, place)
        assert_untouched(trained, before)
    assert {name: data for name, data in tree_digest(run).items() if name in whole} == whole
    resume(trained, run)
    assert trained.step == 2


HARMS: dict[str, Callable[[Path], Any]] = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "longer by a byte": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "emptied": lambda path: path.write_bytes(b""),
    "zero-filled": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "deleted": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "of the other checkpoint": lambda path: shutil.copy(path.parent.with_name("checkpoint-1") / path.name, path),
}


@pytest.mark.parametrize("name", FILES)
def test_a_harmed_file_is_refused_by_name(name: str, run: Path, tmp_path: Path) -> None:
    for number, harm in enumerate(HARMS.values()):
        here = shutil.copytree(run, tmp_path / f"{number}")
        harm(here / "checkpoint-2" / name)
        with pytest.raises(DamageError, match=f"checkpoint-2'.*'{name}'|checkpoint-2'.*checkpoint-1"):
            read_all(here / "checkpoint-2")


def test_files_and_folders_that_do_not_belong_are_not_looked_into(run: Path, tmp_path: Path) -> None:
    for name in (".metadata", "model.safetensors.bak", "model.pt"):
        (run / "checkpoint-2" / name).write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
        with pytest.raises(DamageError, match=f"'{name}' does not belong"):
            read_all(run / "checkpoint-2")
        (run / "checkpoint-2" / name).unlink()
    assert not (tmp_path / "executed").exists()
    for other in ("checkpoint-1", "snapshot-2"):
        shutil.rmtree(run / "checkpoint-2")
        (run / other).rename(run / "checkpoint-2")
        with pytest.raises(DamageError, match=f"it is {other}"):
            read_all(run / "checkpoint-2")


class Payload:
    """What a pickle may do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


# --- Malice: hashes that fit, content that does not -------------------------------------------------------------------


def rewrite(path: Path, changes: dict[str, Any], *, drop: tuple[str, ...] = ()) -> None:
    """Change the state of a checkpoint and give it the hash that fits."""
    document = {key: value for key, value in read_json(path / "state.json").items() if key not in drop} | changes
    document.pop("state_sha256", None)
    (path / "state.json").write_bytes(canonical_json(document | {"state_sha256": sha256_of(document)}))


def replace_file(path: Path, name: str, data: bytes) -> None:
    """Put other bytes into a checkpoint, and their hash into its state."""
    (path / name).write_bytes(data)
    size, digest = xxh3_parts([data])
    files = read_json(path / "state.json")["files"]
    rewrite(path, {"files": files | {name: {"bytes": size, "xxh3_128": digest}}})


NAMES_ELSEWHERE = ("../../x.safetensors", "/x.safetensors", "a/b.safetensors", "", "MODEL.safetensors")
ENTRY = {"bytes": 0, "xxh3_128": "99aa06d3014798d86001c324468d497f"}
STATES: list[dict[str, Any]] = [{"files": {name: ENTRY}} for name in (*NAMES_ELSEWHERE, "x.safetensors\n")]
STATES += [{"files": {"model.safetensors": ENTRY | {"bytes": -1}}}, {"files": []}, {"step": "2"}, {"step": -1}]
STATES += [{"kind": "other"}, {"num_images": "many"}, {"num_images": -1}, {"loader": None}, {"spec": []}]
STATES += [{key: Ellipsis} for key in ("kind", "step", "files", "num_images", "loader", "spec")]


def test_a_state_without_a_value_or_with_one_of_another_kind_is_damage(run: Path, caption_store: LatentStore) -> None:
    (run.parent / "x.safetensors").write_bytes(b"")
    shutil.rmtree(run / "checkpoint-1")
    whole = (run / "checkpoint-2/state.json").read_bytes()
    for changes in STATES:
        (key,) = changes
        rewrite(run / "checkpoint-2", {} if changes[key] is Ellipsis else changes, drop=(key,))
        with pytest.raises(DamageError, match=f"(?s)'{key}.*is not valid"):
            go(caption_store, run, 3)
        (run / "checkpoint-2/state.json").write_bytes(whole)


TEXTS = (b"", b"null", b'{"a": NaN, "state_sha256": "x"}', b'{"a": "\\ud800", "state_sha256": "x"}')
DEEP = (b'{"a": ' + b"1" * 5000 + b"}", b'{"a": ' * 900 + b"1" + b"}" * 900, b"[" * 100_000)


@pytest.mark.parametrize("content", [*TEXTS, *DEEP], ids=lambda content: content[:20].decode())
def test_a_state_that_no_release_wrote_is_damage(content: bytes, run: Path) -> None:
    (run / "checkpoint-2/state.json").write_bytes(content)
    with pytest.raises(DamageError, match=r"state\.json"):
        read_all(run / "checkpoint-2")


def test_a_wrong_place_in_the_data_is_refused_before_tensors_apply(run: Path, caption_store: LatentStore) -> None:
    loader, trained = read_json(run / "checkpoint-2/state.json")["loader"], new_state(caption_store, run, 3)
    before = tensors_of(trained)
    changes = ({"number": -1}, {"number": 10**30}, {"draw_seed": 1}, {"root_hashes": ["other"]}, {"order": {}})
    for other in ({}, *(loader | change for change in changes)):
        rewrite(run / "checkpoint-2", {"loader": other})
        with pytest.raises(RunError, match="loader state"):
            resume(trained, run)
        assert_untouched(trained, before)


def header_only(dtype: str) -> bytes:
    header = json.dumps({"w": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2]}}).encode()
    return len(header).to_bytes(8, "little") + header + b"\0\0"


HARMED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda t: dict(list(t.items())[1:]), "is missing"),
    (lambda t: t | {"more": torch.zeros(1)}, "'more' is too many"),
    (lambda t: {name: tensor[None] for name, tensor in t.items()}, "the model has"),
    (lambda t: {name: tensor.double() for name, tensor in t.items()}, "torch.float64, the model has"),
    (lambda _: b"", "holds no tensors"),
    (lambda _: pickle.dumps({"w": 1}), "holds no tensors"),
    (lambda _: header_only("F8_E8M0"), "holds no tensors"),
    (lambda _: header_only("F64"), "holds no tensors"),
]


@pytest.mark.parametrize("group", ["model", "ema", "optimizer"])
def test_tensors_that_do_not_fit_are_never_applied(group: str, run: Path, caption_store: LatentStore) -> None:
    shutil.rmtree(run / "checkpoint-1")
    path, trained = run / "checkpoint-2" / f"{group}.safetensors", new_state(caption_store, run, 3)
    before, tensors = tensors_of(trained), safetensors.torch.load(path.read_bytes())
    for harm, words in HARMED:
        harmed = harm(tensors)
        replace_file(path.parent, path.name, harmed if isinstance(harmed, bytes) else safetensors.torch.save(harmed))
        with pytest.raises(DamageError, match=f"{path.name}.*{words}"):
            resume(trained, run)
        assert_untouched(trained, before)
    model = run / "snapshot-2/model.safetensors"
    replace_file(model.parent, model.name, safetensors.torch.save({"w": torch.zeros(1)}))
    with pytest.raises(DamageError, match=r"snapshot '.*model\.safetensors"):
        load_snapshot(run, CPU)


def test_another_format_or_model_is_refused_and_not_taken_for_damage(run: Path, caption_store: LatentStore) -> None:
    state = read_json(run / "checkpoint-2/state.json")
    for key, value, words in (
        ("format_version", 99, "format version 99, this release reads 1"),
        ("spec", state["spec"] | {"num_classes": 7}, "of model"),
    ):
        rewrite(run / "checkpoint-2", state | {key: value})
        with pytest.raises(RunError, match=words):
            go(caption_store, run, 3)
        assert (run / "checkpoint-2").is_dir()


# --- Going on with an older one ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "harm"), [("state.json", "half"), ("optimizer.safetensors", "deleted")])
def test_the_newest_valid_one_is_resumed(
    name: str, harm: str, run: Path, whole: Path, caption_store: LatentStore
) -> None:
    HARMS[harm](run / "checkpoint-2" / name)
    harmed, said = tree_digest(run / "checkpoint-2"), list[str]()
    outcome = go(caption_store, run, 4, said=said)
    assert (outcome.first_step, outcome.finished) == (2, True)
    (line,) = said
    for words in ("DAMAGED CHECKPOINT 'checkpoint-2'", name, "'damaged-checkpoint-2'", "from 'checkpoint-1' instead"):
        assert words in line
    assert "\n" not in line
    assert tree_digest(run / "damaged-checkpoint-2") == harmed
    assert saved_bytes(run, 4) == saved_bytes(whole, 4)


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_bad_sector_is_damage_and_a_network_folder_that_fails_is_not(
    name: str, number: int, run: Path, caption_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes

    def read_or_fail(path: Path) -> bytes:
        if path == run / "checkpoint-2" / name:
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_or_fail)
    if number == errno.EIO:
        said: list[str] = []
        assert go(caption_store, run, 4, said=said).first_step == 2
        assert "DAMAGED CHECKPOINT 'checkpoint-2'" in said[0]
        return
    with pytest.raises(ResourceError, match=os.strerror(number)):
        go(caption_store, run, 4)
    assert (run / "checkpoint-2").is_dir()


@pytest.mark.parametrize("every", [pytest.param(3, id="sample"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_a_crash_while_a_damaged_checkpoint_is_set_aside_loses_nothing(
    every: int, run: Path, whole: Path, caption_store: LatentStore, tmp_path: Path
) -> None:
    HARMS["half"](run / "checkpoint-2/ema.safetensors")
    harmed = tree_digest(run / "checkpoint-2")
    at, died = 0, True
    while died:
        here = shutil.copytree(run, tmp_path / f"{at}")
        trained = new_state(caption_store, here, 4)
        died = start(lambda t=trained, h=here: resume(t, h), failpoint=Failpoint("die", at)).wait().died
        assert go(caption_store, here, 4).first_step == 2
        assert find_strays(here) == []
        assert tree_digest(here / "damaged-checkpoint-2") == harmed
        assert saved_bytes(here, 4) == saved_bytes(whole, 4)
        at += every
    assert at > 8  # a rename and two files, each with its syncs


def test_without_a_valid_checkpoint_nothing_begins_from_scratch(run: Path, caption_store: LatentStore) -> None:
    for step in (1, 2):
        flip(run / f"checkpoint-{step}/model.safetensors", 800)
    before = tree_digest(run)
    for _ in range(2):  # nothing was renamed, so the second time is as the first
        with pytest.raises(DamageError, match=r"no valid checkpoint.*checkpoint-2.*model\.safetensors"):
            go(caption_store, run, 4)
        assert tree_digest(run) == before
    for step in (1, 2):
        checkpoint.set_aside(run / f"checkpoint-{step}")
    with pytest.raises(DamageError, match="only 'damaged-checkpoint-2' is left"):
        go(caption_store, run, 4)
    flip(run / "damaged-checkpoint-1/model.safetensors", 800)  # restored from a copy
    (run / "damaged-checkpoint-1").rename(run / "checkpoint-1")
    assert go(caption_store, run, 4).first_step == 2


def test_a_disk_that_gives_back_other_bytes_ends_the_run_and_nothing_is_pruned(
    run: Path, caption_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_cached = checkpoint.drop_cached

    def spoil(path: Path) -> None:
        drop_cached(path)
        if path.name == "model.safetensors" and "checkpoint-3" in str(path.parent):
            flip(path, 8 * (path.stat().st_size - 3))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "drop_cached", spoil)
        with pytest.raises(DamageError, match=r"checkpoint-3'.*bytes of 'model\.safetensors'"):
            go(caption_store, run, 4)
    assert [path.name for path in checkpoint.find("checkpoint", run)] == ["checkpoint-1", "checkpoint-2"]
    assert find_strays(run) == []
    assert go(caption_store, run, 4).first_step == 3


# --- Crashes and failing disks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "every"),
    [("die", 4), *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("die", "eio", "enospc"))],
)
def test_a_save_that_fails_at_any_operation_costs_no_bit(
    kind: Any, every: int, finished: Path, caption_store: LatentStore, whole: Path, tmp_path: Path
) -> None:
    """What is there after a failure is what was, or what was to be, and the run resumes from it."""
    trained = new_state(caption_store, finished, 4)
    resume(trained, finished)
    train_step(trained, next(endless(trained.loader)))  # at step 3, not saved yet

    def attempt(at: int) -> tuple[Path, Any]:
        here = shutil.copytree(finished, tmp_path / f"{at}")
        return here, start(lambda: save_now(trained, here), failpoint=Failpoint(kind, at)).wait()

    operations = attempt(-1)[1].operations
    assert len(operations) > 25
    for number, at in enumerate(range(0, len(operations), every)):
        here, outcome = attempt(at)
        said = f"{kind} at {at}, {operations[at]}: {outcome.message}"
        if kind == "die":
            assert outcome.died, said
        elif outcome.code:
            assert "ResourceError" in outcome.error, said
        fresh, warnings = new_state(caption_store, here, 4), list[str]()
        resume(fresh, here, warnings.append)
        assert (warnings, find_strays(here)) == ([], []), said
        assert fresh.step in (2, 3), said
        for path in here.glob("*-[0-9]"):
            read_all(path)
        if every == 1 or number % 5 == 0:
            assert go(caption_store, here, 4).finished, said
            assert saved_bytes(here, 4) == saved_bytes(whole, 4), said
        shutil.rmtree(here)


def test_a_full_disk_keeps_older_ones(run: Path, caption_store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write_folder = saved_bytes(run, 2), checkpoint.write_folder

    def fill(final: Path, content: Any, *, replace: bool) -> bool:
        if final.name == "checkpoint-3":
            monkeypatch.setattr(files, "failpoint", Failpoint("enospc", 3))
        return write_folder(final, content, replace=replace)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_folder", fill)
        with pytest.raises(ResourceError, match=r"checkpoint-3'.*iB free") as caught:
            go(caption_store, run, 4)
    monkeypatch.setattr(files, "failpoint", None)
    assert caught.value.exit_code == 5
    assert saved_bytes(run, 2) == before
    assert find_strays(run) == []
    assert go(caption_store, run, 4).first_step == 3


# --- What is saved ----------------------------------------------------------------------------------------------------


def test_saved_tensors_come_back_with_their_dtype_and_folders_are_in_order_and_pruned_by_number(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).t(), "b": torch.tensor(7), "c": torch.randn(2).bfloat16()}
    for step in (10, 9, 100, 1):
        checkpoint.save(checkpoint.CHECKPOINT, tmp_path, step, {"model": tensors}, {"spec": {"x": 1}})
    saved = read_all(tmp_path / "checkpoint-9")
    assert (saved.state["step"], saved.state["spec"]) == (9, {"x": 1})
    for name, tensor in saved.tensors("model", tensors).items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])
    for other in ("12-old", "x", "007"):
        (tmp_path / f"checkpoint-{other}").mkdir()

    def found() -> list[str]:
        return [path.name.removeprefix("checkpoint-") for path in checkpoint.find(checkpoint.CHECKPOINT, tmp_path)]

    assert found() == ["1", "9", "10", "100"]
    checkpoint.prune(tmp_path, 2, proven=tmp_path / "checkpoint-1")  # read back, so it stays
    assert found() == ["1", "10", "100"]
    assert (tmp_path / "checkpoint-12-old").is_dir()


def test_nothing_in_a_run_is_pickled_and_who_may_read_the_state_may_read_the_weights(finished: Path) -> None:
    run = finished
    kinds = {path.suffix for path in run.rglob("*") if path.is_file() and ".tfevents." not in path.name}
    assert kinds == {".safetensors", ".json", ".jsonl", ".toml"}
    for path in run.rglob("*.safetensors"):
        size = int.from_bytes(path.read_bytes()[:8], "little")
        assert path.read_bytes()[8 : 8 + size].strip().startswith(b"{")
    for folder in [*run.glob("checkpoint-*"), *run.glob("snapshot-*")]:
        assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
