"""Ways to damage a store, and children that read it or die: what a user of a damaged store meets."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stores import read_all

from leandit.datasets.disk import files
from leandit.datasets.disk.files import EXIT_DIED, Failpoint
from leandit.datasets.errors import LeanditError

EXIT_REFUSED, EXIT_OTHER, EXIT_WRONG = 40, 41, 42  # of a child: an error of ours, any other, wrong numbers
REVISION_FILES = ("manifest.json", "records.parquet", "captions.parquet", "sources.parquet", "local.json")


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file; twice undoes it."""
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def _cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_link(path: Path) -> None:
    path.rename(path.with_name(f"elsewhere-{path.name}"))
    path.symlink_to(path.with_name(f"elsewhere-{path.name}"))


# What may happen to a file, and the cause that a verification names.
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (lambda path: flip(path, 4 * path.stat().st_size + 1), "content"),
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "content"),
    "half": (lambda path: _cut(path, path.stat().st_size // 2), "size"),
    "a byte less": (lambda path: _cut(path, path.stat().st_size - 1), "size"),
    "empty": (lambda path: _cut(path, 0), "size"),
    "gone": (Path.unlink, "missing"),
    "a folder": (_replace_by_folder, "missing"),
    "a link": (_replace_by_link, "link"),
}


def undo_damage(path: Path, content: bytes) -> None:
    """Bring a file back, whatever of DAMAGES has happened to it."""
    path.with_name(f"elsewhere-{path.name}").unlink(missing_ok=True)
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def in_child(work: Callable[[], int | None]) -> int:
    """Run something in a forked child; its exit code, negative where a signal ended it."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        code = EXIT_OTHER
        try:
            code = work() or 0
        except LeanditError:
            code = EXIT_REFUSED
        except BaseException:  # noqa: BLE001 - a child of a test must not come back into pytest
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read_after(faults: Iterable[tuple[str, Callable[[], None], Callable[[], None]]], root: Path, wanted: Any) -> int:
    """Read a store after each fault, in a child: exactly the right numbers or an error of ours, and never a signal.

    Args:
      faults: name of each, what brings it about, what undoes it.
    Returns: how many of them do not hinder a reader.
    """
    told = root.parent / "told"

    def work() -> int:
        rightly = 0
        for name, make, undo in faults:
            told.write_text(name)
            make()
            try:
                if read_all(root) != wanted:
                    return EXIT_WRONG
                rightly += 1
            except LeanditError:
                pass
            undo()
        told.write_text(str(rightly))
        return 0

    code = in_child(work)
    assert code == 0, f"after '{told.read_text()}' the reader ended with {code}"
    return int(told.read_text())


def dies_at(at: int, work: Callable[[], Any]) -> bool:
    """Run something in a child that dies at an I/O operation; False where it came to its end before."""

    def run() -> int:
        files.failpoint = Failpoint("die", at)
        work()
        return 0

    code = in_child(run)
    assert code in (0, EXIT_DIED), f"it ended with {code}"
    return code == EXIT_DIED


@dataclass
class DiesBefore(Failpoint):
    """Ends the process before the first operation of a name, such as "rename manifest.json"."""

    name: str = ""

    def step(self, operation: str, path: Path) -> bool:
        """As ``Failpoint.step``."""
        if f"{operation} {path.name}" == self.name:
            os._exit(EXIT_DIED)
        return super().step(operation, path)


def dies_before(name: str, work: Callable[[], Any]) -> None:
    """Run something in a child that dies before an I/O operation: all but the seal, before "rename manifest.json"."""

    def run() -> int:
        files.failpoint = DiesBefore(name=name)
        work()
        return 0

    code = in_child(run)
    assert code == EXIT_DIED, f"it ended with {code}"


class CutOff(Exception):
    """Stands for the end of a process."""


def without_seal(work: Callable[[], Any]) -> None:
    """Run a precompute up to its seal, in this process: all is committed, and nothing of the seal is written."""

    def cut_off(*_: object) -> None:
        raise CutOff

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leandit.datasets.revisions.writer.seal_files", cut_off)
        with pytest.raises(CutOff):
            work()


def num_operations(work: Callable[[], Any]) -> int:
    """How many I/O operations something does, in this process."""
    files.failpoint = Failpoint()
    try:
        work()
        return len(files.failpoint.seen)
    finally:
        files.failpoint = None
