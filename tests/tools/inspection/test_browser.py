"""Pages and reports in a real browser: whole, silent, searched and followed; nothing runs, no request to others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from browsing import Watched, chromium, viewed
from making import no_progress
from noise_store import make_store
from runs import LINES, make_grid, make_run, report_line
from view_sites import CONTROL, MARKUP, RIGHT_TO_LEFT, hostile_store

from leandit.tools.inspection.report.run import report_run
from leandit.tools.inspection.report.store_page import report_store
from leandit.tools.terminal.text import printable

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.usefixtures("tiny_models")
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    page = browser.new_page()
    yield Watched(page)
    page.close()


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
    assert all(chart.bounding_box()["width"] > 200 for chart in charts.all())
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


def test_a_store_is_searched_paged_and_looked_at(watched: Watched, tmp_path: Path) -> None:
    store = hostile_store(tmp_path)
    page = watched.page
    with viewed(store.path) as address:
        page.goto(address)
        assert page.locator(".card").count() == len(store) + 2
        watched.until("document.querySelector('.card img').naturalWidth > 0")

        page.fill("input[name=q]", "TRIANGLE big")
        page.keyboard.press("Enter")
        page.wait_for_url("**/?q=TRIANGLE+big")
        found = page.locator(".card").count()
        assert 0 < found < len(store)
        page.select_option("select[name=bucket]", "64x64")
        page.wait_for_url("**bucket=64x64**")
        page.go_back()
        page.wait_for_url("**/?q=TRIANGLE+big")
        assert page.locator(".card").count() == found
        assert page.input_value("input[name=q]") == "TRIANGLE big"

        page.goto(f"{address}?q=alert")
        assert page.locator(".card").first.locator(".text").inner_text().startswith(MARKUP[:30])
        page.locator(".card").first.click()
        page.wait_for_url("**/record/0")
        watched.until(LOADED)
        assert page.locator("figure").count() == 1 + store.spec.latent.stored_channels
        assert "matches" in page.locator("body").inner_text()
        page.click("a[rel=next]")
        page.wait_for_url("**/record/1")
        watched.until(LOADED)
    watched.assert_harmless(urlsplit(address).netloc)


@pytest.mark.integration
def test_pages_of_a_store_lead_on_and_back(watched: Watched, tmp_path: Path) -> None:
    make_store(tmp_path / "store", {"32x32": 60}, num_classes=3)
    page = watched.page
    with viewed(tmp_path / "store") as address:
        page.goto(address)
        watched.until("document.getElementById('note').textContent.includes('no decoder')")
        assert page.locator(".card").count() == 24
        page.locator("a[rel=next]").first.click()
        page.wait_for_url("**page=2")
        page.locator("a[rel=next]").first.click()
        page.wait_for_url("**page=3")
        assert page.locator(".card").count() == 12
        assert page.locator("#found").inner_text().startswith("60 of 60 records, showing 49-60")
        page.go_back()
        page.wait_for_url("**page=2")
        watched.until("document.querySelector('.card img').naturalWidth > 0")
    watched.assert_harmless(urlsplit(address).netloc)


@pytest.mark.integration
def test_a_run_is_followed(watched: Watched, tmp_path: Path) -> None:
    run, page = make_run(tmp_path / "run", "run.steps=2000", starts=[{"machine": MARKUP}]), watched.page
    with viewed(run) as address:
        page.goto(address)
        watched.until(LOADED)
        assert "400 of 2,000" in page.locator("#summary").inner_text()
        assert page.locator("img.chart").count() > 5
        assert MARKUP in page.locator("#starts").inner_text()
        with open(run / "metrics.jsonl", "a") as metrics:
            metrics.write(json.dumps(report_line(LINES) | {"step": 1234, "loss": 7.25}) + "\n")
        make_grid(run, 40)
        page.locator(".grids img").wait_for()  # survives that the page reloads itself
        watched.until(LOADED)
        assert "1,234 of 2,000" in page.locator("#summary").inner_text()
        watched.assert_harmless(urlsplit(address).netloc, "")
        assert page.locator("#lost").is_hidden()
    watched.until("!document.getElementById('lost').hidden")
