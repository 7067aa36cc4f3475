"""A process that keeps what it frees asks the system for nothing at its next step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from leandit.train.step.cpu import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()

def step():
    kept = [torch.ones(2**20) for _ in range(24)]  # 4 MiB each
    return sum(float(tensor[-1]) for tensor in kept)

for _ in range(4):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(16):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    # Left to itself, glibc moves its threshold to what it sees freed, and may keep a step's memory or not, by
    # where small pieces happen to lie. Told where to begin, it gives every tensor back.
    gives_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
    run = [sys.executable, "-c", SCRIPT, how]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=gives_back)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own way")
def test_steps_cost_no_page_faults() -> None:
    kept, given_back = page_faults("kept"), page_faults("given back")
    assert given_back >= 16 * 24  # each tensor, each time: 1024 faults of small pages, fewer of huge ones
    assert kept < given_back / 50  # a few tensors may still have to find their place
