"""Stores of several encoders and features with additions: bit flips, repair, deep verification, company and kill -9."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import DAMAGES, encode_wrongly
from harness import Scenario, assert_true_so_far, assert_whole, precompute_command
from making import lasting_digest, store_digest, tree_digest
from stores import SHARD_ROWS, Everything, checked, copy_of, deep, files_of, several_shards

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


@pytest.mark.parametrize("damages", [pytest.param(5, id="5"), pytest.param(400, id="400", marks=LONG)])
def test_a_repair_brings_every_byte_back(damages: int, everything: Everything, tmp_path: Path) -> None:
    """All but an image that was replaced, and so is gone."""
    replaced = LatentStore(everything.added, revision=1).record("images/1.png")
    lost, kept = (replaced.bucket, 1, replaced.row // SHARD_ROWS), 0
    whole, root = tree_digest(everything.added), copy_of(everything.added, tmp_path / "store")
    for number, path in enumerate(random.Random(START).choices(files_of(root), k=damages)):
        how = ("a flipped bit", "gone", "half")[number % 3]
        DAMAGES[how][0](root / path)
        found, _ = checked(root, everything.source_then, repair=True)
        if found.findings:
            assert {finding.cause for finding in found.findings} == {"not_reproduced"}, (how, path)
            assert {(one.bucket, one.revision, one.shard) for one in found.findings} == {lost}, (how, path)
            root, kept = copy_of(everything.added, tmp_path / "store"), kept + 1
            continue
        assert not found.damaged, (how, path)
        assert tree_digest(root) == whole, (how, path)
    assert kept <= damages // 4
    print(f"{damages} damages, {kept} of them to rows whose image is gone")


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
    first = [
        array.removesuffix("_flip").replace("cls_scales", "cls").replace("scales", "embeddings") for array in WRONG
    ]
    assert sorted(finding.path.partition("/c/")[0] for finding in found) == sorted(first)
    assert {finding.revision for finding in found} == {3}


def test_a_device_that_rounds_otherwise_is_no_damage(everything: Everything, tmp_path: Path) -> None:
    found = deep(planted(everything, tmp_path / "store", 0.008), everything.source_then)
    assert (found.findings, found.num_close > 3) == ([], True)


@pytest.fixture(scope="module")
def addition(everything: Everything, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    """Text encoders and features are added to a store of two revisions."""
    command = precompute_command(everything.source_then, other=everything.recipe)
    scenario = Scenario(tmp_path_factory.mktemp("addition"), command, everything.before).undisturbed()
    added = {f"store/{path}": content for path, content in store_digest(everything.added).items()}
    whole = {name: content for name, content in scenario.whole.items() if not name.endswith(("/", "/local.json"))}
    assert whole == added
    return scenario


@pytest.mark.parametrize("kills", [pytest.param(1, id="1 kill"), pytest.param(20, id="20 kills", marks=LONG)])
def test_an_addition_killed_at_any_time_ends_in_the_same_root_hash(
    kills: int, addition: Scenario, everything: Everything
) -> None:
    rng, killed, began = random.Random(START), 0, time.monotonic()
    with addition.store() as store:
        root_hash = addition.run(store).value["root_hash"]
    seconds = time.monotonic() - began
    while killed < kills:
        with addition.store() as store:
            outcome = None
            while outcome is None or outcome.died:
                child = addition.start(store, own_session=True)
                if killed < kills:
                    time.sleep(rng.uniform(0, seconds))
                    child.signal(signal.SIGKILL, group=os.getsid(child.pid) == child.pid)
                outcome = child.wait()
                killed += outcome.died
                for path, content in lasting_digest(everything.before).items():
                    assert (store / path).read_bytes() == content, path
                assert_true_so_far(store, addition, f"after kill {killed}")
            assert outcome.code == 0, outcome.message
            assert_whole(store, addition, f"after kill {killed}")
            assert LatentStore(store).root_hash == root_hash
