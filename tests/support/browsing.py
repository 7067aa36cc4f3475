"""A real browser, headless, that notes what it complains about and whom it asks."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from forked import ForkedPython

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_MS = 240_000  # the machine may be busy


class Watched:
    """A page of a browser, with all that it has asked for and complained about.

    Args:
      page: of playwright.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)

    def until(self, condition: str) -> None:
        """Wait for a condition in JavaScript; the page's own policy forbids the eval by which playwright waits."""
        end = time.monotonic() + WAIT_MS / 1000
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.05)

    def assert_harmless(self, *hosts: str) -> None:
        """No error, and no request but to these hosts; "" is the file itself, and data within it."""
        assert self.complaints == []
        assert {urlsplit(url).netloc for url in self.requests} <= set(hosts)
        assert self.requests


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's browser; the test is skipped where there is none."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def viewed(*arguments: object) -> Iterator[str]:
    """The address of a page that ``leandit view`` serves; Ctrl-C ends the command, with code 0."""
    code = "from leandit.tools.cli.main import main; main()"
    process = ForkedPython(
        ["-c", code, "view", *arguments, "--no-open"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        name, address = process.stdout.readline().split()
        assert name == "view"
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.communicate()
