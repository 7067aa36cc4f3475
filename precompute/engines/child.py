"""A command that ends with the process that started it, whose end of stdin it watches.

Only the watching is imported first: torch takes seconds to load, and the process must not outlive its parent meanwhile.

python -m leandit.precompute.engines.child MODULE ARGUMENTS...
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

END_SECONDS = 10.0  # to release the leases


def main() -> None:
    """Run a module as ``python -m`` does."""
    threading.Thread(target=_end_with_parent, name="leandit-parent", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    """Wait for the end of stdin; then end as on SIGTERM, and after END_SECONDS at once."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
