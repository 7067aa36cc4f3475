"""Ways to damage a store, and children that read it or die: what a user of a damaged store meets."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from making import cut, encode
from safetensors.torch import load_file, save_file
from stores import read_all

from leandit.datasets.disk import files
from leandit.datasets.disk.files import EXIT_DIED, Failpoint
from leandit.datasets.format.table_schemas import STORED
from leandit.datasets.revisions.writer import StoreWriter, row_checksum
from leandit.errors import LeanditError
from leandit.precompute.config import PrecomputeRecipe

EXIT_REFUSED, EXIT_WRONG = 40, 42  # of a child: an error of ours, wrong numbers
SHIPPED = Path(__file__).parents[2] / "precompute/demo_encoders/t5"
CHILD_SECONDS = 240.0  # a child that takes longer hangs
REVISION_FILES = ("manifest.json", "records.parquet", "captions.parquet", "sources.parquet", "local.json")


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file; twice undoes it."""
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


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
    "half": (lambda path: cut(path, path.stat().st_size // 2), "size"),
    "a byte less": (cut, "size"),
    "empty": (lambda path: path.write_bytes(b""), "size"),
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


@dataclass(frozen=True)
class Outcome:
    """How a child ended: what its work returned, its I/O operations and syncs, the classes and text of its error."""

    code: int
    value: Any = None
    operations: tuple[str, ...] = ()
    fsyncs: int = 0
    error: tuple[str, ...] = ()
    message: str = ""

    @property
    def died(self) -> bool:
        """It ended at its failpoint, or was killed."""
        return self.code in (EXIT_DIED, -signal.SIGKILL)


@dataclass(frozen=True)
class Child:
    """A forked process that works."""

    pid: int
    pipe: int

    def wait(self) -> Outcome:
        """Wait for its end; one that hangs is killed, and that is an error."""
        said = b""
        deadline = time.monotonic() + CHILD_SECONDS
        while True:
            ready, _, _ = select.select([self.pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"a child did not end in {CHILD_SECONDS} s")
            if not (block := os.read(self.pipe, 1 << 20)):
                break
            said += block
        os.close(self.pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if not said:
            return Outcome(code)
        values = json.loads(said)
        lists = {name: tuple(values.pop(name)) for name in ("operations", "error")}
        return Outcome(code, **values, **lists)

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to it, or to its whole process group."""
        (os.killpg if group else os.kill)(self.pid, number)


def start(work: Callable[[], Any], *, failpoint: Failpoint | None = None, own_session: bool = False) -> Child:
    """Fork a child that does some work under a failpoint and says how it ended; what it returns must be JSON."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Child(pid, reading)
    code = 1
    said: dict[str, Any] = {"value": None, "fsyncs": 0, "error": [], "message": ""}
    try:
        os.close(reading)
        if own_session:
            os.setsid()
        gc.disable()
        files.failpoint = failpoint or Failpoint("count")
        # Counted, not done: what a process wrote before it died is in the kernel. That it is asked for, and when, is
        # looked at by check_order. The patch dies with the child.
        fsynced: list[int] = []
        os.fsync = fsynced.append
        said["value"] = work()
        said["fsyncs"] = len(fsynced)
        code = 0
    except BaseException as error:  # noqa: BLE001 - the parent looks at it
        said["error"] = [kind.__name__ for kind in type(error).__mro__]
        said["message"] = f"{error}\n{''.join(traceback.format_exception(error))}"
    finally:
        said["operations"] = files.failpoint.seen if files.failpoint else []
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(said).encode())
        os._exit(code)


def processes_of_session(session: int) -> list[int]:
    """Processes that still live in a session, whatever their group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # ended since
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def descendants_of(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def gone_within(pid: int, seconds: float) -> bool:
    """Whether a process ends in time."""
    end = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # dead, though its parent has not asked yet
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
    return True


def in_child(work: Callable[[], Any]) -> int:
    """Run something in a forked child; its exit code or what it returned, negative where a signal ended it."""
    outcome = start(work).wait()
    print(outcome.message)
    return EXIT_REFUSED if LeanditError.__name__ in outcome.error else outcome.code or outcome.value or 0


def read_after(faults: Iterable[tuple[str, Callable[[], None], Callable[[], None]]], root: Path, wanted: Any) -> int:
    """Read a store in a child after each fault (name, make, undo): right numbers or an error of ours, never a signal.

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
    outcome = start(lambda: work() and None, failpoint=Failpoint("die", at)).wait()
    assert outcome.code in (0, EXIT_DIED), outcome.message
    return outcome.died


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
    """How many I/O operations something does."""
    return len(start(lambda: work() and None).wait().operations)


def encode_wrongly(recipe: PrecomputeRecipe, source: Path, store: Path, arrays: Iterable[str], amount: float) -> None:
    """Make a store whose checksums fit, and whose first row of some arrays differs by a share of its numbers."""
    real = StoreWriter.commit

    def commit(self: StoreWriter, name: str, shard: int, written: dict[str, Any], results: Any, **how: Any) -> int:
        part = self.plan.layout.parts[name]
        for array in written.keys() & set(arrays) if not shard else ():
            rows = written[array]
            first = next(i for i, row in enumerate(rows) if not np.isnan(row).any())
            rows[first] = (rows[first] * (1 + amount)).astype(rows.dtype)
            if layout := part.captions:
                count = int(layout.num_tokens[0])
                pieces = [some[: 1 if path.endswith("pooled") else count] for path, some in written.items()]
                results["checksum"][0, 0] = row_checksum(*pieces)
                continue
            for i, layouts in enumerate(part.groups.values()):
                if results["state"][first, i] == STORED:
                    results["checksum"][first, i] = row_checksum(*(written[one.path][first] for one in layouts))
        return real(self, name, shard, written, results, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreWriter, "commit", commit)
        encode(recipe, source, store)


def break_word(folder: Path, word: str) -> str:
    """The shipped text encoder with an embedding of NaN for a word of the captions, or for all, as a setting."""
    from transformers import AutoTokenizer  # its import takes a second

    shutil.copytree(SHIPPED, folder)
    tensors, tokenizer = load_file(folder / "model.safetensors"), AutoTokenizer.from_pretrained(folder)
    ids = {*tokenizer(f"a {word}")["input_ids"]} - {*tokenizer("a big green circle" if word else "a")["input_ids"]}
    tensors["shared.weight"][sorted(ids) if word else slice(None)] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return f"text.model={folder}"
