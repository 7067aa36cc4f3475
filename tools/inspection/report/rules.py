"""What a reader of a report must know first: ``templates/rules.toml`` is the table of rules, with limits and sentences.

This module evaluates it, and holds the functions that its sentences call.
"""

from __future__ import annotations

import functools
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jinja2
import numpy as np

from ....datasets.revisions import latent_statistics
from ....train.metrics.history import smoothed
from ..store_facts import StoreFacts
from ..templating import TEMPLATES, environment
from .run_facts import RunFacts

MEDIAN_LINES = 21  # odd; around a line, whose median shows whether it is a spike
MOST_STEPS = 5  # that a sentence lists
TABLE = tomllib.loads((TEMPLATES / "rules.toml").read_text())
LIMITS = SimpleNamespace(**TABLE["limits"])


class Alert(NamedTuple):
    """A sentence, and the id of the section of the page that shows more."""

    text: str
    section: str


class Rule(NamedTuple):
    """A row of the table."""

    section: str
    when: str
    sentence: jinja2.Template


@functools.cache
def rules_of(kind: str) -> list[Rule]:
    """The rules of "store" or "run", the gravest first."""
    templates = environment(html=False)
    templates.filters |= {"listed": listed, "steps": steps_named}
    functions = (unusual_channels, cosines, empty_classes, small_classes, diverged, overfits, clipped_share, rates)
    templates.globals |= {function.__name__: function for function in (*functions, spikes)} | {"limits": LIMITS}
    return [
        Rule(section, when.format(**TABLE["limits"]), templates.from_string(sentence))
        for section, when, sentence in TABLE[kind].values()
    ]


def alerts_of(kind: str, facts: StoreFacts | RunFacts) -> list[Alert]:
    """The warnings about a store or a run, in the order of the table."""
    return [
        Alert(line, rule.section)
        for rule in rules_of(kind)
        for line in rule.sentence.render(facts=facts).split("\n")
        if line
    ]


def listed(names: Sequence[str], most: int) -> str:
    """The first names and the number of the others: "a, b, c, and 12 more"."""
    return ", ".join(names[:most]) + (f", and {len(names) - most:,} more" if len(names) > most else "")


def steps_named(steps: Sequence[int] | np.ndarray) -> str:
    """ "step 300", or "steps 300, 400, and 12 more"."""
    return f"step{'s' if len(steps) > 1 else ''} " + listed([f"{step:,}" for step in steps], MOST_STEPS)


# ------------------------------------------------------------------------------------------------------------- stores


def unusual_channels(facts: StoreFacts) -> list[str]:
    """What is beyond the limits of the statistics."""
    statistics, unusual = facts.statistics, list[str]()
    unusual_means, unusual_stds = latent_statistics.unusual_channels(statistics.channel_mean, statistics.channel_std)
    for channel in facts.suspicious_channels:
        if channel in unusual_stds:
            unusual.append(
                f"channel {channel}'s standard deviation is {statistics.channel_std[channel]:.3g}, expected 1"
            )
        if channel in unusual_means:
            unusual.append(f"channel {channel}'s mean is {statistics.channel_mean[channel]:.3g}, expected 0")
    return unusual


def cosines(facts: StoreFacts) -> dict[str, float]:
    """The smallest cosine of captions and features with what the encoder gave, where it was measured."""
    texts = facts.spec.text_encoders if facts.captions else []
    measured = {f"captions {one.name}".strip(): facts.caption_quality(one) for one in texts}
    measured |= {f"feature {name}": feature for name, feature in facts.features.items()}
    return {name: one["min_cosine"] for name, one in measured.items() if one["min_cosine"] is not None}


def empty_classes(facts: StoreFacts) -> list[str]:
    """Names of the classes without a record."""
    labels = [] if facts.classes is None else np.flatnonzero(facts.classes == 0).tolist()
    return [facts.store.class_names.describe(label) for label in labels]


def small_classes(facts: StoreFacts) -> tuple[list[str], float]:
    """Classes with few records, the smallest first, and the median of all classes."""
    counts = np.zeros(0) if facts.classes is None else facts.classes
    median = float(np.median(counts)) if len(counts) else 0.0
    order = np.argsort(counts, kind="stable")
    small = order[(counts[order] > 0) & (counts[order] < LIMITS.few_of_median * median)].tolist()
    return [f"{facts.store.class_names.describe(label)} has {counts[label]}" for label in small], median


