"""A copy of a revision's files that is of another store, as valid as the right one: it is replaced, or nothing is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from making import Leandit, encode, label_recipe, smooth_image, tree_digest, write_metadata
from stores import copy_of

from leandit.datasets.loader import make_loader
from leandit.datasets.store import LatentStore

COUNT = 6
CASES = ("one revision", "the first of two", "the second of two", "the same images, other labels")
TABLES = ("manifest.json", "records.parquet", "captions.parquet")
LOCAL = ("local.json", "sources.parquet")


def make_source(root: Path, *, seed: int, shift: int) -> Path:
    """Images with labels from a table."""
    (root / "images").mkdir(parents=True)
    for i in range(COUNT):
        smooth_image(i + seed).save(root / f"images/{i}.png")
    rows = [{"file_name": f"images/{i}.png", "label": f"class{(i + shift) % 3}"} for i in range(COUNT)]
    write_metadata(root, rows)
    return root


def grow(source: Path, *, seed: int, shift: int) -> None:
    smooth_image(100 + seed).save(source / "images/new.png")
    rows = [{"file_name": f"images/{i}.png", "label": f"class{(i + shift) % 3}"} for i in range(COUNT)]
    write_metadata(source, [*rows, {"file_name": "images/new.png", "label": "class0"}])


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stores of two revisions: ours, one of other images, and one of the same images with other labels."""
    root, made = tmp_path_factory.mktemp("stores"), dict[str, Path]()
    for name, seed, shift in (("ours", 0, 0), ("other", 50, 1), ("labels", 0, 1)):
        source = make_source(root / f"{name} source", seed=seed, shift=shift)
        encode(label_recipe(), source, root / name)
        made[f"{name} of one"] = copy_of(root / name, root / f"{name} of one")
        grow(source, seed=seed, shift=shift)
        encode(label_recipe(), source, root / name)
        made[name] = root / name
    return made


def labels_read(store: Path) -> dict[str, int]:
    opened = LatentStore(store)
    keys = opened.records["key"].to_pylist()
    return {
        keys[record]: label
        for batch in make_loader(opened, global_batch=2)
        for record, label in zip(batch.records.tolist(), batch.labels.tolist(), strict=True)
    }


def put(foreign: Path, root: Path, revision: int, names: tuple[str, ...], *, twin: bool) -> set[str]:
    """Replace one copy of some files of a revision by those of another store; their paths."""
    folder = f"revisions/{revision:06d}"
    paths = {f"{folder}/twin/{name}" if twin else f"{folder}/{name}" for name in names}
    for path in paths:
        shutil.copyfile(foreign / folder / Path(path).name, root / path)
    return {path for path in paths if (root / path).read_bytes() != (root / _other(path)).read_bytes()}


def _other(path: str) -> str:
    return path.replace("/twin/", "/") if "/twin/" in path else f"{path[:16]}/twin{path[16:]}"


@pytest.mark.parametrize("twin", [False, True], ids=["first copy", "second copy"])
@pytest.mark.parametrize(
    ("ours", "foreign", "revision"),
    [
        ("ours of one", "other of one", 1),
        ("ours", "other", 1),
        ("ours", "other", 2),
        ("ours of one", "labels of one", 1),
    ],
    ids=CASES,
)
def test_the_copy_of_another_store_is_replaced_by_the_right_one(
    ours: str, foreign: str, revision: int, *, twin: bool, stores: dict[str, Path], leandit: Leandit, tmp_path: Path
) -> None:
    root = copy_of(stores[ours], tmp_path / "store")
    replaced = put(stores[foreign], root, revision, TABLES, twin=twin)
    assert len(replaced) >= 2
    ended = leandit("verify", root)
    assert ended.code == 4
    for path in (*replaced, *map(_other, replaced)):
        assert (f"file '{path}'" in ended.out) == (path in replaced)
    assert leandit("verify", root, "--repair").code == 0
    assert tree_digest(root) == tree_digest(stores[ours])
    assert labels_read(root) == labels_read(stores[ours])


@pytest.mark.parametrize("is_alone", [False, True], ids=["both copies are intact", "the right one is damaged"])
def test_where_nothing_decides_both_copies_are_named_and_nothing_is_overwritten(
    *, is_alone: bool, stores: dict[str, Path], leandit: Leandit, tmp_path: Path
) -> None:
    root = copy_of(stores["ours of one"], tmp_path / "store")
    put(stores["labels of one"], root, 1, TABLES, twin=False)
    if is_alone:
        (root / "revisions/000001/twin/manifest.json").write_bytes(b"{}")
    else:
        shutil.rmtree(root / "revisions/000001/index")  # the shards are those of both
    before = tree_digest(root)
    for arguments in ((), ("--repair",)):
        ended = leandit("verify", root, *arguments)
        assert ended.code == 4
        for path in ("manifest.json", "twin/manifest.json", "records.parquet", "twin/records.parquet"):
            assert f"file 'revisions/000001/{path}': an intact copy of it is of another store" in ended.out
        assert "foreign files" not in ended.out
        assert tree_digest(root) == before


def test_places_of_images_of_another_store_are_not_spread(
    stores: dict[str, Path], leandit: Leandit, tmp_path: Path
) -> None:
    root = copy_of(stores["ours of one"], tmp_path / "store")
    put(stores["other of one"], root, 1, LOCAL, twin=False)
    before = tree_digest(root)
    assert leandit("verify", root, "--repair").code == 4
    assert tree_digest(root) == before
    for name in LOCAL:
        shutil.copyfile(stores["ours"] / "revisions/000002" / name, root / "revisions/000001" / name)
    assert leandit("verify", root, "--repair").code == 0  # of another revision
    assert tree_digest(root) == tree_digest(stores["ours of one"])
