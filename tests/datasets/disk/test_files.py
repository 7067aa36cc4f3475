"""Files: a write leaves the old content or the new, never a temporary; strays of dead processes are swept."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Outcome, start
from hypothesis import given
from hypothesis import strategies as st

from leandit.datasets.disk import files, owners
from leandit.datasets.disk.files import (
    EXIT_DIED,
    FAILPOINT_VARIABLE,
    NEEDS_SPACE,
    Failpoint,
    make_folder,
    remove,
    write_atomic,
    write_folder,
)
from leandit.datasets.disk.hashing import canonical_json, read_json, sha256_file, sha256_of, xxh3_file, xxh3_parts
from leandit.datasets.disk.owners import (
    REPLACED,
    STALE_SECONDS,
    TEMPORARY_PREFIX,
    parse_owner,
    temporary_beside,
    this_process,
)
from leandit.datasets.disk.spill import map_array
from leandit.datasets.disk.strays import find_strays, sweep_strays
from leandit.datasets.errors import DamageError, ResourceError

FULL = [(errno.ENOSPC, "iB free"), (errno.EDQUOT, "iB free"), (errno.EFBIG, "ulimit -f")]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def failing(error: BaseException, calls_before: int = 0) -> Callable[..., Any]:
    """A function that raises, after a number of calls that do nothing."""
    left = [calls_before]

    def fail(*_: object, **__: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error

    return fail


def test_a_write_replaces_the_content_and_makes_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "deep/folder/file"
    write_atomic(path, b"old")
    write_atomic(path, [b"n", memoryview(b"ew"), bytearray(b"!")])
    assert path.read_bytes() == b"new!"
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("function", ["os.rename", "os.fsync"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("old", [None, b"old"])
def test_a_write_that_fails_leaves_the_old_content_and_no_temporary(
    function: str, error: BaseException, old: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    if old:
        path.write_bytes(old)
    monkeypatch.setattr(function, failing(error))
    with pytest.raises(type(error)) as caught:
        write_atomic(path, b"new")
    assert caught.value is error
    assert names(tmp_path) == (["file"] if old else [])
    assert not old or path.read_bytes() == old


def test_content_that_fails_on_its_way_leaves_the_old_one(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("no more")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="no more"):
        write_atomic(path, parts())
    assert names(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"


def test_when_only_the_sync_of_the_folder_fails_the_new_content_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", failing(OSError(errno.EIO, "broken"), calls_before=1))
    with pytest.raises(OSError, match="broken"):
        write_atomic(path, b"new")
    assert names(tmp_path) == ["file"]
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize(
    ("function", "calls_before"), [("os.rename", 0), ("os.fsync", 0), ("os.fsync", 1), ("os.mkdir", 0)]
)
@pytest.mark.parametrize(("number", "reason"), FULL)
def test_a_full_disk_is_a_resource_error_that_names_the_file_and_its_limit(
    function: str, calls_before: int, number: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder/file"
    if function != "os.mkdir":
        path.parent.mkdir()
    monkeypatch.setattr(function, failing(OSError(number, os.strerror(number)), calls_before))
    with pytest.raises(ResourceError, match=reason) as caught:
        write_atomic(path, b"new")
    assert str(path) in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert caught.value.exit_code == 5
    assert not list(tmp_path.rglob(f"{TEMPORARY_PREFIX}*"))


def test_a_file_that_is_too_large_is_not_told_to_free_space(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(ResourceError, match=r"File too large.*'ulimit -f'.*file system.*Raise the limit") as caught:
            write_atomic(tmp_path / "file", bytes(1 << 17))
        with pytest.raises(ResourceError, match=r"File too large.*Raise 'ulimit -f', or name another folder.*TMPDIR"):
            map_array(1 << 17, "uint8", "a table")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "space" not in str(caught.value)
    assert caught.value.exit_code == 5
    assert names(tmp_path) == []


def test_the_order_is_write_sync_rename_sync_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the first sync a power cut leaves an empty file, without the second none at all.
    path, seen, fsync, rename = tmp_path / "file", [], os.fsync, os.rename

    def spy_fsync(descriptor: int) -> None:
        seen.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def spy_rename(source: Path, target: Path) -> None:
        assert source.read_bytes() == b"content"
        seen.append(("rename", target.name))
        rename(source, target)

    monkeypatch.setattr("os.fsync", spy_fsync)
    monkeypatch.setattr("os.rename", spy_rename)
    write_atomic(path, b"content")
    assert seen == [("sync", temporary_beside(path).name), ("rename", "file"), ("sync", tmp_path.name)]


OLD, NEW = {"a": b"old", "gone": b"-"}, {"a": b"new", "b": b"n" * 100}


def write_old(final: Path) -> Path:
    write_folder(final, OLD.items(), replace=False)
    return final


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def test_a_folder_is_there_with_all_its_files_and_the_older_one_goes(tmp_path: Path) -> None:
    final = tmp_path / "deep/final"
    assert write_folder(final, ((name, iter([data])) for name, data in OLD.items()), replace=True)
    assert content(final) == OLD
    assert write_folder(final, NEW.items(), replace=True)
    assert content(final) == NEW
    assert names(final.parent) == ["final"]


def test_without_replace_the_first_folder_stays(tmp_path: Path) -> None:
    final = write_old(tmp_path / "final")
    assert not write_folder(final, NEW.items(), replace=False)
    assert content(final) == OLD
    assert names(tmp_path) == ["final"]


def test_the_contents_of_a_folder_are_taken_one_at_a_time(tmp_path: Path) -> None:
    # A checkpoint's groups are made when their turn comes, and let go of before the next one is made.
    alive: list[weakref.ref[Big]] = []

    class Big(bytearray):
        pass

    def parts(data: Big) -> Iterator[Big]:
        alive.append(weakref.ref(data))
        yield data

    def made() -> Iterator[tuple[str, Iterator[Big]]]:
        for name in "abc":
            assert [one for one in alive if one()] == []
            yield name, parts(Big(b"x"))

    write_folder(tmp_path / "final", made(), replace=True)
    assert names(tmp_path / "final") == ["a", "b", "c"]


def test_an_array_without_rows_is_written_as_nothing(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", [b"", np.empty((0, 3), np.float32), np.ones(2, np.uint8)])
    assert (tmp_path / "file").read_bytes() == b"\1\1"


def test_removing_takes_a_folder_a_file_or_nothing_and_leaves_what_a_link_names(tmp_path: Path) -> None:
    target = write_old(tmp_path / "target")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "file").write_bytes(b"")
    for name in ("link", "file", "nothing"):
        remove(tmp_path / name)
    assert content(target) == OLD
    remove(target)
    assert names(tmp_path) == []


@pytest.mark.parametrize("at", [0, 1])
def test_a_folder_whose_removal_is_cut_off_does_not_look_whole(at: int, tmp_path: Path) -> None:
    final = write_old(tmp_path / "final")
    failing_at("die", at, lambda: remove(final), expected=EXIT_DIED)
    assert content(final) == ({} if at else OLD)
    sweep_strays(tmp_path)
    assert names(tmp_path) == ([] if at else ["final"])


# --- Failpoints -------------------------------------------------------------------------------------------------------


def failing_at(kind: Any, at: int, work: Callable[[], Any], *, expected: int) -> Outcome:
    """Do some work in a forked child whose operation ``at`` fails."""
    outcome = start(work, failpoint=Failpoint(kind, at)).wait()
    assert outcome.code == expected, outcome.message
    return outcome


def write_both(folder: Path) -> None:
    write_atomic(folder / "file", [b"ne", b"w"])
    write_folder(folder / "final", NEW.items(), replace=True)


OPERATIONS = (
    *("create", "write", "write", "sync", "rename file", "sync"),
    *("folder", "sync", "create", "write", "sync a", "create", "write", "sync b", "sync"),
    *("rename final.leandit-replaced", "rename final", "sync", "rename", "remove final.leandit-replaced", "sync"),
)


def starting(folder: Path) -> Path:
    write_atomic(folder / "file", b"old")
    write_old(folder / "final")
    return folder


def assert_old_or_new(folder: Path, said: str) -> None:
    sweep_strays(folder)  # as the next start does
    assert names(folder) == ["file", "final"], said
    assert (folder / "file").read_bytes() in (b"old", b"new"), said
    assert content(folder / "final") in (OLD, NEW), said


def test_every_operation_is_counted(tmp_path: Path) -> None:
    # Points to fail at: with one fewer, a crash at that place would no longer be tested.
    folder = starting(tmp_path)
    seen = failing_at("count", -1, lambda: write_both(folder), expected=0).operations
    assert len(seen) == len(OPERATIONS)
    assert [one for one, wanted in zip(seen, OPERATIONS, strict=True) if not one.startswith(wanted)] == []
    assert content(folder / "final") == NEW


@pytest.mark.parametrize("at", range(len(OPERATIONS)))
@pytest.mark.parametrize(("kind", "code"), [("die", EXIT_DIED), ("eio", 1), ("enospc", 1)])
def test_whatever_operation_fails_the_old_content_is_there_or_the_new(
    kind: str, code: int, at: int, tmp_path: Path
) -> None:
    folder = starting(tmp_path / "here")
    fails = kind != "enospc" or any(one.split()[0] in NEEDS_SPACE for one in OPERATIONS[at:])
    outcome = failing_at(kind, at, lambda: write_both(folder), expected=code if fails else 0)
    if kind == "enospc":
        assert "ResourceError" in outcome.error
    assert_old_or_new(folder, f"{kind} at {at}, {OPERATIONS[at]}")


def test_a_system_that_takes_half_of_what_it_is_given_is_given_the_rest(tmp_path: Path) -> None:
    folder = starting(tmp_path)
    failing_at("short", -1, lambda: write_both(folder), expected=0)
    assert (folder / "file").read_bytes() == b"new"
    assert content(folder / "final") == NEW


@pytest.mark.parametrize(("setting", "code"), [("die@0", EXIT_DIED), ("eio@1", 1), ("count", 0), ("", 0)])
def test_a_failpoint_is_taken_from_the_environment(setting: str, code: int, tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from leandit.datasets.disk.files import write_atomic
write_atomic(Path(sys.argv[1]), b"new")
"""
    command = [sys.executable, "-c", script, tmp_path / "file"]
    environment = os.environ | {FAILPOINT_VARIABLE: setting}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "file").exists() == (code == 0)


