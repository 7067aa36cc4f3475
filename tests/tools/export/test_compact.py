"""``compact``: a new store with the same records and fewer bytes, or nothing at all; the old one stays as it is."""

from __future__ import annotations

import copy
import functools
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from faults import REVISION_FILES, dies_at, flip, num_operations, without_seal
from making import (
    caption_recipe,
    encode,
    label_recipe,
    make_class_folder,
    no_progress,
    smooth_image,
    store_digest,
    tree_digest,
)
from stores import ImageSource, content, copy_of, files_of, make_grown, read_all

from leandit.datasets.format.schema import Manifest
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, ResourceError, StoreError
from leandit.tools.export.compact import compact

PACKED = ("vae.flip=true", "store.codec=blosc")
LITTER = ".leandit-tmp-"


pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageSource, Path]:
    return make_grown(tmp_path_factory.mktemp("grown"), *PACKED)


@pytest.fixture
def growing(grown: tuple[ImageSource, Path], tmp_path: Path) -> tuple[ImageSource, Path]:
    """Copies of the source and the store that a test may change."""
    images = copy.deepcopy(grown[0])
    images.root = shutil.copytree(grown[0].root, tmp_path / "source")
    return images, copy_of(grown[1], tmp_path / "store")


def run(store: Path, out: Path) -> Manifest:
    return compact(store, out, progress=no_progress)


def size_of(root: Path) -> int:
    return sum((root / path).stat().st_size for path in files_of(root))


def test_a_compacted_store_holds_the_same_and_nothing_else(grown: tuple[ImageSource, Path], tmp_path: Path) -> None:
    images, store = grown
    root, old = tmp_path / "new", tree_digest(store)
    before, null = content(LatentStore(store)), LatentStore(store).null_caption.tobytes()
    assert any(said["reason"] == "truncated" for said, _, _ in before.values())  # rejected at decode: it had a row
    manifest = run(store, root)
    after = LatentStore(root)
    assert tree_digest(store) == old
    assert content(after) == before
    assert after.null_caption.tobytes() == null
    assert verify_store(root).findings == []
    assert after.revision == 4
    assert {one.revision for layout in after.layouts.values() for one in layout.row_ranges} == {4}
    assert all(len(layout.row_ranges) == 1 for layout in after.layouts.values())  # no gaps
    assert manifest == after.manifest
    assert size_of(root) < size_of(store)
    of_revisions = {path for path in files_of(root) if path.startswith("revisions/0") and "/index/" not in path}
    assert of_revisions == {f"revisions/000004/{folder}{name}" for folder in ("", "twin/") for name in REVISION_FILES}
    texts = {text for _, _, captions in before.values() for text in captions}
    assert set(after.captions["text"].to_pylist()) == texts
    assert sum(after.buckets.values()) == sum(said["status"] == "stored" for said, _, _ in before.values())
    assert read_all(root)["content"] == before

    whole = tree_digest(root)
    assert run(store, root) == manifest  # it is there
    assert tree_digest(root) == whole

    report = encode(caption_recipe(*PACKED), images.root, root)
    assert (report.num_encoded, report.manifest) == (0, manifest)
    with pytest.raises(StoreError, match=r"no complete revision 3. Available: 4"):
        LatentStore(root, revision=3)


def test_a_compacted_store_grows_and_is_compacted_again(growing: tuple[ImageSource, Path], tmp_path: Path) -> None:
    (images, store), root = growing, tmp_path / "new"
    run(store, root)
    images.put(40, words=" and a pink star")
    images.drop(5)
    images.write()
    report = encode(caption_recipe(*PACKED), images.root, root, drop_gone=True)
    assert (report.num_encoded, report.manifest.revision) == (1, 5)
    assert {one[0] for array in report.manifest.arrays for one in array.ranges} == {4, 5}
    assert verify_store(root).findings == []
    before = content(LatentStore(root))
    assert "images/40.png" in before
    assert "images/5.png" not in before
    assert run(root, tmp_path / "newer").revision == 6
    assert content(LatentStore(tmp_path / "newer")) == before
    assert verify_store(tmp_path / "newer").findings == []


@pytest.mark.parametrize("step", [pytest.param(24, id="sample"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_a_compaction_that_is_killed_begins_again(step: int, tmp_path: Path) -> None:
    """Nothing is taken for a store, and the next call makes it."""
    source, store, work = tmp_path / "train", tmp_path / "store", tmp_path / "w"
    make_class_folder(source, classes=2, per_class=2)
    encode(label_recipe(), source, store)
    (source / "n000/1.png").unlink()
    smooth_image(7).save(source / "n001/9.png")
    encode(label_recipe(), source, store, drop_gone=True)
    old, call = tree_digest(store), functools.partial(run, store, work / "new")
    work.mkdir()
    total = num_operations(call)
    whole = store_digest(work)
    assert total > 50
    for at in range(0, total, step):
        shutil.rmtree(work / "new")
        assert dies_at(at, call), at
        left = [path.name for path in work.iterdir()]
        assert all(name.startswith(LITTER) for name in left) or (left == ["new"] and store_digest(work) == whole), at
        call()
        assert store_digest(work) == whole, at
    assert tree_digest(store) == old


def test_what_is_damaged_is_refused_and_nothing_is_left(grown: tuple[ImageSource, Path], tmp_path: Path) -> None:
    store = LatentStore(grown[1])
    second_row = 8 * store.latents("80x48").row_bytes
    second_caption = 8 * store.text().starts[1] * store.text().arrays[0].row_bytes
    for name, bit in (
        ("buckets/80x48/moments/c/0/0/0/0", 100),
        ("buckets/80x48/moments/c/0/0/0/0", second_row + 100),
        ("captions/embeddings/c/0/0", 100),
        ("captions/embeddings/c/0/0", second_caption + 100),
        ("captions/null/c/0/0", 100),
    ):
        root = copy_of(grown[1], tmp_path / "store")
        flip(root / name, bit)
        with pytest.raises(DamageError, match=rf"{name}'.*verify .*--repair"):
            run(root, tmp_path / "new")
    for name in ("local.json", "sources.parquet"):
        root = copy_of(grown[1], tmp_path / "store")
        for path in list(root.glob(f"revisions/000003/**/{name}")):
            path.unlink()
        with pytest.raises(DamageError, match=rf"{name}'.* is missing.*verify .*--repair"):
            run(root, tmp_path / "new")
    assert list(tmp_path.iterdir()) == [root]


def test_an_unfinished_revision_is_finished_first(growing: tuple[ImageSource, Path], tmp_path: Path) -> None:
    images, root = growing
    images.put(50)
    images.write()
    without_seal(lambda: encode(caption_recipe(*PACKED), images.root, root))
    before = tree_digest(root)
    with pytest.raises(StoreError, match="revision 4 is unfinished"):
        run(root, tmp_path / "new")
    assert tree_digest(root) == before
    assert {path.name for path in tmp_path.iterdir()} == {"store", "source"}


def test_a_place_that_is_taken_or_too_small_or_lies_in_the_store_is_refused(
    grown: tuple[ImageSource, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = grown[1]
    before = tree_digest(store)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    other = copy_of(store, tmp_path / "other")
    for out in (tmp_path / "file", tmp_path / "folder", other):
        with pytest.raises(StoreError, match="it already exists"):
            run(store, out)
    for out in (store, store / "new"):
        with pytest.raises(StoreError, match="would lie inside store"):
            run(store, out)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ResourceError, match="--out on another disk"):
        run(store, tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder", "other"}
    assert (tree_digest(store), tree_digest(other)) == (before, before)
    assert (tmp_path / "file").read_text() == "mine"
