"""The benchmark of planning: it measures what it says, in processes of its own. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_forked

from leandit.datasets.errors import RecipeError
from leandit.datasets.revisions.commits import read_manifest
from leandit.tools.bench.encode import plan as bench_plan
from leandit.tools.bench.harness.meters import PeakMemory
from leandit.tools.bench.harness.scratch import MARKER

ROWS = 300
TAKEN_MB = 96


def test_a_manifest_is_planned_and_taken_up_in_separate_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Forked: that a process may be fresh is shown by the memory that "bench precompute" measures.
    monkeypatch.setattr("subprocess.run", lambda command, **_: run_forked(command[1:]))
    result = bench_plan.run(tmp_path, ROWS, "manifest", captions=True)
    assert json.loads(json.dumps(result)) == result
    assert {
        "records",
        "sizes",
        "captions",
        "hardware",
        "plan",
        "open",
        "seal",
        "plan_bytes",
        "table_bytes",
    } == result.keys()
    seconds = {"seconds", "cpu_seconds", "list_seconds", "scan_seconds", "rest_seconds"}
    assert result["plan"].keys() == seconds | {"anonymous_mb"}
    assert result["open"].keys() == {"seconds", "tasks", "anonymous_mb"}
    assert all(result["plan"][name] > 0 for name in seconds | {"anonymous_mb"})
    assert result["open"]["tasks"] == result["seal"]["shards"] > 0
    assert result["seal"].keys() == {"seconds", "read_seconds", "shards", "stored", "anonymous_mb"}
    assert result["table_bytes"] > 0
    own = tmp_path / "bench-plan"
    assert {path.name for path in own.iterdir()} == {f"captions-{ROWS}", MARKER, "store"}
    plan = own / "store" / "plan"
    assert result["plan_bytes"] == sum(path.stat().st_size for path in plan.iterdir())
    manifest = read_manifest(own / "store", 1)  # a real one, of all rows
    assert (manifest.num_planned, manifest.num_stored) == (ROWS, result["seal"]["stored"])
    assert 0 < manifest.num_stored < ROWS
    names = [name for name, _ in bench_plan.render(result)]
    assert names[-4:] == ["plan size", "opened", "sealed", "table size"]


def test_an_unknown_place_of_sizes_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--sizes 'guess'"):
        bench_plan.run(tmp_path, ROWS, "guess", captions=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory of children is known on Linux")
def test_memory_of_children_is_counted() -> None:
    child = f"taken = b'x' * {TAKEN_MB * 10**6}; print('ready', flush=True); input()"
    with PeakMemory() as memory:
        process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
    process.communicate(b"\n")
    assert TAKEN_MB <= memory.beyond_mb < TAKEN_MB + 64
    assert memory.mb == pytest.approx(memory.before_mb + memory.beyond_mb)
