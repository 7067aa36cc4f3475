"""Lines of many points, thinned so that a page stays small and every spike stays visible."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import numpy as np

MOST_POINTS = 2000  # of a line
SMOOTHED_SHARE = 0.02  # of a run, over which a smoothed line averages
MEDIAN_POINTS = 21  # around a point, among which it is a spike or not
WINDOWS = 4096  # at a time
USUAL_PERCENTILE = 90.0
SPIKE = 3.0  # times the usual value, above which a value is a spike
ROOM = 1.1  # above the highest value that is shown
FEWEST_VALUES = 10  # among which there are spikes


def thinned(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest point of each of ``most // 2`` equal parts, in order.

    Args:
      x, y: (N,) each; points whose y is NaN are left out unless all of a part are.
    Returns: (M,) each, M at most ``most``; as given where N is no larger.
    """
    if len(x) <= most:
        return x, y
    edges = np.linspace(0, len(x), most // 2 + 1).astype(int)
    kept = []
    for start, stop in itertools.pairwise(edges):
        part = y[start:stop]
        if np.isnan(part).all():
            kept.append(start)
            continue
        kept += sorted({start + int(np.nanargmin(part)), start + int(np.nanargmax(part))})
    return x[kept], y[kept]


def smoothed(y: np.ndarray, share: float = SMOOTHED_SHARE) -> np.ndarray:
    """The mean over a share of the points around each, fewer at both ends; NaN counts nowhere.

    Args:
      y: (N,).
    Returns: (N,); NaN only where no point around is a number.
    """
    half = max(1, round(len(y) * share / 2))
    known = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    places = np.arange(len(y))
    low, high = np.maximum(places - half, 0), np.minimum(places + half + 1, len(y))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def axis_top(y: np.ndarray) -> float:
    """The top of an axis from zero on which single spikes do not press the rest together.

    Args:
      y: (N,), at least one of them a number.
    """
    known = y[np.isfinite(y)]
    usual = np.percentile(known, USUAL_PERCENTILE, method="lower")
    shown = known[known <= SPIKE * usual] if usual > 0 and len(known) >= FEWEST_VALUES else known
    return ROOM * float(shown.max())


def running_median(y: np.ndarray, points: int = MEDIAN_POINTS) -> np.ndarray:
    """The median of the points around each one.

    At the beginning of a run, where all falls, as many before as after; at its end the last so many points.

    Args:
      y: (N,); NaN counts nowhere.
      points: odd.
    Returns: (N,); NaN where no point around is a number.
    """
    half = points // 2
    if len(y) <= half:
        return y.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # windows without a number
        first = [np.nanmedian(y[: 2 * place + 1]) for place in range(half)]
        inner = [np.nanmedian(part, axis=1) for part in _windows(y, points)]
        last = np.nanmedian(y[-points:])
    middle = np.concatenate([first, *inner])[: len(y)]
    return np.concatenate([middle, np.full(len(y) - len(middle), last)])


def _windows(y: np.ndarray, points: int) -> Iterator[np.ndarray]:
    """All runs of so many points, a part at a time, so that little memory is taken."""
    if len(y) >= points:
        windows = np.lib.stride_tricks.sliding_window_view(y, points)
        for start in range(0, len(windows), WINDOWS):
            yield windows[start : start + WINDOWS]
