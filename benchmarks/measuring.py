"""What the benchmarks share: alternating rounds, ratios, memory, and functions that run in a process of their own.

A measurement that must not see what another has imported, allocated or left running is a function that ``in_child``
calls in a fresh process: ``python benchmarks/measuring.py MODULE FUNCTION JSON FILE``. Its arguments and its result are
JSON values.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import psutil

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
FOLDER_PREFIX = "leandit-benchmark-"  # a benchmark deletes only folders with this prefix

# ------------------------------------------------------------------------------------------------------- rounds, ratios


def alternate(cells: Mapping[Name, Callable[[], Result]], rounds: int) -> dict[Name, list[Result]]:
    """The results of every cell, one a round; every second round goes backwards.

    So whatever warms up or slows down during a round affects all cells alike.
    """
    results: dict[Name, list[Result]] = {name: [] for name in cells}
    for number in range(rounds):
        for name in list(cells)[:: 1 if number % 2 == 0 else -1]:
            result = cells[name]()
            results[name].append(result)
            log(f"round {number + 1} of {rounds}, {name}: {f'{result:.4g}' if isinstance(result, float) else 'done'}")
            gc.collect()
            if "torch" in sys.modules:
                sys.modules["torch"].cuda.empty_cache()  # without CUDA it does nothing
    return results


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


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio of two rates in each round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def median_and_range(values: Sequence[float], form: Callable[[float], str] = "{:.3g}".format) -> str:
    """Such as "1.88x (1.80x to 2.01x)".

    Args:
      form: one value as text.
    """
    low, middle, high = (form(value) for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})" if len(values) > 1 else middle


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """TF32 for float32 products and convolutions, as the scripts of fast-DiT set it; afterwards as before."""
    import torch

    flags: tuple[Any, Any] = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    for flag in flags:
        flag.allow_tf32 = True
    try:
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


# ---------------------------------------------------------------------------------------------------------- processes


class Outcome(NamedTuple):
    """What became of a function in a child process.

    Args:
      status: "done"; "failed" with a message; "cut" at its time limit.
      result: JSON value that the function returned; None unless done.
    """

    status: str
    result: Any
    message: str
    seconds: float


def in_child(
    module: str,
    function: str,
    arguments: Mapping[str, Any],
    *,
    limit_seconds: float = 900,
    environment: Mapping[str, str] = {},
) -> Outcome:
    """Call ``function`` of a module of this folder in a fresh process, and kill all that it has left running."""
    variables = os.environ | {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", **environment}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, __file__, module, function, json.dumps(arguments), str(file)]
        # Its stdin is open as long as this process lives; what it prints goes to stderr, like our log.
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, env=variables, process_group=0) as child:
            try:
                code = child.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                return Outcome("cut", None, f"killed after {limit_seconds:.0f} s", time.monotonic() - start)
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
        answer = json.loads(file.read_text()) if file.is_file() else {}
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    status, message = ("done", "") if "result" in answer else ("failed", answer.get("error", how))
    return Outcome(status, answer.get("result"), message, time.monotonic() - start)


def measure_in_child(module: str, function: str, **arguments: Any) -> Any:
    """The result of ``in_child``.

    Raises: RuntimeError: it failed.
    """
    outcome = in_child(module, function, arguments, limit_seconds=7200)
    if outcome.status != "done":
        raise RuntimeError(f"{module}.{function} {outcome.status}: {outcome.message}")
    return outcome.result


def _child_main() -> None:
    """Run the function of the command line; end with the process that started this one."""
    module, function, arguments, file = sys.argv[1:]

    def end_with_parent() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
        Path(file).write_text(json.dumps({"result": result}))
    except BaseException as error:
        Path(file).write_text(json.dumps({"error": f"{type(error).__name__}: {str(error)[:400]}"}))
        if not isinstance(error, ModuleNotFoundError):  # of a peer, whose message is enough
            raise


# ------------------------------------------------------------------------------------------------ memory, the machine


class PeakMemory:
    """Samples the memory of this process and its children while its block runs; ``mb`` is the peak, 10**6 bytes.

    A sample walks through all mapped pages and stops the process meanwhile: sample seldom where gigabytes are mapped.
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
    """Anonymous and shared memory of this process and its children, each page once (PSS), without page cache; Linux."""
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


def machine() -> str:
    """One line: processor, usable cores, memory, GPU with driver, kernel, Python, torch, and the day."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpus = ""
    with contextlib.suppress(OSError):  # this process must take no memory of the GPU, so its tool is asked
        gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().replace("\n", "; ")
    facts = (
        models[0] if models else platform.processor(),
        f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores",
        f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        gpus or "no GPU",
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}",
        f"torch {metadata.version('torch')}",
        time.strftime("%Y-%m-%d"),
    )
    return ", ".join(facts)


# ------------------------------------------------------------------------------------------------------- files, results


def fresh_folder(scratch: Path, name: str) -> Path:
    """An empty folder of a benchmark below ``scratch``; an older one of this name is deleted first."""
    folder = scratch / f"{FOLDER_PREFIX}{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """A table in Markdown, as docs/benchmarks.md has it; the first row is its head."""
    head, *body = rows
    for row in (head, ["---"] * len(head), *body):
        print(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |")


def print_rates(unit: str, rates: Mapping[str, Sequence[float]], ours: str) -> None:
    """A table of rates in each round, and of our rate as a multiple of each."""
    rows = [("", unit, f"{ours}, of it")]
    for name, values in rates.items():
        multiple = median_and_range(ratios(rates[ours], values), "{:.3f}x".format)
        rows.append((name, median_and_range(values, "{:.2f}".format), multiple))
    print_table(rows)
    print()


def log(message: str) -> None:
    """A line on stderr."""
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    _child_main()
