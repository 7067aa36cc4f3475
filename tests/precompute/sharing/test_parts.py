"""Many processes on one store: parts in any order, leases that end with their owner; always the same bytes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faults import in_child, without_seal
from harness import InProcessDecoders
from making import (
    caption_recipe,
    encode,
    loaded_encoders,
    make_caption_folder,
    read_metadata,
    store_digest,
    tree_digest,
    write_metadata,
)

from leandit.datasets.errors import FingerprintMismatch, ResourceError
from leandit.datasets.format.layout import LEASES, Task
from leandit.datasets.revisions import commits, seal
from leandit.datasets.revisions.plan import read_plan
from leandit.datasets.revisions.writer import StoreWriter
from leandit.precompute import pipeline
from leandit.precompute.pipeline import Report
from leandit.precompute.planning import planner
from leandit.precompute.run import tasks as run_tasks
from leandit.precompute.run.shards import Shard
from leandit.precompute.run.tasks import commit_shard
from leandit.precompute.sharing import leases
from leandit.precompute.sharing.leases import Lease, Leases, alone, seal_alone
from leandit.precompute.sharing.part import Part, part_of


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 2)


@pytest.fixture(autouse=True)
def _nothing_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders are loaded once, images decoded in the process itself: a forked child shares no decoder either."""
    monkeypatch.setattr(pipeline, "load_encoders", lambda recipe, device: loaded_encoders(recipe.vae, recipe.text))
    monkeypatch.setattr(pipeline, "Decoders", InProcessDecoders)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_caption_folder(tmp_path_factory.mktemp("parts") / "images", count=9)


def run(source: Path, store: Path, part: str = "") -> Report:
    return encode(caption_recipe(), source, store, part=part_of(part) if part else None)


