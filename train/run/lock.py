"""One process at a time writes a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ...datasets.disk.locks import release_lock, try_lock
from ...datasets.errors import RunError


@contextlib.contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Lock the run's folder against other writers; the lock always ends with the process.

    File systems that cannot lock folders, as some network ones, are not locked.

    Raises: RunError: another process holds the lock.
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
