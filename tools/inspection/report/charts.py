"""Charts as inline SVG, readable on light and dark paper: the text takes the colour of the page.

The same input gives the same bytes. Names in a chart may hold any text: it is escaped, and never read as mathematics.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from ...terminal.text import printable

# Colours that stay apart for the colour-blind. Source: Okabe and Ito 2008, "Color Universal Design".
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8A6D3B", "#7F7F7F")
INK = "#0a0b0c"  # of text and axes; becomes the colour of the page's text
WIDTH, HEIGHT = 6.4, 2.7  # inches of 72 units; the page scales them
WIDE, WIDE_HEIGHT = 13.2, 3.2  # so that letters are as large as in the others
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "leandit",
    "text.parse_math": False,
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
NARROW = 30  # highest over lowest value of a logarithmic axis that has numbers between powers of ten
CHARS_PER_INCH, KEY_CHARS = 14, 7  # of a legend; what stands before each name
MAX_NAME_CHARS = 28  # of a bar or a curve
MAX_LABEL_CHARS = 90  # of an axis


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Args:
      name: in the legend; "" leaves it out.
      x, y: as many numbers each; NaN interrupts the line.
      low, high: of the band around it, or None.
      colour: number of ``COLOURS``; None: the next one.
      faint: drawn thin and pale, and left out of the legend: raw values behind smoothed ones.
    """

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    low: Sequence[float] | np.ndarray | None = None
    high: Sequence[float] | np.ndarray | None = None
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
    log_x: bool = False,
    log_y: bool = False,
    marks: Mapping[str, Sequence[float]] | None = None,
    expected: Sequence[float] = (),
    y_range: tuple[float | None, float | None] | None = None,
    x_notes: Callable[[float], str] | None = None,
    wide: bool = False,
) -> Markup:
    """Curves over one axis.

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
        used = 0
        for curve in curves:
            colour = COLOURS[(used if curve.colour is None else curve.colour) % len(COLOURS)]
            used += curve.colour is None
            _draw_curve(axes, curve, colour)
        for value in expected:
            axes.axhline(value, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.6)
        for name, places in (marks or {}).items():
            for i, place in enumerate(places):
                label = _name(name) if i == 0 else None
                axes.axvline(place, color=INK, linewidth=1.1, linestyle=(0, (3, 2)), alpha=0.7, label=label)
        axes.set_xscale("log" if log_x else "linear")
        axes.set_yscale("log" if log_y else "linear")
        if y_range:
            axes.set_ylim(*y_range)
        _finish(axes, log_x=log_x, log_y=log_y, is_whole=all(_is_whole(curve.x) for curve in curves))
        if x_notes:
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{short(value)}\n{x_notes(value)}"))
        return _svg(figure, title)


def bar_chart(
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    wide: bool = False,
) -> Markup:
    """A group of bars for each name, one bar of it for each series.

    Args:
      names: below the axis; long ones are cut and slanted.
      series: heights by name; the legend is left out where there is one.
    """
    with rc_context(STYLE):
        figure, axes = _axes(x_label, y_label, wide=wide)
        places, width = np.arange(len(names)), 0.8 / max(1, len(series))
        for i, (name, heights) in enumerate(series.items()):
            left = places - 0.4 + (i + 0.5) * width
            label = _name(name) if len(series) > 1 else None
            axes.bar(left, heights, width * 0.94, color=COLOURS[i % len(COLOURS)], label=label)
        shown = [_name(name) for name in names]
        is_slanted = sum(map(len, shown)) > (120 if wide else 50)
        axes.set_xticks(
            places, shown, **({"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if is_slanted else {})
        )
        axes.set_xlim(-0.6, max(len(names), 4) - 0.4)  # few bars are no wider than many
        axes.grid(visible=False, axis="x")
        _finish(axes, log_x=None, log_y=False)
        return _svg(figure, title)


def histogram(
    edges: Sequence[float] | np.ndarray,
    series: Mapping[str, Sequence[float] | np.ndarray],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    marks: Mapping[str, Sequence[float]] | None = None,
    wide: bool = False,
) -> Markup:
    """Counts between edges: filled where there is one series, outlines where there are several.

    Args:
      edges: one more than counts.
      marks: positions on the x axis of vertical dotted lines, by name.
    """
    with rc_context(STYLE):
        figure, axes = _axes(x_label, y_label, wide=wide)
        for i, (name, counts) in enumerate(series.items()):
            colour, label = COLOURS[i % len(COLOURS)], _name(name) if len(series) > 1 else None
            if len(series) == 1:
                axes.stairs(counts, edges, fill=True, color=colour, alpha=0.9)
            else:
                axes.stairs(counts, edges, color=colour, linewidth=1.6, label=label)
        for name, places in (marks or {}).items():
            for i, place in enumerate(places):
                label = _name(name) if i == 0 else None
                axes.axvline(place, color=INK, linewidth=0.8, linestyle=(0, (1, 2)), alpha=0.7, label=label)
        axes.set_xscale("log" if log_x else "linear")
        axes.set_ylim(bottom=0)
        _finish(axes, log_x=log_x, log_y=False, is_whole=_is_whole(np.multiply(edges, 2)))
        return _svg(figure, title)


def _axes(x_label: str, y_label: str, *, wide: bool) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDE, WIDE_HEIGHT) if wide else (WIDTH, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(_cut(x_label, MAX_LABEL_CHARS))
    axes.set_ylabel(_cut(y_label, MAX_LABEL_CHARS))
    return figure, axes


def _draw_curve(axes: Any, curve: Curve, colour: str) -> None:
    faint = {"linewidth": 0.7, "alpha": 0.35} if curve.faint else {"linewidth": 1.6, "label": _name(curve.name)}
    style = {"linestyle": (0, (4, 2))} if curve.dashed else {}
    dots = {"marker": "o", "markersize": 3} if curve.dots else {}
    axes.plot(curve.x, curve.y, color=colour, **faint, **style, **dots)
    if curve.low is not None and curve.high is not None:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)


def _finish(axes: Any, *, log_x: bool | None, log_y: bool, is_whole: bool = False) -> None:
    """Short numbers on the axes, and a legend above the chart where anything has a name.

    Args:
      log_x: None: the axis has names, not numbers.
      is_whole: the x axis has whole numbers alone.
    """
    for axis, is_log in ((axes.xaxis, log_x), (axes.yaxis, log_y)):
        if is_log is None:
            continue
        if not is_log:
            steps = [1, 2, 2.5, 5, 10]
            axis.set_major_locator(MaxNLocator(nbins=7, steps=steps, integer=is_whole and axis is axes.xaxis))
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        if is_log:
            low, high = axis.get_view_interval()
            is_narrow = 0 < low < high < NARROW * low
            axis.set_minor_locator(LogLocator(subs=(2, 3, 5) if high > 3 * low else (2, 3, 4, 5, 6, 7, 8, 9)))
            axis.set_minor_formatter(FuncFormatter(lambda value, _, named=is_narrow: short(value) if named else ""))
    if handles := axes.get_legend_handles_labels()[0]:
        longest = max(len(handle.get_label()) for handle in handles)
        columns = int(axes.figure.get_figwidth() * CHARS_PER_INCH / (longest + KEY_CHARS))
        axes.figure.legend(loc="outside upper left", ncols=max(1, min(columns, len(handles))), handlelength=1.4)


def _is_whole(numbers: Sequence[float] | np.ndarray) -> bool:
    return bool(np.all(np.mod(numbers, 1) == 0))


def short(value: float) -> str:
    """A number for an axis: "0.25", "1,500", "20k", "1.3M"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _name(text: str) -> str:
    """A name for a chart. One that begins with "_" would be left out of the legend."""
    shown = _cut(text, MAX_NAME_CHARS)
    return f" {shown}" if shown.startswith("_") else shown


