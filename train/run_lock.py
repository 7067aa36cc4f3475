"""One process at a time writes a run."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ..datasets.errors import RunError


@contextlib.contextmanager
def held(run: Path) -> Iterator[None]:
    """Keep others from writing the run's folder; the lock ends with the process, however that ends.

    Where a file system locks no folders, as some network ones, nobody is kept away.

    Raises: RunError: another process holds it.
    """
    run.mkdir(parents=True, exist_ok=True)
    folder = os.open(run, os.O_RDONLY)
    try:
        if not _locked(folder):
            raise RunError(
                f"run '{run}': another process trains it. Wait until it has ended, stop it, or give another --run."
            )
        yield
    finally:
        os.close(folder)


def _locked(folder: int) -> bool:
    """Whether nobody else holds the lock."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
