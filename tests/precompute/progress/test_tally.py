"""What workers tell adds up to what is committed, however many of them are lost, killed or ended by an error."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from making import (
    CPU,
    caption_recipe,
    label_recipe,
    loaded_encoders,
    make_caption_folder,
    make_class_folder,
    no_progress,
)

from leandit.datasets.errors import RecordRejected, SourceError
from leandit.datasets.format.layout import commit_path, is_picture_task
from leandit.datasets.revisions.commits import Task
from leandit.datasets.revisions.plan import FrozenPlan, read_plan
from leandit.datasets.revisions.writer import StoreWriter
from leandit.precompute.config import SourceSection
from leandit.precompute.engines.worker import Worker
from leandit.precompute.images.decoders import Decoders
from leandit.precompute.pipeline import precompute
from leandit.precompute.progress.clock import StageClock
from leandit.precompute.progress.rejects import RejectLedger, RejectLimit
from leandit.precompute.progress.tally import Committed, Encoded, Event, LeaseTaken, Rejected, Tally
from leandit.precompute.sources.source import list_source

BROKEN = "decode", "truncated", "made up"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 14 pictures with captions, in three buckets."""
    root = tmp_path_factory.mktemp("tally")
    source = make_caption_folder(root / "pictures")
    precompute(caption_recipe(), source_path=source, store_path=root / "store", device=CPU, progress=no_progress)
    return root


def new_tally(plan: FrozenPlan, seen: list[tuple[str, int, int]]) -> Tally:
    """Of which ten rejects are allowed."""
    ledger = RejectLedger(SourceSection(max_reject_share=10 / 14), plan.records.num_rows)
    return Tally(plan, plan.layout.tasks(), ledger, lambda *what: seen.append(what))


def picture_tasks(plan: FrozenPlan) -> list[Task]:
    return [task for task in plan.layout.tasks() if is_picture_task(task)]


def rows_of(plan: FrozenPlan, task: Task) -> int:
    return len(plan.layout.rows_of(*task))


def test_what_a_lost_worker_has_not_committed_is_taken_back(store: Path) -> None:
    plan, seen = read_plan(store / "store", 1), []
    tally, (one, two, three) = new_tally(plan, seen), picture_tasks(plan)
    for event in (LeaseTaken(one), LeaseTaken(two), Encoded("pictures", rows_of(plan, one)), Encoded("pictures", 2)):
        tally.count("a", event)
    tally.count("a", Committed(one))
    assert tally.drop_worker("a") == [two]
    assert tally.num_pictures == rows_of(plan, one)
    assert tally.drop_worker("a") == []  # nothing is taken back twice
    for task in (two, three):
        for event in (LeaseTaken(task), Encoded("pictures", rows_of(plan, task)), Committed(task)):
            tally.count("b", event)
    assert tally.drop_worker("b") == []
    assert tally.num_pictures == 14
    assert seen[-1] == ("pictures", 14, 14)


def test_a_shard_that_two_workers_make_counts_once(store: Path) -> None:
    plan = read_plan(store / "store", 1)
    tally, task = new_tally(plan, []), picture_tasks(plan)[0]
    for worker in "ab":
        tally.count(worker, LeaseTaken(task))
        tally.count(worker, Encoded("pictures", rows_of(plan, task)))
        tally.count(worker, Rejected("k", *BROKEN))
    for worker in "ab":
        tally.count(worker, Committed(task, ["k"]))
    assert tally.num_pictures == rows_of(plan, task)
    for number in range(9):
        tally.count("a", Rejected(f"{number}", *BROKEN))
    with pytest.raises(SourceError, match="11 of 14 records"):
        tally.count("a", Rejected("9", *BROKEN))


def test_rejects_of_lost_workers_do_not_count_twice(store: Path) -> None:
    plan = read_plan(store / "store", 1)
    tally, (one, two, _) = new_tally(plan, []), picture_tasks(plan)
    broken = [f"k{number}" for number in range(8)]
    for worker in ("a", "b", "c"):  # the limit is ten
        tally.count(worker, LeaseTaken(one))
        for key in broken:
            tally.count(worker, Rejected(key, *BROKEN))
        tally.drop_worker(worker)
    tally.count("d", LeaseTaken(one))
    for key in broken:
        tally.count("d", Rejected(key, *BROKEN))
    tally.count("d", Committed(one, broken))
    tally.count("d", LeaseTaken(two))
    tally.drop_worker("d")  # what is committed stays counted
    for key in ("l1", "l2"):
        tally.count("e", Rejected(key, *BROKEN))
    with pytest.raises(SourceError, match=r"11 of 14 records are rejected, .*: 11 x truncated\. The last is 'l3'"):
        tally.count("e", Rejected("l3", *BROKEN))


