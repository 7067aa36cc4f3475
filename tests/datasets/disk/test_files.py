"""Files: a write leaves the old content or the new, never a temporary; temporaries of dead processes are swept."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import Outcome, start
from hypothesis import given
from hypothesis import strategies as st

from leandit.datasets.disk import locks
from leandit.datasets.disk.files import (
    EXIT_DIED,
    NEEDS_SPACE,
    REPLACED,
    TEMPORARY_PREFIX,
    Failpoint,
    remove,
    temporary_beside,
    temporary_folder,
    write_atomic,
    write_folder,
)
from leandit.datasets.disk.hashing import canonical_json, read_json, sha256_file, sha256_of, xxh3_file
from leandit.datasets.disk.spill import map_array
from leandit.datasets.disk.strays import STALE_SECONDS, find_strays, sweep_strays
from leandit.errors import DamageError, ResourceError


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
    write_atomic(path, [b"n", np.empty((0, 3), np.float32), memoryview(b"ew"), bytearray(b"!"), np.ones(2, np.uint8)])
    assert path.read_bytes() == b"new!\1\1"
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize(("function", "calls_before"), [("os.rename", 0), ("os.fsync", 1), ("os.mkdir", 0)])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_resource_error_that_names_the_file(
    function: str, calls_before: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder/file"
    if function != "os.mkdir":
        path.parent.mkdir()
    monkeypatch.setattr(function, failing(OSError(number, os.strerror(number)), calls_before))
    with pytest.raises(ResourceError, match=rf"{path}.*{os.strerror(number)}.*iB free") as caught:
        write_atomic(path, b"new")
    assert caught.value.exit_code == 5
    monkeypatch.setattr(function, failing(KeyboardInterrupt(), calls_before))
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"new")
    assert not list(tmp_path.rglob(f"{TEMPORARY_PREFIX}*"))


def test_a_file_that_is_too_large_is_not_told_to_free_space(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(ResourceError, match=r"File too large.*'ulimit -f'.*file system.*Raise the limit") as caught:
            write_atomic(tmp_path / "file", bytes(1 << 17))
        with pytest.raises(ResourceError, match=r"File too large.*Raise 'ulimit -f', or set TMPDIR to another folder"):
            map_array(1 << 24, "uint8", "a table")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "space" not in str(caught.value)
    assert caught.value.exit_code == 5
    assert names(tmp_path) == []


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
    assert not write_folder(final, OLD.items(), replace=False)  # the first one stays
    assert content(final) == NEW
    assert names(final.parent) == ["final"]


def test_removing_takes_a_folder_a_file_or_nothing_and_leaves_what_a_link_names(tmp_path: Path) -> None:
    target = write_old(tmp_path / "target")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "file").write_bytes(b"")
    for name in ("link", "file", "nothing"):
        remove(tmp_path / name)
    assert content(target) == OLD
    remove(target)
    assert names(tmp_path) == []


def test_a_folder_whose_removal_is_cut_off_does_not_look_whole(tmp_path: Path) -> None:
    final = write_old(tmp_path / "final")
    for at, left, swept in ((0, OLD, ["final"]), (1, {}, [])):
        failing_at("die", at, lambda: remove(final), expected=EXIT_DIED)
        assert content(final) == left
        sweep_strays(tmp_path)
        assert names(tmp_path) == swept


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
    *("rename .leandit-tmp-", "rename final", "sync", "remove .leandit-tmp-"),
)


def starting(folder: Path) -> Path:
    write_atomic(folder / "file", b"old")
    write_old(folder / "final")
    return folder


@pytest.mark.parametrize("kind", ["count", "short"])  # short: the system takes half of what it is given
def test_every_operation_is_counted(kind: str, tmp_path: Path) -> None:
    # Points to fail at: with one fewer, a crash at that place would no longer be tested.
    folder = starting(tmp_path)
    seen = failing_at(kind, -1, lambda: write_both(folder), expected=0).operations
    if kind == "count":
        assert len(seen) == len(OPERATIONS)
        assert [name for name, start in zip(seen, OPERATIONS, strict=True) if not name.startswith(start)] == []
    assert (folder / "file").read_bytes() == b"new"
    assert content(folder / "final") == NEW


@pytest.mark.parametrize("kinds", [("die",), ("eio", "enospc")])
def test_whatever_operation_fails_the_old_content_is_there_or_the_new(kinds: tuple[str, ...], tmp_path: Path) -> None:
    for at in range(len(OPERATIONS)):
        folder, kind = starting(tmp_path / f"{at}"), kinds[at % len(kinds)]
        fails = kind != "enospc" or any(one.split()[0] in NEEDS_SPACE for one in OPERATIONS[at:])
        code = (EXIT_DIED if kind == "die" else 1) if fails else 0
        outcome = failing_at(kind, at, lambda folder=folder: write_both(folder), expected=code)
        assert kind != "enospc" or not fails or "ResourceError" in outcome.error
        sweep_strays(folder)  # as the next start does
        assert names(folder) == ["file", "final"], OPERATIONS[at]
        assert (folder / "file").read_bytes() in (b"old", b"new"), OPERATIONS[at]
        assert content(folder / "final") in (OLD, NEW), OPERATIONS[at]


# --- Temporaries of dead processes ------------------------------------------------------------------------------------


def written(path: Path, *, age_seconds: float = 0) -> Path:
    """A temporary that nobody holds: a file, or a folder if the path has the mark of one that is replaced."""
    write_old(path) if REPLACED in path.name else path.write_bytes(b"half")
    then = time.time() - age_seconds
    for each in (*path.rglob("*"), path):
        os.utime(each, (then, then))
    return path


def elsewhere(path: Path, mark: str = "") -> Path:
    """The name that a process of another host gives to a temporary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "no/de@7")
        return temporary_beside(path, mark)


