"""Which process owns a temporary file, and whether it is alive, across containers and machines.

Containers of one pod share a host name but not process ids, so an id is only valid within its PID namespace. If the
process cannot be looked up, a heartbeat decides: an owner touches its file every few seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TEMPORARY_PREFIX = ".leandit-tmp-"
REPLACED = ".leandit-replaced"
REPLACED_NAME = re.compile(rf"(?P<kept>.+){re.escape(REPLACED)}(-(?P<owner>.+))?", re.DOTALL)
HEARTBEAT_SECONDS = 15.0
STALE_SECONDS = 300.0  # without a heartbeat; file systems cache an mtime for much less
UNKNOWN = "unknown"
STARTED_FIELD = 19  # of ``_stat``
_TOKEN = secrets.token_hex(4)  # of this program start: exec keeps process id and start time


@dataclass(frozen=True)
class Owner:
    """A process, as encoded in the names of its temporary files.

    Args:
      host: host name.
      namespace: kernel boot and PID namespace of ``pid``.
      pid: process id.
      started: clock ticks from boot to its start, "" if unknown.
      token: random, different for each program start.
    """

    host: str
    namespace: str
    pid: int
    started: str
    token: str

    def __str__(self) -> str:
        return f"{self.host}@{self.namespace}-{self.pid}-{self.started}-{self.token}"

    @property
    def is_alive(self) -> bool | None:
        """Whether it runs; None if that is unknown: it is in another container, or on another machine."""
        current = this_process()
        if UNKNOWN in self.namespace or (self.host, self.namespace) != (current.host, current.namespace):
            return None
        if self.pid == current.pid:
            return (self.started, self.token) == (current.started, current.token)
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):  # OverflowError: not a valid process id
            return False
        except PermissionError:
            pass
        fields = _stat(self.pid)
        if fields[:1] in (["Z"], ["X"]):  # a zombie: its parent in the container may never wait for it
            return False
        # A different start time: the id was reused.
        return not self.started or not fields or fields[STARTED_FIELD] == self.started


def this_process() -> Owner:
    """The owner of files that this process writes."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())
    return Owner(host, _namespace(), os.getpid(), _started(os.getpid()), _TOKEN)


_NAME = re.compile(r"(?P<host>[^@]*)@(?P<namespace>[^-@]+)-(?P<pid>[0-9]+)-(?P<started>[0-9]*)-(?P<token>[0-9a-f]+)")


def parse_owner(text: str) -> Owner | None:
    """Parse an owner's name; None if it is not one."""
    match = _NAME.fullmatch(text)
    return match and Owner(match["host"], match["namespace"], int(match["pid"]), match["started"], match["token"])


def temporary_beside(path: Path) -> Path:
    """Path of a temporary in the same folder; its name includes the owner."""
    return path.with_name(f"{TEMPORARY_PREFIX}{this_process()}@{path.name}")


def replaced_beside(final: Path) -> Path:
    """Path of a folder while another one replaces it; its name includes the owner."""
    return final.with_name(f"{final.name}{REPLACED}-{this_process()}")


def is_temporary(name: str, *, is_folder: bool) -> bool:
    """Whether this project gives the name to temporary files or folders."""
    return name.startswith(TEMPORARY_PREFIX) or (is_folder and REPLACED_NAME.fullmatch(name) is not None)


@contextlib.contextmanager
def heartbeat(*paths: Path) -> Iterator[None]:
    """Touch files or folders every few seconds while the block runs; missing ones are skipped."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(HEARTBEAT_SECONDS):
            for path in paths:
                renew_time(path)

    thread = threading.Thread(target=beat, name="leandit-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()  # so that a later fork has one thread less


def renew_time(path: Path) -> None:
    """Set the mtime of a file or folder to now, if it exists."""
    with contextlib.suppress(OSError):
        os.utime(path, follow_symlinks=False)


def _namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:  # only Linux has namespaces; a sandbox may hide them
        return UNKNOWN if sys.platform.startswith("linux") else "none"


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot; "" if unknown."""
    fields = _stat(pid)
    return fields[STARTED_FIELD] if fields else ""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (field 3 of proc(5)); empty if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return stat.rpartition(")")[2].split()  # the name before it may contain anything
