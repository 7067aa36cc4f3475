"""What the benchmarks share: alternating rounds, ratios, clocks, memory, and measurements in a process of their own.

A measurement that must not see what another has imported, allocated or left running is a function of a benchmark that
``in_child`` calls in a fresh process: ``python benchmarks/measuring.py MODULE FUNCTION JSON``. Its arguments and its
result are JSON values.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import psutil

Cell = TypeVar("Cell")
LAST_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Rejected)\b.*")  # the last line of a traceback
READ_BYTES = 1 << 24
FOLDER_PREFIX = "leandit-benchmark-"  # a benchmark deletes only folders with this prefix


# ------------------------------------------------------------------------------------------------------- rounds, ratios


def alternating_rounds(cells: Sequence[Cell], num_rounds: int) -> Iterator[tuple[int, Cell]]:
    """Every cell once a round, with the number of the round; every second round goes backwards.

    So whatever warms up or slows down during a round affects all cells alike.
    """
    for number in range(num_rounds):
        for cell in cells if number % 2 == 0 else reversed(cells):
            yield number, cell


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio of two rates in each round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def median_and_range(values: Sequence[float], form: str = "{:.3g}") -> str:
    """Such as "1.88x (1.80x to 2.01x)".

    Args:
      form: format of one value, as "{:.2f}x".
    """
    low, middle, high = (form.format(value) for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})" if len(values) > 1 else middle


def timed(step: Callable[[], object], count: int, device: Any) -> float:
    """Seconds of ``count`` calls, including the work that they have put on the device."""
    import torch

    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return time.perf_counter() - start


# --------------------------------------------------------------------------------------- processes, memory, the machine


@dataclass(frozen=True)
class Outcome:
    """What became of a measurement in a child process.

    Args:
      status: "done"; "failed" with a message; "cut" at its time limit.
      result: JSON value that the function returned; None unless done.
      message: why it failed.
      seconds: from start to end.
    """

    status: Literal["done", "failed", "cut"]
    result: Any
    message: str
    seconds: float


def in_child(
    module: str,
    function: str,
    arguments: dict[str, Any],
    *,
    limit_seconds: float = 900,
    python: str = sys.executable,
    environment: dict[str, str] | None = None,
) -> Outcome:
    """Call ``function`` of a module of this folder in a fresh process, and kill all that it has left running.

    Args:
      python: interpreter, of another environment where a peer needs one.
    """
    command = [python, __file__, module, function, json.dumps(arguments)]
    start = time.monotonic()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # kept open: its end tells the child that this process has ended
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"} | (environment or {}),
            process_group=0,
        )
    except OSError as error:
        return Outcome("failed", None, f"'{python}' does not start: {error.strerror}", 0.0)
    try:
        output, errors = _communicate(child, limit_seconds)
    except subprocess.TimeoutExpired:
        return Outcome("cut", None, f"killed after {limit_seconds:.0f} s", time.monotonic() - start)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    seconds, lines = time.monotonic() - start, output.strip().splitlines()
    if child.returncode or not lines:
        return Outcome("failed", None, _failure(errors, child.returncode), seconds)
    return Outcome("done", json.loads(lines[-1]), "", seconds)


def measure_in_child(module: str, function: str, **arguments: Any) -> Any:
    """The result of ``in_child``.

    Raises: RuntimeError: it failed.
    """
    outcome = in_child(module, function, arguments)
    if outcome.status != "done":
        raise RuntimeError(f"{module}.{function} {outcome.status}: {outcome.message}")
    return outcome.result


def _communicate(child: subprocess.Popen[str], limit_seconds: float) -> tuple[str, str]:
    """All of stdout and stderr, while stdin stays open (``Popen.communicate`` would close it)."""
    texts: dict[str, str] = {}
    streams = {"out": child.stdout, "err": child.stderr}
    readers = [
        threading.Thread(target=lambda name=name, stream=stream: texts.update({name: stream.read()}), daemon=True)
        for name, stream in streams.items()
        if stream
    ]
    for reader in readers:
        reader.start()
    child.wait(limit_seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # workers that are left would keep the pipes open
        os.killpg(child.pid, signal.SIGKILL)
    for reader in readers:
        reader.join()
    return texts["out"], texts["err"]


def _failure(errors: str, code: int) -> str:
    """The last error that a process printed, else its last line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = ([line for line in lines if LAST_ERROR.match(line)] or lines or ["no output"])[-1]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {last[:400]}"


