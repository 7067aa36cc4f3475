"""Revisions are a chain: one of another store in it, or one that is missing, is named and never read in silence."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
from making import LABEL_RECIPE, Leandit, encode, label_recipe, smooth_image, tree_digest, write_metadata
from stores import copy_of

from leandit.datasets.loader import make_loader
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, StoreWarning

COUNT = 4
PRECOMPUTE = ("precompute", "imagenet-256", *(word for setting in LABEL_RECIPE for word in ("--set", setting)))
TRAIN = ("model.name=DiT-S/4", "run.compile=false", "run.global_batch=2", "run.steps=2", "run.checkpoint_every=2")


def write_source(source: Path, count: int, *, shift: int) -> None:
    """Images that do not depend on ``shift``, with labels that do."""
    (source / "images").mkdir(parents=True, exist_ok=True)
    for i in range(count):
        smooth_image(i).save(source / f"images/{i}.png")
    rows = [{"file_name": f"images/{i}.png", "label": f"class{(i + shift) % 3}"} for i in range(count)]
    write_metadata(source, rows)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two stores of three revisions, with equal latents and other labels."""
    root = tmp_path_factory.mktemp("stores")
    for name, shift in (("ours", 0), ("theirs", 1)):
        for count in (COUNT, COUNT + 1, COUNT + 2):
            write_source(root / f"{name} source", count, shift=shift)
            encode(label_recipe(), root / f"{name} source", root / name)
    return {name: root / name for name in ("ours", "theirs")}


@pytest.fixture
def store(stores: dict[str, Path], tmp_path: Path) -> Path:
    return copy_of(stores["ours"], tmp_path / "store")


def folder(root: Path, revision: int) -> Path:
    return root / f"revisions/{revision:06d}"


def replace_revision(root: Path, other: Path, revision: int) -> None:
    shutil.rmtree(folder(root, revision))
    shutil.copytree(folder(other, revision), folder(root, revision))


def remove_manifests(root: Path, revision: int) -> None:
    (folder(root, revision) / "manifest.json").unlink()
    (folder(root, revision) / "twin/manifest.json").unlink()


def labels_of(store: LatentStore) -> dict[str, int]:
    keys = store.records["key"].to_pylist()
    return {
        keys[record]: label
        for batch in make_loader(store, global_batch=2)
        for record, label in zip(batch.records.tolist(), batch.labels.tolist(), strict=True)
    }


@pytest.mark.parametrize("revisions", [(1,), (2,), (3,), (1, 2), (2, 3)], ids=str)
def test_a_revision_of_a_store_with_other_labels_is_named_by_verify_and_never_read(
    revisions: Sequence[int], stores: dict[str, Path], store: Path, leandit: Leandit
) -> None:
    for revision in revisions:
        replace_revision(store, stores["theirs"], revision)
    before = tree_digest(store)

    broken = {
        revision
        for later in (2, 3)
        for revision in (later - 1, later)
        if (later in revisions) != (later - 1 in revisions)
    }
    for arguments in ((), ("--quick",), ("--repair",)):
        ended = leandit("verify", store, *arguments)
        assert ended.code == 4
        for revision in (1, 2, 3):
            named = f"file 'revisions/{revision:06d}/manifest.json'" in ended.out
            assert named == (revision in broken)
        assert "one of them is of another store" in ended.out
        assert tree_digest(store) == before

    for revision in (0, 1, 2, 3):
        with pytest.raises(DamageError, match=r"revision \d was built on root hash .* is of another store\. Restore"):
            LatentStore(store, revision=revision)


def test_no_command_goes_on_with_a_revision_of_another_store(
    stores: dict[str, Path], store: Path, leandit: Leandit, tmp_path: Path
) -> None:
    replace_revision(store, stores["theirs"], 2)
    before = tree_digest(store)
    train = ("train", "dit-s-2-256", "--run", tmp_path / "run", "--set", "model.name=DiT-S/4")
    precompute = (*PRECOMPUTE, "--source", stores["ours"].with_name("ours source"))
    for command in (train, precompute):
        ended = leandit(*command, "--store", store)
        assert (ended.code, "is of another store" in ended.err) == (4, True), command
    assert leandit("compact", store, "--out", tmp_path / "compact").code == 4
    assert not (tmp_path / "compact").exists()
    assert tree_digest(store) == before


@pytest.mark.parametrize("revision", [1, 2])
def test_an_earlier_revision_that_is_gone_is_named_and_the_newest_is_read_with_a_warning(
    revision: int, stores: dict[str, Path], store: Path, leandit: Leandit, tmp_path: Path
) -> None:
    shutil.rmtree(folder(store, revision))
    ended = leandit("verify", store)
    assert ended.code == 4
    assert f"file 'revisions/{revision:06d}/manifest.json'" in ended.out
    assert f"revision {revision + 1} was built on it, and its folder is lost" in ended.out
    with pytest.warns(StoreWarning, match=f"revision {revision} is lost, on which revision {revision + 1} was built"):
        opened = LatentStore(store)
    assert labels_of(opened) == labels_of(LatentStore(stores["ours"]))
    shutil.copytree(folder(stores["ours"], revision), folder(store, revision))
    assert leandit("verify", store).code == 0


