"""``leandit report RUN...``: how runs went, on one page; several in the same charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image, UnidentifiedImageError

from ....datasets.errors import DamageError
from ..pictures import spread
from ..templating import rows_of, side_by_side
from .page import render_page, short_names, webp_uri, write_page
from .rules import Alert, alerts_of, rules_of
from .run_charts import draw_charts
from .run_facts import SCORES, RunFacts, differing

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
    paths = [str(Path(target).resolve()) for target in targets]
    for target, name in zip(targets, short_names(paths), strict=True):
        progress("read", len(runs), len(targets))
        runs.append(RunFacts(Path(target), name))
    progress("read", len(runs), len(targets))
    alerts = find_alerts(runs)
    return write_page(out, render_runs(runs, alerts), alerts)


def find_alerts(runs: Sequence[RunFacts]) -> list[Alert]:
    """The warnings of all runs, which name the run where there are several."""
    return alerts_of("run", runs)


def render_runs(runs: Sequence[RunFacts], alerts: Sequence[Alert], *, version: str = "") -> str:
    """The page of runs, as HTML.

    Args:
      version: of a served page, which reloads itself when there is another; "": the page is a file.
    Raises: DamageError: a grid is not an image.
    """
    is_single, grids = len(runs) == 1, _choose_grids(runs)
    evaluations = [(run, values) for run in runs for values in run.evaluations]
    sections = {"summary": "Summary", "losses": "Losses", "steps": "Updates", "speed": "Speed and memory"}
    sections |= {"pictures": "Pictures"} if grids else {}
    sections |= {"evaluations": "Evaluations"} if evaluations else {}
    sections |= {"recipe": "Recipe" if is_single else "Recipes", "stores": "Stores", "starts": "Starts and versions"}
    return render_page(
        "run.html",
        title=("Run " if is_single else "Runs ") + ", ".join(run.name for run in runs),
        sections=sections | {"rules": "Rules"},
        alerts=alerts,
        page_version=version,
        runs=runs,
        summary=side_by_side([rows_of("run.txt", run=run)["summary"] for run in runs]),
        charts=draw_charts(runs),
        grids=grids,
        scores=[name for name in SCORES if any(name in values for _, values in evaluations)],
        evaluations=evaluations,
        differing=differing([run.recipe for run in runs]),
        rules=rules_of("run"),
    )


def _choose_grids(runs: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """Grids spread evenly over the steps of each run, the last one always, as large as the page allows."""
    each, chosen = max(1, MOST_GRIDS // len(runs)), list[tuple[RunFacts, int]]()
    for run in runs:
        steps = sorted(run.grids)
        chosen += [(run, steps[len(steps) - 1 - place]) for place in spread(len(steps), each)[::-1]]
    most_bytes = PICTURE_BYTES // max(1, len(chosen))
    return [{"run": run.name, "step": step, "uri": _grid_uri(run.grids[step], most_bytes)} for run, step in chosen]


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
