"""The state of a run, read from what it has written so far."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from making import tree_digest
from view_sites import ROOT, client

from leandit.tools.inspection.view.run_site import RunSite
from leandit.tools.inspection.view.run_state import POINTS, RunState


def line(step: int, **values: Any) -> str:
    figures = {"step": step, "num_images": 8 * step, "epoch": 0, "loss": 1 / step, "seconds_per_step": 0.5}
    return json.dumps(figures | values) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    recipe = {"run": {"steps": 1000}, "model": {"name": "DiT-S/4"}}
    (tmp_path / "run.json").write_text(json.dumps({"recipe": recipe}))
    return tmp_path


def points(state: dict[str, Any], title: str, line: int = 0) -> list[Any]:
    return next(chart for chart in state["charts"] if chart["title"] == title)["lines"][line]["points"]


def test_new_lines_are_added_and_half_a_line_waits(run: Path) -> None:
    state = RunState(run)
    assert dict(state.read()["facts"])["state"] == "no report yet"
    metrics = run / "metrics.jsonl"
    metrics.write_text(line(1) + line(2, held_out={"loss": 3.5, "averaged_loss": None}) + line(3)[:20])
    first = state.read()
    assert points(first, "Loss") == [(1, 1.0), (2, 0.5)]
    assert points(first, "Loss", 1) == [(2, 3.5)]
    assert dict(first["facts"])["step"] == "2 of 1,000"
    assert dict(first["facts"])["time left at this speed"] == "8 min"
    with open(metrics, "a") as file:
        file.write(line(3)[20:])
    assert [step for step, _ in points(state.read(), "Loss")] == [1, 2, 3]


def test_a_run_that_went_back_is_read_again(run: Path) -> None:
    state, metrics = RunState(run), run / "metrics.jsonl"
    metrics.write_text("".join(map(line, range(1, 9))))
    before = state.read()
    other = run / "other"
    other.write_text("".join(map(line, range(1, 4))))
    os.replace(other, metrics)  # as the trainer does when it resumes
    after = state.read()
    assert [step for step, _ in points(after, "Loss")] == [1, 2, 3]
    assert after["version"] != before["version"]


def test_what_is_no_report_is_left_out(run: Path) -> None:
    bad = ["nothing\n", "[]\n", '{"step": "x"}\n', line(2, loss=None, held_out=[1]), line(3, loss="<b>")]
    bad += ['{"step": 1e999}\n', f'{{"step": {10**30}}}\n', "[" * 100_000 + "\n", line(4, loss=None, num_images=None)]
    bad += [line(5, loss=10**400, num_images=float("inf"), seconds_per_step=float("nan"))]
    (run / "metrics.jsonl").write_text(line(1) + "".join(bad))
    assert points(RunState(run).read(), "Loss") == [(1, 1.0)]
    with client(RunSite(run).app()) as web:
        assert web.get(ROOT + "/state").json()["charts"]


def test_charts_are_drawn_once_for_each_change(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "metrics.jsonl").write_text(line(1))
    state = RunState(run)
    first = state.read()
    monkeypatch.setattr(state, "_charts", lambda: pytest.fail("drawn again"))
    assert state.read()["charts"] == first["charts"]


def test_a_long_run_is_thinned_and_its_spikes_stay(run: Path) -> None:
    lines = [line(step, loss=100.0 if step == 4321 else 1 + step % 7) for step in range(1, 10_001)]
    (run / "metrics.jsonl").write_text("".join(lines))
    drawn = points(RunState(run).read(), "Loss")
    assert len(drawn) <= POINTS
    assert (4321, 100.0) in drawn


def test_a_run_is_finished_running_or_quiet(run: Path) -> None:
    metrics = run / "metrics.jsonl"

    def state() -> str:
        return dict(RunState(run).read()["facts"])["state"]

    metrics.write_text(line(10))
    assert state() == "running"
    long_ago = time.time() - 600
    os.utime(metrics, (long_ago, long_ago))
    assert state().startswith("no report for 10 min")
    metrics.write_text(line(1000))
    assert state() == "finished"


def test_the_page_asks_for_what_is_new_and_nothing_changes(run: Path) -> None:
    (run / "metrics.jsonl").write_text(line(1))
    (run / "samples").mkdir()
    (run / "samples/step-5.png").write_bytes(b"a picture")
    before = tree_digest(run)
    with client(RunSite(run).app()) as web:
        assert "<main" in web.get(ROOT + "/").text
        state = web.get(ROOT + "/state").json()
        again = web.get(ROOT + "/state", params={"version": state["version"]}).json()
        assert web.get(f"{ROOT}/grid/{state['grids'][0]}").content == b"a picture"
        for path in ("grid/6", "grid/..%2f..%2frun.json", "record/0"):
            assert web.get(f"{ROOT}/{path}").status_code == 404
    assert "charts" in state
    assert "charts" not in again
    assert tree_digest(run) == before
