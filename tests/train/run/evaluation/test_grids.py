"""Images while a run trains: drawn by its averages, decoded beside it, and without a trace in what it learns."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import ForkedPython
from making import CPU, ROOT, label_recipe, no_progress, train_recipe, tree_digest
from PIL import Image
from runs import HOLDOUT, assert_same_training, run_to
from safetensors.torch import load_file

from leandit.datasets.batches.latents import denormalise
from leandit.datasets.order.filters import is_held_out
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, RecipeError
from leandit.precompute.pipeline import precompute
from leandit.train.run.evaluation import decoding
from leandit.train.run.evaluation.decoding import Decoding
from leandit.train.run.evaluation.grids import Subjects, choose_subjects
from leandit.train.run.state import Run
from leandit.train.sampling.guided import Solver, draw_latents
from leandit.train.sampling.snapshot import load_snapshot

pytestmark = pytest.mark.usefixtures("tiny_models", "forked_decoder")

DRAWN = ["run.sample_every=2", "run.sample_count=5", "run.sample_steps=2"]


@pytest.fixture
def forked_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder's process is forked from one that has imported torch."""
    forked = lambda command, **how: ForkedPython(command[1:], **how)  # noqa: E731
    monkeypatch.setattr(decoding, "subprocess", type("", (), {"Popen": forked, "DEVNULL": subprocess.DEVNULL}))


