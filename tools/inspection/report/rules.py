"""What a reader of a report must know first.

``templates/rules.toml`` is the table of all rules with their limits and sentences. A function of the same name returns
the values of the sentence: one for each warning, none where nothing is wrong.
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ....train.metrics.reader import NOT_BEGUN, RUNNING, STOPPED, smoothed
from ..store_facts import MEAN_LIMIT, STD_LIMITS, StoreFacts
from ..templating import TEMPLATES, share, things
from .run_facts import RunFacts

MEDIAN_LINES = 21  # around a line, whose median shows whether it is a spike
MOST_STEPS, MOST_NAMES = 5, 3  # that a sentence lists
TABLE = tomllib.loads((TEMPLATES / "rules.toml").read_text())
LIMITS = SimpleNamespace(**TABLE["limits"])
Found = Iterable[Mapping[str, Any]]


class Alert(NamedTuple):
    """A sentence, and the id of the section of the page that shows more."""

    text: str
    section: str


class Rule(NamedTuple):
    """A row of the table, and the function that finds its values in the facts of a store or a run."""

    section: str
    when: str
    sentence: str
    find: Callable[[Any], Found]


def alerts_of(rules: Sequence[Rule], every: Sequence[StoreFacts] | Sequence[RunFacts]) -> list[Alert]:
    """The warnings about stores or runs, in the order of the table; they name it where there are several."""
    return [
        Alert((f"{facts.name}: " if len(every) > 1 else "") + rule.sentence.format(**values), rule.section)
        for facts in every
        for rule in rules
        for values in rule.find(facts)
    ]


def rules_of(kind: str, finders: Mapping[str, Callable[[Any], Found]]) -> list[Rule]:
    """The rules of the table for "store" or "run"."""
    assert finders.keys() == TABLE[kind].keys()
    return [
        Rule(section, when.format(**TABLE["limits"]), sentence, finders[name])
        for name, (section, when, sentence) in TABLE[kind].items()
    ]


def _where(condition: object, **values: Any) -> list[dict[str, Any]]:
    return [values] if condition else []


def _listed(names: Sequence[str], most: int) -> str:
    """The first names and the number of the others: "a, b, c, and 12 more"."""
    return ", ".join(names[:most]) + (f", and {len(names) - most:,} more" if len(names) > most else "")


# ------------------------------------------------------------------------------------------------------------- stores


def _channels(facts: StoreFacts) -> Found:
    unusual = list[str]()
    for channel in facts.suspicious_channels:
        mean, std = facts.statistics.channel_mean[channel], facts.statistics.channel_std[channel]
        if not STD_LIMITS[0] <= std <= STD_LIMITS[1]:
            unusual.append(f"channel {channel}'s standard deviation is {std:.3g}, expected 1")
        if abs(mean) > MEAN_LIMIT:
            unusual.append(f"channel {channel}'s mean is {mean:.3g}, expected 0")
    return _where(unusual, unusual=_listed(unusual, MOST_NAMES))


def _self_check(facts: StoreFacts) -> Found:
    check, limit = facts.self_check, facts.min_psnr_db
    return _where(check and limit is not None and check["median_psnr_db"] < limit, check=check, limit=limit)


def _rejected(facts: StoreFacts) -> Found:
    rejected, planned = facts.records["num_rejected"], facts.records["num_planned"]
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in facts.records["rejects"].items())
    were = f"{things(rejected, 'image')} {'was' if rejected == 1 else 'were'}"
    return _where(rejected, were=were, share=share(rejected, planned), planned=planned, reasons=reasons)


def _cut(facts: StoreFacts) -> Found:
    for one in facts.spec.text_encoders if facts.used_captions.num_rows else ():
        cut, distinct = facts.used_lengths(one)["num_truncated"], facts.used_captions.num_rows
        encoder = f" for the encoder '{one.name}'" if one.name else ""
        values = {"share": share(cut, distinct), "cut": cut, "distinct": distinct, "encoder": encoder}
        yield from _where(cut, **values, max_tokens=one.spec.max_tokens)


def _repeated(facts: StoreFacts) -> Found:
    captions, stored = facts.captions, facts.records["num_stored"]
    if captions and stored and captions["most_uses"] >= max(LIMITS.least_equal, LIMITS.one_caption * stored):
        yield {"uses": captions["most_uses"], "stored": stored, "text": captions["repeated"][0][0][:80]}


def _empty_captions(facts: StoreFacts) -> Found:
    if facts.captions and facts.captions["num_empty"]:
        yield {"share": share(facts.captions["num_empty"], facts.captions["num_uses"])}


def _cosines(facts: StoreFacts) -> Found:
    texts = facts.spec.text_encoders if facts.captions else []
    measured = {f"captions {one.name}".strip(): facts.caption_quality(one) for one in texts}
    measured |= {f"feature {name}": feature for name, feature in facts.features.items()}
    cosines = {name: quality["min_cosine"] for name, quality in measured.items() if quality["min_cosine"] is not None}
    return [{"name": name, "cosine": cosine} for name, cosine in cosines.items() if cosine < LIMITS.least_cosine]


def _empty_classes(facts: StoreFacts) -> Found:
    if facts.classes is not None:
        empty = np.flatnonzero(facts.classes == 0).tolist()
        names = ", ".join(map(facts.store.class_names.describe, empty[:MOST_NAMES]))
        yield from _where(empty, empty=len(empty), classes=len(facts.classes), names=names)


def _small_classes(facts: StoreFacts) -> Found:
    if (counts := facts.classes) is not None:
        median = float(np.median(counts))
        order = np.argsort(counts, kind="stable")
        small = order[(counts[order] > 0) & (counts[order] < LIMITS.few_of_median * median)].tolist()
        names = [f"{facts.store.class_names.describe(label)} has {counts[label]}" for label in small]
        yield from _where(small, median=median, names=_listed(names, MOST_NAMES))


def _enlarged(facts: StoreFacts) -> Found:
    enlarged, stored = facts.sources["num_enlarged"], facts.records["num_stored"]
    return _where(enlarged > LIMITS.most_enlarged * stored, share=share(enlarged, stored))


def _copies(facts: StoreFacts) -> Found:
    copies = facts.sources["num_duplicates"]
    return _where(copies, have=f"{things(copies, 'image')} {'has' if copies == 1 else 'have'}")


STORE_RULES = rules_of(
    "store",
    {
        "incomplete": lambda facts: _where(not facts.store.complete, missing=things(facts.num_missing, "record")),
        "unfinished": lambda facts: _where(
            facts.store.complete and facts.store.unfinished_revision, number=facts.store.unfinished_revision
        ),
        "empty": lambda facts: _where(not facts.records["num_stored"]),
        "not_finite": lambda facts: _where(facts.latents["num_nonfinite"], **facts.latents),
        "channels": _channels,
        "self_check": _self_check,
        "rejected": _rejected,
        "cut": _cut,
        "repeated": _repeated,
        "empty_captions": _empty_captions,
        "cosines": _cosines,
        "empty_classes": _empty_classes,
        "small_classes": _small_classes,
        "enlarged": _enlarged,
        "copies": _copies,
    },
)


# --------------------------------------------------------------------------------------------------------------- runs


def running_median(y: np.ndarray, points: int = MEDIAN_LINES) -> np.ndarray:
    """The median of the points around each one; at the end of a run, of its last points.

    Before the beginning, where losses fall fast, the line goes on point-symmetrically: a trend is no spike.

    Args:
      y: (N,), N at least ``points // 2 + 1``; NaN counts nowhere.
      points: odd.
    Returns: (N,); NaN where no point around is a number.
    """
    half = points // 2
    longer = np.pad(y, (half, 0), mode="reflect", reflect_type="odd")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # windows without a number
        median = np.nanmedian(np.lib.stride_tricks.sliding_window_view(longer, points), axis=1)
    return np.pad(median, (0, half), mode="edge")


def _steps(steps: Sequence[int] | np.ndarray) -> str:
    """The steps of a sentence: "step 300", or "steps 300, 400, and 12 more"."""
    return f"step{'s' if len(steps) > 1 else ''} " + _listed([f"{step:,}" for step in steps], MOST_STEPS)


def _spikes(run: RunFacts, column: str, limit: float, without: np.ndarray | None = None) -> list[dict[str, Any]]:
    """Lines whose value is over ``limit`` times the median of the lines around; none in a short run."""
    values, widths = run.metrics.columns[column], run.metrics.widths
    if len(values) < LIMITS.least_lines:
        return []
    median = running_median(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = values / median
    if without is not None:
        ratio[without] = 0.0
    places = np.flatnonzero(ratio > limit)
    worst = places[np.argmax(ratio[places])] if len(places) else 0
    found = {"places": places, "excess": float(np.sum((values - median)[places] * widths[places]))}
    found |= {"limit": limit, "highest": values[worst], "times": ratio[worst]}
    return _where(len(places), steps=_steps(run.metrics.steps[places]), **found)


def _slow_lines(run: RunFacts) -> Found:
    metrics = run.metrics
    for found in _spikes(run, "seconds_per_step", LIMITS.step_spike, run.first_lines):
        end = metrics.steps[found["places"]]
        before = end - metrics.widths[found["places"]]
        causes = {
            "a checkpoint began in": _has_multiple(run.key("run.checkpoint_every"), before, end),
            "an evaluation came just before": np.isin(before, metrics.steps[metrics.is_evaluated]),
            "pictures were drawn just before": _has_multiple(run.key("run.sample_every"), before, before + 1),
        }
        told = ", ".join(f"{cause} {count.sum()} of {len(end)}" for cause, count in causes.items() if count.any())
        yield found | {"share": found["excess"] / metrics.seconds[-1], "causes": told and f"; {told}"}


def _has_multiple(every: object, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Whether a multiple of ``every``, above 0, lies in each range from ``first`` until before ``end``."""
    if not isinstance(every, int) or every < 1:
        return np.zeros(len(first), bool)
    last = (end - 1) // every * every
    return (last >= first) & (last > 0)