@pytest.fixture(params=[True, False], ids=["locks", "no locks"])
def has_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A file system with flock, and one without."""
    if not request.param:
        monkeypatch.setattr(fcntl, "flock", failing(OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    return request.param


def test_temporaries_of_a_killed_process_are_swept_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    def write_slowly() -> None:
        with temporary_folder(tmp_path / "folder") as temporary:
            write_atomic(temporary / "a", b"whole")

            def parts() -> Iterator[bytes]:
                yield b"half"
                (tmp_path / "ready").touch()
                time.sleep(60)

            write_atomic(tmp_path / "deep/file", parts())

    (tmp_path / "file").write_bytes(b"whole")
    child = start(write_slowly)
    while not (tmp_path / "ready").exists():
        time.sleep(0.005)
    strays = find_strays(tmp_path)
    assert len(strays) == 2
    for path in strays:
        os.utime(path, (0, 0))  # alive, however long it was stopped
    assert sweep_strays(tmp_path) == []
    child.signal(signal.SIGKILL)
    child.wait()
    assert sweep_strays(tmp_path) == strays
    assert names(tmp_path) == ["deep", "file", "ready"]
    assert names(tmp_path / "deep") == []


def test_a_fork_does_not_keep_the_lock_of_its_parent(tmp_path: Path) -> None:
    # Else what a killed coordinator leaves would stay until its decoders have ended, too.
    path = written(temporary_beside(tmp_path / "file"))
    read, write = os.pipe()
    with locks.hold(path):
        if (child := os.fork()) == 0:
            os.write(write, b"x")
            time.sleep(60)
        os.read(read, 1)
        descriptor = next(iter(locks._held))
        locks._held.remove(descriptor)  # as when the parent is killed: closed, without unlocking
        os.close(descriptor)
    swept = sweep_strays(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert swept == [path]


def test_what_is_removed_before_it_is_locked_is_created_again(tmp_path: Path) -> None:
    removed: list[Path] = []

    def create(path: Path) -> None:
        path.touch()
        if not removed:
            removed.extend(sweep_strays(tmp_path))

    path = temporary_beside(tmp_path / "file")
    with locks.hold(path, create):
        assert removed == [path]
        assert sweep_strays(tmp_path) == []
        assert path.exists()


def test_of_another_host_or_without_locks_the_age_decides(
    has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda now=time.time: now() - 1e6)  # the clock of the file system counts
    name = elsewhere if has_locks else temporary_beside
    kept = [written(name(tmp_path / "a"), age_seconds=-1e6), written(name(tmp_path / "b", REPLACED), age_seconds=-1e6)]
    gone = [written(name(tmp_path / "c"), age_seconds=STALE_SECONDS - 1e6 + 60)]
    (kept[1] / "inner").write_bytes(b"")
    os.utime(kept[1], (0, 0))  # a large file in an old folder still grows
    assert sweep_strays(tmp_path) == gone
    assert names(tmp_path) == sorted(path.name for path in kept)
    write_both(starting(tmp_path / "other"))  # files are written all the same
    assert (tmp_path / "other/file").read_bytes() == b"new"


def test_all_strays_are_found_but_not_what_lies_in_one(tmp_path: Path) -> None:
    folder = temporary_beside(tmp_path / "a/final")
    write_folder(folder, [(temporary_beside(Path("inner")).name, b"")], replace=False)
    known = sorted([written(elsewhere(tmp_path / "file")), folder])
    assert find_strays(tmp_path) == known
    assert find_strays(tmp_path, below=False) == [path for path in known if path.parent == tmp_path]
    assert sorted(sweep_strays(tmp_path, of_all=True)) == known
    for owner in ("", "host-1234567", "host@1-2"):  # no name that this project gives
        path = written(tmp_path / f"{TEMPORARY_PREFIX}{owner}@file")
        assert sweep_strays(tmp_path) == []
        os.utime(path, (0, 0))
        assert sweep_strays(tmp_path) == [path]


@pytest.mark.parametrize("name", [temporary_beside, elsewhere])
def test_a_folder_that_made_room_comes_back_or_goes(name: Callable[..., Path], tmp_path: Path) -> None:
    for left in (OLD, NEW):
        written(name(tmp_path / "final", REPLACED), age_seconds=2 * STALE_SECONDS)
        if left is NEW:  # it was replaced
            write_folder(tmp_path / "final", NEW.items(), replace=True)
        sweep_strays(tmp_path)
        assert names(tmp_path) == ["final"]
        assert content(tmp_path / "final") == left


@pytest.mark.parametrize("work", ["replace", "remove"])
@pytest.mark.usefixtures("has_locks")
def test_a_sweep_leaves_a_folder_that_is_being_replaced_or_removed(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, rename, swept = write_old(tmp_path / "final"), os.rename, list[list[Path]]()
    for each in (*final.iterdir(), final):
        os.utime(each, (0, 0))  # made long ago

    def sweep_between(source: Path, target: Path) -> None:
        rename(source, target)
        with monkeypatch.context() as patch:
            patch.setattr("os.rename", rename)
            swept.append(sweep_strays(tmp_path))

    monkeypatch.setattr("os.rename", sweep_between)
    if work == "remove":
        remove(final)
    else:
        assert write_folder(final, NEW.items(), replace=True)
    assert not any(swept)
    assert content(final) == ({} if work == "remove" else NEW)
    assert len(names(tmp_path)) == (work == "replace")


# --- JSON and hashes --------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('añ文"\\\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=9,
)


@given(json_values)
def test_canonical_json_reads_back_and_does_not_depend_on_the_order_of_keys(value: Any) -> None:
    content = canonical_json(value)
    assert json.loads(content) == value
    if isinstance(value, dict):
        assert canonical_json(dict(reversed(value.items()))) == content


def test_the_bytes_of_canonical_json_are_those_of_the_first_release() -> None:
    # If these change, every fingerprint and root hash changes: no store could be resumed, no run continued.
    value = {"b": [1, 2.5, None], "a": {"ü": True, "e": []}}
    wanted = '{\n "a": {\n  "e": [],\n  "ü": true\n },\n "b": [\n  1,\n  2.5,\n  null\n ]\n}\n'
    assert canonical_json(value) == wanted.encode()
    assert sha256_of({}) == "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"
    for other in (float("nan"), {"a": [float("inf")]}):
        with pytest.raises(ValueError, match="JSON"):
            canonical_json(other)


NO_JSON = ["[" * 10_000, '{"a": NaN}', "1e999", "9" * 5000, '"\\ud800"', "\xff", "", "{}{}"]


def test_a_file_is_json_with_any_character_or_damage(tmp_path: Path) -> None:
    for text in NO_JSON:
        (tmp_path / "file.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(DamageError, match=r"file\.json.*not valid JSON"):
            read_json(tmp_path / "file.json")
    characters = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000)]))
    value = {"path": "C:\\udir\\uDEAD", "text": characters, "pair": "😀"}
    for content in (canonical_json(value), json.dumps(value).encode()):
        (tmp_path / "file.json").write_bytes(content)
        assert read_json(tmp_path / "file.json") == value


def test_the_hashes_are_the_published_ones(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    assert xxh3_file(path) == "99aa06d3014798d86001c324468d497f"  # XXH3-128 of nothing
    assert sha256_file(path) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
