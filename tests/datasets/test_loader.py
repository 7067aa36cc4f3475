"""The loader: what it hands out is what lies in the store, and a resumed one hands out exactly the rest."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import in_child
from making import encode, label_recipe
from stores import Everything, bytes_in
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from leandit.datasets.batches.batch import Batch
from leandit.datasets.batches.gather import Gatherer
from leandit.datasets.batches.latents import draw_keys, final_latents
from leandit.datasets.batches.reader import BatchReader
from leandit.datasets.batches.resolve import Resolver
from leandit.datasets.format.schema import Decoding
from leandit.datasets.loader import BatchStream, make_loader
from leandit.datasets.order.batch_plan import BatchPlan
from leandit.datasets.order.filters import RecordFilter
from leandit.datasets.order.mixture import Mixture
from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError, RunError

GLOBAL_BATCH = 4


@pytest.fixture(scope="module")
def flip_store(class_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    path = tmp_path_factory.mktemp("flip-store") / "store"
    encode(label_recipe("vae.flip=true"), class_folder, path)
    return LatentStore(path)


def endless(loader: Any) -> Iterator[Batch]:
    """Epoch after epoch, as training reads."""
    while True:
        yield from loader


def take(loader: Any, count: int) -> list[Batch]:
    return list(itertools.islice(endless(loader), count))


def resume(loader: Any, state: dict[str, Any]) -> Batch:
    """Load a state and read the next batch."""
    loader.load_state_dict(state)
    return next(iter(loader))


def assert_same(found: Batch, wanted: Batch) -> None:
    assert (repr(found), found.store) == (repr(wanted), wanted.store)
    assert list(bytes_in(found)) == list(bytes_in(wanted))
    assert torch.equal(found.latents, wanted.latents)


def assert_all_same(found: list[Batch], wanted: list[Batch]) -> None:
    assert [(batch.epoch, batch.number) for batch in found] == [(batch.epoch, batch.number) for batch in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


def test_a_batch_is_what_the_store_holds_drawn_and_normalised(label_store: LatentStore) -> None:
    spec = label_store.spec.latent
    for batch in take(make_loader(label_store, global_batch=GLOBAL_BATCH, seed=3), 8):
        records = [label_store.record_at(int(i)) for i in batch.records]
        assert {record.bucket for record in records} == {batch.bucket}
        stored = np.stack([label_store.latents(batch.bucket)[record.row] for record in records])
        np.testing.assert_array_equal(batch.stored.numpy(), stored)
        keys = draw_keys(3, np.full(len(batch), batch.epoch), batch.records.numpy())
        np.testing.assert_array_equal(batch.latents, final_latents(torch.from_numpy(stored), spec, keys))
        assert batch.latents.dtype == torch.float32
        assert batch.labels.tolist() == [record.label for record in records]
        assert [f"n{record.label:03d}" for record in records] == [record.key.split("/")[0] for record in records]
        assert (batch.captions, batch.caption_lengths) == (None, None)
        assert len(batch) == len(records)


def test_batches_do_not_depend_on_how_far_is_read_ahead(caption_store: LatentStore) -> None:
    length = len(make_loader(caption_store, global_batch=GLOBAL_BATCH))
    wanted = take(make_loader(caption_store, global_batch=GLOBAL_BATCH), 2 * length)
    assert [(batch.epoch, batch.number) for batch in wanted] == [(i // length, i) for i in range(2 * length)]
    for prefetch in (0, 7):
        found = take(make_loader(caption_store, global_batch=GLOBAL_BATCH, prefetch=prefetch), 2 * length)
        assert_all_same(found, wanted)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", ["caption_store", "flip_store"])
def test_a_resume_at_any_batch_gives_exactly_the_rest(name: str, request: pytest.FixtureRequest) -> None:
    store: LatentStore = request.getfixturevalue(name)
    loader = make_loader(store, global_batch=GLOBAL_BATCH, seed=1)
    count = 2 * len(loader) + 2  # over two ends of an epoch
    states, wanted = [loader.state_dict()], []
    for batch in itertools.islice(endless(loader), count):
        wanted.append(batch)
        states.append(loader.state_dict())
    for k, state in enumerate(states):
        saved, resumed = (make_loader(store, global_batch=GLOBAL_BATCH, seed=1) for _ in range(2))
        saved.load_state_dict(state)
        resumed.load_state_dict(saved.state_dict())  # loaded and saved again, it is the same
        assert_all_same(take(resumed, count - k), wanted[k:])


def test_a_state_of_the_end_of_an_epoch_has_no_batch_of_the_next_one(label_store: LatentStore) -> None:
    """So a loop over epochs that is resumed makes as many epochs as one that was not interrupted."""
    loader = make_loader(label_store, global_batch=GLOBAL_BATCH)
    length, states = len(loader), []
    for _ in loader:
        states.append(loader.state_dict())
    states.append(loader.state_dict())  # after the end
    rests = []
    for state in states[-3:]:
        resumed = make_loader(label_store, global_batch=GLOBAL_BATCH)
        resumed.load_state_dict(state)
        rests.append([[batch.number for batch in resumed] for _ in range(2)])
    second, third = (list(range(epoch * length, (epoch + 1) * length)) for epoch in (1, 2))
    assert rests == [[[length - 1], second], [[], second], [second, third]]


def test_a_state_of_another_order_is_refused(label_store: LatentStore, flip_store: LatentStore) -> None:
    loader = make_loader(label_store, global_batch=GLOBAL_BATCH, seed=1)
    take(loader, 2)
    selection = RecordFilter(labels=["n001"]).select(label_store)
    selected = make_loader(label_store, global_batch=GLOBAL_BATCH, seed=1, selection=selection)
    assert [label for batch in selected for label in batch.labels.tolist()] == [1] * 5  # they alone are read
    for other, word in [
        (make_loader(label_store, global_batch=GLOBAL_BATCH, seed=2), "seed"),
        (make_loader(label_store, global_batch=5, seed=1), "order.buckets.32x32.batch_size"),
        (make_loader(flip_store, global_batch=GLOBAL_BATCH, seed=1), "root_hashes"),
        (selected, "order.filter"),
    ]:
        with pytest.raises(RunError, match=rf"{word}.*: was .*is now"):
            resume(other, loader.state_dict())


def test_an_incomplete_store_hands_out_what_is_committed_and_refuses_a_state_of_fewer_records(
    caption_store: LatentStore, unsealed_store: Path, tmp_path: Path
) -> None:
    # Its records are others than before, so the same position means another batch.
    path = shutil.copytree(unsealed_store, tmp_path / "store")
    commit = path / "revisions/000001/commits/buckets/64x64/000000.json"
    content = commit.read_bytes()
    commit.unlink()

    def new() -> tuple[LatentStore, Any]:
        opened = LatentStore(path, allow_incomplete=True)
        return opened, make_loader(opened, global_batch=GLOBAL_BATCH)

    before, loader = new()
    seen: Counter[str] = Counter()
    for batch in loader:
        seen[batch.bucket] += len(batch)
    assert seen == {bucket: count for bucket, count in caption_store.buckets.items() if bucket != "64x64"}
    commit.write_bytes(content)
    after, resumed = new()
    assert after.buckets != before.buckets
    with pytest.raises(RunError, match="order of records"):
        resume(resumed, loader.state_dict())
    shutil.rmtree(path / "revisions/000001/commits")
    with pytest.raises(RunError, match="no records"):
        new()


def test_flipped_rows_come_about_half_of_the_time_and_the_same_each_run(flip_store: LatentStore) -> None:
    bucket = "32x32"
    count = 8 * len(make_loader(flip_store, global_batch=GLOBAL_BATCH))
    flips: list[tuple[int, int, bool]] = []
    for batch in take(make_loader(flip_store, global_batch=GLOBAL_BATCH, seed=2), count):
        for i, record in enumerate(batch.records.tolist()):
            row = flip_store.record_at(record).row
            both = [array[row] for array in (flip_store.latents(bucket), flip_store.latents(bucket, flipped=True))]
            assert not np.array_equal(*both)
            which = [np.array_equal(batch.stored[i].numpy(), stored) for stored in both]
            assert sum(which) == 1
            flips.append((record, batch.epoch, which[1]))
    share = np.mean([flipped for *_, flipped in flips])
    assert 0.3 < share < 0.7  # of 120
    # A record is flipped in some epochs and not in others; each record decides for itself.
    by_record = {record: [flipped for r, _, flipped in flips if r == record] for record in range(15)}
    assert sum(0 < sum(seen) < 8 for seen in by_record.values()) >= 13
    assert len({tuple(seen) for seen in by_record.values()}) >= 13


def reader_of(store: LatentStore) -> BatchReader:
    return BatchReader([store], BatchPlan(store.buckets, GLOBAL_BATCH, 1))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.integration)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_stock_dataloader_with_workers_gives_the_same_batches(method: str, caption_store: LatentStore) -> None:
    reader = reader_of(caption_store)
    next(iter(BatchStream(reader)))  # what the parent has open, a fork must not use
    wanted = [reader[number] for number in range(17)]
    how: dict[str, Any] = {"num_workers": 2 if method == "fork" else 1, "multiprocessing_context": method}
    assert_all_same(list(DataLoader(reader, batch_size=None, sampler=range(5, 17), **how)), wanted[5:])


def test_a_stream_goes_on_in_a_fork(label_store: LatentStore) -> None:
    stream = BatchStream(reader_of(label_store), prefetch=2)
    batches = iter(stream)
    next(batches)
    wanted = reader_of(label_store)[1].stored
    assert in_child(lambda: int(not torch.equal(next(batches).stored, wanted))) == 0
    assert torch.equal(next(batches).stored, wanted)


def test_a_stream_in_a_worker_says_what_to_do(label_store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leandit.datasets.batches.stream.get_worker_info", object)
    with pytest.raises(RunError, match=r"num_workers=0, or DataLoader\(stream.reader"):
        next(iter(BatchStream(reader_of(label_store))))


def test_a_batch_that_is_kept_is_never_overwritten(caption_store: LatentStore) -> None:
    kept = take(make_loader(caption_store, global_batch=2, prefetch=4), 60)
    copies = [batch.stored.clone() for batch in kept]
    part = kept[7].stored[0, :1]  # a view keeps its buffer too
    wanted = part.clone()
    del kept[7]
    kept += take(make_loader(caption_store, global_batch=2, prefetch=4), 60)
    del copies[7]
    for batch, kept_copy in zip(kept, copies, strict=False):
        np.testing.assert_array_equal(batch.stored, kept_copy)
    np.testing.assert_array_equal(part, wanted)


def test_a_mixture_of_stores_has_the_batches_of_each(label_store: LatentStore, flip_store: LatentStore) -> None:
    plans = [BatchPlan(store.buckets, 4, seed) for seed, store in enumerate((label_store, flip_store))]
    mixture = Mixture([(plans[0], 0.75), (plans[1], 0.25)], seed=5)
    stores = [label_store, flip_store]
    stream = BatchStream(BatchReader(stores, mixture), prefetch=2)
    batches = list(itertools.islice(stream, 16))
    assert Counter(batch.store for batch in batches) == {0: 12, 1: 4}
    for which, plan in enumerate(plans):
        own = [batch for batch in batches if batch.store == which]
        for ordinal, batch in enumerate(own):
            planned = plan.batch_at(ordinal)
            index = stores[which].index(planned.bucket)
            assert batch.records.tolist() == index.records[planned.positions].tolist()
            rows = stores[which].latents(planned.bucket).take(index.rows[planned.positions])
            assert which == 1 or np.array_equal(batch.stored, rows)
    resumed = BatchStream(BatchReader(stores, mixture))
    resumed.load_state_dict(stream.state_dict() | {"number": 9})
    assert_all_same(list(itertools.islice(resumed, 7)), batches[9:])
    with pytest.raises(TypeError, match="no epochs"):
        len(resumed)


def changed(store: LatentStore, section: str, **changes: Any) -> LatentStore:
    """The store with other values in a section of its spec."""
    other = LatentStore(store.path)
    part = getattr(other.spec, section).model_copy(update=changes)
    other.spec = other.spec.model_copy(update={section: part})
    return other


def test_stores_of_other_latents_or_captions_are_not_mixed(
    label_store: LatentStore, flip_store: LatentStore, caption_store: LatentStore
) -> None:
    wide = {"channels": 16, "stored_channels": 32, "shift": [0.0] * 16, "scale": [1.0] * 16}
    captions = changed(caption_store, "text", width=4096)
    for one, other, said in [
        (label_store, changed(flip_store, "latent", **wide), "latent channels 4 and 16"),
        (label_store, changed(flip_store, "latent", downscale=32), "downscale factor 8 and 32"),
        (label_store, changed(flip_store, "latent", scale=[0.13025] * 4), r": scale [0-9., ]+ and 0\.13025\."),
        (
            label_store,
            changed(flip_store, "latent", shift=[0.0, 0.1, 0, 0]),
            r": shift [-0-9., ]+ and 0\.0, 0\.1, \.\.\.",
        ),
        (caption_store, captions, r"caption width \d+ and 4096.*text='none'"),
        (caption_store, label_store, r"caption width \d+ and no captions.*text='none'"),
    ]:
        plans = [BatchPlan(store.buckets, 4, 0) for store in (one, other)]
        with pytest.raises(RecipeError, match=said) as caught:
            BatchReader([one, other], Mixture([(plans[0], 1), (plans[1], 1)], seed=0))
        assert str(one.path) in str(caught.value)
        assert str(other.path) in str(caught.value)
    plans = [BatchPlan(caption_store.buckets, 4, seed) for seed in (0, 1)]
    mixture = Mixture([(plans[0], 1), (plans[1], 1)], seed=0)
    BatchReader([caption_store, captions], mixture, gatherer=Gatherer([caption_store, captions], texts=[]))
    latent = flip_store.spec.latent  # imported rows that are normalised already fit those of the same encoder
    decoding = Decoding(shift=latent.shift, scale=latent.scale, zero_to_one=False)
    imported = changed(flip_store, "latent", shift=[0.0] * 4, scale=[1.0] * 4, decoding=decoding)
    plans = [BatchPlan(store.buckets, 4, 0) for store in (label_store, imported)]
    BatchReader([label_store, imported], Mixture([(plans[0], 1), (plans[1], 1)], seed=0))


def test_each_plan_of_a_store_has_draws_of_its_own_seed(label_store: LatentStore) -> None:
    one, two = (BatchPlan(label_store.buckets, 15, seed) for seed in (1, 2))
    mixture = Mixture([(one, 1), (two, 1)], seed=0)  # each has one batch an epoch
    numbers = [next(number for number in range(2) if mixture.part_of(number)[0] == part) for part in range(2)]

    def keys(reader: BatchReader, number: int) -> dict[int, int]:
        batch = reader[number]
        assert batch.draw_keys is not None
        return dict(zip(batch.records.tolist(), batch.draw_keys.tolist(), strict=True))

    reader = BatchReader([label_store] * 2, mixture)
    assert [keys(reader, number) for number in numbers] == [
        keys(BatchReader([label_store], plan), 0) for plan in (one, two)
    ]
    assert keys(reader, 0) != keys(reader, 1)
    given = BatchReader([label_store] * 2, mixture, resolver=Resolver([label_store] * 2, mixture.plans, seed=7))
    assert keys(given, 0) == keys(given, 1)
    state = BatchStream(reader).state_dict()
    BatchStream(BatchReader([label_store] * 2, mixture)).load_state_dict(state)
    with pytest.raises(RunError, match=r"draw_seed: was \[1, 2\], is now 7"):
        BatchStream(given).load_state_dict(state)


def test_a_selection_of_another_revision_is_refused(everything: Everything, caption_store: LatentStore) -> None:
    earlier = LatentStore(everything.grown, revision=1)
    selection = RecordFilter(min_aspect=0.1).select(earlier)
    make_loader(earlier, global_batch=2, selection=selection)
    with pytest.raises(RecipeError, match="another revision"):
        make_loader(LatentStore(everything.grown), global_batch=2, selection=selection)
    with pytest.raises(RecipeError, match="selection was made from another store"):
        make_loader(caption_store, global_batch=2, selection=selection)


def test_a_stream_goes_on_from_a_state_that_is_loaded_while_it_is_read(label_store: LatentStore) -> None:
    stream = BatchStream(reader_of(label_store))
    length = len(stream)
    for place in (0, 3, 10):
        batches = iter(stream)
        next(batches), next(batches)
        stream.load_state_dict({**stream.state_dict(), "number": place})
        end = (place // length + 1) * length
        assert [batch.number for batch in batches] == list(range(place, end))
        stream.load_state_dict({**stream.state_dict(), "number": 0})


def test_what_is_not_a_state_of_this_order_is_refused(label_store: LatentStore) -> None:
    stream = BatchStream(reader_of(label_store))
    good = stream.state_dict()
    for state in (None, [], {}, "number"):
        with pytest.raises(RunError, match="not a state of a loader"):
            stream.load_state_dict(state)  # type: ignore[arg-type]
    for number in (-1, True, 2.0, "3", None):
        with pytest.raises(RunError, match="expected a count of batches"):
            stream.load_state_dict({**good, "number": number})
    changes = {"draw_seed": True, "order": {**good["order"], "seed": True}, "version": 1}  # 1 == True
    for key, value in changes.items():
        with pytest.raises(RunError, match=rf"{key}.*: was .*is now"):
            stream.load_state_dict({**good, key: value})
    for key in good.keys() - {"number", "passes"}:
        with pytest.raises(RunError, match=rf"loader state: it has no '{key}'"):
            stream.load_state_dict({name: value for name, value in good.items() if name != key})
    with pytest.raises(RunError, match="loader state: 'workers' is not known"):
        stream.load_state_dict({**good, "workers": 2})
    stream.load_state_dict(json.loads(json.dumps(good)))


def test_a_stream_that_is_read_from_can_be_pickled(label_store: LatentStore) -> None:
    stream = BatchStream(reader_of(label_store))
    next(stream)
    copies = [pickle.loads(pickle.dumps(stream)), copy.deepcopy(stream)]
    wanted = next(stream)
    for other in copies:
        assert_same(next(iter(other)), wanted)


def test_a_loader_is_torchdatas_own_and_draws_no_number(label_store: LatentStore) -> None:
    loader = make_loader(label_store, global_batch=GLOBAL_BATCH)
    assert type(loader) is StatefulDataLoader
    assert loader.num_workers == 0
    before = torch.get_rng_state()
    assert len(list(loader)) == len(loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(loader.dataset, BatchStream)
    (state,) = [part for part in loader.state_dict()["fetcher_state"].values() if isinstance(part, dict)]
    assert state == loader.dataset.state_dict()
    assert state["number"] == len(loader)


def test_an_argument_that_cannot_be_is_refused(label_store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, words in [
        ({"prefetch": -1}, "prefetch of -1"),
        ({"seed": 1.5}, "seed of 1.5"),
        ({"global_batch": {"32x32": 2.0}}, "expected a whole number"),
        ({"device": "cuda"}, "sees no GPU"),
        ({"text": "pakced"}, "'pakced': expected one of padded, packed, none"),
    ]:
        with pytest.raises(RecipeError, match=words):
            make_loader(label_store, **{"global_batch": 2, **arguments})


def test_arguments_of_other_types_are_taken_or_refused(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IndexError, match="expected 0 to 1"):
        make_loader(label_store, global_batch=2, rank=2, world_size=2)
    with pytest.raises(RecipeError, match="expected one of auto, map, pread"):
        LatentStore(label_store.path, access="mmap")  # type: ignore[arg-type]
    first = make_loader(label_store, global_batch=np.int64(2), seed=np.uint64(3), device="cpu")  # type: ignore[arg-type]
    state = json.loads(json.dumps(first.state_dict()))
    resume(make_loader(label_store, global_batch=2, seed=3), state)
    monkeypatch.chdir(label_store.path.parent)
    opened = LatentStore(label_store.path.name)
    monkeypatch.chdir(tmp_path)  # a relative path is that of the moment
    assert sum(map(len, make_loader(opened, global_batch=4))) == sum(opened.buckets.values())


def test_a_batch_without_captions_has_none(caption_store: LatentStore) -> None:
    batch = next(iter(make_loader(caption_store, global_batch=2, text="none")))
    assert (batch.text, batch.captions) == (None, None)
    assert repr(batch) == f"Batch(number=0, epoch=0, bucket='{batch.bucket}', records=2)"


def test_stores_that_are_not_those_of_the_plans_are_refused(label_store: LatentStore) -> None:
    plan = BatchPlan(label_store.buckets, 2, 0)
    for stores in (label_store, [], [label_store, label_store]):
        with pytest.raises(RecipeError, match="expected a list of 1"):
            BatchReader(stores, plan)  # type: ignore[arg-type]
    for buckets in ({"32x32": 1}, {"32x32": 100}, {"8x8": 3}):
        with pytest.raises(RecipeError, match=r"Make the plan from store\.buckets"):
            BatchReader([label_store], BatchPlan(buckets, 2, 0))
    with pytest.raises(IndexError, match="batch -1"):
        _ = BatchReader([label_store], plan)[-1]
