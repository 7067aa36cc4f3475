"""The page of a run: its report, which reloads itself when the run has written something new."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from ....errors import LeanditError
from ....train.weights.folders import EVALUATIONS, METRICS, RUN, SAMPLES
from ..report.page import render_page
from ..report.rules import Alert, alerts_of
from ..report.run import render_run
from ..report.run_facts import RunFacts
from .pages import application
from .server import HEADERS

SCRIPT = Path(__file__).parent / "static" / "follow.js"
PAUSE = 4  # times the processor time of a drawing until the next one: at most a fifth of a core
OWN_POLICY = {"style-src": "'unsafe-inline'", "img-src": "data:"}  # a report holds its style and images


class RunSite:
    """A run as a page.

    Args:
      run: its folder; it is only read.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._lock = run, threading.Lock()  # matplotlib draws in one thread at a time
        self._facts: RunFacts | None = None  # None: the page shows why the run cannot be read
        self._html, self._version, self._next = "", "", 0.0

    def app(self) -> Starlette:
        """The application, for ``Guard``."""
        routes = [Route("/", self._page), Route("/version", self._version_text), Route("/follow.js", _script)]
        return application(routes)

    def _page(self, request: Request) -> Response:
        html, _, is_read = self._newest()
        policy = dict(part.split(" ", 1) for part in HEADERS["content-security-policy"].split("; ")) | OWN_POLICY
        value = "; ".join(f"{name} {sources}" for name, sources in policy.items())
        return HTMLResponse(html, 200 if is_read else 500, headers={"content-security-policy": value})

    def _version_text(self, request: Request) -> Response:
        return PlainTextResponse(self._newest()[1])

    def _newest(self) -> tuple[str, str, bool]:
        """The page and its version, rendered again if the run has written something; and whether the run can be read.

        A run that cannot be read is a page too, which says why, and reloads itself once it can be.
        """
        with self._lock:
            stamp = self._stamp()  # before reading: what is written meanwhile is of the next version
            has_changed = self._facts is None or f"{stamp} {self._state()}" != self._version
            if time.monotonic() >= self._next and has_changed:
                started = time.thread_time()
                try:
                    self._facts = RunFacts(self._run)
                    version = f"{stamp} {self._state()}"
                    self._html = render_run(self._facts, alerts_of("run", self._facts), version=version)
                except (LeanditError, OSError) as error:
                    self._facts, version, alert = None, f"{stamp} unreadable", Alert(str(error), "")
                    title = f"Run {self._run}"
                    self._html = render_page(
                        "page.html", title=title, sections={}, alerts=[alert], page_version=version
                    )
                self._version, self._next = version, time.monotonic() + PAUSE * (time.thread_time() - started)
            return self._html, self._version, self._facts is not None

    def _stamp(self) -> str:
        """Times of the last change of the run's files."""
        paths = (self._run, *(self._run / name for name in (RUN, METRICS, EVALUATIONS, SAMPLES)))
        return " ".join(str(path.stat().st_mtime_ns) for path in paths if path.exists())

    def _state(self) -> str:
        """The state of the run now: one that has been quiet for long counts as stopped."""
        return self._facts.metrics.state(self._facts.num_steps) if self._facts else ""


def _script(request: Request) -> Response:
    return Response(SCRIPT.read_bytes(), media_type="text/javascript")
