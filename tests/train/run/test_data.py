"""The data of a run as the recipe says it: filters, leftovers, batches by tokens, shuffling in windows."""

from __future__ import annotations

from collections import Counter
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
from leandit.train.models.build import pixels_per_token
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


def test_without_data_keys_every_record_trains_once(label_store: LatentStore) -> None:
    batches, said = one_pass(label_store)
    assert records(batches) == list(range(sum(label_store.buckets.values())))
    assert said == []


@pytest.mark.parametrize("label", ['"n001"', "1"])
def test_only_the_labels_asked_for_train(label: str, label_store: LatentStore) -> None:
    batches, said = one_pass(label_store, f"data.labels=[{label}]")
    assert {label for batch in batches for label in batch.labels.tolist()} == {1}
    (line,) = said
    assert "records train; filtered out" in line


def test_only_the_aspects_asked_for_train(caption_store: LatentStore) -> None:
    table = caption_store.records
    aspects = np.array(table["height_px"]) / np.array(table["width_px"])
    for setting, wanted in (("data.max_aspect=0.9", aspects <= 0.9), ("data.min_aspect=0.9", aspects >= 0.9)):
        found = records(one_pass(caption_store, setting, model="pixart-tiny")[0])
        assert 0 < len(found) < len(aspects)
        assert found == np.flatnonzero(wanted).tolist()


def test_only_scores_that_are_high_enough_train(label_store: LatentStore, tmp_path: Path) -> None:
    keys = label_store.records["key"].to_pylist()
    path = tmp_path / "scores.parquet"
    pq.write_table(pa.table({"name": keys, "aesthetic": [float(i) for i in range(len(keys))]}), path)
    overrides = ["data.score_column=aesthetic", "data.score_key=name", "data.min_score=4.0"]
    batches, said = one_pass(label_store, f"data.scores={path}", *overrides)
    assert records(batches) == list(range(4, len(keys)))
    assert "4 by score" in said[0]


def test_batches_hold_as_many_tokens_as_asked_for(caption_store: LatentStore) -> None:
    recipe = train_recipe("pixart-tiny")
    spec = model_spec(recipe, caption_store.spec, str(caption_store.path))
    sizes = Counter[str]()
    batches, _ = one_pass(caption_store, "data.batch_tokens=200", model="pixart-tiny")
    assert records(batches) == list(range(sum(caption_store.buckets.values())))
    side = pixels_per_token(spec, caption_store.spec.latent)
    for batch in batches:
        height, width = map(int, batch.bucket.split("x"))
        sizes[batch.bucket] = max(sizes[batch.bucket], len(batch))
        assert len(batch) * (height // side) * (width // side) <= 200
    assert len(sizes) > 1
    with pytest.raises(RecipeError, match="image tokens, 1 are allowed"):
        one_pass(caption_store, "data.batch_tokens=1", model="pixart-tiny")


def test_what_is_dropped_in_every_pass_is_said(caption_store: LatentStore) -> None:
    largest = max(caption_store.buckets.values())
    overrides = ["data.leftovers=drop", f"run.global_batch={largest}"]
    batches, said = one_pass(caption_store, *overrides, model="pixart-tiny")
    assert {len(batch) for batch in batches} == {largest}
    assert "never read" in said[0]
    assert all(f"{b} ({count})" in said[0] for b, count in caption_store.buckets.items() if count < largest)


def test_a_model_of_labels_reads_no_captions(caption_store: LatentStore) -> None:
    recipe, said = train_recipe("dit-s-4"), list[str]()
    spec = model_spec(train_recipe("pixart-tiny"), caption_store.spec, "store")
    labels = spec.model_copy(update={"name": "DiT-S/4", "caption_width": 0})
    assert next(iter(build_loader(recipe, [caption_store], labels, CPU, said.append))).captions is None
    assert next(iter(build_loader(recipe, [caption_store], spec, CPU, said.append))).captions is not None


def test_a_bucket_that_a_filter_empties_needs_no_batch_size(caption_store: LatentStore, tmp_path: Path) -> None:
    # Of the largest bucket no batch has so few tokens, but nothing of it trains.
    table = caption_store.record_columns(("key", "bucket"))
    largest = max(caption_store.buckets, key=lambda bucket: np.prod(bucket_size(bucket)))
    keep = [row["key"] for row in table.to_pylist() if row["bucket"] != largest]
    assert len(keep) < table.num_rows
    pq.write_table(pa.table({"key": keep, "score": [1.0] * len(keep)}), tmp_path / "scores.parquet")
    smaller = max(np.prod(bucket_size(bucket)) for bucket in caption_store.buckets if bucket != largest)
    batches, _ = one_pass(
        caption_store,
        f"data.scores={tmp_path / 'scores.parquet'}",
        f"data.batch_tokens={smaller // 16**2}",
        model="pixart-tiny",
    )
    assert sum(map(len, batches)) == len(keep)
