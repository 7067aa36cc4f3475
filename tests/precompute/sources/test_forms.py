"""The forms in which people have captioned and labelled images, each listed through ``list_source`` alone."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_files import pictures, put, said

from leandit.datasets.errors import SourceError
from leandit.precompute.config import SourceSection
from leandit.precompute.sources.source import list_source


def tar(path: Path, *members: tuple[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def test_flickr8k_lists_each_image_once_with_all_its_captions(tmp_path: Path) -> None:
    pictures(tmp_path / "Images")
    rows = ["b.jpg,A boat .", "a.jpg,Two dogs .", 'b.jpg,"A ship , far away ."', "a.jpg,Two dogs .", "c.jpg,  A cat . "]
    put(tmp_path / "captions.txt", "image,caption\n" + "\n".join(rows) + "\n")
    source = list_source(tmp_path)
    assert source.kind == "manifest"
    assert said(source) == [
        ("b.jpg", "Images/b.jpg", -1, ("A boat .", "A ship , far away .")),
        ("a.jpg", "Images/a.jpg", -1, ("Two dogs .",)),
        ("c.jpg", "Images/c.jpg", -1, ("A cat .",)),
    ]


def test_coco_joins_captions_to_images_in_the_order_of_the_images(tmp_path: Path) -> None:
    pictures(tmp_path / "train2017")
    images = [{"id": 7, "file_name": "b.jpg", "height": 8, "width": 9}, {"id": 3, "file_name": "a.jpg"}]
    images += [{"id": 5, "file_name": "gone.jpg"}]
    texts = [(3, "one"), (7, "two"), (3, " three "), (9, "nobody's"), (7, "two")]
    captions = [{"image_id": image, "id": i, "caption": text} for i, (image, text) in enumerate(texts)]
    content = {"info": {"year": 2017}, "images": images, "licenses": [], "annotations": captions}
    put(tmp_path / "annotations/captions_train2017.json", json.dumps(content))
    source = list_source(tmp_path)
    assert said(source) == [
        ("b.jpg", "train2017/b.jpg", -1, ("two",)),
        ("a.jpg", "train2017/a.jpg", -1, ("one", "three")),
        ("gone.jpg", "missing_file", -1, ()),
    ]
    assert (source.records[0].height_px, source.records[0].width_px) == (8, 9)
    assert any("3 images, 5 captions" in note for note in source.notes)
    assert any("1 captions name no image" in note for note in source.notes)


def test_kohyas_folders_have_a_caption_file_beside_each_image(tmp_path: Path) -> None:
    pictures(tmp_path / "10_dog")
    put(tmp_path / "10_dog/a.caption", "a dog, sitting\n")
    put(tmp_path / "10_dog/a.txt", "unused")
    put(tmp_path / "10_dog/b.txt", "\ufeffa dog\n\n two dogs \r\na dog\n")
    source = list_source(tmp_path)
    assert source.kind == "sidecars"
    assert said(source) == [
        ("10_dog/a.jpg", "10_dog/a.jpg", -1, ("a dog, sitting",)),
        ("10_dog/b.jpg", "10_dog/b.jpg", -1, ("a dog", "two dogs")),
        ("10_dog/c.jpg", "10_dog/c.jpg", -1, ()),
    ]


def test_parquet_of_the_hub_is_read_by_split_with_classes_and_caption_lists(tmp_path: Path) -> None:
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for split, count in (("train", 3), ("test", 1)):
        images = pa.array([{"bytes": b"%d" % i, "path": None} for i in range(count)], kind)
        texts = [["one", " one ", "two"], [], ["three", None]][:count]
        table = pa.table({"image": images, "label": [1, 0, 9][:count], "captions": texts})
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / f"data/{split}-00000-of-00001.parquet", row_group_size=2)
    source = list_source(tmp_path, SourceSection(split="train"))
    assert (source.kind, source.classes) == ("parquet", ["cat", "dog"])
    name = "train-00000-of-00001"
    assert said(source) == [
        (f"{name}/0", f"{name}.parquet", 1, ("one", "two")),
        (f"{name}/1", f"{name}.parquet", 0, ()),
        (f"{name}/2", "bad_metadata", -1, ()),
    ]
    assert source.read(f"{name}.parquet", 1, 0, stage="scan") == b"1"


def test_nested_tars_of_imagenet_give_the_records_of_the_unpacked_folder(tmp_path: Path) -> None:
    classes = []
    for wnid in ("n01443537", "n01440764"):
        inner = tar(tmp_path / "inner.tar", (f"{wnid}_2.JPEG", b"two " + wnid.encode()), (f"{wnid}_1.JPEG", b"one"))
        classes.append((f"{wnid}.tar", inner.read_bytes()))
    source = list_source(tar(tmp_path / "ILSVRC2012_img_train.tar", *classes))
    assert (source.kind, source.classes) == ("imagenet", ["n01440764", "n01443537"])
    assert [(key, label) for key, _, label, _ in said(source)] == [
        ("n01440764/n01440764_1.JPEG", 0),
        ("n01440764/n01440764_2.JPEG", 0),
        ("n01443537/n01443537_1.JPEG", 1),
        ("n01443537/n01443537_2.JPEG", 1),
    ]
    record = source.records[3]
    assert source.read(record.path, record.offset, record.num_bytes, stage="scan") == b"two n01443537"


def test_damage_in_a_webdataset_rejects_the_records_that_it_hits(tmp_path: Path) -> None:
    members = [("0.jpg", b"x"), ("0.txt", b" a cat \n\nanother cat\n"), ("1.jpg", b"y"), ("1.txt", b"\xff")]
    members += [("2.jpg", b"z"), ("2.cls", b"seven"), ("3.jpg", b"z"), ("3.json", b'{"text": "a dog", "label": 3}')]
    members += [("4.jpg", b"z"), ("4.png", b"z"), ("5.txt", b"no image"), ("0.jpg", b"again")]
    tar(tmp_path / "s-0.tar", *members[:-1])
    source = list_source(tmp_path)
    assert said(source) == [
        ("s-0/0", "s-0.tar", -1, ("a cat", "another cat")),  # one caption a line, as beside an image
        *((f"s-0/{i}", "bad_metadata", -1, ()) for i in (1, 2)),
        ("s-0/3", "s-0.tar", 3, ("a dog",)),
        ("s-0/4", "bad_metadata", -1, ()),
    ]


@pytest.mark.parametrize("name", ["metadata.jsonl", "list.json", "list.parquet"])
def test_lists_of_captions_stay_lists_and_rows_of_one_image_become_one_record(name: str, tmp_path: Path) -> None:
    pictures(tmp_path)
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
        put(tmp_path / name, json.dumps(rows) if name.endswith("json") else "\n".join(map(json.dumps, rows)))
    source = list_source(tmp_path / name if name.startswith("list") else tmp_path)
    assert said(source) == [
        ("b.jpg", "b.jpg", 1, ("one", "two", "three")),
        ("a.jpg", "a.jpg", -1, ()),
        ("b.jpg", "duplicate_key", -1, ()),
        ("../c.jpg", "bad_metadata", -1, ()),
        ("./c.jpg", "bad_metadata", -1, ()),
    ]
    assert (source.records[0].height_px, source.records[0].width_px) == (8, 8)


def test_a_table_of_captions_without_a_header_is_not_left_out_in_silence(tmp_path: Path) -> None:
    pictures(tmp_path / "Images")
    put(tmp_path / "Flickr8k.token.txt", "a.jpg#0\tA cat .\na.jpg#1\tA small cat .\nb.jpg#0\tA boat .\n")
    with pytest.raises(SourceError, match=r"Flickr8k\.token\.txt.*names no columns.*Write a header"):
        list_source(tmp_path)
