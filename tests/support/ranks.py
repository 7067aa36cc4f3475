"""Ranks that train together on this machine, each in a process of its own (``rank_main.py``)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from typing import Any

from forked import ForkedPython
from making import SUPPORT

from leandit.train.parallel.ranks import TORCHRUN

MAIN = SUPPORT / "rank_main.py"
Job = dict[str, Any]


def start_ranks(jobs: list[Job], world_size: int, names: tuple[str, ...] = TORCHRUN) -> list[ForkedPython]:
    """Start a process for each rank, with what torchrun says to each, or who has other names for it."""
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(world_size):
        place = dict(zip(names, map(str, (rank, rank, world_size, world_size)), strict=True))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(ForkedPython([MAIN, json.dumps(jobs)], env=common | place, **pipes))
    return ranks


def run_ranks(jobs: list[Job], world_size: int, names: tuple[str, ...] = TORCHRUN) -> list[list[dict[str, Any]]]:
    """What each rank said of each job; all must end well."""
    ranks = start_ranks(jobs, world_size, names)
    ended = [rank.communicate(timeout=280) for rank in ranks]
    for rank, (_, errors) in zip(ranks, ended, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in ended]


def free_port() -> int:
    """A port of this machine that nobody listens to."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
