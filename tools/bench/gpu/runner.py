"""``leandit bench gpu``: runs the cells one after another, each in a process of its own, within a budget of time.

A cell that crashes or takes too long costs itself alone: it is recorded with its message, and the next one runs. When
this process ends in any way, so does the cell's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from subprocess import Popen
from typing import Any

from ..harness.meters import hardware
from ..harness.scratch import benchmark_folder, fresh_folder
from .cells import FAST_DIT, REAL, TINY, Cell
from .results import CUT, DONE, FAILED, SKIPPED, Record, append_result, is_finished, read_results

OWN_FOLDER, LOGS = "bench-gpu", "logs"
ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Rejected)\b.*")  # the last line of a traceback
MESSAGE_LETTERS = 400


@dataclass(frozen=True)
class GpuRequest:
    """What to run.

    Args:
      out: folder of the results.
      scratch: folder for stores, encoders of random weights and checkpoints: 60 GB.
      device: as ``torch.device`` takes it.
      minutes: for all of it.
      tiny: sizes for a CPU; no figure means anything.
      again: try cells again that have failed, or were skipped.
      fast_dit: checkout of fast-DiT; None skips its cell.
      command: the command line, for the records.
    """

    out: Path
    scratch: Path
    device: str
    minutes: float
    tiny: bool
    again: bool = False
    fast_dit: Path | None = None
    command: str = field(default_factory=lambda: shlex.join(["leandit", *sys.argv[1:]]))


def run(request: GpuRequest, say: Callable[[str], None], cells: tuple[Cell, ...] | None = None) -> None:
    """Run what is not finished, the most worthy first; cells that were cut before come last.

    A cell begins only if its whole limit is left, so the budget is kept; a later one may be short enough.

    Args:
      say: called with a line for each cell.
      cells: instead of ``REAL`` or ``TINY``.
    Raises: RecipeError: a folder is not ours.
    """
    end = time.monotonic() + 60 * request.minutes
    cells = cells or (TINY if request.tiny else REAL)
    request.out.mkdir(parents=True, exist_ok=True)
    scratch, found, machine = benchmark_folder(request.scratch, OWN_FOLDER), read_results(request.out), _machine()
    todo = [cell for cell in cells if not is_finished(cell, found.get(cell.name), again=request.again)]
    say(f"{len(cells) - len(todo)} of {len(cells)} cells are finished, {request.minutes:g} minutes for the others")
    for cell in sorted(todo, key=lambda cell: found.get(cell.name, {}).get("status") == CUT):
        left = end - time.monotonic()
        if left < cell.limit_seconds:
            say(f"{cell.name}: not begun, {max(0, left):.0f} s are left and it may take {cell.limit_seconds:.0f} s")
            continue
        record = _run_cell(cell, request, scratch) | {"machine": machine, "command": request.command}
        append_result(request.out, record)
        say(f"{cell.name}: {record['status']} in {record['seconds']:.0f} s. {record['message']}".rstrip())


def _run_cell(cell: Cell, request: GpuRequest, scratch: Path) -> Record:
    """Run a cell in a fresh process; its record without the machine."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", cell.name)
    logs = request.out / LOGS
    logs.mkdir(exist_ok=True)
    out, err, start = logs / f"{name}.out", logs / f"{name}.err", time.monotonic()
    given = {"checkout": str(request.fast_dit)} if cell.table == FAST_DIT and request.fast_dit else {}
    job = {"function": cell.table, "arguments": cell.arguments | given}
    job |= {"device": request.device, "scratch": str(scratch)}
    environment = os.environ | {"TMPDIR": str(fresh_folder(scratch, "tmp"))}  # a killed cell leaves its files there
    command = [sys.executable, "-m", f"{__package__}.cell", json.dumps(job)]
    how: dict[str, Any] = {"stdin": subprocess.PIPE, "process_group": 0, "env": environment}
    with out.open("wb") as to_out, err.open("wb") as to_err, _child(command, stdout=to_out, stderr=to_err, **how) as it:
        try:
            code = it.wait(cell.limit_seconds)
        except subprocess.TimeoutExpired:
            code = None
    said = out.read_text(errors="replace").splitlines()
    record: Record = {"cell": cell.name, "tiny": request.tiny, "arguments": cell.arguments}
    record |= {"seconds": round(time.monotonic() - start, 1), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    if code is None:
        return record | {"status": CUT, "message": f"killed after {cell.limit_seconds:.0f} s", "result": None}
    if code or not said:
        return record | {"status": FAILED, "message": _message(err, code), "result": None}
    result = json.loads(said[-1])
    if reason := result.get("skipped"):
        return record | {"status": SKIPPED, "message": reason, "result": None}
    return record | {"status": DONE, "message": "", "result": result}


@contextlib.contextmanager
def _child(command: list[str], **how: Any) -> Iterator[Popen[Any]]:
    """A process; at the end it is killed with all that it has started."""
    with Popen(command, **how) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def _message(err: Path, code: int) -> str:
    """Why a cell failed: the last error that it printed, else its last line."""
    lines = [line.strip() for line in err.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if ERROR.match(line)]
    said = (errors or lines or ["it said nothing"])[-1]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {said[:MESSAGE_LETTERS]}"


def _machine() -> dict[str, Any]:
    """Processor, GPU, its driver, torch. The GPU is asked by its tool: this process must take no memory of it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpus = ""
    with contextlib.suppress(OSError):
        gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return hardware() | {"gpu, driver, memory": gpus or None, "torch": metadata.version("torch")}
