"""Stores that another release of the same format version wrote: they are read, verified, trained on and grown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from features import make_fast_dit
from making import Leandit, label_recipe, smooth_image
from stores import copy_of

from leandit.datasets.disk.hashing import canonical_json, sha256_of
from leandit.datasets.store import LatentStore
from leandit.recipe import to_toml

Change = Callable[[dict[str, Any]], object]


def change_revision(store: Path, name: str, key: str, change: Change) -> None:
    """Change a JSON file of the first revision, and its second copy, as another release would have written it."""
    for path in store.glob(f"revisions/*1/**/{name}"):
        values = json.loads(path.read_text())
        del values[key]
        change(values)
        values[key] = sha256_of(values)
        path.write_bytes(canonical_json(values))


def newer_manifest(values: dict[str, Any]) -> None:
    values["written_with"] = {"threads": 8}
    values["files"][0]["crc32c"] = 7
    values["spec"]["vae"]["licence"] = "mit"


def newer_local(values: dict[str, Any]) -> None:
    values["hostname"] = "node-1"
    values["recipe"]["images"]["gamma"] = 2.2
    values["recipe"]["glitter"] = {"amount": 1}


def older_local(values: dict[str, Any]) -> None:
    del values["recipe"]["source"]["check"], values["recipe"]["images"]["buckets"]


@pytest.fixture
def store(label_store: LatentStore, tmp_path: Path) -> Path:
    return copy_of(label_store.path, tmp_path / "store")


@pytest.mark.usefixtures("quick", "tiny_models")
@pytest.mark.parametrize("local", [older_local, newer_local])
def test_a_store_of_another_release_is_read_and_grows(
    local: Change, store: Path, class_folder: Path, leandit: Leandit, tmp_path: Path
) -> None:
    change_revision(store, "manifest.json", "root_hash", newer_manifest)
    attributes = json.loads((store / "zarr.json").read_text())
    attributes["attributes"]["leandit"]["vae"]["licence"] = "mit"
    (store / "zarr.json").write_bytes(canonical_json(attributes))
    change_revision(store, "local.json", "sha256", local)
    commands: list[tuple[object, ...]] = [("verify", store), ("verify", store, "--deep", "--source", class_folder)]
    settings = ("run.steps=1", "run.global_batch=4", "run.compile=false")
    sets = [part for setting in settings for part in ("--set", setting)]
    commands += [("train", "dit-s-2-256", "--store", store, "--run", tmp_path / "run", "--device", "cpu", *sets)]
    recipe, source = tmp_path / "recipe.toml", tmp_path / "source"
    recipe.write_text(to_toml(label_recipe()))
    shutil.copytree(class_folder, source)
    smooth_image(77).save(source / "n000/new.png")
    commands += [("precompute", recipe, "--source", source, "--store", store, "--device", "cpu"), ("verify", store)]
    for command in commands:
        ended = leandit(*command)
        assert ended.code == 0, ended.out + ended.err
    assert len(LatentStore(store)) == 16


def test_a_changed_bit_in_a_key_that_is_not_known_is_damage(store: Path, leandit: Leandit) -> None:
    change_revision(store, "manifest.json", "root_hash", newer_manifest)
    path = next(store.glob("revisions/*1/manifest.json"))
    path.write_text(path.read_text().replace('"threads": 8', '"threads": 9'))
    assert leandit("verify", store).code == 4
    assert leandit("verify", store, "--repair").code == 0
    assert '"threads": 8' in path.read_text()


@pytest.mark.parametrize(
    "change", [lambda recipe: recipe["layout"].pop("mask"), lambda recipe: recipe.update(glitter=1)]
)
def test_an_imported_store_of_another_release_grows(change: Change, tmp_path: Path, leandit: Leandit) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    source = make_fast_dit(source).source
    command = ("import", "fast-dit", "--source", source, "--store", store)
    assert leandit(*command).code == 0
    change_revision(store, "local.json", "sha256", lambda values: change(values["recipe"]["import"]))
    ended = leandit(*command)
    assert ended.code == 0, ended.err
    assert leandit("verify", store).code == 0
