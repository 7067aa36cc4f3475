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
    start,
    tree,
)

from leandit.datasets.disk import files, strays
from leandit.datasets.disk.files import TEMPORARY_PREFIX, Failpoint
from leandit.datasets.disk.hashing import canonical_json
from leandit.datasets.errors import StoreError
from leandit.datasets.format import schema
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


def marks(check: Callable[..., Any], mutant: Callable[[], None] | None = None) -> list[pytest.MarkDecorator]:
    """By default one mutant shows that deaths at many places are seen, another that the order is."""
    if mutant and mutant.__name__ in ("commit_record_before_its_data", "folder_is_not_synced"):
        return []
    return [pytest.mark.slow if check is crash_points else pytest.mark.integration]


@pytest.mark.parametrize("check", [pytest.param(it, marks=marks(it), id=it.__name__) for it in CHECKS])
def test_the_code_as_it_is_passes(check: Callable[[Scenario, Change], None], first: Scenario) -> None:
    check(first, None)


# --- Mutants ----------------------------------------------------------------------------------------------------------


def commit_record_before_its_data() -> None:
    rewrite(
        StoreWriter,
        "commit",
        ("files = []", "files, later = [], []"),
        (
            "write_atomic(self.root / layout.shard_path(shard), parts)",
            "later.append((layout.shard_path(shard), parts))",
        ),
        (
            "self._count(record)",
            "self._count(record)\n    for path, parts in later:\n        write_atomic(self.root / path, parts)",
        ),
    )


def shard_counts_when_its_files_are_there() -> None:
    def is_committed(self: StoreWriter, task: tuple[str, int]) -> bool:
        return all(
            (self.root / array.shard_path(task[1])).is_file() for array in self.plan.layout.parts[task[0]].arrays
        )

    replace_function(StoreWriter, "is_committed", is_committed)


def temporaries_are_not_swept() -> None:
    replace_function(strays, "sweep_strays", lambda folder: [])


def leases_of_the_dead_stay() -> None:
    kept = ("path.unlink(missing_ok=True)", "pass"), ('self._folder.glob("*.lock")', "[]")
    rewrite(leases.Leases, "sweep", *kept)


def fingerprint_says_nothing() -> None:
    replace_function(schema.StoreSpec, "identity", lambda self: {})


def fingerprint_is_not_compared() -> None:
    replace_function(opening, "check_fingerprint", lambda *_: None)


def file_is_not_synced() -> None:
    rewrite(files, "_write_file", ('_step("sync", path)', "pass"), ("os.fsync(descriptor)", "pass"))


def sync_is_only_counted() -> None:
    rewrite(files, "_write_file", ("os.fsync(descriptor)", "pass"))


def folder_is_not_synced() -> None:
    rewrite(files, "write_atomic", ("fsync_folder(path.parent)", "pass"))


def written_under_its_final_name() -> None:
    rewrite(files, "write_atomic", ("temporary_beside(path)", "path"))


def renamed_before_it_is_written() -> None:
    rewrite(
        files,
        "write_atomic",
        ("_write_file(temporary, parts)", '_write_file(temporary, b"")'),
        ("_rename(temporary, path)", "_rename(temporary, path)\n        _write_file(path, parts)"),
    )


def commit_record_is_not_hashed() -> None:
    rewrite(catalog, "read_hashed", ("if getattr(file, kind.HASH) != ", "if False and getattr(file, kind.HASH) != "))


def shards_are_trusted_by_their_size() -> None:
    rewrite(commits, "read_commit", ("if check_bytes and", "if False and"))


def manifest_before_the_tables() -> None:
    names = "for name in [name for name in files if name != MANIFEST]:"
    early = 'write_unless_same(root / f"{prefix}{MANIFEST}", files[MANIFEST])'
    rewrite(seal, "write_seal", (names, f"{early}\n    {names}"))


