"""The teeth of the crash tests: mistakes that are easily made in a commit protocol, each seeded and each caught."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
from faults import start
from stores import ImageSource

from leandit.datasets.disk import files, strays
from leandit.datasets.revisions import commits, seal, writer
from leandit.datasets.revisions.writer import StoreWriter
from leandit.precompute.planning import compare, planner
from leandit.precompute.run import columns
from leandit.precompute.sharing import leases
from leandit.precompute.sources.files.record import SourceRecord
from leandit.precompute.sources.listing.listing import record_batches, spool

Change = Callable[[], None] | None


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        harness.make_small(patch)
        yield


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> harness.Scenario:
    """A first precompute by the code as it is."""
    place = tmp_path_factory.mktemp("first")
    return harness.Scenario(
        place, harness.precompute_command(ImageSource(place / "source", 6, harness.IMAGE_SIZES).root)
    ).undisturbed()


# --- Checks -----------------------------------------------------------------------------------------------------------


def same_bytes(first: harness.Scenario, change: Change) -> harness.Scenario:
    """Nobody disturbs it, and it comes out as ever; returns the changed scenario."""
    changed = replace(first, change=change)
    with changed.store() as store:
        outcome = changed.run(store)
        assert outcome.code == 0, outcome.message
        harness.assert_whole(store, first, "undisturbed")
    return replace(changed, operations=outcome.operations, fsyncs=outcome.fsyncs)


def crash_points(first: harness.Scenario, change: Change) -> None:
    """Dying around the commit of one shard, around the seal, and in the plan."""
    changed = same_bytes(first, change)
    names = list(changed.operations)
    record = [i for i, name in enumerate(names) if name == "rename 000000.json"][-1]
    harness.check_dies(
        changed, [*range(record - 14, record + 2, 2), record + 1, *range(len(names) - 14, len(names), 3), 4, 9]
    )


def right_order(first: harness.Scenario, change: Change) -> None:
    harness.check_order(same_bytes(first, change))


def lost_shards_are_made_again(first: harness.Scenario, change: Change) -> None:
    harness.check_lost_files(replace(first, change=change), only="latents/c/1/|embeddings/c/0")


CHECKS = (crash_points, right_order, lost_shards_are_made_again)


def mark(check: Callable[..., Any]) -> pytest.MarkDecorator:
    return pytest.mark.slow if check is crash_points else pytest.mark.integration


@pytest.mark.parametrize("check", [pytest.param(it, marks=mark(it), id=it.__name__) for it in CHECKS])
def test_the_code_as_it_is_passes(check: Callable[[harness.Scenario, Change], None], first: harness.Scenario) -> None:
    check(first, None)


# --- Mutants ----------------------------------------------------------------------------------------------------------


def rewritten(owner: Any, name: str, *changes: tuple[str, str]) -> Callable[[], None]:
    return lambda: harness.rewrite(owner, name, *changes)


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    return lambda: harness.replace_function(owner, name, function)


def is_committed_by_its_files(self: StoreWriter, task: tuple[str, int]) -> bool:
    return all((self.root / array.shard_path(task[1])).is_file() for array in self.plan.layout.parts[task[0]].arrays)


def rows_are_in_an_order_of_the_process() -> None:
    fresh = compare.all_fresh

    def shuffled(records: Sequence[SourceRecord]) -> Any:
        found = random.Random(os.getpid()).sample(list(records), len(records))
        return fresh(spool(record_batches(found), lambda _: None))

    planner.all_fresh = shuffled


def noise_is_keyed_by_process() -> None:
    draw = columns.sample_once
    columns.sample_once = lambda moments, records: draw(moments, records + os.getpid())


def lease_stands_for_a_commit() -> None:
    missing = "if not self.is_committed(task)]", "if not (self.is_committed(task) or self._leased(task))]"
    harness.rewrite(StoreWriter, "missing_tasks", missing)

    def leased(self: StoreWriter, task: tuple[str, int]) -> bool:
        part, shard = task
        return (self.root / f"leases/{self.plan.revision}-{part.replace('/', '-')}-{shard}.lock").exists()

    StoreWriter._leased = leased  # pyright: ignore[reportAttributeAccessIssue]


def commit_before_its_data(suffix: str) -> Callable[..., int]:
    """A commit that writes the record of a shard before those of its files whose names end so."""

    def commit(self: StoreWriter, part: str, shard: int, arrays: Any, results: Any, **outcomes: Any) -> int:
        write_atomic = writer.write_atomic
        late = []

        def write_or_wait(path: Path, parts: Any) -> None:
            if path.name.endswith(suffix):
                late.append((path, parts))
            else:
                write_atomic(path, parts)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "write_atomic", write_or_wait)
            layouts = self.plan.layout.parts[part]
            written = writer.write_shard(
                self.root, self.plan.revision, layouts, shard, arrays, results, self.spec.latent
            )
        self.record(part, shard, written, **outcomes)
        for path, parts in late:
            write_atomic(path, parts)
        return written.num_bytes

    return commit


FSYNC = "os.fsync(descriptor)", "pass"
NAMES = "for name in [name for name in files if name != MANIFEST]:"
EARLY = 'write_unless_same(root / f"{prefix}{MANIFEST}", files[MANIFEST])'
SEAL = "write_seal(self.root, files, manifest)"

MUTANTS: dict[str, tuple[Callable[[], None], Callable[[harness.Scenario, Change], Any]]] = {
    "commit record before its data": (replaced(StoreWriter, "commit", commit_before_its_data("")), crash_points),
    "shard counts when its files are there": (
        replaced(StoreWriter, "is_committed", is_committed_by_its_files),
        crash_points,
    ),
    "temporaries are not swept": (replaced(strays, "sweep_strays", lambda folder, **options: []), crash_points),
    "leases of the dead stay": (
        rewritten(
            leases.Leases, "sweep", ("path.unlink(missing_ok=True)", "pass"), ('self._folder.glob("*.lock")', "[]")
        ),
        crash_points,
    ),
    "file is not synced": (rewritten(files, "_write_parts", ('_step("sync", path)', "pass"), FSYNC), right_order),
    "sync is only counted": (rewritten(files, "_write_parts", FSYNC), right_order),
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
    "shards are trusted by their size": (
        rewritten(commits, "read_commit", ("if check_bytes and", "if False and")),
        lost_shards_are_made_again,
    ),
    "manifest before the tables": (rewritten(seal, "write_seal", (NAMES, f"{EARLY}\n    {NAMES}")), right_order),
    "plan is removed before the manifest": (
        rewritten(StoreWriter, "seal", (SEAL, f"finish_seal(self.root, manifest)\n        {SEAL}")),
        right_order,
    ),
    "results follow their record": (
        replaced(StoreWriter, "commit", commit_before_its_data(".rows")),
        right_order,
    ),
    "noise is keyed by process": (noise_is_keyed_by_process, same_bytes),
    "rows are in an order of the process": (rows_are_in_an_order_of_the_process, same_bytes),
    "lease stands for a commit": (lease_stands_for_a_commit, crash_points),
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
    mutant: Callable[[], None], check: Callable[[harness.Scenario, Change], Any], first: harness.Scenario
) -> None:
    applies = start(mutant).wait()
    assert applies.code == 0, applies.message  # else every check would fail, for the wrong reason
    with pytest.raises(AssertionError) as caught:
        check(first, mutant)
    broken = re.search(r"\b(Name|Syntax|Type|Attribute|Import)Error\b", str(caught.value))
    assert not broken, f"the mutant does not run: {caught.value}"
