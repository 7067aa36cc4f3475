"""What a measurement is made with: processor time and memory of a tree of processes, bytes on disk, the hardware.

Children are counted too, because most peers read in worker processes. Linux tells of them in /proc; elsewhere memory is
not known, and the processor time is that of this process and of children that have ended.
"""

from __future__ import annotations

import os
import platform
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from ....datasets.disk.files import files_below

PROC = Path("/proc")
BLOCK_BYTES = 512  # unit of st_blocks
WARM_BYTES = 1 << 24
EVERY_SECONDS = 0.1


class PeakMemory:
    """Looks at the memory of this process and its descendants again and again; a context manager.

    A look walks through all that is mapped, while the process waits: where gigabytes are, seldom is often enough. Its
    unit is the MB of a million bytes; what counts is said in ``tree_anonymous_mb``. Where that is not known, 0.
    """

    def __init__(self, *, every_seconds: float = EVERY_SECONDS) -> None:
        self.before_mb = self.mb = 0.0
        self._every_seconds = every_seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self.before_mb = tree_anonymous_mb() or 0.0
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def beyond_mb(self) -> float:
        """The peak beyond what was there when the block began."""
        return max(0.0, self.mb - self.before_mb)

    def _watch(self) -> None:
        is_last = False
        while True:
            self.mb = max(self.mb, tree_anonymous_mb() or 0.0)
            if is_last:
                return
            is_last = self._end.wait(self._every_seconds)


def tree_cpu_seconds() -> float:
    """Processor time of this process and its descendants, those that have ended included; children count in 10 ms."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for process in descendants():
        if fields := _stat(process):
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime
    return total


def tree_anonymous_mb() -> float | None:
    """Anonymous and shared memory of this process and its descendants, each page once (PSS); no page cache."""
    total = 0
    for process in [os.getpid(), *descendants()]:
        try:
            lines = (PROC / str(process) / "smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended, or there is no such file
            if process == os.getpid():
                return None
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return total * 1024 / 1e6


def descendants() -> list[int]:
    """Processes below this one."""
    children = defaultdict(list)
    for entry in PROC.glob("[0-9]*"):
        if fields := _stat(int(entry.name)):
            children[int(fields[1])].append(int(entry.name))
    found, queue = [], [os.getpid()]
    while queue:
        below = children[queue.pop()]
        found += below
        queue += below
    return found


def _stat(process: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third on: the second, the name, may hold anything."""
    try:
        return (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def read_all(folder: Path) -> None:
    """Read every file, so that it is in the page cache."""
    buffer = bytearray(WARM_BYTES)
    for path in files_below(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def disk_bytes(folder: Path) -> int:
    """What a folder occupies, in whole blocks of the file system."""
    return sum(path.stat().st_blocks * BLOCK_BYTES for path in files_below(folder))


def hardware() -> dict[str, Any]:
    """The machine: processor, cores that may be used, memory, kernel, Python."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _first_of("cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _first_of(name: str, key: str) -> str | None:
    path = PROC / name
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
