"""``leandit report RUN``: how a run went, on one page. Its charts are a table of what each one shows, and one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from PIL import Image, UnidentifiedImageError

from ....datasets.order.slices import spread
from ....errors import DamageError
from ....train.metrics.history import smoothed
from ..templating import rows_of
from .charts import COLORS, DOTTED, Chart, chart, label, thinned
from .page import render_page, webp_uri, write_page
from .rules import Alert, alerts_of, rules_of
from .run_facts import SCORES, RunFacts

MOST_GRIDS = 8
GRID_SIDE_PX = 1100  # at most
GRID_BYTES = 2_600_000  # of all grids, in base64
MAX_PIXELS = 64_000_000  # of a grid's file
MOST_POINTS = 2000  # of a line
MOST_DOTS = 40  # points of a line that has a dot for each
SPREAD = 3.0  # highest over lowest value, above which the axis of a loss is logarithmic
END_SHARE = 0.1  # of the lines, whose mean is the loss at the end of a run
STEP, TIME, PERCENT = "step", "diffusion time, from data (0) to noise (1)", "%"
Line = tuple[str, np.ndarray, np.ndarray]  # name, x, y


def report_run(run: Path, out: Path) -> list[tuple[str, str]]:
    """Write the report of a run.

    Args:
      run: its folder.
      out: the HTML file.
    Returns: rows for the user.
    Raises: DamageError: a file of the run is not what the trainer writes.
    """
    facts = RunFacts(run)
    alerts = alerts_of("run", facts)
    return write_page(out, render_run(facts, alerts), alerts)


def render_run(run: RunFacts, alerts: Sequence[Alert], *, version: str = "") -> str:
    """The page of a run, as HTML.

    Args:
      version: of a served page, which reloads itself when there is another; "": the page is a file.
    Raises: DamageError: a grid is not an image.
    """
    grids = _choose_grids(run)
    sections = {"summary": "Summary", "losses": "Losses", "steps": "Updates", "speed": "Speed and memory"}
    sections |= {"images": "Images"} if grids else {}
    sections |= {"evaluations": "Evaluations"} if run.evaluations else {}
    sections |= {"recipe": "Recipe", "stores": "Stores", "starts": "Starts and versions", "rules": "Rules"}
    return render_page(
        "run.html",
        title=f"Run {run.path}",
        sections=sections,
        alerts=alerts,
        page_version=version,
        run=run,
        summary=rows_of("run.txt", run=run)["summary"],
        charts=draw_charts(run),
        grids=grids,
        scores=[name for name in SCORES if any(name in values for values in run.evaluations)],
        rules=rules_of("run"),
    )


def _choose_grids(run: RunFacts) -> list[dict[str, Any]]:
    """Grids spread evenly over the steps, the last one always, as large as the page allows."""
    steps = sorted(run.grids)
    chosen = [steps[len(steps) - 1 - place] for place in spread(len(steps), MOST_GRIDS)[::-1]]
    most_bytes = GRID_BYTES // max(1, len(chosen))
    return [{"step": step, "uri": _grid_uri(run.grids[step], most_bytes)} for step in chosen]


def _grid_uri(path: Path, most_bytes: int) -> Markup:
    """Raises: DamageError: it is not an image, or one of more pixels than a grid has."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width}x{image.height} px")
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DamageError(f"grid '{path}': it cannot be read ({error}). Remove it.") from error
    return webp_uri(pixels, side_px=GRID_SIDE_PX, most_bytes=most_bytes)


# -------------------------------------------------------------------------------------------------------------- charts


class RunChart(NamedTuple):
    """What a chart shows.

    Args:
      section: of the page.
      unit: of the y axis; shares are drawn in percent.
      lines: a column of the metrics, or a function of a run.
      is_smoothed: means are drawn, with the raw values of a column behind them.
      is_loss: the y axis is logarithmic where the values are spread.
      dotted: key of the recipe that a horizontal line lies at.
    """

    section: str
    title: str
    unit: str
    lines: str | Callable[[RunFacts], list[Line]]
    is_smoothed: bool = True
    is_loss: bool = False
    x_label: str = STEP
    dotted: str = ""
    wide: bool = False


def _held_out(run: RunFacts) -> list[Line]:
    metrics, rows = run.metrics, run.metrics.is_evaluated
    columns = {"averaged weights": "held_out.averaged_loss", "weights": "held_out.loss"}
    return [(name, metrics.steps[rows], metrics.columns[column][rows]) for name, column in columns.items()]


