"""The plan: every record has its place, every distinct caption is listed once, and batches follow fixed rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from making import caption_recipe, picture

from leandit.datasets.errors import SourceError
from leandit.datasets.format.table_schemas import RECORDS_SCHEMA
from leandit.precompute.config import PrecomputeRecipe, SourceSection
from leandit.precompute.encoders.text.tokenizer import CaptionTokenizer
from leandit.precompute.images.decoders import Decoders
from leandit.precompute.planning.captions import CaptionCounts, plan_captions
from leandit.precompute.planning.compare import Comparison, all_fresh
from leandit.precompute.planning.images import plan_images
from leandit.precompute.planning.records import plan_records
from leandit.precompute.run.rejects import RejectLimits
from leandit.precompute.sources.files.files import LocalFiles
from leandit.precompute.sources.files.record import SourceRecord
from leandit.precompute.sources.listing.listing import record_batches, spool
from leandit.precompute.sources.source import Source

Planned = Callable[..., pa.Table]
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def tokenizer() -> CaptionTokenizer:
    return CaptionTokenizer(caption_recipe(f"text.max_tokens={MAX_TOKENS}").text)


def made_source(root: Path, shapes: Sequence[tuple[int, int]], captions: Sequence[tuple[str, ...]]) -> Source:
    records = []
    for i, (size, texts) in enumerate(zip(shapes, captions, strict=True)):
        path = root / f"{i}.png"
        picture(i, *size).save(path)
        records.append(SourceRecord(f"key-{i}", path.name, 0, path.stat().st_size, label=i % 3, captions=texts))
    listed = spool(record_batches(records), lambda done: None)
    return Source(SourceSection(kind="metadata"), LocalFiles(root), listed, None, 0)


@pytest.fixture(scope="module")
def planned(decoders: Decoders) -> Planned:
    """Images of a source as its first revision plans them."""

    def plan(source: Source, recipe: PrecomputeRecipe, *, stops: bool = False) -> pa.Table:
        limits = RejectLimits(recipe.source, len(source.records), is_planning=True)
        return plan_images(source, source.records, recipe, decoders, limits, stops=stops)

    return plan


def table_of(source: Source, pictures: pa.Table, caption_ids: Sequence[Sequence[int]]) -> pa.Table:
    ids = pa.chunked_array([list(caption_ids)], pa.list_(pa.int32()))
    return plan_records(all_fresh(source.records), pictures, ids, revision=1)


def lists(texts: Sequence[Sequence[str]]) -> list[pa.ListArray]:
    return [pa.array(texts, pa.list_(pa.string()))]


def test_rows_of_a_bucket_follow_the_source_and_rejects_have_none(tmp_path: Path, planned: Planned) -> None:
    shapes = [(64, 64), (60, 100), (64, 64), (100, 60), (10, 90), (60, 100), (64, 64)]
    source = made_source(tmp_path, shapes, [("a red circle",)] * 7)
    pictures = planned(source, caption_recipe())
    table = table_of(source, pictures, [[i] for i in range(7)])
    assert table["key"].to_pylist() == [f"key-{i}" for i in range(7)]
    names = {(64, 64): "64x64", (60, 100): "48x80", (100, 60): "80x48", (10, 90): None}
    assert table["bucket"].to_pylist() == [names[shape] for shape in shapes]
    assert table["row"].to_pylist() == [0, 0, 1, 0, -1, 1, 2]
    assert table["label"].to_pylist() == [0, 1, 2, 0, 1, 2, 0]
    assert table["caption_ids"].to_pylist() == [[i] for i in range(7)]
    assert table["status"].to_pylist() == [*["planned"] * 4, "rejected", "planned", "planned"]
    assert (table["stage"][4].as_py(), table["reason"][4].as_py()) == ("scan", "aspect")
    assert table["source_path"].to_pylist() == [f"{i}.png" for i in range(7)]


@pytest.mark.parametrize("threads", [1, 4])
def test_the_plan_does_not_depend_on_threads(
    tmp_path: Path, planned: Planned, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made_source(tmp_path, [(20 + 3 * i, 40) for i in range(12)], [("x",)] * 12)
    wanted = planned(source, caption_recipe())
    monkeypatch.setattr("leandit.precompute.planning.images.num_threads", lambda: threads)
    assert planned(source, caption_recipe()) == wanted


@pytest.mark.parametrize(
    ("size", "reason"),
    [((10, 45), None), ((10, 46), "aspect"), ((45, 10), None), ((46, 10), "aspect"), ((1, 200), "aspect")],
)
def test_a_ratio_beyond_four_and_a_half_is_rejected(
    tmp_path: Path, planned: Planned, size: tuple[int, int], reason: str | None
) -> None:
    found = planned(made_source(tmp_path, [size], [("x",)]), caption_recipe())
    assert found["reason"].to_pylist() == [reason]


def counted(tokenizer: CaptionTokenizer) -> list[CaptionCounts]:
    return [CaptionCounts("", tokenizer, MAX_TOKENS)]


def test_a_later_revision_counts_its_rows_and_captions_on_its_own(
    tmp_path: Path, planned: Planned, tokenizer: CaptionTokenizer
) -> None:
    # What is carried over keeps its revision and row; only the ids of captions count over all revisions.
    first = made_source(tmp_path, [(64, 64), (60, 100)], [("a red circle",), ("a blue square",)])
    known, ids = plan_captions(lists([["a red circle"], ["a blue square"]]), counted(tokenizer))
    before = table_of(first, planned(first, caption_recipe()), ids.to_pylist())
    source = made_source(tmp_path, [(64, 64), (64, 64)], [("a blue square",), ("a circle",)])
    renamed = (replace(record, key=f"new-{i}") for i, record in enumerate(source.records))
    fresh = spool(record_batches(renamed), lambda done: None)
    comparison = Comparison(first.records, fresh, before.select(RECORDS_SCHEMA.names), np.array([1, 2], np.int32))
    texts = [["a red circle"], ["a blue square"], ["a blue square"], ["a circle"]]
    captions, ids = plan_captions(lists(texts), counted(tokenizer), revision=2, known=known)
    table = plan_records(comparison, planned(source, caption_recipe()), ids, revision=2)
    assert table["key"].to_pylist() == ["key-0", "key-1", "new-0", "new-1"]
    assert table["revision"].to_pylist() == [1, 1, 2, 2]
    assert table["row"].to_pylist() == [0, 0, 0, 1]
    assert table["attempts"].to_pylist() == [1, 1, 1, 2]
    assert captions["text"].to_pylist() == [*known["text"].to_pylist(), "a circle"]
    assert captions["revision"].to_pylist() == [1, 1, 2]
    words = captions["text"].to_pylist()
    assert [[words[i] for i in one] for one in table["caption_ids"].to_pylist()] == texts


@pytest.mark.parametrize(
    ("broken", "share", "in_a_row", "stops"),
    [(10, 0.01, 100, None), (11, 0.01, 100, "max_reject_share"), (11, 0.95, 100, None), (5, 1.0, 5, "in_a_row")],
    ids=["ten are never too many", "a large share", "allowed", "in a row"],
)
def test_too_many_rejects_stop_the_scan_and_say_why(
    broken: int, share: float, in_a_row: int, stops: str | None, tmp_path: Path, planned: Planned
) -> None:
    source = made_source(tmp_path, [(8, 8)] * 24, [("x",)] * 24)
    for record in source.records[:broken]:
        (tmp_path / record.path).write_bytes(b"x" * record.num_bytes)
    recipe = caption_recipe(f"source.max_reject_share={share}", f"source.max_rejects_in_a_row={in_a_row}")
    if stops is None:
        assert len(planned(source, recipe, stops=True)["reason"].drop_null()) == broken
        return
    with pytest.raises(SourceError, match=rf"{broken} .*rejected.*{stops}.*{broken} x not_an_image") as caught:
        planned(source, recipe, stops=True)
    assert "encoded" not in str(caught.value)  # nothing is, yet