def test_nothing_fails_in_this_process() -> None:
    assert files.failpoint is None


# --- Strays -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def living_pid() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate(b"\n")


def owned(path: Path, **fields: Any) -> Path:
    """The temporary of a path as another owner names it."""
    owner = replace(this_process(), **{"started": "", **fields})
    return path.with_name(f"{TEMPORARY_PREFIX}{owner}@{path.name}")


def stray(path: Path, *, age_seconds: float = 0, **fields: Any) -> Path:
    """The same, written some time ago."""
    named = owned(path, **fields)
    named.write_bytes(b"half")
    then = time.time() - age_seconds
    os.utime(named, (then, then))
    return named


def test_strays_of_dead_processes_are_swept_and_those_of_living_ones_stay(
    tmp_path: Path, dead_pid: int, living_pid: int
) -> None:
    deep = tmp_path / "a/b"
    deep.mkdir(parents=True)
    dead = [stray(tmp_path / "file", pid=dead_pid), stray(deep / "file", pid=dead_pid)]
    kept = [
        stray(tmp_path / "file", pid=living_pid),
        stray(deep / "file", pid=living_pid, age_seconds=10 * STALE_SECONDS),  # alive, however long it was stopped
        stray(tmp_path / "file", pid=1),  # alive, and perhaps of another user
        tmp_path / "file",
    ]
    kept[-1].write_bytes(b"whole")
    folder = owned(tmp_path / "folder", pid=dead_pid)
    write_folder(folder, OLD.items(), replace=False)
    assert sorted(sweep_strays(tmp_path)) == sorted([*dead, folder])
    assert not any(path.exists() for path in [*dead, folder])
    assert all(path.exists() for path in kept)
    assert sweep_strays(tmp_path) == []


