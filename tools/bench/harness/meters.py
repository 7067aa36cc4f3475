"""Processor time and memory of a process tree, bytes on disk, the hardware.

Children count, because most peers read in worker processes. They are read from Linux's /proc; elsewhere memory is
unknown, and processor time is that of this process and of children that have ended.
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
    """Samples the memory of this process and its descendants; a context manager.

    Memory is that of ``tree_anonymous_mb``, in MB of a million bytes; 0 where it is unknown. A sample walks through all
    mapped pages and stops the process meanwhile, so sample seldom where gigabytes are mapped.
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
        """The peak above the memory at the start of the block, in MB."""
        return max(0.0, self.mb - self.before_mb)

    def _watch(self) -> None:
        is_last = False
        while True:
            self.mb = max(self.mb, tree_anonymous_mb() or 0.0)
            if is_last:
                return
            is_last = self._end.wait(self._every_seconds)


def tree_cpu_seconds() -> float:
    """Processor seconds of this process and its descendants, ended ones included; children in steps of 10 ms."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for process in descendants():
        if fields := _stat(process):
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime
    return total


def tree_anonymous_mb() -> float | None:
    """Anonymous and shared memory of the process tree, each page once (PSS), without page cache; None if unknown."""
    total = 0
    for process in [os.getpid(), *descendants()]:
        try:
            lines = (PROC / str(process) / "smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended, or the system has no such file
            if process == os.getpid():
                return None
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return total * 1024 / 1e6


def descendants() -> list[int]:
    """Process ids of all descendants of this process."""
    children = defaultdict(list)
    for entry in PROC.glob("[0-9]*"):
        if fields := _stat(int(entry.name)):
            children[int(fields[1])].append(int(entry.name))
    processes, queue = [], [os.getpid()]
    while queue:
        below = children[queue.pop()]
        processes += below
        queue += below
    return processes


def _stat(process: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third on; the second is the name, which may contain spaces."""
    try:
        return (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def read_all(folder: Path) -> None:
    """Read every file below a folder into the page cache."""
    buffer = bytearray(WARM_BYTES)
    for path in files_below(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def disk_bytes(folder: Path) -> int:
    """Bytes that a folder occupies, in whole blocks of the file system."""
    return sum(path.stat().st_blocks * BLOCK_BYTES for path in files_below(folder))


def hardware() -> dict[str, Any]:
    """Processor, usable cores, memory, kernel and Python of this machine."""
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
