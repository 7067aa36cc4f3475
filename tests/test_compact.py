"""``compact``: the same records with fewer bytes, whatever is killed in between; nothing is encoded, nothing lost."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import (
    Pictures,
    content,
    copy_of,
    dies_at,
    encode,
    files_of,
    flip,
    make_grown,
    num_operations,
    read_all,
    small_shards,
)
from making import caption_recipe, label_recipe, make_class_folder, no_progress, picture, tree_digest

from leandit.datasets.compact import compact
from leandit.datasets.errors import DamageError, StoreError
from leandit.datasets.store import LatentStore
from leandit.datasets.verify import verify_store

RECIPES = {"plain": (), "packed": ("vae.flip=true", "store.codec=zstd")}
run = functools.partial(compact, progress=no_progress)


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with small_shards():
        yield


@pytest.fixture(scope="module", params=RECIPES)
def grown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pictures, Path, str]:
    return *make_grown(tmp_path_factory.mktemp("grown"), *RECIPES[request.param]), request.param


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pictures, Path]:
    return make_grown(tmp_path_factory.mktemp("plain"))


def size_of(root: Path) -> int:
    return sum((root / path).stat().st_size for path in files_of(root))


def test_a_compacted_store_holds_the_same_and_nothing_else(grown: tuple[Pictures, Path, str], tmp_path: Path) -> None:
    pictures, store, name = grown
    root = copy_of(store, tmp_path / "store")
    before, size, null = content(LatentStore(root)), size_of(root), LatentStore(root).null_caption.tobytes()
    assert any(said["reason"] == "truncated" for said, _, _ in before.values())  # rejected at decode: it had a row
    result = run(root)
    after = LatentStore(root)
    assert content(after) == before
    assert after.null_caption.tobytes() == null
    assert verify_store(root).findings == []
    assert (after.revision, after.manifest and after.manifest.stack) == (4, [4])
    assert result.manifest == after.manifest
    assert (result.removed, result.freed_bytes) == ([1, 2, 3], size - size_of(root))
    assert result.freed_bytes > 0
    outside = {path for path in files_of(root) if not path.startswith("revisions/000004/")}
    assert outside == {"zarr.json", "revisions/zarr.json"}
    texts = {text for _, _, captions in before.values() for text in captions}
    assert set(after.captions["text"].to_pylist()) == texts
    assert sum(after.buckets.values()) == sum(said["status"] == "stored" for said, _, _ in before.values())
    assert read_all(root)["content"] == before

    again = run(root)
    assert (again.removed, again.freed_bytes, again.manifest) == ([], 0, result.manifest)

    report = encode(caption_recipe(*RECIPES[name]), pictures.root, root)
    assert (report.num_encoded, report.manifest) == (0, result.manifest)
    with pytest.raises(StoreError, match=r"no complete revision 3. There are: 4"):
        LatentStore(root, revision=3)


def test_a_compacted_store_grows_and_is_compacted_again(tmp_path: Path) -> None:
    pictures, root = make_grown(tmp_path)
    run(root)
    pictures.put(40, words=" and a pink star")
    pictures.drop(5)
    pictures.write()
    report = encode(caption_recipe(), pictures.root, root, drop_gone=True)
    assert (report.num_encoded, report.manifest.stack, report.manifest.revision) == (1, [4, 5], 5)
    assert verify_store(root).findings == []
    before = content(LatentStore(root))
    assert "images/40.png" in before
    assert "images/5.png" not in before
    assert run(root).removed == [4, 5]
    assert content(LatentStore(root)) == before
    assert verify_store(root).findings == []


def test_a_store_that_was_made_anew_loses_what_it_had_before(tmp_path: Path) -> None:
    source, root = make_class_folder(tmp_path / "train", classes=2, per_class=3), tmp_path / "store"
    encode(label_recipe(), source, root)
    encode(label_recipe("vae.keep=mean"), source, root, new_revision=True)
    before = content(LatentStore(root))
    assert LatentStore(root).manifest.stack == [2]  # pyright: ignore[reportOptionalMemberAccess]
    assert verify_store(root).findings == []
    result = run(root)
    assert (result.removed, result.manifest.revision) == ([1], 2)
    assert content(LatentStore(root)) == before
    assert verify_store(root).findings == []
    (source / "n000/0.png").unlink()
    encode(label_recipe("vae.keep=mean"), source, root, drop_gone=True)
    left = content(LatentStore(root))
    assert left.keys() == before.keys() - {"n000/0.png"}
    assert run(root).removed == [2, 3]
    assert content(LatentStore(root)) == left
    assert verify_store(root).findings == []


def check_kills(store: Path, work: Path, step: int) -> None:
    """Kill a compaction at every so many operations: the store can be read all the time, and the next call ends it."""
    before = content(LatentStore(store))
    root, call = copy_of(store, work), functools.partial(run, work)
    total = num_operations(call)
    whole = tree_digest(root)
    assert total > 50
    for at in range(0, total, step):
        copy_of(store, work)
        assert dies_at(at, call), at
        found = verify_store(root)
        assert not found.damaged, (at, found.findings)
        assert {f.cause for f in found.findings} <= {"temporary", "unsealed", "unremoved"}
        assert content(LatentStore(root)) == before, at
        call()
        assert tree_digest(root) == whole, at
        assert verify_store(root).findings == []


def test_a_compaction_that_is_killed_goes_on(tmp_path: Path) -> None:
    source, store = make_class_folder(tmp_path / "train", classes=2, per_class=2), tmp_path / "store"
    encode(label_recipe(), source, store)
    (source / "n000/1.png").unlink()
    picture(7).save(source / "n001/9.png")
    encode(label_recipe(), source, store, drop_gone=True)
    check_kills(store, tmp_path / "copy", 4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_compaction_that_is_killed_at_any_operation_goes_on(
    grown: tuple[Pictures, Path, str], tmp_path: Path
) -> None:
    check_kills(grown[1], tmp_path / "store", 1)


@pytest.mark.parametrize("kind", ["latents", "captions", "null"])
def test_a_damaged_row_is_refused_and_nothing_is_removed(
    kind: str, plain: tuple[Pictures, Path], tmp_path: Path
) -> None:
    root = copy_of(plain[1], tmp_path / "store")
    path = {
        "latents": "revisions/000002/buckets/80x48/moments/c/0/0/0/0",
        "captions": "captions/embeddings/c/0/0",
        "null": "captions/null/c/0/0",
    }[kind]
    flip(root / path, 100)
    with pytest.raises(DamageError, match="verify --repair"):
        run(root)
    for name in files_of(plain[1]):
        if name != path:
            assert (root / name).read_bytes() == (plain[1] / name).read_bytes()
    (root / path).write_bytes((plain[1] / path).read_bytes())
    run(root)
    assert verify_store(root).findings == []


def test_an_unfinished_revision_is_finished_first(plain: tuple[Pictures, Path], tmp_path: Path) -> None:
    root = copy_of(plain[1], tmp_path / "store")
    for name in ("manifest.json", "records.parquet", "captions.parquet"):
        (root / "revisions/000003" / name).unlink()
    before = tree_digest(root)
    with pytest.raises(StoreError, match="revision 3 is unfinished"):
        run(root)
    assert tree_digest(root) == before


def test_precompute_says_that_a_compaction_goes_on_first(plain: tuple[Pictures, Path], tmp_path: Path) -> None:
    root = copy_of(plain[1], tmp_path / "store")
    assert dies_at(60, functools.partial(run, root))
    with pytest.raises(StoreError, match="leandit compact"):
        encode(caption_recipe(), plain[0].root, root)
    found = verify_store(root)
    assert (found.compacting, found.complete, found.damaged) == (True, False, False)
