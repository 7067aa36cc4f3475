"""Filters: exactly the records that fulfil every condition train, and all others are counted by reason."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import copy_of

from leandit.datasets.format.class_names import ClassNames
from leandit.datasets.loader import make_loader
from leandit.datasets.order.batch_plan import BatchPlan, changed_fields
from leandit.datasets.order.filters import RecordFilter, ScoreTable, Selection, is_held_out
from leandit.datasets.revisions.records import key_hash
from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError


def made_up_store(records: list[dict[str, Any]], classes: list[str] | None = None) -> LatentStore:
    """What a filter reads of a store: the table, the buckets, and the records of each in some order."""
    table = pa.table(
        {
            "key": [record.get("key", f"k{i}") for i, record in enumerate(records)],
            "label": pa.array([record.get("label", -1) for record in records], pa.int64()),
            "height_px": pa.array([record.get("height_px", 64) for record in records], pa.int32()),
            "width_px": pa.array([record.get("width_px", 64) for record in records], pa.int32()),
        }
    )
    buckets: dict[str, list[int]] = {"48x80": [], "64x64": []}
    for i, record in enumerate(records):
        if record.get("stored", True):
            buckets[record.get("bucket", "64x64")].append(i)
    indexes = {name: SimpleNamespace(records=np.array(rows[::-1], np.int64)) for name, rows in buckets.items()}
    store = SimpleNamespace(
        path=Path("made-up"),
        record_columns=table.select,
        record_batches=lambda columns: table.select(list(columns)).to_batches(),
        record_at=lambda i: SimpleNamespace(key=table["key"][i].as_py()),
        num_records=len(records),
        buckets={name: len(rows) for name, rows in buckets.items()},
        index=lambda bucket: indexes[bucket],
        class_names=ClassNames(classes),
        content_hash="made up",
    )
    return cast(LatentStore, store)


def kept(selection: Selection, store: LatentStore) -> set[int]:
    """Positions in the records table of the records that train."""
    found: list[int] = []
    for bucket, positions in selection.positions.items():
        records = store.index(bucket).records
        found += (records if positions is None else records[positions]).tolist()
    assert len(found) == len(set(found)) == selection.num_records == sum(selection.counts.values())
    return set(found)


def score_file(path: Path, scores: dict[str, Any], column: str = "score", key: str = "key") -> Path:
    pq.write_table(pa.table({key: list(scores), column: list(scores.values())}), path)
    return path


sides = st.integers(1, 200)
RECORD = {"label": st.integers(0, 3), "height_px": sides, "width_px": sides, "stored": st.booleans()}
RECORD |= {"bucket": st.sampled_from(["48x80", "64x64"])}
RECORD |= {"score": st.none() | st.sampled_from([1.0, 4.5, 5.0, 7.0, math.nan])}
records = st.lists(st.fixed_dictionaries(RECORD), min_size=1, max_size=30)
labels, aspects = st.none() | st.sets(st.integers(0, 3), min_size=1), st.tuples(*[st.none() | st.just(0.5)] * 2)


@given(records, labels, aspects, st.booleans())
def test_the_records_that_fulfil_every_condition_train_and_no_others(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[dict[str, Any]],
    labels: set[int] | None,
    aspects: tuple[float | None, float | None],
    scored: bool,
) -> None:
    low, high = aspects[0], aspects[1] and 1 / aspects[1]
    store = made_up_store(records, ["a", "b", "c", "d"])
    scores = {f"k{i}": record["score"] for i, record in enumerate(records)} | {"elsewhere": 9.0}
    path = score_file(tmp_path_factory.mktemp("scores") / "s.parquet", scores, "aesthetic", "name")
    table = ScoreTable(path, "aesthetic", 5.0, key="name") if scored else None
    asked = RecordFilter(sorted(labels) if labels else None, low, high, table)

    def reason(record: dict[str, Any]) -> str | None:
        aspect = record["height_px"] / record["width_px"]
        if labels and record["label"] not in labels:
            return "label"
        if (low is not None and aspect < low) or (high is not None and aspect > high):
            return "aspect"
        if scored and (record["score"] is None or math.isnan(record["score"])):
            return "no_score"
        return "score" if scored and record["score"] < 5 else None

    stored = {i: record for i, record in enumerate(records) if record["stored"]}
    wanted = {i for i, record in stored.items() if reason(record) is None}
    if not wanted:
        with pytest.raises(RecipeError, match="no key in common" if not stored and scored else "0 of .* Relax"):
            asked.select(store)
        return
    selection = asked.select(store)
    assert kept(selection, store) == wanted
    reasons = [reason(record) for record in stored.values()]
    assert {name: count for name, count in selection.num_filtered.items() if count} == {
        name: reasons.count(name) for name in set(reasons) if name
    }
    for bucket, positions in selection.positions.items():
        assert (positions is None) == (selection.counts[bucket] == store.buckets[bucket])
        assert positions is None or np.all(np.diff(positions.astype(np.int64)) > 0)
    assert json.loads(json.dumps(selection.identity)) == selection.identity


def test_the_filter_is_part_of_a_plans_identity(tmp_path: Path) -> None:
    store = made_up_store([{"label": i % 2} for i in range(6)], ["a", "b"])

    def identity(path: Path, minimum: float = 2.0, labels: list[str | int] | None = None) -> dict[str, Any]:
        selection = RecordFilter(labels, scores=ScoreTable(path, "score", minimum)).select(store)
        return BatchPlan(selection.counts, 2, 0, selection=selection).identity()

    scores = {f"k{i}": float(i) for i in range(6)}
    was = json.loads(json.dumps(identity(score_file(tmp_path / "a.parquet", scores))))
    # The same scores in another file, order, type and company are the same.
    other = {"elsewhere": 8, **{key: int(value) for key, value in reversed(scores.items())}}
    assert changed_fields(was, identity(score_file(tmp_path / "b.parquet", other))) == []
    changed = score_file(tmp_path / "c.parquet", scores | {"k5": 5.5})
    by_name, by_index = (identity(tmp_path / "a.parquet", labels=[label]) for label in ("b", 1))
    assert changed_fields(by_name, by_index) == []
    for now, names in [
        (identity(tmp_path / "a.parquet", minimum=1.5), ["filter.scores.minimum"]),
        (identity(changed), ["filter.scores.xxh3_128"]),
        (by_name, ["filter.labels", "buckets.64x64.records"]),
    ]:
        assert [line.split(":")[0] for line in changed_fields(was, now)] == names


def test_aspects_at_the_limits_are_inside_and_unknown_sizes_are_not() -> None:
    sizes = [(64, 128), (128, 64), (63, 128), (129, 64), (None, 64), (64, None)]
    store = made_up_store([{"height_px": h, "width_px": w} for h, w in sizes])
    selection = RecordFilter(min_aspect=0.5, max_aspect=2.0).select(store)
    assert kept(selection, store) == {0, 1}
    assert selection.describe() == "2 of 6 records are used; filtered out: 4 by aspect"
    assert RecordFilter().select(store).describe() == "6 of 6 records are used; filtered out: none"


# What is refused.


def test_a_filter_that_keeps_nothing_or_names_no_label_is_refused() -> None:
    for asked, said in [
        ({"labels": []}, r"labels \[\]: expected a list of at least one"),
        ({"min_aspect": 2.0, "max_aspect": 1.0}, "from 2.0 to 1.0"),
        ({"min_aspect": math.nan}, "from nan"),
        ({"scores": ScoreTable("s", "score", math.nan)}, "minimum score of nan"),
        *(({"holdout": share}, "expected a share of at least 0 and below 1") for share in (1.0, -0.1)),
    ]:
        with pytest.raises(RecipeError, match=said):
            RecordFilter(**asked)
    store = made_up_store([{"label": 0}], ["tench", "goldfish"])
    for label, said in [("tenhc", "'tenhc'.*Did you mean 'tench'.*2 classes, 0 to 1: "), (2, "no class 2")]:
        with pytest.raises(RecipeError, match=said):
            RecordFilter(labels=[label]).select(store)
    with pytest.raises(RecipeError, match=r"no class.*There are no classes"):
        RecordFilter(labels=[0]).select(made_up_store([{}]))
    selection = RecordFilter(labels=[0]).select(store)
    with pytest.raises(RecipeError, match=r"selection\.counts"):
        BatchPlan({"48x80": 0, "64x64": 2}, 1, 0, selection=selection)


def test_a_score_table_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    store = made_up_store([{}, {}])
    (tmp_path / "text.parquet").write_text("no Parquet")
    score_file(tmp_path / "good.parquet", {"k0": 1.0})
    score_file(tmp_path / "words.parquet", {"k0": "much"})
    score_file(tmp_path / "others.parquet", {"x/1.png": 1.0, "x/2.png": 1.0})
    pq.write_table(pa.table({"key": ["k0", "k1", "k0"], "score": [1.0, 2.0, 1.0]}), tmp_path / "twice.parquet")
    for name, column, said in [
        ("none", "score", "no such file"),
        ("text", "score", "not a readable Parquet"),
        ("good", "aesthetic", "no column 'aesthetic'. Available: key, score"),
        ("words", "score", "expected text in 'key' and double in 'score'"),
        ("others", "score", r"no key in common with store 'made-up', whose first is 'k0'.*'x/1.png', 'x/2.png'"),
        ("twice", "score", "duplicate key 'k0'"),
    ]:
        table = ScoreTable(tmp_path / f"{name}.parquet", column, 1.0)
        with pytest.raises(RecipeError, match=said):
            RecordFilter(scores=table).select(store)
    with pytest.raises(RecipeError, match=r"0 of 2 records are used; filtered out: 1 by no_score, 1 by score\. Relax"):
        RecordFilter(scores=ScoreTable(tmp_path / "good.parquet", "score", 2.0)).select(store)


# On a real store.


def held_out(keys: Sequence[str], share: float) -> set[str]:
    hashes = np.array([key_hash(key) for key in keys], np.uint64)
    return {key for key, is_out in zip(keys, is_held_out(hashes, share), strict=True) if is_out}


def test_the_choice_is_this_one_and_its_share_that_of_the_records() -> None:
    """Golden: with another choice, runs that resume or follow would train on records that were held out before."""
    assert key_hash("n01440764/10026") == 15705493248779199630
    keys = [f"n{number:08}" for number in range(200_000)]
    for share in (0.0, 0.001, 0.25):
        assert len(held_out(keys, share)) / len(keys) == pytest.approx(share, rel=0.1)


@given(st.lists(st.text(), unique=True), st.lists(st.text(), unique=True), st.floats(0, 0.999), st.floats(0, 0.999))
def test_growth_order_and_a_larger_share_never_release_a_record(
    first: list[str], second: list[str], share: float, other: float
) -> None:
    small, large = sorted((share, other))
    grown = list(dict.fromkeys([*second, *reversed(first)]))
    assert held_out(first, small) == held_out(grown, small) & set(first)
    assert held_out(grown, small) <= held_out(grown, large)


def test_a_record_trains_or_is_held_out_and_a_filter_comes_first(label_store: LatentStore) -> None:
    with_filter = RecordFilter(labels=[0, 2], holdout=0.5).select(label_store)
    without = RecordFilter(labels=[0, 2]).select(label_store)
    for bucket, count in without.counts.items():
        trained, out = with_filter.positions[bucket], with_filter.held_out[bucket]
        all_of_them = without.positions[bucket]
        assert trained is not None
        assert all_of_them is not None
        assert sorted([*trained, *out]) == all_of_them.tolist()
        assert 0 < len(out) < count
    assert with_filter.num_filtered["label"] == 5
    assert with_filter.num_filtered["holdout"] == sum(map(len, with_filter.held_out.values()))
    assert with_filter.identity == without.identity | {"holdout": 0.5}
    batches = list(make_loader(label_store, global_batch=4, selection=with_filter))
    hashes = label_store.numbers("keys")
    assert not is_held_out(hashes[np.concatenate([batch.records for batch in batches])], 0.5).any()


def test_a_selection_fits_only_the_content_that_it_was_made_from(grown_store: Path, tmp_path: Path) -> None:
    root = copy_of(grown_store, tmp_path / "grown")
    for path in root.rglob("local.json"):
        path.unlink()  # it names the plan, which no hash covers
    selections = {n: RecordFilter(max_aspect=1.0).select(LatentStore(root, revision=n)) for n in (1, 2, 3)}
    for selected, selection in selections.items():
        for revision in (1, 2, 3):
            store = LatentStore(root, revision=revision)
            if revision == selected:
                assert len(make_loader(store, global_batch=1, selection=selection)) == selection.num_records
                continue
            with pytest.raises(RecipeError, match="selection was made from another store, or another revision"):
                make_loader(store, global_batch=1, selection=selection)
    elsewhere = LatentStore(copy_of(grown_store, tmp_path / "copy"), revision=2)
    assert len(make_loader(elsewhere, global_batch=1, selection=selections[2])) == selections[2].num_records


def test_a_selection_of_an_incomplete_store_does_not_fit_once_it_has_more_records(unfinished: Path) -> None:
    commit = unfinished / "revisions/000001/commits/buckets/48x80/000000.json"
    content = commit.read_bytes()
    commit.unlink()
    before = LatentStore(unfinished, allow_incomplete=True)
    selection = RecordFilter(max_aspect=1.0).select(before)
    assert len(make_loader(before, global_batch=1, selection=selection)) == selection.num_records
    commit.write_bytes(content)
    with pytest.raises(RecipeError, match="in bucket '48x80', the plan was made for a store with 0 there"):
        make_loader(LatentStore(unfinished, allow_incomplete=True), global_batch=1, selection=selection)
