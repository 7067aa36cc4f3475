"""``leandit report RUN...``: how runs went, on one page; several in the same charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image, UnidentifiedImageError

from ....datasets.errors import DamageError
from ....datasets.units import readable_size, readable_time
from ....train.metrics.reader import RUNNING
from .page import Alert, Section, count, number, render_page, webp_uri, write_page
from .run_charts import draw_charts
from .run_facts import ABSENT, SCORES, RunFacts, differing, read_run
from .run_rules import RULES, warnings_of

Progress = Callable[[str, int, int], None]
MOST_GRIDS = 8  # of a page, over all runs; at least the last of each
GRID_SIDE_PX = 1100  # at most
PICTURE_BYTES = 2_600_000  # of all grids, in base64
MAX_PIXELS = 64_000_000  # of a grid's file


def report_runs(targets: Sequence[str], out: Path, *, progress: Progress) -> list[tuple[str, str]]:
    """Write a report of one run, or of several together.

    Args:
      targets: folders.
      out: the HTML file.
    Returns: rows for the user.
    Raises: DamageError: a file of a run is not what the trainer writes.
    """
    runs = list[RunFacts]()
    names = [Path(target).resolve().name for target in targets]
    for target, name in zip(targets, names, strict=True):
        progress("read", len(runs), len(targets))
        runs.append(read_run(Path(target), name if names.count(name) == 1 else target))
    progress("read", len(runs), len(targets))
    alerts = find_alerts(runs)
    size = write_page(out, render_runs(runs, alerts))
    return [("size", readable_size(size)), *[("warning", alert.text) for alert in alerts]]


def find_alerts(runs: Sequence[RunFacts]) -> list[Alert]:
    """The warnings of all runs, which name the run where there are several."""
    prefixes = [f"{run.name}: " if len(runs) > 1 else "" for run in runs]
    pairs = zip(prefixes, runs, strict=True)
    return [Alert(f"{prefix}{alert.text}", alert.section) for prefix, run in pairs for alert in warnings_of(run)]


def render_runs(runs: Sequence[RunFacts], alerts: Sequence[Alert], *, version: str = "") -> str:
    """The page of runs, as HTML.

    Args:
      version: of a served page, which reloads itself when there is another; "": the page is a file.
    Raises: DamageError: a grid is not an image.
    """
    is_single, charts, grids = len(runs) == 1, draw_charts(runs), _choose_grids(runs)
    evaluations = [(run, values) for run in runs for values in run.evaluations]
    titles = {"summary": "Summary", "losses": "Losses", "steps": "Updates", "speed": "Speed and memory"}
    titles |= {"pictures": "Pictures"} if grids else {}
    titles |= {"evaluations": "Evaluations"} if evaluations else {}
    titles |= {"recipe": "Recipe" if is_single else "Recipes", "stores": "Stores", "starts": "Starts and versions"}
    return render_page(
        "run.html",
        title=("Run " if is_single else "Runs ") + ", ".join(run.name for run in runs),
        sections=[Section(*section) for section in {**titles, "rules": "Rules"}.items()],
        alerts=alerts,
        page_version=version,
        runs=runs,
        tiles=_tiles(runs[0]) if is_single else [],
        summary=_side_by_side([_figures(run) for run in runs]),
        charts=charts,
        grids=grids,
        num_grids=sum(len(run.grids) for run in runs),
        scores=[name for name in SCORES if any(name in values for _, values in evaluations)],
        evaluations=evaluations,
        differing=differing([run.recipe for run in runs]),
        rules=[(rule.when,) for rule in RULES],
    )


def _side_by_side(columns: Sequence[dict[str, str]]) -> list[tuple[str, ...]]:
    """A row for each name, a value for each run."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(column.get(name, ABSENT) for column in columns)) for name in names]


def _figures(run: RunFacts) -> dict[str, str]:
    metrics, columns = run.metrics, run.metrics.columns
    figures = {"state": run.state, "steps": f"{count(metrics.last_step)} of {count(run.num_steps)}"}
    figures |= {"model": str(run.key("model.name")), "objective": str(run.key("objective.kind"))}
    if not len(metrics):
        return figures
    images, epoch, line_seconds = (columns[name][-1] for name in ("num_images", "epoch", "seconds_per_step"))
    figures["images seen"] = f"{count(int(np.nan_to_num(images)))}, in pass {np.nan_to_num(epoch) + 1:.0f}"
    figures["time in steps"] = readable_time(float(metrics.seconds[-1]))
    if run.state == RUNNING and line_seconds > 0:
        figures["time left at this speed"] = readable_time(line_seconds * (run.num_steps - metrics.last_step))
    figures["training loss, mean of the last tenth"] = number(_last_mean(columns["loss"]))
    for name, column in (("averaged weights", "held_out.averaged_loss"), ("weights", "held_out.loss")):
        losses = columns[column][metrics.is_evaluated]
        if np.isfinite(losses).any():
            best = int(np.nanargmin(losses))
            step = metrics.steps[metrics.is_evaluated][best]
            lowest = (
                f"; lowest {number(losses[best])} at step {step:,}" if losses[best] < losses[-1] else ", the lowest"
            )
            figures[f"held-out loss, {name}"] = number(losses[-1]) + lowest
    speed, memory = columns["images_per_second"], columns["memory_gib"]
    figures["images/s"] = number(float(np.nanmedian(speed))) if np.isfinite(speed).any() else ABSENT
    shares = {"MFU": "mfu", "waiting for batches": "data_wait_share", "GPU busy": "gpu_busy_share"}
    figures |= {name: f"{share:.1%}" for name, column in shares.items() if np.isfinite(share := run.mean(column))}
    if np.isfinite(memory).any():
        figures["peak memory"] = f"{np.nanmax(memory):.2f} GiB"
    for start in run.starts[-1:]:
        figures["trained on"] = f"{start.world_size} x {start.device}" if start.world_size > 1 else start.device
        figures["precision"] = start.precision
    return figures


def _tiles(run: RunFacts) -> list[tuple[str, str]]:
    """The most important figures of a run: value and name."""
    metrics, figures = run.metrics, _figures(run)
    progress = f"{metrics.last_step / run.num_steps:.0%}" if run.num_steps else ABSENT
    names = {
        "training loss, mean of the last tenth": "training loss",
        "held-out loss, averaged weights": "held-out loss",
        "images/s": "images/s",
        "MFU": "MFU",
        "time in steps": "in steps",
        "time left at this speed": "left at this speed",
    }
    tiles = [(figures[name].split(";")[0].split(",")[0], tile) for name, tile in names.items() if name in figures]
    return [(progress, f"of {count(run.num_steps)} steps, {run.state}"), *tiles]


def _last_mean(values: np.ndarray) -> float:
    last = values[-max(1, len(values) // 10) :]
    return float(np.nanmean(last)) if np.isfinite(last).any() else np.nan


def _choose_grids(runs: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """Grids spread evenly over the steps of each run, the last one always, as large as the page allows."""
    each = max(1, MOST_GRIDS // len(runs))
    chosen = [(run, step) for run in runs for step in _spread(sorted(run.grids), each)]
    most_bytes = PICTURE_BYTES // max(1, len(chosen))
    return [{"run": run.name, "step": step, "uri": _grid_uri(run.grids[step], most_bytes)} for run, step in chosen]


def _spread(steps: Sequence[int], most: int) -> list[int]:
    places = np.linspace(len(steps) - 1, 0, min(len(steps), most)).round().astype(int)
    return [steps[place] for place in places[::-1]]


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