def _skipped(run: RunFacts) -> Found:
    skipped, steps = int(np.nansum(run.metrics.columns["skipped_steps"])), run.metrics.last_step
    return _where(skipped > LIMITS.most_skipped * steps, skipped=skipped, share=skipped / max(1, steps))


def _diverged(run: RunFacts) -> Found:
    losses = smoothed(run.metrics.columns["loss"])
    if len(losses) >= LIMITS.least_lines and np.isfinite(losses).any():
        best = int(np.nanargmin(losses))
        is_higher = losses[-1] > LIMITS.diverged * losses[best] > 0
        yield from _where(is_higher, end=losses[-1], lowest=losses[best], step=run.metrics.steps[best])


def _overfits(run: RunFacts) -> Found:
    metrics, rows = run.metrics, np.flatnonzero(run.metrics.is_evaluated)
    losses, train = metrics.columns["held_out.loss"][rows], smoothed(metrics.columns["loss"])
    if len(losses) > LIMITS.risen_evaluations and np.isfinite(losses).all():
        best = int(np.argmin(losses))
        has_risen = (losses[-LIMITS.risen_evaluations :] > losses[best] * (1 + LIMITS.risen)).all()
        values = {"lowest": losses[best], "step": metrics.steps[rows[best]], "end": losses[-1]}
        values |= {"train_then": train[rows[best]], "train_end": train[-1]}
        yield from _where(has_risen and train[-1] < train[rows[best]], **values)


