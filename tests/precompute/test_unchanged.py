"""A precompute with nothing to do is found out without torch, and only where nothing is to be done."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import IN_TURN
from making import (
    CAPTION_RECIPE,
    CPU,
    LABEL_RECIPE,
    caption_recipe,
    label_recipe,
    no_progress,
    smooth_image,
    tree_digest,
)
from safetensors.torch import load_file, save_file

from leandit.datasets.errors import DamageError
from leandit.datasets.store import LatentStore
from leandit.precompute.encoders.model_files import local_folder
from leandit.precompute.pipeline import Report, precompute
from leandit.precompute.sources import several
from leandit.precompute.unchanged import Unchanged, unchanged
from leandit.tools.cli.main import main
from leandit.tools.terminal.outcome import change_rows

FOLDERS = {"label": "class_folder", "caption": "caption_folder"}
WEIGHTS = "models/vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def home(tmp_path: Path, class_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images, a VAE, and a store made of them."""
    shipped = local_folder("shipped:vae")
    assert shipped
    shutil.copytree(shipped, tmp_path / "models/vae")
    shutil.copytree(class_folder, tmp_path / "train")
    monkeypatch.chdir(tmp_path)
    recipe = label_recipe("vae.model=models/vae")
    precompute(recipe, source_path=tmp_path / "train", store_path=Path("store"), device=CPU, progress=no_progress)
    return tmp_path


def has_nothing_to_do(*overrides: str) -> bool:
    recipe = label_recipe("vae.model=models/vae", *overrides)
    return isinstance(unchanged(recipe, str(Path("train").resolve()), Path("store"), device="auto"), Unchanged)


def flip_weights(path: Path) -> None:
    weights = load_file(path)
    weights[next(iter(weights))].view(-1)[0] += 1e-3
    save_file(weights, path)


def set_key(path: Path, key: str, value: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "an image more": lambda home: smooth_image(99).save(home / "train/n000/new.png"),
    "an image less": lambda home: (home / "train/n000/1.png").unlink(),
    "the weights": lambda home: flip_weights(home / WEIGHTS),
    "the config": lambda home: set_key(home / "models/vae/config.json", "norm_num_groups", 2),
}


@pytest.mark.usefixtures("quick")
def test_whatever_has_changed_goes_the_ordinary_way(home: Path) -> None:
    assert has_nothing_to_do()
    before = {path: shutil.copytree(home / path, home / f"kept/{path}") for path in ("store", "train", "models")}
    for name, change in CHANGES.items():
        change(home)
        assert not has_nothing_to_do(), name
        for path, kept in before.items():
            shutil.rmtree(home / path)
            shutil.copytree(kept, home / path)  # with its times
        assert has_nothing_to_do(), name
    for override in ("images.resolution=48", "source.check=content", "store.shard_mib=8", "vae.keep=mean"):
        assert not has_nothing_to_do(override), override
    shutil.rmtree(home / "models")
    assert not has_nothing_to_do()


