"""``leandit report RUN...``: how runs went, on one page; several in the same charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup
from PIL import Image, UnidentifiedImageError

from .....datasets.errors import DamageError
from ..page import Alert, Section, count, mib, number, render_page, write_page
from ..pictures import webp_uri
from .curves import duration, loss_charts, speed_charts, step_charts
from .facts import SCORES, RunFacts, StoreFacts, read_run
from .pace import weighted_mean
from .recipes import differing, resolved
from .rules import RULES, warnings_of

Progress = Callable[[str, int, int], None]
MOST_GRIDS = 8  # of a page, over all runs; at least the last of each
SIDES_PX = (1100, 900, 700, 500, 350)  # of a grid, the largest whose pictures fit
PICTURE_BYTES = 2_600_000  # of all grids, in base64
MAX_PIXELS = 64_000_000  # of a grid's file


@dataclass(frozen=True)
class Grid:
    """A grid of pictures: its run, its step, and its picture as a URI."""

    run: str
    step: int
    uri: Markup


def report_runs(targets: Sequence[str], out: Path, *, progress: Progress) -> list[tuple[str, str]]:
    """Write a report of one run, or of several together.

    Args:
      targets: folders.
      out: the HTML file.
    Returns: rows for the user.
    Raises: DamageError: a file of a run is not what the trainer writes.
    """
    runs = []
    for place, (target, name) in enumerate(zip(targets, _names(targets), strict=True)):
        progress("read", place, len(targets))
        runs.append(read_run(Path(target), name))
    progress("read", len(targets), len(targets))
    found = [(run, warned) for run in runs for warned in warnings_of(run)]
    prefix = (lambda run: "") if len(runs) == 1 else (lambda run: f"{run.name}: ")
    alerts = [Alert(f"{prefix(run)}{warned.text}", warned.section) for run, warned in found]
    grids = _grids(runs)
    html = render_page(
        "run.html",
        title=("Run " if len(runs) == 1 else "Runs ") + ", ".join(run.name for run in runs),
        sections=_sections(runs, grids),
        alerts=alerts,
        runs=runs,
        tiles=_tiles(runs[0]) if len(runs) == 1 else [],
        stores=_stores(runs),
        summary=_summary(runs),
        losses=loss_charts(runs),
        steps=step_charts(runs),
        speed=speed_charts(runs),
        grids=grids,
        num_grids=sum(len(run.grids) for run in runs),
        scores=_scores(runs),
        between=_between(runs),
        starts=_starts(runs),
        versions=_versions(runs),
        rules=[(rule.when,) for rule in RULES],
    )
    return [("size", mib(write_page(out, html))), *[("warning", alert.text) for alert in alerts]]


def _names(targets: Sequence[str]) -> list[str]:
    """The folders' names where they differ, else the paths."""
    names = [Path(target).resolve().name for target in targets]
    return names if len(set(names)) == len(names) else list(targets)


def _sections(runs: Sequence[RunFacts], grids: Sequence[Grid]) -> list[Section]:
    sections = [Section("summary", "Summary"), Section("losses", "Losses"), Section("steps", "Updates")]
    sections.append(Section("speed", "Speed and memory"))
    sections += [Section("pictures", "Pictures")] if grids else []
    sections += [Section("evaluations", "Evaluations")] if any(run.evaluations for run in runs) else []
    sections += [Section("recipe", "Recipe" if len(runs) == 1 else "Recipes")]
    return [*sections, Section("stores", "Stores"), Section("starts", "Starts and versions"), Section("rules", "Rules")]


def _summary(runs: Sequence[RunFacts]) -> list[tuple[str, ...]]:
    """A row for each figure, a column for each run; figures that no run has are left out."""
    columns = [_figures(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(column.get(name, "-") for column in columns)) for name in names]


def _figures(run: RunFacts) -> dict[str, str]:
    metrics, evaluations = run.metrics, run.metrics.held_out
    figures = {"state": run.state, "steps": f"{count(run.last_step)} of {count(run.steps)}"}
    figures |= {"model": str(run.key("model.name")), "objective": str(run.key("objective.kind"))}
    if not len(metrics):
        return figures
    images, epoch = metrics.columns["num_images"][-1], metrics.columns["epoch"][-1]
    figures["images seen"] = f"{count(int(np.nan_to_num(images)))}, in pass {np.nan_to_num(epoch) + 1:.0f}"
    figures["time in steps"] = duration(float(metrics.seconds[-1]))
    figures["training loss, mean of the last tenth"] = number(_last_mean(metrics.columns["loss"]))
    for name, column in (("held-out loss, averaged weights", "averaged_loss"), ("held-out loss, weights", "loss")):
        losses = evaluations.columns[column]
        if np.isfinite(losses).any():
            best = int(np.nanargmin(losses))
            lowest = f"; lowest {number(float(losses[best]))} at step {evaluations.steps[best]:,}"
            figures[name] = number(float(losses[-1])) + (lowest if losses[best] < losses[-1] else ", the lowest")
    speed = metrics.columns["images_per_second"]
    figures["images/s"] = number(float(np.nanmedian(speed))) if np.isfinite(speed).any() else "-"
    for name, column in (("MFU", "mfu"), ("waiting for batches", "data_wait_share"), ("GPU busy", "gpu_busy_share")):
        share = weighted_mean(run, column)
        if np.isfinite(share):
            figures[name] = f"{share:.1%}"
    memory = metrics.columns["memory_gib"]
    if np.isfinite(memory).any():
        figures["peak memory"] = f"{np.nanmax(memory):.2f} GiB"
    if run.starts:
        last = run.starts[-1]
        figures["trained on"] = f"{last.world_size} x {last.device}" if last.world_size > 1 else last.device
        figures["precision"] = last.precision
    return figures


