"""Progress on stderr: a live bar on a terminal, one plain line every 30 seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...precompute.run.clock import REJECTED
from ...units import readable_time
from .text import is_quiet

if TYPE_CHECKING:  # torch takes a second to import
    from ...train.metrics.history import StepReport

PLAIN_EVERY_SECONDS = 30.0
RATE_AFTER_SECONDS = 1.0  # batches that arrive together would look infinitely fast
SPEED_OVER_SECONDS = 300.0  # a batch of a slow encoder takes over rich's 30 s, after which it knows no time left


class ProgressLine(Progress):
    """Shows how far each stage is, its rate, the time left, and the number of rejects.

    Args:
      check: called at each report; may raise to stop the work.
    """

    def __init__(self, console: Console | None = None, check: Callable[[], None] = lambda: None) -> None:
        console = console or Console(stderr=True, quiet=is_quiet())
        super().__init__(
            TextColumn("{task.description:>14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            speed_estimate_period=SPEED_OVER_SECONDS,
            get_time=time.monotonic,
            disable=not console.is_terminal,  # it still counts
        )
        self._check, self._num_rejected, self._last_plain = check, 0, time.monotonic()

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` items of a stage are finished; a total of 0 is unknown.

        Args:
          note: instead of the rate.
        """
        self._check()
        if stage == REJECTED:
            self._num_rejected = done
            return
        task = next((task for task in self.tasks if task.description == stage), None)
        if task is None:
            for other in self.tasks:  # a stage of unknown length ends where the next one begins
                self.update(other.id, total=other.completed if other.total is None else None)
            self.add_task(stage, total=total or None, completed=done, first=done, note="")
            task = self.tasks[-1]
        was_finished = task.finished
        self.update(task.id, total=total or None, completed=done)
        seconds = (task.finished_time if task.finished else task.elapsed) or 0.0
        rate = (done - task.fields["first"]) / seconds if seconds >= RATE_AFTER_SECONDS else 0.0
        rejected = f"{self._num_rejected:,} rejected" if self._num_rejected else ""
        note = ", ".join(filter(None, [note or (f"{rate:,.1f}/s" if rate else ""), rejected]))
        self.update(task.id, note=note)
        is_due = time.monotonic() - self._last_plain >= PLAIN_EVERY_SECONDS or (task.finished and not was_finished)
        if not self.console.is_terminal and is_due:
            self._last_plain = time.monotonic()
            left = f", {readable_time((total - done) / rate)} left" if rate and done < total else ""
            line = f"{stage}: {done:,} of {f'{total:,}' if total else '?'}  {note}{left}".rstrip()
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def train_note(figures: StepReport) -> str:
    """The note on the progress bar of a training."""
    loss = "all updates skipped" if figures.loss is None else f"loss {figures.loss:.4f}"
    parts = [loss, f"{figures.images_per_second:.1f} images/s"]
    if figures.mfu is not None:
        parts.append(f"MFU {figures.mfu:.1%}")
    if figures.held_out and figures.held_out.averaged_loss is not None:
        parts.append(f"held out {figures.held_out.averaged_loss:.4f} ({figures.held_out.share:.1%} of the time)")
    return "  ".join([*parts, f"data wait {figures.data_wait_share:.1%}"])
