"""Progress on stderr: a live bar on a terminal, one plain line every 30 seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from ...datasets.units import readable_time
from ...precompute.progress.clock import REJECTED
from .text import is_quiet

if TYPE_CHECKING:  # torch takes a second to import
    from ...train.metrics.window import StepReport

PLAIN_EVERY_SECONDS = 30.0
SPEED_OVER_SECONDS = 300.0  # a batch of a slow encoder takes over rich's 30 s, after which it knows no time left


class _Counts(ProgressColumn):
    """Done and total."""

    def render(self, task: Task) -> Text:
        """Of a task."""
        total = f"{int(task.total):,}" if task.total else "?"
        return Text(f"{int(task.completed):,}/{total}", style="progress.download")


class _TimeLeft(ProgressColumn):
    """Time left; after the end, the time that it took."""

    def render(self, task: Task) -> Text:
        """Of a task."""
        if task.finished:
            return Text(f"took {readable_time(task.finished_time or 0.0)}", style="progress.elapsed")
        left = "" if task.time_remaining is None else f"{readable_time(round(task.time_remaining))} left"
        return Text(left, style="progress.remaining")


class ProgressLine:
    """Shows what is done of each stage, its rate, the time left, and the rejects.

    Call it as ``Progress``, with an optional note.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=is_quiet())
        self._live: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, tuple[float, int]] = {}
        self._finished: dict[str, float] = {}
        self._latest: dict[str, int] = {}
        self._num_rejected = 0
        self._last_plain = time.monotonic()

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description:>14}"),
                BarColumn(),
                _Counts(),
                _TimeLeft(),
                TextColumn("{task.fields[note]}"),
            )
            self._live = Progress(*columns, console=self._console, speed_estimate_period=SPEED_OVER_SECONDS)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` items of a stage are finished; a total of 0 is unknown.

        Args:
          note: instead of the rate.
        """
        if stage == REJECTED:
            self._num_rejected = done
            return
        rate = self._rate(stage, done, total)
        note = note or (f"{rate:,.1f}/s" if rate else "")
        if self._num_rejected:
            note = f"{note}, {self._num_rejected:,} rejected".removeprefix(", ")
        if self._live:
            if stage not in self._tasks:
                self._end_uncounted(self._live)
                self._tasks[stage] = self._live.add_task(stage, total=total or None, note="")
            self._live.update(self._tasks[stage], completed=done, note=note)
            return
        is_finished, self._latest[stage] = done >= total > 0 and self._latest.get(stage) != done, done
        if is_finished or time.monotonic() - self._last_plain >= PLAIN_EVERY_SECONDS:
            self._last_plain = time.monotonic()
            left = f", {readable_time((total - done) / rate)} left" if rate and done < total else ""
            of_total = f"{total:,}" if total else "?"
            line = f"{stage}: {done:,} of {of_total}  {note}{left}".rstrip()
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _rate(self, stage: str, done: int, total: int) -> float:
        """Items a second since the first call for the stage; when it is finished, until then."""
        now = time.monotonic()
        start, first = self._started.setdefault(stage, (now, done))
        if done >= total > 0:
            now = self._finished.setdefault(stage, now)
        return (done - first) / max(now - start, 1e-9)

    def _end_uncounted(self, live: Progress) -> None:
        """The next stage begins: one whose total was unknown has done all that there was."""
        for task in live.tasks:
            if task.total is None:
                live.update(task.id, total=task.completed)


def train_note(figures: StepReport) -> str:
    """The note on the progress bar of a training."""
    parts = [f"loss {figures.loss:.4f}", f"{figures.images_per_second:.1f} images/s"]
    if figures.mfu is not None:
        parts.append(f"MFU {figures.mfu:.1%}")
    if figures.held_out and figures.held_out.averaged_loss is not None:
        parts.append(f"held out {figures.held_out.averaged_loss:.4f} ({figures.held_out.share:.1%} of the time)")
    return "  ".join([*parts, f"data wait {figures.data_wait_share:.1%}"])
