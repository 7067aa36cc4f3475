"""Stage 1 survives death, I/O errors, kill -9, company and a lying disk: the same command again gives the same tree."""

from __future__ import annotations

import collections
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import harness
import pytest
from faults import processes_of_session, start
from stores import ImageSource

from leandit.datasets.disk.files import Failpoint
from leandit.datasets.disk.strays import sweep_strays
from leandit.datasets.store import LatentStore
from leandit.precompute.planning import opening
from leandit.precompute.planning.compare import Options
from leandit.precompute.sharing import leases

LONG, ERRORS = pytest.mark.slow, ("eio", "enospc")
BOTH_ARE_FORKED_SECONDS = 0.3
START = int(os.environ.get("LEANDIT_SAMPLE", "0"))  # another number samples other operations


TRIALS = pytest.mark.parametrize(
    "trials", [pytest.param(2, id="2 trials"), pytest.param(50, id="50 trials", marks=LONG)]
)


def points(scenario: harness.Scenario, step: int) -> range:
    return range(START % step, len(scenario.operations), step)


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        harness.make_small(patch)
        yield


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> harness.Scenario:
    """A first precompute."""
    place = tmp_path_factory.mktemp("first")
    return harness.Scenario(
        place, harness.precompute_command(ImageSource(place / "source", 6, harness.IMAGE_SIZES).root)
    ).undisturbed()


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> harness.Scenario:
    """A second revision: two records new, one changed, one gone and dropped, one with another caption."""
    place = tmp_path_factory.mktemp("growth")
    source = ImageSource(place / "source", 6, harness.IMAGE_SIZES)
    outcome = harness.Scenario(place, harness.precompute_command(source.root)).run(place / "before")
    assert outcome.code == 0, outcome.message
    for number, seed in ((8, 8), (9, 9), (1, 101)):
        source.put(number, seed=seed)
    source.drop(3)
    source.describe(0, " and a cat")
    source.write()
    command = harness.precompute_command(source.root, options=Options(drop_gone=True))
    return harness.Scenario(place, command, place / "before").undisturbed()


@pytest.fixture(scope="module")
def compaction(growth: harness.Scenario, tmp_path_factory: pytest.TempPathFactory) -> harness.Scenario:
    """The compaction of a store with two revisions, into another one."""
    place = tmp_path_factory.mktemp("compaction")
    shutil.copytree(growth.before, place / "before")  # pyright: ignore[reportArgumentType]
    outcome = growth.run(place / "before")
    assert outcome.code == 0, outcome.message
    return harness.Scenario(place, harness.compact_command, place / "before").undisturbed()


def test_the_undisturbed_runs_are_worth_disturbing(
    first: harness.Scenario, growth: harness.Scenario, tmp_path: Path
) -> None:
    """Several shards of each kind, both kinds of reject; and every operation of the I/O layer occurs."""
    with first.store() as path:
        committed = first.run(path).value["committed"]
        parts = collections.Counter(part for part, _ in committed)
        assert parts["buckets/32x32"] >= 3
        assert parts["captions"] >= 2
        store = LatentStore(path)
        assert set(store.records["stage"].to_pylist()) == {None, "scan", "decode"}
    with growth.store() as path:
        assert growth.run(path).code == 0
        store = LatentStore(path)
        assert (store.revision, len(store.records)) == (2, 9)
        assert set(store.records["revision"].to_pylist()) == {1, 2}
    verbs = {operation.split()[0] for operation in first.operations}
    assert verbs == {"folder", "create", "write", "sync", "rename", "remove"}


# Every so manieth operation by default, all of them in the long form.
STEPS = {("first", "die"): 60, ("growth", "die"): 90, ("first", "eio"): 150, ("first", "enospc"): 150}
MORE_STEPS = {("compaction", "die"): 90, **{(name, kind): 100 for name in ("growth", "compaction") for kind in ERRORS}}
DISTURBED = [
    *(pytest.param(*case, step, id=f"{'-'.join(case)}-sample") for case, step in STEPS.items()),
    *(
        pytest.param(*case, step, id=f"{'-'.join(case)}-sample", marks=pytest.mark.integration)
        for case, step in MORE_STEPS.items()
    ),
    *(pytest.param(*case, 1, id=f"{'-'.join(case)}-all", marks=LONG) for case in STEPS | MORE_STEPS),
]


