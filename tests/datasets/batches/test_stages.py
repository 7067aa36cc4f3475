"""The stages of a batch, each called alone: order, resolve, gather, check."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from faults import flip
from stores import Everything, copy_of

from leandit.datasets.arrays.sharded_array import ShardedArray
from leandit.datasets.batches.gather import Gatherer
from leandit.datasets.batches.reader import BatchReader
from leandit.datasets.batches.resolve import ResolvedBatch, Resolver
from leandit.datasets.batches.row_checks import RowChecks
from leandit.datasets.loader import make_loader
from leandit.datasets.order.batch_plan import BatchPlan
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, RecipeError

GLOBAL_BATCH = 4


def plan_of(store: LatentStore) -> BatchPlan:
    return BatchPlan(store.buckets, GLOBAL_BATCH, seed=1)


def resolved_of(store: LatentStore, number: int = 0) -> ResolvedBatch:
    plan = plan_of(store)
    return Resolver([store], [plan]).resolve([plan.batch_at(number)], number)[0]


def test_the_resolver_looks_up_records_rows_labels_and_captions(caption_store: LatentStore) -> None:
    planned = plan_of(caption_store).batches(0, 9)
    for number, (batch, resolved) in enumerate(
        zip(planned, Resolver([caption_store], [plan_of(caption_store)]).resolve(planned), strict=True)
    ):
        index = caption_store.index(batch.bucket)
        assert (resolved.number, resolved.bucket, resolved.store) == (number, batch.bucket, 0)
        assert resolved.global_size == len(batch.positions)
        assert resolved.records.tolist() == index.records[batch.positions].tolist()
        assert resolved.rows.tolist() == index.rows[batch.positions].tolist()
        assert resolved.caption_ids is not None
        for record, caption in zip(resolved.records.tolist(), resolved.caption_ids.tolist(), strict=True):
            assert caption in caption_store.record_at(record).caption_ids


def test_the_slices_of_all_ranks_are_the_global_batch(caption_store: LatentStore) -> None:
    plan = plan_of(caption_store)
    planned = [plan.batch_at(0)]
    (whole,) = Resolver([caption_store], [plan]).resolve(planned)
    slices = [Resolver([caption_store], [plan], rank=rank, world_size=3).resolve(planned)[0] for rank in range(3)]
    assert np.concatenate([batch.records for batch in slices]).tolist() == whole.records.tolist()
    assert {batch.global_size for batch in slices} == {len(whole.records)}


def test_batches_resolved_together_are_those_resolved_alone(caption_store: LatentStore) -> None:
    plan = plan_of(caption_store)
    resolver = Resolver([caption_store], [plan])
    together = resolver.resolve(plan.batches(3, 5), 3)
    for batch in together:
        alone = resolver.resolve([plan.batch_at(batch.number)], batch.number)[0]
        for name in ("rows", "records", "labels", "caption_ids", "draw_keys"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(batch, name))


def test_the_gatherer_returns_the_stored_rows(caption_store: LatentStore) -> None:
    resolved = resolved_of(caption_store)
    gathered = Gatherer([caption_store]).gather(resolved)
    (latents,) = gathered.records[""].values()
    np.testing.assert_array_equal(latents, caption_store.latents(resolved.bucket).take(resolved.rows))
    assert resolved.caption_ids is not None
    captions = [caption_store.text().stored_rows(int(caption))[0] for caption in resolved.caption_ids]
    np.testing.assert_array_equal(gathered.captions[""].arrays["embeddings"], np.concatenate(captions))
    assert gathered.captions[""].lengths.tolist() == [len(caption) for caption in captions]


def test_only_the_groups_that_are_asked_for_are_read(
    three_text_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = set[str]()
    for method in ("take", "take_ranges"):
        original = getattr(ShardedArray, method)

        def noted(array: ShardedArray, *args: object, original: object = original, **options: object) -> np.ndarray:
            paths.add(array.path)
            return original(array, *args, **options)  # type: ignore[operator]

        monkeypatch.setattr(ShardedArray, method, noted)
    resolved = resolved_of(three_text_store)
    gathered = Gatherer([three_text_store], texts=["clip_g"]).gather(resolved)
    assert list(gathered.captions) == ["clip_g"]
    assert {path.split("/")[1] for path in paths if path.startswith("captions/")} == {"clip_g"}
    paths.clear()
    batches = list(make_loader(three_text_store, global_batch=4, texts=["t5", "clip_l"], prefetch=0))
    assert {tuple(batch.texts) for batch in batches} == {("t5", "clip_l")}
    assert {path.split("/")[1] for path in paths if path.startswith("captions/")} == {"t5", "clip_l"}
    with pytest.raises(RecipeError, match=r"no text encoder 'umt5'\. Available: clip_l, clip_g, t5"):
        Gatherer([three_text_store], texts=["umt5"])


def test_a_check_hashes_the_gathered_memory_and_reads_no_row(
    caption_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = resolved_of(caption_store)
    gathered = Gatherer([caption_store]).gather(resolved)

    def refuse(*args: object, **options: object) -> np.ndarray:
        raise AssertionError("a row is read again")

    for method in ("take", "take_ranges", "read"):
        monkeypatch.setattr(ShardedArray, method, refuse)
    RowChecks([caption_store]).check(resolved, gathered)
    (latents,) = gathered.records[""].values()
    latents.view(np.uint8).reshape(-1)[5] ^= 1  # after the read, as memory that fails
    with pytest.raises(DamageError, match=rf"record '.*' \(bucket '{resolved.bucket}', row {resolved.rows[0]}\)"):
        RowChecks([caption_store]).check(resolved, gathered)
    latents.view(np.uint8).reshape(-1)[5] ^= 1
    gathered.captions[""].arrays["embeddings"].view(np.uint8).reshape(-1)[-1] ^= 1
    assert resolved.caption_ids is not None
    with pytest.raises(DamageError, match=rf"caption {resolved.caption_ids[-1]} .* of text encoder ''"):
        RowChecks([caption_store]).check(resolved, gathered)
    RowChecks([caption_store], "never").check(resolved, gathered)


def test_views_that_were_not_drawn_are_part_of_the_checksum(everything: Everything, tmp_path: Path) -> None:
    store = LatentStore(copy_of(everything.grown, tmp_path / "copy"))
    assert store.spec.latent.flip
    for resolved in map(functools.partial(resolved_of, store), range(20)):
        rows = resolved.rows.tolist()
        assert resolved.views is not None
        for row, view in zip(rows, resolved.views.tolist(), strict=True):
            array = store.latents(resolved.bucket, flipped=view % 2 == 0)  # the other one
            if row % array.shard_rows == 0:
                continue  # opening a shard compares its first row
            path, first, _ = array.place(row)
            gatherer = Gatherer([store], texts=[], features=[], companions=[])
            RowChecks([store]).check(resolved, gatherer.gather(resolved))
            flip(store.path / path, 8 * (first + 3))
            with pytest.raises(DamageError, match="does not match its checksum"):
                RowChecks([store]).check(resolved, gatherer.gather(resolved))
            return
    raise AssertionError("every row is the first of its shard")


def test_a_reader_is_its_stages_one_after_the_other(caption_store: LatentStore) -> None:
    reader = BatchReader([caption_store], plan_of(caption_store))
    for number in (0, 5, 31, 32):
        batch = reader[number]
        resolved = resolved_of(caption_store, number)
        assert batch.records.tolist() == resolved.records.tolist()
        (latents,) = reader.gatherer.gather(resolved).records[""].values()
        np.testing.assert_array_equal(batch.stored.numpy(), latents)
