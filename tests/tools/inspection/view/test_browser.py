"""The pages in a real browser: search, paging, a record, a run that goes on; no error, no request to anyone else."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browsing import Watched, viewed
from runs import LINES, make_grid, make_run, report_line
from view_sites import MARKUP, hostile_store

pytestmark = pytest.mark.usefixtures("tiny_models")
LOADED = "[...document.images].every((image) => image.complete && image.naturalWidth)"


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
    from leandit.tools.synthetic.store import make_store

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
