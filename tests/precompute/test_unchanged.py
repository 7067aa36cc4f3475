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
    LABEL_RECIPE,
    Leandit,
    caption_recipe,
    encode,
    label_recipe,
    make_class_folder,
    set_json,
    smooth_image,
    tree_digest,
)
from safetensors.torch import load_file, save_file
from stores import copy_of

from leandit.datasets.errors import DamageError
from leandit.datasets.store import LatentStore
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.encoders.model_files import local_folder
from leandit.precompute.sources import several
from leandit.precompute.unchanged import Unchanged, unchanged
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
    encode(label_recipe("vae.model=models/vae"), tmp_path / "train", Path("store"))
    return tmp_path


def is_done(recipe: PrecomputeRecipe, source: Path, store: Path) -> bool:
    return isinstance(unchanged(recipe, str(source.resolve()), store, device="auto"), Unchanged)


def has_nothing_to_do(*overrides: str) -> bool:
    return is_done(label_recipe("vae.model=models/vae", *overrides), Path("train"), Path("store"))


def flip_weights(path: Path) -> None:
    weights = load_file(path)
    weights[next(iter(weights))].view(-1)[0] += 1e-3
    save_file(weights, path)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "an image more": lambda home: smooth_image(99).save(home / "train/n000/new.png"),
    "an image less": lambda home: (home / "train/n000/1.png").unlink(),
    "the weights": lambda home: flip_weights(home / WEIGHTS),
    "the config": lambda home: set_json("config.json", norm_num_groups=2)(home / "models/vae"),
}


@pytest.mark.usefixtures("quick")
def test_whatever_has_changed_goes_the_ordinary_way(home: Path) -> None:
    assert has_nothing_to_do()
    before = {path: shutil.copytree(home / path, home / f"kept/{path}") for path in ("store", "train", "models")}
    for name, change in CHANGES.items():
        change(home)
        assert not has_nothing_to_do(), name
        for path, kept in before.items():
            copy_of(Path(kept), home / path)  # with its times
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
    with pytest.raises(DamageError, match=r"verify .*--repair"):
        has_nothing_to_do()


TEXT_CHANGES: dict[str, Callable[[Path], Any]] = {
    "weights": lambda text: flip_weights(text / "model.safetensors"),
    "config": set_json("config.json", layer_norm_epsilon=1e-5),
    "tokenizer": lambda text: (text / "tokenizer.json").write_text((text / "tokenizer.json").read_text() + " "),
    "a file of the tokenizer more": lambda text: (text / "added_tokens.json").write_text("{}"),
}


def test_the_text_encoder_and_its_tokenizer_are_compared_too(tmp_path: Path, caption_folder: Path) -> None:
    shipped = local_folder("shipped:t5")
    assert shipped
    text, store = shutil.copytree(shipped, tmp_path / "t5"), tmp_path / "store"
    recipe = caption_recipe(f"text.model={text}")
    encode(recipe, caption_folder, store)
    assert is_done(recipe, caption_folder, store)
    for name, change in TEXT_CHANGES.items():
        change(text)
        assert not is_done(recipe, caption_folder, store), name
        copy_of(Path(shipped), text)
        assert is_done(recipe, caption_folder, store), name


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("before", "now"), [("cat dog", "cat wolf"), ("cat dog", "0 1"), ("0 1", "cat dog")])
def test_a_class_with_another_name_is_a_change_though_no_record_says_so(before: str, now: str, tmp_path: Path) -> None:
    store, recipe = tmp_path / "store", label_recipe()
    source = make_class_folder(tmp_path / "source", classes=1, per_class=2) / "n000"

    def label(names: str) -> None:
        rows = "".join(f"{i}.png,{name}\n" for i, name in enumerate(names.split()))
        (source / "labels.csv").write_text(f"file_name,label\n{rows}")

    label(before)
    encode(recipe, source, store)
    assert is_done(recipe, source, store)
    label(now)
    assert not is_done(recipe, source, store)
    report = encode(recipe, source, store)
    assert report.num_encoded == 0
    assert report.changes
    assert change_rows(report.changes) == [("source", "since the previous revision: classes renamed")]
    assert LatentStore(store).spec.classes == now.split()
    assert is_done(recipe, source, store)


@pytest.mark.parametrize("version", ["torch", "pillow"])
def test_other_libraries_go_the_ordinary_way(
    version: str, label_store: LatentStore, class_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_done(label_recipe(), class_folder, label_store.path)
    real: Callable[[str], str] = __import__("importlib.metadata").metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.1" if name == version else real(name))
    assert not is_done(label_recipe(), class_folder, label_store.path)


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
def test_a_source_that_has_changed_is_listed_once(
    home: Path, leandit: Leandit, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_source, listed = several.list_source, []
    monkeypatch.setattr(several, "list_source", lambda *a, **b: listed.append(a) or list_source(*a, **b))
    monkeypatch.chdir(home)
    words = ["precompute", "imagenet-256", "--source", home / "train", "--store", "store", "--device", "cpu"]
    words += [word for override in (*LABEL_RECIPE, "vae.model=models/vae") for word in ("--set", override)]
    for change, revision in ((lambda _: None, 1), (CHANGES["an image more"], 2)):
        listed.clear()
        change(home)
        assert (leandit(*words).code, len(listed), LatentStore(home / "store").revision) == (0, 1, revision)