def test_the_newest_revision_without_manifests_is_not_left_out_in_silence(
    stores: dict[str, Path], store: Path, leandit: Leandit, tmp_path: Path
) -> None:
    remove_manifests(store, 3)
    before = tree_digest(store)
    lost = r"'revisions/000003/manifest\.json' is lost, so nothing tells what revision 3 holds\. Restore it from a copy"
    with pytest.raises(DamageError, match=lost):
        LatentStore(store)
    for command in (
        ("train", "dit-s-2-256", "--store", store, "--run", tmp_path / "run", "--set", "model.name=DiT-S/4"),
        (*PRECOMPUTE, "--source", stores["ours"].with_name("ours source"), "--store", store),
        ("inspect", store),
        ("compact", store, "--out", tmp_path / "compact"),
    ):
        ended = leandit(*command)
        assert (ended.code, "'revisions/000003/manifest.json' is lost" in ended.err) == (4, True), command
    for arguments in ((), ("--repair",)):
        ended = leandit("verify", store, *arguments)
        assert ended.code == 4
        assert "file 'revisions/000003/manifest.json': the file is missing" in ended.out
        assert tree_digest(store) == before

    # What the message advises: read revision 2 by its number, restore the file, or give revision 3 up.
    opened = LatentStore(store, revision=2)
    assert labels_of(opened) == labels_of(LatentStore(stores["ours"], revision=2))
    shutil.copyfile(folder(stores["ours"], 3) / "manifest.json", folder(store, 3) / "manifest.json")
    assert leandit("verify", store, "--repair").code == 0
    assert tree_digest(store) == tree_digest(stores["ours"])


def test_a_revision_is_given_up_by_removing_its_folder_and_made_again(stores: dict[str, Path], store: Path) -> None:
    remove_manifests(store, 3)
    shutil.rmtree(folder(store, 3))
    with pytest.warns(StoreWarning, match=r"revision 2 is opened, .* revision 3 was complete and its folder is lost"):
        assert len(LatentStore(store)) == COUNT + 1
    encode(label_recipe(), stores["ours"].with_name("ours source"), store)
    assert LatentStore(store).root_hash == LatentStore(stores["ours"]).root_hash
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert labels_of(LatentStore(store)) == labels_of(LatentStore(stores["ours"]))


def test_a_single_revision_without_manifests_is_no_plan_to_go_on_with(
    stores: dict[str, Path], store: Path, leandit: Leandit
) -> None:
    for revision in (2, 3):
        shutil.rmtree(folder(store, revision))
    remove_manifests(store, 1)
    source = stores["ours"].with_name("ours source")
    for command in (("inspect", store), (*PRECOMPUTE, "--source", source, "--store", store)):
        ended = leandit(*command)
        assert (ended.code, "'revisions/000001/manifest.json' is lost" in ended.err) == (4, True), command


def test_a_run_refuses_a_revision_that_was_replaced_and_one_of_another_chain(
    stores: dict[str, Path], store: Path, leandit: Leandit, tmp_path: Path
) -> None:
    sets = [word for setting in TRAIN for word in ("--set", setting)]
    command = ("train", "dit-s-2-256", "--store", store, "--run", tmp_path / "run", *sets)
    assert leandit(*command).code == 0
    shutil.rmtree(store / "revisions")
    shutil.copytree(stores["theirs"] / "revisions", store / "revisions")
    ended = leandit(*command)
    assert ended.code == 3
    assert "started with another store: root_hash of revision 3 was" in ended.err


def test_a_store_at_a_url_is_checked_alike(stores: dict[str, Path], store: Path, tmp_path: Path) -> None:
    def open_copy(root: Path, name: str) -> LatentStore:
        return LatentStore(f"file://{root}", remote={"folder": tmp_path / name})

    assert labels_of(open_copy(store, "whole")) == labels_of(LatentStore(stores["ours"]))
    swapped = copy_of(store, tmp_path / "swapped")
    replace_revision(swapped, stores["theirs"], 2)
    with pytest.raises(DamageError, match="is of another store"):
        open_copy(swapped, "folder of swapped")
    remove_manifests(store, 3)
    with pytest.raises(DamageError, match=r"'revisions/000003/manifest\.json' is lost"):
        open_copy(store, "whole")
    shutil.rmtree(folder(store, 3))
    assert len(open_copy(store, "whole")) == COUNT + 1  # what the local folder had of revision 3 is removed
