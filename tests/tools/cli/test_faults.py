"""A disk, a network folder or a machine that fails is never damage and never "report it": exit code 5 and the path."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from making import Leandit
from stores import copy_of

from leandit.datasets.disk import files
from leandit.datasets.disk.files import Failpoint
from leandit.datasets.revisions.commits import hash_of_damaged_plan
from leandit.datasets.store import LatentStore
from leandit.errors import ResourceError
from leandit.train.weights import published

OPENERS = [(builtins, "open"), (io, "open"), (os, "open"), (os, "pread"), (os, "preadv"), (pa, "OSFile")]
FAULTS = {"a bad sector": errno.EIO, "a stale handle": errno.ESTALE, "no descriptors": errno.EMFILE}


def break_reading(patch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Let every attempt to open a file whose path ends with ``name`` fail, as a failing disk would."""

    def guarded(open_file: Callable[..., Any]) -> Callable[..., Any]:
        def open_or_fail(file: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(file, str | Path) and str(file).endswith(name):
                raise OSError(number, os.strerror(number), str(file))
            return open_file(file, *arguments, **options)

        return open_or_fail

    for module, opener in OPENERS:
        patch.setattr(module, opener, guarded(getattr(module, opener)))


@pytest.mark.parametrize("number", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("name", ["records.parquet", "000001/manifest.json"])
def test_a_fault_while_a_store_is_inspected_ends_with_5_and_the_path(
    label_store: LatentStore, leandit: Leandit, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    break_reading(monkeypatch, name, number)
    ended = leandit("inspect", label_store.path)
    assert ended.code == 5, ended
    assert name in ended.err
    assert os.strerror(number) in ended.err
    assert "report it" not in ended.err


@pytest.mark.parametrize("number", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_a_commit_record_does_not_encode_its_shard_again(
    unsealed_store: Path, leandit: Leandit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = copy_of(unsealed_store, tmp_path / "store")
    commits = sorted(store.glob("revisions/000001/commits/**/*.json"))
    break_reading(monkeypatch, commits[0].name, number)
    ended = leandit("inspect", store, "--json")
    assert ended.code == 5, ended
    assert commits[0].name in ended.err


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename"])
def test_a_fault_while_a_store_is_written_ends_with_5_and_the_path(
    label_store: LatentStore, leandit: Leandit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    counted = Failpoint()
    monkeypatch.setattr(files, "failpoint", counted)
    assert leandit("compact", label_store.path, "--out", tmp_path / "counted").code == 0
    at = next(number for number, step in enumerate(counted.seen) if step.startswith(operation))
    monkeypatch.setattr(files, "failpoint", Failpoint("eio", at))
    ended = leandit("compact", label_store.path, "--out", tmp_path / "out")
    assert ended.code == 5, ended
    assert "@out/" in ended.err or f"{tmp_path}/out" in ended.err
    assert "Input/output error" in ended.err


@pytest.mark.parametrize("number", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("repair", [False, True])
def test_a_fault_of_the_plan_is_no_damage(
    unsealed_store: Path, leandit: Leandit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, repair: bool
) -> None:
    store = copy_of(unsealed_store, tmp_path / "store")
    break_reading(monkeypatch, "plan/plan.json", number)
    ended = leandit("verify", store, *(["--repair"] if repair else []))
    assert ended.code == 5, ended
    assert "plan/plan.json" in ended.err


def test_a_fault_of_a_commit_record_does_not_give_up_the_shards_of_a_damaged_plan(
    unsealed_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copy_of(unsealed_store, tmp_path / "store")
    (store / "revisions/000001/plan/plan.json").write_bytes(b"{}")
    assert hash_of_damaged_plan(store, 1)
    break_reading(monkeypatch, ".json", errno.EIO)
    with pytest.raises(ResourceError, match="Input/output error"):
        hash_of_damaged_plan(store, 1)


@pytest.mark.parametrize("number", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_first_weights_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(published, "load_file", fail)
    with pytest.raises(ResourceError, match=os.strerror(number)):
        published.read_safetensors(tmp_path / "model.safetensors")
