"""The teeth of the crash tests: mistakes that are easily made in a commit protocol, each seeded and each caught.

A mutant is a piece of the real code, changed in the child that runs it. The checks are those of ``test_crash.py``, at
fewer places; the control run shows that each of them passes on the code as it is.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faults import start
from harness import (
    Scenario,
    assert_whole,
    check_dies,
    check_lost_files,
    check_order,
    list_images,
    make_small,
    make_source,
    precompute_command,
    replace_function,
    rewrite,
    save_image,
    tree,
)

from leandit.datasets.disk import files, strays
from leandit.datasets.disk.files import TEMPORARY_PREFIX, Failpoint
from leandit.datasets.disk.hashing import canonical_json
from leandit.datasets.errors import StoreError
from leandit.datasets.revisions import catalog, commits, merge, plan, seal
from leandit.datasets.revisions.plan import read_plan
from leandit.datasets.revisions.writer import StoreWriter
from leandit.datasets.store import LatentStore
from leandit.precompute import pipeline
from leandit.precompute.planning import compare, opening, planner
from leandit.precompute.run import columns
from leandit.precompute.sharing import leases
from leandit.precompute.sources.files.record import SourceRecord
from leandit.precompute.sources.listing.listing import record_batches, spool

Change = Callable[[], None] | None
REVISION = "revisions/000001"


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        yield


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    """A first precompute by the code as it is."""
    place = tmp_path_factory.mktemp("first")
    return Scenario(place, precompute_command(make_source(place / "source"))).undisturbed()


# --- Checks -----------------------------------------------------------------------------------------------------------


def same_bytes(first: Scenario, change: Change) -> Scenario:
    """Nobody disturbs it, and it comes out as ever; returns the changed scenario."""
    changed = replace(first, change=change)
    with changed.store() as store:
        outcome = changed.run(store)
        assert outcome.code == 0, outcome.message
        assert_whole(store, first, "undisturbed")
    return replace(changed, operations=outcome.operations, fsyncs=outcome.fsyncs)


def crash_points(first: Scenario, change: Change) -> None:
    """Dying around the commit of one shard, around the seal, and in the plan."""
    changed = same_bytes(first, change)
    names = list(changed.operations)
    record = [i for i, name in enumerate(names) if name == "rename 000000.json"][-1]
    check_dies(changed, [*range(record - 14, record + 2, 2), record + 1, *range(len(names) - 14, len(names), 3), 4, 9])


def right_order(first: Scenario, change: Change) -> None:
    check_order(same_bytes(first, change))


def other_recipe_is_refused(first: Scenario, change: Change) -> None:
    """An unfinished store of another recipe is refused for it, and nothing changes."""
    changed = replace(first, change=change)
    other = replace(changed, command=precompute_command(first.place / "source", "vae.keep=mean"))
    with changed.store() as store:
        assert changed.run(store, Failpoint("die", len(first.operations) // 2)).died
        before = {name: content for name, content in tree(store).items() if TEMPORARY_PREFIX not in name}
        outcome = other.run(store)
        assert "FingerprintMismatch" in outcome.error, f"it was not refused: {outcome.message}"
        assert tree(store) == before


def flipped_record_is_not_trusted(first: Scenario, change: Change) -> None:
    """A digit of a commit record differs, the JSON is valid: its shard is made again."""
    changed = replace(first, change=change)
    with changed.store() as store:
        assert changed.run(store, Failpoint("die", len(first.operations) - 12)).died
        path = store / REVISION / "commits/buckets/32x32/000000.json"
        record = json.loads(path.read_text())
        record["statistics"]["count"] += 1
        path.write_bytes(canonical_json(record))
        outcome = changed.run(store)
        assert outcome.code == 0, outcome.message
        assert_whole(store, first, "a digit of a commit record differs")


def every_record_is_counted(first: Scenario, change: Change) -> None:
    """Planned = stored + rejected, each reject with its stage and a reason; none twice."""
    changed = replace(first, change=change)
    with changed.store() as store:
        outcome = changed.run(store)
        assert outcome.code == 0, outcome.message
        opened = LatentStore(store)
        assert opened.manifest is not None
        counted = opened.manifest.num_planned, opened.manifest.num_stored, opened.manifest.num_rejected
        assert counted == (8, 6, 2)
        rows = opened.records.to_pylist()
        assert sorted(row["key"] for row in rows) == [f"images/{i}.png" for i in range(8)]
        rejected = {row["key"]: row["stage"] for row in rows if row["status"] == "rejected" and row["reason"]}
        assert rejected == {"images/2.png": "scan", "images/5.png": "decode"}


def lost_shards_are_made_again(first: Scenario, change: Change) -> None:
    check_lost_files(replace(first, change=change), only="latents/c/1/|embeddings/c/0")


def seal_wants_all(first: Scenario, change: Change) -> None:
    """With any one commit record missing, the seal is refused and there is no manifest."""
    manifest = first.operations.index("rename manifest.json")
    with first.store() as store:
        assert first.run(store, Failpoint("die", manifest)).died
        # Captions first: of the others the merge itself would see that they are missing.
        records = sorted(
            (store / REVISION / "commits").rglob("*.json"), key=lambda path: ("captions" not in path.parts, path)
        )
        for path in records:
            content = path.read_bytes()
            path.unlink()

            def seal_it() -> None:
                if change:
                    change()
                StoreWriter(store, read_plan(store, 1)).seal()

            outcome = start(seal_it).wait()
            assert StoreError.__name__ in outcome.error, f"sealed without '{path.name}': {outcome.message}"
            assert not (store / REVISION / "manifest.json").exists()
            path.write_bytes(content)
    assert len(records) > 5


def first_plan_holds(first: Scenario, change: Change) -> None:
    """Who looked before the first plan was there, and planned another one since, goes on with the first."""
    source = make_source(first.place / f"changing-{random.randrange(1 << 60)}")
    scenario = Scenario(first.place, precompute_command(source)).undisturbed()

    def late() -> None:
        if change:
            change()
        found = pipeline.newest_plan

        def looked_too_early(root: Path) -> Any:
            found(root)  # it sweeps
            return None

        pipeline.newest_plan = looked_too_early

    with scenario.store() as store:
        assert scenario.run(store, Failpoint("die", len(scenario.operations) // 2)).died
        save_image(source, 9, seed=9)
        list_images(source, {i: f"an image of number {i % 4}" for i in [9, *range(8)]})
        outcome = replace(scenario, change=late).run(store)
        assert outcome.code == 0, outcome.message
        assert_whole(store, scenario, "another plan since")


CHECKS = (
    crash_points,
    right_order,
    other_recipe_is_refused,
    flipped_record_is_not_trusted,
    every_record_is_counted,
    lost_shards_are_made_again,
    seal_wants_all,
    first_plan_holds,
)


def mark(check: Callable[..., Any]) -> pytest.MarkDecorator:
    return pytest.mark.slow if check is crash_points else pytest.mark.integration


@pytest.mark.parametrize("check", [pytest.param(it, marks=mark(it), id=it.__name__) for it in CHECKS])
def test_the_code_as_it_is_passes(check: Callable[[Scenario, Change], None], first: Scenario) -> None:
    check(first, None)


# --- Mutants ----------------------------------------------------------------------------------------------------------


def rewritten(owner: Any, name: str, *changes: tuple[str, str]) -> Callable[[], None]:
    return lambda: rewrite(owner, name, *changes)


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    return lambda: replace_function(owner, name, function)


def is_committed_by_its_files(self: StoreWriter, task: tuple[str, int]) -> bool:
    return all((self.root / array.shard_path(task[1])).is_file() for array in self.plan.layout.parts[task[0]].arrays)


def planned_from(change: Callable[[Sequence[SourceRecord]], Sequence[SourceRecord]]) -> Callable[[], None]:
    """Plan other records than those that are listed."""

    def mutant() -> None:
        fresh = compare.all_fresh
        planner.all_fresh = lambda records: fresh(spool(record_batches(change(records)), lambda _: None))

    return mutant


def noise_is_keyed_by_process() -> None:
    draw = columns.sample_once
    columns.sample_once = lambda moments, records: draw(moments, records + os.getpid())


def lease_stands_for_a_commit() -> None:
    missing = "if not self.is_committed(task)]", "if not (self.is_committed(task) or self._leased(task))]"
    rewrite(StoreWriter, "missing_tasks", missing)

    def leased(self: StoreWriter, task: tuple[str, int]) -> bool:
        part, shard = task
        return (self.root / f"leases/{self.plan.revision}-{part.replace('/', '-')}-{shard}.lock").exists()

    StoreWriter._leased = leased  # pyright: ignore[reportAttributeAccessIssue]


FSYNC = "os.fsync(descriptor)", "pass"
LAST, RESULTS = "self._count(record)", "write_atomic(self.root / results_path, [data])"
SHARD = "write_atomic(self.root / layout.shard_path(shard), parts)"
LATER = "for path, parts in later:\n        write_atomic(self.root / path, parts)"
NAMES = "for name in [name for name in files if name != MANIFEST]:"
EARLY = 'write_unless_same(root / f"{prefix}{MANIFEST}", files[MANIFEST])'
SEAL = "write_seal(self.root, files, manifest)"

MUTANTS: dict[str, tuple[Callable[[], None], Callable[[Scenario, Change], Any]]] = {
    "commit record before its data": (
        rewritten(
            StoreWriter,
            "commit",
            ("files = []", "files, later = [], []"),
            (SHARD, "later.append((layout.shard_path(shard), parts))"),
            (LAST, f"{LAST}\n    {LATER}"),
        ),
        crash_points,
    ),
    "shard counts when its files are there": (
        replaced(StoreWriter, "is_committed", is_committed_by_its_files),
        crash_points,
    ),
    "temporaries are not swept": (replaced(strays, "sweep_strays", lambda folder: []), crash_points),
    "leases of the dead stay": (
        rewritten(
            leases.Leases, "sweep", ("path.unlink(missing_ok=True)", "pass"), ('self._folder.glob("*.lock")', "[]")
        ),
        crash_points,
    ),
    "fingerprint is not compared": (replaced(opening, "check_fingerprint", lambda *_: None), other_recipe_is_refused),
    "file is not synced": (rewritten(files, "_write_file", ('_step("sync", path)', "pass"), FSYNC), right_order),
    "sync is only counted": (rewritten(files, "_write_file", FSYNC), right_order),
    "folder is not synced": (rewritten(files, "write_atomic", ("fsync_folder(path.parent)", "pass")), right_order),
    "written under its final name": (
        rewritten(files, "write_atomic", ("temporary_beside(path)", "path")),
        crash_points,
    ),
    "renamed before it is written": (
        rewritten(
            files,
            "write_atomic",
            ("_write_file(temporary, parts)", '_write_file(temporary, b"")'),
            ("_rename(temporary, path)", "_rename(temporary, path)\n        _write_file(path, parts)"),
        ),
        crash_points,
    ),
    "commit record is not hashed": (
        rewritten(catalog, "read_hashed", ("if getattr(file, kind.HASH) != ", "if 0 and getattr(file, kind.HASH) != ")),
        flipped_record_is_not_trusted,
    ),
    "shards are trusted by their size": (
        rewritten(commits, "read_commit", ("if check_bytes and", "if False and")),
        lost_shards_are_made_again,
    ),
    "manifest before the tables": (
        rewritten(seal, "write_seal", (NAMES, f"{EARLY}\n    {NAMES}")),
        right_order,
    ),
    "plan is removed before the manifest": (
        rewritten(StoreWriter, "seal", (SEAL, f"finish_seal(self.root, manifest)\n        {SEAL}")),
        right_order,
    ),
    "results follow their record": (
        rewritten(StoreWriter, "commit", (RESULTS, "pass"), (LAST, f"{LAST}\n    {RESULTS}")),
        right_order,
    ),
    "reject is not counted": (
        rewritten(
            merge.Merge,
            "records",
            ("np.any([state == REJECTED for state in states], axis=0)", "np.zeros(len(states[0]), bool)"),
        ),
        every_record_is_counted,
    ),
    "rejected record is left out": (  # as most tools do: what cannot be encoded is simply not there
        planned_from(lambda records: [one for one in records if not one.key.endswith("2.png")]),
        every_record_is_counted,
    ),
    "noise is keyed by process": (noise_is_keyed_by_process, same_bytes),
    "rows are in an order of the process": (
        planned_from(lambda records: random.Random(os.getpid()).sample(records, len(records))),
        same_bytes,
    ),
    "lease stands for a commit": (lease_stands_for_a_commit, crash_points),
    "seal does not look": (
        rewritten(StoreWriter, "seal", ("if missing := self.missing_tasks():", "if missing := []:")),
        seal_wants_all,
    ),
    "second coordinator overwrites the plan": (
        rewritten(plan, "freeze_plan", ("replace=False", "replace=True")),
        first_plan_holds,
    ),
}
SHOWN = ("commit record before its data", "folder is not synced")  # that deaths at many places and the order are seen


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        pytest.param(mutant, check, marks=() if name in SHOWN else mark(check), id=name)
        for name, (mutant, check) in MUTANTS.items()
    ],
)
def test_a_mutant_is_caught(
    mutant: Callable[[], None], check: Callable[[Scenario, Change], Any], first: Scenario
) -> None:
    applies = start(mutant).wait()
    assert applies.code == 0, applies.message  # else every check would fail, for the wrong reason
    with pytest.raises(AssertionError) as caught:
        check(first, mutant)
    broken = re.search(r"\b(Name|Syntax|Type|Attribute|Import)Error\b", str(caught.value))
    assert not broken, f"the mutant does not run: {caught.value}"
