"""A process that encodes for ``processes.py``: watches the socket to its parent, then serves it (``process_serve.py``).

Only the watching is imported first: torch takes seconds to load, and the process must not outlive its parent meanwhile.

python -m leandit.precompute.engines.process_child SOCKET
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

END_SECONDS = 10.0  # to release the leases


class Line:
    """The socket to the parent. Any thread may send; one thread always receives, to see the parent's end at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._requests: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._receive, name="leandit-parent", daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message to the parent."""
        with self._lock:
            self._connection.send(message)

    def next_request(self) -> Any:
        """Wait for the next request."""
        return pickle.loads(self._requests.get())  # not in the watching thread: imports take seconds

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._requests.put(self._connection.recv_bytes())
        # The parent is gone: end as on SIGTERM, and after END_SECONDS at once.
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(END_SECONDS)
        os._exit(1)


def main() -> None:
    """Serve the socket that the command line names."""
    line = Line(Connection(int(sys.argv[1])))
    from .process_serve import serve
    from .worker import outcome

    with contextlib.suppress(BrokenPipeError, ConnectionError):  # the parent is gone
        if error := outcome(lambda: serve(line.next_request, line.send)):
            line.send(error)


if __name__ == "__main__":
    main()
