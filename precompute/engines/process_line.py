"""The line from a process that encodes to its parent: what is asked for, what is answered, and that the parent lives.

It imports nothing that takes time, so that a process watches its parent before it loads torch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

END_SECONDS = 10.0  # to give back the leases


class Line:
    """The socket to the parent; any thread may send, and one receives all the time, to see its end at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._requests: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._receive, name="leandit-parent", daemon=True).start()

    def send(self, message: Any) -> None:
        """Tell the parent."""
        with self._lock:
            self._connection.send(message)

    def next_request(self) -> Any:
        """Wait for the next request."""
        return pickle.loads(self._requests.get())  # not by the thread that watches: what it imports takes seconds

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._requests.put(self._connection.recv_bytes())
        # The parent is gone: end as if asked to, and where that takes too long, at once.
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(END_SECONDS)
        os._exit(1)
