"""Sources: image folders, metadata.jsonl and WebDataset tars are listed completely, and broken ones are named."""

from __future__ import annotations

import gzip
import json
import os
import random
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import webdataset
from making import (
    bytes_of,
    encode,
    image_bytes,
    label_recipe,
    make_class_folder,
    make_image_folder,
    write_file,
    write_tar,
)

from leandit.datasets.errors import SourceError
from leandit.datasets.store import LatentStore
from leandit.precompute.sources.files.files import look_up
from leandit.precompute.sources.files.record import SourceRecord
from leandit.precompute.sources.source import Source, list_source
from leandit.precompute.sources.tables import formats

ANY = "Sources are a folder of images"
GZIP = gzip.compress(b"\0" * 2048, mtime=0)


def png(seed: int = 0) -> bytes:
    return image_bytes(seed, 8, 8)


def by_key(source: Source) -> dict[str, SourceRecord]:
    found = {record.key: record for record in source.records}
    assert len(found) == len(source.records) or any(r.problem for r in source.records)
    return found


def write_metadata(root: Path, *rows: Any) -> Path:
    for name in ("a.png", "b.png"):
        write_file(root / name, png())
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def test_a_class_folder_without_images_keeps_its_label(tmp_path: Path) -> None:
    for name in ("a", "c"):
        write_file(tmp_path / name / "0.png", png())
    (tmp_path / "b").mkdir()
    write_file(tmp_path / "d" / "notes.txt", b"none yet")
    (tmp_path / ".git").mkdir()
    source = list_source(tmp_path)
    assert source.classes == ["a", "b", "c", "d"]
    assert {r.key: r.label for r in source.records} == {"a/0.png": 0, "c/0.png": 2}


def test_nested_folders_belong_to_their_first_folder_and_names_may_repeat(tmp_path: Path) -> None:
    files = ["a/0.png", "a/x/0.png", "a/x/y/0.png", "b/0.png", "b/1.JPEG"]
    for i, name in enumerate(files):
        write_file(tmp_path / name, png(i))
    source = list_source(tmp_path)
    assert {r.key: r.label for r in source.records} == {name: int(name[0] == "b") for name in files}
    for i, name in enumerate(files):
        record = by_key(source)[name]
        assert bytes_of(source, record) == png(i)


NO_IMAGES = r"no images found.*metadata\.jsonl.*\.jpeg"
PARQUET, LIST = r"odd\.parquet.*not a readable Parquet", r"data_info\.json"
NO_LISTS, NO_CAPTIONS = "without the lists 'images' and 'annotations'", "annotations with 'caption'"
A_ROW = '[{"path": "a.png"}'
REFUSED: list[tuple[str, str, bytes | str, str]] = [  # kind, name and content of the file that is given, and the error
    ("auto", "nowhere/", "", r"nowhere.*no such file or folder.*--source"),
    *((kind, "./notes.txt", "", NO_IMAGES) for kind in ("auto", "imagefolder", "webdataset")),
    ("imagefolder", "a.png", png(), r"a\.png.*a file; expected a folder"),
    # No source, and what to do.
    ("auto", "x.xyz", "hello", rf"of no known kind.*{ANY}"),
    ("auto", "photos.zip", b"PK\x03\x04....", rf"an archive, or compressed.*unzip.*{ANY}"),
    ("auto", "a.jpg", b"\xff\xd8\xff\xe0", rf"an image. Give the folder.*{ANY}"),
    ("auto", "photos.tar.gz", GZIP, rf"compressed.*gunzip --keep.*tar -xf.*{ANY}"),
    ("auto", "photos.tar", GZIP, rf"compressed.*gunzip.*{ANY}"),
    ("auto", "model.pkl", b"\x80\x04", rf"a pickle is never opened.*{ANY}"),
    ("auto", "data.bin", b"", rf"an empty file.*{ANY}"),
    ("auto", "data.h5", b"\x89HDF\r\n\x1a\n", rf"of no known kind.*to Parquet.*{ANY}"),
    ("auto", "data.tar", b"version https://git-lfs.github.com", rf"pointer of Git LFS.*git lfs pull.*{ANY}"),
    # Parquet, and lists of JSON that are damaged.
    *(
        ("auto", "./odd.parquet", content, PARQUET)
        for content in (b"", b"PAR1" * 100, random.Random(0).randbytes(4096))
    ),
    *(("auto", "./data_info.json", f"{A_ROW}{rest}", LIST) for rest in ("", ' {"path": "b.png"}]', ",", ", 7]")),
    ("auto", "./data_info.json", f'{A_ROW}, {{"path": ', LIST),
    ("auto", "./data_info.json", "[" * 100_000, LIST),
    ("auto", "./data_info.json", f'{A_ROW}, {{"path": "' + "x" * (formats.MAX_ROW_BYTES + (2 << 20)), LIST),
    # JSON of another form.
    ("auto", "list.json", '{"images": [], "categories": []}', NO_LISTS),
    (
        *("auto", "list.json", '{"images": [{"id": 7, "file_name": "a.jpg"}], "annotations": [{"image_id": 7}]}'),
        NO_CAPTIONS,
    ),
    ("auto", "list.json", '{"images": [{"id": "x", "file_name": "a.jpg"}], "annotations": []}', r"list\.json"),
    ("auto", "list.json", '{"images": [7], "annotations": []}', r"list\.json"),
    ("auto", "list.json", '{"rows": []}', "a list of rows"),
    # Tables of text.
    (
        *("auto", "list.csv", "text,score\nhello,1\n"),
        r"no column is known to name the images.*'text', 'score'.*source\.image",
    ),
    ("auto", "list.csv", "", "empty"),
    ("auto", "list.csv", "image,caption\n".encode("utf-16"), "UTF-8"),
    ("auto", "list.csv", "a.jpg,7,a cat\n", r"first line names no columns but the image 'a\.jpg'.*header"),
    ("auto", "list.csv", "image,caption\r\na.jpg,x\nb.jpg,y\r\n", "line ends"),
    ("auto", "list.csv", "image,caption,caption\na.jpg,x,y\n", "two columns are called 'caption'"),
    ("auto", "list.csv", ",".join(map(str, range(5000))) + "\n", "5000 columns"),
]


