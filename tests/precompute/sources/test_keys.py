"""Every key of [source] is read by a kind of source, or refused by it; none is ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from making import Leandit, image_bytes, make_class_folder, make_image_folder, write_file, write_tar

from leandit.errors import SourceError
from leandit.precompute.config import SourceSection
from leandit.precompute.sources.source import list_source

IMAGE = image_bytes(0, 64, 64, "JPEG")
ROW = {"file_name": "a.jpg", "text": "a cat", "kind": "cat", "height": 64, "width": 64}
COCO_LIST = {
    "images": [{"id": 1, "file_name": "a.jpg", "height": 64, "width": 64}],
    "annotations": [{"image_id": 1, "caption": "a cat"}],
}


def metadata(root: Path) -> None:
    make_image_folder(root, "a.jpg")
    write_file(root / "metadata.jsonl", json.dumps(ROW))


def manifest(root: Path) -> None:
    make_image_folder(root, "a.jpg")
    write_file(root / "list.csv", "file_name,text,kind,height,width\na.jpg,a cat,cat,64,64\n")


def coco(root: Path) -> None:
    make_image_folder(root, "a.jpg")
    write_file(root / "annotations/captions_train.json", json.dumps(COCO_LIST))


def parquet(root: Path) -> None:
    root.mkdir()
    pq.write_table(pa.table({"image": [IMAGE], "text": ["a cat"], "kind": ["cat"]}), root / "a.parquet")


def arrow(root: Path) -> None:
    root.mkdir()
    table = pa.table({"image": [IMAGE], "text": ["a cat"], "kind": ["cat"]})
    with pa.ipc.new_stream(root / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    write_file(root / "state.json", json.dumps({"_data_files": [{"filename": "data.arrow"}]}))


def webdataset(root: Path) -> None:
    root.mkdir()
    write_tar(root / "a.tar", {"__key__": "a", "jpg": IMAGE, "txt": "a cat", "json": {"kind": "cat", "text": "cat"}})


def sidecars(root: Path) -> None:
    make_image_folder(root, "a.jpg")
    write_file(root / "a.txt", "a cat")
    write_file(root / "a.json", json.dumps({"kind": "cat", "text": "cat"}))


def imagefolder(root: Path) -> None:
    make_class_folder(root, classes=1, per_class=1)
    make_image_folder(root / "n01440764", "n01440764_1.JPEG")


def imagenet(root: Path) -> None:
    root.mkdir()
    write_tar(root / "n01440764.tar", {"__key__": "n01440764_1", "jpg": IMAGE})


SOURCES: dict[str, Callable[[Path], None]] = {
    made.__name__: made
    for made in (metadata, manifest, coco, parquet, arrow, webdataset, sidecars, imagefolder, imagenet)
}
TABLES, EMBEDDED, WITH_TEXTS = ("metadata", "manifest"), ("parquet", "arrow"), ("webdataset", "sidecars")
KEYS: dict[str, tuple[str, ...]] = {  # a setting, and the sources that read it
    "source.image=file_name": TABLES,
    "source.image=image": EMBEDDED,
    "source.image=jpg": ("webdataset",),
    "source.caption=text": (*TABLES, *EMBEDDED, *WITH_TEXTS),
    "source.label=kind": (*TABLES, *EMBEDDED, *WITH_TEXTS),
    "source.root=.": (*TABLES, "coco"),
    "source.sizes=manifest": (*TABLES, "coco"),
    "source.text_file=whole": WITH_TEXTS,
    "source.text_file=lines": WITH_TEXTS,
    "source.labels=wnid": ("imagefolder",),
    "source.labels=none": tuple(SOURCES),
    "source.split=train": ("coco",),  # nothing in the others is named by its split
    "source.caption=nonsense": (),
    "source.label=nonsense": (),
}


@pytest.mark.parametrize("setting", KEYS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_key_is_read_by_a_kind_of_source_or_refused_with_the_kinds_that_read_it(
    source: str, setting: str, tmp_path: Path
) -> None:
    SOURCES[source](tmp_path / "source")
    key, value = setting.removeprefix("source.").split("=")
    section = SourceSection.model_validate({key: value})
    if source in KEYS[setting]:
        assert len(list_source(tmp_path / "source", section).records)
        return
    with pytest.raises(SourceError) as caught:
        list_source(tmp_path / "source", section)
    message = str(caught.value)
    is_named_column = key in ("image", "caption", "label")
    readers = [name for readers in (KEYS[s] for s in KEYS if s.startswith(f"source.{key}=")) for name in readers]
    if is_named_column and source in readers:
        assert f"'{value}'" in message
    elif key == "split":
        assert "no split 'train'" in message or "It holds" in message
    else:
        assert f"source.{key}" in message
        assert all(reader in message for reader in readers if key != "labels")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("source.caption=nonsense", "no image has a .json with this field"),
        ("source.image=txt", "source.image is for a table"),
        ("source.sizes=manifest", "source.sizes"),
    ],
)
def test_the_command_ends_with_what_to_do(setting: str, message: str, leandit: Leandit, tmp_path: Path) -> None:
    sidecars(tmp_path / "source")
    ended = leandit("precompute", "demo", "--source", tmp_path / "source", "--dry-run", "--set", setting)
    assert ended.code == 3
    assert message in ended.err


def test_a_label_column_is_not_named_where_no_labels_are_read(leandit: Leandit, tmp_path: Path) -> None:
    metadata(tmp_path / "source")
    settings = ["--set", "source.labels=none", "--set", "source.label=kind"]
    ended = leandit("precompute", "demo", "--source", tmp_path / "source", "--dry-run", *settings)
    assert ended.code == 3
    assert "source.label 'kind' would have no effect, because source.labels is \"none\"" in ended.err


def test_sizes_of_a_table_without_them_are_refused(tmp_path: Path) -> None:
    make_image_folder(tmp_path, "a.jpg")
    write_file(tmp_path / "metadata.csv", "file_name,text\na.jpg,a cat\n")
    with pytest.raises(SourceError, match=r"source\.sizes is .manifest., but the table has no columns 'height'"):
        list_source(tmp_path, SourceSection(sizes="manifest"))
