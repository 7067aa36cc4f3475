"""Where a run finds its stores again: at a URL, through a local copy, moved, and from any working directory."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
from making import CPU, Leandit, train_recipe

from leandit.datasets.disk.hashing import canonical_json
from leandit.datasets.store import LatentStore
from leandit.train.loop import StopRequest, train

pytestmark = pytest.mark.usefixtures("tiny_models")

KINDS = ("URL", "URL and folder", "path and folder", "path")


@pytest.fixture
def origin(caption_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(caption_store.path, tmp_path / "data/store"))


def train_on(kind: str, origin: Path, run: Path, steps: int = 1) -> None:
    place = f"file://{origin}" if kind.startswith("URL") else str(origin)
    settings = [f"run.steps={steps}", "schedule.kind=constant", "run.checkpoint_every=1"]
    if kind.endswith("folder"):
        settings.append(f"run.remote_folder={origin.parent / 'copy'}")
    recipe = train_recipe("pixart-tiny", *settings)
    train(recipe, store_path=place, run=run, device=CPU, report=lambda _: None, stop=StopRequest())


def draw(leandit: Leandit, run: Path, out: Path, *options: object) -> Any:
    return leandit("sample", run, "--out", out, "--steps", 1, "--device", "cpu", *options)


def text_of(page: Path) -> str:
    return html.unescape(re.sub("<[^>]+>", " ", page.read_text()))


@pytest.mark.parametrize("kind", KINDS)
def test_captions_come_from_the_store_that_was_named_and_the_report_opens_it(
    kind: str, origin: Path, caption_store: LatentStore, leandit: Leandit, tmp_path: Path
) -> None:
    run = tmp_path / "runs/one"
    train_on(kind, origin, run)
    named = f"file://{origin}" if kind.startswith("URL") else str(origin)
    for folder in (tmp_path / "cache", tmp_path / "data/copy"):  # as if the machine were another one
        shutil.rmtree(folder, ignore_errors=True)
    ended = draw(leandit, run, tmp_path / "drawn", "--num", 3)
    assert (ended.code, "cannot be opened" in ended.err) == (0, False), ended.err
    drawn = json.loads((tmp_path / "drawn/samples.json").read_text())["samples"]
    assert set(drawn) <= set(caption_store.captions["text"].to_pylist())
    assert (tmp_path / "data/copy").exists() == kind.endswith("folder")  # opened in the same way
    assert leandit("report", run, "--out", tmp_path / "report.html").code == 0
    page = text_of(tmp_path / "report.html")
    assert named in page
    assert "not opened" not in page
    assert "14 in 3 buckets" in page


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_is_gone_is_named_and_not_replaced_without_a_word(
    kind: str, origin: Path, leandit: Leandit, tmp_path: Path
) -> None:
    train_on(kind, origin, tmp_path / "run")
    caption = LatentStore(origin).captions["text"][0].as_py()
    origin.rename(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    ended = draw(leandit, tmp_path / "run", tmp_path / "chosen", "--num", 2)
    assert ended.code == 3
    assert str(origin) in ended.err
    ended = draw(leandit, tmp_path / "run", tmp_path / "encoded", "--caption", caption)
    assert ended.code == 0, ended.err
    assert "cannot be opened" in ended.err + ended.out
    assert str(origin) in ended.err + ended.out
    ended = draw(leandit, tmp_path / "run", tmp_path / "given", "--num", 2, "--store", tmp_path / "elsewhere")
    assert (ended.code, "cannot be opened" in ended.err + ended.out) == (0, False)


def test_another_store_in_its_place_is_named(
    origin: Path, three_text_store: LatentStore, leandit: Leandit, tmp_path: Path
) -> None:
    train_on("path", origin, tmp_path / "run")
    caption = LatentStore(origin).captions["text"][0].as_py()
    shutil.rmtree(origin)
    shutil.copytree(three_text_store.path, origin)
    ended = draw(leandit, tmp_path / "run", tmp_path / "drawn", "--caption", caption)
    assert ended.code == 0, ended.err
    assert "is not the one" in ended.err + ended.out


def test_a_run_of_an_earlier_release_names_the_copy_and_its_url_is_found(
    origin: Path, leandit: Leandit, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_on("URL and folder", origin, run)
    values = json.loads((run / "run.json").read_text())
    del values["stores"][0]["remote_folder"], values["stores"][0]["has_secret"]
    values["stores"][0]["path"] = "../data/copy/store"
    (run / "run.json").write_bytes(canonical_json(values))
    ended = draw(leandit, run, tmp_path / "drawn", "--num", 2)
    assert ended.code == 0, ended.err
    assert leandit("report", run, "--out", tmp_path / "report.html").code == 0
    assert "not opened" not in text_of(tmp_path / "report.html")
    train_on("URL and folder", origin, run, steps=2)


@pytest.mark.parametrize("moved", ["both together", "the run behind a link", "started from another folder"])
def test_a_store_at_a_path_is_found_again(
    moved: str, origin: Path, leandit: Leandit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run = tmp_path / "data", tmp_path / "data/runs/one"
    if moved == "the run behind a link":
        (tmp_path / "disk/far/away").mkdir(parents=True)
        (data / "runs").symlink_to(tmp_path / "disk/far/away")
    if moved == "started from another folder":
        monkeypatch.chdir(data)
        train_on("path", Path("store"), Path("runs/one"))
        monkeypatch.chdir(tmp_path)
    else:
        train_on("path", origin, run)
    if moved == "both together":
        data.rename(tmp_path / "archive")
        run = tmp_path / "archive/runs/one"
    ended = draw(leandit, run, tmp_path / "drawn", "--num", 2)
    assert (ended.code, "cannot be opened" in ended.err) == (0, False), ended.err


def test_what_is_secret_in_a_url_is_not_recorded(origin: Path, leandit: Leandit, tmp_path: Path) -> None:
    fsspec.filesystem("memory").put(str(origin), "/user:hidden@bucket/store", recursive=True)
    recipe = train_recipe("pixart-tiny", "run.steps=1", "schedule.kind=constant")
    url = "memory://user:hidden@bucket/store"
    train(recipe, store_path=url, run=tmp_path / "run", device=CPU, report=lambda _: None, stop=StopRequest())
    assert "hidden" not in (tmp_path / "run/run.json").read_text()
    ended = draw(leandit, tmp_path / "run", tmp_path / "chosen", "--num", 2)
    assert (ended.code, "memory://bucket/store" in ended.err, "hidden" in ended.err) == (3, True, False), ended.err
