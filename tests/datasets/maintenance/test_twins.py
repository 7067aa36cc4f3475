"""Every small file of a store is there twice: one copy repairs the other, and what both have lost is reported."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from faults import DAMAGES, REVISION_FILES, without_seal
from making import Leandit, caption_recipe, encode, tree_digest
from stores import copy_of, files_of, make_plain, read_all

from leandit.datasets.maintenance.findings import shard_place
from leandit.datasets.maintenance.repair import repair_without_encoding
from leandit.datasets.maintenance.verify import Verification, verify_store
from leandit.datasets.revisions.catalog import read_manifest
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, LeanditError


@pytest.fixture
def root(grown_store: Path, tmp_path: Path) -> Path:
    return copy_of(grown_store, tmp_path / "store")


def small_files(root: Path) -> list[str]:
    """All files but the shards."""
    return [path for path in files_of(root) if not shard_place(path)]


def test_everything_that_is_there_twice_may_be_lost_at_once(grown_store: Path, root: Path) -> None:
    """One copy of each small file, in turns the first and the second, and every ``zarr.json``."""
    for i, path in enumerate(sorted(path for path in small_files(root) if "/twin/" in path)):
        DAMAGES["a flipped bit"][0](root / (path if i % 2 else path.replace("/twin/", "/")))
    for path in small_files(root):
        if path.endswith("zarr.json"):
            (root / path).unlink()
    with pytest.raises(DamageError, match=r"verify .*--repair"):
        read_all(root)
    found = verify_store(root)
    assert len(found.findings) == 3 * len(REVISION_FILES) + sum(
        path.endswith("zarr.json") for path in small_files(grown_store)
    )
    assert repair_without_encoding(root, found).findings == []
    assert tree_digest(root) == tree_digest(grown_store)


@pytest.mark.parametrize(("how", "revision"), [(("half", "a flipped bit"), 1), (("a flipped bit", "half"), 3)])
@pytest.mark.parametrize("name", REVISION_FILES)
def test_what_both_copies_have_lost_is_reported_and_nothing_is_made_worse(
    name: str, revision: int, how: tuple[str, str], grown_store: Path, root: Path
) -> None:
    both = [f"revisions/{revision:06d}/{folder}{name}" for folder in ("", "twin/")]
    for path, damage in zip(both, how, strict=True):
        DAMAGES[damage][0](root / path)
    before = tree_digest(root)
    found = verify_store(root)
    assert found.damaged
    assert {*both} <= {finding.path for finding in found.findings}
    after = repair_without_encoding(root, found)
    assert {*both} <= {finding.path for finding in after.findings}
    kept = tree_digest(root)
    assert kept.keys() == before.keys()
    assert {path for path in before if kept[path] != before[path]} <= {
        path for path in before if path.endswith("zarr.json")
    }
    if revision == 1 or name in ("local.json", "sources.parquet"):
        assert read_all(root) == read_all(grown_store)  # training needs none of these
    else:
        with pytest.raises(LeanditError):
            read_all(root)


def test_a_lost_manifest_does_not_let_a_reader_fall_back_to_an_earlier_revision(grown_store: Path, root: Path) -> None:
    (root / "revisions/000003/manifest.json").unlink()
    with pytest.raises(DamageError, match=r"manifest\.json' is missing.*verify .*--repair.*second copy"):
        LatentStore(root)
    assert len(LatentStore(root, revision=2)) == len(LatentStore(grown_store, revision=2))
    repair_without_encoding(root, verify_store(root))
    assert LatentStore(root).revision == 3


def test_a_table_that_another_revision_wrote_is_not_taken_for_a_copy(grown_store: Path, root: Path) -> None:
    for name in REVISION_FILES:
        shutil.copyfile(grown_store / "revisions/000002" / name, root / "revisions/000003" / name)
        found = verify_store(root)
        assert [finding.path for finding in found.findings] == [f"revisions/000003/{name}"]
        assert repair_without_encoding(root, found).findings == []
    assert tree_digest(root) == tree_digest(grown_store)


def left_behind(found: Verification) -> set[str]:
    return {finding.path for finding in found.findings if finding.cause == "abandoned"}


def test_the_shards_of_a_complete_revision_whose_folder_is_lost_are_named_and_stay(
    grown_store: Path, root: Path
) -> None:
    """They are all that is left of it."""
    shutil.rmtree(root / "revisions/000003")
    (root / "notes.txt").write_text("of the user")
    found = verify_store(root)
    assert found.damaged
    newest = {path for path in files_of(grown_store) if shard_place(path)} - {
        entry.path for entry in read_manifest(root, 2).files
    }
    assert newest
    assert newest <= left_behind(found)
    line = next(finding.line() for finding in found.findings if finding.cause == "abandoned")
    assert "a later one may have been complete. Restore its folder" in line
    after = repair_without_encoding(root, found)
    assert after.findings == found.findings
    assert repair_without_encoding(root, after).findings == found.findings  # a second one removes nothing either
    shutil.copytree(grown_store / "revisions/000003", root / "revisions/000003")
    (root / "notes.txt").unlink()
    assert repair_without_encoding(root, verify_store(root)).findings == []
    assert tree_digest(root) == tree_digest(grown_store)


@pytest.fixture
def given_up(grown_store: Path, root: Path) -> Path:
    """A store of three revisions, and what a fourth one, whose folder was removed, had encoded."""
    for path in ("buckets/64x64/moments/c/900/0/0/0", "buckets/64x64/features/dino/patches/c/0/0/0"):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text("left behind")
    return root


def test_repair_removes_what_a_revision_that_was_given_up_left_behind(
    leandit: Leandit, grown_store: Path, given_up: Path
) -> None:
    ended = leandit("verify", given_up)
    assert ended.code == 0
    assert "state       whole, with warnings" in ended.out
    assert "nothing reads it: 'leandit verify --repair' removes it" in ended.out
    assert leandit("verify", given_up, "--repair").code == 0
    ended = leandit("verify", given_up)
    assert (ended.code, ended.out.rstrip().endswith("state       whole")) == (0, True)
    assert tree_digest(given_up) == tree_digest(grown_store)
    assert not (given_up / "buckets/64x64/features").exists()


@pytest.mark.parametrize("seconds", [1, 3600])
def test_repair_removes_no_shard_while_another_process_may_write_it(seconds: int, given_up: Path) -> None:
    lease = given_up / "leases/4-buckets-64x64-0.lock"
    lease.parent.mkdir()
    lease.touch()
    touched = lease.stat().st_mtime - seconds
    os.utime(lease, (touched, touched))
    before = left_behind(verify_store(given_up))
    assert len(before) == 2
    assert left_behind(repair_without_encoding(given_up, verify_store(given_up))) == (before if seconds == 1 else set())


@pytest.mark.usefixtures("small")
def test_growth_that_is_given_up_leaves_nothing_once_it_is_repaired(leandit: Leandit, tmp_path: Path) -> None:
    images, store = make_plain(tmp_path)
    before = tree_digest(store)
    for i in (20, 21, 22):
        images.put(i, words=" and a yellow star")
    images.write()
    without_seal(lambda: encode(caption_recipe(), images.root, store))
    shutil.rmtree(store / "revisions/000002")
    assert len(left_behind(verify_store(store))) > 2
    assert leandit("verify", store, "--repair").code == 0
    assert tree_digest(store) == before
    encode(caption_recipe(), images.root, store)
    ended = leandit("verify", store)
    assert (ended.code, ended.out.rstrip().endswith("state       whole")) == (0, True)


def test_repair_keeps_the_shards_of_an_unfinished_revision(unfinished: Path) -> None:
    commit = next(unfinished.glob("revisions/000001/commits/buckets/*/*.json"))
    commit.unlink()  # its shard is written, and its commit record is not
    before = {path for path in files_of(unfinished) if shard_place(path)}
    repair_without_encoding(unfinished, verify_store(unfinished))
    assert {path for path in files_of(unfinished) if shard_place(path)} == before


def test_without_an_intact_manifest_no_shard_counts_as_abandoned(root: Path) -> None:
    for path in root.glob("revisions/000003/**/manifest.json"):
        path.unlink()
    before, found = files_of(root), verify_store(root)
    assert "abandoned" not in {finding.cause for finding in found.findings}
    repair_without_encoding(root, found)
    assert files_of(root) == before
