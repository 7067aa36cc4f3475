"""The ordinary command once a device: started, watched, and started again where one dies.

The processes share the shards by leases, so nothing is handed out, and nothing is lost with a process that dies: the
others encode its shards. None of them outlives this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...datasets.format.layout import COMMITS, REVISIONS
from ...errors import DamageError, LeanditError, RecipeError, ResourceError, SourceError
from ..planning.images import DECODERS, MAX_THREADS, num_cores
from .child import END_SECONDS

CHILD_MODULE = f"{__package__}.child"
MAX_LOSSES = 3  # of one device, without a commit in between
WAIT_SECONDS = 0.5  # between two points where a signal is noticed
USER_ERRORS: dict[int, type[LeanditError]] = {
    error.exit_code: error for error in (RecipeError, SourceError, DamageError, ResourceError)
}


Started = TypeVar("Started")


class StartGate:
    """Lets threads start processes until it is closed, so that none starts after all were told to stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, start: Callable[[], Started]) -> Started | None:
        """What ``start`` returns, or None without a call once the gate is closed."""
        with self._lock:
            return None if self._is_closed else start()

    def close(self) -> None:
        """Let nothing start any more, and wait for what is being started."""
        with self._lock:
            self._is_closed = True


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: a signal; None: not known), its stdout, and its last words."""

    code: int | None
    stdout: str
    last: str


NEVER_STARTED = Ended(code=None, stdout="", last="it was not started: the command is stopping")


def run_on_devices(
    words_of: Callable[[str], list[str]],
    devices: Sequence[str],
    *,
    store: Path,
    num_threads: int,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Run a command with one process for each device of this machine.

    Args:
      words_of: module and arguments for a device, asked whenever a process is started.
      devices: as torch names them.
      num_threads: of torch; on a CPU the number changes the bits.
      say, check: as for ``supervise``.
    Returns: stdout of each process by its name, in the order in which they ended.
    Raises: as ``supervise``. RecipeError: devices of two kinds, whose bits differ.
    """
    kinds = sorted({device.partition(":")[0] for device in devices})
    if len(kinds) > 1:
        raise RecipeError(
            f"--device '{','.join(devices)}': {' and '.join(kinds)} encode an image to different bits. Expected "
            "devices of one kind."
        )
    share = max(1, min(MAX_THREADS, num_cores() // len(devices)))
    environment = child_environment(num_threads=num_threads, num_decoders=share)
    gate = StartGate()
    processes = list[LocalProcess]()

    def start(device: str) -> LocalProcess:
        process = LocalProcess(words_of(device), environment)
        processes.append(process)
        return process

    def run(name: str, device: str) -> Ended:
        process = gate.start(lambda: start(device))
        return process.wait(lambda line: say(f"{name}: {line}")) if process else NEVER_STARTED

    def stop() -> None:
        gate.close()
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait_or_kill()

    runs = {
        name: (lambda name=name, device=device: run(name, device))
        for number, device in enumerate(devices, 1)
        for name in [f"{device} (process {number})"]
    }
    return supervise(runs, stop, store=store, say=say, check=check)


def child_environment(*, num_threads: int, num_decoders: int) -> dict[str, str]:
    """Environment variables of a process that shares its machine with others."""
    return {"OMP_NUM_THREADS": str(num_threads), DECODERS: str(num_decoders)}


class LocalProcess:
    """A command on this machine, with stderr by lines. It ends when its stdin does, and so with this process."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", CHILD_MODULE, *words],
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is the parent's
        )

    def wait(self, on_line: Callable[[str], None]) -> Ended:
        """Wait for its end, calling ``on_line`` with each line of stderr."""
        output, last, process = list[str](), "", self._process
        assert process.stdin
        assert process.stdout
        assert process.stderr
        reader = threading.Thread(target=lambda stdout=process.stdout: output.append(stdout.read()), daemon=True)
        reader.start()
        for line in process.stderr:
            if line.strip():
                last = line.strip()
                on_line(line.rstrip())
        code = process.wait()
        reader.join(END_SECONDS)
        for file in (process.stdin, process.stdout, process.stderr):
            file.close()
        return Ended(code, "".join(output), last)

    def terminate(self) -> None:
        """Ask it to release its leases and end."""
        self._process.terminate()

    def wait_or_kill(self) -> None:
        """Wait for its end, and kill it after END_SECONDS."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()


def supervise(
    runs: Mapping[str, Callable[[], Ended]],
    stop: Callable[[], None],
    *,
    store: Path,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> dict[str, str]:
    """Run processes until all have finished; one that dies is started again, or given up after MAX_LOSSES.

    Args:
      runs: by name, what starts a process and waits for its end, in a thread.
      stop: ends all processes, also those that are being started, and lets no further one start.
      say: called with a message when a process dies.
      check: called every WAIT_SECONDS; may raise.
    Returns: stdout of each process by its name, in the order in which they ended.
    Raises: LeanditError: of any process, if all would meet it; ResourceError: no process is left.
    """
    losses, outputs, commits = Counter[str](), dict[str, str](), _commits(store)
    with ThreadPoolExecutor(len(runs), thread_name_prefix="leandit-process") as pool:
        try:
            running: dict[Future[Ended], str] = {pool.submit(run): name for name, run in runs.items()}
            while running:
                finished, _ = wait(running, WAIT_SECONDS, FIRST_COMPLETED)
                check()
                died = dict[str, Ended]()
                for future in finished:
                    name = running.pop(future)
                    ended = future.result()
                    if ended.code in USER_ERRORS:
                        raise USER_ERRORS[ended.code](ended.last.removeprefix("leandit: "))
                    if ended.code == 0:
                        outputs[name] = ended.stdout
                    else:
                        died[name] = ended
                given_up = list[str]()
                for name, ended in died.items():
                    if (now := _commits(store)) != commits:
                        losses, commits = Counter[str](), now
                    losses[name] += 1
                    death = f"the process on {name} died: {_how_it_ended(ended)}"
                    if losses[name] < MAX_LOSSES:
                        say(f"{death}. Restarting it; the others continue")
                        running[pool.submit(runs[name])] = name
                    else:
                        given_up.append(death)
                for death in given_up:
                    if running:
                        say(f"{death}. Giving up on it; the remaining processes take its shards")
                    elif not outputs:
                        raise ResourceError(
                            f"{death}. None is left. Committed shards are kept; the same command resumes."
                        )
        finally:
            stop()
    return outputs


def _how_it_ended(ended: Ended) -> str:
    if ended.code is not None and ended.code < 0:
        return f"it was killed by signal {-ended.code} ({signal.strsignal(-ended.code)})"
    return ended.last.removeprefix("leandit: ") or f"it exited with status {ended.code}"


def _commits(store: Path) -> set[str]:
    """What is written of a store: its revisions, and the commit records of the unfinished one."""
    revisions = store / REVISIONS
    return {str(path) for path in (*revisions.glob("*"), *revisions.glob(f"*/{COMMITS}/**/*.json"))}
