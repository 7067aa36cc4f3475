"""The reports of a run, with what is shown after their step: the loss of held-out records, and grids of images.

The trainer never loads a decoder and never waits for one, except at the end of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import safetensors.torch

from ....datasets.batches.latents import denormalise
from ....datasets.disk.files import write_atomic
from ...metrics.flops import latent_size_of
from ...metrics.history import StepReport
from ...metrics.meter import Meter
from ...metrics.writer import MetricsWriter, write_start
from ...weights.folders import SAMPLES
from ..data import buckets_of_stores
from ..state import Run
from .decoding import Decoding
from .grids import Subjects, choose_subjects, draw_grid, own_subjects
from .held_out import Evaluation


class Log:
    """Writes reports, and that the run has started; all ranks call it alike, and the first one writes.

    Args:
      folder: of the run.
      evaluation: of held-out records, if the recipe has some.
      report: called with the figures of each report.
      warn: called if grids cannot be decoded, and if they have fewer images than the recipe asks for.
      recipe_name: for ``starts.jsonl``.

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
        recipe_name: str,
    ) -> None:
        self._run, self._meter, self._evaluation, self._report, self._warn = run, meter, evaluation, report, warn
        self._subjects: Subjects | None = None  # of grids, chosen when the first is drawn
        self._own_subjects = own_subjects(run)
        first, draws = run.ranks.is_first, run.recipe.run.sample_every > 0
        self._writer: MetricsWriter | None = None
        if first:
            self._writer = MetricsWriter(folder, step=run.step, recipe=run.recipe)
            write_start(
                folder,
                run.recipe,
                run.device,
                run.ranks,
                name=recipe_name,
                step=run.step,
                reached_step=self._writer.reached_step,
                changed=run.changed,
            )
        self._decoding = Decoding(folder / SAMPLES, warn) if first and draws else None  # last: it starts a process
        self.losses: tuple[tuple[int, float], tuple[int, float]] | None = None
        self.images_per_second = 0.0

    def shows(self, step: int) -> bool:
        """Whether a step ends with an evaluation or a grid of images."""
        return self._evaluates(step) or self._draws(step)

    def _evaluates(self, step: int) -> bool:
        return self._evaluation is not None and self._evaluation.is_due(step)

    def _draws(self, step: int) -> bool:
        section = self._run.recipe.run
        return section.sample_every > 0 and (step % section.sample_every == 0 or step == section.steps)

    def write(self, reports: Sequence[StepReport]) -> None:
        """Write reports, with what is due after the last step; that is a collective call."""
        for figures in reports:
            if self._evaluation and self._evaluates(figures.step):
                figures = replace(figures, held_out=self._evaluation.evaluate())
            if self._draws(figures.step):
                self._draw()
            if self.shows(figures.step):
                self._meter.restart()  # the time of an evaluation, or of images, is not that of steps
            if figures.loss is not None:
                last = figures.step, figures.loss
                self.losses = (self.losses[0] if self.losses else last), last
            self.images_per_second = max(self.images_per_second, figures.images_per_second)
            if self._writer:
                self._writer.write(figures)
                self._show_grids()
                self._report(figures)

    def finish(self) -> None:
        """Wait until all grids are decoded, if the run is over."""
        if self._run.step >= self._run.recipe.run.steps:
            self._show_grids(wait=True)

    def close(self) -> None:
        """Stop decoding, which the next call of the run resumes, and flush all figures."""
        if self._decoding:
            self._decoding.stop()
        if self._writer:
            self._writer.close()

    def _show_grids(self, *, wait: bool = False) -> None:
        """Write the images that have been decoded since the last call, or ``wait`` for all."""
        if self._decoding and self._writer:
            for step, path in self._decoding.decoded(wait=wait):
                self._writer.write_image(path, step, now=self._run.step)

    def _draw(self) -> None:
        """Draw the grid of this step and start its decoding; a collective call, after which nothing has changed."""
        run = self._run
        buckets = buckets_of_stores(run.stores)
        if self._subjects is None:
            self._subjects = self._choose_subjects()
        subjects, latent = self._subjects, run.loader.reader.latent_specs[0]
        if subjects.reference is None:
            size = latent_size_of(max(buckets, key=lambda name: buckets[name]), latent)  # the most common one
        else:
            size = subjects.reference.shape[2], subjects.reference.shape[3]
        images = {"latents": draw_grid(run, subjects, size), "reference": subjects.reference}
        if self._decoding:
            content = {"names": subjects.names, "vae": run.extra["vae"], "latent": latent.model_dump()}
            raw = {
                name: denormalise(each.cpu(), latent).contiguous() for name, each in images.items() if each is not None
            }
            file = safetensors.torch.save(raw, metadata={"grid": json.dumps(content)})
            write_atomic(self._decoding.path_of(run.step), file)
            self._decoding.start()

    def _choose_subjects(self) -> Subjects:
        run, count, own = self._run, self._run.recipe.run.sample_count, self._own_subjects
        subjects = choose_subjects(run, count, own)
        if len(subjects.names) < count and not own and run.ranks.is_first:
            records = "held-out records" if run.recipe.data.holdout else "records"
            kind = "images to edit in one bucket" if run.spec.reference else "different first captions"
            self._warn(
                f"run.sample_count {count}: the {records} have {len(subjects.names)} {kind}, so a grid has only that "
                "many images"
            )
        return subjects
