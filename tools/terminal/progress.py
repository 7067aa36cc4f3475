"""Progress on stderr: a live bar on a terminal, one plain line every 30 seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .text import is_quiet

if TYPE_CHECKING:  # torch takes a second to import
    from ...train.metrics.window import StepReport

PLAIN_EVERY_SECONDS = 30.0


class ProgressLine:
    """Shows the progress of each stage; call it with (stage, done, total) and an optional note."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=is_quiet())
        self._live: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, tuple[float, int]] = {}
        self._latest: dict[str, int] = {}
        self._last_plain = time.monotonic()

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description:>14}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._live = Progress(*columns, console=self._console)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` items of a stage are finished; a total of 0 is unknown."""
        start, first = self._started.setdefault(stage, (time.monotonic(), done))
        rate = (done - first) / max(time.monotonic() - start, 1e-9)
        note = note or (f"{rate:.1f}/s" if done > first else "")
        if self._live:
            if stage not in self._tasks:
                self._tasks[stage] = self._live.add_task(stage, total=total or None, note="")
            self._live.update(self._tasks[stage], completed=done, note=note)
            return
        is_finished, self._latest[stage] = done >= total > 0 and self._latest.get(stage) != done, done
        if is_finished or time.monotonic() - self._last_plain >= PLAIN_EVERY_SECONDS:
            self._last_plain = time.monotonic()
            left = f", {_clock((total - done) / rate)} left" if rate and done < total else ""
            line = f"{stage}: {done} of {total or '?'}  {note}{left}".rstrip()
            self._console.print(line, highlight=False, markup=False)


def train_note(figures: StepReport) -> str:
    """The note on the progress bar of a training."""
    parts = [f"loss {figures.loss:.4f}", f"{figures.images_per_second:.1f} images/s"]
    if figures.mfu is not None:
        parts.append(f"MFU {figures.mfu:.1%}")
    if figures.held_out and figures.held_out.averaged_loss is not None:
        parts.append(f"held out {figures.held_out.averaged_loss:.4f} ({figures.held_out.share:.1%} of the time)")
    return "  ".join([*parts, f"data wait {figures.data_wait_share:.1%}"])


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
