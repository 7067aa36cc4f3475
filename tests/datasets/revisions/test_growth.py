"""A store that grows: rows of earlier revisions stay where and what they are, and a hostile manifest is refused."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from faults import Pictures, content, encode, make_grown, read_all, small_shards
from making import caption_recipe, picture, tree_digest
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

    The first has ten pictures, the second three changed or new ones and a dropped one, the third an added feature.
    """

    root: Path
    trees: list[dict[str, bytes]]
    read: list[dict[str, Any]]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Grown:
    work = tmp_path_factory.mktemp("growth")
    make_dinov2(work / "dinov2")
    store, pictures = work / "store", Pictures(work / "source")
    feature = [f"features.dino.model={work / 'dinov2'}", "features.dino.output=both"]
    trees, read = [], []

    def run(*overrides: str) -> None:
        encode(caption_recipe("vae.flip=true", *overrides), pictures.root, store, drop_gone=True)
        trees.append(tree_digest(store))
        read.append(read_all(store))

    run()
    pictures.put(1, seed=101)
    pictures.put(20, words=" and a yellow star")
    pictures.put(21, words=" and two yellow stars")
    pictures.drop(3)
    pictures.write()
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


def test_growth_after_an_addition_decodes_a_new_picture_once(
    grown: Grown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, source = tmp_path / "store", shutil.copytree(grown.root.parent / "source", tmp_path / "source")
    shutil.copytree(grown.root, store)
    decode, decoded = Decoders.decode, list[str]()

    def counting(self: Decoders, path: Path, *args: Any, **how: Any) -> Any:
        decoded.append(path.name)
        return decode(self, path, *args, **how)

    monkeypatch.setattr(Decoders, "decode", counting)
    picture(40, 64, 64).save(source / "images/40.png")
    with (source / "metadata.jsonl").open("a") as table:
        table.write(json.dumps({"file_name": "images/40.png", "captions": ["a red circle", "a new picture"]}) + "\n")
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
    assert differing == {"local.json", "sources.parquet"}  # when the plan and the pictures were made


# --- Hostile manifests ------------------------------------------------------------------------------------------------


def set_ranges(path: str, ranges: list[list[int]], manifest: dict[str, Any], **other: Any) -> None:
    (array,) = [one for one in manifest["arrays"] if one["path"] == path]
    array |= {"ranges": ranges, "shape": [ranges[-1][2], *array["shape"][1:]], **other}


def change(path: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """Change fields of an array."""

    def make(manifest: dict[str, Any]) -> None:
        (array,) = [one for one in manifest["arrays"] if one["path"] == path]
        array |= {name: value(array[name]) if callable(value) else value for name, value in fields.items()}

    return make


def drop_file(ending: str, manifest: dict[str, Any]) -> None:
    manifest["files"] = [entry for entry in manifest["files"] if not entry["path"].endswith(ending)]


def drop_array(path: str, manifest: dict[str, Any]) -> None:
    manifest["arrays"] = [array for array in manifest["arrays"] if array["path"] != path]


def rename_array(path: str, new: str, manifest: dict[str, Any]) -> None:
    for array in manifest["arrays"]:
        array["path"] = new if array["path"] == path else array["path"]
    for entry in manifest["files"]:
        entry["path"] = entry["path"].replace(f"{path}/c/", f"{new}/c/")


def put_file(path: str, manifest: dict[str, Any]) -> None:
    manifest["files"].append({**manifest["files"][0], "path": path})


ROWS = "buckets/64x64/moments"
HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ranges overlap": functools.partial(set_ranges, ROWS, [[1, 0, 4], [2, 2, 6]]),
    "a range not at a shard": functools.partial(set_ranges, ROWS, [[1, 0, 3], [2, 3, 6]]),
    "revisions that fall": functools.partial(set_ranges, ROWS, [[2, 0, 4], [1, 4, 6]]),
    "a revision to come": lambda manifest: [array["ranges"][-1].__setitem__(0, 3) for array in manifest["arrays"]],
    "no ranges": change(ROWS, ranges=[]),
    "more rows than ranges": change(ROWS, shape=lambda shape: [shape[0] + 1, *shape[1:]]),
    "many shards": functools.partial(set_ranges, ROWS, [[1, 0, 1 << 40]]),
    "no rows": change(ROWS, shape=lambda shape: [0, *shape[1:]]),
    "another width": change(ROWS, shape=lambda shape: [*shape[:3], shape[3] + 1]),
    "another dtype": change(ROWS, dtype="float32"),
    "a scalar": change(ROWS, shape=[]),
    "chunks that do not fit": change(ROWS, chunk_rows=3),
    "shards of other rows": change(ROWS, shard_rows=lambda rows: rows * 2),
    "a null caption of another length": change("captions/null", shape=lambda shape: [shape[0] - 1, shape[1]]),
    "an unknown codec": change(ROWS, codec="lzma"),
    "flipped latents of other rows": functools.partial(set_ranges, f"{ROWS}_flip", [[1, 0, 2]]),
    "a shard is not in the files": functools.partial(drop_file, f"{ROWS}/c/1/0/0/0"),
    "a shard of no array": functools.partial(put_file, f"{ROWS}/c/99/0/0/0"),
    "an array is missing": functools.partial(drop_array, ROWS),
    "an array that the spec does not have": functools.partial(rename_array, ROWS, "buckets/64x64/other"),
    "an array of no known place": functools.partial(rename_array, ROWS, "moments"),
    "a table is missing": functools.partial(drop_file, "captions.parquet"),
    "a file that is no shard": functools.partial(put_file, "zarr.json"),
    "a file twice": lambda manifest: manifest["files"].append(manifest["files"][0]),
    "an array twice": lambda manifest: manifest["arrays"].append(manifest["arrays"][0]),
    "an absolute path": functools.partial(put_file, "/etc/c/0"),
    "a path out of the store": functools.partial(put_file, "captions/../../c/0"),
}


def forged(root: Path, change_it: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Write a changed manifest of the newest revision in both its places, with a root hash that fits."""
    folder = root / "revisions/000002"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["root_hash"]
    change_it(manifest)
    manifest["root_hash"] = sha256_of(manifest)
    for path in (folder / "manifest.json", folder / "twin/manifest.json"):
        path.write_bytes(canonical_json(manifest))
    return manifest


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two revisions, with flipped latents."""
    root = tmp_path_factory.mktemp("two")
    pictures = Pictures(root / "source")
    encode(caption_recipe("vae.flip=true"), pictures.root, root / "store")
    pictures.put(21)
    pictures.put(22)
    pictures.write()
    encode(caption_recipe("vae.flip=true"), pictures.root, root / "store")
    return root / "store"


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused(what: str, two: Path, tmp_path: Path) -> None:
    root = shutil.copytree(two, tmp_path / "store")
    forged(root, HOSTILE[what])
    with pytest.raises(DamageError, match=r"manifest\.json.*is not valid.*verify --repair"):
        LatentStore(root)
    with pytest.raises(DamageError, match="is not valid"):
        read_manifest(root, 2)
    assert verify_store(root).damaged
    assert len(LatentStore(root, revision=1)) > 0  # the revision before has a manifest of its own


@pytest.mark.parametrize("row", [-1, 3, 6, (1 << 31) - 1])
def test_a_record_of_a_row_that_does_not_exist_is_refused(row: int, two: Path, tmp_path: Path) -> None:
    root, store = shutil.copytree(two, tmp_path / "store"), LatentStore(two)
    assert store.layout("buckets/48x80/moments").row_ranges == ((1, 0, 3), (2, 4, 5))  # 3 is a gap
    rows = store.numbers("rows").copy()
    rows[0] = row  # of the smallest bucket
    forged_file(root, "revisions/000002/index/rows.bin", rows.tobytes())
    store = LatentStore(root)
    with pytest.raises(DamageError, match=r"rows that do not exist.*verify --repair"):
        store.index("48x80")
    with pytest.raises(LeanditError):
        read_all(root)


def forged_file(root: Path, path: str, data: bytes) -> None:
    """Write a file of the second revision, and a manifest that names it."""
    (root / path).write_bytes(data)

    def name_it(manifest: dict[str, Any]) -> None:
        entry = file_entry(path, data).model_dump()
        manifest["files"] = [entry if one["path"] == path else one for one in manifest["files"]]

    forged(root, name_it)
