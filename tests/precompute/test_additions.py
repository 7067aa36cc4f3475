"""Stores of several encoders and features with additions: bit flips, repair, deep verification, company and kill -9."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from faults import DAMAGES, encode_wrongly
from harness import Scenario, assert_true_so_far, assert_whole, precompute_command
from making import lasting_digest, store_digest, tree_digest
from stores import SHARD_ROWS, Everything, checked, copy_of, deep, files_of, several_shards

from leandit.datasets.maintenance.findings import shard_place
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.store import LatentStore
from leandit.precompute.sharing import leases

LONG = pytest.mark.slow
START = int(os.environ.get("LEANDIT_SAMPLE", "0"))  # another number samples other operations


@pytest.fixture(scope="module", autouse=True)
def _several_shards() -> Iterator[None]:
    """Plans are laid out in small shards wherever they are read, too."""
    with several_shards(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "EMPTY_SECONDS", 0.2)
        yield


# ------------------------------------------------------------ bit flips and repair


def kind_of(path: str) -> str:
    """What a file is, whatever its bucket, revision and number."""
    parts = [part for part in path.removesuffix(".json").split("/") if not part.isdigit() and part != "revisions"]
    return "/".join("bucket" if part[0].isdigit() else part for part in parts)


def some_of_each_kind(root: Path, count: int, rng: random.Random) -> list[str]:
    """One file of every kind, then any."""
    paths = files_of(root)
    rng.shuffle(paths)
    firsts = list({kind_of(path): path for path in paths}.values())
    return firsts + rng.choices(paths, k=max(0, count - len(firsts)))


@pytest.mark.parametrize("damages", [pytest.param(5, id="5"), pytest.param(400, id="400", marks=LONG)])
def test_a_repair_brings_every_byte_back(damages: int, everything: Everything, tmp_path: Path) -> None:
    """All but an image that was replaced, and so is gone."""
    replaced = LatentStore(everything.added, revision=1).record("images/1.png")
    lost, kept = (replaced.bucket, 1, replaced.row // SHARD_ROWS), 0
    whole, rng = tree_digest(everything.added), random.Random(START)
    root = copy_of(everything.added, tmp_path / "store")
    paths = some_of_each_kind(root, damages, rng)
    for number, path in enumerate(rng.sample(paths, damages) if len(paths) > damages else paths):
        how = ("a flipped bit", "gone", "half")[number % 3]
        DAMAGES[how][0](root / path)
        found, done = checked(root, everything.source_then, repair=True)
        if found.findings:
            assert {finding.cause for finding in found.findings} == {"not_reproduced"}, (how, path)
            assert {(one.bucket, one.revision, one.shard) for one in found.findings} == {lost}, (how, path)
            root, kept = copy_of(everything.added, tmp_path / "store"), kept + 1
            continue
        assert (found.findings, found.damaged) == ([], False), (how, path)
        assert done["before"] >= 1, (how, path)
        assert tree_digest(root) == whole, (how, path)
    assert kept <= damages // 4
    print(f"{damages} damages, {kept} of them to rows whose image is gone")


def test_a_repair_of_many_files_at_once_brings_every_byte_back(everything: Everything, tmp_path: Path) -> None:
    root = copy_of(everything.grown, tmp_path / "store")
    shards = [path for path in files_of(root) if shard_place(path) and "captions" in path]
    shards += [path for path in files_of(root) if "/features/" in path and shard_place(path)]
    source = copy_of(everything.source, tmp_path / "source")
    shutil.copytree(everything.source_then / "images", source / "images", dirs_exist_ok=True)  # what was dropped since
    for path in random.Random(START).sample(shards, 20):
        (root / path).unlink()
    found, _ = checked(root, source, repair=True)
    assert {finding.cause for finding in found.findings} <= {"not_reproduced"}, found.findings
    # The images of rows that were replaced are gone; every other shard is as it was.
    whole, now = tree_digest(everything.grown), tree_digest(root)
    assert {name for name in whole if now.get(name) != whole[name]} == {finding.path for finding in found.findings}


# ------------------------------------------------------------ deep verification


@pytest.mark.parametrize("name", ["added", "grown"])
def test_encoding_again_gives_the_same_bits_of_all_that_was_added(name: str, everything: Everything) -> None:
    root = getattr(everything, name)
    store = LatentStore(root)
    found = deep(root, everything.source if name == "grown" else everything.source_then)
    assert found.findings == []
    assert (found.num_records, found.num_captions) == (len(store), store.captions.num_rows)
    # Of the grown store an image is gone that shared a batch with others.
    assert found.num_exact + found.num_close == found.num_records + found.num_captions
    assert name == "grown" or found.num_close == 0
    few = deep(root, everything.source if name == "grown" else everything.source_then, num_records=3, seed=5)
    assert (few.num_records, few.num_captions) == (3, 3)


WRONG = [
    "buckets/64x64/features/grid/patches_flip",
    "buckets/80x48/features/grid/patches",
    "buckets/48x80/features/token/cls_scales",
    "captions/llm/scales",
    "captions/vector/pooled",
]


def planted(everything: Everything, root: Path, amount: float) -> Path:
    encode_wrongly(everything.recipe, everything.source_then, copy_of(everything.before, root), WRONG, amount)
    return root


def test_deep_finds_every_added_row_that_is_wrong_and_fits_all_checksums(
    everything: Everything, tmp_path: Path
) -> None:
    root = planted(everything, tmp_path / "store", 0.25)
    assert verify_store(root).findings == []
    found = deep(root, everything.source_then).findings
    assert {finding.cause for finding in found} == {"not_reproduced"}
    assert [len(finding.records) for finding in found] == [1] * len(WRONG)
    firsts = [
        array.removesuffix("_flip").replace("cls_scales", "cls").replace("scales", "embeddings") for array in WRONG
    ]
    assert sorted(finding.path.partition("/c/")[0] for finding in found) == sorted(firsts)
    assert {finding.revision for finding in found} == {3}


def test_a_device_that_rounds_otherwise_is_no_damage(everything: Everything, tmp_path: Path) -> None:
    found = deep(planted(everything, tmp_path / "store", 0.008), everything.source_then)
    assert (found.findings, found.num_close > 3) == ([], True)


# ------------------------------------------------------------ kill -9, and company


@pytest.fixture(scope="module")
def addition(everything: Everything, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    """Text encoders and features are added to a store of two revisions."""
    command = precompute_command(everything.source_then, other=everything.recipe)
    scenario = Scenario(tmp_path_factory.mktemp("addition"), command, everything.before).undisturbed()
    added = {f"store/{path}": content for path, content in store_digest(everything.added).items()}
    whole = {name: content for name, content in scenario.whole.items() if not name.endswith(("/", "/local.json"))}
    assert whole == added
    return scenario


def assert_old_files_are_as_they_were(store: Path, everything: Everything) -> None:
    for path, content in lasting_digest(everything.before).items():
        assert (store / path).read_bytes() == content, path


@pytest.mark.parametrize("kills", [pytest.param(2, id="2 kills"), pytest.param(20, id="20 kills", marks=LONG)])
def test_an_addition_killed_at_any_time_ends_in_the_same_root_hash(
    kills: int, addition: Scenario, everything: Everything
) -> None:
    """The long form with the real decoder children, and the whole process group is killed."""
    rng, is_long, killed, stores = random.Random(START), kills > 3, 0, 0
    real = precompute_command(everything.source_then, other=everything.recipe, real_decoders=True)
    scenario = replace(addition, command=real) if is_long else addition
    began = time.monotonic()
    with scenario.store() as store:
        root_hash = scenario.run(store).value["root_hash"]
    seconds = time.monotonic() - began
    while killed < kills:
        with scenario.store() as store:
            while True:
                child = scenario.start(store, own_session=True)
                if killed < kills:
                    time.sleep(rng.uniform(0, seconds))
                    child.signal(signal.SIGKILL, group=os.getsid(child.pid) == child.pid)
                outcome = child.wait()
                killed += outcome.died
                said = f"after kill {killed}"
                assert_old_files_are_as_they_were(store, everything)
                if outcome.code == 0:
                    break
                assert outcome.died, outcome.message
                assert_true_so_far(store, scenario, said)
            assert_whole(store, scenario, said)
            assert LatentStore(store).root_hash == root_hash
        stores += 1
    print(f"{killed} kills over {stores} stores")
