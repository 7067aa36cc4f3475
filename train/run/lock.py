"""One process at a time writes a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ...datasets.errors import RunError
from ...datasets.remote.bounded import release_lock, try_lock


@contextlib.contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Keep others from writing the run's folder; the lock ends with the process, however that ends.

    Where a file system locks no folders, as some network ones, nobody is kept away.

    Raises: RunError: another process holds it.
    """
    run.mkdir(parents=True, exist_ok=True)
    folder = os.open(run, os.O_RDONLY | os.O_CLOEXEC)
    try:
        is_ours = try_lock(folder)
    except OSError:
        os.close(folder)
        yield
        return
    try:
        if not is_ours:
            raise RunError(
                f"run '{run}': another process trains it. Wait until it has ended, stop it, or give another --run."
            )
        yield
    finally:
        release_lock(folder)
