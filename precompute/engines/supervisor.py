"""Several processes on one store, started, watched and ended by this one, which encodes nothing itself.

Each runs the ordinary precompute on one device (``job.py``). They share the shards by leases, so nothing is handed out,
and nothing is lost with a process that dies: the others go on with its shards, and another is started. The first one
leads: it alone lists the source, plans, and lets the store grow. If none can be started there, the next place leads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from ...datasets.errors import ResourceError
from ...datasets.format.layout import Task
from ...datasets.revisions.catalog import planned_revisions, sealed_revisions
from ..encoders.text.encoder import TokenCount
from ..pipeline import Report
from ..progress.clock import REJECTED, Progress, StageClock
from ..progress.tally import CAPTIONS, PICTURES, Work
from ..progress.verdict import Power
from .child import END_SECONDS
from .job import Broken, Failed, Job, outcome
from .told import tell

LOG = logging.getLogger(__name__)
MAX_DEATHS = 5  # of processes that held the same shard
MAX_LOSSES = 3  # of one device, without a commit in between
LOOK_SECONDS = 0.5  # between two points where a signal is noticed
SILENCE_SECONDS = 60.0
START_SECONDS = 300.0  # to the first message of a process that leads; on a cluster its machine may be gone
OF_SHARDS = (CAPTIONS, PICTURES, REJECTED)  # stages that all processes report: the oldest one speaks


class Process(Protocol):
    """A process that does a job, on this machine or on another."""

    def messages(self) -> Iterator[Any]:
        """What it sends, as ``work`` and ``outcome`` do; ``Broken`` last if it has died."""
        ...

    def ask_to_end(self) -> None:
        """Let it release its leases and end."""
        ...

    def end(self) -> None:
        """Wait for its end; kill it after END_SECONDS."""
        ...


@dataclass(eq=False)
class Place:
    """A device, and the job of its process; ``losses`` in a row, without a commit."""

    name: str
    job: Job
    losses: int = 0


class _Running:
    """A process at a place, and a thread that puts its messages into a queue."""

    def __init__(self, place: Place, process: Process, leads: bool, messages: SimpleQueue[Any]) -> None:
        self.place, self.process, self.leads, self.work = place, process, leads, Work()
        self._messages, self.has_begun, self.since = messages, False, time.monotonic()
        self.thread = threading.Thread(target=self._receive, name="leandit-process", daemon=True)
        self.thread.start()

    def _receive(self) -> None:
        if error := outcome(self._forward):  # a message that was cut short, or cannot be unpickled
            self._messages.put((self, error))

    def _forward(self) -> None:
        for message in self.process.messages():
            self._messages.put((self, message))


class Supervisor:
    """The processes of one run.

    Args:
      places: a process is started for each; the first one leads.
      start: starts the process of a job.
      progress: called with the progress of one of them, which counts what all commit.
      say: called with notes, and with a message when a process dies.
      silence: what to say if no process sends anything for SILENCE_SECONDS; "" for nothing.
    """

    def __init__(
        self,
        places: Sequence[Place],
        start: Callable[[Job], Process],
        *,
        progress: Progress,
        say: Callable[[str], None],
        silence: str = "",
    ) -> None:
        self._places, self._start, self._progress, self._say = list(places), start, progress, say
        self._silence, self._since = silence, time.monotonic()
        self._messages: SimpleQueue[tuple[_Running, Any]] = SimpleQueue()
        self._running: list[_Running] = []
        self._started: list[_Running] = []
        self._deaths: Counter[Task] = Counter()
        self._totals: dict[str, int] = {}  # of the stages whose progress was shown
        self._leaders_lost = 0  # in a row, without a commit
        self._last_planned = self._planned()  # before this run

    def run(self) -> Report:
        """Start the processes, and wait until the one that leads has finished.

        Returns: its report, with the sums of all processes.
        Raises: LeanditError, OSError: of any process, if all would meet it. ResourceError: too many have died.
        """
        start, report, num_places = time.perf_counter(), None, len(self._places)
        power = Power(self._places[0].job.device.partition(":")[0], num_places, 0)
        power = replace(power, num_decoders=sum(place.job.num_decoders for place in self._places))
        try:
            while report is None:
                self._start_missing()
                report = self._next()
        finally:
            self._end(self._running)
        while not self._messages.empty():  # of the others' last commits
            one, message = self._messages.get()
            one.work = message if isinstance(message, Work) else one.work
        clock = StageClock()
        for one in self._started:
            clock.add(one.work.seconds)
        return replace(
            report,
            num_encoded=sum(one.work.num_encoded for one in self._started),
            seconds=clock.seconds,
            tokens=sum((one.work.tokens for one in self._started), TokenCount()),
            total_seconds=time.perf_counter() - start,
            power=power,
        )

    def _start_missing(self) -> None:
        """Start a process at each place that has none, and one that leads at the first."""
        for place in self._places:
            leads = place is self._places[0]
            self._end([one for one in self._running if one.place is place and one.leads != leads])
            if not any(one.place is place for one in self._running):
                LOG.info(
                    "a process on %s, which %s, with %d decoders",
                    place.name,
                    "lists and plans" if leads else "helps",
                    place.job.num_decoders,
                )
                process = self._start(self._job(place, leads))
                self._running.append(_Running(place, process, leads, self._messages))
                self._started.append(self._running[-1])

    def _job(self, place: Place, leads: bool) -> Job:
        """The job of a new process; rejects are tried again in one revision, not in another by each that leads."""
        job = replace(place.job, leads=leads)
        if self._planned() == self._last_planned:
            return job
        return replace(job, options=replace(job.options, retry_rejected=False))

    def _planned(self) -> list[int]:
        store = self._places[0].job.store_path
        return [*sealed_revisions(store), *planned_revisions(store)]

    def _next(self) -> Report | None:
        """Handle a message; returns the report of the process that leads."""
        leader = next(one for one in self._running if one.leads)
        is_late = not leader.has_begun and time.monotonic() - leader.since > START_SECONDS
        if is_late and len(self._places) > 1:  # another can lead
            self._lose(leader, f"it has not begun within {START_SECONDS:.0f} s")
            return None
        try:
            one, message = self._messages.get(timeout=LOOK_SECONDS)
        except Empty:
            if self._silence and time.monotonic() - self._since > SILENCE_SECONDS:
                self._say(self._silence)
                self._since = time.monotonic()
            return None
        self._since = time.monotonic()
        one.has_begun |= not isinstance(message, Broken)
        match message:
            case Work():
                if message.num_commits > one.work.num_commits:
                    one.place.losses = self._leaders_lost = 0
                one.work = message
            case _ if one not in self._running:  # ended meanwhile
                pass
            case Report():  # all is committed, though the last counts of others may still be on their way
                for stage, total in self._totals.items():
                    self._progress(stage, total, total)
                return message
            case Failed(error):
                raise error
            case Broken(what):
                self._lose(one, what)
            case str():
                self._say(message)
            case logging.LogRecord():
                tell(message, one.place.name)
            case (stage, done, total) if stage not in OF_SHARDS or one is self._running[0]:
                if stage in (CAPTIONS, PICTURES):
                    self._totals[stage] = total
                self._progress(stage, done, total)
        return None

    def _lose(self, one: _Running, what: str) -> None:
        """Give up a dead process, and its place if it has died there too often.

        Raises: ResourceError: no place is left, or a shard, or leading, has ended too many processes.
        """
        self._end([one])
        place, held = one.place, one.work.held
        place.losses += 1
        self._deaths.update(held)
        said = f"the process on {place.name} is gone: {what}" + (f"; it held {_names(held)}" if held else "")
        suspects = [task for task, count in self._deaths.items() if count >= MAX_DEATHS]
        if suspects:
            raise ResourceError(
                f"{_names(suspects)}: {MAX_DEATHS} processes were lost while they held it; the last: {what}. Look at "
                "its pictures, its files and the memory of the machines. What is committed stays, the same command "
                "goes on."
            )
        self._leaders_lost += one.leads
        if self._leaders_lost >= MAX_LOSSES and len(self._places) > 1:
            raise ResourceError(
                f"{said}. It is the {MAX_LOSSES}rd in a row that listed and planned, without a commit in between. What "
                "is committed stays, the same command goes on."
            )
        if one.leads and not one.has_begun:  # its device or machine may be gone: the next place leads
            self._places.append(self._places.pop(0))
        if place.losses < MAX_LOSSES:
            self._say(f"{said}. Another is started, the others go on")
            return
        self._places.remove(place)
        if not self._places:
            raise ResourceError(f"{said}. No other is left. What is committed stays, the same command goes on.")
        self._say(f"{said}. It is given up, the others go on with its shards")

    def _end(self, some: Sequence[_Running]) -> None:
        self._running = [one for one in self._running if one not in some]
        for one in some:
            one.process.ask_to_end()
        for one in some:
            one.process.end()
            one.thread.join(END_SECONDS)


def _names(tasks: Sequence[Task]) -> str:
    return " and ".join(f"shard {shard} of '{part}'" for part, shard in tasks)
