"""Sources: image folders, metadata.jsonl and WebDataset tars are listed completely, and broken ones are named."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
    write_metadata,
    write_tar,
)

from leandit.datasets.store import LatentStore
from leandit.errors import ResourceError, SourceError
from leandit.precompute.sources.files.record import SourceRecord
from leandit.precompute.sources.listing import duck
from leandit.precompute.sources.listing import listing as source_listing
from leandit.precompute.sources.listing.listing import record_batches, spool
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


def test_folders_are_classes_with_all_below_them_and_one_without_images_keeps_its_label(tmp_path: Path) -> None:
    files = ["a/0.png", "a/x/0.png", "a/x/y/0.png", "c/0.png", "c/1.JPEG"]
    for i, name in enumerate(files):
        write_file(tmp_path / name, png(i))
    (tmp_path / "b").mkdir()
    write_file(tmp_path / "d/notes.txt", b"none yet")
    (tmp_path / ".git").mkdir()
    source = list_source(tmp_path)
    assert source.classes == ["a", "b", "c", "d"]
    assert {r.key: r.label for r in source.records} == {name: 2 * (name[0] == "c") for name in files}
    for i, name in enumerate(files):
        assert bytes_of(source, by_key(source)[name]) == png(i)


NO_IMAGES = r"no images found.*metadata\.jsonl.*\.jpeg"
PARQUET, LIST = r"odd\.parquet.*not a readable Parquet", r"data_info\.json"
NO_LISTS, NO_CAPTIONS = "without the lists 'images' and 'annotations'", "annotations with 'caption'"
A_ROW = '[{"path": "a.png"}'
REFUSED: list[tuple[str, str, bytes | str, str]] = [  # kind, name and content of the file that is given, and the error
    ("auto", "nowhere/", "", r"nowhere.*no such file or folder.*--source"),
    ("auto", "./notes.txt", "", NO_IMAGES),
    ("imagefolder", "a.png", png(), r"a\.png.*a file; expected a folder"),
    # No source, and what to do.
    ("auto", "x.xyz", "hello", rf"of no known kind.*{ANY}"),
    ("auto", "photos.zip", b"PK\x03\x04....", rf"an archive, or compressed.*unzip.*{ANY}"),
    ("auto", "a.jpg", b"\xff\xd8\xff\xe0", rf"an image. Pass its folder.*{ANY}"),
    ("auto", "photos.tar.gz", GZIP, rf"compressed.*gunzip --keep.*tar -xf.*{ANY}"),
    ("auto", "photos.tar", GZIP, rf"compressed.*gunzip.*{ANY}"),
    ("auto", "model.pkl", b"\x80\x04", rf"a pickle is never opened.*{ANY}"),
    ("auto", "data.bin", b"", rf"an empty file.*{ANY}"),
    ("auto", "data.tar", b"version https://git-lfs.github.com", rf"Git LFS pointer.*git lfs pull.*{ANY}"),
    # Parquet, and lists of JSON that are damaged.
    ("auto", "./odd.parquet", b"PAR1" * 100, PARQUET),
    ("auto", "./data_info.json", f"{A_ROW}, 7]", LIST),
    ("auto", "./data_info.json", "[" * 100_000, LIST),
    ("auto", "./data_info.json", f'{A_ROW}, {{"path": "' + "x" * (formats.MAX_ROW_BYTES + (2 << 20)), LIST),
    # JSON of another form.
    ("auto", "list.json", '{"images": [], "categories": []}', NO_LISTS),
    (
        *("auto", "list.json", '{"images": [{"id": 7, "file_name": "a.jpg"}], "annotations": [{"image_id": 7}]}'),
        NO_CAPTIONS,
    ),
    ("auto", "list.json", '{"rows": []}', "a list of rows"),
    # Tables of text.
    (
        *("auto", "list.csv", "text,score\nhello,1\n"),
        r"no column seems to name the images.*'text', 'score'.*source\.image",
    ),
    ("auto", "list.csv", "", "empty"),
    ("auto", "list.csv", "image,caption\n".encode("utf-16"), "UTF-8"),
    ("auto", "list.csv", "a.jpg,7,a cat\n", r"first line names no columns but the image 'a\.jpg'.*header"),
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


METADATA: list[tuple[dict[str, Any], tuple[str, ...], int]] = [
    ({"captions": ["one", "two"]}, ("one", "two"), -1),
    ({"text": "one", "label": 3}, ("one",), 3),
    ({"captions": None, "text": "one"}, ("one",), -1),
    ({"captions": ["list"], "caption": "single"}, ("list",), -1),
    ({}, (), -1),
]
BAD_METADATA: list[dict[str, Any]] = [
    *({"file_name": name} for name in ("../outside.png", "x/../../outside.png", "/etc/hostname")),
    *({"file_name": "b.png", "label": label} for label in ("cat", True, -2, 1.5)),
    *({"file_name": "b.png", "captions": value} for value in (["fine", None], 7, "half an emoji \ud83d")),
]


def test_metadata_gives_captions_and_labels_and_a_bad_row_is_rejected(tmp_path: Path) -> None:
    write_file(tmp_path / "outside.png", png())
    rows = [{"file_name": f"..{i}.png"} | row for i, (row, *_) in enumerate(METADATA)]  # inside, for all its dots
    for name in ["b.png", *(row["file_name"] for row in rows)]:
        write_file(tmp_path / "source" / name, png())
    for bad in BAD_METADATA:
        write_metadata(tmp_path / "source", [*rows, bad])
        source = list_source(tmp_path / "source")
        assert source.kind == "metadata"
        *good, last = source.records
        assert [(r.captions, r.label, r.problem) for r in good] == [(*wanted, None) for _, *wanted in METADATA], bad
        assert last.problem, bad
        assert last.problem[0] == "bad_metadata", bad
    gone = [{"file_name": "gone.png"}, {"file_name": "x" * 300 + ".png"}, rows[0] | {"captions": ["again"], "label": 1}]
    write_metadata(tmp_path / "source", [*rows, *gone])
    problems = [r.problem and r.problem[0] for r in list_source(tmp_path / "source").records]
    assert problems == [None] * len(rows) + ["missing_file", "missing_file", "duplicate_key"]


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


BAD_MEMBERS = [
    ("cls", b"cat", "cat"),  # among numbers
    ("cls", b"-3", "-3"),
    ("json", b"{", ""),
    ("json", b"[]", "not an object"),
    ("json", b'{"label": "x"}', "other records have numbers"),
    ("json", b'{"label": true}', "class index"),
    ("txt", b"\xff\xfe", "UTF-8"),
]


def test_bad_texts_in_a_tar_reject_only_their_record(tmp_path: Path) -> None:
    samples = [{"__key__": str(i), "png": png(), name: content} for i, (name, content, _) in enumerate(BAD_MEMBERS)]
    *bad, good = list_source(
        write_tar(tmp_path / "t.tar", *samples, {"__key__": "good", "png": png(), "cls": 1})
    ).records
    assert good.problem is None
    for record, (*_, word) in zip(bad, BAD_MEMBERS, strict=True):
        assert record.problem[0] == "bad_metadata"
        assert word in record.problem[1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content, third: content[:700], "readable, uncompressed tar"),
        (lambda content, third: content[:1030], "readable, uncompressed tar"),
        (lambda content, third: content[:third], "without the zeros"),
        (lambda content, third: content * 2, "data follows its end"),
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
    hashes, changed = [list_source(root).listing_hash()], root / "n001/0.png"
    times = changed.stat()
    for change in (
        lambda: write_file(root / "n000/new.png", png()),
        lambda: os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns + 1)),
        lambda: (changed.write_bytes(b"longer" * 9999), os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))),
        lambda: changed.unlink(),
    ):
        assert list_source(root).listing_hash() == hashes[-1]
        change()
        hashes.append(list_source(root).listing_hash())
    assert len({*hashes}) == 5


def test_nothing_is_left_of_a_listing_that_is_killed(tmp_path: Path) -> None:
    code = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
from leandit.precompute.sources.listing.listing import record_batches, spool
from leandit.precompute.sources.files.record import SourceRecord
records = (os._exit(9) if i == 40_000 else SourceRecord(str(i), "x") for i in range(50_000))
spool(record_batches(records), lambda done: None)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_for_temporary_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(source_listing.pa.ipc, "new_file", full)
    with pytest.raises(ResourceError, match=r"No space left.*TMPDIR"):
        spool(record_batches([SourceRecord("a", "a")]), lambda done: None)


def test_a_folder_that_cannot_be_read_is_an_error_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").touch()
    original = os.scandir

    def refuse(path: Path) -> object:  # the tests may run as root, to whom all is allowed
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match=r"folder 'b' cannot be read \(Permission denied\)"):
        list_source(tmp_path)


def test_sql_that_takes_too_long_is_an_error_of_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duck, "MAX_SECONDS", 0.1)
    with pytest.raises(ResourceError, match=r"the table: reading it took longer"), duck.database("the table") as sql:
        sql.execute("SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range * b.range = 7")


def test_sql_opens_no_other_file_installs_nothing_and_keeps_its_limits(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a\n1\n")
    for statement in (
        f"SELECT * FROM read_csv('{path}')",
        f"COPY (SELECT 1) TO '{path}'",
        "INSTALL httpfs",
        "SELECT * FROM read_csv('http://127.0.0.1:1/a.csv')",
        "SET enable_external_access = true",
    ):
        with pytest.raises(SourceError, match="table"), duck.database("table", str(tmp_path / "table.csv")) as sql:
            sql.execute(statement)
    assert path.read_text() == "a\n1\n"
    with duck.database("table") as sql:
        settings = ", ".join(f"current_setting('auto{what}_known_extensions')" for what in ("install", "load"))
        assert sql.sql(f"SELECT {settings}").fetchall() == [(False, False)]
