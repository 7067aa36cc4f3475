"""A process that encodes for ``processes.py``: watches the socket to its parent, and serves it (``process_serve.py``).

Only what watches is imported first: torch takes seconds to load, and no process outlives its parent for them.

python -m leandit.precompute.engines.process_child SOCKET
"""

from __future__ import annotations

import contextlib
import sys
from multiprocessing.connection import Connection

from .process_line import Line


def main() -> None:
    """Serve the socket that the command line names."""
    line = Line(Connection(int(sys.argv[1])))
    from .process_serve import serve
    from .worker import outcome

    with contextlib.suppress(BrokenPipeError, ConnectionError):  # the parent is gone
        if wrong := outcome(lambda: serve(line)):
            line.send(wrong)


if __name__ == "__main__":
    main()
