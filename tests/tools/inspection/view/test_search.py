"""Search finds what a scan of every text finds, and orders as asked."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leandit.datasets.errors import RecipeError
from leandit.datasets.store import LatentStore
from leandit.tools.inspection.view.records.query import Query
from leandit.tools.inspection.view.records.search import RecordSearch
from leandit.tools.inspection.view.records.word_index import LetterPairs, WordIndex, needles

TEXTS = st.lists(st.text(alphabet="aBc d\u00c4\u00e4\u00df\n", max_size=12), max_size=12)


@given(TEXTS, st.text(alphabet='aBc"d \u00c4\u00e4', max_size=8))
def test_the_index_finds_what_a_scan_finds(texts: list[str], query: str) -> None:
    wanted = needles(query)
    scanned = [all(one in text.lower() for one in wanted) for text in texts]
    assert WordIndex(pa.chunked_array([texts], pa.string())).find(wanted).tolist() == scanned


@given(TEXTS, st.text(alphabet="aBc \u00e4", max_size=4))
def test_a_part_whose_pairs_are_unknown_is_in_no_text(texts: list[str], part: str) -> None:
    lower = [text.lower() for text in texts]
    may_hold = LetterPairs(pa.chunked_array([lower[:5], lower[5:]], pa.string())).may_hold(part.lower())
    assert may_hold or not any(part.lower() in text for text in lower)
    assert LetterPairs(pa.chunked_array([["ab"]])).may_hold("ba") is False


def test_many_words_are_found_in_one_pass() -> None:
    texts = [f"word{number} again" for number in range(400)]
    index = WordIndex(pa.chunked_array([texts[:200], texts[200:]], pa.string()))
    assert index.find(["word"]).all()
    assert np.flatnonzero(index.find(["word39", "again"])).tolist() == [39, *range(390, 400)]


def test_quotes_make_one_needle_of_several_words() -> None:
    assert needles(' Red  "big BLUE" x" y') == ["red", "big blue", "x", "y"]


def search_of(store: LatentStore) -> RecordSearch:
    return RecordSearch(store.records, store.captions, store.class_names)


def found(store: LatentStore, **query: str) -> list[str]:
    positions = search_of(store).find(Query.parse({name: str(value) for name, value in query.items()}))
    return [store.record_at(int(position)).key for position in positions]


def test_words_are_looked_for_in_one_caption_the_class_or_the_key(
    caption_store: LatentStore, label_store: LatentStore
) -> None:
    everything = caption_store.records["key"].to_pylist()
    assert found(caption_store, q="RED circ") == everything[::3]
    assert found(caption_store, q="red big") == []  # of two captions
    assert found(caption_store, q='"big blue" tiny green') == everything
    assert found(caption_store, q='"blue big"') == []
    assert found(caption_store, q="images/1.PNG") == [everything[1]]
    assert found(label_store, q="n002 3") == ["n002/3.png"]
    assert found(label_store, class_="n001") == [f"n001/{number}.png" for number in range(5)]


def test_columns_are_compared(caption_store: LatentStore) -> None:
    heights = caption_store.records["height_px"].to_pylist()
    keys = caption_store.records["key"].to_pylist()
    tall = [key for key, height in zip(keys, heights, strict=True) if height >= 64]
    assert found(caption_store, where="height_px >= 64") == tall
    assert found(caption_store, where="height_px>=64 and key ~ /1") == [key for key in tall if "/1" in key]
    assert found(caption_store, where="fallback != null") == []
    assert found(caption_store, where="fallback = null", bucket="64x64") == keys[::3]
    checksum = caption_store.records["checksum"][4].as_py()
    assert found(caption_store, where=f"checksum = {checksum:#x}") == [keys[4]]


@pytest.mark.parametrize("order", ["up", "down"])
def test_records_are_sorted_by_a_column_and_stay_in_order_where_equal(caption_store: LatentStore, order: str) -> None:
    heights, keys = caption_store.records["height_px"].to_pylist(), caption_store.records["key"].to_pylist()
    sign = 1 if order == "up" else -1
    wanted = [keys[at] for at in sorted(range(len(keys)), key=lambda at: sign * heights[at])]
    assert found(caption_store, sort="height_px", order=order) == wanted


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"where": "height >= 3"}, "no column 'height'. There are: key"),
        ({"where": "height_px is 3"}, "needed COLUMN, one of = !="),
        ({"where": "height_px = tall"}, "'tall' is no int32"),
        ({"where": "height_px = 99999999999"}, "is no int32"),
        ({"where": "fallback > null"}, "needed = or !="),
        ({"sort": "caption_ids"}, "no column 'caption_ids'"),
        ({"page": "0"}, "page '0': needed a number from 1"),
        ({"order": "sideways"}, "needed one of up, down"),
        ({"colour": "red"}, "no parameter 'colour'"),
        ({"q": "x" * 1001}, "1001 characters, at most 1000"),
        ({"class_": "cat"}, "no class 'cat'"),
    ],
)
def test_a_query_that_cannot_be_says_why(query: dict[str, str], says: str, caption_store: LatentStore) -> None:
    with pytest.raises(RecipeError) as error:
        search_of(caption_store).find(Query.parse(query))
    assert says in str(error.value)


def test_an_address_leads_back_to_its_query() -> None:
    query = Query(q='a "b c" & d', where="key ~ =", bucket="64x64", page=7)
    address = dict(pair.split("=") for pair in query.link(page=7)[1:].split("&"))
    assert set(address) == {"q", "where", "bucket", "page"}
    assert "page" not in query.link(status="stored")  # another search begins at its first page
