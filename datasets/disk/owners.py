"""Which process owns a temporary file, and whether it still lives: also across containers and machines.

Containers of one pod share the host's name and count their processes apart, so a process number means nothing without
its PID namespace. Where the number cannot be looked up, a heartbeat decides: an owner touches its file every few
seconds.
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
STALE_SECONDS = 300.0  # without a heartbeat; far more than a file system caches the time of a file
UNKNOWN = "unknown"
STARTED_FIELD = 19  # of ``_stat``
_TOKEN = secrets.token_hex(4)  # of this start of the program: exec keeps the number and the start time of a process


@dataclass(frozen=True)
class Owner:
    """A process, as the names of its temporary files give it.

    Args:
      host: its name.
      namespace: boot of the kernel and PID namespace, in which ``pid`` is a number.
      pid: process number.
      started: clock ticks from the boot to its start, "" where the system does not say.
      token: random, another one for each start of the program.
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
        """Whether it runs, or None where this process cannot tell: in another container, or on another machine."""
        here = this_process()
        if UNKNOWN in self.namespace or (self.host, self.namespace) != (here.host, here.namespace):
            return None
        if self.pid == here.pid:
            return (self.started, self.token) == (here.started, here.token)
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):  # no process has such a number
            return False
        except PermissionError:
            pass
        fields = _stat(self.pid)
        if fields[:1] in (["Z"], ["X"]):  # it has ended, and its parent has not looked: in a container perhaps never
            return False
        # Else it is another process of that number.
        return not self.started or not fields or fields[STARTED_FIELD] == self.started


def this_process() -> Owner:
    """The owner of what this process writes."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())
    return Owner(host, _namespace(), os.getpid(), _started(os.getpid()), _TOKEN)


_NAME = re.compile(r"(?P<host>[^@]*)@(?P<namespace>[^-@]+)-(?P<pid>[0-9]+)-(?P<started>[0-9]*)-(?P<token>[0-9a-f]+)")


def parse_owner(text: str) -> Owner | None:
    """The owner that a name gives, or None where it gives none."""
    found = _NAME.fullmatch(text)
    return found and Owner(found["host"], found["namespace"], int(found["pid"]), found["started"], found["token"])


def temporary_beside(path: Path) -> Path:
    """Name a temporary in the same folder; the name says which process owns it."""
    return path.with_name(f"{TEMPORARY_PREFIX}{this_process()}@{path.name}")


def replaced_beside(final: Path) -> Path:
    """Name what is there while another folder takes its place; the name says which process owns it."""
    return final.with_name(f"{final.name}{REPLACED}-{this_process()}")


def is_temporary(name: str, *, is_folder: bool) -> bool:
    """Whether a name is one that this project gives, and only for a while."""
    return name.startswith(TEMPORARY_PREFIX) or (is_folder and REPLACED_NAME.fullmatch(name) is not None)


@contextlib.contextmanager
def heartbeat(*paths: Path) -> Iterator[None]:
    """Touch files or folders every few seconds while the block runs, those of them that are there."""
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
        thread.join()  # so that a process that forks afterwards has one thread less


def renew_time(path: Path) -> None:
    """Give a file or folder the present time of its file system, if it is there."""
    with contextlib.suppress(OSError):
        os.utime(path, follow_symlinks=False)


def _namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:  # only Linux has namespaces; a sandbox may hide them
        return UNKNOWN if sys.platform.startswith("linux") else "none"


def _started(pid: int) -> str:
    """When a process was started, in clock ticks since boot; empty where the system does not say."""
    fields = _stat(pid)
    return fields[STARTED_FIELD] if fields else ""


def _stat(pid: int) -> list[str]:
    """What the system says of a process, from its state on (field 3 of proc(5)); empty where it does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return stat.rpartition(")")[2].split()  # the name before may hold anything
