"""latent.normalise: a run sees the latents as its recipe says, keeps its numbers, and its snapshots undo them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from making import CPU, no_progress, train_recipe
from runs import run_to

from leandit.datasets.batches.latents import denormalise, final_latents, normalised_as
from leandit.datasets.format.schema import LatentStatistics
from leandit.datasets.maintenance.compact import compact
from leandit.datasets.revisions.catalog import read_manifest
from leandit.datasets.store import LatentStore
from leandit.tools.synthetic.store import make_store
from leandit.train.run.manifest import read_run_manifest
from leandit.train.run.state import Run
from leandit.train.sampling.snapshot import load_snapshot

pytestmark = pytest.mark.usefixtures("tiny_models")
BY_STORE = "latent.normalise=store"


@pytest.fixture
def store(tmp_path: Path) -> LatentStore:
    """24 records whose channels are far from mean 0 and deviation 1."""
    make_store(tmp_path / "made", {"32x32": 24}, num_classes=3, seed=5)
    compact(tmp_path / "made", tmp_path / "store", progress=no_progress)
    return LatentStore(tmp_path / "store")


def train(store: LatentStore, run: Path, *overrides: str, said: list[str] | None = None) -> None:
    run_to(train_recipe("dit-s-4", *overrides), store, run, said=said)


def statistics_of(store: LatentStore) -> LatentStatistics:
    assert store.manifest
    assert store.manifest.statistics
    return store.manifest.statistics


def test_batches_are_as_the_recipe_says(store: LatentStore) -> None:
    encoder, by_store, raw = (
        Run.open(train_recipe("dit-s-4", f"latent.normalise={how}"), [store], CPU, print)
        .loader.dataset.reader[0]
        .latents
        for how in ("encoder", "store", "none")
    )
    found, spec = statistics_of(store), store.spec.latent
    mean, std = (torch.tensor(each)[:, None, None] for each in (found.channel_mean, found.channel_std))
    torch.testing.assert_close(by_store, (encoder - mean) / std, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(raw, denormalise(encoder, spec), rtol=1e-4, atol=1e-5)


def test_a_snapshot_undoes_the_normalisation_of_its_run(store: LatentStore, tmp_path: Path) -> None:
    train(store, tmp_path / "run", BY_STORE, "run.steps=3")
    learned = load_snapshot(tmp_path / "run", CPU).latent
    assert learned == normalised_as(store.spec.latent, "store", statistics_of(store))
    rows = torch.from_numpy(store.latents("32x32").take(np.arange(4)))
    keys = torch.arange(4)
    raw = denormalise(final_latents(rows, store.spec.latent, keys), store.spec.latent)
    torch.testing.assert_close(denormalise(final_latents(rows, learned, keys), learned), raw, rtol=1e-4, atol=1e-4)


def test_a_run_keeps_the_statistics_that_it_began_with(store: LatentStore, tmp_path: Path) -> None:
    train(store, tmp_path / "run", BY_STORE, "run.steps=3")
    manifest = read_run_manifest(tmp_path / "run")
    assert manifest
    assert manifest.statistics == statistics_of(store)
    kept = manifest.statistics.model_copy(update={"channel_mean": [3.0] * store.spec.latent.channels})
    state = Run.open(train_recipe("dit-s-4", BY_STORE), [store], CPU, print, statistics=kept)
    assert state.loader.dataset.reader.statistics == kept  # not those of the store, which has grown meanwhile
    assert state.extra["latent"] == normalised_as(store.spec.latent, "store", kept).model_dump()
    train(store, tmp_path / "run", BY_STORE, "run.steps=4")
    resumed = read_run_manifest(tmp_path / "run")
    assert resumed
    assert resumed.statistics == manifest.statistics


def test_weights_that_learned_another_scale_are_warned_of(store: LatentStore, tmp_path: Path) -> None:
    train(store, tmp_path / "run", BY_STORE, "run.steps=3", "ema.warmup=true")  # an average that is not young
    said = list[str]()
    train(store, tmp_path / "other", f"model.init_from={tmp_path / 'run'}", "run.steps=1", said=said)
    assert any("was trained on latents with a different shift or scale" in line for line in said)
    said.clear()
    train(store, tmp_path / "same", f"model.init_from={tmp_path / 'run'}", BY_STORE, "run.steps=1", said=said)
    assert not said


def test_several_stores_have_one_normalisation(store: LatentStore, tmp_path: Path) -> None:
    make_store(tmp_path / "second", {"32x32": 8}, num_classes=3, seed=6)
    compact(tmp_path / "second", tmp_path / "other", progress=no_progress)
    mixture = [{"store": str(store.path)}, {"store": str(tmp_path / "other")}, {"store": str(store.path)}]
    recipe = train_recipe("dit-s-4", BY_STORE)
    recipe = recipe.model_copy(update={"data": type(recipe.data).model_validate({"mixture": mixture})})
    stores = [store, LatentStore(tmp_path / "other"), store]
    reader = Run.open(recipe, stores, CPU, print).loader.dataset.reader
    assert reader.statistics
    assert reader.statistics.count == sum(read_manifest(s.path, s.revision).statistics.count for s in stores[:2])  # pyright: ignore
    assert len({tuple(spec.shift) for spec in reader.latent_specs}) == 1
