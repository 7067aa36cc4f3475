"""The data of a run as the recipe says it: filters, leftovers, batches by tokens, shuffling in windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from making import CPU, train_recipe

from leandit.datasets.batches.batch import Batch
from leandit.datasets.errors import RecipeError
from leandit.datasets.format.buckets import bucket_size
from leandit.datasets.store import LatentStore
from leandit.train.run.data import build_loader
from leandit.train.run.fit import model_spec

pytestmark = pytest.mark.usefixtures("tiny_models")


def one_pass(store: LatentStore, *overrides: str, model: str = "dit-s-4") -> tuple[list[Batch], list[str]]:
    """The batches of an epoch, and what was said."""
    recipe, said = train_recipe(model, *overrides), list[str]()
    spec = model_spec(recipe, store.spec, str(store.path))
    return list(build_loader(recipe, [store], spec, CPU, said.append)), said


def records(batches: list[Batch]) -> list[int]:
    return sorted(record for batch in batches for record in batch.records.tolist())


def test_what_the_recipe_asks_for_trains_and_what_is_filtered_out_is_said(
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


def test_batches_hold_as_many_tokens_as_asked_for_of_the_buckets_that_train(
    caption_store: LatentStore, tmp_path: Path
) -> None:
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
