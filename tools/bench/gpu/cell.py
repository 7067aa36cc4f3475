"""The process of one cell of ``leandit bench gpu``.

    python -m leandit.tools.bench.gpu.cell JOB

It prints its result as the last line of stdout. It ends with the process that started it, whose end closes its stdin.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch

from . import measure, smoke

FUNCTIONS = {"smoke": smoke.smoke} | {
    function.__name__: function
    for function in (
        measure.train,
        measure.beside,
        measure.fast_dit,
        measure.planner,
        measure.precompute,
        measure.captions,
        measure.caching,
        measure.attention,
        measure.checkpoint,
    )
}


def end_with_parent() -> None:
    """Kill this process and what it has started when stdin ends."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock would be held when Python ends
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Measure the job of the command line."""
    end_with_parent()
    job = json.loads(sys.argv[1])
    result = FUNCTIONS[job["function"]](torch.device(job["device"]), Path(job["scratch"]), **job["arguments"])
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