@pytest.mark.parametrize(("name", "kind", "step"), DISTURBED)
def test_a_death_or_an_error_at_any_operation_ends_cleanly_and_the_next_run_comes_out_the_same(
    name: str, kind: str, step: int, request: pytest.FixtureRequest
) -> None:
    scenario: harness.Scenario = request.getfixturevalue(name)
    if kind == "die":
        harness.check_dies(scenario, points(scenario, step))
    else:
        assert harness.check_fails(scenario, kind, points(scenario, step)) > 0


@pytest.mark.parametrize("step", [pytest.param(150, id="sample"), pytest.param(1, id="all", marks=LONG)])
def test_a_resume_that_dies_too_comes_out_the_same(first: harness.Scenario, step: int) -> None:
    """The second death comes soon after the start of the resume, at another place each time."""
    harness.check_dies(first, points(first, step), again_at=lambda at: at * 7 % 40)


def test_writes_that_the_system_takes_in_pieces_come_out_the_same(first: harness.Scenario) -> None:
    assert harness.check_short_writes(first) > 30


def test_every_file_is_durable_before_the_next_is_begun(first: harness.Scenario, growth: harness.Scenario) -> None:
    assert harness.check_order(first) > 30
    assert harness.check_order(growth) > 20


# --- kill -9 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [pytest.param(2, id="2 kills"), pytest.param(200, id="200 kills", marks=LONG)])
def test_a_process_group_killed_at_any_time_loses_and_doubles_nothing(first: harness.Scenario, kills: int) -> None:
    """With the real decoder children, which must not outlive their parent."""
    rng = random.Random(START)
    command = harness.precompute_command(first.place / "source", real_decoders=True)
    scenario = replace(first, command=command)
    began = time.monotonic()
    with scenario.store() as store:
        assert scenario.run(store).code == 0
    seconds = time.monotonic() - began
    killed = stores = 0
    sessions: list[int] = []
    while killed < kills:
        with scenario.store() as store:
            while True:
                child = scenario.start(store, own_session=True)
                if killed < kills:
                    time.sleep(rng.uniform(0, seconds))
                    # It may not have made its session yet: then it has no children either.
                    child.signal(signal.SIGKILL, group=os.getsid(child.pid) == child.pid)
                outcome = child.wait()
                sessions.append(child.pid)
                killed += outcome.died
                said = f"after kill {killed}"
                if outcome.code == 0:
                    break
                assert outcome.died, outcome.message
                harness.assert_true_so_far(store, scenario, said)
            harness.assert_whole(store, scenario, said)
            keys = LatentStore(store).records["key"].to_pylist()
            assert sorted(keys) == sorted({f"images/{i}.png" for i in range(8)})
        stores += 1
    for session in sessions:
        assert_gone(session)
    print(f"{killed} kills over {stores} stores")


def assert_gone(session: int) -> None:
    """No process of a session is left; a decoder child notices within seconds that its parent is gone."""
    deadline = time.monotonic() + 240
    while left := processes_of_session(session):
        assert time.monotonic() < deadline, f"processes {left} outlive their parent"
        time.sleep(0.01)


# --- Company ----------------------------------------------------------------------------------------------------------


