"""One command fills every table that needs a GPU: on a CPU its cells are tiny, and all of them run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedPython
from plain_dit import made_up_fast_dit

from leandit.datasets.errors import RecipeError
from leandit.datasets.store import LatentStore
from leandit.tools.bench.gpu import runner, tables
from leandit.tools.bench.gpu.cell import FUNCTIONS
from leandit.tools.bench.gpu.cells import FAST_DIT, PIXART, REAL, RECIPES, SANA, SD3, SMOKE, TINY, Cell
from leandit.tools.bench.gpu.measure import workload
from leandit.tools.bench.gpu.results import CUT, DONE, FAILED, FILE, SKIPPED, append_result, read_results
from leandit.tools.bench.gpu.runner import GpuRequest, run
from leandit.tools.bench.gpu.tables import MISSING, render
from leandit.tools.bench.harness.scratch import MARKER
from leandit.tools.bench.training.train import noise_store
from leandit.train.metrics.flops import latent_size_of
from leandit.train.run.model_for_store import model_for_stores

ROOT = Path(__file__).parents[3]
MACHINE = {"gpu, driver, memory": "NVIDIA H100, 570.1, 81559 MiB", "cpu": "EPYC", "cores": 16, "torch": "2.13.0"}
RATES = {"store": [550.0, 560.0], "synthetic": [555.0, 555.0]}
TRAINED = {
    "images_per_second": RATES,
    "mfu": {"store": 0.412},
    "data_wait_share": [0.001, 0.003],
    "peak_gib": 41.26,
    "batch": 256,
    "precision": "bf16",
}


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are forked: an interpreter that imports torch takes seconds."""
    monkeypatch.setattr(runner, "Popen", lambda command, **how: ForkedPython(command[1:], **how))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are lines of Python, in an interpreter without torch."""

    def start(command: list[str], **how: Any) -> subprocess.Popen[Any]:
        job = json.loads(command[-1])
        return subprocess.Popen([sys.executable, "-S", "-c", job["arguments"]["code"]], **how)

    monkeypatch.setattr(runner, "Popen", start)


def request_in(folder: Path, minutes: float = 10, **how: Any) -> GpuRequest:
    return GpuRequest(folder / "out", folder / "scratch", "cpu", minutes, tiny=True, command="leandit bench gpu", **how)


def scripted_cell(name: str, code: str, limit: float = 30) -> Cell:
    return Cell("train", name, limit, {"code": code})


def test_every_kind_of_cell_runs_in_its_tiny_form(forked: None, tmp_path: Path) -> None:
    run(request_in(tmp_path), print)
    records = read_results(tmp_path / "out")
    status = {name: (record["status"], record["message"]) for name, record in records.items()}
    skipped = {name for name in status if name.startswith(("attention: ", "fast_dit: "))}
    assert status == {c.name: (DONE, "") for c in TINY} | {n: (SKIPPED, records[n]["message"]) for n in skipped}
    assert [
        check for check in records[TINY[0].name]["result"]["checks"].values() if not check.startswith("works: ")
    ] == []
    text = render(records)
    assert MISSING not in text
    assert "Tiny sizes" in text
    said: list[str] = []
    run(request_in(tmp_path), said.append)
    assert said == [f"{len(TINY)} of {len(TINY)} cells are finished, 10 minutes for the others"]


def test_fast_dit_is_measured_where_its_checkout_is_given_and_skipped_without(forked: None, tmp_path: Path) -> None:
    cells = tuple(cell for cell in TINY if cell.table == FAST_DIT)
    run(request_in(tmp_path), print, cells)
    (record,) = read_results(tmp_path / "out").values()
    assert record["status"] == SKIPPED
    assert "give --fast-dit DIR and --again" in record["message"]
    checkout = made_up_fast_dit(tmp_path)
    run(request_in(tmp_path, again=True, fast_dit=checkout), print, cells)
    (record,) = read_results(tmp_path / "out").values()
    assert (record["status"], record["message"]) == (DONE, "")
    assert set(record["result"]["images_per_second"]) == {"leandit", "fast-DiT"}
    (checkout / "models.py").write_text("import no_such_package")
    run(request_in(tmp_path / "other", fast_dit=checkout), print, cells)
    (record,) = read_results(tmp_path / "other/out").values()
    assert record["status"] == SKIPPED
    assert "'no_such_package'" in record["message"]


def test_a_cell_that_fails_is_recorded_with_its_message_and_the_next_one_runs(scripted: None, tmp_path: Path) -> None:
    cells = (
        scripted_cell("memory", "class OutOfMemoryError(Exception): pass\nraise OutOfMemoryError('of 80 GiB | all')"),
        scripted_cell("crash", "import os; os.kill(os.getpid(), 11)"),
        scripted_cell("absent", 'print(\'{"skipped": "no such card"}\')'),
        scripted_cell("next", "print('noise'); print('{\"a\": 1}')"),
    )
    run(request_in(tmp_path), print, cells)
    records = read_results(tmp_path / "out")
    found = {name.removeprefix("train: "): (r["status"], r["message"], r["result"]) for name, r in records.items()}
    assert found == {
        "memory": (FAILED, "exit code 1: OutOfMemoryError: of 80 GiB | all", None),
        "crash": (FAILED, "signal SIGSEGV: it said nothing", None),
        "absent": (SKIPPED, "no such card", None),
        "next": (DONE, "", {"a": 1}),
    }
    for record in records.values():
        assert {"machine", "command", "date", "seconds", "tiny", "arguments"} <= record.keys()
        assert record["machine"]["torch"]
    said: list[str] = []
    run(request_in(tmp_path), said.append, cells)
    assert said[0].startswith("4 of 4 cells are finished")
    run(request_in(tmp_path, again=True), said.append, cells)
    assert said[1].startswith("1 of 4 cells are finished")


def test_a_cell_past_its_limit_is_killed_with_its_children_and_runs_again_at_the_end(
    scripted: None, tmp_path: Path
) -> None:
    sleeps = "p = subprocess.Popen(['sleep', '60']); open(r'{}', 'w').write(str(p.pid)); time.sleep(60)"
    child = f"import subprocess, time; {sleeps}"
    pid, other = tmp_path / "pid", scripted_cell("other", "print('{}')")
    cells = scripted_cell("slow", child.format(pid), limit=1), other
    run(request_in(tmp_path), print, cells)
    assert [r["status"] for r in read_results(tmp_path / "out").values()] == [CUT, DONE]
    assert _has_ended(int(pid.read_text()))
    (tmp_path / "scratch/bench-gpu/tmp/left").touch()
    again = scripted_cell("slow", child.format(pid), limit=1), scripted_cell("third", "print('{}')")
    said: list[str] = []
    run(request_in(tmp_path), said.append, again)
    assert [line.split(": ")[1] for line in said[1:]] == ["third", "slow"]
    assert not (tmp_path / "scratch/bench-gpu/tmp/left").exists()


def test_no_cell_begins_that_might_not_end_within_the_budget(scripted: None, tmp_path: Path) -> None:
    cells = scripted_cell("long", "print('{}')", limit=60), scripted_cell("short", "print('{}')", limit=5)
    said: list[str] = []
    start = time.monotonic()
    run(request_in(tmp_path, minutes=0.2), said.append, cells)
    assert time.monotonic() - start < 12
    assert "train: long: not begun" in said[1]
    assert list(read_results(tmp_path / "out")) == ["train: short"]


def test_a_command_that_is_killed_takes_its_cell_with_it_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed as by a machine that is taken back: nothing of Python runs. Its line is cut too."""
    pid = tmp_path / "pid"
    code = f"""
import json, os, subprocess, sys
from pathlib import Path
from leandit.tools.bench.gpu import runner
from leandit.tools.bench.gpu.cells import Cell
watch = "import os, signal, threading\\ndef w():\\n while os.read(0, 1): pass\\n os.killpg(0, signal.SIGKILL)\\n"
start = "threading.Thread(target=w, daemon=True).start()\\n"
slow = watch + start + "open({str(pid)!r}, 'w').write(str(os.getpid()))\\nimport time; time.sleep(60)"
runner.Popen = lambda command, **how: subprocess.Popen(
    [sys.executable, "-S", "-c", json.loads(command[-1])["arguments"]["code"]], **how)
cells = Cell("train", "first", 30, {{"code": "print('{{}}')"}}), Cell("train", "second", 30, {{"code": slow}})
folder = Path({str(tmp_path)!r})
runner.run(runner.GpuRequest(folder / "out", folder / "scratch", "cpu", 5, True), print, cells)
"""
    process = ForkedPython(["-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not pid.exists() or not pid.read_text():
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert _has_ended(int(pid.read_text()))
    out = tmp_path / "out"
    assert list(read_results(out)) == ["train: first"]
    with (out / FILE).open("a") as file:
        file.write('{"cell": "train: second", "sta')
    assert list(read_results(out)) == ["train: first"]
    append_result(out, {"cell": "train: second", "status": DONE})
    assert list(read_results(out)) == ["train: first", "train: second"]


def _has_ended(pid: int) -> bool:
    for _ in range(250):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_other_lines_are_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[1]\n")
    with pytest.raises(RecipeError, match="line 1"):
        read_results(tmp_path)


def test_a_scratch_folder_of_others_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "scratch" / runner.OWN_FOLDER
    own.mkdir(parents=True)
    (own / "letters").touch()
    with pytest.raises(RecipeError, match=MARKER):
        run(request_in(tmp_path), print, ())


def test_cells_are_named_once_and_fill_tables() -> None:
    for cells in (REAL, TINY):
        assert len({cell.name for cell in cells}) == len(cells)
        assert {cell.table for cell in cells} == set(FUNCTIONS) == set(tables.TITLES) == set(tables.COLUMNS)
        assert cells[0].table == SMOKE
        json.dumps(cells)


@pytest.mark.parametrize("row", [PIXART, SANA, SD3])
def test_the_store_of_noise_is_what_the_model_is_trained_on(row: str, tmp_path: Path) -> None:
    work = workload(**RECIPES[row] | {"settings": ["run.global_batch=1"]})
    store = LatentStore(noise_store(work, tmp_path / "store"))
    spec, _ = model_for_stores(work.recipe, [store])
    assert spec == work.spec
    assert latent_size_of(work.largest_bucket, store.spec.latent) == latent_size_of(
        work.largest_bucket, work.store.latent
    )
    assert store.latents(work.largest_bucket)[0].shape[1:] == {PIXART: (64, 64), SANA: (32, 32), SD3: (64, 64)}[row]


def test_the_tables_are_these() -> None:
    smoke, xl, xl_512, b = (REAL[i] for i in range(4))
    kept = {"tiny": False, "machine": MACHINE, "date": "2026-11-24T10:00:00+00:00", "message": ""}
    records = {
        smoke.name: kept | {"cell": smoke.name, "status": DONE, "result": {"checks": {"copies": "works: all, 1.0 s"}}},
        xl.name: kept | {"cell": xl.name, "status": DONE, "result": TRAINED},
        xl_512.name: kept
        | {"cell": xl_512.name, "status": FAILED, "message": "OutOfMemoryError: a | b", "result": None},
        b.name: kept | {"cell": b.name, "status": CUT, "message": "killed after 200 s", "result": None},
    }
    text = render(records)
    assert text.split("\n\n**Our step")[0] == (
        "NVIDIA H100, 570.1, 81559 MiB; EPYC, 16 cores; torch 2.13.0; 2026-11-24.\n\n"
        "**Smoke test**\n\n|  |  |\n| --- | --- |\n| all parts of a run | copies: works: all, 1.0 s |\n\n"
        "**Training, on a store of noise**\n\n"
        "|  | images/s | MFU | of one synthetic batch | waits for data | peak GiB | batch, precision | goal |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| DiT-XL/2, 256 px | 555.0 (550.0 to 560.0) | 41.2% | 1x (0.991x to 1.01x) | 0.20% | 41.3 | 256, bf16 |"
        " 40 % MFU |\n"
        "| DiT-XL/2, 512 px | failed | failed | failed | failed | failed | failed | 38 % MFU |\n"
        + "".join(
            f"| {row} |{' not yet measured |' * 6} {goal} |\n"
            for row, goal in (("DiT-B/2, 256 px", "32 % MFU"), ("PixArt-Sigma, 512 px", "38 % MFU"))
        )
        + "".join(
            f"| {row} |{' not yet measured |' * 6}  |\n" for row in ("SD3.5 Medium, 512 px", "Sana 1.6B, 1024 px")
        ).rstrip("\n")
    )
    assert text.endswith(
        "**Not done**\n\n| cell | | |\n|---|---|---|\n"
        "| train: DiT-XL/2, 512 px | failed | OutOfMemoryError: a \\| b |\n"
        "| train: DiT-B/2, 256 px | cut | killed after 200 s |"
    )


def test_the_documentation_has_these_tables() -> None:
    """With figures in them, their first column stays."""
    documented = (ROOT / "docs/benchmarks.md").read_text()
    rows = [line.split(" | ")[0] for line in render({}).splitlines() if line.startswith("| ")]
    assert len(rows) > 40
    assert [row for row in rows if row not in documented] == []
