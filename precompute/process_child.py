"""A process that encodes for ``processes.py``: it loads its encoders, then does what the socket asks for.

python -m leandit.precompute.process_child SOCKET
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from ..datasets.revisions import read_spec
from .clock import StageClock
from .decoder import Decoders
from .describe import describe_store
from .encoders import load_encoders
from .opening import check_fingerprint
from .processes import END_SECONDS, Describe, Job
from .sources import open_source
from .worker import Order, Worker, outcome


class Line:
    """The socket to the parent; any thread may send, and one receives all the time, to see its end at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._requests: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._receive, name="leandit-parent", daemon=True).start()

    def send(self, message: Any) -> None:
        """Tell the parent."""
        with self._lock:
            self._connection.send(message)

    def next_request(self) -> Any:
        """Wait for the next request."""
        return self._requests.get()

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._requests.put(self._connection.recv())
        # The parent is gone: end as if asked to, and where that takes too long, at once.
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(END_SECONDS)
        os._exit(1)


def serve(line: Line) -> None:
    """Load the encoders, then do what is asked for, until this process is ended.

    Raises: LeanditError: of the class that says what to mend.
    """
    job: Job = line.next_request()
    torch.set_num_threads(job.num_threads)
    encoders = load_encoders(job.recipe, torch.device(job.device))
    with Decoders(job.num_decoders) as decoders:
        worker = Worker(job.recipe, encoders, decoders, StageClock())
        while True:
            match line.next_request():
                case Describe(known):
                    line.send(describe_store(job.recipe, None, encoders, known=known))
                case Order() as order:
                    planned = read_spec(job.root, order.revision)
                    check_fingerprint(job.root, planned, describe_store(job.recipe, None, encoders, known=planned))
                    origin = open_source(order.source_path, order.source_kind)
                    line.send(worker.carry_out(order, job.root, origin, line.send))


def main() -> None:
    """Serve the socket that the command line names."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # unwinds, so that leases are given back
    line = Line(Connection(int(sys.argv[1])))
    with contextlib.suppress(BrokenPipeError, ConnectionError):  # the parent is gone
        if wrong := outcome(lambda: serve(line)):
            line.send(wrong)


if __name__ == "__main__":
    main()