@pytest.fixture
def keeps_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process starts."""
    monkeypatch.setattr(Decoding, "start", lambda _: None)


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "samples").iterdir())


@pytest.mark.parametrize("name", [pytest.param("dit-s-4", marks=pytest.mark.slow), "pixart-tiny"])
def test_training_is_the_same_to_the_bit_with_and_without_images_and_after_a_resume(
    name: str, store_of: dict[str, LatentStore], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = train_recipe(name, HOLDOUT, *DRAWN)
    run_to(train_recipe(name, HOLDOUT), store_of[name], tmp_path / "without")
    run_to(recipe, store_of[name], tmp_path / "with")
    assert_same_training(tmp_path / "without", tmp_path / "with", 6)
    run_to(recipe, store_of[name], tmp_path / "stopped", stop_at=2)
    run_to(recipe, store_of[name], tmp_path / "stopped")
    assert_same_training(tmp_path / "stopped", tmp_path / "with", 6)
    assert tree_digest(tmp_path / "with/samples") == tree_digest(tmp_path / "stopped/samples")
    accumulator = EventAccumulator(str(tmp_path / "with/tensorboard"))
    accumulator.Reload()
    images = accumulator.Images("samples")
    assert [image.step for image in images] == [2, 4, 6]
    for image in images:
        path = tmp_path / f"with/samples/step-{image.step}.png"
        assert image.encoded_image_string == path.read_bytes()
        assert np.asarray(Image.open(path)).std() > 0


@pytest.mark.usefixtures("keeps_latents")
@pytest.mark.parametrize("name", ["dit-s-4", "pixart-tiny", "sd3-tiny"])
def test_the_latents_are_those_of_the_snapshot(name: str, store_of: dict[str, LatentStore], tmp_path: Path) -> None:
    said: list[str] = []
    run_to(train_recipe(name, HOLDOUT, *DRAWN, "run.sample_count=9"), store_of[name], tmp_path / "run", said=said)
    snapshot, subjects = load_snapshot(tmp_path / "run", CPU), subjects_of(store_of[name], name, count=9)
    bucket = max(snapshot.state["buckets"], key=snapshot.state["buckets"].__getitem__)
    size = [int(side) // snapshot.latent.downscale for side in bucket.split("x")]
    given, solver = subjects.conditioning(snapshot.conditioner, CPU), Solver(steps=2, guidance=4.0)
    wanted = draw_latents(snapshot, given, size=(size[0], size[1]), seed=0, solver=solver)
    found = load_file(tmp_path / "run/samples/step-6.safetensors")["latents"]
    torch.testing.assert_close(found, denormalise(wanted, snapshot.latent))
    warnings = [line for line in said if "run.sample_count 9" in line]
    if name == "dit-s-4":
        assert (len(found), warnings) == (9, [])
    else:
        assert len(found) < 9
        assert [f"held-out records have {len(found)} different first captions" in line for line in warnings] == [True]


def subjects_of(store: LatentStore, name: str, *overrides: str, count: int = 5) -> Subjects:
    recipe = train_recipe(name, HOLDOUT, *overrides)
    return choose_subjects(Run.open(recipe, [store], CPU, lambda _: None), count)


def test_captions_are_those_of_held_out_records_and_classes_those_that_train(store_of: dict[str, LatentStore]) -> None:
    store = store_of["pixart-tiny"]
    held_out = np.flatnonzero(is_held_out(store.numbers("keys"), 0.4))
    texts = [store.captions["text"][store.record_at(int(i)).caption_ids[0]].as_py() for i in held_out]
    each = list(dict.fromkeys(texts))  # records share captions
    assert 2 < len(each) < len(texts)
    assert subjects_of(store, "pixart-tiny", count=len(texts)).names == each
    assert subjects_of(store, "pixart-tiny", count=2).names == [each[0], each[-1]]
    assert subjects_of(store_of["dit-s-4"], "dit-s-4", count=2).labels == [0, 2]
    assert subjects_of(store_of["dit-s-4"], "dit-s-4", "data.labels=[1]", count=2).labels == [1, 1]


def test_without_the_vae_one_warning_says_so_and_the_latents_stay(class_folder: Path, tmp_path: Path) -> None:
    vae = shutil.copytree(ROOT / "precompute/demo_encoders/vae", tmp_path / "vae")
    recipe = label_recipe(f"vae.model={vae}")
    precompute(recipe, source_path=class_folder, store_path=tmp_path / "S", device=CPU, progress=no_progress)
    shutil.move(vae, tmp_path / "elsewhere")
    said: list[str] = []
    seen = run_to(train_recipe("dit-s-4", *DRAWN), LatentStore(tmp_path / "S"), tmp_path / "run", said=said)
    assert seen[-1].step == 6
    (warning,) = [line for line in said if "run.sample_every" in line]
    assert "no such folder as '../vae'" in warning
    assert names_in(tmp_path / "run") == [f"step-{step}.safetensors" for step in (2, 4, 6)]
    command = ["-m", decoding.MODULE, tmp_path / "run/samples", "--vae", tmp_path / "elsewhere"]
    assert f"-m {decoding.MODULE} {command[2]} --vae" in warning
    grid = tmp_path / "run/samples/step-2.safetensors"
    whole = grid.read_bytes()
    grid.write_bytes(whole[:-1])
    assert ForkedPython(command).wait(240) == DamageError.exit_code
    assert names_in(tmp_path / "run") == ["step-2.safetensors", "step-4.png", "step-6.png"]
    grid.write_bytes(whole)
    assert ForkedPython(command).wait(240) == 0
    assert names_in(tmp_path / "run") == [f"step-{step}.png" for step in (2, 4, 6)]


def test_a_decoder_that_hangs_does_not_hold_up_a_stop_and_its_grid_is_decoded_later(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, started = decoding.subprocess.Popen, []

    def hang(command: list[str], **how: Any) -> Any:
        started.append(ForkedPython(["-c", "import time; time.sleep(600)"], **how))
        return started[-1]

    monkeypatch.setattr(decoding.subprocess, "Popen", hang)
    start = time.monotonic()
    run_to(train_recipe("dit-s-4", *DRAWN), label_store, tmp_path / "run", stop_at=3)
    assert time.monotonic() - start < 240
    assert len(started) == 1
    assert started[0].poll() is not None
    assert names_in(tmp_path / "run") == ["step-2.safetensors"]
    left = (tmp_path / "run/samples/step-2.safetensors").read_bytes()
    monkeypatch.setattr(decoding.subprocess, "Popen", real)
    for _ in range(2):  # the second time nothing is left to train, as after a kill at the end
        run_to(train_recipe("dit-s-4", "run.sample_every=6", *DRAWN[1:]), label_store, tmp_path / "run")
        assert names_in(tmp_path / "run") == ["step-2.png", "step-6.png"]
        (tmp_path / "run/samples/step-2.safetensors").write_bytes(left)


def test_guidance_without_a_null_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"run\.sample_guidance needs conditioning\.drop above 0"):
        train_recipe("dit-s-4", "conditioning.drop=0", *DRAWN)
    train_recipe("dit-s-4", "conditioning.drop=0", *DRAWN, "run.sample_guidance=1")
