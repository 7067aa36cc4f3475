"""Reports in a real browser, opened from disk: whole, silent, and forbidden to run or to fetch anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browsing import Watched
from making import no_progress
from runs import make_grid, make_run
from view_sites import CONTROL, MARKUP, RIGHT_TO_LEFT, hostile_store

from leandit.tools.inspection.report.run import report_run
from leandit.tools.inspection.report.store_page import report_store
from leandit.tools.terminal.text import printable

ELSEWHERE = "https://elsewhere.example/image.png"
ATTACK = """
    window.refused = [];
    document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
    const script = document.createElement("script");
    script.textContent = "window.attacked = true";
    const image = document.createElement("img");
    image.src = "%s";
    document.body.append(script, image);
"""
LOADED = "[...document.images].every((image) => image.complete && image.naturalWidth)"
WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


def open_report(watched: Watched, html: Path) -> str:
    """Open a report, check what every one promises, and return the text that a reader sees, details unfolded."""
    page = watched.page
    page.goto(html.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    watched.until(LOADED)
    assert [url for url in watched.requests if not url.startswith("data:image/")] == [html.as_uri()]
    watched.assert_harmless("")
    assert page.locator("script, iframe, [onerror]").count() == 0
    for width_px in (1280, 400):
        page.set_viewport_size({"width": width_px, "height": 900})
        assert not page.evaluate(WIDE), f"wider than a window of {width_px} pixels"
    charts = page.locator("img.chart")
    assert charts.count() > 2
    assert all(chart.bounding_box()["width"] > 200 for chart in charts.all())  # pyright: ignore[reportOptionalSubscript]
    targets = page.evaluate("[...document.querySelectorAll('nav a')].map((link) => link.getAttribute('href'))")
    assert targets
    assert all(page.locator(target).count() == 1 for target in targets)
    return page.locator("body").inner_text()


def assert_policy_holds(watched: Watched, html: Path) -> None:
    """Even what stands in the page cannot run, nor ask anyone."""
    page, before = watched.page, len(watched.requests)
    page.evaluate(ATTACK % ELSEWHERE)
    watched.until("refused.length >= 2")
    assert set(page.evaluate("refused")) == {"script-src-elem", "img-src"}
    assert page.evaluate("window.attacked") is None
    assert [url for url in watched.requests[before:] if not url.startswith((ELSEWHERE, "data:"))] == []
    assert page.url == html.as_uri()


@pytest.mark.integration
def test_the_report_of_a_store_opens_from_disk_and_its_texts_do_no_harm(watched: Watched, tmp_path: Path) -> None:
    store, html = hostile_store(tmp_path), tmp_path / "report.html"
    report_store(str(store.path), html, progress=no_progress)
    text = open_report(watched, html)
    for hostile in (MARKUP, CONTROL, RIGHT_TO_LEFT):
        assert printable(hostile) in text
    assert "<b>gone.png" in text
    assert watched.page.locator("#images img").count() == len(store) == 14
    assert_policy_holds(watched, html)


@pytest.mark.integration
def test_the_report_of_a_run_opens_from_disk_and_its_texts_do_no_harm(watched: Watched, tmp_path: Path) -> None:
    hostile = {"machine": MARKUP, "device": RIGHT_TO_LEFT, "versions": {CONTROL: "1"}}
    run, html = make_run(tmp_path / "run", starts=[hostile]), tmp_path / "report.html"
    make_grid(run, 40)
    images = {"kind": "run", "path": MARKUP}
    (run / "evaluations.jsonl").write_text(json.dumps({"images": images, "frechet": 3.25}) + "\n")
    report_run(run, html)
    text = open_report(watched, html)
    for shown in (MARKUP, printable(RIGHT_TO_LEFT), printable(CONTROL), "3.25"):
        assert shown in text
    assert watched.page.locator("#images img").count() == 1
    assert_policy_holds(watched, html)
