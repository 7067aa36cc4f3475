"""The null condition of a run: whose it is, how long it is, and what may be guided with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from features import Made, make_nemo, noise, run_import
from making import CPU, train_recipe
from runs import run_to

from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError, RunError, SourceError
from leandit.tools.sample.request import SampleRequest
from leandit.tools.sample.sample import sample_grid
from leandit.tools.terminal.outcome import sample_with
from leandit.train.models.diffusers import flux1
from leandit.train.models.diffusers.flux1 import Flux1
from leandit.train.run.evaluation import grids
from leandit.train.run.evaluation.decoding import Decoding
from leandit.train.run.state import Run
from leandit.train.sampling.guided import Solver
from leandit.train.sampling.snapshot import load_snapshot

pytestmark = pytest.mark.usefixtures("tiny_models")
MODEL = "z-image-tiny"
GRIDS = ("run.sample_every=1", "run.sample_count=2", "run.sample_steps=1")
NO_DROP = "conditioning.drop=0"


@pytest.fixture(scope="module")
def base(caption_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all weights that drops captions."""
    run = tmp_path_factory.mktemp("base") / "run"
    run_to(train_recipe(MODEL, "run.steps=1"), caption_store, run)
    return run


def adapters(base: Path, *settings: str) -> Any:
    return train_recipe(MODEL, f"model.init_from={base}", "lora.rank=2", NO_DROP, "run.steps=1", *settings)


def draw(run: Path, out: Path, **options: Any) -> dict[str, Any]:
    return sample_grid(run, SampleRequest(count=1, steps=1, **options), out=out, device=CPU)


@pytest.mark.parametrize("is_published", [False, True], ids=["of a run", "of published weights"])
def test_adapters_without_dropped_captions_are_guided_by_the_null_of_their_weights(
    is_published: bool, base: Path, caption_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoding, "start", lambda _: None)
    if is_published:
        weights: Any = load_snapshot(base, CPU).model
        weights.net.save_pretrained(tmp_path / "published/transformer")
    run = tmp_path / "run"
    run_to(adapters(tmp_path / "published" if is_published else base, *GRIDS), caption_store, run)
    assert (run / "samples/step-1.safetensors").is_file()
    assert draw(run, tmp_path / "out")["guidance"] == 4.0
    assert "--guidance" not in sample_with(run)


def test_weights_that_have_not_learned_null_are_not_guided_whether_they_train_or_carry_adapters(
    caption_store: LatentStore, tmp_path: Path
) -> None:
    run_to(train_recipe(MODEL, NO_DROP, "run.steps=1"), caption_store, tmp_path / "plain")
    run_to(adapters(tmp_path / "plain"), caption_store, tmp_path / "adapted")
    with pytest.raises(
        RecipeError, match=r"weights of model\.init_from '.*plain' were trained with conditioning\.drop"
    ):
        Run.open(adapters(tmp_path / "plain", *GRIDS), [caption_store], CPU, print)
    for name in ("plain", "adapted"):
        with pytest.raises(RecipeError, match="has not learned the null condition"):
            draw(tmp_path / name, tmp_path / "out", guidance=4.0)
        assert draw(tmp_path / name, tmp_path / name / "out", guidance=1.0)["guidance"] == 1.0
        assert sample_with(tmp_path / name)[-2:] == ["--guidance", 1]


def qwen_cache(root: Path, null: str) -> Made:
    return dataclasses.replace(make_nemo(root, "qwen_image"), null=null)


def test_the_null_of_a_language_model_is_imported_without_padding_and_read_so(tmp_path: Path) -> None:
    tokens = noise(1, 5, 16)
    np.save(tmp_path / "null.npy", tokens)
    run_import(qwen_cache(tmp_path / "cache", str(tmp_path / "null.npy")), tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    text = store.spec.text
    assert text is not None
    assert (text.null_tokens, len(store.null_caption)) == (5, text.max_tokens)
    run = Run.open(train_recipe("qwen-image-tiny", "model.channels=16"), [store], CPU, print)
    null = run.conditioner.null_caption
    assert null is not None
    torch.testing.assert_close(null, torch.from_numpy(tokens).bfloat16().float())


@pytest.mark.parametrize(("shape", "words"), [((1025, 16), "of fewer rows"), ((5, 15), "of fewer rows")], ids=str)
def test_a_null_of_another_width_or_too_long_is_refused(shape: tuple[int, int], words: str, tmp_path: Path) -> None:
    np.save(tmp_path / "null.npy", np.zeros(shape, np.float32))
    with pytest.raises(SourceError, match=words):
        run_import(qwen_cache(tmp_path / "cache", str(tmp_path / "null.npy")), tmp_path / "store")


def test_a_store_that_does_not_say_how_long_its_null_is_trains_without_it_alone(
    caption_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert caption_store.spec.text is not None
    silent = caption_store.spec.text.model_copy(update={"null_tokens": 0})
    store = LatentStore(caption_store.path)
    monkeypatch.setattr(store, "spec", store.spec.model_copy(update={"text": silent}))
    with pytest.raises(RunError, match="does not say how many tokens its null caption has"):
        Run.open(train_recipe(MODEL), [store], CPU, print)
    Run.open(train_recipe("pixart-tiny"), [store], CPU, print)  # whose null is padded
    assert Run.open(train_recipe(MODEL, NO_DROP), [store], CPU, print).conditioner.null_caption is None


@pytest.mark.parametrize("distilled", [False, True])
@pytest.mark.parametrize("setting", ["auto", 3.0])
def test_a_grid_of_a_model_with_guidance_as_an_input_is_not_guided_twice(
    distilled: bool, setting: str | float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoding, "start", lambda _: None)
    monkeypatch.setitem(Flux1.sizes, "flux1-tiny", flux1.size(2, 2, 2, (4, 6, 6), distilled=distilled))
    scales = []

    def record(model: Any, conditioning: Any, *, size: Any, solver: Solver, **_: Any) -> torch.Tensor:
        scales.append(solver.guidance)
        return torch.zeros(len(conditioning.inputs), model.spec.channels, *size)

    monkeypatch.setattr(grids, "draw_latents", record)
    run_import(make_nemo(tmp_path / "cache", "flux"), tmp_path / "store")
    recipe = train_recipe("flux1-tiny", "model.channels=16", "run.steps=1", *GRIDS, f"run.sample_guidance={setting}")
    run_to(recipe, LatentStore(tmp_path / "store"), tmp_path / "run")
    default = 1.0 if distilled else 4.0
    assert set(scales) == {default if setting == "auto" else setting}
