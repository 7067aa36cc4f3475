"""Curves of ``bench learning``: held-out loss and Fréchet distance against steps and against seconds."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

INCHES, DPI = (11, 7.5), 110
MEASURES = (("held_out", "held-out loss, averaged weights"), ("frechet", "Fréchet distance of samples"))


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the chart as PNG: a line is the mean over the seeds, its band their range.

    It begins at the first Fréchet distance: before it all losses fall alike, and would hide what comes later.
    """
    figure, axes = plt.subplots(2, 2, figsize=INCHES, layout="constrained")
    for row, (key, label) in zip(axes, MEASURES, strict=True):
        for name, runs in result["runs"].items():
            first = min(map(int, runs[0]["frechet"]))
            curve = {int(step): [run[key][step] for run in runs] for step in runs[0][key] if int(step) >= first}
            middle, low, high = ([pick(values) for values in curve.values()] for pick in (mean, min, max))
            for axis, unit in zip(row, (1.0, result["seconds_per_step"][name]), strict=True):
                x = [step * unit for step in curve]
                (line,) = axis.plot(x, middle, label=name, marker="o", markersize=3)
                axis.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        row[0].set_ylabel(label)
        for axis in row:
            axis.grid(visible=True, alpha=0.3)
    axes[0, 0].legend()
    axes[1, 0].set_xlabel("steps")
    axes[1, 1].set_xlabel("seconds of training")
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
