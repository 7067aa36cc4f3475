"""A process that encodes for ``supervisor.py``: watches its parent from the start, then does its job (``job.py``).

Only the watching is imported first: torch takes seconds to load, and the process must not outlive its parent meanwhile.

python -m leandit.precompute.engines.child SOCKET
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

END_SECONDS = 10.0  # to release the leases


def main() -> None:
    """Do the job that comes through the socket, and send back what happens."""
    threading.Thread(target=_end_with_parent, name="leandit-parent", daemon=True).start()
    parent, lock = Connection(int(sys.argv[1])), threading.Lock()

    def send(message: Any) -> None:
        with lock:
            parent.send(message)

    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        from .job import outcome, work

        job = parent.recv()
        send(outcome(lambda: work(job, send)))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends anyway


def _end_with_parent() -> None:
    """Wait for the end of stdin, which the parent holds open; then end as on SIGTERM, and after END_SECONDS at once."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