@pytest.mark.parametrize(("kind", "name", "content", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_no_source_is_one_line_that_names_it(
    kind: str, name: str, content: bytes | str, message: str, tmp_path: Path
) -> None:
    """The folder is given where a name begins with "./", and nothing is there where it ends in "/"."""
    if not name.endswith("/"):
        write_file(tmp_path / name, content)
    if name == "list.csv":
        make_image_folder(tmp_path)
    with pytest.raises(SourceError, match=message) as caught:
        list_source(tmp_path if name.startswith("./") else tmp_path / name, kind)
    assert "\n" not in str(caught.value)
    assert "/proc/" not in str(caught.value)
    assert len(str(caught.value).replace(str(tmp_path), "")) < 1000


@pytest.mark.parametrize(
    ("row", "captions", "label"),
    [
        ({"captions": ["one", "two"]}, ("one", "two"), -1),
        ({"caption": "one"}, ("one",), -1),
        ({"text": "one", "label": 3}, ("one",), 3),
        ({"captions": None, "text": "one"}, ("one",), -1),
        ({"captions": ["list"], "caption": "single"}, ("list",), -1),
        ({"label": 0}, (), 0),
        ({}, (), -1),
    ],
)
def test_metadata_gives_captions_and_labels(
    tmp_path: Path, row: dict[str, Any], captions: tuple[str, ...], label: int
) -> None:
    source = list_source(write_metadata(tmp_path, {"file_name": "a.png", **row}))
    assert source.kind == "metadata"
    (record,) = source.records
    assert (record.key, record.captions, record.label, record.problem) == ("a.png", captions, label, None)
    assert bytes_of(source, record) == png()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"file_name": "gone.png"}, "missing_file"),
        ({"file_name": "x" * 300 + ".png"}, "missing_file"),
        ({"file_name": "../outside.png"}, "bad_metadata"),
        ({"file_name": "x/../../outside.png"}, "bad_metadata"),
        ({"file_name": "/etc/hostname"}, "bad_metadata"),
        ({"file_name": "b.png", "label": "cat"}, "bad_metadata"),
        ({"file_name": "b.png", "label": True}, "bad_metadata"),
        ({"file_name": "b.png", "label": -2}, "bad_metadata"),
        ({"file_name": "b.png", "label": 1.5}, "bad_metadata"),
        ({"file_name": "b.png", "caption": 7}, "bad_metadata"),
        ({"file_name": "b.png", "captions": ["fine", None]}, "bad_metadata"),
        ({"file_name": "b.png", "caption": "half an emoji \ud83d"}, "bad_metadata"),
        ({"file_name": "a.png"}, "duplicate_key"),
    ],
)
def test_a_bad_metadata_row_is_rejected_and_the_others_stay(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    write_file(tmp_path / "outside.png", png())
    source = list_source(write_metadata(tmp_path / "source", {"file_name": "a.png"}, row))
    assert [r.problem and r.problem[0] for r in source.records] == [None, reason]


def test_a_file_name_that_begins_with_two_dots_stays_inside(tmp_path: Path) -> None:
    write_file(tmp_path / "..a.png", png())
    source = list_source(write_metadata(tmp_path, {"file_name": "..a.png"}))
    assert source.records[0].problem is None


def test_a_name_that_is_no_utf8_is_planned_or_rejected_but_never_a_crash(tmp_path: Path) -> None:
    write_file(tmp_path / "a/0.png", png())
    with open(os.path.join(os.fsencode(tmp_path), b"a", b"caf\xe9.png"), "wb") as file:
        file.write(png())
    encode(label_recipe("source.max_reject_share=1"), tmp_path, tmp_path.with_name("store"))
    assert LatentStore(tmp_path.with_name("store")).records.num_rows == 2


def test_a_tar_gives_the_keys_bytes_labels_and_captions_that_webdataset_gives(tmp_path: Path) -> None:
    samples = [
        {"__key__": "0001", "png": png(1), "cls": 2, "txt": "a red square"},
        {"__key__": "deep/er/0001", "png": png(2), "cls": 0, "txt": "ein roter Würfel"},
        {"__key__": "0003", "jpg": png(3), "json": {"label": 1, "captions": ["x", "y"]}},
        {"__key__": "0004", "seg.png": png(4), "txt": "dots in the extension"},
        {"__key__": "0005", "jpg": png(5), "json": {"caption": "z"}, "npy": b"ignored"},
    ]
    for name in ("one", "two"):
        write_tar(tmp_path / f"{name}.tar", *samples)
    source = list_source(tmp_path)
    assert (source.kind, source.classes, source.ignored.num_files) == ("webdataset", ["0", "1", "2"], 2)
    records = by_key(source)
    assert len(records) == 10
    for name in ("one", "two"):
        for sample in webdataset.WebDataset(str(tmp_path / f"{name}.tar"), shardshuffle=False, empty_check=False):
            record = records[f"{name}/{sample['__key__']}"]
            image = next(sample[e] for e in ("png", "jpg", "seg.png") if e in sample)
            assert bytes_of(source, record) == image
            said = json.loads(sample.get("json", b"{}"))
            assert record.label == (int(sample["cls"]) if "cls" in sample else said.get("label", -1))
            text = [sample["txt"].decode()] if "txt" in sample else said.get("captions", [said.get("caption")])
            assert list(record.captions) == text
            assert record.problem is None


@pytest.mark.parametrize(
    ("members", "word"),
    [
        ({"cls": b"cat"}, "cat"),
        ({"cls": b""}, "invalid"),
        ({"cls": b"-3"}, "-3"),
        ({"json": b"{"}, ""),
        ({"json": b"[]"}, "not an object"),
        ({"json": b'{"label": "x"}'}, "class index"),
        ({"txt": b"\xff\xfe"}, "utf-8"),
        ({"jpg": png()}, "several images"),
    ],
)
def test_bad_texts_in_a_tar_reject_only_their_record(tmp_path: Path, members: dict[str, bytes], word: str) -> None:
    tar = write_tar(tmp_path / "t.tar", {"__key__": "a", "png": png(), **members}, {"__key__": "b", "png": png()})
    records = by_key(list_source(tar))
    problem = records["t/a"].problem
    assert problem
    assert problem[0] == "bad_metadata"
    assert word in problem[1]
    assert records["t/b"].problem is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content, third: content[:700], "readable, uncompressed tar"),
        (lambda content, third: content[:1030], "readable, uncompressed tar"),
        (lambda content, third: content[:third], "without the zeros"),
        (lambda content, third: content * 2, "more follows its end"),
    ],
    ids=["torn in a member", "torn in a header", "cut between members", "two in one"],
)
def test_a_damaged_tar_is_an_error_that_names_it(
    damage: Callable[[bytes, int], bytes], message: str, tmp_path: Path
) -> None:
    write_tar(tmp_path / "fine.tar", {"__key__": "a", "png": png()})
    tar = write_tar(tmp_path / "odd.tar", *({"__key__": str(i), "png": os.urandom(1000)} for i in range(3)))
    with tarfile.open(tar) as opened:
        third = opened.getmembers()[2].offset
    tar.write_bytes(damage(tar.read_bytes(), third))
    with pytest.raises(SourceError, match=rf"odd\.tar.*{message}"):
        list_source(tmp_path)


def test_the_listing_hash_changes_when_a_file_is_added_changed_or_gone(tmp_path: Path) -> None:
    root = make_class_folder(tmp_path / "train", classes=2, per_class=2)
    before = list_source(root).listing_hash()
    assert list_source(root).listing_hash() == before

    extra = write_file(root / "n000/new.png", png())
    added = list_source(root).listing_hash()
    extra.unlink()
    assert list_source(root).listing_hash() == before

    changed = root / "n001/0.png"
    content, times = changed.read_bytes(), changed.stat()
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    touched = list_source(root).listing_hash()
    changed.write_bytes(content + b"\0")
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    longer = list_source(root).listing_hash()

    changed.unlink()
    gone = list_source(root).listing_hash()
    assert len({before, added, touched, longer, gone}) == 5


def test_a_few_files_are_looked_up_at_the_same_time() -> None:
    together = threading.Barrier(8)  # a look waits for seven others
    assert len(look_up(lambda path: together.wait(timeout=240), [str(number) for number in range(64)])) == 64
