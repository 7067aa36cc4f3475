"""The reports of a run, with what is shown after their step: the loss of held-out records, and images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ...metrics.history import StepReport
from ...metrics.meter import Meter
from ...metrics.writer import MetricsWriter
from ..state import Run
from .grids import Grids
from .held_out import Evaluation


class Log:
    """Writes reports; all ranks call it alike, and the first one writes.

    Args:
      folder: of the run.
      evaluation: of held-out records, if the recipe has some.
      report: called with the figures of each report.
      warn: called if grids of images cannot be decoded.

    Attributes:
      losses: step and loss of the first and the last report, or None.
      images_per_second: the highest of all reports.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        meter: Meter,
        evaluation: Evaluation | None,
        report: Callable[[StepReport], None],
        warn: Callable[[str], None],
    ) -> None:
        self._run, self._meter, self._evaluation, self._report = run, meter, evaluation, report
        self._writer = MetricsWriter(folder, step=run.step, recipe=run.recipe) if run.ranks.is_first else None
        self._grids = Grids(run, folder, warn) if run.recipe.run.sample_every else None  # last: it starts a process
        self.losses: tuple[tuple[int, float], tuple[int, float]] | None = None
        self.images_per_second = 0.0

    def shows(self, step: int) -> bool:
        """Whether a step ends with an evaluation or a grid of images."""
        return any(part and part.is_due(step) for part in (self._evaluation, self._grids))

    def write(self, reports: Sequence[StepReport]) -> None:
        """Write reports, with what is due after the last step; that is a collective call."""
        for figures in reports:
            if self._evaluation and self._evaluation.is_due(figures.step):
                figures = replace(figures, held_out=self._evaluation.evaluate())
                self._meter.restart()  # the time of an evaluation, or of images, is not that of steps
            if self._grids and self._grids.is_due(figures.step):
                self._grids.draw()
                self._meter.restart()
            last = figures.step, figures.loss
            self.losses = (self.losses[0] if self.losses else last), last
            self.images_per_second = max(self.images_per_second, figures.images_per_second)
            if self._writer:
                self._writer.write(figures)
                if self._grids:
                    self._grids.show(self._writer)
                self._report(figures)

    def finish(self) -> None:
        """Wait until all grids are decoded, if the run is over."""
        if self._grids and self._run.step >= self._run.recipe.run.steps:
            self._grids.finish(self._writer)

    def close(self) -> None:
        """Stop decoding, and flush all figures."""
        if self._grids:
            self._grids.close()
        if self._writer:
            self._writer.close()
