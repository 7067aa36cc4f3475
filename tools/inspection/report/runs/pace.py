"""How fast a run went: means over its time, lines that were slow, axes that these do not stretch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..page import number
from .facts import RunFacts
from .lines import axis_top, running_median

STEP_SPIKE = 3.0  # times the median of the lines around
LEAST_LINES = 20  # of which a trend is read
MOST_NAMED = 5  # steps in a message
UNITS = {  # of what is drawn from zero on
    "images_per_second": "images/s",
    "seconds_per_step": "s",
    "mfu": "%",
    "data_wait_share": "%",
    "gpu_busy_share": "%",
    "memory_gib": "GiB",
}


def weighted_mean(run: RunFacts, column: str) -> float:
    """Mean of a column over the time in steps, without the first line of each start; NaN if there is no number.

    The first line has what a start costs: compilation, first reads, kernels tried.
    """
    metrics = run.metrics
    values, weights = metrics.columns[column], metrics.columns["seconds_per_step"] * metrics.widths
    starts = first_lines(run)
    counts = np.isfinite(values) & np.isfinite(weights)
    if len(values) > len(starts):
        counts[starts] = False
    return float(np.average(values[counts], weights=weights[counts])) if weights[counts].sum() > 0 else float("nan")


def beyond(runs: Sequence[RunFacts], column: str, scale: float) -> tuple[float | None, str]:
    """The top of an axis that single spikes do not stretch, and words for the heading about those above it."""
    every = [run.metrics.columns[column] * scale for run in runs]
    tops = [axis_top(y) for y in every if np.isfinite(y).any()]
    highest = [int(np.nanargmax(y)) if np.isfinite(y).any() else -1 for y in every]
    top = max(tops)
    if not (num_above := sum(int(np.count_nonzero(y > top)) for y in every)):
        return None, ""
    run, y, place = max(
        ((run, y, place) for run, y, place in zip(runs, every, highest, strict=True) if place >= 0),
        key=lambda found: found[1][found[2]],
    )
    what = f"{number(float(y[place]), 3)} {UNITS[column]} at step {run.metrics.steps[place]:,}"
    of = f" of {run.name}" if len(runs) > 1 else ""
    if num_above == 1:
        return top, f"; above the chart: {what}{of}"
    return top, f"; {num_above:,} lines are above the chart, the highest {what}{of}"


def slow_lines(run: RunFacts) -> str | None:
    """What is to be said of lines whose steps took much longer than those around; None if there are none."""
    metrics = run.metrics
    seconds, steps, before = metrics.columns["seconds_per_step"], metrics.steps, metrics.steps - metrics.widths
    if len(seconds) < LEAST_LINES:
        return None
    median = running_median(seconds)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = seconds / median
    ratio[first_lines(run)] = 0.0
    places = np.flatnonzero(ratio > STEP_SPIKE)
    if not len(places):
        return None
    worst = places[np.argmax(ratio[places])]
    lost = float(np.sum((seconds - median)[places] * metrics.widths[places]) / metrics.seconds[-1])
    saves = _multiples(run.key("run.checkpoint_every"), before[places], steps[places])
    causes = {
        "a checkpoint began in": int(np.count_nonzero(saves)),
        "an evaluation came just before": int(np.isin(before[places], metrics.held_out.steps).sum()),
        "pictures were drawn just before": int(
            np.count_nonzero(_multiples(run.key("run.sample_every"), before[places], before[places] + 1))
        ),
    }
    told = ", ".join(f"{what} {num} of {len(places)}" for what, num in causes.items() if num)
    where = named_steps(steps[places].tolist())
    return (
        f"a step takes over {STEP_SPIKE:g} times the median of the lines around at {where}; the longest is "
        f"{seconds[worst]:.3g} s, {ratio[worst]:.3g} times; together {lost:.1%} of the time"
        + (f"; {told}" if told else "")
    )


def first_lines(run: RunFacts) -> np.ndarray:
    """Places of the first line of each start."""
    places = np.searchsorted(run.metrics.steps, [0, *run.restart_steps], side="right")
    return places[places < len(run.metrics)]


def named_steps(steps: Sequence[int]) -> str:
    """ "step 300", or "steps 300, 400 and 12 more"."""
    named = ", ".join(f"{step:,}" for step in steps[:MOST_NAMED])
    more = f" and {len(steps) - MOST_NAMED} more" if len(steps) > MOST_NAMED else ""
    return f"step{'s' if len(steps) > 1 else ''} {named}{more}"


def _multiples(every: object, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Whether a multiple of ``every``, above 0, lies in each range from ``first`` until before ``end``."""
    if not isinstance(every, int) or every < 1:
        return np.zeros(len(first), bool)
    last = (end - 1) // every * every
    return (last >= first) & (last > 0)
