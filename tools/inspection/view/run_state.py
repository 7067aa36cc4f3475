"""What a run has written so far, read again and again while it trains: only new lines are parsed."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ....datasets.disk.hashing import read_json
from ....train.metrics.writer import METRICS
from ....train.weights.folders import RUN
from ..report.runs.lines import thinned

POINTS = 400  # of a line
QUIET_SECONDS = 120  # without a report, after which a run may have stopped
NEWEST_GRIDS = 4
LAST_STEP = 2**53  # that JavaScript counts to
CHARTS: tuple[tuple[str, str, Mapping[str, str], float], ...] = (  # title, unit, name and column of each line, factor
    ("Loss", "", {"training": "loss", "held-out": "held_out", "held-out, averaged weights": "held_out_averaged"}, 1),
    ("Speed", "images/s", {"speed": "images_per_second"}, 1),
    ("Gradient norm", "before clipping", {"norm": "grad_norm"}, 1),
    ("Learning rate", "", {"rate": "learning_rate"}, 1),
    ("Waiting for data", "% of the time", {"wait": "data_wait_share"}, 100),
    ("Memory", "GiB", {"memory": "memory_gib"}, 1),
    ("Model FLOPs utilisation", "%", {"MFU": "mfu"}, 100),
)
COLUMNS = sorted({column for _, _, lines, _ in CHARTS for column in lines.values()})


class RunState:
    """Reads a run's folder. Thread-safe.

    Args:
      run: its folder; it is only read.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._lock = run, threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._offset, self._inode, self._last = 0, 0, dict[str, Any]()
        self._rows: dict[int, list[float]] = {}
        self._drawn: tuple[int, list[dict[str, Any]]] = (-1, [])

    def read(self) -> dict[str, Any]:
        """The state as JSON: facts, charts, the steps of the newest grids, and a version that changes with them.

        Raises: DamageError: ``run.json`` is not readable.
        """
        with self._lock:
            self._read_lines()
            grids = self.grids()
            facts = self._facts()
            return {
                "version": f"{self._inode}-{self._offset}-{max(grids, default=0)}",
                "facts": facts,
                "charts": self._drawn_charts(),
                "grids": sorted(grids, reverse=True)[:NEWEST_GRIDS],
            }

    def grids(self) -> dict[int, Path]:
        """Pictures that were drawn while it trained, by step."""
        found = [(re.fullmatch(r"step-(\d{1,12})\.png", path.name), path) for path in self._run.glob("samples/step-*")]
        return {int(match[1]): path for match, path in found if match}

    def _read_lines(self) -> None:
        path = self._run / METRICS
        if not path.is_file():
            return
        state = path.stat()
        if state.st_ino != self._inode or state.st_size < self._offset:  # a resumed run writes the file anew
            self._forget()
            self._inode = state.st_ino
        with open(path, "rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]  # the last line may be half written
        self._offset += len(whole)
        for line in whole.splitlines():
            self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            values = json.loads(line)
            step = int(values["step"])
            if not 0 <= step <= LAST_STEP:
                return
            held_out = values.get("held_out") or {}
            flat = {**values, "held_out": held_out.get("loss"), "held_out_averaged": held_out.get("averaged_loss")}
            self._rows[step] = [_number(flat.get(column)) for column in COLUMNS]  # the later of two counts
            self._last = values
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return  # the trainer refuses such a line when it resumes, and names it

    def _facts(self) -> list[tuple[str, str]]:
        recipe = read_json(self._run / RUN).get("recipe", {}) if (self._run / RUN).is_file() else {}
        steps = int(recipe.get("run", {}).get("steps", 0) or 0)
        model = recipe.get("model", {}).get("name", "")
        step = int(self._last.get("step", 0))
        rows = [("state", self._state(step, steps)), ("model", str(model)), ("step", f"{step:,} of {steps:,}")]
        if self._last:
            rows.append(("images", f"{_number(self._last.get('num_images')):,.0f}"))
            rows.append(("epoch", str(self._last.get("epoch", ""))))
            rows.append(("loss", f"{_number(self._last.get('loss')):.4f}"))
            seconds = _number(self._last.get("seconds_per_step")) * max(0, steps - step)
            if seconds > 0:
                rows.append(("time left at this speed", _duration(seconds)))
        return rows

    def _state(self, step: int, steps: int) -> str:
        if steps and step >= steps:
            return "finished"
        path = self._run / METRICS
        if not path.is_file():
            return "no report yet"
        quiet = time.time() - path.stat().st_mtime
        if quiet <= max(QUIET_SECONDS, 20 * _number(self._last.get("seconds_per_step"))):
            return "running"
        return f"no report for {_duration(quiet)}: it has stopped, or takes long"

    def _drawn_charts(self) -> list[dict[str, Any]]:
        if self._drawn[0] != self._offset:
            self._drawn = self._offset, self._charts()
        return self._drawn[1]

    def _charts(self) -> list[dict[str, Any]]:
        steps = np.array(sorted(self._rows), np.int64)
        table = np.array([self._rows[step] for step in steps.tolist()], np.float64).reshape(len(steps), len(COLUMNS))
        charts = []
        for title, unit, names, factor in CHARTS:
            lines = []
            for name, column in names.items():
                values = table[:, COLUMNS.index(column)] * factor
                known = np.isfinite(values)
                if known.any():
                    lines.append({"name": name, "points": _points(steps[known], values[known])})
            if lines:
                charts.append({"title": title, "unit": unit, "lines": lines})
        return charts


def _points(steps: np.ndarray, values: np.ndarray) -> list[tuple[int, float]]:
    return [(int(step), float(f"{value:.6g}")) for step, value in zip(*thinned(steps, values, POINTS), strict=True)]


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.nan


def _duration(seconds: float) -> str:
    if not np.isfinite(seconds):
        return "unknown"
    minutes = round(seconds / 60)
    return f"{round(seconds)} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
