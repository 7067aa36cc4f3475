"""Several sources in one store: keys, classes and images of each; a store of one grows by another."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faults import flip
from making import CPU, NO_CHECK, Leandit, label_recipe, make_class_folder, no_progress, smooth_image, write_tar
from stores import checked, deep

from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError, SourceError
from leandit.precompute.config import SourceSection
from leandit.precompute.pipeline import Report, precompute
from leandit.precompute.sources.several import list_sources, open_sources, source_names
from leandit.precompute.sources.source import list_source
from leandit.tools.inspection.images import read_originals

Encode = Callable[..., Report]
AUTO = SourceSection()


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two folders of classes, one of which both have."""
    first = make_class_folder(tmp_path / "first", classes=2, per_class=3)
    second = make_class_folder(tmp_path / "more/second", classes=2, per_class=2)
    names = sorted(path.name for path in first.iterdir())
    shutil.move(second / names[0], second / "aaa")  # stands before the classes of the first
    for number, path in enumerate(sorted(second.rglob("*.*"))):
        smooth_image(100 + number).save(path)
    return [first, second]


@pytest.mark.usefixtures("quick")
def test_a_store_of_one_source_grows_by_another_and_encodes_only_that(
    folders: list[Path], tmp_path: Path, encode: Encode
) -> None:
    for source, name in ((folders[0], "alone"), (folders[:1], "store")):
        encode(label_recipe(), source, tmp_path / name)
    assert LatentStore(tmp_path / "store").root_hash == LatentStore(tmp_path / "alone").root_hash
    before = LatentStore(tmp_path / "store")
    report = encode(label_recipe(), folders, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert (report.num_encoded, report.changes and report.changes.num_added) == (4, 4)
    assert (report.changes.num_changed, report.changes.num_gone) == (0, 0)
    assert report.changes.carried.num_rows == 6
    rows = store.records.to_pylist()
    assert store.spec.classes == [*before.spec.classes, "aaa"]
    names = ["aaa", before.spec.classes[1]]
    assert [(row["key"].split("/")[0], row["label"]) for row in rows[6:]] == [("second", 2)] * 2 + [("second", 1)] * 2
    assert [row["key"].split("/")[1] for row in rows[6:]] == [names[0]] * 2 + [names[1]] * 2
    encode(label_recipe(), folders, tmp_path / "both")
    fresh = LatentStore(tmp_path / "both")
    assert fresh.spec.classes == store.spec.classes
    for row, other in zip(rows, fresh.records.to_pylist(), strict=True):
        assert [row[name] == other[name] for name in ("key", "label", "source_checksum")] == [True] * 3
        mine, theirs = (s.latents(row["bucket"])[s.record(row["key"]).row] for s in (store, fresh))
        assert np.allclose(mine, theirs, atol=1e-2)
    assert encode(label_recipe(), folders, tmp_path / "store").num_encoded == 0  # nothing has changed
    said: list[str] = []
    where = {"source_path": folders[::-1], "store_path": tmp_path / "both", "device": CPU}
    precompute(label_recipe(), **where, progress=no_progress, say=said.append)
    (line,) = [line for line in said if "of the 10 records of store" in line]
    assert re.search("are not in the source.*several sources keep their order", line)
    found = deep(tmp_path / "store", folders)
    assert (found.findings, found.num_records) == ([], 10)
    shards = [path for path in (tmp_path / "store/buckets").rglob("0") if path.is_file()]
    whole = [path.read_bytes() for path in shards]
    for path in shards:
        flip(path, 400)
    assert not checked(tmp_path / "store", folders, repair=True)[0].damaged
    assert [path.read_bytes() for path in shards] == whole
    with pytest.raises(SourceError, match=r"one more source, 'second'.*Pass every --source"):
        deep(tmp_path / "store", folders[:1])


def test_kinds_may_differ_and_each_image_is_read_from_its_own_source(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    smooth_image(0).save(texts / "a.jpg")
    (texts / "a.txt").write_text("a cat")
    write_tar(tmp_path / "b.tar", {"__key__": "x", "jpg": b"of a tar", "txt": "a dog"})
    tar = tmp_path / "b.tar"
    source = list_sources([texts, tar], AUTO)
    assert [(r.key, r.path, r.captions) for r in source.records] == [
        ("a.jpg", "a.jpg", ("a cat",)),
        ("b/b/x", "//b//b.tar", ("a dog",)),
    ]
    assert source.lines() == [f"sidecars '{texts}', 1 record", f"webdataset '{tar}', 1 record"]
    assert source.is_read_by_decoders
    opened = open_sources([str(texts), str(tar)], AUTO)  # as a worker does
    for one in (source, opened):
        found = [one.read(r.path, r.offset, r.num_bytes, stage="decode") for r in source.records]
        assert found == [(texts / "a.jpg").read_bytes(), b"of a tar"]
    with pytest.raises(SourceError, match=r"one more source, 'b'.*Pass every --source"):
        list_source(texts).read(source.records[1].path, 0, 1, stage="decode")
    assert list_sources([texts], AUTO).listing_hash() == list_source(texts).listing_hash()
    assert source.listing_hash() != list_sources([tar, texts], AUTO).listing_hash()


def test_labels_without_names_are_the_same_numbers_and_are_not_joined_with_names(
    folders: list[Path], tmp_path: Path
) -> None:
    tars = [tmp_path / "a.tar", tmp_path / "b.tar"]
    for tar, labels in zip(tars, [(0, 4), (3, 7)], strict=True):
        write_tar(tar, *({"__key__": f"k{label}", "jpg": b"x", "cls": str(label)} for label in labels))
    source = list_sources(tars, AUTO)
    assert [r.label for r in source.records] == [0, 4, 3, 7]
    assert source.classes == [str(i) for i in range(8)]
    assert not source.has_class_names
    with pytest.raises(SourceError, match=r"by names of classes.*by numbers.*source\.labels=none"):
        list_sources([folders[0], tars[0]], AUTO)
    unlabelled = list_sources([folders[0], tars[0]], SourceSection(labels="none"))
    assert {r.label for r in unlabelled.records} == {-1}


def test_a_source_is_given_once_and_names_do_not_depend_on_those_behind(tmp_path: Path) -> None:
    paths = ["s3://b/train", "x/train", "s3://c/train/", "x.y/{0..3}.tar", "d/list.csv", "e/list.json", "/"]
    names = source_names(paths)
    assert names[1:] == ["train", "c-train", "0..3", "list", "e-list", "source"]
    assert [source_names(paths[:n]) for n in range(1, 8)] == [names[:n] for n in range(1, 8)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    for again in ("a", "a/", "b", "b/../a"):
        with pytest.raises(RecipeError, match="the same source as"):
            source_names([f"{tmp_path}/a", f"{tmp_path}/{again}"])


def test_the_commands_take_several_sources(folders: list[Path], tmp_path: Path, leandit: Leandit) -> None:
    store, sources = tmp_path / "s", [word for folder in folders for word in ("--source", folder)]
    command = ["precompute", "demo", *sources, "--set", "text.kind=none", "--set", NO_CHECK, "--device", "cpu"]
    said = leandit(*command, "--dry-run").out
    assert f"imagefolder '{folders[0]}', 6 records\n" in said
    assert f"imagefolder '{folders[1]}', 4 records\n" in said
    assert "its keys begin with 'second/'" in said
    assert leandit(*command, *sources[:2], "--store", store).code == 2
    assert not store.exists()
    assert leandit(*command, "--store", store).code == 0
    assert "10" in leandit("inspect", store).out
    assert "10 records and 0 captions" in leandit("verify", store, "--deep", *sources).out
    assert len(read_originals(LatentStore(store), folders, ["n000/0.png", "second/aaa/0.png"])) == 2
