"""Tests of what a GPU does. Without one, those that take a ``device`` make a dry run on the CPU; others are skipped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from fake_cuda import RefuseWaits

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its start; resuming needs it
Waits = Callable[[], AbstractContextManager[object]]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once: time on a GPU may end before the summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)


@pytest.fixture
def gpu() -> torch.device:
    """The GPU, as a run names it."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: run 'make gpu' on a machine with one")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def no_waits(device: torch.device) -> Waits:
    """Within such a context an operation raises if the host would wait for the device."""

    @contextlib.contextmanager
    def on_gpu() -> Iterator[None]:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return on_gpu if device.type == "cuda" else lambda: RefuseWaits("cpu")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels that add in the same order each time; the backward pass of attention otherwise does not."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
