"""``metrics.jsonl`` by columns: a million steps in seconds, whatever a crash has left in the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .....datasets.errors import DamageError
from .....train.weights.folders import METRICS

COLUMNS = (
    "num_images",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "seconds_per_step",
    "images_per_second",
    "tokens_per_second",
    "mfu",
    "data_wait_share",
    "gpu_busy_share",
    "memory_gib",
    "skipped_steps",
    "loss_scale",
)
HELD_OUT = ("loss", "averaged_loss", "num_images", "seconds", "share")
MAX_TIMES, MAX_TERMS = 64, 32  # of a line; the trainer writes 10 and 8 times, and a few terms


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The evaluations of a run.

    Args:
      steps: (E,) int64.
      columns: (E,) float64 of each of ``HELD_OUT``; NaN: not finite.
      by_time, averaged_by_time: (E, times) float64, from data to noise.
    """

    steps: np.ndarray
    columns: dict[str, np.ndarray]
    by_time: np.ndarray
    averaged_by_time: np.ndarray


@dataclass(frozen=True, eq=False)
class Metrics:
    """The lines of a run, one for each reported step, in order of the steps.

    Args:
      steps: (R,) int64, ascending.
      columns: (R,) float64 of each of ``COLUMNS``; NaN: the line has no number.
      by_time: (R, bands) float64, mean loss from data to noise; NaN: no image.
      terms: (R,) float64 of each weighted term that is added to the loss.
      not_finite: steps whose line has no number for the loss, or NaN or infinity anywhere.
      num_repeated: lines of steps that a later line reports again; the later one counts.
      num_cut: lines at the end of the file that are not whole: 0 or 1.
    """

    steps: np.ndarray
    columns: dict[str, np.ndarray]
    by_time: np.ndarray
    terms: dict[str, np.ndarray]
    held_out: HeldOut
    not_finite: list[int]
    num_repeated: int
    num_cut: int

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def widths(self) -> np.ndarray:
        """(R,) steps that each line covers: those since the line before."""
        return np.diff(self.steps, prepend=0)

    @property
    def seconds(self) -> np.ndarray:
        """(R,) time spent in steps until each line; evaluations, pictures and pauses are no part of it."""
        return np.cumsum(np.nan_to_num(self.columns["seconds_per_step"]) * self.widths)


def read_metrics(run: Path) -> Metrics:
    """Read the figures of a run; none of a run that has not reported yet.

    A line without an end is of a writer that still writes or was killed, and is left out.

    Raises: DamageError: another line is not a report.
    """
    path = run / METRICS
    lines, num_cut = whole_lines(path)
    rows: dict[int, int] = {}  # step to the number of its last line
    table = np.full((len(lines), len(COLUMNS)), np.nan)
    bands, terms = list[Any](), list[Any]()
    held_out: dict[int, dict[str, Any]] = {}
    not_finite = set[int]()
    for number, line in enumerate(lines):
        report = _parsed(path, number, line)
        step = report["step"]
        rows[step] = number
        table[number] = [_number(report.get(name)) for name in COLUMNS]
        bands.append(report.get("loss_by_time"))
        terms.append(report.get("loss_terms"))
        if isinstance(evaluation := report.get("held_out"), dict):
            held_out[step] = evaluation
        else:
            held_out.pop(step, None)
        if np.isnan(table[number, COLUMNS.index("loss")]) or b"NaN" in line or b"Infinity" in line:
            not_finite.add(step)
        else:
            not_finite.discard(step)
    steps = np.array(sorted(rows), np.int64)
    order = np.array([rows[step] for step in sorted(rows)], np.int64)
    table = table[order]
    return Metrics(
        steps=steps,
        columns={name: table[:, column] for column, name in enumerate(COLUMNS)},
        by_time=_matrix([bands[number] for number in order]),
        terms=_terms([terms[number] for number in order]),
        held_out=_held_out(held_out),
        not_finite=sorted(not_finite),
        num_repeated=len(lines) - len(rows),
        num_cut=num_cut,
    )


def whole_lines(path: Path) -> tuple[list[bytes], int]:
    """The lines of a file, and 1 if another one was cut off."""
    if not path.is_file():
        return [], 0
    lines = path.read_bytes().split(b"\n")
    cut = lines.pop()
    return lines, int(bool(cut))


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        report = json.loads(line)
        step = report["step"]
        if type(step) is not int or not 0 < step < 2**53:
            raise ValueError(f"step {step!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamageError(f"'{path}': line {number + 1} is not a report. Remove the line.") from error
    return report


def _number(value: object) -> float:
    """A value of a line as a number; NaN where it is none."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else np.nan


def _matrix(rows: Sequence[Any]) -> np.ndarray:
    """Lists of numbers as (rows, longest), NaN where there is none."""
    lists = [row[:MAX_TIMES] if isinstance(row, list) else [] for row in rows]
    found = np.full((len(lists), max(map(len, lists), default=0)), np.nan)
    for number, row in enumerate(lists):
        found[number, : len(row)] = [_number(value) for value in row]
    return found


def _terms(rows: Iterable[Any]) -> dict[str, np.ndarray]:
    dicts = [row if isinstance(row, dict) else {} for row in rows]
    names = list(dict.fromkeys(name for row in dicts for name in row))[:MAX_TERMS]
    return {name: np.array([_number(row.get(name)) for row in dicts]) for name in names}


def _held_out(evaluations: dict[int, dict[str, Any]]) -> HeldOut:
    rows = [evaluations[step] for step in sorted(evaluations)]
    return HeldOut(
        steps=np.array(sorted(evaluations), np.int64),
        columns={name: np.array([_number(row.get(name)) for row in rows]) for name in HELD_OUT},
        by_time=_matrix([row.get("loss_by_time") for row in rows]),
        averaged_by_time=_matrix([row.get("averaged_loss_by_time") for row in rows]),
    )
