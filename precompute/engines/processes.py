"""A process for each of several devices of this machine. None of them outlives this process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from ...datasets.errors import RecipeError
from ..pipeline import Report
from ..planning.pictures import MAX_THREADS, num_cores
from ..progress.clock import Progress
from .child import END_SECONDS
from .job import Broken, Job
from .supervisor import Place, Supervisor

CHILD_MODULE = f"{__package__}.child"


def run_on_devices(job: Job, devices: Sequence[str], *, progress: Progress, say: Callable[[str], None]) -> Report:
    """Precompute with one process for each device.

    Args:
      job: of all of them.
      devices: as torch names them.
      progress, say: as of ``Supervisor``.
    Raises: as ``Supervisor.run``. RecipeError: devices of two kinds, whose bits differ.
    """
    kinds = sorted({device.partition(":")[0] for device in devices})
    if len(kinds) > 1:
        raise RecipeError(
            f"--device '{','.join(devices)}': {' and '.join(kinds)} make different bits of one picture. Needed "
            "devices of one kind."
        )
    share = max(1, min(MAX_THREADS, num_cores() // len(devices)))
    places = [
        Place(f"{device} (process {number})", replace(job, device=device, num_decoders=share))
        for number, device in enumerate(devices, 1)
    ]
    return Supervisor(places, LocalProcess, progress=progress, say=say).run()


class LocalProcess:
    """As ``Process``, on this machine. It ends when its stdin does, and so with this process."""

    def __init__(self, job: Job) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._connection = Connection(ours.detach())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", CHILD_MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is the parent's
            )
        with suppress(OSError):  # it has ended, as ``messages`` will say
            self._connection.send(job)

    def messages(self) -> Iterator[Any]:
        """As ``Process.messages``."""
        with self._connection, suppress(EOFError, OSError):
            while True:
                yield self._connection.recv()
        yield Broken(self._how_it_ended())

    def ask_to_end(self) -> None:
        """As ``Process.ask_to_end``."""
        self._process.terminate()

    def end(self) -> None:
        """As ``Process.end``."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin
        self._process.stdin.close()

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it does not answer any more"
        if code >= 0:
            return f"it ended with status {code}"
        return f"it was ended by signal {-code} ({signal.strsignal(-code)})"
