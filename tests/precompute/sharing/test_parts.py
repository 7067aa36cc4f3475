"""Many processes on one store: parts in any order, leases that end with their owner; always the same bytes."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import socket
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

from leandit.datasets.format.layout import LEASES
from leandit.datasets.revisions.plan import read_plan
from leandit.datasets.revisions.writer import StoreWriter
from leandit.errors import FingerprintMismatch, ResourceError, SourceError
from leandit.precompute import pipeline
from leandit.precompute.pipeline import Report
from leandit.precompute.planning import planner
from leandit.precompute.run import tasks as run_tasks
from leandit.precompute.run.shards import Shard
from leandit.precompute.run.tasks import commit_shard
from leandit.precompute.sharing import leases
from leandit.precompute.sharing.leases import ALL_SHARDS, Lease, Leases, alone, part_of


@pytest.fixture(autouse=True)
def _small_shards_and_nothing_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders are loaded once, images decoded in the process itself: a forked child shares no decoder either."""
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 2)
    monkeypatch.setattr(pipeline, "load_encoders", lambda recipe, device: loaded_encoders(recipe.vae, recipe.text))
    monkeypatch.setattr(pipeline, "Decoders", InProcessDecoders)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_caption_folder(tmp_path_factory.mktemp("parts") / "images", count=9)


def run(source: Path, store: Path, part: str = "") -> Report:
    return encode(caption_recipe(), source, store, part=part_of(part) if part else ALL_SHARDS)


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_parts_in_any_order_make_the_store_of_one_process(order: tuple[int, ...], source: Path, tmp_path: Path) -> None:
    """The last one makes a damaged shard of another again; parts of a complete store add what is new."""
    store, images = tmp_path / "store", Path(shutil.copytree(source, tmp_path / "images"))
    rows = read_metadata(images)
    for revision, listed in ((1, rows[:6]), (2, rows)):
        write_metadata(images, listed)
        whole = run(images, tmp_path / "whole")
        for i, number in enumerate(order):
            report = run(images, store, f"{number}/3")
            assert (report.manifest is None) == (report.num_left > 0) == (i < 2)
            if (i, revision) == (0, 1):
                shard = next(path for path in store.rglob("0") if path.is_file())
                shard.write_bytes(bytes(shard.stat().st_size))  # as a disk that lost power leaves it
        assert whole.manifest.revision == revision
        assert store_digest(store) == store_digest(tmp_path / "whole")
    assert run(images, store, "2/3").num_encoded == 0  # again: nothing is to be done
    for text in ("0/2", "3/2", "1", "a/b", "1/2/3", ""):
        with pytest.raises(ValueError, match="expected I/N"):
            part_of(text)


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
    empty = Shard(writer.plan.layout.parts[part], number)
    with Leases(writer) as held:
        commit_shard(writer, held, empty)
    assert tree_digest(tmp_path / "store") == before


# --- Alone ------------------------------------------------------------------------------------------------------------


def enter_alone(root: Path, inside: Path, times: int) -> None:
    """Enter ``alone`` again and again; the process ends with 1 if another one is inside at the same time."""
    for _ in range(times):
        with alone(root, "plan", lambda: None):
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
            time.sleep(0.0005)
            inside.unlink()


@pytest.mark.parametrize("is_made", [True, False], ids=["in the user's folder", "where no folder is"])
@pytest.mark.parametrize(
    ("num_processes", "times"), [(3, 100), pytest.param(8, 1000, marks=pytest.mark.slow, id="long")]
)
def test_of_many_processes_one_at_a_time_is_alone(
    num_processes: int, times: int, *, is_made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.0005)
    root, inside = tmp_path / "store", tmp_path / "inside"
    if is_made:
        root.mkdir()
        root.chmod(0o2770)
    before = root.stat() if is_made else None
    children = []
    for _ in range(num_processes):
        pid = os.fork()
        if not pid:
            code = 1
            with contextlib.suppress(BaseException):
                enter_alone(root, inside, times)
                code = 0
            os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * num_processes
    if before:
        after = root.stat()
        assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
        assert not list(root.iterdir())


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EEXIST, errno.ESTALE])
def test_who_finds_the_folder_of_leases_gone_tries_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, failures = Path.mkdir, itertools.count()

    def fail_twice(self: Path, *args: Any, **how: Any) -> None:
        if self.name == LEASES and next(failures) < 2:
            raise OSError(number, os.strerror(number), str(self))
        make(self, *args, **how)

    monkeypatch.setattr(Path, "mkdir", fail_twice)
    with alone(tmp_path / "store", "plan", lambda: None):
        assert not Lease(tmp_path / "store" / LEASES / "plan.lock").take()
    assert not (tmp_path / "store").exists()


def test_what_the_user_put_at_the_place_of_a_store_stays_and_an_error_of_the_disk_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, link, root = tmp_path / "file", tmp_path / "link", tmp_path / "store"
    file.touch()
    link.symlink_to(tmp_path / "nowhere")
    root.mkdir()
    (root / LEASES).touch()
    for path in (file, link, root):
        with alone(path, "plan", lambda: None):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "store"]
    assert (root / LEASES).is_file()

    def refuse(self: Path, *args: Any, **how: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), alone(tmp_path / "new", "plan", lambda: None):
        pass


def test_a_slow_owner_whose_empty_lease_was_taken_for_one_of_the_dead_does_not_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    slow = Lease(path)
    acquire = slow._lease.acquire

    def acquire_slowly(**how: Any) -> None:
        acquire(**how)
        path.unlink()  # as another process does, which has seen it empty for too long

    slow._lease.acquire = acquire_slowly  # type: ignore[method-assign]
    assert not slow.take()
    assert Lease(path).take()


def test_a_command_leaves_the_users_empty_folder_as_it_was_when_it_is_refused(tmp_path: Path) -> None:
    root, none = tmp_path / "store", tmp_path / "none"
    root.mkdir()
    root.chmod(0o2770)
    none.mkdir()
    before = root.stat()
    with pytest.raises(SourceError):
        run(none, root)
    after = root.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    with pytest.raises(SourceError):
        run(none, tmp_path / "new")
    assert not (tmp_path / "new").exists()
