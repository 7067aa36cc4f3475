"""The loss of a run over its steps, as a chart; drawn large and scaled down, so that lines and letters are smooth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ...train.metrics.reader import read_metrics, smoothed
from ..inspection.grid import FRAME, KEY_COLOUR

SCALE = 3
WIDTH_PX, HEIGHT_PX = 820, 420
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 62, 62, 46, 54  # around the axes
FONT_PX, TITLE_PX, TICK_PX, DOT_PX = 13, 15, 5, 4
MEAN_SHARE = 0.04  # of the run, over which the bold line averages
REPORT_COLOUR, MEAN_COLOUR, GRID_COLOUR = (176, 196, 222), (31, 90, 160), (232, 232, 232)
LOSS_DIGITS = (1, 1.5, 2, 3, 4, 5, 7)  # of ticks on the logarithmic axis
MOST_STEP_TICKS = 8

Points = Sequence[tuple[float, float]]


def draw_loss(run: Path) -> Image.Image:
    """Chart of ``metrics.jsonl``: the loss of every report, and its running mean, over the steps."""
    metrics = read_metrics(run)
    steps, losses = metrics.steps.tolist(), metrics.columns["loss"].tolist()
    means = smoothed(metrics.columns["loss"], MEAN_SHARE).tolist()
    chart = _Chart(last_step=steps[-1], lowest=min(losses), highest=max(losses))
    chart.axes()
    chart.line(steps, losses, REPORT_COLOUR, width=1)
    chart.line(steps, means, MEAN_COLOUR, width=2)
    chart.last_point(means[-1])
    chart.legend([("each report", REPORT_COLOUR), (f"mean over {MEAN_SHARE:.0%} of the run", MEAN_COLOUR)])
    return chart.finished()


def loss_ticks(lowest: float, highest: float) -> list[float]:
    """Round numbers from below the lowest to above the highest loss, for a logarithmic axis."""
    powers = range(math.floor(math.log10(lowest)) - 1, math.ceil(math.log10(highest)) + 1)
    ticks = [round(digit * 10.0**power, 12) for power in powers for digit in LOSS_DIGITS]
    first = max(i for i, tick in enumerate(ticks) if tick <= lowest)
    last = min((i for i, tick in enumerate(ticks) if tick >= highest), default=len(ticks) - 1)
    return ticks[first : last + 1]


def step_ticks(last_step: int) -> list[int]:
    """Round numbers from 0 to the last step."""
    rough = last_step / MOST_STEP_TICKS
    power = 10 ** math.floor(math.log10(max(rough, 1)))
    every = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough)
    return list(range(0, last_step + 1, every))


class _Chart:
    """Axes in units of steps and losses."""

    def __init__(self, *, last_step: int, lowest: float, highest: float) -> None:
        self._last_step, self._ticks = last_step, loss_ticks(lowest, highest)
        self._image = Image.new("RGB", (WIDTH_PX * SCALE, HEIGHT_PX * SCALE), "white")
        self._draw = ImageDraw.Draw(self._image)

    def axes(self) -> None:
        """Title, frame, and grid lines with their numbers."""
        right, bottom = WIDTH_PX - RIGHT_PX, HEIGHT_PX - BOTTOM_PX
        for loss in self._ticks:
            y = self._y(loss)
            self._stroke([(LEFT_PX - TICK_PX, y), (right, y)], GRID_COLOUR)
            self._text(LEFT_PX - TICK_PX - 4, y, f"{loss:g}", anchor="rm")
        for step in step_ticks(self._last_step):
            x = self._x(step)
            self._stroke([(x, TOP_PX), (x, bottom + TICK_PX)], GRID_COLOUR)
            self._text(x, bottom + TICK_PX + 4, f"{step}", anchor="ma")
        frame = [(LEFT_PX, TOP_PX), (right, TOP_PX), (right, bottom), (LEFT_PX, bottom), (LEFT_PX, TOP_PX)]
        self._stroke(frame, FRAME)
        self._text(LEFT_PX, TOP_PX - 12, "Training loss", anchor="ls", size=TITLE_PX, colour="black")
        self._text((LEFT_PX + right) / 2, HEIGHT_PX - 10, "step (updates of the weights)", anchor="ms")

    def line(self, steps: list[int], losses: list[float], colour: Any, *, width: int) -> None:
        """A line through the losses."""
        self._stroke([(self._x(step), self._y(loss)) for step, loss in zip(steps, losses, strict=True)], colour, width)

    def last_point(self, loss: float) -> None:
        """A dot at the last step, with its loss."""
        x, y, radius = self._x(self._last_step), self._y(loss), DOT_PX
        box = [(x - radius) * SCALE, (y - radius) * SCALE, (x + radius) * SCALE, (y + radius) * SCALE]
        self._draw.ellipse(box, fill=MEAN_COLOUR)
        self._text(x + DOT_PX + 3, y, f"{loss:.2g}", anchor="lm", colour=MEAN_COLOUR)

    def legend(self, entries: list[tuple[str, Any]]) -> None:
        """Names of the lines, right-aligned above the frame."""
        font: Any = ImageFont.load_default(FONT_PX)
        x = WIDTH_PX - RIGHT_PX
        for name, colour in reversed(entries):
            self._text(x, TOP_PX - 12, name, anchor="rs")
            x -= font.getlength(name) + 8
            self._stroke([(x - 22, TOP_PX - 16), (x, TOP_PX - 16)], colour, 3)
            x -= 22 + 20

    def finished(self) -> Image.Image:
        """The chart at its size."""
        return self._image.resize((WIDTH_PX, HEIGHT_PX), Image.Resampling.LANCZOS)

    def _x(self, step: float) -> float:
        return LEFT_PX + (WIDTH_PX - RIGHT_PX - LEFT_PX) * step / self._last_step

    def _y(self, loss: float) -> float:
        low, high = math.log(self._ticks[0]), math.log(self._ticks[-1])
        return HEIGHT_PX - BOTTOM_PX - (HEIGHT_PX - BOTTOM_PX - TOP_PX) * (math.log(loss) - low) / (high - low)

    def _stroke(self, points: Points, colour: Any, width: int = 1) -> None:
        self._draw.line([(x * SCALE, y * SCALE) for x, y in points], fill=colour, width=width * SCALE, joint="curve")

    def _text(
        self, x: float, y: float, text: str, *, anchor: str, size: int = FONT_PX, colour: Any = KEY_COLOUR
    ) -> None:
        font: Any = ImageFont.load_default(size * SCALE)
        self._draw.text((x * SCALE, y * SCALE), text, fill=colour, font=font, anchor=anchor)
