"""What a reader of a run must know first: one table of rules, each with its limit, and what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .facts import RunFacts
from .lines import running_median, smoothed
from .pace import LEAST_LINES, MOST_NAMED, STEP_SPIKE, named_steps, slow_lines, weighted_mean

MOST_SKIPPED = 0.001  # of the updates; the search of the loss scale at the beginning skips a few
MOST_WAIT = 0.01  # of the time
NORM_SPIKE, LOSS_SPIKE = 5.0, 2.0  # times the median of the lines around
RISEN = 0.01  # a loss that is so much higher, as a share, is higher
RISEN_EVALUATIONS = 3  # in a row
DIVERGED = 1.2  # times the lowest
FELL = 0.8  # of the median images a second
LEAST_BUSY = 0.9  # of the time
MOST_CLIPPED = 0.9  # of the lines after the warm-up
MOST_EVALUATING = 0.01  # of the time


@dataclass(frozen=True)
class Rule:
    """A rule.

    Args:
      when: it warns, with its limit, in words.
      check: a sentence, or None.
      section: id of the part of the page that shows more.
    """

    when: str
    check: Callable[[RunFacts], str | None]
    section: str


@dataclass(frozen=True)
class Warned:
    """A warning of a run."""

    text: str
    section: str


def warnings_of(run: RunFacts) -> list[Warned]:
    """The sentences of all rules that a run breaks, in the order of the table."""
    return [Warned(text, rule.section) for rule in RULES if (text := rule.check(run))]


def _not_finite(run: RunFacts) -> str | None:
    evaluations = run.metrics.held_out
    held_out = evaluations.steps[~np.isfinite(evaluations.columns["loss"])].tolist()
    if bad := sorted({*run.metrics.not_finite, *held_out}):
        return f"a loss is not finite at {named_steps(bad)}"
    return None


def _skipped(run: RunFacts) -> str | None:
    skipped = int(np.nansum(run.metrics.columns["skipped_steps"]))
    if skipped <= MOST_SKIPPED * run.last_step:
        return None
    return f"{skipped} updates were skipped, {skipped / run.last_step:.2%} of the steps, because gradients overflowed"


def _diverged(run: RunFacts) -> str | None:
    losses = smoothed(run.metrics.columns["loss"])
    if len(losses) < LEAST_LINES or not np.isfinite(losses).any():
        return None
    place = int(np.nanargmin(losses))
    if not losses[-1] > DIVERGED * losses[place] > 0:
        return None
    return (
        f"the smoothed loss is {losses[-1]:.4g} at the end, after a lowest of {losses[place]:.4g} around step "
        f"{run.metrics.steps[place]:,}"
    )


def _spikes(column: str, what: str, limit: float) -> Callable[[RunFacts], str | None]:
    def check(run: RunFacts) -> str | None:
        values = run.metrics.columns[column]
        if len(values) < LEAST_LINES:
            return None
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = values / running_median(values)
        places = np.flatnonzero(ratio > limit)
        if not len(places):
            return None
        worst = places[np.argmax(ratio[places])]
        where = named_steps(run.metrics.steps[places].tolist())
        return (
            f"the {what} is over {limit:g} times the median around it at {where}; "
            f"the highest is {values[worst]:.4g}, {ratio[worst]:.3g} times"
        )

    return check


def _overfitting(run: RunFacts) -> str | None:
    evaluations = run.metrics.held_out
    losses = evaluations.columns["loss"]
    if len(losses) <= RISEN_EVALUATIONS or not np.isfinite(losses).all():
        return None
    best = int(np.argmin(losses))
    if not (losses[-RISEN_EVALUATIONS:] > losses[best] * (1 + RISEN)).all():
        return None
    train = smoothed(run.metrics.columns["loss"])
    then = train[min(np.searchsorted(run.metrics.steps, evaluations.steps[best]), len(train) - 1)]
    if not train[-1] < then:
        return None
    return (
        f"the held-out loss has risen from {losses[best]:.4g} at step {evaluations.steps[best]:,} to {losses[-1]:.4g} "
        f"while the training loss fell from {then:.4g} to {train[-1]:.4g}: the model learns its records by heart"
    )


def _average_is_worse(run: RunFacts) -> str | None:
    columns = run.metrics.held_out.columns
    if not len(columns["loss"]):
        return None
    loss, averaged = columns["loss"][-1], columns["averaged_loss"][-1]
    if not averaged > loss * (1 + RISEN):
        return None
    return (
        f"the averaged weights have a held-out loss of {averaged:.4g}, the weights themselves {loss:.4g}: the average "
        "is longer than the run is old, or the loss still falls fast"
    )


def _data_wait(run: RunFacts) -> str | None:
    share = weighted_mean(run, "data_wait_share")
    return f"{share:.1%} of the time was spent waiting for batches" if share > MOST_WAIT else None


def _idle_gpu(run: RunFacts) -> str | None:
    share = weighted_mean(run, "gpu_busy_share")
    return f"the GPU was busy for {share:.1%} of the time only" if share < LEAST_BUSY else None


def _slower(run: RunFacts) -> str | None:
    rates = run.metrics.columns["images_per_second"]
    if len(rates) < LEAST_LINES:
        return None
    last, usual = float(np.nanmedian(rates[-max(5, len(rates) // 20) :])), float(np.nanmedian(rates))
    return f"the last lines have {last:.4g} images/s, the median is {usual:.4g}" if last < FELL * usual else None


def _clipped(run: RunFacts) -> str | None:
    limit, warm = run.key("run.grad_clip"), run.key("schedule.warmup_steps")
    if not isinstance(limit, (int, float)) or not limit:
        return None
    norms = run.metrics.columns["grad_norm"][run.metrics.steps > (warm if isinstance(warm, int) else 0)]
    norms = norms[np.isfinite(norms)]
    share = float((norms > limit).mean()) if len(norms) >= LEAST_LINES else 0.0
    if share <= MOST_CLIPPED:
        return None
    return (
        f"{share:.0%} of the lines have a gradient norm above run.grad_clip {limit:g}: nearly all updates are clipped"
    )


def _evaluating(run: RunFacts) -> str | None:
    shares = run.metrics.held_out.columns["share"]
    share = float(np.nanmedian(shares)) if np.isfinite(shares).any() else 0.0
    return f"evaluations take {share:.1%} of the time; raise run.evaluate_every" if share > MOST_EVALUATING else None


def _restarts(run: RunFacts) -> str | None:
    if not run.restart_steps:
        return None
    times = "once" if len(run.restart_steps) == 1 else f"{len(run.restart_steps)} times"
    made = f"; {run.num_repeated_steps:,} steps were lost and made again" if run.num_repeated_steps else ""
    return f"it was resumed {times}, from {named_steps(run.restart_steps)}{made}"


def _unfinished(run: RunFacts) -> str | None:
    progress = f"at step {run.last_step:,} of {run.steps:,}"
    if run.state == "stopped":
        saved = f"; the newest checkpoint is of step {run.checkpoints[-1]:,}" if run.checkpoints else "; no checkpoint"
        return f"it has stopped {progress} before its end{saved}"
    if run.state == "running":
        return f"it is still running, {progress}"
    return "it has not reported a step yet" if run.state == "not begun" else None


def _damaged(run: RunFacts) -> str | None:
    return f"checkpoints were damaged and set aside: {', '.join(run.damaged[:MOST_NAMED])}" if run.damaged else None


def _grids_wait(run: RunFacts) -> str | None:
    if not run.num_waiting or run.state == "running":
        return None
    return (
        f"{run.num_waiting} grids of pictures are not decoded; 'python -m leandit.tools.sample.decode_grids "
        "RUN/samples' does it"
    )


def _file(run: RunFacts) -> str | None:
    found = []
    if run.metrics.num_cut and run.state != "running":
        found.append("its last line is cut off and was left out")
    if run.metrics.num_repeated:
        found.append(f"{run.metrics.num_repeated} lines are of steps that a later line reports again; the later counts")
    return f"metrics.jsonl: {'; '.join(found)}" if found else None


RULES = (
    Rule("a loss, gradient or term is NaN or infinite", _not_finite, "losses"),
    Rule(f"skipped updates are more than {MOST_SKIPPED:.1%} of the steps", _skipped, "steps"),
    Rule(f"the smoothed loss ends above {DIVERGED:g} times its lowest", _diverged, "losses"),
    Rule(
        f"the last {RISEN_EVALUATIONS} held-out losses are {RISEN:.0%} above the lowest, and the training loss fell",
        _overfitting,
        "losses",
    ),
    Rule(
        f"the last held-out loss of the average is {RISEN:.0%} above that of the weights", _average_is_worse, "losses"
    ),
    Rule(
        f"a loss is over {LOSS_SPIKE:g} times the median of the lines around",
        _spikes("loss", "loss", LOSS_SPIKE),
        "losses",
    ),
    Rule(
        f"a gradient norm is over {NORM_SPIKE:g} times the median of the lines around",
        _spikes("grad_norm", "gradient norm", NORM_SPIKE),
        "steps",
    ),
    Rule(f"more than {MOST_CLIPPED:.0%} of the lines after the warm-up are clipped", _clipped, "steps"),
    Rule(
        f"waiting for batches takes over {MOST_WAIT:.0%} of the time, without the first line of each start",
        _data_wait,
        "speed",
    ),
    Rule(f"the GPU is busy for less than {LEAST_BUSY:.0%} of the time", _idle_gpu, "speed"),
    Rule(f"the last lines are slower than {FELL:.0%} of the median", _slower, "speed"),
    Rule(
        f"the steps of a line take over {STEP_SPIKE:g} times the median of the lines around, without the first line of "
        "each start",
        slow_lines,
        "speed",
    ),
    Rule(f"evaluations take over {MOST_EVALUATING:.0%} of the time", _evaluating, "speed"),
    Rule("the run was resumed", _restarts, "starts"),
    Rule("the run is not finished", _unfinished, "summary"),
    Rule("a checkpoint was damaged", _damaged, "starts"),
    Rule("grids wait for their decoder, and the run does not go on", _grids_wait, "pictures"),
    Rule("metrics.jsonl has lines that do not count", _file, "losses"),
)
