"""What a run has reported so far: ``metrics.jsonl`` by columns, and the state of the run. It needs no torch.

A last line without an end belongs to a writer that still writes or was killed, and is left out. Every other line must
be a report. A million steps take seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...datasets.errors import DamageError
from ..weights.folders import METRICS

COLUMNS = (
    "num_images",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "seconds_per_step",
    "images_per_second",
    "mfu",
    "data_wait_share",
    "gpu_busy_share",
    "memory_gib",
    "skipped_steps",
    "loss_scale",
    "held_out.loss",
    "held_out.averaged_loss",
    "held_out.share",
)
HELD_OUT = "held_out"
MAX_TIMES, MAX_TERMS = 64, 32  # of a line; the trainer writes 10 and 8 times, and a few terms
LARGEST = 1e200  # a larger number is damage: no figure of a run comes near it
SMOOTHED_SHARE = 0.02  # of a run, over which a smoothed line averages
QUIET_LINES, QUIET_SECONDS = 10, 300.0  # a run that has reported nothing for longer than both has stopped
NOT_BEGUN, RUNNING, STOPPED, FINISHED = "not begun", "running", "stopped", "finished"


@dataclass(frozen=True, eq=False)
class Metrics:
    """The reports of a run in order of their steps. Of a step that was reported twice the later line counts.

    Args:
      steps: (R,) int64, ascending.
      columns: (R,) float64 for each of ``COLUMNS``; NaN where the line has no number.
      loss_by_time: (R, bands) float64, mean training loss from data to noise; NaN for a band without images.
      held_out_by_time: (R, times) float64, held-out loss of the averaged weights from data to noise.
      terms: (R,) float64 for each weighted term that the recipe adds to the loss.
      is_evaluated: (R,) bool, whether the line has a held-out loss.
      is_finite: (R,) bool, whether the line has a number for each of its losses, and no NaN or infinity anywhere.
      num_repeated: lines of steps that a later line reports again.
      is_cut: the last line of the file is not whole.
      written: when the file was last written, in seconds since 1970; 0 without a file.
    """

    steps: np.ndarray
    columns: dict[str, np.ndarray]
    loss_by_time: np.ndarray
    held_out_by_time: np.ndarray
    terms: dict[str, np.ndarray]
    is_evaluated: np.ndarray
    is_finite: np.ndarray
    num_repeated: int
    is_cut: bool
    written: float

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last_step(self) -> int:
        """The last reported step; 0 of a run that has not reported."""
        return int(self.steps[-1]) if len(self) else 0

    @property
    def widths(self) -> np.ndarray:
        """(R,) steps that each line covers: those since the line before."""
        return np.diff(self.steps, prepend=0)

    @property
    def seconds(self) -> np.ndarray:
        """(R,) time spent in steps until each line, without evaluations, pictures and pauses."""
        return np.cumsum(np.nan_to_num(self.columns["seconds_per_step"]) * self.widths)

    def state(self, num_steps: int, *, now: float | None = None) -> str:
        """Whether the run is "not begun", "running", "stopped" or "finished".

        Args:
          num_steps: that the recipe asks for.
          now: seconds since 1970; None: the clock's.
        """
        if not len(self):
            return NOT_BEGUN
        if self.last_step >= num_steps:
            return FINISHED
        line_seconds = float(self.columns["seconds_per_step"][-1] * self.widths[-1])
        quiet = (time.time() if now is None else now) - self.written
        return RUNNING if quiet < max(QUIET_SECONDS, QUIET_LINES * line_seconds) else STOPPED


class _Report(NamedTuple):
    """A line: numbers of ``COLUMNS``, and the rest as it was parsed."""

    numbers: np.ndarray
    loss_by_time: Any
    held_out_by_time: Any
    terms: dict[str, Any]
    is_evaluated: bool
    is_finite: bool


def read_metrics(run: Path) -> Metrics:
    """Read the reports of a run; none of a run that has not reported yet.

    Raises: DamageError: a line is not a report.
    """
    path = run / METRICS
    written = path.stat().st_mtime if path.is_file() else 0.0  # before the lines: what follows is of a later time
    lines, is_cut = whole_lines(path)
    by_step = dict(_parse(path, number, line) for number, line in enumerate(lines, 1))
    steps = sorted(by_step)
    reports = [by_step[step] for step in steps]
    table = np.array([report.numbers for report in reports], np.float64).reshape(len(reports), len(COLUMNS))
    return Metrics(
        steps=np.array(steps, np.int64),
        columns=dict(zip(COLUMNS, table.T, strict=True)),
        loss_by_time=_matrix([report.loss_by_time for report in reports]),
        held_out_by_time=_matrix([report.held_out_by_time for report in reports]),
        terms=_terms([report.terms for report in reports]),
        is_evaluated=np.array([report.is_evaluated for report in reports], bool),
        is_finite=np.array([report.is_finite for report in reports], bool),
        num_repeated=len(lines) - len(reports),
        is_cut=is_cut,
        written=written,
    )


def whole_lines(path: Path) -> tuple[list[bytes], bool]:
    """The lines of a file, and whether another one was cut off; none of a missing file."""
    if not path.is_file():
        return [], False
    *lines, rest = path.read_bytes().split(b"\n")
    return lines, bool(rest)


def smoothed(y: np.ndarray, share: float = SMOOTHED_SHARE) -> np.ndarray:
    """The mean over a share of the points around each one, over fewer at both ends.

    Args:
      y: (N,); NaN and infinity are left out.
    Returns: (N,); NaN where no point around is a number.
    """
    half = max(1, round(len(y) * share / 2))
    known = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    low = np.maximum(np.arange(len(y)) - half, 0)
    high = np.minimum(np.arange(len(y)) + half + 1, len(y))
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def _parse(path: Path, number: int, line: bytes) -> tuple[int, _Report]:
    try:
        values = json.loads(line)
        step = values["step"]
        if type(step) is not int or not 0 < step < 2**53:
            raise ValueError(f"step {step!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamageError(f"'{path}': line {number} is not a report. Remove the line.") from error
    held_out, terms = values.get(HELD_OUT), values.get("loss_terms")
    is_evaluated = isinstance(held_out, dict)
    flat = values | {f"{HELD_OUT}.{name}": value for name, value in (held_out.items() if is_evaluated else ())}
    losses = [flat.get("loss"), *([flat.get(f"{HELD_OUT}.loss")] if is_evaluated else [])]
    return step, _Report(
        numbers=np.array([_number(flat.get(name)) for name in COLUMNS]),
        loss_by_time=flat.get("loss_by_time"),
        held_out_by_time=flat.get(f"{HELD_OUT}.averaged_loss_by_time"),
        terms=terms if isinstance(terms, dict) else {},
        is_evaluated=is_evaluated,
        is_finite=not (np.isnan([_number(loss) for loss in losses]).any() or b"NaN" in line or b"Infinity" in line),
    )


def _number(value: object) -> float:
    """A value of a line as a number; NaN where it is none."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < LARGEST else np.nan


def _matrix(rows: Sequence[Any]) -> np.ndarray:
    """Lists of numbers as (rows, longest), NaN where there is none."""
    lists = [row[:MAX_TIMES] if isinstance(row, list) else [] for row in rows]
    matrix = np.full((len(lists), max(map(len, lists), default=0)), np.nan)
    for number, row in enumerate(lists):
        matrix[number, : len(row)] = [_number(value) for value in row]
    return matrix


def _terms(rows: Iterable[dict[str, Any]]) -> dict[str, np.ndarray]:
    names = list(dict.fromkeys(name for row in rows for name in row))[:MAX_TERMS]
    return {name: np.array([_number(row.get(name)) for row in rows]) for name in names}
