"""The charts of one run, or of several in the same axes: a table of what each one shows, and one loop that draws it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from ....datasets.units import readable_time
from ....train.metrics.reader import Metrics, smoothed
from .charts import COLOURS, Curve, line_chart, short
from .page import number
from .run_facts import RunFacts

MOST_POINTS, FEWEST_POINTS = 2000, 500  # of a line: of a single run, and however many runs there are
MOST_DOTS = 40  # points of a line that has a dot for each
MOST_RAW = 3  # runs whose raw values are drawn behind the smoothed ones
SPREAD = 3.0  # highest over lowest value, above which an axis is logarithmic
BANDS = 5  # of the diffusion time that have a line each
END_SHARE = 0.1  # of the lines, whose mean is the loss at the end of a run
USUAL_PERCENTILE, SPIKE = 90.0, 3.0  # values above SPIKE times the percentile do not stretch an axis
FEWEST_VALUES = 10  # among which there are spikes
ROOM = 1.1  # above the highest value that is shown
STEP, TIME = "step", "diffusion time, from data (0) to noise (1)"
PERCENT = "%"
Line = tuple[str, np.ndarray, np.ndarray]  # name, x, y


@dataclass(frozen=True)
class Chart:
    """A chart and its heading."""

    title: str
    image: Markup
    wide: bool


# ----------------------------------------------------------------------------------------------------- lines of a run


def _held_out(run: RunFacts, runs: Sequence[RunFacts]) -> list[Line]:
    metrics, rows = run.metrics, run.metrics.is_evaluated
    columns = {"averaged weights": "held_out.averaged_loss", "weights": "held_out.loss"}
    return [(name, metrics.steps[rows], metrics.columns[column][rows]) for name, column in columns.items()]


def _difference(run: RunFacts, runs: Sequence[RunFacts]) -> list[Line]:
    """Held-out loss of the averaged weights less that of the first run, at the steps that both have."""
    (_, x, y), (_, first_x, first_y) = _held_out(run, runs)[0], _held_out(runs[0], runs)[0]
    steps, ours, theirs = np.intersect1d(x, first_x, return_indices=True)
    return [("", steps, y[ours] - first_y[theirs])] if run is not runs[0] else []


def _bands(run: RunFacts, runs: Sequence[RunFacts]) -> list[Line]:
    """Training loss in equal parts of the diffusion time, of a single run."""
    parts = np.array_split(run.metrics.loss_by_time, BANDS, axis=1) if len(runs) == 1 else []
    return [(f"{i / BANDS:g} to {(i + 1) / BANDS:g}", run.metrics.steps, _mean(y, 1)) for i, y in enumerate(parts)]


def _by_time(run: RunFacts, runs: Sequence[RunFacts]) -> list[Line]:
    """Loss over the diffusion time at the first, middle and last evaluation; without one at the end of training."""
    metrics, rows = run.metrics, np.flatnonzero(run.metrics.is_evaluated)
    if len(rows) and len(runs) == 1:
        chosen = dict.fromkeys([rows[0], rows[len(rows) // 2], rows[-1]])
        lines = [(f"held-out, step {metrics.steps[row]:,}", metrics.held_out_by_time[row]) for row in chosen]
    elif len(rows):
        lines = [("held-out", metrics.held_out_by_time[rows[-1]])]
    else:
        last = metrics.loss_by_time[-max(1, round(len(metrics) * END_SHARE)) :]
        lines = [(f"training, last {END_SHARE:.0%}", _mean(last, 0))]
    return [(name, (np.arange(len(y)) + 0.5) / max(1, len(y)), y) for name, y in lines]


def _terms(run: RunFacts, runs: Sequence[RunFacts]) -> list[Line]:
    return [(name, run.metrics.steps, values) for name, values in run.metrics.terms.items()]


# ------------------------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class ChartSpec:
    """What a chart shows.

    Args:
      section: of the page.
      unit: of the y axis; shares are drawn in percent.
      lines: a column of the metrics, or a function that returns the lines of a run, given all runs of the page.
      is_smoothed: means are drawn, with the raw values of a column behind them.
      is_loss: the y axis is logarithmic where the values are spread.
      from_zero: the y axis begins at zero, and spikes lie above it: the heading names the highest.
      one_colour: the lines of a run differ by dashes, not by colours.
      dotted: a horizontal line, at a value or at that of a key of the recipe.
    """

    section: str
    title: str
    unit: str
    lines: str | Callable[[RunFacts, Sequence[RunFacts]], Iterable[Line]]
    x_label: str = STEP
    is_smoothed: bool = True
    is_loss: bool = False
    from_zero: bool = False
    one_colour: bool = False
    dotted: str | float | None = None
    wide: bool = False

    def lines_of(self, run: RunFacts, runs: Sequence[RunFacts]) -> Iterable[Line]:
        """Name, x and y of each line of a run."""
        if callable(self.lines):
            return self.lines(run, runs)
        return [("", run.metrics.steps, run.metrics.columns[self.lines] * (100.0 if self.unit == PERCENT else 1.0))]


DIFFERENCE = "Held-out loss of averaged weights, less that of the first run"
BY_TIME = "Loss against diffusion time (held-out: averaged weights)"
NORM = "Gradient norm before clipping, and run.grad_clip (dotted)"
CHARTS = (
    ChartSpec("losses", "Training loss", "loss", "loss", is_loss=True, wide=True),
    ChartSpec("losses", "Loss of held-out records", "loss", _held_out, STEP, False, True, one_colour=True, wide=True),
    ChartSpec("losses", "Training loss by diffusion time, smoothed", "loss", _bands, is_loss=True),
    ChartSpec("losses", DIFFERENCE, "difference of losses", _difference, is_smoothed=False, dotted=0.0),
    ChartSpec("losses", BY_TIME, "loss", _by_time, TIME, is_smoothed=False, is_loss=True),
    ChartSpec("losses", "Terms added to the loss, weighted, smoothed", "weight times term", _terms),
    ChartSpec("steps", NORM, "L2 norm", "grad_norm", is_loss=True, dotted="run.grad_clip"),
    ChartSpec("steps", "Learning rate", "learning rate", "learning_rate", is_smoothed=False),
    ChartSpec("steps", "Loss scale of float16", "scale", "loss_scale", is_smoothed=False),
    ChartSpec("speed", "Images a second, of all ranks", "images/s", "images_per_second", from_zero=True),
    ChartSpec("speed", "Time of a step", "s", "seconds_per_step", from_zero=True),
    ChartSpec("speed", "Model FLOPs utilisation, share of the peak", PERCENT, "mfu", from_zero=True),
    ChartSpec("speed", "Waiting for batches, share of the time", PERCENT, "data_wait_share", from_zero=True),
    ChartSpec("speed", "GPU busy, first rank, share of the time", PERCENT, "gpu_busy_share", from_zero=True),
    ChartSpec("speed", "Peak memory, first rank", "GiB", "memory_gib", is_smoothed=False, from_zero=True),
)


# ------------------------------------------------------------------------------------------------------------- the loop


def draw_charts(runs: Sequence[RunFacts]) -> dict[str, list[Chart]]:
    """The charts by section of the page, without those that have no number."""
    charts: dict[str, list[Chart]] = {spec.section: [] for spec in CHARTS}
    for spec in CHARTS:
        lines = [(run, i, line) for run in runs for i, line in enumerate(spec.lines_of(run, runs))]
        if known := [(run, i, line) for run, i, line in lines if np.isfinite(line[2]).any()]:
            charts[spec.section].append(_draw(spec, runs, known))
    return charts


def _draw(spec: ChartSpec, runs: Sequence[RunFacts], lines: Sequence[tuple[RunFacts, int, Line]]) -> Chart:
    is_single, curves, most = len(runs) == 1, list[Curve](), max(FEWEST_POINTS, MOST_POINTS // len(runs))
    for run, i, (name, x, y) in lines:
        colour = runs.index(run) + (0 if spec.one_colour else i * len(runs))
        dashed = colour >= len(COLOURS) or (spec.one_colour and i > 0)
        if spec.is_smoothed and not name and len(runs) <= MOST_RAW:
            curves.append(Curve("", *thinned(x, y, most), colour=colour, faint=True))
        x, y = thinned(x, smoothed(y) if spec.is_smoothed else y, most)
        dots = not spec.is_smoothed and not dashed and len(x) < MOST_DOTS
        label = name if is_single else ": ".join(filter(None, (run.name, name)))
        curves.append(Curve(label, x, y, colour=colour, dashed=dashed, dots=dots))
    top, spikes = _spikes(spec, lines, is_single) if spec.from_zero else (None, "")
    has_notes = is_single and spec.x_label == STEP
    dotted = [run.key(spec.dotted) or None if isinstance(spec.dotted, str) else spec.dotted for run in runs]
    image = line_chart(
        curves,
        title=spec.title + spikes,
        x_label=f"{STEP}; below it time in steps, images" if has_notes else spec.x_label,
        y_label=spec.unit,
        log_y=spec.is_loss and _is_spread(np.concatenate([curve.y for curve in curves])),
        marks={"resumed": runs[0].restart_steps} if has_notes and runs[0].restart_steps else None,
        expected=sorted({value for value in dotted if isinstance(value, (int, float))}),
        y_range=(0.0, top) if spec.from_zero else None,
        x_notes=_notes(runs[0].metrics) if has_notes else None,
        wide=spec.wide,
    )
    return Chart(spec.title + spikes, image, spec.wide)


def _spikes(spec: ChartSpec, lines: Sequence[tuple[RunFacts, int, Line]], is_single: bool) -> tuple[float | None, str]:
    """The top of an axis that single spikes do not stretch, and words for the heading about those above it."""
    tops, above, highest = [0.0], 0, (-np.inf, "")
    for _, _, (_, _, y) in lines:
        usual = np.nanpercentile(y, USUAL_PERCENTILE, method="lower")
        has_spikes = usual > 0 and np.isfinite(y).sum() >= FEWEST_VALUES
        tops.append(ROOM * float(np.nanmax(y[y <= SPIKE * usual] if has_spikes else y)))
    for run, _, (_, x, y) in lines:
        above += int((y > max(tops)).sum())
        place = int(np.nanargmax(y))
        where = f"{number(float(y[place]), 3)} {spec.unit} at step {x[place]:,}" + (
            "" if is_single else f" of {run.name}"
        )
        highest = max(highest, (float(y[place]), where))
    if not above:
        return None, ""
    return max(tops), (
        f"; above the chart: {highest[1]}"
        if above == 1
        else f"; {above:,} lines are above the chart, the highest {highest[1]}"
    )


def thinned(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest point of each of ``most // 2`` equal parts, in order: every spike stays visible.

    Args:
      x, y: (N,) each; points whose y is NaN are left out unless all of a part are.
    Returns: (M,) each, M at most ``most``; as given where N is no larger.
    """
    if len(x) <= most:
        return x, y
    kept = []
    for start, stop in itertools.pairwise(np.linspace(0, len(x), most // 2 + 1).astype(int)):
        part = y[start:stop]
        is_known = not np.isnan(part).all()
        kept += sorted({start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}) if is_known else [start]
    return x[kept], y[kept]


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Mean of the finite values; NaN where there is none."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(known, values, 0.0).sum(axis) / known.sum(axis)


def _is_spread(values: np.ndarray) -> bool:
    known = values[np.isfinite(values)]
    return bool(len(known)) and known.min() > 0 and known.max() > SPREAD * known.min()


def _notes(metrics: Metrics) -> Callable[[float], str]:
    """What stands below a number of the axis of steps: time in steps, and images."""
    steps, seconds, images = (
        np.concatenate([[0.0], values])
        for values in (metrics.steps, metrics.seconds, np.nan_to_num(metrics.columns["num_images"]))
    )

    def note(step: float) -> str:
        if not 0 <= step <= steps[-1]:
            return ""
        return f"{readable_time(np.interp(step, steps, seconds))}\n{short(round(np.interp(step, steps, images)))}"

    return note