def _tiles(run: RunFacts) -> list[tuple[str, str]]:
    """The most important figures of a run: value and name."""
    metrics, averaged = run.metrics, run.metrics.held_out.columns["averaged_loss"]
    tiles = [(f"{run.last_step / run.steps:.0%}" if run.steps else "-", f"of {count(run.steps)} steps, {run.state}")]
    if not len(metrics):
        return tiles
    tiles.append((number(_last_mean(metrics.columns["loss"])), "training loss"))
    tiles += [(number(float(averaged[-1])), "held-out loss")] if len(averaged) else []
    tiles.append((number(float(np.nanmedian(metrics.columns["images_per_second"]))), "images/s"))
    mfu = weighted_mean(run, "mfu")
    tiles += [(f"{mfu:.1%}", "MFU")] if np.isfinite(mfu) else []
    return [*tiles, (duration(float(metrics.seconds[-1])), "in steps")]


def _stores(runs: Sequence[RunFacts]) -> list[tuple[str, list[StoreFacts]]]:
    """The stores of runs; runs that read the same ones stand together."""
    found: list[tuple[str, list[StoreFacts]]] = []
    for run in runs:
        place = next((place for place, (_, stores) in enumerate(found) if stores == run.stores), None)
        if place is None:
            found.append((run.name, run.stores))
        else:
            found[place] = (f"{found[place][0]}, {run.name}", run.stores)
    return found


def _last_mean(values: np.ndarray) -> float:
    known = values[-max(1, len(values) // 10) :]
    known = known[np.isfinite(known)]
    return float(known.mean()) if len(known) else float("nan")


def _grids(runs: Sequence[RunFacts]) -> list[Grid]:
    """Grids spread over the steps of each run, as large as the page allows."""
    each = max(1, MOST_GRIDS // len(runs))
    chosen = [(run, step) for run in runs for step in _spread(sorted(run.grids), each)]
    images = [(run.name, step, _pixels(run.grids[step])) for run, step in chosen]
    grids: list[Grid] = []
    for side_px in SIDES_PX:
        grids = [Grid(name, step, Markup(webp_uri(pixels, side_px=side_px))) for name, step, pixels in images]
        if sum(len(grid.uri) for grid in grids) <= PICTURE_BYTES:
            break
    return grids


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """At most so many, evenly; the last always."""
    if len(steps) <= most:
        return list(steps)
    places = np.linspace(0, len(steps) - 1, most).round().astype(int) if most > 1 else [len(steps) - 1]
    return [steps[place] for place in places]


def _pixels(path: Path) -> np.ndarray:
    """(height, width, 3) uint8 of a grid.

    Raises: DamageError: it is no picture, or one of more pixels than a grid has.
    """
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width}x{image.height} px")
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DamageError(f"grid '{path}': it cannot be read ({error}). Remove it.") from error


def _scores(runs: Sequence[RunFacts]) -> tuple[list[str], list[tuple[str, ...]]] | None:
    """Head and rows of the table of evaluations."""
    found = [(run, one) for run in runs for one in run.evaluations]
    if not found:
        return None
    names = [name for name in SCORES if any(name in one.scores for _, one in found)]
    head = (["run"] if len(runs) > 1 else []) + ["file", "pictures", "reference", *names]
    rows = [
        (
            *([run.name] if len(runs) > 1 else []),
            one.file,
            one.pictures,
            one.reference,
            *(f"{one.scores[name]:.5g}" if name in one.scores else "-" for name in names),
        )
        for run, one in found
    ]
    return head, rows


def _between(runs: Sequence[RunFacts]) -> list[tuple[str, ...]]:
    """Keys that differ between the runs."""
    return differing([resolved(run.recipe) for run in runs]) if len(runs) > 1 else []


def _starts(runs: Sequence[RunFacts]) -> list[tuple[str, ...]]:
    """A row for each start of each run."""
    return [
        (
            *([run.name] if len(runs) > 1 else []),
            start.time.replace("T", " ").removesuffix("+00:00"),
            count(start.from_step),
            count(max(0, start.reached_step - start.from_step)),
            start.machine,
            start.device,
            f"{start.world_size} on {start.num_machines}, {start.strategy}, {start.precision}",
        )
        for run in runs
        for start in run.starts
    ]


def _versions(runs: Sequence[RunFacts]) -> list[tuple[str, str]]:
    """Each set of versions, with the starts that had it."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for place, start in enumerate(run.starts, 1):
            versions = ", ".join(f"{name} {version}" for name, version in start.versions.items())
            found.setdefault(versions, []).append(f"{run.name} {place}" if len(runs) > 1 else str(place))
    return [(f"start {', '.join(which)}", versions) for versions, which in found.items()]