def _by_time(run: RunFacts) -> list[Line]:
    """Loss over the diffusion time at the first, middle and last evaluation; without one at the end of training."""
    metrics, rows = run.metrics, np.flatnonzero(run.metrics.is_evaluated)
    shown = dict.fromkeys([rows[0], rows[len(rows) // 2], rows[-1]]) if len(rows) else {}
    lines = [(f"held-out, step {metrics.steps[row]:,}", metrics.held_out_by_time[row]) for row in shown]
    if not lines and len(metrics):
        last = np.ma.masked_invalid(metrics.loss_by_time[-max(1, round(len(metrics) * END_SHARE)) :])
        lines = [(f"training, last {END_SHARE:.0%}", last.mean(axis=0).filled(np.nan))]
    return [(name, (np.arange(len(y)) + 0.5) / max(1, len(y)), y) for name, y in lines]


def _terms(run: RunFacts) -> list[Line]:
    return [(name, run.metrics.steps, values) for name, values in run.metrics.terms.items()]


BY_TIME = "Loss against diffusion time (held-out: averaged weights)"
NORM = "Gradient norm before clipping, and run.grad_clip (dotted)"
CHARTS = (
    RunChart("losses", "Training loss", "loss", "loss", is_loss=True, wide=True),
    RunChart("losses", "Loss of held-out records", "loss", _held_out, is_smoothed=False, is_loss=True, wide=True),
    RunChart("losses", BY_TIME, "loss", _by_time, is_smoothed=False, is_loss=True, x_label=TIME),
    RunChart("losses", "Terms added to the loss, weighted, smoothed", "weight times term", _terms),
    RunChart("steps", NORM, "L2 norm", "grad_norm", is_loss=True, dotted="run.grad_clip"),
    RunChart("steps", "Learning rate", "learning rate", "learning_rate", is_smoothed=False),
    RunChart("steps", "Loss scale of float16", "scale", "loss_scale", is_smoothed=False),
    RunChart("speed", "Images a second, of all ranks", "images/s", "images_per_second"),
    RunChart("speed", "Waiting for batches, share of the time", PERCENT, "data_wait_share"),
    RunChart("speed", "GPU busy, first rank, share of the time", PERCENT, "gpu_busy_share"),
    RunChart("speed", "Peak memory, first rank", "GiB", "memory_gib", is_smoothed=False),
)


def draw_charts(run: RunFacts) -> dict[str, list[Chart]]:
    """The charts by section of the page, without those that have no number."""
    charts: dict[str, list[Chart]] = {spec.section: [] for spec in CHARTS}
    for spec in CHARTS:
        if lines := [line for line in _lines_of(spec, run) if np.isfinite(line[2]).any()]:
            charts[spec.section].append(_draw(spec, run, lines))
    return charts


def _lines_of(spec: RunChart, run: RunFacts) -> list[Line]:
    if callable(spec.lines):
        return spec.lines(run)
    values = run.metrics.columns[spec.lines] * (100.0 if spec.unit == PERCENT else 1.0)
    if spec.section == "speed" and len(values) > len(run.first_lines):
        values[run.first_lines] = np.nan  # they would stretch the axis
    return [("", run.metrics.steps, values)]


def _draw(spec: RunChart, run: RunFacts, lines: Sequence[Line]) -> Chart:
    def draw(axes: Any) -> None:
        for i, (name, x, y) in enumerate(lines):
            color = COLORS[i % len(COLORS)]
            if spec.is_smoothed and not name:
                axes.plot(*thinned(x, y, MOST_POINTS), linewidth=0.7, alpha=0.35, color=color)
            x, y = thinned(x, smoothed(y) if spec.is_smoothed else y, MOST_POINTS)
            marker = "o" if not spec.is_smoothed and len(x) < MOST_DOTS else ""
            axes.plot(x, y, marker=marker, markersize=3, label=label(name), color=color)
        every = np.concatenate([y[np.isfinite(y)] for _, _, y in lines])
        if spec.is_loss and every.max() > SPREAD * every.min() > 0:
            axes.set_yscale("log")
        if spec.section == "speed":
            axes.set_ylim(bottom=0)
        if spec.dotted and isinstance(limit := run.key(spec.dotted), int | float) and limit:
            axes.axhline(limit, **DOTTED)
        for i, step in enumerate(run.restart_steps if spec.x_label == STEP else ()):
            axes.axvline(step, label="" if i else "resumed", **DOTTED)

    return chart(spec.title, spec.x_label, spec.unit, draw, wide=spec.wide)