def _cut(text: str, most: int) -> str:
    """A printable text of so many characters at most."""
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def _svg(figure: Figure, title: str) -> Markup:
    """The chart as an element of the page, without what belongs to a file alone."""
    stream = io.StringIO()
    with warnings.catch_warnings():
        # The browser has the letters that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        figure.savefig(
            stream, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    match = re.search(r'viewBox="([-0-9. ]+)"', text)
    assert match, "matplotlib's SVG has a viewBox"
    text = text[text.index(">") + 1 :]
    text = re.sub(r"font-family: '[^;\"]*; ?", "", text.replace(INK, "currentColor"))  # the page's own
    text = re.sub(r"\n\s*", " ", text).replace("> <", "><")
    referenced = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in referenced else "", text)
    text = re.sub(r' (?:d|x|y|transform|width|height)="[^"]*"', _rounded, text)
    # Ids are unique in a page, so each chart has its own.
    own = hashlib.sha256(f"{title}{text}".encode()).hexdigest()[:8]
    for name in sorted(referenced):
        text = text.replace(f'id="{name}"', f'id="{name}-{own}"')
        text = text.replace(f'#{name}"', f'#{name}-{own}"').replace(f"#{name})", f"#{name}-{own})")
    head = f'<svg class="chart" role="img" viewBox="{match[1]}" aria-label="{escape(_cut(title, MAX_LABEL_CHARS))}"'
    return Markup(f'{head} xmlns:xlink="http://www.w3.org/1999/xlink">{text}')


def _rounded(attribute: re.Match[str]) -> str:
    """An attribute whose numbers have two decimals: a fiftieth of what the eye sees."""
    return re.sub(r"(\.\d\d)\d+", r"\1", attribute[0])
