"""Files: a write leaves the old content or the new, never a temporary; strays of dead processes are swept."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leandit.datasets.errors import DamageError, ResourceError
from leandit.datasets.files import (
    TEMPORARY_PREFIX,
    canonical_json,
    commit_folder,
    read_json,
    sha256_file,
    sha256_of,
    sweep_strays,
    temporary_beside,
    write_atomic,
    xxh3_file,
    xxh3_parts,
)

FULL = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG]


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


@pytest.mark.parametrize("function", ["os.replace", "os.fsync"])
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
    ("function", "calls_before"), [("os.replace", 0), ("os.fsync", 0), ("os.fsync", 1), ("os.mkdir", 0)]
)
@pytest.mark.parametrize("number", FULL)
def test_a_full_disk_is_a_resource_error_that_names_the_file_and_the_free_space(
    function: str, calls_before: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder/file"
    if function != "os.mkdir":
        path.parent.mkdir()
    monkeypatch.setattr(function, failing(OSError(number, os.strerror(number)), calls_before))
    with pytest.raises(ResourceError, match=r"MiB free") as caught:
        write_atomic(path, b"new")
    assert str(path) in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert caught.value.exit_code == 5
    assert not list(tmp_path.rglob(f"{TEMPORARY_PREFIX}*"))


def test_the_order_is_write_sync_rename_sync_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the first sync a power cut leaves an empty file, without the second none at all.
    path, seen, fsync, replace = tmp_path / "file", [], os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        seen.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def spy_replace(source: Path, target: Path) -> None:
        assert source.read_bytes() == b"content"
        seen.append(("rename", target.name))
        replace(source, target)

    monkeypatch.setattr("os.fsync", spy_fsync)
    monkeypatch.setattr("os.replace", spy_replace)
    write_atomic(path, b"content")
    assert seen == [("sync", temporary_beside(path).name), ("rename", "file"), ("sync", tmp_path.name)]


def make_folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


def test_a_folder_is_moved_into_place_and_the_older_one_goes(tmp_path: Path) -> None:
    final = make_folder(tmp_path / "final", "old")
    commit_folder(make_folder(temporary_beside(final), "new"), final)
    assert names(tmp_path) == ["final"]
    assert (final / "file").read_text() == "new"


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_crash_while_a_folder_is_replaced_loses_neither_content(
    calls_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = make_folder(tmp_path / "final", "old")
    temporary = make_folder(temporary_beside(final), "new")
    left, replace = [calls_before], os.replace

    def crash(source: Path, target: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", crash)
        with pytest.raises(KeyboardInterrupt):
            commit_folder(temporary, final)
    sweep_strays(tmp_path)  # as the next start does
    assert (final / "file").read_text() in ("old", "new")


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


def stray(folder: Path, pid: int, monkeypatch: pytest.MonkeyPatch, host: str | None = None) -> Path:
    """The temporary of "file" as another process names it."""
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: pid)
        if host:
            patch.setattr("socket.gethostname", lambda: host)
        path = temporary_beside(folder / "file")
    path.write_bytes(b"half")
    return path


def test_strays_of_dead_processes_are_swept_and_those_of_living_ones_stay(
    tmp_path: Path, dead_pid: int, living_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "a/b"
    deep.mkdir(parents=True)
    dead = [stray(tmp_path, dead_pid, monkeypatch), stray(deep, dead_pid, monkeypatch)]
    kept = [
        stray(tmp_path, living_pid, monkeypatch),
        stray(deep, living_pid, monkeypatch),
        stray(tmp_path, 1, monkeypatch),  # alive, and perhaps of another user
        stray(tmp_path, dead_pid, monkeypatch, host="another-host"),
        tmp_path / "file",
    ]
    kept[-1].write_bytes(b"whole")
    folder = temporary_beside(tmp_path / "checkpoint")
    folder = folder.with_name(folder.name.replace(str(os.getpid()), str(dead_pid)))
    make_folder(folder, "half")
    assert sorted(sweep_strays(tmp_path)) == sorted([*dead, folder])
    assert not any(path.exists() for path in [*dead, folder])
    assert all(path.exists() for path in kept)
    assert sweep_strays(tmp_path) == []


def test_a_host_whose_name_begins_with_ours_keeps_its_temporaries(
    tmp_path: Path, dead_pid: int, living_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a cluster with a shared disk: "node" must not sweep what a process of "node-7" is writing.
    theirs = stray(tmp_path, living_pid, monkeypatch, host=f"node-{dead_pid}")
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    assert sweep_strays(tmp_path) == []
    assert theirs.exists()


def test_a_temporary_names_its_host_and_process(tmp_path: Path) -> None:
    # FORMAT.md tells readers of this name, and an older release sweeps by it.
    wanted = f".leandit-tmp-{socket.gethostname()}@{os.getpid()}@zarr.json"
    assert temporary_beside(tmp_path / "zarr.json") == tmp_path / wanted


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('añ文"\\\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)


@settings(deadline=None, max_examples=50)
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


@settings(deadline=None)
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
