"""``leandit report RUN``: how a run went, on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image, UnidentifiedImageError

from ....datasets.errors import DamageError
from ....datasets.order.slices import spread
from ..templating import rows_of
from .page import render_page, webp_uri, write_page
from .rules import Alert, alerts_of, rules_of
from .run_charts import draw_charts
from .run_facts import SCORES, RunFacts

MOST_GRIDS = 8
GRID_SIDE_PX = 1100  # at most
GRID_BYTES = 2_600_000  # of all grids, in base64
MAX_PIXELS = 64_000_000  # of a grid's file


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
