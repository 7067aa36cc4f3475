"""The charts of one run, or of several in the same axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from ..charts import COLOURS, Curve, line_chart, short
from .facts import RunFacts
from .lines import MOST_POINTS, smoothed, thinned
from .pace import UNITS, beyond

FEWEST_POINTS = 500  # of a line, however many runs there are
MOST_RAW = 3  # runs whose raw values are drawn behind the smoothed ones
SPREAD = 3.0  # highest over lowest value, above which an axis is logarithmic
BANDS = 5  # of the diffusion time that have a line each
MOST_DOTS = 40  # points of a line that has a dot for each
END_SHARE = 0.1  # of the lines, whose mean is the loss at the end of a run
STEP = "step"
TIME = "diffusion time, from data (0) to noise (1)"
MINUTE, HOUR, DAY = 60, 3600, 86400


@dataclass(frozen=True)
class Chart:
    """A chart and its heading."""

    title: str
    svg: Markup
    wide: bool = False


def loss_charts(runs: Sequence[RunFacts]) -> list[Chart]:
    """Training loss, held-out loss, both by diffusion time, and the terms that recipes add."""
    charts = [_over_steps(runs, "loss", "Training loss", "loss", wide=True)]
    charts.append(_held_out(runs))
    if len(runs) == 1:
        charts.append(_bands(runs[0]))
    charts += [_differences(runs), _by_time(runs), _terms(runs)]
    return [chart for chart in charts if chart]


def step_charts(runs: Sequence[RunFacts]) -> list[Chart]:
    """Gradient norm, learning rate, and the scale of the loss."""
    clips = {clip for run in runs if isinstance(clip := run.key("run.grad_clip"), (int, float)) and clip}
    charts = [
        _over_steps(
            runs,
            "grad_norm",
            "Gradient norm before clipping, and run.grad_clip (dotted)",
            "L2 norm",
            expected=sorted(clips),
        ),
        _over_steps(runs, "learning_rate", "Learning rate", "learning rate", is_smooth=True),
        _over_steps(runs, "loss_scale", "Loss scale of float16", "scale", is_smooth=True),
    ]
    return [chart for chart in charts if chart]


def speed_charts(runs: Sequence[RunFacts]) -> list[Chart]:
    """Images a second, the time of a step, MFU, waiting, the GPU's share, memory."""
    charts = [
        _over_steps(runs, "images_per_second", "Images a second, of all ranks", "images/s"),
        _over_steps(runs, "seconds_per_step", "Time of a step", "s"),
        _over_steps(runs, "mfu", "Model FLOPs utilisation", "share of the peak, %", percent=True),
        _over_steps(runs, "data_wait_share", "Waiting for batches", "share of the time, %", percent=True),
        _over_steps(runs, "gpu_busy_share", "GPU busy, first rank", "share of the time, %", percent=True),
        _over_steps(runs, "memory_gib", "Peak memory, first rank", "GiB", is_smooth=True),
    ]
    return [chart for chart in charts if chart]


def _over_steps(
    runs: Sequence[RunFacts],
    column: str,
    title: str,
    y_label: str,
    *,
    wide: bool = False,
    percent: bool = False,
    is_smooth: bool = False,
    expected: Sequence[float] = (),
) -> Chart | None:
    """A column of the lines over the steps; None if no run has a number in it.

    Args:
      is_smooth: the values need no smoothing.
    """
    curves, values = [], []
    for number, run in enumerate(runs):
        y = run.metrics.columns[column] * (100.0 if percent else 1.0)
        if not np.isfinite(y).any():
            continue
        smooth = y if is_smooth else smoothed(y)
        values.append(smooth)
        if not is_smooth and len(runs) <= MOST_RAW:
            curves.append(_curve(run, "", y, number, len(runs), faint=True))
            values.append(y)
        curves.append(_curve(run, "" if len(runs) == 1 else run.name, smooth, number, len(runs)))
    if not curves:
        return None
    is_log = column in ("loss", "grad_norm") and _is_spread(np.concatenate(values))
    y_range = None
    if column in UNITS:
        top, hidden = beyond(runs, column, 100.0 if percent else 1.0)
        y_range, title = (0.0, top), title + hidden
    svg = line_chart(
        curves,
        title=title,
        x_label=_step_label(runs),
        y_label=y_label,
        log_y=is_log,
        marks=_restarts(runs),
        expected=expected,
        y_range=y_range,
        x_notes=_notes(runs),
        wide=wide,
    )
    return Chart(title, svg, wide)


