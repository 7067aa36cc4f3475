"""Sources by the command line: what ``leandit precompute`` enters, guesses, rejects and says."""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import CompletedProcess

from forked import run_forked
from making import LABEL_RECIPE, make_class_folder

from leandit.datasets.store import LatentStore

MAIN = "from leandit.tools.cli.main import main; main()"


def precompute(source: Path, store: Path, *overrides: str, recipe: str = "imagenet-256") -> CompletedProcess[str]:
    """The command with the small encoders that ship with leandit."""
    words = [word for override in (*LABEL_RECIPE, *overrides) for word in ("--set", override)]
    return run_forked(["-c", MAIN, "precompute", recipe, "--source", source, "--store", store, *words])


def facts(store: Path) -> tuple[list[str], list[int], list[str] | None]:
    """Keys, labels and classes of a store."""
    opened = LatentStore(store)
    columns = opened.records.to_pydict()
    return columns["key"], columns["label"], opened.spec.classes


def root_hash(done: CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    found = re.search(r"root hash\s+(\w{64})", done.stdout)
    assert found, done.stdout
    return found[1]


def test_a_lone_split_folder_is_entered_and_makes_the_store_of_the_folder_itself(tmp_path: Path) -> None:
    make_class_folder(tmp_path / "imagenet/train", classes=2, per_class=2)
    (tmp_path / "imagenet/README").write_text("no picture")
    inside = precompute(tmp_path / "imagenet/train", tmp_path / "inside")
    above = precompute(tmp_path / "imagenet", tmp_path / "above")
    assert root_hash(above) == root_hash(inside)
    assert facts(tmp_path / "above") == facts(tmp_path / "inside")
    assert facts(tmp_path / "above")[0] == ["n000/0.png", "n000/1.png", "n001/0.png", "n001/1.png"]
    assert "the only folder, 'train', is a split" in above.stderr
    assert "only folder" not in inside.stderr

    whole = precompute(tmp_path / "imagenet", tmp_path / "whole", "source.split=all")
    assert root_hash(whole) != root_hash(inside)
    assert facts(tmp_path / "whole")[2] == ["train"]


def test_a_link_to_itself_is_rejected_and_one_to_a_folder_around_it_is_counted(tmp_path: Path) -> None:
    source = make_class_folder(tmp_path / "imagenet/train", classes=2, per_class=15)
    (source / "n000/loop.png").symlink_to("loop.png")
    (source / "loop").symlink_to("loop")
    (source / "n001/up").symlink_to(source, target_is_directory=True)
    (source / "outside").symlink_to(source.parent, target_is_directory=True)
    done = precompute(source, tmp_path / "store")
    assert done.returncode == 0, done.stderr
    assert "31 planned = 30 stored + 1 rejected" in done.stdout
    assert "1 file, no pictures by name: 1 without extension" in done.stdout
    assert re.search(r"2 folders, .*linked twice: 1 (up, 1 outside|outside, 1 up)", done.stdout)
    records = LatentStore(tmp_path / "store").records.to_pylist()
    assert [(row["key"], row["reason"]) for row in records if row["reason"]] == [("n000/loop.png", "unreadable")]
    assert facts(tmp_path / "store")[2] == ["n000", "n001"]
