"""Fixtures: a real browser, and a page of it that is watched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from browsing import Watched, chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    page = browser.new_page()
    yield Watched(page)
    page.close()
