"""Editing: a companion of the store is the image that a model sees beside the noisy one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from making import COMPANIONS, CPU, caption_recipe, make_companion_folder, no_progress, train_recipe
from runs import bits, run_to
from stores import small_shards

from leandit.datasets.errors import LeanditError, RecipeError, RunError
from leandit.datasets.store import LatentStore
from leandit.precompute.pipeline import precompute
from leandit.tools.plan.workload import workload_of_stores
from leandit.tools.sample.request import SampleRequest
from leandit.tools.sample.sample import sample_grid
from leandit.train.run.evaluation.held_out import Evaluation
from leandit.train.run.state import Run
from leandit.train.sampling.guided import Solver, draw_latents
from leandit.train.sampling.snapshot import load_snapshot
from leandit.train.step import prepare

pytestmark = pytest.mark.usefixtures("tiny_models")
EDITS = ("model.reference=edit", "schedule.kind=constant", "run.steps=2", "run.checkpoint_every=1")
EDITS += ("data.holdout=0.3", "run.evaluate_every=1")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    root = tmp_path_factory.mktemp("edits")
    source = make_companion_folder(root / "source")
    with small_shards():
        recipe = caption_recipe("vae.flip=true", *COMPANIONS)
        precompute(recipe, source_path=source, store_path=root / "store", device=CPU, progress=no_progress)
    return LatentStore(root / "store")


def go(store: LatentStore, run: Path, *settings: str) -> Path:
    run_to(train_recipe("qwen-image-tiny", *EDITS, *settings), store, run)
    return run


def test_a_run_reads_the_companion_resumes_and_draws_with_it(store: LatentStore, tmp_path: Path) -> None:
    run = Run.open(train_recipe("qwen-image-tiny", *EDITS), [store], CPU, print)
    for _, batch in zip(range(4), run.loader, strict=False):
        images = prepare(run, batch, 1)
        reference = images.conditioning.reference
        assert reference is not None
        assert torch.equal(reference, batch.companions["edit"])
        assert reference.shape == images.latents.shape
    assert Evaluation(run, print).evaluate().loss is not None
    go(store, tmp_path / "parts", "run.steps=1")
    for name in ("parts", "whole"):
        go(store, tmp_path / name)
    assert bits(tmp_path / "parts", 2) == bits(tmp_path / "whole", 2)
    snapshot = load_snapshot(tmp_path / "whole", CPU)
    assert snapshot.spec.reference == "edit"
    how: Any = {"size": tuple(reference.shape[2:]), "seed": 0, "solver": Solver(steps=2)}  # pyright: ignore
    other = images.conditioning._replace(reference=reference + 1)
    assert not torch.equal(draw_latents(snapshot, images.conditioning, **how), draw_latents(snapshot, other, **how))
    with pytest.raises(RecipeError, match=r"edits the companion 'edit'.*leandit export"):
        sample_grid(tmp_path / "whole", SampleRequest(), out=tmp_path / "out", device=CPU)


def test_a_plan_counts_the_companion_that_is_read_alone(store: LatentStore) -> None:
    edits, plain = (workload_of_stores(train_recipe("qwen-image-tiny", *how), store.path) for how in (EDITS, ()))
    assert [one.name for one in edits.store.companions] == ["edit"]
    assert plain.store.companions == []
    assert edits.batch_bytes(4) > plain.batch_bytes(4)


@pytest.mark.parametrize(
    ("model", "settings", "error", "message"),
    [
        ("qwen-image-tiny", ["model.reference=before"], RunError, "no companion image 'before', available: copy"),
        ("z-image-tiny", ["model.reference=edit"], RecipeError, r"model 'z-image-tiny' takes none"),
        ("qwen-image-tiny", ["model.reference=edit", "run.sample_every=1"], RecipeError, r"run\.sample_every"),
    ],
)
def test_what_cannot_be_edited_is_refused(
    model: str, settings: list[str], error: type[LeanditError], message: str, store: LatentStore
) -> None:
    with pytest.raises(error, match=message):
        Run.open(train_recipe(model, *settings), [store], CPU, print)
