"""Access by file system: nothing of a store on a network file system is mapped, so what is lost is an error."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import in_child
from stores import bytes_in, copy_of

from leandit.datasets.disk import file_systems
from leandit.datasets.disk.file_systems import NETWORK_FILE_SYSTEMS, choose_access
from leandit.datasets.loader import make_loader
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError

NFS = 0x6969
linux = pytest.mark.skipif(sys.platform != "linux", reason="statfs and /proc are those of Linux")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None, str], None]:
    """Folders whose path ends so lie on another file system."""

    def lie(number: int | None, end: str = "") -> None:
        real = file_systems.file_system_number
        monkeypatch.setattr(
            file_systems, "file_system_number", lambda path: number if str(path).endswith(end) else real(path)
        )

    return lie


def mapped_files(store: LatentStore) -> list[str]:
    """Files of a store that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if str(store.root) in line]


@linux
def test_the_number_of_a_file_system_is_that_of_the_kernel(tmp_path: Path) -> None:
    assert file_systems.file_system_number(Path("/proc")) == 0x9FA0
    assert file_systems.file_system_number(tmp_path / "none") is None
    assert choose_access([tmp_path], "auto").mode == "map"


def test_a_number_that_is_a_negative_integer_in_c_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def statfs(_path: bytes, answer: ctypes.Array[ctypes.c_char]) -> int:
        answer[: ctypes.sizeof(ctypes.c_long)] = bytes(ctypes.c_long(0xFF534D42 - 2**32))
        return 0

    monkeypatch.setattr(file_systems, "_statfs", lambda: statfs)
    assert str(choose_access([Path("share")], "auto")) == "read by pread (CIFS)"


@pytest.mark.parametrize("number", sorted(NETWORK_FILE_SYSTEMS))
def test_network_file_systems_are_read_by_pread(number: int, on: Callable[..., None]) -> None:
    on(number)
    assert choose_access([Path("x")], "auto") == ("pread", NETWORK_FILE_SYSTEMS[number])
    assert choose_access([Path("x")], "map") == ("map", "as asked")


def test_systems_that_do_not_tell_are_mapped(on: Callable[..., None]) -> None:
    on(None)
    assert str(choose_access([Path("x")], "auto")) == "mapped (unknown file system)"


@linux
@pytest.mark.parametrize("end", ["store", "buckets", "captions"])
def test_nothing_of_a_store_on_a_network_file_system_is_mapped(
    end: str, caption_store: LatentStore, tmp_path: Path, on: Callable[..., None]
) -> None:
    expected = [list(bytes_in(batch)) for batch in make_loader(caption_store, global_batch=4)]
    local = LatentStore(copy_of(caption_store.path, tmp_path / "local"))
    assert len(list(make_loader(local, global_batch=4))) == len(expected)
    assert local.access.mode == "map"
    assert len(mapped_files(local)) > 3
    on(NFS, end)
    store = LatentStore(copy_of(caption_store.path, tmp_path / "store"))
    assert store.access == ("pread", "NFS")
    assert [list(bytes_in(batch)) for batch in make_loader(store, global_batch=4)] == expected
    store.record(store.record_at(3).key)
    assert store.null_caption.size
    assert mapped_files(store) == []


@linux
def test_a_file_that_is_lost_while_it_is_read_is_an_error(
    caption_store: LatentStore, tmp_path: Path, on: Callable[..., None]
) -> None:
    on(NFS)
    store = LatentStore(copy_of(caption_store.path, tmp_path / "store"))
    loader = make_loader(store, global_batch=4, prefetch=0)
    assert len(list(loader)) == len(loader)

    def read_what_is_lost() -> int:
        for path in store.path.rglob("*"):
            if path.is_file():
                path.write_bytes(b"")  # the next read of a map would end this process
        try:
            list(loader)
        except DamageError:
            return 7
        return 0

    assert in_child(read_what_is_lost) == 7
