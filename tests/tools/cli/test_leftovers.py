"""What commands leave beside their outputs: nothing, and they remove only temporaries of these very outputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import start
from making import LABEL_RECIPE, TRAIN_RECIPE, Leandit, make_class_folder, train_recipe
from runs import run_to
from stores import copy_of

from leandit import create_store
from leandit.datasets.disk.files import EXIT_DIED, REPLACED, TEMPORARY_PREFIX, host
from leandit.datasets.store import LatentStore
from leandit.precompute.sharing.leases import Lease

pytestmark = pytest.mark.usefixtures("tiny_models", "small")


def settings(overrides: list[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


PRECOMPUTE = ["precompute", "imagenet-256", *settings(LABEL_RECIPE), "--device", "cpu"]
TINY = settings(["model.name=DiT-S/4", "model.num_classes=0", "run.compile=false", *TRAIN_RECIPE])
DRAWN = ["--steps", 1, "--device", "cpu"]
Command = Callable[[Path, Path, Path], list[Any]]  # of a run, a store and a folder of images, without its output

# Its output, and what a process that died in the middle of it leaves half written.
COMMANDS: dict[str, tuple[Command, str, str]] = {
    "precompute": (
        lambda run, store, images: [*PRECOMPUTE, "--source", images, "--store"],
        "store",
        "store/revisions/000001/plan",
    ),
    "train": (
        lambda run, store, images: ["train", "dit-s-2-256", *TINY, "--store", store, "--run"],
        "run",
        "run/run.json",
    ),
    "compact": (lambda run, store, images: ["compact", store, "--out"], "compact", "compact"),
    "export": (lambda run, store, images: ["export", run, "--format", "official", "--out"], "exported", "exported"),
    "sample a grid": (
        lambda run, store, images: ["sample", run, *DRAWN, "--label", 0, "--out"],
        "grid",
        "grid/grid.png",
    ),
    "sample a set": (
        lambda run, store, images: ["sample", run, *DRAWN, "--npz", "--num", 2, "--out"],
        "set",
        "set/000001.png",
    ),
    "average": (
        lambda run, store, images: ["average", run, "--length", 0.1, "--out"],
        "averaged",
        "averaged/snapshot-2",
    ),
    "report a store": (
        lambda run, store, images: ["report", store, "--count", 0, "--out"],
        "store.html",
        "store.html",
    ),
    "report a run": (lambda run, store, images: ["report", run, "--out"], "run.html", "run.html"),
    "inspect": (lambda run, store, images: ["inspect", store, "--count", 1, "--sheet"], "sheet.png", "sheet.png"),
}
REFUSED_AGAIN = ("export", "average")  # they never replace what is there


@pytest.fixture(scope="module")
def run(golden: Any, label_store: LatentStore) -> Path:
    """A run with stored averages."""

    def make(folder: Path) -> None:
        recipe = train_recipe("dit-s-4", "run.steps=2", "ema.kind=power", "ema.keep_every=1", "run.checkpoint_every=2")
        run_to(recipe, label_store, folder)

    return golden("run-of-averages", make)


@pytest.fixture(scope="module")
def two_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_class_folder(tmp_path_factory.mktemp("images") / "train", classes=2, per_class=1)


def tree(folder: Path) -> set[str]:
    """Paths of all files and folders."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def leave_temporary(final: Path, *, is_folder: bool = False, mark: str = "") -> str:
    """A temporary of a process that died; returns its name."""
    path = final.with_name(f"{TEMPORARY_PREFIX}{host()}-0123abcd{mark}@{final.name}")
    if is_folder:
        path.mkdir(parents=True)
        (path / "half").write_bytes(b"half")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    return path.name


def leave_lease(path: Path) -> None:
    """The lease of a process that died."""

    def die() -> None:
        path.parent.mkdir()
        assert Lease(path).take()
        os._exit(EXIT_DIED)

    assert start(die).wait().code == EXIT_DIED