@pytest.mark.parametrize("elsewhere", [{"host": "another-host"}, {"namespace": "0a1b2c3d.f0000001"}])
def test_of_another_container_or_machine_a_heartbeat_tells(
    elsewhere: dict[str, str], tmp_path: Path, dead_pid: int, living_pid: int
) -> None:
    # Two containers of one pod have the same host name, and each counts its processes from 1.
    kept = [stray(tmp_path / name, pid=pid, **elsewhere) for name, pid in (("a", dead_pid), ("b", os.getpid()))]
    gone = [
        stray(tmp_path / name, pid=pid, age_seconds=STALE_SECONDS + 60, **elsewhere)
        for name, pid in (("c", dead_pid), ("d", living_pid), ("e", os.getpid()))
    ]
    assert sorted(sweep_strays(tmp_path)) == sorted(gone)
    assert names(tmp_path) == sorted(path.name for path in kept)


def test_a_process_sweeps_what_an_earlier_start_of_its_number_left_but_nothing_of_its_own(tmp_path: Path) -> None:
    own = temporary_beside(tmp_path / "own")  # of another thread
    own.write_bytes(b"half")
    started = this_process().started
    earlier = [
        stray(tmp_path / "number", pid=os.getpid(), started="1"),
        stray(tmp_path / "exec", pid=os.getpid(), started=started, token="0"),  # the same process, another program
    ]
    assert sorted(sweep_strays(tmp_path)) == sorted(earlier)
    assert names(tmp_path) == [own.name]