@TRIALS
@pytest.mark.parametrize("kind", ["first", "growth"])
def test_two_coordinators_make_one_store(kind: str, trials: int, request: pytest.FixtureRequest) -> None:
    """Whether they begin together or at what a dead one left; that a shard is made twice is allowed, and rare."""
    scenario: harness.Scenario = request.getfixturevalue(kind)
    made = twice = 0
    rng = random.Random(START)
    for trial in range(trials):
        with scenario.store() as store:
            if trial % 2:
                at = rng.randrange(len(scenario.operations))
                assert scenario.run(store, Failpoint("die", at)).died
            begin = time.monotonic() + BOTH_ARE_FORKED_SECONDS
            pair = [scenario.start(store, begin=begin) for _ in range(2)]
            outcomes = [child.wait() for child in pair]
            assert [outcome.code for outcome in outcomes] == [0, 0], [outcome.message for outcome in outcomes]
            assert len({outcome.value["root_hash"] for outcome in outcomes}) == 1
            tasks = collections.Counter(tuple(task) for one in outcomes for task in one.value["committed"])
            made += len(tasks)
            twice += sum(number - 1 for number in tasks.values())
            harness.assert_whole(store, scenario, f"trial {trial}")
    print(f"{made} shards made by two, {twice} of them twice")
    assert twice <= made // 4, f"{twice} of {made}"


@TRIALS
def test_when_one_of_two_coordinators_is_killed_the_other_finishes(first: harness.Scenario, trials: int) -> None:
    rng = random.Random(START)
    for trial in range(trials):
        with first.store() as store:
            begin = time.monotonic() + BOTH_ARE_FORKED_SECONDS
            doomed, other = (first.start(store, begin=begin) for _ in range(2))
            time.sleep(max(0.0, begin - time.monotonic()) + rng.uniform(0, 0.15))
            doomed.signal(signal.SIGKILL)
            doomed.wait()
            outcome = other.wait()
            assert outcome.code == 0, outcome.message
            assert first.run(store).code == 0  # sweeps what was half written when the other had already looked
            harness.assert_whole(store, first, f"trial {trial}")


@pytest.mark.parametrize("ending", [signal.SIGCONT, signal.SIGKILL], ids=["goes on", "killed"])
def test_a_coordinator_that_stands_still_is_not_waited_for(
    first: harness.Scenario, ending: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(leases, "LEASE_SECONDS", 1.0)  # it may stand still while it plans
    monkeypatch.setattr(leases, "TOUCH_SECONDS", 0.2)
    with first.store() as store:
        stuck = first.start(store)
        deadline = time.monotonic() + 240
        while not list(store.glob("leases/*.lock")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        stuck.signal(signal.SIGSTOP)
        outcome = first.run(store)
        assert outcome.code == 0, outcome.message
        stuck.signal(ending)
        outcome = stuck.wait()
        assert outcome.code == (0 if ending == signal.SIGCONT else -signal.SIGKILL), outcome.message
        assert first.run(store).code == 0
        harness.assert_whole(store, first, "after the other woke up")


def test_a_sweep_survives_what_others_remove_meanwhile(tmp_path: Path) -> None:
    def come_and_go() -> None:
        while True:
            for verb in (Path.mkdir, Path.rmdir):
                for i in range(20):
                    verb(tmp_path / f"leases-{i}")

    other = start(come_and_go)
    try:
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            assert sweep_strays(tmp_path) == []
    finally:
        other.signal(signal.SIGKILL)
        other.wait()


def test_a_plan_that_others_finish_between_two_looks_is_found(
    first: harness.Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, early = opening.planned_revisions, [list[int]()]
    monkeypatch.setattr(opening, "planned_revisions", lambda root: early.pop() if early else look(root))
    with first.store() as store:
        assert first.run(store, Failpoint("die", len(first.operations) // 2)).died
        plan = opening.newest_plan(store)
        assert plan is not None
        assert plan.revision == 1


# --- A lying disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [pytest.param(40, id="sample"), pytest.param(1, id="all", marks=LONG)])
def test_whatever_file_an_unfinished_store_loses_the_next_run_comes_out_the_same(
    first: harness.Scenario, step: int
) -> None:
    """As after a loss of power on a disk that does not keep its word: empty, full of zeros, or gone."""
    assert harness.check_lost_files(first, step=step, start=START) > 0