LOST = ["manifest.json", "records.parquet", "captions.parquet", "sources.parquet"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", [*(f"revisions/000001/{name}" for name in LOST), "buckets/32x32/moments/c/0/0/0/0"])
def test_a_store_that_has_lost_a_file_is_not_called_complete(name: str, home: Path) -> None:
    (home / "store" / name).unlink()
    with pytest.raises(DamageError, match=r"verify --repair"):
        has_nothing_to_do()


TEXT_CHANGES: dict[str, Callable[[Path], Any]] = {
    "weights": lambda text: flip_weights(text / "model.safetensors"),
    "config": lambda text: set_key(text / "config.json", "layer_norm_epsilon", 1e-5),
    "tokenizer": lambda text: (text / "tokenizer.json").write_text((text / "tokenizer.json").read_text() + " "),
    "a file of the tokenizer more": lambda text: (text / "added_tokens.json").write_text("{}"),
}


def test_the_text_encoder_and_its_tokenizer_are_compared_too(tmp_path: Path, caption_folder: Path) -> None:
    shipped = local_folder("shipped:t5")
    assert shipped
    text, store = shutil.copytree(shipped, tmp_path / "t5"), tmp_path / "store"
    recipe = caption_recipe(f"text.model={text}")
    precompute(recipe, source_path=caption_folder, store_path=store, device=CPU, progress=no_progress)

    def ask() -> bool:
        return isinstance(unchanged(recipe, str(caption_folder), store, device="auto"), Unchanged)

    assert ask()
    for name, change in TEXT_CHANGES.items():
        change(text)
        assert not ask(), name
        shutil.rmtree(text)
        shutil.copytree(shipped, text)
        assert ask(), name


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("before", "now"), [("cat dog", "cat wolf"), ("cat dog", "0 1"), ("0 1", "cat dog")])
def test_a_class_with_another_name_is_a_change_though_no_record_says_so(before: str, now: str, tmp_path: Path) -> None:
    store, recipe = tmp_path / "store", label_recipe()
    source = tmp_path / "source"
    source.mkdir()
    for i in range(2):
        smooth_image(i).save(source / f"{i}.png")

    def label(names: str) -> None:
        rows = "".join(f"{i}.png,{name}\n" for i, name in enumerate(names.split()))
        (source / "labels.csv").write_text(f"file_name,label\n{rows}")

    def make() -> Report:
        return precompute(recipe, source_path=source, store_path=store, device=CPU, progress=no_progress)

    def is_done() -> bool:
        return isinstance(unchanged(recipe, str(source), store, device="cpu"), Unchanged)

    label(before)
    make()
    assert is_done()
    label(now)
    assert not is_done()
    report = make()
    assert report.num_encoded == 0
    assert report.changes
    assert change_rows(report.changes) == [("source", "since the previous revision: classes renamed")]
    assert LatentStore(store).spec.classes == now.split()
    assert is_done()


@pytest.mark.parametrize("version", ["torch", "pillow"])
def test_other_libraries_go_the_ordinary_way(
    version: str, label_store: LatentStore, class_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> bool:
        return isinstance(unchanged(label_recipe(), str(class_folder), label_store.path, device="cpu"), Unchanged)

    assert ask()
    real: Callable[[str], str] = __import__("importlib.metadata").metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.1" if name == version else real(name))
    assert not ask()


@pytest.mark.parametrize("kind", ["label", "caption"])
def test_the_command_says_so_without_torch(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    store, folder = request.getfixturevalue(f"{kind}_store").path, request.getfixturevalue(FOLDERS[kind])
    recipe, overrides = ("imagenet-256", LABEL_RECIPE) if kind == "label" else ("demo", CAPTION_RECIPE)
    before = tree_digest(store)
    words = ["precompute", recipe, "--source", str(folder), "--store", str(store)]
    words += [word for override in overrides for word in ("--set", override)]
    ended = subprocess.run(
        [sys.executable, "-c", IN_TURN, json.dumps([words])], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    *said, last = ended.stdout.splitlines()
    code, warnings, modules = json.loads(last)
    assert (code, modules) == (0, [])
    notes = [line for line in warnings.splitlines() if not line.startswith("next: ")]
    assert ("columns: images 'file_name'" in notes[0]) if kind == "caption" else not notes
    num_records = LatentStore(store).records.num_rows
    assert " ".join(said[1].split()) == f"records {num_records} planned = {num_records} stored + 0 rejected"
    assert said[-1].split(maxsplit=2) == ["this", "run", "nothing to encode, the store is complete"]
    assert tree_digest(store) == before


@pytest.mark.usefixtures("quick")
def test_a_source_that_has_changed_is_listed_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list_source, listed = several.list_source, []
    monkeypatch.setattr(several, "list_source", lambda *a, **b: listed.append(a) or list_source(*a, **b))
    words = ["leandit", "precompute", "imagenet-256", "--source", str(home / "train"), "--store", "store"]
    words += [word for override in (*LABEL_RECIPE, "vae.model=models/vae") for word in ("--set", override)]
    monkeypatch.setattr(sys, "argv", [*words, "--device", "cpu"])
    for change, revision in ((lambda _: None, 1), (CHANGES["an image more"], 2)):
        listed.clear()
        change(home)
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code, len(listed), LatentStore(home / "store").revision) == (0, 1, revision)
