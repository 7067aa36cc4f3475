"""Captions and labels in texts and tables: what is stored of each, and how files of several lines are split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from making import caption_recipe, encode, image_bytes, label_recipe, make_class_folder, write_file, write_tar

from leandit.datasets.store import LatentStore
from leandit.errors import SourceError

pytestmark = pytest.mark.usefixtures("quick")

IMAGE = image_bytes(0, 64, 64, "JPEG")


def beside(root: Path, images: list[dict[str, bytes]]) -> Path:
    """Images with texts beside, named by their number."""
    for number, texts in enumerate(images):
        write_file(root / f"{number}.jpg", IMAGE)
        for extension, content in texts.items():
            write_file(root / f"{number}.{extension}", content)
    return root


def in_tar(root: Path, images: list[dict[str, bytes]]) -> Path:
    """The same in a WebDataset tar."""
    root.mkdir()
    write_tar(root / "0.tar", *({"__key__": str(i), "jpg": IMAGE, **texts} for i, texts in enumerate(images)))
    return root


def stored(store: Path) -> list[tuple[str | None, tuple[str, ...]]]:
    """Class and captions of each record, by the name of the class; the reason in place of the class of a reject."""
    opened = LatentStore(store)
    classes = opened.spec.classes or []
    texts = opened.captions["text"].to_pylist() if opened.captions.num_rows else []
    records = opened.records.to_pylist()
    return [
        (
            record["reason"] or (classes[record["label"]] if record["label"] >= 0 else None),
            tuple(texts[i] for i in record.get("caption_ids") or ()),
        )
        for record in records
    ]


WRITERS = {"beside images": beside, "in a tar": in_tar}
PARAGRAPHS = "A harbour at dusk.\n\nTwo boats are moored.\n \nIt is realistic."
PROMPT = json.dumps({"scene": "harbour", "subjects": ["boat", "boat"]}, indent=1)
LINES = "a harbour\r\n two boats \nrealistic"
TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "one line": (" a harbour\n", ("a harbour",)),
    "lines": (LINES, ("a harbour", "two boats", "realistic")),
    "lines with a mark, and empty ones around": ("\ufeff\n\n  one\ntwo \n\n", ("one", "two")),
    "paragraphs": (PARAGRAPHS, (PARAGRAPHS,)),
    "a prompt in JSON": (PROMPT, (PROMPT,)),
    "JSON lines": ('{"a": 1}\n{"a": 2}', ('{"a": 1}', '{"a": 2}')),
    "a line separator": ("over the bay\u2028Canon", ("over the bay\u2028Canon",)),
    "a next line": ("caf\u0085 terrace", ("caf\u0085 terrace",)),
    "a form feed": ("page one\x0cpage two", ("page one\x0cpage two",)),
    "other separators of str.splitlines": ("a\x0bb\x1cc\x1dd\x1ee\u2029f\rg", ("a\x0bb\x1cc\x1dd\x1ee\u2029f\rg",)),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_text_is_split_at_ends_of_lines_unless_it_is_one_caption(write: Callable[..., Path], tmp_path: Path) -> None:
    source = write(tmp_path / "source", [{"txt": text.encode()} for text, _ in TEXTS.values()])
    encode(caption_recipe(), source, tmp_path / "store")
    assert [captions for _, captions in stored(tmp_path / "store")] == [captions for _, captions in TEXTS.values()]


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_bytes_of_another_encoding_are_no_caption_and_the_reject_names_it(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    """UTF-16 of Latin letters without a byte order mark is valid UTF-8, with a NUL beside each letter."""
    boat = "a boat"
    texts = [boat.encode("utf-16-le"), boat.encode("utf-16-be"), boat.encode("utf-16"), "caf\xe9".encode("latin1")]
    images = [{"txt": text} for text in texts] + [{"json": b'{"caption": "a\\u0000b"}'}, {"txt": boat.encode()}]
    encode(caption_recipe("source.max_reject_share=1"), write(tmp_path / "source", images), tmp_path / "store")
    assert stored(tmp_path / "store") == [("bad_metadata", ())] * 5 + [(None, (boat,))]
    details = LatentStore(tmp_path / "store").records["detail"].to_pylist()
    assert ["UTF-16" in detail for detail in details[:4]] == [True, True, True, False]
    assert "LATIN1" in details[3]


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_the_first_field_with_a_caption_counts(write: Callable[..., Path], tmp_path: Path) -> None:
    fields: list[dict[str, Any]] = [
        {"captions": [], "caption": "a boat"},
        {"captions": [" "], "caption": "a boat"},
        {"caption": "", "text": "a boat"},
        {"captions": ["a boat", ""], "caption": "a sea"},
    ]
    images = [{"json": json.dumps(row).encode()} for row in fields]
    images += [{"caption": "\ufeff".encode(), "txt": b"a boat"}]
    encode(caption_recipe(), write(tmp_path / "source", images), tmp_path / "store")
    assert [captions for _, captions in stored(tmp_path / "store")] == [("a boat",)] * 5


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("auto", [(PARAGRAPHS,), ("a harbour", "two boats", "realistic")]),
        ("whole", [(PARAGRAPHS,), (LINES,)]),
        (
            *("lines",),
            [
                ("A harbour at dusk.", "Two boats are moored.", "It is realistic."),
                ("a harbour", "two boats", "realistic"),
            ],
        ),
    ],
)
def test_a_recipe_says_how_texts_are_split_and_the_run_counts_them(
    setting: str, expected: list[tuple[str, ...]], tmp_path: Path
) -> None:
    texts = [{"txt": PARAGRAPHS.encode()}, {"caption": b"", "txt": LINES.encode()}]
    source = beside(tmp_path / "source", texts)
    recipe = caption_recipe(f"source.text_file={setting}")
    report = encode(recipe, source, tmp_path / "store")
    assert [captions for _, captions in stored(tmp_path / "store")] == expected
    num_whole = sum(len(captions) == 1 for captions in expected)
    assert report.source
    (note,) = [note for note in report.source.notes if "source.text_file" in note]
    files = "1 text file" if num_whole == 1 else f"{num_whole} text files"
    assert note.startswith(
        f"captions: {files} of several lines read as one caption, {2 - num_whole} as a caption a line"
    )


def test_a_caption_of_lines_that_the_json_has_too_is_one_caption(tmp_path: Path) -> None:
    row = json.dumps({"caption": LINES, "url": "x", "width": 64, "sha256": "00"}).encode()
    encode(caption_recipe(), in_tar(tmp_path / "source", [{"txt": LINES.encode(), "json": row}]), tmp_path / "store")
    assert stored(tmp_path / "store") == [(None, (LINES,))]


FIELDS = json.dumps({"caption": "alt", "long_caption": "a long text", "category": 1, "kind": "cat"}).encode()
NAMED: dict[str, tuple[list[str], tuple[str | None, tuple[str, ...]]]] = {
    "nothing named": ([], (None, ("a text",))),
    "a caption": (["source.caption=long_caption"], (None, ("a long text",))),
    "a caption that is usual": (["source.caption=caption"], (None, ("alt",))),
    "the file of text": (["source.caption=txt"], (None, ("a text",))),
    "a label": (["source.label=category"], ("1", ("a text",))),
    "a label that is a name": (["source.label=kind"], ("cat", ("a text",))),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize(("settings", "expected"), NAMED.values(), ids=NAMED)
def test_a_named_field_of_json_is_read(
    write: Callable[..., Path],
    settings: list[str],
    expected: tuple[str | None, tuple[str, ...]],
    tmp_path: Path,
) -> None:
    source = write(tmp_path / "source", [{"txt": b"a text", "json": FIELDS}])
    encode(caption_recipe(*settings), source, tmp_path / "store")
    assert stored(tmp_path / "store") == [expected]


def test_an_image_without_the_named_field_has_no_caption_and_is_counted(tmp_path: Path) -> None:
    source = beside(tmp_path / "source", [{"json": FIELDS}, {"json": b'{"caption": "alt"}', "txt": b"a text"}])
    settings = ["source.caption=long_caption", "source.missing_caption=null"]
    report = encode(caption_recipe(*settings), source, tmp_path / "store")
    assert [captions for _, captions in stored(tmp_path / "store")] == [("a long text",), ("",)]
    assert report.source
    assert "source.caption 'long_caption': 1 of 2 images lack it" in report.source.notes


def table_of(rows: list[dict[str, Any]], form: str) -> Callable[[Path], Path]:
    """Writes a source of one image a row: a table beside the images, texts of each, tars, or Parquet with images."""

    def write(root: Path) -> Path:
        if form in WRITERS:
            return WRITERS[form](root, [{"json": json.dumps(row).encode()} for row in rows])
        named = [{"file_name": f"{number}.jpg", **row} for number, row in enumerate(rows)]
        if form == "Parquet with images":
            root.mkdir()
            pq.write_table(pa.Table.from_pylist([{"image": IMAGE, **row} for row in rows]), root / "all.parquet")
            return root
        beside(root, [{} for _ in rows])
        if form == "JSONL":
            write_file(root / "metadata.jsonl", "".join(json.dumps(row) + "\n" for row in named))
        elif form == "Parquet of paths":
            pq.write_table(pa.Table.from_pylist(named), root / "metadata.parquet")
        else:
            lines = [",".join(f'"{value}"' for value in row.values()) for row in named]
            write_file(root / "metadata.csv", "\n".join([",".join(named[0]), *lines]))
        return root

    return write


FORMS = ("JSONL", "CSV", "Parquet of paths", "Parquet with images", *WRITERS)


@pytest.mark.parametrize("form", FORMS)
def test_labels_of_text_are_names_of_classes_in_every_form(form: str, tmp_path: Path) -> None:
    rows = [{"text": f"caption {i}", "label": name} for i, name in enumerate(("dog", "cat", " dog ", "ape"))]
    encode(caption_recipe(), table_of(rows, form)(tmp_path / "source"), tmp_path / "store")
    assert LatentStore(tmp_path / "store").spec.classes == ["ape", "cat", "dog"]
    assert [label for label, _ in stored(tmp_path / "store")] == ["dog", "cat", "dog", "ape"]


@pytest.mark.parametrize("form", FORMS)
def test_labels_of_text_that_are_numbers_are_class_indices(form: str, tmp_path: Path) -> None:
    rows = [{"text": f"caption {i}", "label": label} for i, label in enumerate(("2", "0", ""))]
    encode(caption_recipe(), table_of(rows, form)(tmp_path / "source"), tmp_path / "store")
    assert LatentStore(tmp_path / "store").spec.classes == ["0", "1", "2"]
    assert [label for label, _ in stored(tmp_path / "store")] == ["2", "0", None]


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_value_in_words_does_not_turn_numbers_into_names(form: str, tmp_path: Path) -> None:
    """Sorted as names, 10 would come before 2."""
    labels = ("2", "nan", "10", "N/A", "0")
    rows = [{"text": f"caption {i}", "label": label} for i, label in enumerate(labels)]
    report = encode(caption_recipe(), table_of(rows, form)(tmp_path / "source"), tmp_path / "store")
    assert LatentStore(tmp_path / "store").records["label"].to_pylist() == [2, -1, 10, -1, 0]
    assert report.source
    assert [note for note in report.source.notes if note.startswith("labels: 2 values are neither")]


@pytest.mark.parametrize("form", FORMS)
def test_numbers_among_names_are_names_and_a_note_says_so(form: str, tmp_path: Path) -> None:
    rows = [{"text": f"caption {i}", "label": label} for i, label in enumerate(("2", "1O", "10"))]
    report = encode(caption_recipe(), table_of(rows, form)(tmp_path / "source"), tmp_path / "store")
    assert [label for label, _ in stored(tmp_path / "store")] == ["2", "1O", "10"]
    assert report.source
    assert [note for note in report.source.notes if note.startswith("labels: 2 numbers and 1 names, such as '1O'")]


@pytest.mark.parametrize("form", ["Parquet of paths", "Parquet with images"])
def test_captions_in_bytes_are_read_as_utf8_or_rejected(form: str, tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("caf\xe9".encode(), b"caf\xe9")]
    source = table_of(rows, form)(tmp_path / "source")
    encode(caption_recipe("source.max_reject_share=1"), source, tmp_path / "store")
    assert stored(tmp_path / "store") == [(None, ("caf\xe9",)), ("bad_metadata", ())]


def test_the_first_column_with_a_caption_counts_in_a_row_of_a_table(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"captions": empty, "caption": "a boat"} for empty in ([], "", [" "], None)]
    encode(caption_recipe(), table_of(rows, "JSONL")(tmp_path / "source"), tmp_path / "store")
    assert [captions for _, captions in stored(tmp_path / "store")] == [("a boat",)] * 4


@pytest.mark.parametrize("form", FORMS)
def test_no_labels_means_that_their_column_is_not_read(form: str, tmp_path: Path) -> None:
    rows = [{"text": f"caption {i}", "label": label} for i, label in enumerate(("dog", "9999999"))]
    source = table_of(rows, form)(tmp_path / "source")
    for recipe in (caption_recipe, label_recipe):
        store = tmp_path / recipe.__name__
        encode(recipe("source.labels=none"), source, store)
        assert LatentStore(store).spec.classes is None
        assert [label for label, _ in stored(store)] == [None, None]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "CSV"])
def test_a_guessed_label_that_is_none_rejects_only_where_labels_are_needed(form: str, tmp_path: Path) -> None:
    rows = [{"text": f"caption {i}", "label": ["cat", "dog"]} for i in range(3)]
    if form == "Parquet with images":
        rows = [{"text": row["text"], "label": 9_999_999} for row in rows]
    source = table_of(rows, form)(tmp_path / "source")
    report = encode(caption_recipe(), source, tmp_path / "store")
    assert [label for label, _ in stored(tmp_path / "store")] == [None] * 3
    assert report.source
    (note,) = [note for note in report.source.notes if "neither a class index nor a name" in note]
    assert note.startswith("labels: 3 values")
    for recipe in (label_recipe(), caption_recipe("source.label=label")):
        with pytest.raises(SourceError, match=r"3 of 3 records are rejected.* is not a class index"):
            encode(recipe, source, tmp_path / "needed")


@pytest.mark.parametrize("form", ["JSONL", *WRITERS])
def test_a_name_among_numbers_is_no_label(form: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": f"caption {i}", "label": label} for i, label in enumerate((1, "cat", "0"))]
    source = table_of(rows, form)(tmp_path / "source")
    encode(label_recipe("source.max_reject_share=1"), source, tmp_path / "needed")
    assert [label for label, _ in stored(tmp_path / "needed")] == ["1", "bad_metadata", "0"]
    report = encode(caption_recipe(), source, tmp_path / "store")
    assert [label for label, _ in stored(tmp_path / "store")] == ["1", None, "0"]
    assert report.source
    assert [note for note in report.source.notes if "'cat'" in note or "cat is" in note]


@pytest.mark.parametrize(
    ("contents", "classes"),
    {
        "names": ([b"dog", b"cat\n", b""], ["dog", "cat", None]),
        "numbers": ([b"2", b"+1\r\n", b"0.0"], ["2", "1", "0"]),
        "names of digits and underscores are no numbers": ([b"1_0", b"2_0", b"1_0"], ["1_0", "2_0", "1_0"]),
    }.values(),
)
def test_a_cls_file_has_a_number_or_a_name(contents: list[bytes], classes: list[str | None], tmp_path: Path) -> None:
    texts = [{"cls": label, "txt": b"a text"} for label in contents]
    encode(label_recipe(), in_tar(tmp_path / "source", texts), tmp_path / "store")
    assert [label for label, _ in stored(tmp_path / "store")] == classes


def test_a_file_of_class_names_has_one_in_each_line(tmp_path: Path) -> None:
    make_class_folder(tmp_path / "source", classes=2, per_class=1)
    write_file(tmp_path / "names.txt", "\ufeffa cat\u2028of the house\r\n\r\nn001\ta dog\x0cor two\n")
    encode(label_recipe(f"source.class_names={tmp_path / 'names.txt'}"), tmp_path / "source", tmp_path / "store")
    names = LatentStore(tmp_path / "store").class_names
    assert [names.describe(label) for label in (0, 1)] == ["a cat\u2028of the house (n000)", "a dog\x0cor two (n001)"]


ROW = '{"file_name": "0.jpg", "text": "a boat"}'
NO_ROWS: dict[str, tuple[str, bytes, str]] = {
    "only a header": ("metadata.csv", b"file_name,text\n", r"'metadata\.csv' has no rows"),
    "nothing": ("metadata.jsonl", b"", "it is empty"),
    "a list": ("metadata.jsonl", f"[{ROW}]".encode(), r"this is a list\. Rename it to \.json"),
    "UTF-16": ("metadata.jsonl", ROW.encode("utf-16"), "iconv -f UTF-16"),
    "UTF-16 without a mark": ("metadata.jsonl", ROW.encode("utf-16-le"), "iconv -f UTF-16"),
}


@pytest.mark.parametrize(("name", "content", "words"), NO_ROWS.values(), ids=NO_ROWS)
def test_a_table_without_rows_is_an_error_that_says_why(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    source = beside(tmp_path / "source", [{}])
    write_file(source / name, content)
    with pytest.raises(SourceError, match=words):
        encode(caption_recipe(), source, tmp_path / "store")


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_captions_under_other_names_are_offered(write: Callable[..., Path], tmp_path: Path) -> None:
    images = [{"json": json.dumps({"re_caption": f"a boat {i}", "url": "x"}).encode()} for i in range(2)]
    source = write(tmp_path / "source", [*images, {"txt": b"a sea"}])
    report = encode(caption_recipe("source.max_reject_share=1"), source, tmp_path / "store")
    assert report.source
    (note,) = [note for note in report.source.notes if note.startswith("captions: 2 images without one")]
    assert "'re_caption', 'url'" in note
    only = write(tmp_path / "only", images)
    with pytest.raises(SourceError, match=r"all 2 records are rejected.*--set source\.caption="):
        encode(caption_recipe("source.max_reject_share=1"), only, tmp_path / "none")


def test_tables_without_images_beside_folders_of_images_and_texts_are_left_out(tmp_path: Path) -> None:
    """As img2dataset writes folders of files."""
    source = tmp_path / "source"
    source.mkdir()
    beside(source / "00000", [{"txt": b"a boat", "json": b'{"caption": "a boat", "url": "x"}'}])
    pq.write_table(pa.table({"url": ["x"], "caption": ["a boat"]}), source / "00000.parquet")
    write_file(source / "00000_stats.json", "{}")
    encode(caption_recipe(), source, tmp_path / "store")
    assert stored(tmp_path / "store") == [(None, ("a boat",))]
