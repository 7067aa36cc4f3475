"""The data of a run as the recipe says it: filters, leftovers, batches by tokens, shuffling in windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from making import CPU, no_progress, train_recipe
from noise_store import make_store
from runs import run_to

from leandit.datasets.batches.batch import Batch
from leandit.datasets.batches.latents import denormalise, final_latents, normalised_as
from leandit.datasets.format.buckets import bucket_size
from leandit.datasets.format.schema import LatentStatistics, TextSpec
from leandit.datasets.loader import make_loader
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, RecipeError
from leandit.tools.export.compact import compact
from leandit.train.run.data import build_stream
from leandit.train.run.fit import model_spec
from leandit.train.run.manifest import read_run_manifest
from leandit.train.run.state import Run
from leandit.train.sampling.snapshot import load_snapshot

pytestmark = pytest.mark.usefixtures("tiny_models")


def one_pass(store: LatentStore, *overrides: str, model: str = "dit-s-4") -> tuple[list[Batch], list[str]]:
    """The batches of an epoch, and what was said."""
    recipe, said = train_recipe(model, *overrides), list[str]()
    spec = model_spec(recipe, store.spec, str(store.path))
    return list(build_stream(recipe, [store], spec, CPU, said.append)), said


def records(batches: list[Batch]) -> list[int]:
    return sorted(record for batch in batches for record in batch.records.tolist())


def test_what_the_recipe_filters_does_not_train(
    label_store: LatentStore, caption_store: LatentStore, tmp_path: Path
) -> None:
    table, keys = caption_store.records, label_store.records["key"].to_pylist()
    aspects = np.array(table["height_px"]) / np.array(table["width_px"])
    scores = tmp_path / "scores.parquet"
    pq.write_table(pa.table({"name": keys, "aesthetic": [float(i) for i in range(len(keys))]}), scores)
    by_score = (f"data.scores={scores}", "data.score_column=aesthetic", "data.score_key=name", "data.min_score=4.0")
    of_class = np.flatnonzero(np.array(label_store.records["label"]) == 1).tolist()
    for model, overrides, wanted, words in (
        ("dit-s-4", (), list(range(len(keys))), None),
        ("dit-s-4", ('data.labels=["n001"]',), of_class, "records are used; filtered out"),
        ("dit-s-4", ("data.labels=[1]",), of_class, "records are used; filtered out"),
        ("dit-s-4", by_score, list(range(4, len(keys))), "4 by score"),
        ("pixart-tiny", ("data.max_aspect=0.9",), np.flatnonzero(aspects <= 0.9).tolist(), "by aspect"),
        ("pixart-tiny", ("data.min_aspect=0.9",), np.flatnonzero(aspects >= 0.9).tolist(), "by aspect"),
    ):
        batches, said = one_pass(label_store if model == "dit-s-4" else caption_store, *overrides, model=model)
        assert records(batches) == wanted
        assert [words in line for line in said] == ([True] if words else [])
        assert all((batch.captions is None) == (model == "dit-s-4") for batch in batches)


def test_batches_hold_as_many_tokens_as_asked_for(caption_store: LatentStore, tmp_path: Path) -> None:
    batches, _ = one_pass(caption_store, "data.batch_tokens=200", model="pixart-tiny")
    assert records(batches) == list(range(len(caption_store)))
    sides = np.array([bucket_size(batch.bucket) for batch in batches])
    assert (np.array([len(batch) for batch in batches]) * (sides // 16).prod(1)).max() <= 200
    with pytest.raises(RecipeError, match="image tokens, 1 are allowed"):
        one_pass(caption_store, "data.batch_tokens=1", model="pixart-tiny")
    # Of the largest bucket no batch has so few tokens, but nothing of it trains.
    largest, *_, smaller = sorted(caption_store.buckets, key=lambda bucket: -np.prod(bucket_size(bucket)))
    rows = caption_store.record_columns(("key", "bucket")).to_pylist()
    keep = [row["key"] for row in rows if row["bucket"] != largest]
    pq.write_table(pa.table({"key": keep, "score": [1.0] * len(keep)}), tmp_path / "scores.parquet")
    few = f"data.batch_tokens={np.prod(bucket_size(smaller)) // 16**2}"
    batches, _ = one_pass(caption_store, f"data.scores={tmp_path / 'scores.parquet'}", few, model="pixart-tiny")
    assert sum(map(len, batches)) == len(keep) < len(rows)


def test_what_is_dropped_in_every_pass_is_said(caption_store: LatentStore) -> None:
    largest = max(caption_store.buckets.values())
    overrides = ["data.leftovers=drop", f"run.global_batch={largest}"]
    batches, said = one_pass(caption_store, *overrides, model="pixart-tiny")
    assert {len(batch) for batch in batches} == {largest}
    assert "never read" in said[0]
    assert all(f"{b} ({count})" in said[0] for b, count in caption_store.buckets.items() if count < largest)


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
    return store.manifest.statistics


def test_captions_of_a_text_encoder_that_the_model_does_not_take_are_not_read(tmp_path: Path) -> None:
    clip = {"kind": "clip", "width": 8, "max_tokens": 6, "full_length": True, "dtype": "float16", "template": ""}
    other = TextSpec.model_validate({**clip, "batch_size": 4})
    make_store(tmp_path / "store", {"32x32": 8}, token_counts=(3, 5), text_width=32, texts={"clip_l": other})
    store = LatentStore(tmp_path / "store")
    path = store.text("clip_l").arrays[0].shard_paths(np.array([0]))[0]
    (store.path / path).write_bytes(bytes((store.path / path).stat().st_size))  # whoever opens it finds damage
    run = Run.open(train_recipe("pixart-tiny", "run.global_batch=4"), [store], CPU, print)
    batches = list(run.loader)
    assert [list(batch.texts) for batch in batches] == [[""], [""]]
    with pytest.raises(DamageError):
        list(make_loader(store, global_batch=4))


def test_batches_are_as_the_recipe_says(store: LatentStore) -> None:
    recipes = [train_recipe("dit-s-4", f"latent.normalise={how}") for how in ("encoder", "store", "none")]
    readers = [Run.open(recipe, [store], CPU, print).loader.reader for recipe in recipes]
    encoder, by_store, raw = (reader[0].latents for reader in readers)
    found = statistics_of(store)
    mean, std = (torch.tensor(each)[:, None, None] for each in (found.channel_mean, found.channel_std))
    torch.testing.assert_close(by_store, (encoder - mean) / std, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(raw, denormalise(encoder, store.spec.latent), rtol=1e-4, atol=1e-5)


def test_a_run_keeps_its_statistics_and_its_snapshot_undoes_them(store: LatentStore, tmp_path: Path) -> None:
    run, said, statistics = tmp_path / "run", list[str](), statistics_of(store)
    for steps in (3, 4):
        train(store, run, BY_STORE, f"run.steps={steps}", "ema.warmup=true")  # an average that is not young
        manifest = read_run_manifest(run)
        assert manifest.statistics == statistics
    kept = statistics.model_copy(update={"channel_mean": [3.0] * store.spec.latent.channels})
    state = Run.open(train_recipe("dit-s-4", BY_STORE), [store], CPU, print, statistics=kept)
    assert state.loader.reader.statistics == kept  # not those of the store, which has grown meanwhile
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
    reader = reader.loader.reader
    assert reader.statistics.count == sum(statistics_of(one).count for one in stores[:2])
    assert len({tuple(spec.shift) for spec in reader.latent_specs}) == 1
