"""Every row of a table is a record or a reject, whatever its quotes, line ends, length or encoding."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from making import make_image_folder, write_file

from leandit.precompute.sources.source import Source, list_source

ONE_MIB = 1 << 20
QUOTE_PROBLEM = "a double quote is not closed, or text follows it"
Outcome = tuple[str, str]
"""Key of a record, and its caption or the problem that rejects it."""


def outcomes(source: Source) -> list[Outcome]:
    return [(r.key, r.problem[1] if r.problem else " / ".join(r.captions)) for r in source.records]


def read(tmp_path: Path, name: str, content: bytes | str) -> list[Outcome]:
    make_image_folder(tmp_path)
    return outcomes(list_source(write_file(tmp_path / name, content)))


def tsv_of(rows: list[list[str]], **options: object) -> str:
    """What ``csv.writer`` and pandas write: cells are in quotes only where they need it."""
    text = io.StringIO(newline="")
    csv.writer(text, delimiter="\t", lineterminator="\n", **options).writerows([["file_name", "text"], *rows])  # pyright: ignore
    return text.getvalue()


FILLING = [["b.jpg", "y" * 1000]] * 256  # more than the first 256 KiB
RAW = "file_name\ttext\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    {
        "a quoted cell with a line break": (
            tsv_of([["a.jpg", 'says "OPEN"'], ["b.jpg", "first line\nsecond line"], ["c.jpg", "last"]]),
            {"a.jpg": 'says "OPEN"', "b.jpg": "first line\nsecond line", "c.jpg": "last"},
        ),
        "a line break and a tab, so that each line has two cells": (
            tsv_of([["a.jpg", "first line\nsecond\tline"], ["c.jpg", "last"]]),
            {"a.jpg": "first line\nsecond\tline", "c.jpg": "last"},
        ),
        "the first quotes are late": (
            tsv_of([*FILLING, ["a.jpg", 'says "OPEN"'], ["c.jpg", "two\nlines"]]),
            {"b.jpg": "y" * 1000, "a.jpg": 'says "OPEN"', "c.jpg": "two\nlines"},
        ),
        "every cell is quoted": (
            tsv_of([["a.jpg", "one"], ["b.jpg", 'a "b"']], quoting=csv.QUOTE_ALL),
            {"a.jpg": "one", "b.jpg": 'a "b"'},
        ),
        "quotes are text, and an early cell happens to be in quotes": (
            RAW + 'a.jpg\t"Quoted title"\nb.jpg\t"Hello, he said\nc.jpg\t"Good bye" she said\n',
            {"a.jpg": '"Quoted title"', "b.jpg": '"Hello, he said', "c.jpg": '"Good bye" she said'},
        ),
        "quotes are text that encloses whole rows": (
            RAW + 'a.jpg\t"Hello, he said\nb.jpg\tand left"\nc.jpg\tplain\n',
            {"a.jpg": '"Hello, he said', "b.jpg": 'and left"', "c.jpg": "plain"},
        ),
        "a header with commas": (
            "file_name\ttext\tnotes, of a person, for later\na.jpg\tone, two\t\n",
            {"a.jpg": "one, two"},
        ),
        "Windows, without the last line end": (
            '\ufefffile_name\ttext\r\na.jpg\t"one\r\ntwo"\r\nb.jpg\tthree',
            {"a.jpg": "one\r\ntwo", "b.jpg": "three"},
        ),
    }.values(),
)
def test_quotes_of_a_tsv_are_those_with_which_every_row_can_be_read(
    content: str, expected: dict[str, str], tmp_path: Path
) -> None:
    assert dict(read(tmp_path, "metadata.tsv", content)) == {
        key: caption.replace("\r\n", "\n") for key, caption in expected.items()
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    {
        "quotes after a backslash": (
            'image,caption\n"a.jpg","He said \\"hi\\", twice"\nb.jpg,"one\\\\"\nc.jpg,two\n',
            [("a.jpg", 'He said "hi", twice'), ("b.jpg", "one\\"), ("c.jpg", "two")],
        ),
        "a space before the quote": (
            'image, caption\na.jpg, "one, ""two"""\nb.jpg, "three" \nc.jpg, "four" he said\n',
            [("a.jpg", 'one, "two"'), ("b.jpg", "three"), ("c.jpg", '"four" he said')],
        ),
        "pipes": ('image|caption\na.jpg|"one\ntwo"\nb.jpg|say "hi"\n', [("a.jpg", "one\ntwo"), ("b.jpg", 'say "hi"')]),
        "mixed line ends": (
            "image,caption\r\na.jpg,one\nb.jpg,two\r\nc.jpg,three",
            [("a.jpg", "one"), ("b.jpg", "two"), ("c.jpg", "three")],
        ),
        "line ends of an old Mac": ("image,caption\ra.jpg,one\rb.jpg,two\r", [("a.jpg", "one"), ("b.jpg", "two")]),
        "empty lines and cells": (
            "image,caption\n\na.jpg,one,,\n  \nb.jpg,two\n",
            [("a.jpg", "one"), ("b.jpg", "two")],
        ),
        "ragged rows": (
            "image,caption\na.jpg,one\nb.jpg,two,three\nc.jpg\n",
            [
                ("a.jpg", "one"),
                ("b.jpg (row 3)", "line 3: 3 cells, expected 2"),
                ("c.jpg (row 4)", "line 4: 1 cells, expected 2"),
            ],
        ),
        "an open quote costs its own row": (
            'image,caption\na.jpg,"one\nb.jpg,"two\nthree"\nc.jpg,four\n',
            [("b.jpg", "two\nthree"), ("c.jpg", "four"), ("a.jpg (row 2)", f"line 2: {QUOTE_PROBLEM}")],
        ),
        "an open quote in the last row": (
            'image,caption\na.jpg,one\nb.jpg,"two',
            [("a.jpg", "one"), ("b.jpg (row 3)", f"line 3: {QUOTE_PROBLEM}")],
        ),
        "bytes that are no text": (
            b'image,caption\na.jpg,"caf\xe9\nof two lines"\nb.jpg,\0\nc.jpg,one\n',
            [
                ("c.jpg", "one"),
                ("a.jpg (row 2)", "line 2: not UTF-8"),
                ("b.jpg (row 4)", "line 4: it contains a NUL byte"),
            ],
        ),
    }.values(),
)
def test_every_row_of_a_csv_is_a_record_or_a_reject(
    content: bytes | str, expected: list[Outcome], tmp_path: Path
) -> None:
    assert read(tmp_path, "list.csv", content) == expected


