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
    recipes = [train_recipe("dit-s-4", f"latent.normalise={how}") for how in ("encoder", "store", "none")]
    readers = [Run.open(recipe, [store], CPU, print).loader.dataset.reader for recipe in recipes]
    encoder, by_store, raw = (reader[0].latents for reader in readers)
    found = statistics_of(store)
    mean, std = (torch.tensor(each)[:, None, None] for each in (found.channel_mean, found.channel_std))
    torch.testing.assert_close(by_store, (encoder - mean) / std, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(raw, denormalise(encoder, store.spec.latent), rtol=1e-4, atol=1e-5)


def test_a_run_keeps_the_statistics_that_it_began_with_and_its_snapshot_undoes_them(
    store: LatentStore, tmp_path: Path
) -> None:
    run, said, statistics = tmp_path / "run", list[str](), statistics_of(store)
    for steps in (3, 4):
        train(store, run, BY_STORE, f"run.steps={steps}", "ema.warmup=true")  # an average that is not young
        manifest = read_run_manifest(run)
        assert manifest
        assert manifest.statistics == statistics
    kept = statistics.model_copy(update={"channel_mean": [3.0] * store.spec.latent.channels})
    state = Run.open(train_recipe("dit-s-4", BY_STORE), [store], CPU, print, statistics=kept)
    assert state.loader.dataset.reader.statistics == kept  # not those of the store, which has grown meanwhile
    assert state.extra["latent"] == normalised_as(store.spec.latent, "store", kept).model_dump()
    learned = load_snapshot(run, CPU).latent
    rows, keys = torch.from_numpy(store.latents("32x32").take(np.arange(4))), torch.arange(4)
    raw, undone = (denormalise(final_latents(rows, spec, keys), spec) for spec in (store.spec.latent, learned))
    torch.testing.assert_close(undone, raw, rtol=1e-4, atol=1e-4)
    begun = (f"model.init_from={run}", "run.steps=1")
    train(store, tmp_path / "same", *begun, BY_STORE, said=said)
    assert not said
    train(store, tmp_path / "other", *begun, said=said)
    assert any("was trained on latents with a different shift or scale" in line for line in said)


def test_several_stores_have_one_normalisation(store: LatentStore, tmp_path: Path) -> None:
    make_store(tmp_path / "second", {"32x32": 8}, num_classes=3, seed=6)
    compact(tmp_path / "second", tmp_path / "other", progress=no_progress)
    stores = [store, LatentStore(tmp_path / "other"), store]
    mixture = ", ".join(f"{{store='{one.path}'}}" for one in stores)
    reader = Run.open(train_recipe("dit-s-4", BY_STORE, f"data.mixture=[{mixture}]"), stores, CPU, print)
    reader = reader.loader.dataset.reader
    assert reader.statistics
    assert reader.statistics.count == sum(statistics_of(one).count for one in stores[:2])
    assert len({tuple(spec.shift) for spec in reader.latent_specs}) == 1