def plan_is_removed_before_the_manifest() -> None:
    rewrite(
        StoreWriter,
        "seal",
        (
            "write_seal(self.root, files, manifest)",
            "finish_seal(self.root, manifest)\n        write_seal(self.root, files, manifest)",
        ),
    )


def results_follow_their_record() -> None:
    write = "write_atomic(self.root / results_path, [data])"
    last = "self._count(record)"
    rewrite(StoreWriter, "commit", (write, "pass"), (last, f"{last}\n    {write}"))


def reject_is_not_counted() -> None:
    found = "np.any([state == REJECTED for state in states], axis=0)"
    rewrite(merge.Merge, "records", (found, "np.zeros(len(states[0]), bool)"))


def rejected_record_is_left_out() -> None:
    """As most tools do: what cannot be encoded is simply not there."""
    patch_fresh(lambda records: [one for one in records if not one.key.endswith("2.png")])


def patch_fresh(change: Callable[[Sequence[SourceRecord]], Sequence[SourceRecord]]) -> None:
    """Plan other records than those that are listed."""
    fresh = compare.all_fresh
    planner.all_fresh = lambda records: fresh(spool(record_batches(change(records)), lambda _: None))


def noise_is_keyed_by_process() -> None:
    draw = columns.sample_once
    columns.sample_once = lambda moments, records: draw(moments, records + os.getpid())


def rows_are_in_an_order_of_the_process() -> None:
    patch_fresh(lambda records: random.Random(os.getpid()).sample(records, len(records)))


def lease_stands_for_a_commit() -> None:
    rewrite(
        StoreWriter,
        "missing_tasks",
        ("if not self.is_committed(task)]", "if not (self.is_committed(task) or self._leased(task))]"),
    )

    def leased(self: StoreWriter, task: tuple[str, int]) -> bool:
        part, shard = task
        return (self.root / f"leases/{self.plan.revision}-{part.replace('/', '-')}-{shard}.lock").exists()

    StoreWriter._leased = leased  # pyright: ignore[reportAttributeAccessIssue]


def seal_does_not_look() -> None:
    rewrite(StoreWriter, "seal", ("if missing := self.missing_tasks():", "if missing := []:"))


def second_coordinator_overwrites_the_plan() -> None:
    rewrite(plan, "freeze_plan", ("replace=False", "replace=True"))


MUTANTS = [
    (commit_record_before_its_data, crash_points),
    (shard_counts_when_its_files_are_there, crash_points),
    (temporaries_are_not_swept, crash_points),
    (leases_of_the_dead_stay, crash_points),
    (fingerprint_says_nothing, other_recipe_is_refused),
    (fingerprint_is_not_compared, other_recipe_is_refused),
    (file_is_not_synced, right_order),
    (sync_is_only_counted, right_order),
    (folder_is_not_synced, right_order),
    (written_under_its_final_name, crash_points),
    (renamed_before_it_is_written, crash_points),
    (commit_record_is_not_hashed, flipped_record_is_not_trusted),
    (shards_are_trusted_by_their_size, lost_shards_are_made_again),
    (manifest_before_the_tables, crash_points),
    (manifest_before_the_tables, right_order),
    (plan_is_removed_before_the_manifest, right_order),
    (results_follow_their_record, right_order),
    (reject_is_not_counted, every_record_is_counted),
    (rejected_record_is_left_out, every_record_is_counted),
    (noise_is_keyed_by_process, same_bytes),
    (rows_are_in_an_order_of_the_process, same_bytes),
    (lease_stands_for_a_commit, crash_points),
    (seal_does_not_look, seal_wants_all),
    (second_coordinator_overwrites_the_plan, first_plan_holds),
]


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        pytest.param(mutant, check, marks=marks(check, mutant), id=f"{mutant.__name__}-{check.__name__}")
        for mutant, check in MUTANTS
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
    print(f"{mutant.__name__}: {re.sub(chr(10) + '.*', '', str(caught.value), flags=re.DOTALL)[:150]}")
