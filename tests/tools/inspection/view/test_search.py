"""Search finds what a filter in plain Python finds, whatever is typed; and nothing but the two tables can be read."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from making import caption_recipe, encode, make_caption_folder, write_metadata
from view_sites import ROOT, client, site

from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, RecipeError
from leandit.tools.inspection.view import tables as module
from leandit.tools.inspection.view.tables import Query, StoreTables

LETTERS = "aBc _%'\"\\\u00c4\u00e4\u00df"
COMPARE = dict(zip(("=", "!=", "<", "<=", ">", ">="), (eq, ne, lt, le, gt, ge), strict=True))
HOSTILE = [
    "'; DROP TABLE records; --",
    '" OR 1 = 1 --',
    "x') OR ('' = '",
    "/* */ $word0 ? {} {0} %s",
    "read_csv('/etc/passwd')",
    "' UNION SELECT * FROM read_text('/etc/passwd') --",
    "(a+)+$" * 100,
    "9" * 1000,
    "a\0b",
    "\U0010ffff\ud800",
    " ".join("abcdefghijklmnopqrstuvwxyz"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    """32 records with awkward keys and captions, some shared, and two rejects."""
    folder = make_caption_folder(tmp_path_factory.mktemp("search") / "source", count=32)
    rows = []
    for number in range(34):
        letters = [LETTERS[(number * 7 + i * i * (2 + number % 3)) % len(LETTERS)] for i in range(9)]
        captions = ["shared", "".join(letters[:5]), "".join(letters)][number % 2 :]
        rows.append({"file_name": f"images/{'gone ' * (number > 31)}{number}.png", "captions": captions})
    write_metadata(folder, rows)
    path = folder.parent / "it's [a] store*"  # DuckDB would read a pattern
    encode(caption_recipe(), folder, path)
    return LatentStore(path)


@pytest.fixture(scope="module")
def tables(store: LatentStore) -> Iterator[StoreTables]:
    tables = StoreTables(store)
    yield tables
    tables.close()


def filtered(store: LatentStore, query: Query) -> list[int]:
    """Positions of all pages."""
    records, texts = store.records.to_pylist(), store.captions["text"].to_pylist()
    words = [word.lower() for word in query.words]

    def is_hit(row: dict[str, Any]) -> bool:
        candidates = [row["key"], *(texts[number] for number in row["caption_ids"])]
        hit = any(all(word in text.lower() for word in words) for text in candidates)
        for column in ("bucket", "status", "reason"):
            hit = hit and getattr(query, column) in ("", row[column])
        for column, sign, value in query.conditions:
            if value == "null":
                hit = hit and (row[column] is None) == (sign == "=")
            elif sign == "~":
                hit = hit and row[column] is not None and value.lower() in str(row[column]).lower()
            else:
                typed = value if isinstance(row[column], str) else int(value)
                hit = hit and row[column] is not None and COMPARE[sign](row[column], typed)
        return hit

    hits = [position for position, row in enumerate(records) if is_hit(row)]
    if query.sort:
        known = [position for position in hits if records[position][query.sort] is not None]
        known.sort(key=lambda position: records[position][query.sort], reverse=query.order == "down")
        hits = known + [position for position in hits if records[position][query.sort] is None]
    return hits


NUMBERS = st.sampled_from(["height_px", "row"]), st.sampled_from(sorted(COMPARE)), st.integers(-1, 120)
NULLS = st.sampled_from(["reason", "bucket"]), st.sampled_from(["=", "!="]), st.just("null")
KEYS = st.just("key"), st.sampled_from(["<", ">=", "~"]), st.sampled_from(["images/2", "G", "_"])
CONDITIONS = st.one_of([st.builds("{} {} {}".format, *parts) for parts in (NUMBERS, NULLS, KEYS)])
QUERIES = st.builds(
    Query,
    q=st.one_of(st.just(""), st.text(LETTERS, max_size=6), st.sampled_from(["SHARED", "images 1", '"gone 33"'])),
    where=st.lists(CONDITIONS, max_size=2).map(" and ".join),
    bucket=st.sampled_from(["", "", "64x64"]),
    status=st.sampled_from(["", "", "stored"]),
    reason=st.sampled_from(["", "", "missing_file"]),
    sort=st.sampled_from(["", "key", "height_px", "bucket", "checksum"]),
    order=st.sampled_from(["up", "down"]),
    page=st.integers(1, 4),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(query=QUERIES, size=st.sampled_from([3, 24]))
def test_hits_are_those_of_a_filter_in_python(query: Query, size: int, tables: StoreTables, store: LatentStore) -> None:
    expected = filtered(store, query)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PAGE", size)
        hits = tables.find(query)
    assert hits == (len(expected), expected[(query.page - 1) * size : query.page * size])


def keys(store: LatentStore, **query: str) -> list[str]:
    tables = StoreTables(store)
    positions = tables.find(Query.parse(query))[1]
    tables.close()
    return [store.record_at(position).key for position in positions]


def test_words_of_a_caption_class_or_key(
    caption_store: LatentStore, label_store: LatentStore, unsealed_store: Path
) -> None:
    everything = caption_store.records["key"].to_pylist()
    assert keys(caption_store, q="RED circ") == everything[::3]
    assert keys(caption_store, q="red big") == []  # of two captions
    assert keys(caption_store, q='"big blue" tiny green') == everything
    assert keys(caption_store, q='"blue big"') == []
    assert keys(caption_store, q="images/1.PNG") == [everything[1]]
    incomplete = LatentStore(unsealed_store, allow_incomplete=True)
    assert keys(incomplete, q="RED circ", sort="key", order="down") == sorted(everything[::3], reverse=True)
    assert keys(label_store, q="n002 3") == ["n002/3.png"]
    assert keys(label_store, class_="n001") == [f"n001/{number}.png" for number in range(5)]
    checksum = caption_store.records["checksum"][4].as_py()
    assert keys(caption_store, where=f"checksum = {checksum:#x}") == [everything[4]]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"where": "height >= 3"}, "no column 'height'. Available: key"),
        ({"where": "height_px is 3"}, "expected COLUMN, one of = !="),
        ({"where": "height_px = tall"}, "'tall' is not of type int32"),
        ({"where": "height_px = 99999999999"}, "is not of type int32"),
        ({"where": "fallback > null"}, "expected = or !="),
        ({"sort": '"key" DESC; --'}, "no column"),
        ({"page": "0"}, "page '0': expected a number of at least 1"),
        ({"order": "sideways"}, "expected one of up, down"),
        ({"color": "red"}, "no parameter 'color'"),
        ({"q": "x" * 1001}, "1001 characters, expected at most 1000"),
        ({"q": " ".join(map(str, range(33)))}, "33 words, expected at most 32"),
        ({"class_": "cat"}, "no class 'cat'"),
    ],
)
def test_an_invalid_query_says_why(query: dict[str, str], message: str, tables: StoreTables) -> None:
    with pytest.raises(RecipeError) as error:
        tables.find(Query.parse(query))
    assert message in str(error.value)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_typed_is_a_value_and_never_sql(text: str, store: LatentStore) -> None:
    values = [("q", text), ("where", f"key = {text}"), ("where", f"key ~ {text}"), ("where", f"height_px >= {text}")]
    values += [
        (name, text) for name in ("where", "bucket", "class_", "status", "reason", "sort", "order", "page", text)
    ]
    text = text.encode("utf-8", "replace").decode()
    with client(site(store)) as web:
        for name, value in values:
            answer = web.get(ROOT + "/", params={name.encode("utf-8", "replace"): value.encode("utf-8", "replace")})
            assert answer.status_code in (200, 400), (name, answer.text)
            assert "root:" not in answer.text
            assert (answer.status_code == 400) == ('role="alert"' in answer.text)
            hits = re.search(r"<strong>(\d+)</strong> of 34 records", answer.text)
            assert hits
            assert hits[1] in ("0", "34") or name == "q"
        assert "<strong>34</strong> of 34 records" in web.get(ROOT + "/").text


READERS = ("read_csv('/etc/passwd')", "glob('/*')", "read_text('/proc/1/environ')")
LOCKED_OUT = [f"SELECT * FROM {reader}" for reader in READERS]
LOCKED_OUT += ["SELECT * FROM 'https://elsewhere.example/x.parquet'", "COPY records TO '{folder}/stolen.csv'"]
LOCKED_OUT += ["COPY records TO '{folder}/x.parquet' (FORMAT parquet)", "ATTACH '{folder}/new.db'", "INSTALL httpfs"]
LOCKED_OUT += ["SET enable_external_access = true", "SET memory_limit = '100GB'", "SET lock_configuration = false"]


@pytest.mark.parametrize("sql", [*LOCKED_OUT, "RESET max_execution_time"])
def test_the_database_reads_two_files_and_is_locked(sql: str, tables: StoreTables, tmp_path: Path) -> None:
    with pytest.raises(duckdb.Error):
        tables._database.execute(sql.format(folder=tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_search_ends_after_its_time(store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    product = "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range * b.range <> $size + $first"
    monkeypatch.setitem(module.CONFIG, "max_execution_time", 200)
    monkeypatch.setattr(module, "FIND", product)
    tables = StoreTables(store)
    with pytest.raises(RecipeError, match="it takes longer than 30 s"):
        tables.find(Query())
    tables.close()


@pytest.mark.parametrize("name", ["records.parquet", "captions.parquet"])
def test_a_table_that_is_not_of_the_manifest_is_refused(name: str, caption_store: LatentStore, tmp_path: Path) -> None:
    path = shutil.copytree(caption_store.path, tmp_path / "store")
    name = f"revisions/000001/{name}"
    content = bytearray((path / name).read_bytes())
    content[100] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(DamageError, match=f"'{name}' differs from the manifest"):
        StoreTables(LatentStore(path))


def test_an_address_leads_back_to_its_query() -> None:
    assert Query(q=' Red  "big BLUE" x" y red').words == ["Red", "big BLUE", "x", "y", "red"]
    query = Query(q='a "b c" & d', where="key ~ =", bucket="64x64", page=7)
    assert Query.parse(dict(parse_qsl(query.link(page=7)[1:]))) == query
    assert "page" not in query.link(status="stored")  # another search begins at its first page


@pytest.mark.parametrize("rows", [0, 4_000_000])
def test_large_texts_are_found_on_disk(rows: int, caption_store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COPIED_ROWS", rows)
    tables = StoreTables(caption_store)
    kept = tables._database.execute("SELECT table_name FROM duckdb_tables()").fetchall()
    assert {("texts",), ("keys",)} & {*kept} == ({("texts",), ("keys",)} if rows else set())
    assert tables.find(Query(q="RED circ"))[0] == len(range(0, len(caption_store), 3))
    tables.close()
