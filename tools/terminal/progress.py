"""Progress on stderr: a live bar on a terminal, one plain line every 30 seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ...datasets.units import readable_time
from ...precompute.progress.clock import REJECTED
from .text import is_quiet

if TYPE_CHECKING:  # torch takes a second to import
    from ...train.metrics.meter import StepReport

PLAIN_EVERY_SECONDS = 30.0
SPEED_OVER_SECONDS = 300.0  # a batch of a slow encoder takes over rich's 30 s, after which it knows no time left


class ProgressLine:
    """Shows how far each stage is, its rate, the time left, and the number of rejects.

    Call it as ``Progress``, with an optional note.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=is_quiet())
        self._bars = Progress(
            TextColumn("{task.description:>14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[note]}", markup=False),
            console=self._console,
            speed_estimate_period=SPEED_OVER_SECONDS,
            get_time=time.monotonic,
            disable=not self._console.is_terminal,  # it still counts
        )
        self._tasks: dict[str, TaskID] = {}
        self._num_rejected = 0
        self._last_plain = time.monotonic()

    def __enter__(self) -> ProgressLine:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` items of a stage are finished; a total of 0 is unknown.

        Args:
          note: instead of the rate.
        """
        if stage == REJECTED:
            self._num_rejected = done
            return
        if stage not in self._tasks:
            for task in self._bars.tasks:  # a stage of unknown length ends where the next one begins
                self._bars.update(task.id, total=task.completed if task.total is None else None)
            self._tasks[stage] = self._bars.add_task(stage, total=total or None, completed=done, first=done, note="")
        task = self._bars.tasks[self._tasks[stage]]
        was_finished = task.finished
        self._bars.update(task.id, total=total or None, completed=done)
        seconds = (task.finished_time if task.finished else task.elapsed) or 0.0
        rate = (done - task.fields["first"]) / max(seconds, 1e-9)
        parts = [note or (f"{rate:,.1f}/s" if rate else "")]
        parts += [f"{self._num_rejected:,} rejected"] if self._num_rejected else []
        note = ", ".join(filter(None, parts))
        self._bars.update(task.id, note=note)
        ends = task.finished and not was_finished
        if not self._console.is_terminal and (ends or time.monotonic() - self._last_plain >= PLAIN_EVERY_SECONDS):
            self._last_plain = time.monotonic()
            left = f", {readable_time((total - done) / rate)} left" if rate and done < total else ""
            line = f"{stage}: {done:,} of {f'{total:,}' if total else '?'}  {note}{left}".rstrip()
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def train_note(figures: StepReport) -> str:
    """The note on the progress bar of a training."""
    parts = [f"loss {figures.loss:.4f}", f"{figures.images_per_second:.1f} images/s"]
    if figures.mfu is not None:
        parts.append(f"MFU {figures.mfu:.1%}")
    if figures.held_out and figures.held_out.averaged_loss is not None:
        parts.append(f"held out {figures.held_out.averaged_loss:.4f} ({figures.held_out.share:.1%} of the time)")
    return "  ".join([*parts, f"data wait {figures.data_wait_share:.1%}"])