@pytest.mark.parametrize("mib", [17, 34])
@pytest.mark.parametrize("name", ["list.csv", "list.tsv", "list.jsonl"])
def test_a_row_that_is_too_long_is_a_reject(name: str, mib: int, tmp_path: Path) -> None:
    captions = {"a.jpg": "one", "b.jpg": "x" * (mib * ONE_MIB), "c.jpg": "three"}
    rows = [[key, caption] for key, caption in captions.items()]
    if name.endswith("jsonl"):
        content = "".join(json.dumps({"file_name": key, "text": caption}) + "\n" for key, caption in rows)
        key = '{"file_name": "b.jpg" (row 2)'
    else:
        mark = "\t" if name.endswith("tsv") else ","
        content = f"file_name{mark}text\n" + "".join(f"{key}{mark}{caption}\n" for key, caption in rows)
        key = "b.jpg (row 3)"
    *good, (rejected_key, problem) = read(tmp_path, name, content)
    assert good == [("a.jpg", "one"), ("c.jpg", "three")]
    assert rejected_key == key
    assert problem.endswith("longer than 16 MiB")


def test_every_row_of_json_lines_is_a_record_or_a_reject(tmp_path: Path) -> None:
    good = [json.dumps({"file_name": name, "text": text}) for name, text in (("a.jpg", "one"), ("c.jpg", "three"))]
    bad = [b"{broken", b"[1]", b"null", b'{"file_name": "b.jpg", "text": "caf\xe9"}', b'{"file_name": "b.jpg"']
    lines = [f"\ufeff{good[0]}".encode(), *bad[:-1], b"", f"{good[1]}\r".encode(), bad[-1]]
    keys = [key for key, _ in read(tmp_path, "list.jsonl", b"\n".join(lines))]
    assert keys == ["a.jpg", "row 2", "row 3", "row 4", "row 5", "c.jpg", "row 7"]
