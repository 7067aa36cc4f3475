"""The page of a run that ``leandit view`` serves: its report, drawn anew when the run has written something."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from making import tree_digest
from runs import make_grid, make_run, report_line
from view_sites import ROOT, client

from leandit.tools.inspection.report import run as report
from leandit.tools.inspection.view import run_site
from leandit.tools.inspection.view.run_site import RunSite


@pytest.fixture(autouse=True)
def _without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts take most of the time of a page."""
    monkeypatch.setattr(report, "draw_charts", lambda _: {"losses": [], "steps": [], "speed": []})


def test_a_page_is_drawn_anew_when_the_run_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_site, "PAUSE", 0)
    line = json.dumps(report_line(41)) + "\n"
    run = make_run(tmp_path / "run", "run.steps=1000", tail=line[:50])
    before = tree_digest(run)
    with client(RunSite(run).app()) as web:
        page = web.get(f"{ROOT}/").text
        assert "400 of 1,000" in page
        assert "time left at this speed" in page
        version = web.get(f"{ROOT}/version").text
        assert f'data-version="{version}"' in page
        assert web.get(f"{ROOT}/").text == page
        with open(run / "metrics.jsonl", "a") as file:
            file.write(line[50:])
        newer = web.get(f"{ROOT}/version").text
        assert "410 of 1,000" in web.get(f"{ROOT}/").text
        make_grid(run, 40)
        assert len({version, newer, web.get(f"{ROOT}/version").text}) == 3
        assert "1 of 1 grids" in web.get(f"{ROOT}/").text
        newest, start = web.get(f"{ROOT}/version").text, time.time()
        monkeypatch.setattr(time, "time", lambda: start + 10_000)
        assert web.get(f"{ROOT}/version").text != newest
        assert "it has stopped at step 410 of 1,000" in web.get(f"{ROOT}/").text
    assert before.items() - tree_digest(run).items() <= {("metrics.jsonl", before["metrics.jsonl"])}


def test_a_run_that_is_damaged_while_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_site, "PAUSE", 0)
    run = make_run(tmp_path / "run")
    metrics = (run / "metrics.jsonl").read_bytes()
    with client(RunSite(run).app()) as web:
        headers = web.get(f"{ROOT}/").headers
        assert "script-src 'self'; style-src 'unsafe-inline'; img-src data:;" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "location.reload" in web.get(f"{ROOT}/follow.js").text
        assert web.get(f"{ROOT}/record/0").status_code == 404
        sound = web.get(f"{ROOT}/version").text
        (run / "metrics.jsonl").write_text("nothing\n")
        damaged = web.get(f"{ROOT}/version")  # the script of the page compares it, and reloads
        assert (damaged.status_code, damaged.text != sound) == (200, True)
        answer = web.get(f"{ROOT}/")
        assert answer.status_code == 500
        assert "line 1 is not a report" in answer.text
        assert f'data-version="{damaged.text}"' in answer.text
        (run / "metrics.jsonl").write_bytes(metrics)
        assert web.get(f"{ROOT}/version").text != damaged.text
        assert web.get(f"{ROOT}/").status_code == 200
