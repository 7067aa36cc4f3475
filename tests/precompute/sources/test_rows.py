"""Rows of tables that are made into records many at once: the same records as one by one, whatever a row says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from leandit.datasets.disk import spill
from leandit.datasets.errors import ResourceError, SourceError
from leandit.precompute.sources.files.files import LocalFiles
from leandit.precompute.sources.files.folders import Scan
from leandit.precompute.sources.files.placement import Placement
from leandit.precompute.sources.files.record import (
    MAX_CAPTION_CHARS,
    MAX_CAPTIONS,
    MAX_CLASSES,
    MAX_KEY_CHARS,
    SourceRecord,
)
from leandit.precompute.sources.listing.listing import record_batch
from leandit.precompute.sources.source import list_source
from leandit.precompute.sources.tables import foreign_parquet, json_rows, manifests
from leandit.precompute.sources.tables.rows import Rows, check_rows, row_record

NAMES = st.sampled_from(
    [
        *("a.jpg", "b/c.jpg", "b/../a.jpg", "./a.jpg", "b//c.jpg", "../a.jpg", "/a.jpg", "a.jpg/", "", ".", ".."),
        *("none.jpg", "fifo", "b", "..a.jpg", "nul\0", "\ud800.jpg", "новый.jpg", "a\n"),
        *("x" * MAX_KEY_CHARS, "y" * (MAX_KEY_CHARS + 1)),
    ]
)
TEXTS = st.sampled_from(
    [
        *(
            "a cat",
            " a cat",
            "a cat\n",
            "",
            " ",
            "\u3000a cat",
            "猫",
            "a\u200b",
            "\x1fa",
            "a\x85",
            "\ud800",
            "two\nlines",
        ),
        *("c" * MAX_CAPTION_CHARS, "d" * (MAX_CAPTION_CHARS + 1), "é" * 100),
    ]
)
WRONG: list[Any] = [None, True, 1.0, "7", [], {}]
CAPTIONS = st.one_of(TEXTS, st.lists(st.one_of(TEXTS, st.sampled_from([None, 7])), max_size=4), st.sampled_from(WRONG))
LABELS = st.sampled_from([0, -1, -2, 7, MAX_CLASSES - 1, MAX_CLASSES, 2**70, *WRONG])
SIDES = st.sampled_from([0, 1, 64, -5, 1 << 20, (1 << 20) + 1, 2**63, 2**64, *WRONG])
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "file_name": st.one_of(NAMES, st.none()),
        "path": NAMES,
        "captions": CAPTIONS,
        "caption": CAPTIONS,
        "prompt": CAPTIONS,
        "label": LABELS,
        "cls": LABELS,
        "height": SIDES,
        "width": SIDES,
    },
)
PLAIN = {"path": "a.jpg", "prompt": "a cat", "label": 3, "height": 64, "width": 96}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> LocalFiles:
    root = tmp_path_factory.mktemp("source")
    (root / "b").mkdir()
    for i, name in enumerate(("a.jpg", "b/c.jpg", "..a.jpg", "новый.jpg", "a\n")):
        (root / name).write_bytes(b"x" * i)
    os.mkfifo(root / "fifo")
    return LocalFiles(root)


def said(make: Callable[[], list[dict[str, Any]]]) -> object:
    """What was made, or the error."""
    try:
        return make()
    except SourceError as error:
        return str(error)


def at_once(files: LocalFiles, rows: Rows) -> list[dict[str, Any]]:
    checked = check_rows(rows, Placement())
    return checked.batch(files, Placement(), [files.look(path) for path in checked.paths.to_pylist()]).to_pylist()


def one_by_one(files: LocalFiles, rows: list[Any]) -> list[dict[str, Any]]:
    """By definition."""
    records = [row_record(files, Placement(), row, f"row {i}") for i, row in enumerate(rows)]
    return record_batch(records).to_pylist()


@given(st.lists(ROWS, min_size=1, max_size=6))
@example([PLAIN, {**PLAIN, "prompt": ["a", "b", "a"]}, {**PLAIN, "prompt": ["c"] * (MAX_CAPTIONS + 1)}, PLAIN])
@example([PLAIN, {**PLAIN, "path": "none.jpg"}, {**PLAIN, "path": "fifo"}, {**PLAIN, "label": MAX_CLASSES}, PLAIN])
def test_rows_of_json_at_once_are_what_they_are_one_by_one(files: LocalFiles, rows: list[dict[str, Any]]) -> None:
    found = said(lambda: at_once(files, Rows(rows, lambda i: f"row {i}")))
    assert found == said(lambda: one_by_one(files, rows))


STRING, LISTS = pa.string(), pa.list_(pa.string())
TYPES: dict[str, list[tuple[pa.DataType, list[Any]]]] = {
    "file_name": [(STRING, ["a.jpg", None])],
    "path": [(STRING, ["a.jpg", "b/c.jpg", "../a.jpg", "none.jpg", None]), (pa.large_string(), ["a.jpg"])],
    "captions": [(LISTS, [["a cat", "b"], ["a", "a"], [], [" a"], [None], None]), (pa.list_(pa.int32()), [[1]])],
    "prompt": [(STRING, ["a cat", " a", "", None]), (pa.binary(), [b"a cat"]), (pa.null(), [None])],
    "label": [
        (pa.int64(), [3, -1, -2, MAX_CLASSES, None]),
        (pa.uint64(), [2**63 + 1, 3]),
        (pa.bool_(), [True]),
        (pa.float32(), [1.0]),
    ],
    "height": [(pa.int32(), [64, 0, None]), (pa.float64(), [64.0])],
    "width": [(pa.uint16(), [96, 0])],
}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    chosen = draw(st.sets(st.sampled_from(sorted(TYPES.keys() - {"path"}))))
    count = draw(st.integers(1, 6))
    columns = {}
    for name in ["path", *sorted(chosen)]:
        kind, values = draw(st.sampled_from(TYPES[name]))
        columns[name] = pa.array(draw(st.lists(st.sampled_from(values), min_size=count, max_size=count)), kind)
    return pa.table(columns)


@given(tables())
def test_rows_of_parquet_at_once_are_what_they_are_one_by_one(
    files: LocalFiles, tmp_path: Path, table: pa.Table
) -> None:
    pq.write_table(table, tmp_path / "list.parquet")
    with open(tmp_path / "list.parquet", "rb") as file:
        found = said(lambda: listed(files, file))
    wanted = said(lambda: one_by_one(files, table.to_pylist()))
    if isinstance(wanted, str):
        wanted = wanted.replace("row ", "list, row ")
        number = int(wanted.split("row ")[1].split(":")[0])
        wanted = wanted.replace(f"row {number}", f"row {number + 1}", 1)
    assert found == wanted


def listed(files: LocalFiles, file: BinaryIO) -> list[dict[str, Any]]:
    return [row for rows, _ in manifests._parquet_rows(file, "list", Scan()) for row in at_once(files, rows)]


@pytest.mark.parametrize("slow_look_seconds", [0.0, 1e9], ids=["threads", "one by one"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_rows_stay_in_order_over_many_batches(
    kind: str, slow_look_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "SLOW_LOOK_SECONDS", slow_look_seconds)
    for module in (foreign_parquet, json_rows):
        monkeypatch.setattr(module, "TABLE_ROWS", 7)
    monkeypatch.setattr(foreign_parquet, "READ_ROWS", 50)
    monkeypatch.setattr(manifests, "LOOKED", 2)
    rows = []
    for i in range(200):
        (tmp_path / f"{i}.jpg").write_bytes(b"x" * i)
        odd = {3: f"no{i}.jpg", 5: f"../{i}.jpg"}.get(i % 11)
        rows.append({"path": odd or f"{i}.jpg", "prompt": f"picture {i}", "label": i})
    path = tmp_path / f"list.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=64)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if kind == "jsonl" else json.dumps(rows))
    found = list(list_source(path).records)
    plain = [i for i in range(200) if i % 11 not in (3, 5)]
    assert [found[i] for i in plain] == [
        SourceRecord(f"{i}.jpg", f"{i}.jpg", 0, i, found[i].mtime_ns, i, (f"picture {i}",)) for i in plain
    ]
    reasons = [record.problem and record.problem[0] for record in found]
    assert reasons[3] == "missing_file"
    assert reasons[5] == "bad_metadata"
    assert all((reason is None) == (i in plain) for i, reason in enumerate(reasons))
    assert len(found) == 200


def test_the_error_is_that_of_the_first_wrong_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "TABLE_ROWS", 2)
    lines = ['{"path": "a.jpg"}', '{"path": 7}', *['{"path": "a.jpg"}'] * 4, "damaged"]
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    with pytest.raises(SourceError, match="line 2: needed"):
        list_source(tmp_path / "list.jsonl")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["path", "caption", "caption"], "two columns are called 'caption'"),
        (["photo"], "no column is known to name.*'photo'"),
    ],
)
def test_columns_of_parquet_that_say_nothing_or_twice_are_an_error(names: list[str], said: str, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(["a.jpg"])] * len(names), names), tmp_path / "list.parquet")
    with pytest.raises(SourceError, match=said):
        list_source(tmp_path / "list.parquet", "manifest")


def test_texts_that_would_fill_the_memory_together_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "MAX_BATCH_BYTES", 1 << 20)
    (tmp_path / "a.jpg").write_bytes(b"x")
    rows = [{"path": "a.jpg", "prompt": "x" * 1000}] * 1500
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ResourceError, match=r"consecutive records.*Shorten"):
        list_source(tmp_path / "list.jsonl")