def _held_out(runs: Sequence[RunFacts]) -> Chart | None:
    """Held-out loss of the averaged weights, and of the weights, dashed."""
    curves, values = [], []
    for number, run in enumerate(runs):
        evaluations = run.metrics.held_out
        names = ("averaged weights", "weights") if len(runs) == 1 else (run.name, "")
        for name, column, is_raw in zip(names, ("averaged_loss", "loss"), (False, True), strict=True):
            y = evaluations.columns[column]
            if not np.isfinite(y).any():
                continue
            x, y = thinned(evaluations.steps, y, _points(len(runs)))
            values.append(y)
            curves.append(
                Curve(name, x, y, colour=number, dashed=is_raw, faint=not name, dots=len(x) < MOST_DOTS and not is_raw)
            )
    if not curves:
        return None
    title = "Loss of held-out records" + (
        "" if len(runs) == 1 else ": averaged weights (lines), weights (pale, dashed)"
    )
    svg = line_chart(
        curves,
        title=title,
        x_label=_step_label(runs),
        y_label="loss",
        log_y=_is_spread(np.concatenate(values)),
        marks=_restarts(runs),
        x_notes=_notes(runs),
        wide=True,
    )
    return Chart(title, svg, wide=True)


def _differences(runs: Sequence[RunFacts]) -> Chart | None:
    """Held-out loss of other runs less that of the first, at the steps that both have."""
    curves = []
    for number, run in enumerate(runs[1:], 1):
        first, other = runs[0].metrics.held_out, run.metrics.held_out
        steps, ours, theirs = np.intersect1d(first.steps, other.steps, return_indices=True)
        y = other.columns["averaged_loss"][theirs] - first.columns["averaged_loss"][ours]
        if np.isfinite(y).any():
            x, y = thinned(steps, y, _points(len(runs)))
            curves.append(Curve(run.name, x, y, colour=number, dots=len(x) < MOST_DOTS))
    if not curves:
        return None
    title = f"Held-out loss of averaged weights, less that of {runs[0].name}"
    svg = line_chart(curves, title=title, x_label=STEP, y_label="difference of losses", expected=[0.0])
    return Chart(title, svg)


def _bands(run: RunFacts) -> Chart | None:
    """Training loss in bands of the diffusion time, over the steps."""
    by_time = run.metrics.by_time
    width = by_time.shape[1] // BANDS
    if not width or not np.isfinite(by_time).any():
        return None
    curves = []
    for band in range(BANDS):
        part = by_time[:, band * width : (band + 1) * width]
        known = np.isfinite(part)
        with np.errstate(invalid="ignore"):
            y = smoothed(np.where(known, part, 0.0).sum(1) / np.where(known.any(1), known.sum(1), np.nan))
        curves.append(_curve(run, f"{band / BANDS:g} to {(band + 1) / BANDS:g}", y, band, 1))
    title = "Training loss by diffusion time, smoothed"
    svg = line_chart(
        curves,
        title=title,
        x_label=_step_label([run]),
        y_label="loss",
        log_y=_is_spread(np.concatenate([np.asarray(curve.y) for curve in curves])),
        marks=_restarts([run]),
        x_notes=_notes([run]),
    )
    return Chart(title, svg)


