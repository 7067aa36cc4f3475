"""A store that grows: rows of earlier revisions stay where and what they are, and a hostile manifest is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from making import caption_recipe, encode, smooth_image, tree_digest
from stores import ImageSource, content, make_grown, read_all, small_shards
from tiny_models import make_dinov2

from leandit.datasets.disk.hashing import canonical_json, sha256_of
from leandit.datasets.errors import DamageError, LeanditError, RowOutOfRange
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.revisions.catalog import file_entry, read_manifest
from leandit.datasets.store import LatentStore
from leandit.precompute.images.decoders import Decoders

BUCKETS = ("48x80", "64x64", "80x48")


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with small_shards():
        yield


class Grown(NamedTuple):
    """A store after each of its revisions: files by path, and what a reader of its newest revision gets.

    The first has ten images, the second three changed or new ones and a dropped one, the third an added feature.
    """

    root: Path
    trees: list[dict[str, bytes]]
    read: list[dict[str, Any]]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Grown:
    work = tmp_path_factory.mktemp("growth")
    make_dinov2(work / "dinov2")
    store, images = work / "store", ImageSource(work / "source")
    feature = [f"features.dino.model={work / 'dinov2'}", "features.dino.output=both"]
    trees, read = [], []

    def run(*overrides: str) -> None:
        encode(caption_recipe("vae.flip=true", *overrides), images.root, store, drop_gone=True)
        trees.append(tree_digest(store))
        read.append(read_all(store))

    run()
    images.put(1, seed=101)
    images.put(20, words=" and a yellow star")
    images.put(21, words=" and two yellow stars")
    images.drop(3)
    images.write()
    run()
    run(*feature)
    return Grown(store, trees, read)


def test_growth_changes_no_file_of_an_earlier_revision(grown: Grown) -> None:
    for before, after in zip(grown.trees, grown.trees[1:], strict=False):
        assert {
            path: content for path, content in before.items() if not path.endswith("zarr.json")
        }.items() <= after.items()
        assert len(after) > len(before)
    manifests = [read_manifest(grown.root, revision) for revision in (1, 2, 3)]
    assert [manifest.base for manifest in manifests] == ["", *(manifest.root_hash for manifest in manifests[:2])]
    entries = [{entry.path: entry for entry in manifest.files if "/c/" in entry.path} for manifest in manifests]
    assert entries[0].items() < entries[1].items() < entries[2].items()


def test_what_is_added_begins_at_the_next_shard_and_gaps_are_refused(grown: Grown) -> None:
    first, second = (read_manifest(grown.root, revision).layouts() for revision in (1, 2))
    gaps = 0
    for path, layout in second.items():
        before = first[path]
        added = layout.row_ranges[len(before.row_ranges) :]
        assert layout.row_ranges[: len(before.row_ranges)] == before.row_ranges
        for one in added:
            assert one.revision == 2
            assert one.first == -(-before.shape[0] // layout.shard_rows) * layout.shard_rows
        array = LatentStore(grown.root, revision=2).array(path)
        for row in range(len(array)):
            if layout.has_rows(np.array([row]))[0]:
                assert array[row].shape == layout.shape[1:]
                continue
            gaps += 1
            for read, rows in ((array.__getitem__, row), (array.take, [0, row]), (array.__getitem__, slice(None))):
                with pytest.raises(RowOutOfRange, match="lies in a gap"):
                    read(rows)
    assert gaps >= 3
    assert {path.split("/")[1] for path in second if path.startswith("buckets/")} == {*BUCKETS}


@pytest.mark.parametrize("revision", [1, 2, 3])
def test_every_revision_is_read_as_it_was_when_it_was_the_newest(revision: int, grown: Grown) -> None:
    store, wanted = LatentStore(grown.root, revision=revision), grown.read[revision - 1]
    assert (content(store), store.buckets) == (wanted["content"], wanted["buckets"])
    assert store.features == (["dino"] if revision == 3 else [])
    tables = {path for path in grown.trees[revision - 1] if path.startswith(f"revisions/{revision:06d}/")}
    assert {path.rpartition("/")[2] for path in tables if "/index/" not in path} == {
        *("manifest.json", "records.parquet", "captions.parquet", "sources.parquet", "local.json")
    }


def test_an_added_feature_has_the_rows_of_all_records_and_nothing_else_is_added(grown: Grown) -> None:
    store = LatentStore(grown.root)
    for bucket in BUCKETS:
        latents = store.layout(f"buckets/{bucket}/moments")
        for name in ("patches", "cls", "patches_flip", "cls_flip"):
            feature = store.layout(f"buckets/{bucket}/features/dino/{name}")
            assert [one[1:] for one in feature.row_ranges] == [one[1:] for one in latents.row_ranges]
            assert {one.revision for one in feature.row_ranges} == {3}
            assert feature.shard_rows <= latents.shard_rows
        for row in store.index(bucket).rows.tolist():
            assert np.isfinite(store.feature("dino", bucket).row(row, "cls")).all()
    new = {path for path in grown.trees[2].keys() - grown.trees[1].keys() if not path.startswith("revisions/000003/")}
    assert new
    assert all("/features/" in path for path in new)


def test_growth_after_an_addition_decodes_a_new_image_once(
    grown: Grown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, source = tmp_path / "store", shutil.copytree(grown.root.parent / "source", tmp_path / "source")
    shutil.copytree(grown.root, store)
    decode, decoded = Decoders.decode, list[str]()

    def counting(self: Decoders, path: Path, *args: Any, **how: Any) -> Any:
        decoded.append(path.name)
        return decode(self, path, *args, **how)

    monkeypatch.setattr(Decoders, "decode", counting)
    smooth_image(40, 64, 64).save(source / "images/40.png")
    with (source / "metadata.jsonl").open("a") as table:
        table.write(json.dumps({"file_name": "images/40.png", "captions": ["a red circle", "a new image"]}) + "\n")
    dino = [f"features.dino.model={grown.root.parent / 'dinov2'}", "features.dino.output=both"]
    report = encode(caption_recipe("vae.flip=true", *dino), source, store, drop_gone=True)
    assert (report.num_encoded, decoded) == (1, ["40.png"])
    store = LatentStore(store)
    row = store.record("images/40.png").row
    assert np.isfinite(store.feature("dino", "64x64").row(row, "patches")).all()
    assert verify_store(store.path).findings == []


def test_the_same_store_made_in_two_folders_has_one_root_hash(tmp_path: Path) -> None:
    stores = [make_grown(tmp_path / name)[1] for name in ("here", "some/where/else")]
    trees = [tree_digest(store) for store in stores]
    assert trees[0].keys() == trees[1].keys()
    for revision in (1, 2, 3):
        one, two = (read_manifest(store, revision) for store in stores)
        assert one == two
    differing = {path.rpartition("/")[2] for path in trees[0] if trees[0][path] != trees[1][path]}
    assert differing == {"local.json", "sources.parquet"}  # when the plan and the images were made


# --- Manifests that are not valid; more of them are in tests/house/test_security.py -----------------------------------


def forge(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write a changed manifest of the newest revision in both its places, with a root hash that fits."""
    folder = root / "revisions/000003"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["root_hash"]
    change(manifest)
    manifest["root_hash"] = sha256_of(manifest)
    for path in (folder / "manifest.json", folder / "twin/manifest.json"):
        path.write_bytes(canonical_json(manifest))