def _child_main() -> None:
    """Run the function of the command line; end with the process that started this one."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock would be held when Python ends
            pass
        leads = os.getpgrp() == os.getpid()  # not where it was started by hand
        os.killpg(0, signal.SIGKILL) if leads else os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    module, function, arguments = sys.argv[1:]
    result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    print("\n" + json.dumps(result), flush=True)  # a library may have left a line without its end


class PeakMemory:
    """Samples the memory of this process and its children while its block runs: ``mb`` is the peak, 10**6 bytes.

    Anonymous and shared memory, each page once (PSS), without page cache. A sample walks through all mapped pages and
    stops the process meanwhile, so sample seldom where gigabytes are mapped.
    """

    def __init__(self, *, every_seconds: float = 0.1) -> None:
        self.before_mb = self.mb = 0.0
        self._every_seconds = every_seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self.before_mb = tree_memory_mb()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.mb = max(self.mb, tree_memory_mb())

    @property
    def beyond_mb(self) -> float:
        """The peak above the memory at the start of the block."""
        return max(0.0, self.mb - self.before_mb)

    def _watch(self) -> None:
        while not self._end.wait(self._every_seconds):
            self.mb = max(self.mb, tree_memory_mb())


def _tree() -> list[psutil.Process]:
    return [own := psutil.Process(), *own.children(recursive=True)]


def tree_memory_mb() -> float:
    """Anonymous and shared memory (PSS) of this process and its children, 10**6 bytes; Linux only."""
    total_kib = 0
    for process in _tree():
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total_kib += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return total_kib * 1024 / 1e6


def tree_cpu_seconds() -> float:
    """Processor seconds of this process and its children, ended ones included."""
    total = 0.0
    for process in _tree():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def hardware() -> dict[str, Any]:
    """Processor, usable cores, memory, GPU with driver, kernel and Python of this machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpus = ""
    with contextlib.suppress(OSError):  # this process must take no memory of the GPU, so its tool is asked
        gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(psutil.Process().cpu_affinity() or []) if hasattr(psutil.Process, "cpu_affinity") else None,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpus or None,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def machine() -> str:
    """One line of ``hardware`` with the day."""
    facts = hardware()
    parts = f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB", facts["gpu"], facts["kernel"]
    return ", ".join([*filter(None, parts), f"Python {facts['python']}, {time.strftime('%Y-%m-%d')}"])


# ------------------------------------------------------------------------------------------------------- files, results


def fresh_folder(scratch: Path, name: str) -> Path:
    """An empty folder of a benchmark below ``scratch``; an older one of this name is deleted first."""
    folder = scratch / f"{FOLDER_PREFIX}{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def read_into_page_cache(folder: Path) -> None:
    """Read every file below a folder."""
    buffer = bytearray(READ_BYTES)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def disk_bytes(folder: Path) -> int:
    """Bytes that the files of a folder occupy, in whole blocks of the file system."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """A table in Markdown, as docs/benchmarks.md has it; the first row is its head."""
    head, *body = rows
    for row in (head, ["---"] * len(head), *body):
        print(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |")


def clear_caches() -> None:
    """Clear every ``functools`` cache of leandit and of torchao, whose 8-bit numbers are a cached table.

    Before and after steps on fake tensors: cached tables must be made anew, and no fake one may stay.
    """
    kind = type(functools.lru_cache(lambda: None))
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("leandit", "torchao")]
    for cached in {value for module in modules for value in vars(module).values() if isinstance(value, kind)}:
        cached.cache_clear()


def log(message: str) -> None:
    """A line on stderr."""
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    _child_main()
