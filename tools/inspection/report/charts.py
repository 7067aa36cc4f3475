"""Charts as SVG images inside a page. The same input gives the same bytes.

Names in a chart may hold any text: it is escaped, and never read as mathematics.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from cycler import cycler
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter

from ...terminal.text import printable

# Colors that stay apart for the color-blind. Source: Okabe and Ito 2008, "Color Universal Design".
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8A6D3B", "#7F7F7F")
NARROW_INCHES, WIDE_INCHES = (6.4, 2.7), (13.2, 3.2)  # letters are as large in both, as the page scales them
STYLE: Any = {
    "svg.fonttype": "none",  # letters of the browser, which has those that matplotlib's font lacks
    "svg.hashsalt": "leandit",  # for the same bytes each time
    "text.parse_math": False,
    "font.size": 9,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.4,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}
DOTTED: Any = {"color": "black", "linewidth": 1.0, "linestyle": (0, (3, 2)), "alpha": 0.65}
CHARS_PER_INCH, KEY_CHARS = 14, 7  # of a legend; what stands before each name
MAX_NAME_CHARS = 28  # of a bar or a curve
MAX_LABEL_CHARS = 90  # of an axis or a title


class Chart(NamedTuple):
    """A chart and its heading; a wide one is as wide as the page, not half."""

    title: str
    image: Markup
    wide: bool


def chart(title: str, x_label: str, y_label: str, draw: Callable[[Any], object], *, wide: bool = False) -> Chart:
    """A chart with a legend of everything that has a label.

    Args:
      draw: draws into the axes of matplotlib that it is called with, in the style of the page.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=WIDE_INCHES if wide else NARROW_INCHES, layout="constrained")
        axes: Any = figure.add_subplot(xlabel=cut(x_label, MAX_LABEL_CHARS), ylabel=cut(y_label, MAX_LABEL_CHARS))
        draw(axes)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_minor_formatter(NullFormatter())
            elif isinstance(axis.get_major_locator(), FixedLocator):
                continue  # names of bars
            else:
                is_whole = axis is axes.xaxis and np.ptp(axes.get_xlim()) > 2  # steps, tokens, channels; not shares
                axis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10], integer=is_whole))
            axis.set_major_formatter(lambda value, _: short(value))
        if handles := axes.get_legend_handles_labels()[0]:
            longest = max(len(handle.get_label()) for handle in handles)
            columns = int(figure.get_figwidth() * CHARS_PER_INCH / (longest + KEY_CHARS))
            figure.legend(loc="outside upper left", ncols=max(1, min(columns, len(handles))), handlelength=1.4)
        stream = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)  # see STYLE
            figure.savefig(stream, format="svg", metadata={"Creator": None, "Date": None})
    content = base64.b64encode(stream.getvalue()).decode()
    image = Markup('<img class="chart" src="data:image/svg+xml;base64,{}" alt="{}">')
    return Chart(title, image.format(content, cut(title, MAX_LABEL_CHARS)), wide)


def bar_chart(title: str, x_label: str, y_label: str, names: Sequence[str], heights: Sequence[float]) -> Chart:
    """A bar for each name; over the whole width if there are many."""
    wide, shown = len(names) > 12, [label(name) for name in names]

    def draw(axes: Any) -> None:
        axes.bar(np.arange(len(names)), heights, 0.75)
        is_long = sum(map(len, shown)) > (120 if wide else 50)
        slant = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if is_long else {}
        axes.set_xticks(range(len(names)), shown, **slant)
        middle, half = (len(names) - 1) / 2, max(len(names), 4) / 2 + 0.1  # few bars are no wider than many
        axes.set_xlim(middle - half, middle + half)
        axes.grid(visible=False, axis="x")

    return chart(title, x_label, y_label, draw, wide=wide)


def histogram(
    title: str,
    x_label: str,
    things: str,
    edges: np.ndarray,
    counts: np.ndarray,
    *,
    log_x: bool = False,
    limit: float = 0,
) -> Chart:
    """Counts of things between edges.

    Args:
      edges: one more than counts.
      limit: position on the x axis of a dotted line, "cut at"; 0: none.
    """

    def draw(axes: Any) -> None:
        axes.stairs(counts, edges, fill=True)
        if limit:
            axes.axvline(limit, label="cut at", **DOTTED)
        axes.set_xscale("log" if log_x else "linear")
        axes.set_ylim(bottom=0)

    return chart(title, x_label, things, draw)


def thinned(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest value of each of ``most // 2`` parts of a line: every spike stays visible.

    Args:
      x, y: (N,) each; NaN counts nowhere.
    Returns: (M,) each, M at most ``most``; as given where N is no larger.
    """
    if len(x) <= most:
        return x, y
    starts = np.linspace(0, len(x), most // 2, endpoint=False).astype(int)
    ends = np.stack([np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)], axis=1)
    return np.repeat(x[starts], 2), ends.ravel()


def short(value: float) -> str:
    """A number for an axis: "0.25", "1,500", "20k", "1.3M"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def label(text: str) -> str:
    """A name for a chart. One that begins with "_" would be left out of the legend."""
    shown = cut(text, MAX_NAME_CHARS)
    return f" {shown}" if shown.startswith("_") else shown


def cut(text: str, most: int) -> str:
    """A printable text of at most so many characters."""
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"