def test_a_hostile_manifest_is_refused_and_the_revision_before_it_is_read(grown: Grown, tmp_path: Path) -> None:
    root = shutil.copytree(grown.root, tmp_path / "store")
    forge(root, lambda manifest: manifest["arrays"][0].update(ranges=[[3, 0, 4], [1, 4, 6]]))
    with pytest.raises(DamageError, match=r"manifest\.json.*is not valid.*verify --repair"):
        LatentStore(root)
    with pytest.raises(DamageError, match="is not valid"):
        read_manifest(root, 3)
    assert verify_store(root).damaged
    assert len(LatentStore(root, revision=1)) > 0  # it has a manifest of its own


def test_a_record_of_a_row_that_does_not_exist_is_refused(grown: Grown, tmp_path: Path) -> None:
    root, store = shutil.copytree(grown.root, tmp_path / "store"), LatentStore(grown.root)
    assert store.layout("buckets/48x80/moments").row_ranges == ((1, 0, 3), (2, 4, 5))  # 3 is a gap
    path, rows = "revisions/000003/index/rows.bin", store.numbers("rows").copy()
    rows[0] = 3  # of the smallest bucket
    (root / path).write_bytes(rows.tobytes())
    entry = file_entry(path, rows.tobytes()).model_dump()

    def name_it(manifest: dict[str, Any]) -> None:
        manifest["files"] = [entry if one["path"] == path else one for one in manifest["files"]]

    forge(root, name_it)
    with pytest.raises(DamageError, match=r"rows that do not exist.*verify --repair"):
        LatentStore(root).index("48x80")
    with pytest.raises(LeanditError):
        read_all(root)