def _by_time(runs: Sequence[RunFacts]) -> Chart | None:
    """Loss over the diffusion time: of held-out records at the last evaluation, else of the last training steps."""
    is_held_out = all(len(run.metrics.held_out.steps) for run in runs)
    curves = []
    for number, run in enumerate(runs):
        name = "" if len(runs) == 1 else run.name
        if is_held_out:
            evaluations = run.metrics.held_out
            rows = evaluations.averaged_by_time
            chosen = sorted({0, len(rows) // 2, len(rows) - 1}) if len(runs) == 1 else [len(rows) - 1]
            found = [(name or f"step {evaluations.steps[row]:,}", rows[row]) for row in chosen]
        else:
            last = run.metrics.by_time[-max(1, round(len(run.metrics) * END_SHARE)) :]
            known = np.isfinite(last)
            with np.errstate(invalid="ignore", divide="ignore"):
                found = [(name, np.where(known, last, 0.0).sum(0) / known.sum(0))]
        for place, (label, y) in enumerate(found):
            times = (np.arange(len(y)) + 0.5) / max(1, len(y))
            if np.isfinite(y).any():
                curves.append(Curve(label, times, y, colour=place if len(runs) == 1 else number, dots=True))
    if not curves:
        return None
    of = "held-out records, averaged weights" if is_held_out else f"the last {END_SHARE:.0%} of the training"
    title = f"Loss against diffusion time, of {of}"
    is_log = _is_spread(np.concatenate([np.asarray(curve.y) for curve in curves]))
    return Chart(title, line_chart(curves, title=title, x_label=TIME, y_label="loss", log_y=is_log))


def _terms(runs: Sequence[RunFacts]) -> Chart | None:
    """The weighted terms that recipes add to the loss."""
    curves = []
    for run in runs:
        for term, values in run.metrics.terms.items():
            if np.isfinite(values).any():
                name = term if len(runs) == 1 else f"{run.name}: {term}"
                curves.append(_curve(run, name, smoothed(values), len(curves), len(runs)))
    if not curves:
        return None
    title = "Terms added to the loss, weighted, smoothed"
    svg = line_chart(
        curves,
        title=title,
        x_label=_step_label(runs),
        y_label="weight times term",
        marks=_restarts(runs),
        x_notes=_notes(runs),
    )
    return Chart(title, svg)


def _curve(run: RunFacts, name: str, y: np.ndarray, colour: int, num_runs: int, *, faint: bool = False) -> Curve:
    x, y = thinned(run.metrics.steps, y, _points(num_runs))
    return Curve(name, x, y, colour=colour, faint=faint, dashed=colour >= len(COLOURS))


def _points(num_runs: int) -> int:
    return max(FEWEST_POINTS, MOST_POINTS // num_runs)


def _is_spread(values: np.ndarray) -> bool:
    """Whether an axis of these values is logarithmic."""
    known = values[np.isfinite(values)]
    return bool(len(known)) and known.min() > 0 and known.max() > SPREAD * known.min()


def _restarts(runs: Sequence[RunFacts]) -> dict[str, list[float]] | None:
    """Steps of the restarts, of a single run; the lines of several would hide each other."""
    steps = [float(step) for step in runs[0].restart_steps] if len(runs) == 1 else []
    return {"resumed": steps} if steps else None


def _step_label(runs: Sequence[RunFacts]) -> str:
    return f"{STEP}; below it time in steps, images" if len(runs) == 1 else STEP


def _notes(runs: Sequence[RunFacts]) -> Callable[[float], str] | None:
    """What stands below a number of the axis of steps: time and images of a single run."""
    if len(runs) > 1 or not len(runs[0].metrics):
        return None
    metrics = runs[0].metrics
    steps = np.concatenate([[0], metrics.steps])
    seconds = np.concatenate([[0.0], metrics.seconds])
    images = np.concatenate([[0.0], np.nan_to_num(metrics.columns["num_images"])])

    def note(step: float) -> str:
        if not 0 <= step <= steps[-1]:
            return ""
        return f"{duration(np.interp(step, steps, seconds))}\n{short(round(np.interp(step, steps, images)))}"

    return note


def duration(seconds: float) -> str:
    """A time in the unit that reads best: "42 s", "3.5 min", "17 min", "3.2 h", "4.1 d"."""
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return f"{seconds:.0f} s"
