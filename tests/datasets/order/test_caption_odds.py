"""Which caption is drawn: by scores and temperature, by a threshold, by a share of the first; alike without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from making import CPU, train_recipe

from leandit.datasets.batches.reader import BatchReader
from leandit.datasets.batches.resolve import Resolver
from leandit.datasets.batches.stream import BatchStream
from leandit.datasets.order.batch_plan import BatchPlan
from leandit.datasets.order.caption_odds import CaptionOdds, choose_captions
from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError, RunError
from leandit.train.run.data import build_stream
from leandit.train.run.fit import model_spec

BUCKET = "64x64"


def write_scores(store: LatentStore, path: Path, scores: list[float], *, first: bool = True) -> str:
    """One list for each record, for the first only if asked for."""
    keys = store.record_columns(("key",))["key"].cast(pa.string()).to_pylist()
    lists = [scores if i or first else None for i in range(len(keys))]
    pq.write_table(pa.table({"key": keys[::-1], "scores": pa.array(lists[::-1], pa.list_(pa.float32()))}), path)
    return str(path)


def shares(odds: CaptionOdds, store: LatentStore) -> np.ndarray:
    """(records, 2) of the draws that take each caption, over many even draws."""
    index, bounds = store.index(BUCKET), odds.bounds(store)[BUCKET]
    positions, places = np.arange(len(index)), (np.arange(1000) + 0.5) / 1000
    drawn = np.stack([choose_captions(bounds, index, positions, np.full(len(index), u)) for u in places])
    return np.stack([(drawn == index.caption_ids[index.caption_starts[:-1] + i]).mean(0) for i in (0, 1)], 1)


def reader_of(store: LatentStore, odds: CaptionOdds | None) -> BatchReader:
    plan = BatchPlan(store.buckets, 4, 3)
    return BatchReader([store], plan, resolver=Resolver([store], [plan], caption_odds=[odds]))


@pytest.mark.parametrize(
    ("scores", "options", "wanted"),
    [
        ([26.0, 28.0], {}, 26 / 54),
        ([26.0, 28.0], {"temperature": 0.1}, 26**10 / (26**10 + 28**10)),
        ([26.0, 28.0], {"minimum": 27.0, "temperature": 0.1}, 0.0),
        ([26.0, 24.0], {"minimum": 30.0}, 1.0),  # none is good enough: the best
        ([-1.0, 0.0], {}, 0.0),
        ([26.0, 28.0], {"original_share": 0.7}, 0.7),
        ([26.0, 20.0], {"original_share": 0.7, "minimum": 25.0}, 1.0),  # the other may not be drawn
    ],
)
def test_captions_are_drawn_by_their_scores(
    scores: list[float], options: dict[str, Any], wanted: float, caption_store: LatentStore, tmp_path: Path
) -> None:
    odds = CaptionOdds(write_scores(caption_store, tmp_path / "s.parquet", scores, first=False), **options)
    records, found = caption_store.index(BUCKET).records, shares(odds, caption_store)[:, 0]
    np.testing.assert_allclose(found[records > 0], wanted, atol=1.1e-3)
    assert found[records == 0].tolist() == [1.0]  # without scores the first
    found = shares(CaptionOdds(original_share=0.25), caption_store)
    np.testing.assert_allclose(found, [[0.25, 0.75]] * 5, atol=1.1e-3)


def test_equal_odds_draw_what_is_drawn_without(caption_store: LatentStore, tmp_path: Path) -> None:
    def drawn(odds: CaptionOdds | None) -> list[list[int]]:
        resolved = [reader_of(caption_store, odds).resolve(number) for number in range(40)]
        return [batch.caption_ids.tolist() for batch in resolved if batch.caption_ids is not None]

    equal = CaptionOdds(write_scores(caption_store, tmp_path / "s.parquet", [7.0, 7.0]), temperature=0.1)
    assert len(drawn(None)) == 40
    assert drawn(equal) == drawn(None)
    assert drawn(CaptionOdds(original_share=0.9)) != drawn(None)


def test_a_state_of_other_odds_is_refused(caption_store: LatentStore, tmp_path: Path) -> None:
    def stream(odds: CaptionOdds | None) -> BatchStream:
        return BatchStream(reader_of(caption_store, odds))

    odds = CaptionOdds(write_scores(caption_store, tmp_path / "s.parquet", [7.0, 8.0]))
    state = stream(odds).state_dict()
    stream(odds).load_state_dict(state)
    write_scores(caption_store, tmp_path / "s.parquet", [7.0, 9.0])
    with pytest.raises(RunError, match=r"caption_odds\[0\]\.scores: was"):
        stream(odds).load_state_dict(state)
    with pytest.raises(RunError, match=r"caption_odds: was .* is now None"):
        stream(None).load_state_dict(state)


def test_a_table_that_does_not_fit_is_refused(caption_store: LatentStore, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="3 scores and 2 captions"):
        CaptionOdds(write_scores(caption_store, tmp_path / "s.parquet", [1.0, 2.0, 3.0])).bounds(caption_store)
    with pytest.raises(RecipeError, match="no such file"):
        CaptionOdds(tmp_path / "nowhere.parquet").bounds(caption_store)
    with pytest.raises(RecipeError, match="no column 'id'"):
        CaptionOdds(tmp_path / "s.parquet", key="id").bounds(caption_store)


def test_a_recipe_trains_with_its_captions_odds(caption_store: LatentStore, tmp_path: Path) -> None:
    path = write_scores(caption_store, tmp_path / "s.parquet", [30.0, 10.0])
    recipe = train_recipe("pixart-tiny", f"data.caption_scores={path}", "data.min_caption_score=25")
    spec = model_spec(recipe, caption_store.spec, "store")
    reader = build_stream(recipe, [caption_store], spec, CPU, print).reader
    firsts = {
        int(index.caption_ids[start])
        for b in caption_store.buckets
        for index in [caption_store.index(b)]
        for start in index.caption_starts[:-1]
    }
    ids = [reader.resolve(number).caption_ids for number in range(9)]
    assert {int(i) for chunk in ids if chunk is not None for i in chunk} <= firsts
