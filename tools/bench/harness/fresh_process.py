"""A measurement in a fresh process, which has imported and allocated nothing before."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from ....datasets.errors import ResourceError


def run_in_fresh_process(module: str, *arguments: str, command: str) -> Any:
    """Run a module with ``python -m``; the last line of its stdout, read as JSON.

    Args:
      command: named in the error, as "bench plan".
    Raises: ResourceError: the process failed.
    """
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(
            f"{command}: a measurement failed with exit code {done.returncode}: {done.stderr.strip()[-500:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])