def test_sums_are_right_in_any_order_of_work_and_loss(store: Path) -> None:
    plan = read_plan(store / "store", 1)
    for seed in range(50):
        rng, left, seen = random.Random(seed), picture_tasks(plan), []
        tally = new_tally(plan, seen)
        for number in range(100):
            some = [task for task in left if rng.random() < 0.7]
            for task in some:
                tally.count(f"{number}", LeaseTaken(task))
            committed = 0
            for task in some:
                tally.count(f"{number}", Encoded("pictures", rows_of(plan, task)))
                if committed == some.index(task) and rng.random() < 0.5:
                    tally.count(f"{number}", Committed(task))
                    left.remove(task)
                    committed += 1
            assert tally.drop_worker(f"{number}") == some[committed:]
            assert tally.num_pictures == 14 - sum(rows_of(plan, task) for task in left)
        assert not left
        assert all(done <= total for _, done, total in seen)


def test_a_worker_that_raises_tells_only_of_what_it_has_committed(tmp_path: Path) -> None:
    source, recipe, seen = make_class_folder(tmp_path / "pictures"), label_recipe("store.shard_mib=1"), []
    precompute(recipe, source_path=source, store_path=tmp_path / "store", device=CPU, progress=no_progress)
    plan = read_plan(tmp_path / "store", 1)
    (task,) = picture_tasks(plan)
    (tmp_path / "store/manifest.json").unlink()
    (tmp_path / "store" / commit_path(1, *task)).unlink()
    path = tmp_path / "store" / plan.layout.part_arrays(task[0])[0].shard_path(task[1])
    path.unlink()
    (path / "in the way").mkdir(parents=True)
    told: list[Event] = []
    tally = new_tally(plan, seen)

    def emit(event: Event) -> None:
        told.append(event)
        tally.count("a", event)

    writer, listed = StoreWriter(tmp_path / "store", plan), list_source(source)
    with Decoders(1) as decoders:
        worker = Worker(recipe, loaded_encoders(recipe.vae, recipe.text), decoders, StageClock())
        with pytest.raises(OSError, match=str(path)) as raised:
            worker.encode(writer, [task], listed, emit)
    assert raised.value.errno == errno.EISDIR
    assert told[0] == LeaseTaken(task)
    assert not any(isinstance(event, Committed) for event in told)
    assert tally.drop_worker("a") == [task]
    assert tally.num_pictures == 0
    assert not list((tmp_path / "store").rglob("*.lock"))  # others can take it at once


def test_the_share_and_the_row_are_counted_apart() -> None:
    section = SourceSection(max_reject_share=0.5, max_rejects_in_a_row=3)
    told: list[str] = []
    limit = RejectLimit(section, None, on_reject=lambda key, _: told.append(key))
    for number in range(100):  # a share of two thirds, which is the matter of who is told
        limit.count(f"{number}", RecordRejected(*BROKEN) if number % 3 else None)
    assert len(told) == 66
    for key in "xy":
        limit.count(key, RecordRejected(*BROKEN))
    with pytest.raises(SourceError, match=r"3 records in a row are rejected \(source\.max_rejects_in_a_row\)"):
        limit.count("z", RecordRejected(*BROKEN))
    ledger = RejectLedger(section, 40, carried={"aspect": 9}, rejected={"no_caption": 10})
    assert ledger.count("a", RecordRejected(*BROKEN)) is None
    ledger.forget("truncated")
    assert ledger.count("b", RecordRejected("decode", "too_large", "")) is None
    said = str(ledger.count("c", RecordRejected(*BROKEN)))
    assert said.startswith(
        "21 of 40 records are rejected, more than source.max_reject_share = 0.5: 10 x no_caption, 9 x aspect, "
        "1 x too_large, 1 x truncated. The last is 'c'"
    )
    assert said.endswith("What is encoded stays, the same command goes on.")


@pytest.mark.parametrize(
    ("total", "carried", "own", "stops"),
    [
        (1000, 0, 10, False),  # ten are never too many
        (1000, 0, 11, True),
        (6, 0, 3, False),  # unless they are more than half
        (6, 0, 4, True),
        (1000, 500, 0, False),  # a revision with no rejects of its own is never stopped
        (1000, 10, 1, True),
    ],
)
def test_few_rejects_are_no_share(total: int, carried: int, own: int, stops: bool) -> None:
    ledger = RejectLedger(
        SourceSection(), total, carried={"aspect": carried}, rejected={"truncated": own} if own else {}
    )
    assert bool(ledger.refusal()) == stops
