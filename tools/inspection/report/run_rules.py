"""What a reader of a run must know first: a table of rules, each with its limit and its check."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ....train.metrics.reader import NOT_BEGUN, RUNNING, STOPPED, smoothed
from .page import Alert
from .run_facts import RunFacts

MOST_SKIPPED = 0.001  # of the updates; the search of the loss scale at the beginning skips a few
MOST_WAIT = 0.01  # of the time
NORM_SPIKE, LOSS_SPIKE, STEP_SPIKE = 5.0, 2.0, 3.0  # times the median of the lines around
RISEN = 0.01  # a loss that is so much higher, as a share, is higher
RISEN_EVALUATIONS = 3  # in a row
DIVERGED = 1.2  # times the lowest
FELL = 0.8  # of the median images a second
LEAST_BUSY = 0.9  # of the time
MOST_CLIPPED = 0.9  # of the lines after the warm-up
MOST_EVALUATING = 0.01  # of the time
LEAST_LINES = 20  # of which a trend is read
MEDIAN_LINES = 21  # around a line, whose median shows whether it is a spike
MOST_NAMED = 5  # steps in a message
Check = Callable[[RunFacts], str | None]


@dataclass(frozen=True)
class Rule:
    """A rule.

    Args:
      section: id of the part of the page that shows more.
      when: it warns, with its limit.
      check: returns the warning, or None.
    """

    section: str
    when: str
    check: Check


RULES = list[Rule]()


def warnings_of(run: RunFacts) -> list[Alert]:
    """The warnings of all rules that a run breaks, in the order of the table."""
    return [Alert(text, rule.section) for rule in RULES if (text := rule.check(run))]


def rule(section: str, when: str) -> Callable[[Check], Check]:
    """Put a check into the table."""

    def add(check: Check) -> Check:
        RULES.append(Rule(section, when, check))
        return check

    return add


@rule("losses", "a loss, gradient or term is NaN or infinite")
def _not_finite(run: RunFacts) -> str | None:
    steps = run.metrics.steps[~run.metrics.is_finite]
    return f"a loss is not finite at {_named(steps)}" if len(steps) else None


@rule("steps", f"skipped updates are more than {MOST_SKIPPED:.1%} of the steps")
def _skipped(run: RunFacts) -> str | None:
    skipped, steps = int(np.nansum(run.metrics.columns["skipped_steps"])), run.metrics.last_step
    if skipped <= MOST_SKIPPED * steps:
        return None
    return f"{skipped} updates were skipped, {skipped / steps:.2%} of the steps, because gradients overflowed"


@rule("losses", f"the smoothed loss ends above {DIVERGED:g} times its lowest")
def _diverged(run: RunFacts) -> str | None:
    losses = smoothed(run.metrics.columns["loss"])
    if len(losses) < LEAST_LINES or not np.isfinite(losses).any():
        return None
    lowest = int(np.nanargmin(losses))
    if not losses[-1] > DIVERGED * losses[lowest] > 0:
        return None
    return (
        f"the smoothed loss is {losses[-1]:.4g} at the end, after a lowest of {losses[lowest]:.4g} around step "
        f"{run.metrics.steps[lowest]:,}"
    )


@rule(
    "losses",
    f"the last {RISEN_EVALUATIONS} held-out losses are {RISEN:.0%} above the lowest, and the training loss fell",
)
def _overfits(run: RunFacts) -> str | None:
    metrics, rows = run.metrics, np.flatnonzero(run.metrics.is_evaluated)
    losses, train = metrics.columns["held_out.loss"][rows], smoothed(metrics.columns["loss"])
    if len(losses) <= RISEN_EVALUATIONS or not np.isfinite(losses).all():
        return None
    best = int(np.argmin(losses))
    has_risen = (losses[-RISEN_EVALUATIONS:] > losses[best] * (1 + RISEN)).all()
    if not has_risen or not train[-1] < train[rows[best]]:
        return None
    return (
        f"the held-out loss has risen from {losses[best]:.4g} at step {metrics.steps[rows[best]]:,} to "
        f"{losses[-1]:.4g} while the training loss fell from {train[rows[best]]:.4g} to {train[-1]:.4g}: the model "
        "overfits"
    )


@rule("losses", f"the last held-out loss of the average is {RISEN:.0%} above that of the weights")
def _average_is_worse(run: RunFacts) -> str | None:
    columns, rows = run.metrics.columns, np.flatnonzero(run.metrics.is_evaluated)[-1:]
    loss, averaged = columns["held_out.loss"][rows], columns["held_out.averaged_loss"][rows]
    if not (averaged > loss * (1 + RISEN)).any():
        return None
    return (
        f"the averaged weights have a held-out loss of {averaged[0]:.4g}, the weights themselves {loss[0]:.4g}: the "
        "average is longer than the run is old, or the loss still falls fast"
    )


def _spikes(column: str, what: str, limit: float) -> Check:
    def check(run: RunFacts) -> str | None:
        values = run.metrics.columns[column]
        places, ratio, _ = _above_median(values, limit)
        if not len(places):
            return None
        worst = places[np.argmax(ratio[places])]
        return (
            f"the {what} is over {limit:g} times the median around it at {_named(run.metrics.steps[places])}; "
            f"the highest is {values[worst]:.4g}, {ratio[worst]:.3g} times"
        )

    return check


rule("losses", f"a loss is over {LOSS_SPIKE:g} times the median of the lines around")(
    _spikes("loss", "loss", LOSS_SPIKE)
)
rule("steps", f"a gradient norm is over {NORM_SPIKE:g} times the median of the lines around")(
    _spikes("grad_norm", "gradient norm", NORM_SPIKE)
)


@rule("steps", f"more than {MOST_CLIPPED:.0%} of the lines after the warm-up are clipped")
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


@rule("speed", f"waiting for batches takes over {MOST_WAIT:.0%} of the time, without the first line of each start")
def _data_wait(run: RunFacts) -> str | None:
    share = run.mean("data_wait_share")
    return f"{share:.1%} of the time was spent waiting for batches" if share > MOST_WAIT else None


@rule("speed", f"the GPU is busy for less than {LEAST_BUSY:.0%} of the time")
def _idle_gpu(run: RunFacts) -> str | None:
    share = run.mean("gpu_busy_share")
    return f"the GPU was busy for {share:.1%} of the time only" if share < LEAST_BUSY else None


@rule("speed", f"the last lines are slower than {FELL:.0%} of the median")
def _slower(run: RunFacts) -> str | None:
    rates = run.metrics.columns["images_per_second"]
    if len(rates) < LEAST_LINES:
        return None
    last, usual = float(np.nanmedian(rates[-max(5, len(rates) // 20) :])), float(np.nanmedian(rates))
    return f"the last lines have {last:.4g} images/s, the median is {usual:.4g}" if last < FELL * usual else None


@rule(
    "speed",
    f"the steps of a line take over {STEP_SPIKE:g} times the median of the lines around, without the first line of "
    "each start",
)
def _slow_lines(run: RunFacts) -> str | None:
    metrics, seconds = run.metrics, run.metrics.columns["seconds_per_step"]
    places, ratio, median = _above_median(seconds, STEP_SPIKE, without=run.first_lines)
    if not len(places):
        return None
    worst = places[np.argmax(ratio[places])]
    lost = float(np.sum((seconds - median)[places] * metrics.widths[places]) / metrics.seconds[-1])
    end = metrics.steps[places]
    before = end - metrics.widths[places]
    causes = {
        "a checkpoint began in": _has_multiple(run.key("run.checkpoint_every"), before, end),
        "an evaluation came just before": np.isin(before, metrics.steps[metrics.is_evaluated]),
        "pictures were drawn just before": _has_multiple(run.key("run.sample_every"), before, before + 1),
    }
    told = ", ".join(f"{cause} {count.sum()} of {len(places)}" for cause, count in causes.items() if count.any())
    return (
        f"a step takes over {STEP_SPIKE:g} times the median of the lines around at {_named(end)}; the longest is "
        f"{seconds[worst]:.3g} s, {ratio[worst]:.3g} times; together {lost:.1%} of the time"
        + (f"; {told}" if told else "")
    )


@rule("speed", f"evaluations take over {MOST_EVALUATING:.0%} of the time")
def _evaluating(run: RunFacts) -> str | None:
    shares = run.metrics.columns["held_out.share"]
    share = float(np.nanmedian(shares)) if np.isfinite(shares).any() else 0.0
    return f"evaluations take {share:.1%} of the time; raise run.evaluate_every" if share > MOST_EVALUATING else None


@rule("starts", "the run was resumed")
def _resumed(run: RunFacts) -> str | None:
    if not run.restart_steps:
        return None
    times = "once" if len(run.restart_steps) == 1 else f"{len(run.restart_steps)} times"
    repeated = sum(max(0, start.reached_step - start.from_step) for start in run.starts)
    lost = f"; {repeated:,} steps were lost and made again" if repeated else ""
    return f"it was resumed {times}, from {_named(run.restart_steps)}{lost}"


@rule("summary", "the run is not finished")
def _unfinished(run: RunFacts) -> str | None:
    progress = f"at step {run.metrics.last_step:,} of {run.num_steps:,}"
    saved = f"the newest checkpoint is of step {run.checkpoints[-1]:,}" if run.checkpoints else "no checkpoint"
    return {
        STOPPED: f"it has stopped {progress} before its end; {saved}",
        RUNNING: f"it is still running, {progress}",
        NOT_BEGUN: "it has not reported a step yet",
    }.get(run.state)


@rule("starts", "a checkpoint was damaged")
def _damaged(run: RunFacts) -> str | None:
    return f"checkpoints were damaged and set aside: {', '.join(run.damaged[:MOST_NAMED])}" if run.damaged else None


@rule("pictures", "grids wait for their decoder, and the run does not go on")
def _grids_wait(run: RunFacts) -> str | None:
    if not run.num_waiting or run.state == RUNNING:
        return None
    return (
        f"{run.num_waiting} grids of pictures are not decoded; 'python -m leandit.tools.sample.decode_grids "
        "RUN/samples' does it"
    )


@rule("losses", "metrics.jsonl has lines that do not count")
def _lines_left_out(run: RunFacts) -> str | None:
    left_out = ["its last line is cut off and was left out"] if run.metrics.is_cut and run.state != RUNNING else []
    if repeated := run.metrics.num_repeated:
        left_out.append(f"{repeated} lines are of steps that a later line reports again; the later counts")
    return f"metrics.jsonl: {'; '.join(left_out)}" if left_out else None


# ------------------------------------------------------------------------------------------------- what checks compute


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


def _above_median(
    values: np.ndarray, limit: float, without: Sequence[int] | np.ndarray = ()
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places of spikes, then the ratio to the running median and the median of all values; no place in a short run."""
    if len(values) < LEAST_LINES:
        return np.zeros(0, int), values, values
    median = running_median(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = values / median
    ratio[np.asarray(without, int)] = 0.0
    return np.flatnonzero(ratio > limit), ratio, median


def _has_multiple(every: object, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Whether a multiple of ``every``, above 0, lies in each range from ``first`` until before ``end``."""
    if not isinstance(every, int) or every < 1:
        return np.zeros(len(first), bool)
    last = (end - 1) // every * every
    return (last >= first) & (last > 0)


def _named(steps: Sequence[int] | np.ndarray) -> str:
    """ "step 300", or "steps 300, 400 and 12 more"."""
    named = ", ".join(f"{step:,}" for step in steps[:MOST_NAMED])
    more = f" and {len(steps) - MOST_NAMED} more" if len(steps) > MOST_NAMED else ""
    return f"step{'s' if len(steps) > 1 else ''} {named}{more}"
