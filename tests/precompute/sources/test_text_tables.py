"""Tables of text: the lists of captions that people have, read as they are, in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from making import IMAGE_NAMES, bytes_of, make_image_folder, summary_of, write_file

from leandit.errors import SourceError
from leandit.precompute.config import SourceSection
from leandit.precompute.sources.files.record import MAX_CAPTIONS
from leandit.precompute.sources.source import list_source

FLICKR = {
    "captions.txt": 'image,caption\na.jpg,"Two dogs , one ""big"" ."\na.jpg,A dog .\nb.jpg,A boat .\n',
    "captions.csv": '\ufeffimage,caption\r\na.jpg,"Two dogs , one ""big"" ."\r\na.jpg,A dog .\r\nb.jpg,A boat .\r\n',
    "results.csv": 'image_name| comment_number| comment\na.jpg| 0| Two dogs , one "big" .\na.jpg| 1| A dog .\n'
    "b.jpg| 0| A boat .\n",
    "list.tsv": 'filename\ttext\na.jpg\tTwo dogs , one "big" .\na.jpg\tA dog .\nb.jpg\tA boat .\n',
    "quoted.tsv": 'filename\ttext\na.jpg\t"Two dogs , one ""big"" ."\na.jpg\t"A dog ."\nb.jpg\tA boat .\n',
}


@pytest.mark.parametrize("name", FLICKR)
def test_lists_of_captions_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    make_image_folder(tmp_path / "Images")
    write_file(tmp_path / name, FLICKR[name])
    source = list_source(tmp_path if name == "captions.txt" else tmp_path / name)
    assert summary_of(source) == [
        ("a.jpg", "Images/a.jpg", -1, ('Two dogs , one "big" .', "A dog .")),
        ("b.jpg", "Images/b.jpg", -1, ("A boat .",)),
    ]
    assert source.kind == "manifest"
    assert any("Images" in note for note in source.notes)
    assert any("captions" in note for note in source.notes)
    record = source.records[1]
    assert source.read(record.path, 0, record.num_bytes, stage="scan") == (tmp_path / "Images/b.jpg").read_bytes()


@pytest.mark.parametrize("name", ["list.csv", "list.parquet", "list.json"])
def test_columns_are_named_by_the_recipe_and_an_error_lists_those_that_are_there(name: str, tmp_path: Path) -> None:
    make_image_folder(tmp_path)
    row = {"photo": "a.jpg", "title": "a cat", "caption": "no", "kind": 3}
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / name)
    else:
        text = json.dumps([row]) if name.endswith("json") else "photo,title,caption,kind\na.jpg,a cat,no,3\n"
        write_file(tmp_path / name, text)
    asked = SourceSection(image="photo", caption="title", label="kind")
    assert summary_of(list_source(tmp_path / name, asked)) == [("a.jpg", "a.jpg", 3, ("a cat",))]
    with pytest.raises(SourceError, match=r"no column 'heading'.*'photo', 'title', 'caption', 'kind'"):
        list_source(tmp_path / name, SourceSection(image="photo", caption="heading"))
    with pytest.raises(SourceError, match=r"'photo'"):
        list_source(tmp_path / name)


@pytest.mark.parametrize(
    ("row", "root"),
    [
        ("{here}/photos/x/a.jpg", ""),
        ("x/a.jpg", "photos"),
        ("x/a.jpg", "{here}/photos"),
        ("x/a.jpg", "../source/photos"),
    ],
)
def test_images_lie_where_the_root_says_or_where_the_first_names_are_found(row: str, root: str, tmp_path: Path) -> None:
    here = tmp_path / "source"
    make_image_folder(here / "photos/x")
    rows = [row, row.replace("a.jpg", "b.jpg"), "../../source/photos/x/c.jpg"]
    write_file(here / "list.csv", "image,caption\n" + "".join(f"{one.format(here=here)},text\n" for one in rows))
    source = list_source(here / "list.csv", SourceSection(root=root.format(here=here)))
    *good, outside = source.records
    assert [bytes_of(source, r) for r in good] == [(here / f"photos/x/{name}.jpg").read_bytes() for name in "ab"]
    assert not any(r.key.startswith("/") for r in source.records)
    assert outside.problem[0] == "bad_metadata"  # no path leaves the folder


def test_broken_rows_are_rejects_with_their_names(tmp_path: Path) -> None:
    make_image_folder(tmp_path)
    rows = [b"image,caption", b"a.jpg,fine", b"b.jpg", b"c.jpg,\xff\xfe", b"gone.jpg,one", b"gone.jpg,two"]
    write_file(tmp_path / "list.csv", b"\n".join(rows))
    assert [(r.key, r.problem and r.problem[0]) for r in list_source(tmp_path / "list.csv").records] == [
        ("a.jpg", None),
        ("gone.jpg", "missing_file"),  # once
        ("b.jpg (row 3)", "bad_metadata"),
        ("c.jpg (row 4)", "bad_metadata"),
    ]
    write_file(tmp_path / "list.csv", 'image,caption\na.jpg,fine\nb.jpg,"not closed\nc.jpg,lost\n')
    first, second, last = list_source(tmp_path).records  # an open quote does not swallow the rows after it
    assert (first.key, second.key, last.key) == ("a.jpg", "c.jpg", "b.jpg (row 3)")
    assert "quote" in str(last.problem)
    write_file(tmp_path / "list.csv", "image,caption\ngone.jpg,one\n")
    note = list_source(tmp_path / "list.csv").notes[1]
    assert "none of the first 1 that the table names exists, such as 'gone.jpg'" in note
    cells = ['["one, two", "it\'s"]', "['one', 'it\\'s']", "[a note] on ['it']"]  # lists of texts are JSON
    lines = [f'{name},"{cell.replace(chr(34), chr(34) * 2)}"' for name, cell in zip(IMAGE_NAMES, cells, strict=True)]
    write_file(tmp_path / "list.csv", "image,raw\n" + "\n".join(lines))
    assert summary_of(list_source(tmp_path)) == [
        ("a.jpg", "a.jpg", -1, ("one, two", "it's")),
        ("b.jpg", "bad_metadata", -1, ()),
        ("c.jpg", "c.jpg", -1, ("[a note] on ['it']",)),
    ]


def test_labels_of_text_are_numbers_or_names_of_classes(tmp_path: Path) -> None:
    make_image_folder(tmp_path)
    write_file(tmp_path / "list.csv", "id,class\na.jpg,zebra\nb.jpg,ant\nc.jpg,\n")
    source = list_source(tmp_path)
    assert (source.classes, source.has_class_names) == (["ant", "zebra"], True)
    assert [(key, label) for key, _, label, _ in summary_of(source)] == [("a.jpg", 1), ("b.jpg", 0), ("c.jpg", -1)]
    write_file(tmp_path / "list.csv", "id,class\na.jpg,2\nb.jpg,0.0\nc.jpg,\n")
    source = list_source(tmp_path)
    assert (source.classes, source.has_class_names) == (["0", "1", "2"], False)
    assert [label for _, _, label, _ in summary_of(source)] == [2, 0, -1]


def test_several_tables_of_one_folder_are_an_error_that_names_them(tmp_path: Path) -> None:
    make_image_folder(tmp_path)
    write_file(tmp_path / "other.csv", "image,score\nx.jpg,1\n")  # of something else
    for name in ("train.csv", "val.csv"):
        write_file(tmp_path / name, "image,caption\na.jpg,a cat\n")
    with pytest.raises(SourceError, match=r"several tables name its images: train\.csv, val\.csv"):
        list_source(tmp_path)


def test_a_table_whose_images_do_not_exist_is_left_out_with_a_note(tmp_path: Path) -> None:
    make_image_folder(tmp_path, "cat/a.jpg")
    write_file(tmp_path / "captions.csv", "image,caption\nold/a.jpg,a cat\n")
    source = list_source(tmp_path)
    assert source.kind == "imagefolder"
    assert any("'captions.csv' is not used" in note and "'old/a.jpg'" in note for note in source.notes)


def test_a_record_of_too_many_rows_is_one_reject_and_takes_no_memory(tmp_path: Path) -> None:
    make_image_folder(tmp_path, "many.jpg", *(f"{i}.jpg" for i in range(200)))
    names = ["many.jpg"] * 40_000 + [f"{i}.jpg" for i in range(200)] * 2
    order = np.random.default_rng(0).permutation(len(names))
    write_file(tmp_path / "list.csv", "image,caption\n" + "".join(f"{names[i]},caption {i}\n" for i in order))
    rejected = [r for r in list_source(tmp_path / "list.csv").records if r.problem]
    assert [(r.key, r.problem) for r in rejected] == [
        ("many.jpg", ("bad_metadata", f"more than {MAX_CAPTIONS} captions"))
    ]


@pytest.mark.parametrize("name", ["metadata.jsonl", "list.parquet"])
def test_lists_of_captions_stay_lists_and_rows_of_one_image_become_one_record(name: str, tmp_path: Path) -> None:
    make_image_folder(tmp_path)
    rows: list[dict[str, Any]] = [
        {"file_name": "b.jpg", "captions": ["one", " two "], "label": 1, "height": 8, "width": 8},
        {"file_name": "a.jpg", "captions": []},
        {"file_name": "b.jpg", "captions": ["two", "three"], "label": 1},
        {"file_name": "b.jpg", "captions": ["four"], "label": 2},  # another label: it repeats the key
        {"file_name": "../c.jpg", "captions": ["outside"]},
        {"file_name": "./c.jpg", "captions": None, "label": 5_000_000},
    ]
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        write_file(tmp_path / name, "\n".join(map(json.dumps, rows)))
    source = list_source(tmp_path / name if name.startswith("list") else tmp_path)
    assert summary_of(source) == [
        ("b.jpg", "b.jpg", 1, ("one", "two", "three")),
        ("a.jpg", "a.jpg", -1, ()),
        ("b.jpg", "duplicate_key", -1, ()),
        ("../c.jpg", "bad_metadata", -1, ()),
        ("./c.jpg", "bad_metadata", -1, ()),
    ]
    assert (source.records[0].height_px, source.records[0].width_px) == (8, 8)


def test_a_table_of_captions_without_a_header_is_not_left_out_in_silence(tmp_path: Path) -> None:
    make_image_folder(tmp_path / "Images")
    write_file(tmp_path / "Flickr8k.token.txt", "a.jpg#0\tA cat .\na.jpg#1\tA small cat .\nb.jpg#0\tA boat .\n")
    with pytest.raises(SourceError, match=r"Flickr8k\.token\.txt.*names no columns.*Add a header"):
        list_source(tmp_path)
