"""Folders as people have them: COCO's, kohya's, a detector's; and files that are no source, named for what they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from making import bytes_of, make_image_folder, summary_of, write_file, write_tar

from leandit.errors import RecordRejected, SourceError
from leandit.precompute.config import SourceSection
from leandit.precompute.sources.source import list_source, open_source


def test_coco_joins_captions_to_images_in_the_order_of_the_images(tmp_path: Path) -> None:
    make_image_folder(tmp_path / "train2017")
    images = [{"id": 7, "file_name": "b.jpg", "height": 8, "width": 9}, {"id": 3, "file_name": "a.jpg"}]
    images += [{"id": 5, "file_name": "gone.jpg"}]
    texts = [(3, "one"), (7, "two"), (3, " three "), (9, "nobody's"), (7, "two")]
    captions = [{"image_id": image, "id": i, "caption": text} for i, (image, text) in enumerate(texts)]
    content = {"info": {"year": 2017}, "images": images, "licenses": [], "annotations": captions}
    write_file(tmp_path / "annotations/captions_train2017.json", json.dumps(content))
    source = list_source(tmp_path)
    assert summary_of(source) == [
        ("b.jpg", "train2017/b.jpg", -1, ("two",)),
        ("a.jpg", "train2017/a.jpg", -1, ("one", "three")),
        ("gone.jpg", "missing_file", -1, ()),
    ]
    assert (source.records[0].height_px, source.records[0].width_px) == (8, 9)
    assert any("3 images, 5 captions" in note for note in source.notes)
    assert any("captions that name no image of the list: 1" in note for note in source.notes)


def test_source_split_picks_one_of_cocos_lists(tmp_path: Path) -> None:
    for year, image in (("train2017", "a.jpg"), ("val2017", "c.jpg")):
        make_image_folder(tmp_path / year, image)
        content = {"images": [{"id": 1, "file_name": image}], "annotations": [{"image_id": 1, "caption": year}]}
        write_file(tmp_path / f"annotations/captions_{year}.json", json.dumps(content))
    source = list_source(tmp_path, SourceSection(split="validation"))
    assert [r.key for r in source.records] == ["c.jpg"]
    assert bytes_of(open_source(tmp_path, source.settings), source.records[0])  # as a worker does
    with pytest.raises(SourceError, match=r"no split 'test'. It holds: train \(1 file\), val \(1 file\)"):
        list_source(tmp_path, SourceSection(split="test"))


def test_texts_in_a_folder_beside_the_images_are_their_captions(tmp_path: Path) -> None:
    make_image_folder(tmp_path / "images/train")
    write_file(tmp_path / "labels/train/a.txt", "a cat\nthe cat")
    write_file(tmp_path / "labels/train/b.txt", b"\xff")
    source = list_source(tmp_path)
    assert summary_of(source) == [
        ("images/train/a.jpg", "images/train/a.jpg", -1, ("a cat", "the cat")),
        ("images/train/b.jpg", "bad_metadata", -1, ()),
        ("images/train/c.jpg", "images/train/c.jpg", -1, ()),
    ]
    assert any("labels" in note for note in source.notes)


def save_to_disk(folder: Path, rows: list[dict[str, Any]], *, features: dict[str, Any]) -> Path:
    """Write what ``Dataset.save_to_disk`` writes: two Arrow streams of small batches, and JSON that lists them."""
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    kinds = {"image": image, "text": pa.string(), "label": pa.int64()}
    schema = pa.schema([(name, kinds[name]) for name in rows[0]])
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number in range(2):
        names.append(f"data-0000{number}-of-00002.arrow")
        part = pa.Table.from_pylist(rows[number * 3 : number * 3 + 3], schema)
        options = pa.ipc.IpcWriteOptions(compression="zstd" if number else None)
        with pa.ipc.new_stream(folder / names[-1], schema, options=options) as writer:
            writer.write_table(part, max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    write_file(folder / "state.json", json.dumps(state))
    write_file(folder / "dataset_info.json", json.dumps({"features": features}))
    return folder


def write_with_dictionary(path: Path) -> None:
    """An Arrow stream whose texts are a dictionary."""
    table = pa.table({"image": [b"image"], "text": pa.array(["x"]).dictionary_encode()})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


FEATURES = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}
SAVED = [{"image": {"bytes": b"image %d" % i, "path": None}, "text": f"text {i}", "label": i % 2} for i in range(5)]


def test_datasets_saved_to_disk_are_read_row_by_row(tmp_path: Path) -> None:
    source = list_source(save_to_disk(tmp_path / "train", SAVED, features=FEATURES))
    assert (source.kind, source.classes) == ("arrow", ["cat", "dog"])
    keys = [f"data-00000-of-00002/{i}" for i in range(3)] + [f"data-00001-of-00002/{i}" for i in range(2)]
    wanted = [(key, i % 2, (f"text {i}",)) for i, key in enumerate(keys)]
    assert [(r.key, r.label, r.captions) for r in source.records] == wanted
    for i in (4, 0, 2, 1, 3):
        assert bytes_of(source, source.records[i]) == b"image %d" % i
    with pytest.raises(RecordRejected, match="has 3 rows"):
        source.read(source.records[0].path, 3, 0, stage="decode")


def test_files_of_a_saved_dataset_that_name_other_classes_are_refused(tmp_path: Path) -> None:
    root = save_to_disk(tmp_path / "train", SAVED, features=FEATURES)
    other = FEATURES | {"label": {"_type": "ClassLabel", "names": ["dog", "cat"]}}
    odd = save_to_disk(tmp_path / "odd", SAVED, features=other) / "data-00001-of-00002.arrow"
    odd.replace(root / odd.name)
    with pytest.raises(SourceError, match=r"data-00001-of-00002\.arrow': its classes differ.*source\.labels=none"):
        list_source(root)
    listed = list_source(root, SourceSection(labels="none")).records
    assert [record.label for record in listed] == [-1] * 5


def test_source_split_picks_a_split_of_a_saved_dataset_dict(tmp_path: Path) -> None:
    names = ("easy", "hard")
    for number, name in enumerate(names):
        rows = [row | {"text": f"{name} {row['text']}"} for row in SAVED[number:]]
        save_to_disk(tmp_path / name, rows, features=FEATURES)
    write_file(tmp_path / "dataset_dict.json", json.dumps({"splits": names}))
    for split in ("", "all"):
        with pytest.raises(SourceError, match=rf"several splits.*: {', '.join(names)}\. .*source\.split={names[0]}"):
            list_source(tmp_path, SourceSection(split=split))
    with pytest.raises(SourceError, match=f"no split 'test'. It holds: {names[0]}"):
        list_source(tmp_path, SourceSection(split="test"))
    source = list_source(tmp_path, SourceSection(split=names[1]))
    assert (source.kind, source.records[0].captions) == ("arrow", (f"{names[1]} text 1",))
    record = source.records[3]
    opened = open_source(tmp_path, source.settings)  # as a worker does
    assert bytes_of(opened, record) == b"image 4"
    write_file(tmp_path / "dataset_dict.json", json.dumps({"splits": names[:1]}))
    assert len(list_source(tmp_path).records) == len(SAVED)
    write_file(tmp_path / "dataset_dict.json", json.dumps({"splits": ["../x"]}))
    with pytest.raises(SourceError, match="expected 'splits'"):
        list_source(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: write_file(root / "state.json", "{}"), "_data_files"),
        (lambda root: write_file(root / "state.json", '{"_data_files": [{"filename": "../x.arrow"}]}'), "_data_files"),
        (
            lambda root: write_file(root / "state.json", '{"_indices_data_files": [{"filename": "i"}]}'),
            "flatten_indices",
        ),
        (lambda root: write_file(root / "data-00001-of-00002.arrow", b"\xff" * 99), "not a readable Arrow stream"),
        (lambda root: write_with_dictionary(root / "data-00001-of-00002.arrow"), "dictionaries.*to_parquet"),
        (lambda root: save_to_disk(root, [{"text": "x"}] * 5, features={}), "no column of images.*'text'"),
    ],
)
def test_a_damaged_dataset_is_one_line(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    root = save_to_disk(tmp_path, SAVED, features=FEATURES)
    damage(root)
    with pytest.raises(SourceError, match=message):
        list_source(root)


def test_no_change_of_one_byte_of_an_arrow_stream_is_more_than_an_error(tmp_path: Path) -> None:
    root = save_to_disk(tmp_path, SAVED, features=FEATURES)
    path = root / "data-00000-of-00002.arrow"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged[: rng.integers(len(whole)) if rng.random() < 0.2 else None])
        try:
            source = list_source(root)
            for record in source.records:
                bytes_of(source, record)
        except (SourceError, RecordRejected):
            pass


def test_braces_and_stars_choose_files_of_a_folder(tmp_path: Path) -> None:
    for i in range(5):
        write_tar(tmp_path / f"{i:03d}.tar", {"__key__": "x", "jpg": b"image %d" % i, "txt": f"text {i}"})
    write_file(tmp_path / "notes.txt", "of no use")
    every = [r.key for r in list_source(tmp_path).records]
    assert every == [f"00{i}/x" for i in range(5)]
    for pattern, numbers in {
        "{000..002}.tar": [0, 1, 2],
        "00[13].tar": [1, 3],
        "00{1,4}*": [1, 4],
        "00?.tar": range(5),
    }.items():
        source = list_source(f"{tmp_path}/{pattern}")
        assert source.kind == "webdataset"
        assert [r.key for r in source.records] == [every[i] for i in numbers]  # as of the whole folder
        record = source.records[-1]
        assert source.is_read_by_decoders
        assert bytes_of(source, record) == b"image %d" % list(numbers)[-1]
    make_image_folder(tmp_path / "p")
    assert [r.key for r in list_source(f"{tmp_path}/p/[ab].jpg").records] == ["a.jpg", "b.jpg"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{000..007}.tar", r"no file '001\.tar'"),
        ("*.zip", "matches no file"),
        ("?", r"matches the folder 'a'; expected only files.*--source of its own"),
        ("*/?.jpg", "files of 2 folders"),
        ("{000.tar", "no such file|braces"),
    ],
)
def test_a_pattern_that_does_not_fit_is_one_line(pattern: str, message: str, tmp_path: Path) -> None:
    write_file(tmp_path / "000.tar", b"")
    for folder in ("a", "b"):
        make_image_folder(tmp_path / folder)
    with pytest.raises(SourceError, match=message):
        list_source(f"{tmp_path}/{pattern}")
