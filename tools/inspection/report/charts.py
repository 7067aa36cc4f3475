"""Charts as SVG images inside a page. The same input gives the same bytes.

Names in a chart may hold any text: it is escaped, and never read as mathematics.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from ...terminal.text import printable

# Colours that stay apart for the colour-blind. Source: Okabe and Ito 2008, "Color Universal Design".
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8A6D3B", "#7F7F7F")
NARROW_INCHES, WIDE_INCHES = (6.4, 2.7), (13.2, 3.2)  # letters are as large in both, as the page scales them
STYLE: Any = {
    "svg.fonttype": "none",  # letters of the browser, which has those that matplotlib's font lacks
    "svg.hashsalt": "leandit",  # for the same bytes each time
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.4,
    "legend.frameon": False,
}
FEW_TIMES = 30  # highest over lowest value of a logarithmic axis that has numbers between powers of ten
CHARS_PER_INCH, KEY_CHARS = 14, 7  # of a legend; what stands before each name
MAX_NAME_CHARS = 28  # of a bar or a curve
MAX_LABEL_CHARS = 90  # of an axis
Numbers = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Args:
      name: in the legend; "" leaves it out.
      x, y: as many numbers each; NaN interrupts the line.
      colour: number of ``COLOURS``; None: the next one.
      faint: drawn thin and pale, and left out of the legend: raw values behind smoothed ones.
    """

    name: str
    x: Numbers
    y: Numbers
    colour: int | None = None
    dashed: bool = False
    faint: bool = False
    dots: bool = False


def line_chart(
    curves: Sequence[Curve],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_y: bool = False,
    marks: Mapping[str, Sequence[float]] | None = None,
    expected: Sequence[float] = (),
    y_range: tuple[float | None, float | None] | None = None,
    x_notes: Callable[[float], str] | None = None,
    wide: bool = False,
) -> Markup:
    """Curves over one axis, as an element of a page.

    Args:
      title: for readers that cannot see the chart; the page has it as the heading.
      x_label, y_label: of the axes, with their units.
      marks: positions on the x axis of vertical dotted lines, by name.
      expected: values on the y axis of horizontal dotted lines.
      x_notes: lines of text below a number of the x axis.
      wide: over the whole width of the page, not half.
    """
    with rc_context(STYLE):
        figure, axes = _axes(x_label, y_label, wide=wide)
        for i, curve in enumerate(curves):
            _draw_curve(axes, curve, COLOURS[(i if curve.colour is None else curve.colour) % len(COLOURS)])
        for value in expected:
            axes.axhline(value, color="black", linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.6)
        _draw_marks(axes, marks)
        if y_range:
            axes.set_ylim(*y_range)
        _set_scales(axes, log_x=False, log_y=log_y, is_whole=all(_is_whole(curve.x) for curve in curves))
        if x_notes:
            axes.xaxis.set_major_formatter(lambda value, _: f"{short(value)}\n{x_notes(value)}")
        return _image(figure, title)


def bar_chart(
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    wide: bool = False,
) -> Markup:
    """A group of bars for each name, one bar of it for each series, as an element of a page.

    Args:
      names: below the axis; long ones are cut and slanted.
      series: heights by name; the legend is left out where there is one.
    """
    with rc_context(STYLE):
        figure, axes = _axes(x_label, y_label, wide=wide)
        places, width = np.arange(len(names)), 0.8 / max(1, len(series))
        for i, (name, heights) in enumerate(series.items()):
            label = _name(name) if len(series) > 1 else None
            centres = places - 0.4 + (i + 0.5) * width
            axes.bar(centres, heights, width * 0.94, color=COLOURS[i % len(COLOURS)], label=label)
        shown = [_name(name) for name in names]
        is_long = sum(map(len, shown)) > (120 if wide else 50)
        slant = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if is_long else {}
        axes.set_xticks(places, shown, **slant)
        axes.set_xlim(-0.6, max(len(names), 4) - 0.4)  # few bars are no wider than many
        axes.grid(visible=False, axis="x")
        _set_scales(axes, log_x=None, log_y=False)
        return _image(figure, title)