def test_an_owner_touches_what_it_writes_however_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Simulated: this process is in another container for the sweep, and its files look old at once.
    monkeypatch.setattr(owners, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr("leandit.datasets.disk.strays.STALE_SECONDS", 3600)
    here = owners._namespace()

    def swept_meanwhile() -> list[Path]:
        (temporary,) = find_strays(tmp_path)
        os.utime(temporary, (0, 0))
        deadline = time.monotonic() + 20
        while temporary.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        with monkeypatch.context() as patch:
            patch.setattr(owners, "_namespace", lambda: "another.f0000001")
            return sweep_strays(tmp_path)

    def parts() -> Iterator[bytes]:
        yield b"half"
        assert swept_meanwhile() == []
        yield b"whole"

    write_atomic(tmp_path / "file", parts())
    write_folder(tmp_path / "folder", [("a", parts()), ("b", parts())], replace=True)
    assert owners._namespace() == here
    assert names(tmp_path) == ["file", "folder"]


def test_a_host_whose_name_begins_with_ours_keeps_its_temporaries(
    tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a cluster with a shared disk: "node" must not sweep what a process of "node-7" is writing.
    theirs = stray(tmp_path / "file", pid=dead_pid, host=f"node-{dead_pid}")
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    assert sweep_strays(tmp_path) == []
    assert theirs.exists()


def test_a_process_that_has_ended_is_gone_although_its_parent_never_looked() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        owner = replace(this_process(), pid=process.pid, started=owners._started(process.pid))
        assert owner.is_alive
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert owner.is_alive is False


def test_a_temporary_names_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # FORMAT.md tells readers of this name.
    monkeypatch.setattr("socket.gethostname", lambda: "no/de@7")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    namespace = f"{boot}.{os.stat('/proc/self/ns/pid').st_ino:x}"
    started = Path("/proc/self/stat").read_text().split()[21]
    path = temporary_beside(tmp_path / "zarr.json")
    wanted = rf"\.leandit-tmp-no_de_7@{re.escape(namespace)}-{os.getpid()}-{started}-[0-9a-f]{{8}}@zarr\.json"
    assert re.fullmatch(wanted, path.name)
    owner = parse_owner("@".join(path.name.removeprefix(TEMPORARY_PREFIX).split("@")[:2]))
    assert owner == this_process()


def test_a_number_that_now_belongs_to_another_process_keeps_nothing_alive(tmp_path: Path, living_pid: int) -> None:
    started = Path(f"/proc/{living_pid}/stat").read_text().split()[21]
    kept = stray(tmp_path / "kept", pid=living_pid, started=started)
    earlier = stray(tmp_path / "earlier", pid=living_pid, started="1")
    assert sweep_strays(tmp_path) == [earlier]
    assert names(tmp_path) == [kept.name]


@pytest.mark.parametrize("owner", ["", "host@", "host@1-2", "host@²", f"host@{'9' * 30}", "host@-3"])
def test_a_name_without_an_owner_is_swept_once_it_is_old(owner: str, tmp_path: Path) -> None:
    path = tmp_path / f"{TEMPORARY_PREFIX}{owner}@file"
    path.write_bytes(b"")
    assert sweep_strays(tmp_path) == []
    os.utime(path, (0, 0))
    assert sweep_strays(tmp_path) == [path]


def test_ages_are_counted_by_the_clock_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = stray(tmp_path / "file", host="another-host")
    monkeypatch.setattr("time.time", lambda: 1e12)  # a machine whose own clock is wrong
    assert sweep_strays(tmp_path) == []
    assert theirs.exists()


def test_strays_are_found_whoever_owns_them_but_not_what_lies_in_one(tmp_path: Path, living_pid: int) -> None:
    make_folder(tmp_path / "a/b")
    theirs = [stray(tmp_path / "file", pid=living_pid), stray(tmp_path / "a/b/file", pid=1, host="another")]
    folder = temporary_beside(tmp_path / "a/final")
    write_folder(folder, [(temporary_beside(Path("inner")).name, b"")], replace=False)
    assert find_strays(tmp_path) == sorted([*theirs, folder])
    assert sweep_strays(tmp_path) == []
    assert sorted(sweep_strays(tmp_path, of_all=True)) == sorted([*theirs, folder])


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("owner", ["", "-another@0.1-1--0"])
def test_a_folder_that_made_room_comes_back_or_goes(owner: str, replaced: bool, tmp_path: Path) -> None:
    made_room = write_old(tmp_path / f"final{REPLACED}{owner}")
    if replaced:
        write_folder(tmp_path / "final", NEW.items(), replace=False)
    before = names(tmp_path)
    assert sweep_strays(tmp_path) == []
    assert names(tmp_path) == before  # its owner may be about to give the name to another folder
    os.utime(made_room, (0, 0))
    sweep_strays(tmp_path)
    assert names(tmp_path) == ["final"]
    assert content(tmp_path / "final") == (NEW if replaced else OLD)


def test_a_sweep_of_another_container_leaves_a_folder_that_is_being_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = write_old(tmp_path / "final")
    os.utime(final, (0, 0))  # made long ago
    rename = os.rename

    def sweep_between(source: Path, target: Path) -> None:
        rename(source, target)
        with monkeypatch.context() as patch:
            patch.setattr(owners, "_namespace", lambda: "another.f0000001")
            patch.setattr("os.rename", rename)
            sweep_strays(tmp_path)

    monkeypatch.setattr("os.rename", sweep_between)
    assert write_folder(final, NEW.items(), replace=True)
    assert names(tmp_path) == ["final"]
    assert content(final) == NEW


def test_a_replacement_that_fails_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = write_old(tmp_path / "final")
    at = next(i for i, one in enumerate(OPERATIONS) if one == "rename final") - OPERATIONS.index("folder")
    fail = Failpoint("eio", at)
    monkeypatch.setattr(files, "failpoint", fail)
    with pytest.raises(OSError, match="error"):
        write_folder(final, NEW.items(), replace=True)
    assert fail.seen[-1] == "rename final"
    assert names(tmp_path) == ["final"]
    assert content(final) == OLD


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('añ文"\\\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)


@given(json_values)
def test_canonical_json_reads_back_and_does_not_depend_on_the_order_of_keys(value: Any) -> None:
    content = canonical_json(value)
    assert json.loads(content) == value
    assert canonical_json(reversed_keys(value)) == content


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [reversed_keys(item) for item in value] if isinstance(value, list) else value


def test_the_bytes_of_canonical_json_are_those_of_the_first_release() -> None:
    # If these change, every fingerprint and root hash changes: no store could be resumed, no run continued.
    value = {"b": [1, 2.5, None], "a": {"ü": True, "e": []}}
    wanted = '{\n "a": {\n  "e": [],\n  "ü": true\n },\n "b": [\n  1,\n  2.5,\n  null\n ]\n}\n'
    assert canonical_json(value) == wanted.encode()
    assert sha256_of({}) == "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}])
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(value)


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff\xfe", b"{}{}"])
def test_a_file_that_is_no_json_is_damage(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(DamageError, match=r"file\.json.*not valid JSON"):
        read_json(path)


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_the_hashes_of_a_file_and_of_its_parts_are_equal(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "hashed"
    path.write_bytes(b"".join(parts))
    assert xxh3_parts(parts) == (path.stat().st_size, xxh3_file(path))


def test_the_hashes_are_the_published_ones(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    assert xxh3_file(path) == "99aa06d3014798d86001c324468d497f"  # XXH3-128 of nothing
    assert sha256_file(path) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
