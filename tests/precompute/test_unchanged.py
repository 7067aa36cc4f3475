"""A precompute with nothing to do is found out without torch, and only where nothing is to be done."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import IN_TURN
from making import (
    CAPTION_RECIPE,
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

from leandit.datasets.store import LatentStore
from leandit.errors import DamageError
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.encoders.model_files import local_folder
from leandit.precompute.unchanged import unchanged
from leandit.tools.terminal.outcome import change_rows


def is_done(recipe: PrecomputeRecipe, source: Path, store: Path) -> bool:
    return unchanged(recipe, str(source.resolve()), store, device="auto")[0] is not None


def flip_weights(path: Path) -> None:
    weights = load_file(path)
    weights[next(iter(weights))].view(-1)[0] += 1e-3
    save_file(weights, path)


@pytest.mark.usefixtures("quick")
def test_whatever_has_changed_goes_the_ordinary_way(
    tmp_path: Path, class_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = local_folder("shipped:vae")
    shutil.copytree(shipped, tmp_path / "kept/vae")
    shutil.copytree(class_folder, tmp_path / "kept/train")
    monkeypatch.chdir(tmp_path)
    vae, source, store = (Path(name) for name in ("vae", "train", "store"))

    def has_nothing_to_do(*overrides: str) -> bool:
        return is_done(label_recipe("vae.model=vae", *overrides), source, store)

    for change in (
        lambda: smooth_image(99).save(source / "n000/new.png"),
        lambda: (source / "n000/1.png").unlink(),
        lambda: flip_weights(vae / "diffusion_pytorch_model.safetensors"),
        lambda: set_json("config.json", norm_num_groups=2)(vae),
        lambda: shutil.rmtree(vae),
    ):
        for path in (vae, source):
            copy_of(Path("kept") / path, path)  # with its times
        if not store.exists():
            encode(label_recipe("vae.model=vae"), source.resolve(), store)
        assert has_nothing_to_do()
        change()
        assert not has_nothing_to_do()
    copy_of(Path("kept/vae"), vae)
    assert has_nothing_to_do()
    for override in ("images.resolution=48", "source.check=content", "store.shard_mib=8", "vae.keep=mean"):
        assert not has_nothing_to_do(override), override
    for lost in ("records.parquet", "sources.parquet", "manifest.json"):
        (store / "revisions/000001" / lost).unlink()
        with pytest.raises(DamageError, match=r"verify .*--repair"):
            has_nothing_to_do()


def test_the_text_encoder_and_its_tokenizer_are_compared_too(tmp_path: Path, caption_folder: Path) -> None:
    shipped = local_folder("shipped:t5")
    text, store = shutil.copytree(shipped, tmp_path / "t5"), tmp_path / "store"
    recipe = caption_recipe(f"text.model={text}")
    encode(recipe, caption_folder, store)
    for change in (
        lambda: flip_weights(text / "model.safetensors"),
        lambda: set_json("config.json", layer_norm_epsilon=1e-5)(text),
        lambda: (text / "tokenizer.json").write_text((text / "tokenizer.json").read_text() + " "),
    ):
        assert is_done(recipe, caption_folder, store)
        change()
        assert not is_done(recipe, caption_folder, store)
        copy_of(Path(shipped), text)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("before", "now"), [("cat dog", "cat wolf"), ("0 1", "cat dog")])
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
    assert change_rows(report.changes) == [("source", "since the previous revision: classes renamed")]
    assert LatentStore(store).spec.classes == now.split()
    assert is_done(recipe, source, store)


def test_other_libraries_go_the_ordinary_way(
    caption_store: LatentStore, caption_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version
    for other in ("", "pillow", "torch", "diffusers", "transformers"):
        monkeypatch.setattr("importlib.metadata.version", lambda name, o=other: "99.1" if name == o else real(name))
        assert is_done(caption_recipe(), caption_folder, caption_store.path) == (not other), other


def test_the_command_says_so_without_torch(caption_store: LatentStore, caption_folder: Path, tmp_path: Path) -> None:
    before = tree_digest(caption_store.path)
    words = ["precompute", "demo", "--source", str(caption_folder), "--store", str(caption_store.path)]
    words += [word for override in CAPTION_RECIPE for word in ("--set", override)]
    ended = subprocess.run(
        [sys.executable, "-c", IN_TURN, json.dumps([words])], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    *said, last = ended.stdout.splitlines()
    code, warnings, modules = json.loads(last)
    assert (code, modules) == (0, [])
    assert "columns: images 'file_name'" in warnings
    assert " ".join(said[1].split()) == "records 14 planned = 14 stored + 0 rejected"
    assert said[-1].split(maxsplit=2) == ["this", "run", "nothing to encode, the store is complete"]
    assert tree_digest(caption_store.path) == before
