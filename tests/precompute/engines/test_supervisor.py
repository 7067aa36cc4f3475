"""What the supervisor of several processes does when one dies, with processes that only send what a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leandit.datasets.errors import ResourceError
from leandit.precompute.config import load
from leandit.precompute.engines import supervisor
from leandit.precompute.engines.job import Broken, Job
from leandit.precompute.engines.supervisor import MAX_LOSSES, Place, Supervisor
from leandit.precompute.pipeline import Report
from leandit.precompute.planning.compare import Options
from leandit.precompute.sources.files.ignored import Ignored


class Scripted:
    """A process that sends the messages of a script, then nothing until it is ended."""

    def __init__(self, script: list[Any]) -> None:
        self._script, self._ended = script, threading.Event()

    def messages(self) -> Iterator[Any]:
        for message in self._script:
            if isinstance(message, Exception):
                raise message
            yield message
        self._ended.wait(30)

    def ask_to_end(self) -> None:
        self._ended.set()

    def end(self) -> None:
        pass


REPORT = Report(None, 0, 0, 0.0, "none", {}, Ignored(), None)  # type: ignore[arg-type]


def run(tmp_path: Path, script: Callable[[Job], list[Any]], count: int = 2, **options: Any) -> list[Job]:
    """Run processes at some places, each of a device of its own; returns the jobs that were started, in order."""
    started: list[Job] = []
    job = Job(load("demo", []), ("pictures",), tmp_path / "store", Options(**options))

    def start(job: Job) -> Scripted:
        started.append(job)
        return Scripted(script(job))

    places = [Place(f"place {number}", replace(job, device=f"cpu:{number}")) for number in range(count)]
    Supervisor(places, start, progress=lambda *_: None, say=lambda _: None).run()
    return started


@pytest.mark.parametrize("script_of_the_first", [[Broken("gone")], []])  # it dies at once, or is never started
def test_where_none_that_leads_can_be_started_a_process_of_another_place_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script_of_the_first: list[Any]
) -> None:
    monkeypatch.setattr(supervisor, "START_SECONDS", 0.2)
    started = run(tmp_path, lambda job: script_of_the_first if job.device == "cpu:0" else [REPORT] * job.leads)
    assert [job.device for job in started if job.leads] == ["cpu:0", "cpu:1"]
    assert [job.leads for job in started if job.device == "cpu:0"] == [True, False]


@pytest.mark.parametrize("message", [TypeError("missing 1 required positional argument"), Broken("out of memory")])
def test_those_that_lead_are_not_started_for_ever(tmp_path: Path, message: Any) -> None:
    started: list[Job] = []

    def script(job: Job) -> list[Any]:
        started.append(job)
        return [message] if job.leads else []

    with pytest.raises(ResourceError, match=f"the {MAX_LOSSES}rd in a row that listed and planned"):
        run(tmp_path, script, count=4)
    assert [job.device for job in started if job.leads] == ["cpu:0", "cpu:1", "cpu:2"]


@pytest.mark.parametrize("has_planned", [False, True])
def test_rejects_are_tried_again_in_one_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_planned: bool
) -> None:
    planned = [1]
    monkeypatch.setattr(supervisor, "planned_revisions", lambda root: list(planned))

    def script(job: Job) -> list[Any]:
        if job.device == "cpu:0" and job.leads:
            planned.extend([2] * has_planned)
            return [Broken("gone")]
        return [REPORT] if job.leads else []

    started = run(tmp_path, script, retry_rejected=True)
    assert [job.options.retry_rejected for job in started if job.leads] == [True, not has_planned]