# --------------------------------------------------------------------------------------------------------------- runs


def running_median(y: np.ndarray) -> np.ndarray:
    """The median of the ``MEDIAN_LINES`` points around each one; at the end of a run, of its last points.

    Before the beginning, where losses fall fast, the line goes on point-symmetrically: a trend is no spike.

    Args:
      y: (N,), N at least ``MEDIAN_LINES // 2 + 1``; NaN counts nowhere.
    Returns: (N,); NaN where no point around is a number.
    """
    half = MEDIAN_LINES // 2
    longer = np.pad(y, (half, 0), mode="reflect", reflect_type="odd")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # windows without a number
        median = np.nanmedian(np.lib.stride_tricks.sliding_window_view(longer, MEDIAN_LINES), axis=1)
    return np.pad(median, (0, half), mode="edge")


def spikes(run: RunFacts, column: str, limit: float, without: Sequence[int] | np.ndarray = ()) -> Iterator[Any]:
    """The lines whose value is over ``limit`` times the median of the lines around; nothing in a short run.

    Yields: at most once: the ``steps`` of the lines, the ``highest`` value and how many ``times`` the median it is, and
    the ``excess`` of all over their medians, times the steps of the lines.
    """
    values = run.metrics.columns[column]
    if len(values) < LIMITS.least_lines:
        return
    median = running_median(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = values / median
    ratio[np.asarray(without, int)] = 0.0
    places = np.flatnonzero(ratio > limit)
    if len(places):
        worst = places[np.argmax(ratio[places])]
        excess = float(np.sum((values - median)[places] * run.metrics.widths[places]))
        found = {"steps": run.metrics.steps[places], "excess": excess}
        yield found | {"highest": values[worst], "times": ratio[worst]}


def diverged(run: RunFacts) -> Iterator[Any]:
    """The smoothed loss at the ``end``, and the ``lowest`` with its ``step``, if the end is far above it."""
    losses = smoothed(run.metrics.columns["loss"])
    if len(losses) >= LIMITS.least_lines and np.isfinite(losses).any():
        best = int(np.nanargmin(losses))
        if losses[-1] > LIMITS.diverged * losses[best] > 0:
            yield {"end": losses[-1], "lowest": losses[best], "step": run.metrics.steps[best]}


def overfits(run: RunFacts) -> Iterator[Any]:
    """The held-out and training losses at the lowest held-out loss and at the end, if they went apart."""
    metrics, rows = run.metrics, np.flatnonzero(run.metrics.is_evaluated)
    losses, train = metrics.columns["held_out.loss"][rows], smoothed(metrics.columns["loss"])
    if len(losses) > LIMITS.risen_evaluations and np.isfinite(losses).all():
        best = int(np.argmin(losses))
        has_risen = (losses[-LIMITS.risen_evaluations :] > losses[best] * (1 + LIMITS.risen)).all()
        if has_risen and train[-1] < train[rows[best]]:
            found = {"lowest": losses[best], "step": metrics.steps[rows[best]], "end": losses[-1]}
            yield found | {"train_then": train[rows[best]], "train_end": train[-1]}


def clipped_share(run: RunFacts) -> float:
    """The share of the lines after the warm-up whose gradient norm is above the limit; 0 of a short run."""
    limit, warm = run.key("run.grad_clip"), run.key("schedule.warmup_steps")
    norms = run.metrics.columns["grad_norm"][run.metrics.steps > (warm if isinstance(warm, int) else 0)]
    norms = norms[np.isfinite(norms)]
    is_known = isinstance(limit, (int, float)) and limit > 0 and len(norms) >= LIMITS.least_lines
    return float((norms > limit).mean()) if is_known else 0.0


def rates(run: RunFacts) -> Iterator[tuple[float, float]]:
    """The median of the images a second of the last lines, and of all; nothing in a short run."""
    values = run.metrics.columns["images_per_second"]
    if len(values) >= LIMITS.least_lines:
        yield float(np.nanmedian(values[-max(5, len(values) // 20) :])), float(np.nanmedian(values))
