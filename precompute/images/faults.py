"""Faults of a disk, a network folder or this machine while a source is read: retried, and never a reject.

An image is rejected only for what its file holds: otherwise the same source would not give the same store again.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from ...datasets.disk.faults import is_fault
from ...errors import ResourceError

T = TypeVar("T")

PAUSES = (1.0, 5.0, 20.0)  # seconds between tries: a server that restarts, a mount that comes back


def fault_error(what: str, error: BaseException) -> ResourceError:
    """The error that ends a run at a fault.

    Args:
      what: the file that was read.
    """
    return ResourceError(
        f"source, '{what}': it cannot be read at the moment ({error or 'out of memory'}). The disk, the network folder "
        "or this machine is failing, not the file; check memory, open files (ulimit -n) and space for temporary files "
        "(TMPDIR). No record was rejected because of it. Fix the problem, then run the same command again; it resumes."
    )


def retried(read: Callable[[], T], what: str, *, pause: Callable[[float], object] = time.sleep) -> T:
    """Read, and again after pauses where a fault prevents it.

    Args:
      what: the file, for the error.
      pause: waits for some seconds.
    Raises: ResourceError: the last try met a fault as well; whatever else ``read`` raises.
    """
    for seconds in (*PAUSES, None):
        try:
            return read()
        except (OSError, MemoryError) as error:
            if not is_fault(error):
                raise
            if seconds is None:
                raise fault_error(what, error) from error
            pause(seconds)
    raise AssertionError("the last try returns or raises")


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file for reading; opening a FIFO could wait forever.

    Raises: OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"not a regular file: {os.path.basename(path)}")
    return open(descriptor, "rb")
