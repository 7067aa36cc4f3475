"""Each script of benchmarks/ runs at its smallest size and prints its table; run by 'make test-long'."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.slow


def run_script(name: str, *options: object) -> str:
    """Run a script of benchmarks/; its stdout."""
    command = [sys.executable, str(BENCHMARKS / name), *map(str, options)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200).stdout


def test_loader_peers(tmp_path: Path) -> None:
    how: dict[str, Any] = {"--records": 50, "--rounds": 1, "--seconds": 0.01, "--json": tmp_path / "all.json"}
    how |= {"--workload": "latents,aligned", "--peers": "leandit,memmap dataset,npy,safetensors,webdataset,ffcv"}
    out = run_script("loader_peers.py", "--scratch", tmp_path, *(word for pair in how.items() for word in pair))
    result = json.loads((tmp_path / "all.json").read_text())
    assert [workload["workload"] for workload in result["workloads"]] == ["latents", "aligned"]
    for workload in result["workloads"]:
        for name, state in workload["peers"].items():
            if "missing" in state:
                assert f"{name}: not installed" in out
                continue
            assert {mode: checked["problems"] for mode, checked in state["checks"].items()} == {
                "in process": [],
                "2 workers": [],
            }
            assert min(cell["ratio"] for cells in state["cells"].values() for cell in cells) > 0
            assert f"| {name} |" in out
