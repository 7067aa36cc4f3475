"""What a process counts adds up to what all processes commit, in any order, and whoever is faster."""

from __future__ import annotations

import errno
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from faults import encode, without_seal
from making import (
    caption_recipe,
    label_recipe,
    loaded_encoders,
    make_caption_folder,
    make_class_folder,
    no_progress,
)

from leandit.datasets.errors import RecordRejected, SourceError
from leandit.datasets.format.layout import commit_path, is_picture_task
from leandit.datasets.format.schema import Reject
from leandit.datasets.revisions.commits import Task, read_commit
from leandit.datasets.revisions.plan import FrozenPlan, read_plan
from leandit.datasets.revisions.writer import StoreWriter
from leandit.precompute.config import SourceSection
from leandit.precompute.images.decoders import Decoders
from leandit.precompute.progress.clock import REJECTED
from leandit.precompute.progress.rejects import RejectLedger, RejectLimit, ledger_of
from leandit.precompute.progress.tally import Tally, Work
from leandit.precompute.shards.worker import Worker
from leandit.precompute.sources.source import list_source

BROKEN = "decode", "truncated", "made up"
ROWS, BROKEN_ROWS = 6, 4  # of each of three shards


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 18 pictures with captions, in three buckets, of each of which four are rejected; not sealed."""
    root = tmp_path_factory.mktemp("tally")
    source = make_caption_folder(root / "pictures", count=18)
    for number in range(12):
        path = source / f"images/{number}.png"
        path.write_bytes(path.read_bytes()[:-200])
    recipe = caption_recipe("source.max_reject_share=0.9", "source.max_rejects_in_a_row=100")
    without_seal(lambda: encode(recipe, source, root / "store"))
    return root / "store"


@dataclass
class Counted:
    """A tally of a store whose shards of pictures are not committed; of its rejects 11 are allowed."""

    whole: Path
    root: Path
    seen: list[tuple[str, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shutil.copytree(self.whole, self.root)
        self.plan = read_plan(self.root, 1)
        self.tasks = [task for task in self.plan.layout.tasks() if is_picture_task(task)]
        for task in self.tasks:
            (self.root / commit_path(1, *task)).unlink()
        self.writer, self.work = StoreWriter(self.root, self.plan), Work()
        ledger = ledger_of(SourceSection(max_reject_share=11 / 18), self.writer)
        self.tally = Tally(self.writer, self.tasks, ledger, lambda *what: self.seen.append(what), self.work)

    def put_record(self, task: Task) -> list[Reject]:
        """What a commit does, here or elsewhere; returns the rejects of the shard."""
        path = commit_path(1, *task)
        shutil.copy(self.whole / path, self.root / path)
        record = read_commit(self.root, self.plan, *task)
        assert record
        assert len(record.rejects) == BROKEN_ROWS
        return record.rejects

    def encode(self, task: Task, *, is_own: bool = True) -> None:
        """All that this process does to a shard."""
        self.tally.take(task)
        rejects = self.put_record(task)
        for reject in rejects:
            self.tally.reject(reject.key, RecordRejected(*BROKEN))
        self.tally.encode("pictures", ROWS)
        assert self.writer.is_committed(task)  # as whoever writes it asks first
        self.tally.commit(task, rejects, is_own=is_own)


def picture_tasks(plan: FrozenPlan) -> list[Task]:
    return [task for task in plan.layout.tasks() if is_picture_task(task)]


def test_what_others_commit_counts_for_progress_and_not_as_own_work(store: Path, tmp_path: Path) -> None:
    it = Counted(store, tmp_path / "store")
    one, two, _ = it.tasks
    it.tally.take(one)
    it.tally.encode("pictures", 2)
    assert (it.seen[-1], it.work.held) == (("pictures", 2, 18), [one])
    it.put_record(two)
    it.tally.look()
    assert it.seen[-1] == ("pictures", ROWS + 2, 18)
    it.tally.encode("pictures", ROWS - 2)
    rejects = it.put_record(one)
    assert it.writer.is_committed(one)
    it.tally.commit(one, rejects, is_own=True)
    assert it.seen[-1] == ("pictures", 2 * ROWS, 18)
    assert it.work == Work(num_encoded=ROWS, num_commits=1)


def test_a_shard_that_another_process_commits_first_counts_once(store: Path, tmp_path: Path) -> None:
    it = Counted(store, tmp_path / "store")
    one, two, _ = it.tasks
    it.encode(one, is_own=False)
    assert it.seen[-1] == ("pictures", ROWS, 18)
    assert it.work == Work()
    it.encode(two)
    it.tally.look()
    for number in range(3):  # 11 with those of the two shards
        it.tally.reject(f"{number}", RecordRejected(*BROKEN))
    with pytest.raises(SourceError, match=r"12 of 18 records .*: 12 x truncated\. The last is 'more'"):
        it.tally.reject("more", RecordRejected(*BROKEN))


def test_rejects_of_all_processes_count_together(store: Path, tmp_path: Path) -> None:
    it = Counted(store, tmp_path / "store")
    one, two, three = it.tasks
    it.encode(one)
    it.put_record(two)
    it.tally.look()
    assert [done for stage, done, _ in it.seen if stage == REJECTED][-1] == 2 * BROKEN_ROWS
    it.put_record(three)
    with pytest.raises(SourceError, match="12 of 18 records are rejected, more than source"):
        it.tally.look()


def test_sums_are_right_in_any_order(store: Path, tmp_path: Path) -> None:
    for seed in range(20):
        rng, it = random.Random(seed), Counted(store, tmp_path / f"{seed}")
        it.tally._ledger = RejectLedger(SourceSection(max_reject_share=1.0), 18)
        own = 0
        for task in rng.sample(it.tasks, 3):
            who = rng.choice(["this", "another", "both"])
            own += ROWS * (who == "this")
            if who == "another":
                it.put_record(task)
                it.tally.look()
            else:
                it.encode(task, is_own=who == "this")
        it.tally.look()
        assert (it.work.num_encoded, it.work.held) == (own, [])
        assert it.seen[-1] == ("pictures", 18, 18)
        counts = [done for stage, done, _ in it.seen if stage == "pictures"]
        assert counts == sorted(counts)
        assert [done for stage, done, _ in it.seen if stage == REJECTED][-1] == 3 * BROKEN_ROWS


def test_a_worker_that_raises_counts_only_what_it_has_committed(tmp_path: Path) -> None:
    source, recipe = make_class_folder(tmp_path / "pictures"), label_recipe("store.shard_mib=1")
    without_seal(lambda: encode(recipe, source, tmp_path / "store"))
    plan = read_plan(tmp_path / "store", 1)
    (task,) = picture_tasks(plan)
    (tmp_path / "store" / commit_path(1, *task)).unlink()
    path = tmp_path / "store" / plan.layout.part_arrays(task[0])[0].shard_path(task[1])
    path.unlink()
    (path / "in the way").mkdir(parents=True)
    writer, listed = StoreWriter(tmp_path / "store", plan), list_source(source)
    worker = Worker(loaded_encoders(recipe.vae, recipe.text), 1)
    with Decoders(1) as decoders, pytest.raises(OSError, match=str(path)) as raised:
        worker.encode(writer, [task], listed, decoders, section=recipe.source, progress=no_progress)
    assert raised.value.errno == errno.EISDIR
    work = worker.snapshot()
    assert (work.num_encoded, work.num_commits, work.held) == (0, 0, [task])
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