def leave_other_projects(folder: Path) -> set[str]:
    """Temporaries that a dead process of other projects left, in a folder and below."""
    before = tree(folder)
    leave_temporary(folder / "pixart")
    leave_temporary(folder / "imagenet", is_folder=True)
    leave_temporary(folder / "moved", is_folder=True, mark=REPLACED)
    leave_temporary(folder / "other/run/checkpoint-5", is_folder=True)
    leave_temporary(folder / "other/store/buckets/32x32/moments/c/0/0/0/0")
    return tree(folder) - before


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_leaves_its_output_alone_and_sweeps_only_what_belongs_to_it(
    name: str, run: Path, label_store: LatentStore, two_images: Path, leandit: Leandit
) -> None:
    here = Path.cwd()
    command, output, half_written = COMMANDS[name]
    words = [*command(run, label_store.path, two_images), here / output]
    others = leave_other_projects(here)
    leave_temporary(here / half_written, is_folder=not Path(half_written).suffix)
    ended = leandit(*words)
    assert ended.code == 0, ended.err
    at_top = {path for path in tree(here) - others if "/" not in path}
    assert at_top == {output}
    assert others <= tree(here)
    assert not [path for path in tree(here) - others if TEMPORARY_PREFIX in path or "leases" in path]

    whole = tree(here)
    again = leandit(*words)
    assert (again.code != 0) == (name in REFUSED_AGAIN)
    assert tree(here) == whole


def test_a_store_of_ones_own_arrays_sweeps_only_what_belongs_to_it(tmp_path: Path) -> None:
    store = tmp_path / "store"
    others = {leave_temporary(store / "pixart"), leave_temporary(store / "imagenet", is_folder=True)}
    leave_temporary(store / "revisions/000001/journal/records.bin")
    leave_temporary(store / "buckets/64x64/latents/c/0/0/0/0")
    with create_store(store, latent={"channels": 1, "downscale": 8, "scale": 1.0}) as writer:
        writer.add("a", latent=np.zeros((1, 8, 8), np.float32))
    assert {path.name for path in store.rglob(f"{TEMPORARY_PREFIX}*")} == others


@pytest.mark.parametrize("words", [["precompute"], ["train"], ["sample"], ["verify"]], ids=" ".join)
def test_a_folder_of_other_projects_as_the_output_is_refused_and_stays_as_it_is(
    words: list[str], run: Path, label_store: LatentStore, two_images: Path, leandit: Leandit
) -> None:
    here = Path.cwd()
    leave_other_projects(here)
    (here / "notes.txt").write_text("mine")
    (here / "drawing.png").write_bytes(b"mine")
    before = tree(here)
    all_words = {
        "precompute": [*PRECOMPUTE, "--source", two_images, "--store", here],
        "train": ["train", "dit-s-2-256", *TINY, "--store", label_store.path, "--run", here],
        "sample": ["sample", run, *DRAWN, "--npz", "--num", 2, "--out", here],
        "verify": ["verify", "--repair", here],
    }[words[0]]
    assert leandit(*all_words).code in (2, 3)
    assert tree(here) == before


def test_a_rerun_of_a_complete_store_removes_what_processes_left_that_died(
    class_folder: Path, label_store: LatentStore, leandit: Leandit
) -> None:
    store = copy_of(label_store.path, Path("store"))
    words = [*PRECOMPUTE, "--source", class_folder, "--store", store]
    whole = tree(store)
    assert leandit(*words).code == 0
    assert tree(store) == whole
    for name in ("zarr.json", "buckets/32x32/moments/c/0/0/0/0", "revisions/000001/manifest.json"):
        leave_temporary(store / name)
    leave_temporary(store / "revisions/000002/plan", is_folder=True)
    leave_lease(store / "leases/2-buckets-32x32-1.lock")
    assert "nothing to encode" in leandit(*words).out
    assert tree(store) == whole
