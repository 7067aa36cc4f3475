"""Faults: a disk, a network folder or this machine fails while a file is read or written.

A fault says nothing about the content of the file, so it is never damage (exit code 4) and never a reason to reject a
record. It ends the command with exit code 5 and the path; the same command resumes once the cause is gone.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from ...errors import ResourceError

OPTIONAL_FAULT_NAMES = ("EREMOTEIO", "ENOLINK", "ECOMM")  # not every system has them
FAULTS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.ENOTCONN,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
    }
    | {getattr(errno, name) for name in OPTIONAL_FAULT_NAMES if hasattr(errno, name)}
)
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def is_fault(error: BaseException) -> bool:
    """Whether reading or writing failed for a reason that is not the file's, so that it may succeed later."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno in FAULTS
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch, on a CPU


def advice_for(error: OSError) -> str:
    """What the user can do about a fault, one sentence without its full stop."""
    if error.errno in OUT_OF_DESCRIPTORS:
        return "Raise the limit of open files ('ulimit -n'), or close other programs"
    if error.errno == errno.ENOMEM:
        return "Free some memory"
    return "Check the disk or the network folder"


@contextlib.contextmanager
def named_faults(path: Path | str) -> Iterator[None]:
    """Turn a fault within the block into an error that names the file; other errors pass unchanged.

    Args:
      path: the file that the block reads or writes.
    Raises: ResourceError: a disk, a network folder or this machine failed.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FAULTS:
            raise fault_of(path, error) from error
        raise


def fault_of(path: Path | str, error: OSError) -> ResourceError:
    """The error that ends a command at a fault of a file of ours."""
    return ResourceError(
        f"file '{path}': {error.strerror or error}. The disk, the network folder or this machine failed; the content "
        f"of the file may be right. {advice_for(error)}, then run the same command again."
    )