def _average_is_worse(run: RunFacts) -> Found:
    columns, rows = run.metrics.columns, np.flatnonzero(run.metrics.is_evaluated)[-1:]
    for loss, averaged in zip(columns["held_out.loss"][rows], columns["held_out.averaged_loss"][rows], strict=True):
        yield from _where(averaged > loss * (1 + LIMITS.risen), loss=loss, averaged=averaged)


def _clipped(run: RunFacts) -> Found:
    limit, warm = run.key("run.grad_clip"), run.key("schedule.warmup_steps")
    norms = run.metrics.columns["grad_norm"][run.metrics.steps > (warm if isinstance(warm, int) else 0)]
    norms = norms[np.isfinite(norms)]
    if isinstance(limit, (int, float)) and limit and len(norms) >= LIMITS.least_lines:
        clipped = float((norms > limit).mean())
        yield from _where(clipped > LIMITS.most_clipped, share=clipped, limit=limit)


def _slower(run: RunFacts) -> Found:
    rates = run.metrics.columns["images_per_second"]
    if len(rates) >= LIMITS.least_lines:
        last, usual = float(np.nanmedian(rates[-max(5, len(rates) // 20) :])), float(np.nanmedian(rates))
        yield from _where(last < LIMITS.fell * usual, last=last, usual=usual)


def _evaluating(run: RunFacts) -> Found:
    shares = run.metrics.columns["held_out.share"]
    median = float(np.nanmedian(shares)) if np.isfinite(shares).any() else 0.0
    return _where(median > LIMITS.most_evaluating, share=median)


def _resumed(run: RunFacts) -> Found:
    steps = run.restart_steps
    times = "once" if len(steps) == 1 else f"{len(steps)} times"
    repeated = sum(max(0, start.reached_step - start.from_step) for start in run.starts)
    lost = f"; {repeated:,} steps were lost and made again" if repeated else ""
    return _where(steps, times=times, steps=_steps(steps), lost=lost)


def _unfinished(run: RunFacts) -> Found:
    progress = f"at step {run.metrics.last_step:,} of {run.num_steps:,}"
    saved = f"the newest checkpoint is of step {run.checkpoints[-1]:,}" if run.checkpoints else "no checkpoint"
    told = {
        STOPPED: f"it has stopped {progress} before its end; {saved}",
        RUNNING: f"it is still running, {progress}",
        NOT_BEGUN: "it has not reported a step yet",
    }.get(run.state)
    return _where(told, told=told)


def _lines_left_out(run: RunFacts) -> Found:
    told = ["its last line is cut off and was left out"] if run.metrics.is_cut and run.state != RUNNING else []
    if repeated := run.metrics.num_repeated:
        told.append(f"{repeated} lines are of steps that a later line reports again; the later counts")
    return _where(told, told="; ".join(told))


RUN_RULES = rules_of(
    "run",
    {
        "not_finite": lambda run: _where(
            not run.metrics.is_finite.all(), steps=_steps(run.metrics.steps[~run.metrics.is_finite])
        ),
        "skipped": _skipped,
        "diverged": _diverged,
        "overfits": _overfits,
        "average_is_worse": _average_is_worse,
        "loss_spikes": lambda run: _spikes(run, "loss", LIMITS.loss_spike),
        "norm_spikes": lambda run: _spikes(run, "grad_norm", LIMITS.norm_spike),
        "clipped": _clipped,
        "waiting": lambda run: _where((waiting := run.mean("data_wait_share")) > LIMITS.most_wait, share=waiting),
        "idle_gpu": lambda run: _where((busy := run.mean("gpu_busy_share")) < LIMITS.least_busy, share=busy),
        "slower": _slower,
        "slow_lines": _slow_lines,
        "evaluating": _evaluating,
        "resumed": _resumed,
        "unfinished": _unfinished,
        "damaged": lambda run: _where(run.damaged, names=_listed(run.damaged, MOST_STEPS)),
        "grids_wait": lambda run: _where(run.num_waiting and run.state != RUNNING, waiting=run.num_waiting),
        "lines_left_out": _lines_left_out,
    },
)
