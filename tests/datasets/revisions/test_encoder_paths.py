"""A store names the folders of its encoders so that they are found from any directory, and after a move."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from making import TRAIN_RECIPE, encode, label_recipe, no_progress
from typer.testing import CliRunner, Result

from leandit.datasets.revisions.local import encoder_section, openable, with_stored_encoder_paths
from leandit.datasets.store import LatentStore
from leandit.errors import EncoderError
from leandit.precompute.encoders.model_files import local_folder
from leandit.tools.cli.commands import app
from leandit.tools.export.compact import compact
from leandit.train.parallel.stop import StopRequest

TINY = ["model.name=DiT-S/4", "model.num_classes=0", "run.compile=false", *TRAIN_RECIPE, "run.steps=1"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a VAE, models/vae, in which the test stands."""
    shipped = local_folder("shipped:vae")
    assert shipped
    shutil.copytree(shipped, tmp_path / "home/models/vae")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


def make_store(store: Path, source: Path) -> LatentStore:
    encode(label_recipe("vae.model=models/vae"), source, store)
    return LatentStore(store)


def leandit(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], obj=StopRequest())


@pytest.mark.usefixtures("quick")
def test_a_store_and_its_encoder_may_move_together_and_the_fingerprint_stays(
    home: Path, class_folder: Path, label_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(Path("a"), class_folder)
    assert store.spec.recipe["vae"]["model"] == store.spec.vae.model == "../models/vae"
    assert store.spec.fingerprint == label_store.spec.fingerprint  # that of shipped:vae, the same weights
    assert make_store(Path("a"), class_folder).revision == 1  # again, by the same path
    moved = home.rename(home.with_name("elsewhere"))
    monkeypatch.chdir(moved.parent)
    assert leandit("inspect", moved / "a", "--sheet", "sheet.png").exit_code == 0
    shutil.rmtree(moved / "models")
    failed = leandit("inspect", moved / "a", "--sheet", "sheet.png")
    assert isinstance(failed.exception, EncoderError)
    assert "pass it with --vae" in str(failed.exception)


@pytest.mark.usefixtures("quick")
def test_an_encoder_far_from_the_store_is_named_absolutely(home: Path, class_folder: Path) -> None:
    make_store(Path("a"), class_folder)
    compact(Path("a"), Path("stores/new"), progress=no_progress)
    for store in (LatentStore("stores/new"), make_store(home / "stores/a", class_folder)):
        assert store.spec.recipe["vae"]["model"] == store.spec.vae.model == str(home / "models/vae")
    assert make_store(Path("stores/new"), class_folder).manifest == LatentStore("stores/new").manifest  # nothing to do


def test_hub_ids_relative_paths_and_every_encoder_of_a_recipe_are_found(home: Path, label_store: LatentStore) -> None:
    def placed(model: str) -> str:
        recipe = label_store.spec.recipe | {"vae": label_store.spec.recipe["vae"] | {"model": model}}
        return encoder_section(label_store.spec.model_copy(update={"recipe": recipe}), "vae", label_store.path)["model"]

    assert placed("models/vae") == str(home / "models/vae")  # from where the user stands
    assert placed("stabilityai/sd-vae-ft-ema") == "stabilityai/sd-vae-ft-ema"
    assert with_stored_encoder_paths(label_store.spec, home / "store") == label_store.spec  # shipped:vae
    named = {"text": {"long": {"kind": "t5", "model": "models/vae"}}, "features": {"dino": {"model": "models/vae"}}}
    spec = label_store.spec.model_copy(update={"recipe": label_store.spec.recipe | named})
    stored = with_stored_encoder_paths(spec, home / "a")
    assert stored.recipe["features"]["dino"]["model"] == "../models/vae"
    (home / "a").mkdir()
    recipe = openable(stored, home / "a").recipe
    assert recipe["text"]["long"] == {"kind": "t5", "model": str(home / "models/vae")}
    assert recipe["features"]["dino"]["model"] == str(home / "models/vae")
    assert recipe["source"] == label_store.spec.recipe["source"]


@pytest.mark.usefixtures("quick", "tiny_models")
def test_sample_and_export_find_the_vae_from_any_directory(
    home: Path, class_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(Path("a"), class_folder)
    # This VAE has a scale by channel, which a pipeline of DiT cannot undo: an export with it would be refused.
    settings = [word for value in (*TINY, "latent.normalise=none") for word in ("--set", value)]
    assert leandit("train", "dit-s-2-256", "--store", "a", "--run", "run", "--device", "cpu", *settings).exit_code == 0
    elsewhere = home.parent / "there"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    drawn = ("sample", home / "run", "--num", 1, "--steps", 1, "--device", "cpu", "--out")
    assert leandit(*drawn, "drawn").exit_code == 0
    assert leandit("export", home / "run", "--out", "exported", "--encoders").exit_code == 0
    assert Path("exported/vae/config.json").is_file()
    (home / "models").rename(elsewhere / "models")
    assert "pass it with --vae" in str(leandit(*drawn, "again").exception)
    failed = leandit("export", home / "run", "--out", "again", "--encoders")
    assert "pass it with --vae" in str(failed.exception)
    assert leandit("export", home / "run", "--out", "again", "--encoders", "--vae", "models/vae").exit_code == 0