def test_a_shard_that_two_made_at_once_is_made_again(source: Path, tmp_path: Path) -> None:
    store, whole, sealed = (tmp_path / name for name in ("store", "whole", "sealed"))
    without_seal(lambda: run(source, whole))
    run(source, sealed)
    meddled: list[Path] = []

    def meddle(stage: str, done: int, total: int) -> None:
        """Another process commits a shard, over whose file a third one writes that had begun it too."""
        plan = read_plan(whole, 1)
        part, shard = plan.layout.tasks()[-1]
        path = plan.layout.parts[part].arrays[0].shard_path(shard)
        if stage == "images" and not meddled and not (store / path).exists():
            content = bytearray((whole / path).read_bytes())
            content[10] ^= 1
            (store / path).parent.mkdir(parents=True, exist_ok=True)
            (store / path).write_bytes(content)
            record = commits.commit_path(1, part, shard)
            (store / record).parent.mkdir(parents=True, exist_ok=True)
            for name in (commits.rows_path(1, part, shard), record):
                shutil.copy(whole / name, store / name)
            meddled.append(store / path)

    encode(caption_recipe(), source, store, progress=meddle)
    assert meddled
    assert store_digest(store) == store_digest(sealed)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Shards whose bytes are hashed to see whether they are as recorded, from here on."""
    found, hash_file = list[str](), commits.xxh3_file

    def count(path: Path) -> str:
        if not str(path).endswith(".rows"):
            found.append(str(path))
        return hash_file(path)

    monkeypatch.setattr(commits, "xxh3_file", count)
    return found


def shards_of(store: Path, tasks: list[Task]) -> list[str]:
    layout = read_plan(store, 1).layout
    return sorted(str(store / array.shard_path(task[1])) for task in tasks for array in layout.parts[task[0]].arrays)


def test_a_disk_that_cannot_hold_what_is_missing_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    run(source, store, "99/99")  # planned, and nothing else
    layout = read_plan(store, 1).layout
    arrays = {array for part, _ in layout.tasks() for array in layout.parts[part].arrays}
    needed = sum(array.shape[0] * array.row_bytes for array in arrays)
    for free, is_enough in ((needed - 1, False), (needed, True)):
        monkeypatch.setattr(run_tasks.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with contextlib.nullcontext() if is_enough else pytest.raises(ResourceError, match=r"/store'.*iB free"):
            run(source, store)


def test_a_resumed_part_reads_its_own_shards_and_only_the_last_reads_all(
    source: Path, tmp_path: Path, hashed: list[str]
) -> None:
    run(source, tmp_path / "whole")
    without_seal(lambda: run(source, tmp_path / "store"))
    store, count = tmp_path / "store", 4
    tasks = read_plan(store, 1).layout.tasks()
    shares = [Part(number + 1, count).of(tasks) for number in range(count)]
    for share in shares:  # each was interrupted before its last shard
        (store / commits.commit_path(1, *share[-1])).unlink()
    for number, share in enumerate(shares):
        hashed.clear()
        report = run(source, store, f"{number + 1}/{count}")
        own = shards_of(store, share[:-1])
        is_last = number == count - 1
        assert sorted(hashed) == sorted(own + shards_of(store, tasks) * is_last)
        assert bool(report.manifest) == is_last
    hashed.clear()
    run(source, store, "1/4")
    assert not hashed  # sealed
    assert store_digest(store) == store_digest(tmp_path / "whole")


def test_of_many_that_end_together_one_reads_the_shards_again(source: Path, tmp_path: Path, hashed: list[str]) -> None:
    store = tmp_path / "store"
    run(source, tmp_path / "whole")
    without_seal(lambda: run(source, store))
    before = store_digest(tmp_path / "whole")
    writers = [StoreWriter(store, read_plan(store, 1), own=()) for _ in range(4)]
    hashed.clear()
    threads = [
        threading.Thread(target=seal_alone, args=(writer, lambda damaged: None, lambda: None)) for writer in writers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(hashed) == sorted(str(store / path) for path in before if "/c/" in path)
    assert store_digest(store) == before


def test_the_last_part_makes_a_damaged_shard_of_another_again(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "whole")
    store = tmp_path / "store"
    assert run(source, store, "1/2").manifest is None
    first = Path(shards_of(store, Part(1, 2).of(read_plan(store, 1).layout.tasks()))[0])
    first.write_bytes(bytes(first.stat().st_size))  # as a disk that lost power leaves it
    assert run(source, store, "2/2").manifest
    assert store_digest(store) == store_digest(tmp_path / "whole")


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "-1/2", "a/b", "1/2/3", ""])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected I/N"):
        part_of(text)


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_parts_in_any_order_make_the_store_of_one_process(order: tuple[int, ...], source: Path, tmp_path: Path) -> None:
    whole = run(source, tmp_path / "whole")
    assert whole.manifest is not None
    for i, number in enumerate(order):
        report = run(source, tmp_path / "parts", f"{number}/3")
        assert (report.manifest is None) == (i < 2)
        assert (report.num_left > 0) == (i < 2)
        assert 0 < report.num_encoded < whole.num_encoded
    assert store_digest(tmp_path / "parts") == store_digest(tmp_path / "whole")
    assert run(source, tmp_path / "parts", "2/3").num_encoded == 0  # again: nothing is to be done


def test_two_processes_at_the_same_time_encode_no_shard_twice(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"

    def note(writer: StoreWriter, held: Leases, shard: Shard) -> int:
        """Write down who encoded what; the first of each process waits for that of the other."""
        with open(log, "a") as file:
            file.write(f"{shard.part.name} {shard.number} {os.getpid()}\n")
        end = time.monotonic() + 240
        while len({line.split()[2] for line in log.read_text().splitlines()}) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        return commit_shard(writer, held, shard)

    monkeypatch.setattr(run_tasks, "commit_shard", note)
    codes: list[int] = []
    other = threading.Thread(target=lambda: codes.append(in_child(lambda: run(source, tmp_path / "store") and 0)))
    other.start()
    report = run(source, tmp_path / "store")
    other.join()
    assert codes == [0]
    assert report.manifest is not None
    encoded = [line.split() for line in log.read_text().splitlines()]
    shards = [(part, int(shard)) for part, shard, _ in encoded]
    tasks = read_plan(tmp_path / "store", 1).layout.tasks()
    assert sorted(shards) == sorted(tasks)  # each once, by whomever
    assert len({pid for _, _, pid in encoded}) == 2


def test_a_part_of_a_store_that_is_complete_adds_what_is_new(source: Path, tmp_path: Path) -> None:
    grown = make_caption_folder(tmp_path / "grown", count=9)
    rows = read_metadata(grown)
    write_metadata(grown, rows[:6])
    run(grown, tmp_path / "store")
    write_metadata(grown, rows)
    left = [run(grown, tmp_path / "store", f"{number}/2") for number in (2, 1)]
    assert left[0].manifest is None
    assert left[1].manifest is not None
    assert left[1].manifest.revision == 2
    assert left[1].manifest.num_stored == 9


def die_with(path: Path) -> None:
    """Let a process take a lease, and die at once."""

    def take_and_die() -> None:
        lease = Lease(path)
        os._exit(not lease.take())

    assert in_child(take_and_die) == 0
    assert path.exists()


def test_a_lease_is_held_by_one_and_free_when_it_is_given_back_or_its_owner_died(tmp_path: Path) -> None:
    first, second = Lease(tmp_path / "a.lock"), Lease(tmp_path / "a.lock")
    assert first.take()
    assert not second.take()
    assert in_child(lambda: int(Lease(tmp_path / "a.lock").take())) == 0  # nor by another process
    first.release()
    assert not list(tmp_path.iterdir())
    die_with(tmp_path / "a.lock")
    assert second.take()
    second.release()


def seconds_until_taken(path: Path) -> float:
    lease, start = Lease(path), time.monotonic()
    while not lease.take():
        assert time.monotonic() - start < 240
        time.sleep(0.05)
    lease.release()
    return time.monotonic() - start


def test_a_lease_of_another_machine_ends_when_it_is_not_touched_and_one_without_a_name_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("LEASE_SECONDS", 0.6), ("TOUCH_SECONDS", 0.2), ("EMPTY_SECONDS", 0.3)):
        monkeypatch.setattr(leases, name, seconds)
    path = tmp_path / "a.lock"
    die_with(path)
    path.write_text(re.sub("(?m)^host=.*", "host=elsewhere", path.read_text()))
    assert seconds_until_taken(path) >= 0.5
    path.touch()
    assert seconds_until_taken(path) >= 0.3


def test_a_live_lease_is_touched_and_never_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_SECONDS", 2.0)
    monkeypatch.setattr(leases, "TOUCH_SECONDS", 0.1)
    first, second = Lease(tmp_path / "a.lock"), Lease(tmp_path / "a.lock")
    assert first.take()
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        assert not second.take()
        time.sleep(0.05)
    first.release()


def test_the_lease_of_another_container_is_not_taken_for_one_of_the_dead(tmp_path: Path) -> None:
    # Both containers of a pod have the host's name; the number of a process in one is nobody, or another, in the other.
    path, dead = tmp_path / "a.lock", 2**22 + 1  # beyond the kernel's largest process id
    written = Lease(path)
    assert written.take()
    content = path.read_text()
    written.release()
    own, host = content.replace(str(os.getpid()), str(dead)), re.escape(socket.gethostname())
    assert own != content
    elsewhere = re.sub(rf"{host}(\?pidns-[0-9a-f]+)?", f"{socket.gethostname()}?pidns-f0000001", own)
    assert elsewhere != own
    for text, is_free in ((own, True), (elsewhere, False)):
        path.write_text(text)
        later = Lease(path)
        assert later.take() == is_free
        later.release()


def test_who_comes_second_waits_and_is_told(tmp_path: Path) -> None:
    root, waits, order = tmp_path / "store", [], []

    def second() -> None:
        with alone(root, "plan", lambda: waits.append(1)):
            order.append("second")

    with alone(root, "plan", lambda: None):
        other = threading.Thread(target=second)
        other.start()
        while not waits:
            time.sleep(0.01)
        order.append("first")
    other.join()
    assert order == ["first", "second"]
    assert not root.exists()  # nothing is left where nothing was made


@pytest.mark.parametrize(
    ("number", "raised"), [(errno.EACCES, OSError), (errno.EROFS, OSError), (errno.ENOSPC, ResourceError)]
)
def test_where_no_shard_may_be_written_nobody_waits_for_its_lease(
    number: int, raised: type[Exception], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(source, tmp_path / "store", part="99/99")  # planned only
    make = Path.mkdir

    def refuse(self: Path, *args: Any, **how: Any) -> None:
        if self.name == LEASES:
            raise OSError(number, os.strerror(number), str(self))
        make(self, *args, **how)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(raised, match=LEASES):
        run(source, tmp_path / "store", part="1/2")
    monkeypatch.setattr(Path, "mkdir", make)
    assert run(source, tmp_path / "store").manifest


def test_a_plan_of_other_settings_that_came_first_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_first = planner.Planner.plan_first

    def others_first(self: planner.Planner) -> Any:
        monkeypatch.undo()
        monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 2)
        other = caption_recipe("vae.flip=true")
        without_seal(lambda: encode(other, source, tmp_path / "other"))
        shutil.copytree(tmp_path / "other/revisions", tmp_path / "store/revisions")
        return plan_first(self)

    monkeypatch.setattr(planner.Planner, "plan_first", others_first)
    with pytest.raises(FingerprintMismatch, match=r"latent\.flip"):
        run(source, tmp_path / "store")


def test_who_stood_still_does_not_touch_what_others_have_committed(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "store")
    before = tree_digest(tmp_path / "store")
    writer = StoreWriter(tmp_path / "store", read_plan(tmp_path / "store", 1))
    part, number = next(task for task in writer.plan.layout.tasks() if task[0].startswith("buckets/"))
    empty = Shard(writer.plan.layout.parts[part], number, len(writer.plan.layout.parts[part].items(number)))
    with Leases(writer) as held:
        commit_shard(writer, held, empty)
    assert tree_digest(tmp_path / "store") == before


def test_a_sealed_store_stays_as_it_is_where_a_library_would_write_other_tables(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(source, tmp_path / "store")
    before = tree_digest(tmp_path / "store")
    as_before = seal.parquet_of_groups

    def other_bytes(schema: Any, groups: Any) -> memoryview:
        return as_before(schema.with_metadata({"written by": "a later release"}), groups)

    monkeypatch.setattr(seal, "parquet_of_groups", other_bytes)
    run(source, tmp_path / "store")
    assert tree_digest(tmp_path / "store") == before