def histogram(
    edges: Numbers,
    series: Mapping[str, Numbers],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    marks: Mapping[str, Sequence[float]] | None = None,
    wide: bool = False,
) -> Markup:
    """Counts between edges, as an element of a page: filled if there is one series, outlines if there are several.

    Args:
      edges: one more than counts.
      marks: positions on the x axis of vertical dotted lines, by name.
    """
    with rc_context(STYLE):
        figure, axes = _axes(x_label, y_label, wide=wide)
        is_single = len(series) == 1
        style = {"fill": True, "alpha": 0.9} if is_single else {"linewidth": 1.6}
        for i, (name, counts) in enumerate(series.items()):
            label = None if is_single else _name(name)
            axes.stairs(counts, edges, color=COLOURS[i % len(COLOURS)], label=label, **style)
        _draw_marks(axes, marks)
        axes.set_ylim(bottom=0)
        _set_scales(axes, log_x=log_x, log_y=False, is_whole=_is_whole(np.multiply(edges, 2)))
        return _image(figure, title)


def short(value: float) -> str:
    """A number for an axis: "0.25", "1,500", "20k", "1.3M"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _formatted(value: float, _: int | None) -> str:
    return short(value)


def _axes(x_label: str, y_label: str, *, wide: bool) -> tuple[Figure, Any]:
    figure = Figure(figsize=WIDE_INCHES if wide else NARROW_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(_cut(x_label, MAX_LABEL_CHARS))
    axes.set_ylabel(_cut(y_label, MAX_LABEL_CHARS))
    return figure, axes


def _draw_curve(axes: Any, curve: Curve, colour: str) -> None:
    faint = {"linewidth": 0.7, "alpha": 0.35} if curve.faint else {"linewidth": 1.6, "label": _name(curve.name)}
    style = {"linestyle": (0, (4, 2))} if curve.dashed else {}
    dots = {"marker": "o", "markersize": 3} if curve.dots else {}
    axes.plot(curve.x, curve.y, color=colour, **faint, **style, **dots)


def _draw_marks(axes: Any, marks: Mapping[str, Sequence[float]] | None) -> None:
    for name, places in (marks or {}).items():
        for i, place in enumerate(places):
            label = _name(name) if i == 0 else None
            axes.axvline(place, color="black", linewidth=1.1, linestyle=(0, (3, 2)), alpha=0.7, label=label)


def _set_scales(axes: Any, *, log_x: bool | None, log_y: bool, is_whole: bool = False) -> None:
    """Scales with short numbers, and a legend above the chart if anything has a name.

    Args:
      log_x: None: the axis has names, not numbers.
      is_whole: the x axis has whole numbers alone.
    """
    for axis, is_log in ((axes.xaxis, log_x), (axes.yaxis, log_y)):
        if is_log is None:
            continue
        (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log" if is_log else "linear")
        axis.set_major_formatter(_formatted)
        if is_log:
            low, high = axis.get_view_interval()
            has_names = 0 < low < high < FEW_TIMES * low
            axis.set_minor_locator(LogLocator(subs=(2, 3, 5) if high > 3 * low else (2, 3, 4, 5, 6, 7, 8, 9)))
            axis.set_minor_formatter(_formatted if has_names else NullFormatter())
        else:
            integer = is_whole and axis is axes.xaxis
            axis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10], integer=integer))
    if handles := axes.get_legend_handles_labels()[0]:
        longest = max(len(handle.get_label()) for handle in handles)
        columns = int(axes.figure.get_figwidth() * CHARS_PER_INCH / (longest + KEY_CHARS))
        axes.figure.legend(loc="outside upper left", ncols=max(1, min(columns, len(handles))), handlelength=1.4)


def _is_whole(numbers: Numbers) -> bool:
    return bool(np.all(np.mod(numbers, 1) == 0))


def _name(text: str) -> str:
    """A name for a chart. One that begins with "_" would be left out of the legend."""
    shown = _cut(text, MAX_NAME_CHARS)
    return f" {shown}" if shown.startswith("_") else shown


def _cut(text: str, most: int) -> str:
    """A printable text of at most so many characters."""
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def _image(figure: Figure, title: str) -> Markup:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)  # see STYLE
        figure.savefig(stream, format="svg", metadata={"Creator": None, "Date": None})
    content = base64.b64encode(stream.getvalue()).decode()
    image = Markup('<img class="chart" src="data:image/svg+xml;base64,{}" alt="{}">')
    return image.format(content, _cut(title, MAX_LABEL_CHARS))
