"""The figures of a run: a report as the trainer writes it, and ``metrics.jsonl`` and ``starts.jsonl`` read again.

It needs no torch. A last line without an end belongs to a writer that still writes or was killed, and is left out.
Lines may come from another release: a figure that a line lacks is unknown there, and one that this release lacks is
left out. A million steps take seconds.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from ...errors import DamageError
from ..weights.folders import METRICS, STARTS

NUM_BANDS, NUM_TIMES = 10, 8  # equal parts of the way from data to noise: of the training loss, of the held-out loss
OFFSETS = {"all": 0.5, "mlperf": 0.0}  # of a held-out time in its eighth, by run.evaluate_times
MOST_TERMS = 32  # of a history; a recipe adds a few to the loss
LARGEST = 1e200  # a larger number is damage: no figure of a run comes near it
SMOOTHED_SHARE = 0.02  # of a run, over which a smoothed line averages
QUIET_LINES, QUIET_SECONDS = 10, 300.0  # a run that has reported nothing for longer than both has stopped
NOT_BEGUN, RUNNING, STOPPED, FINISHED = "not begun", "running", "stopped", "finished"
ReadT = TypeVar("ReadT", bound=BaseModel)
Bands = Annotated[list[float | None], Field(min_length=NUM_BANDS, max_length=NUM_BANDS)]
Times = Annotated[list[float | None], Field(min_length=NUM_TIMES, max_length=NUM_TIMES)]


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss of the records that a run keeps out, at fixed times with fixed noise.

    Args:
      loss, averaged_loss: mean over records and times, of the weights and of their average; None: not finite.
      loss_by_time, averaged_loss_by_time: the same at each of the times, from data to noise.
      num_images: records.
      seconds: that the evaluation took.
      share: of the time since the evaluation before, or since the start, 0 to 1.
    """

    loss: float | None
    averaged_loss: float | None
    loss_by_time: Times
    averaged_loss_by_time: Times
    num_images: int
    seconds: float
    share: float


@dataclass(frozen=True)
class StepReport:
    """The figures of some steps, and the keys of a line of ``metrics.jsonl``.

    Args:
      step: last of them.
      num_images: seen since the start of the run.
      epoch: of the last batch.
      loss, grad_norm: means over the steps that were not skipped; the loss without added terms, the norm before
        clipping. None: all were skipped.
      learning_rate: of the last step.
      seconds_per_step, images_per_second: over the steps, of all ranks together.
      tokens_per_second: image tokens, of all ranks together.
      mfu: model FLOPs utilisation of all GPUs, 0 to 1 (``flops.py``); None on a CPU and on a GPU unknown to
        ``gpus.py``.
      data_wait_share: share of the time, 0 to 1, spent waiting for batches.
      gpu_busy_share: share of the time, 0 to 1, that this rank's GPU spent in steps; None on a CPU.
      memory_gib: peak of torch's allocations on this rank's GPU over the steps; on a CPU, the process's peak so far.
      skipped_steps: steps without an update: with float16 because gradients overflowed, else because the loss or the
        gradient was not finite (``run.skip_nonfinite``).
      loss_scale: of the last step, or None if losses are not scaled.
      loss_by_time: mean loss in each of the bands from data to noise; None for a band without images.
      loss_terms: means of the weighted terms that the recipe adds to the loss.
      held_out: loss of the held-out records, if the last step ended with an evaluation.
    """

    step: Annotated[int, Field(gt=0, lt=2**53)]
    num_images: int
    epoch: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    seconds_per_step: float
    images_per_second: float
    tokens_per_second: float
    mfu: float | None
    data_wait_share: float
    gpu_busy_share: float | None
    memory_gib: float
    skipped_steps: int
    loss_scale: float | None
    loss_by_time: Bands
    loss_terms: dict[str, float]
    held_out: HeldOutLoss | None


class Start(BaseModel):
    """One start of a run, and the keys of a line of ``starts.jsonl``: each call that trains adds one.

    Args:
      time: ISO 8601, UTC.
      from_step: last step of the checkpoint that it resumed from; 0: it began.
      reached_step: last reported step before; above ``from_step``, the steps between were lost and are made again.
      recipe: as the command named it; empty: the call had a recipe without a name.
      machine, device: of the first rank.
      world_size, num_machines: of all ranks.
      strategy: of ``parallel.strategy``, resolved.
      precision: that it computes in: of the recipe, or fp32 where that is bf16 and the device has no fast one.
      versions: of this package and of the libraries.
      changed: settings that ``--continue-with`` has changed: by key, the value before and the value from here on.
    """

    model_config = ConfigDict(frozen=True)

    time: str
    from_step: int
    reached_step: int = 0
    recipe: str = ""
    machine: str = ""
    device: str = ""
    world_size: int = 1
    num_machines: int = 1
    strategy: str = ""
    precision: str = ""
    versions: dict[str, str] = {}
    changed: dict[str, tuple[Any, Any]] = {}


def _line_of(figures: type, name: str, *, required: Sequence[str] = (), **parts: Any) -> type[BaseModel]:
    """A model of a stored line, which may lack any figure that is not required.

    Args:
      figures: a dataclass, whose fields are the figures.
      parts: types of some fields, in place of those of the dataclass.
    """
    hints = get_type_hints(figures, include_extras=True) | parts
    fields: dict[str, Any] = {key: (hint if key in required else (hint | None), None) for key, hint in hints.items()}
    for key in required:
        fields[key] = (hints[key], ...)
    return create_model(name, **fields)


HeldOutLine = _line_of(HeldOutLoss, "HeldOutLine")
ReportLine = _line_of(StepReport, "ReportLine", required=["step"], held_out=HeldOutLine)
NUMBERS = [one.name for one in dataclasses.fields(StepReport) if str(one.type).split()[0] in ("int", "float")]


@dataclass(frozen=True, eq=False)
class History:
    """The reports of a run in order of their steps. Of a step that was reported twice the later line counts.

    Args:
      steps: (R,) int64, ascending.
      columns: (R,) float64 of each number of a report by its name, those of the held-out loss as "held_out.loss"; NaN
        where the line has no number.
      loss_by_time: (R, NUM_BANDS) float64, mean training loss from data to noise; NaN for a band without images.
      held_out_by_time: (R, NUM_TIMES) float64, held-out loss of the averaged weights from data to noise.
      terms: (R,) float64 for each weighted term that the recipe adds to the loss.
      is_evaluated: (R,) bool, whether the line has a held-out loss.
      is_finite: (R,) bool, whether all losses and terms of the line are finite.
      num_repeated: lines of steps that a later line reports again.
      is_cut: the last line of the file is not whole.
      written: when the file was last written, in seconds since 1970; 0 without a file.
    """

    steps: np.ndarray
    columns: dict[str, np.ndarray]
    loss_by_time: np.ndarray
    held_out_by_time: np.ndarray
    terms: dict[str, np.ndarray]
    is_evaluated: np.ndarray
    is_finite: np.ndarray
    num_repeated: int
    is_cut: bool
    written: float

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last_step(self) -> int:
        """The last reported step; 0 of a run that has not reported."""
        return int(self.steps[-1]) if len(self) else 0

    @property
    def widths(self) -> np.ndarray:
        """(R,) steps that each line covers: those since the line before."""
        return np.diff(self.steps, prepend=0)

    @property
    def seconds(self) -> np.ndarray:
        """(R,) time spent in steps until each line, without evaluations, images and pauses."""
        return np.cumsum(np.nan_to_num(self.columns["seconds_per_step"]) * self.widths)

    def state(self, num_steps: int, *, now: float | None = None) -> str:
        """Whether the run is "not begun", "running", "stopped" or "finished".

        Args:
          num_steps: that the recipe asks for.
          now: seconds since 1970; None: the clock's.
        """
        if not len(self):
            return NOT_BEGUN
        if self.last_step >= num_steps:
            return FINISHED
        line_seconds = float(self.columns["seconds_per_step"][-1] * self.widths[-1])
        quiet = (time.time() if now is None else now) - self.written
        return RUNNING if quiet < max(QUIET_SECONDS, QUIET_LINES * line_seconds) else STOPPED


def read_history(run: Path) -> History:
    """Read the reports of a run; none of a run that has not reported yet.

    Raises: DamageError: a line is not a report.
    """
    path = run / METRICS
    written = path.stat().st_mtime if path.is_file() else 0.0  # before the lines: what follows is of a later time
    lines, is_cut = whole_lines(path)
    by_step = {report.step: report for report in parse_reports(path, lines)}
    reports = [by_step[step] for step in sorted(by_step)]
    held_out = [report.held_out for report in reports]
    columns = {name: _numbers(getattr(report, name) for report in reports) for name in NUMBERS}
    for name in ("loss", "averaged_loss", "share"):
        columns[f"held_out.{name}"] = _numbers(one and getattr(one, name) for one in held_out)
    terms = [report.loss_terms or {} for report in reports]
    names = list(dict.fromkeys(name for values in terms for name in values))[:MOST_TERMS]
    bands = [report.loss_by_time or [None] * NUM_BANDS for report in reports]
    times = [(evaluated and evaluated.averaged_loss_by_time) or [None] * NUM_TIMES for evaluated in held_out]
    return History(
        steps=np.array([report.step for report in reports], np.int64),
        columns=columns,
        loss_by_time=_numbers(bands).reshape(-1, NUM_BANDS),
        held_out_by_time=_numbers(times).reshape(-1, NUM_TIMES),
        terms={name: _numbers(values.get(name) for values in terms) for name in names},
        is_evaluated=np.array([one is not None for one in held_out], bool),
        is_finite=np.array([all_finite(report) for report in reports], bool),
        num_repeated=len(lines) - len(reports),
        is_cut=is_cut,
        written=written,
    )


def parse_reports(path: Path, lines: Iterable[bytes]) -> list[Any]:
    """The reports in the lines of a metrics file, as ``StepReport``; a figure that a line lacks is None.

    Raises: DamageError: a line lacks the step, or has something else in place of a figure.
    """
    return [_parsed(ReportLine, path, number, line, "report") for number, line in enumerate(lines, 1)]


def all_finite(report: Any) -> bool:
    """Whether all losses and terms that a line has are finite.

    Args:
      report: of ``parse_reports``. A held-out loss of None was not finite, a missing one is not known.
    """
    losses = list((report.loss_terms or {}).values())
    if report.loss is not None:
        losses.append(report.loss)
    if report.held_out:
        names = report.held_out.model_fields_set & {"loss", "averaged_loss"}
        losses += [getattr(report.held_out, name) for name in names]
    return all(loss is not None and math.isfinite(loss) for loss in losses)


def read_starts(run: Path) -> list[Start]:
    """The starts of a run, in order; empty if the file is missing.

    Raises: DamageError: a line is not a start.
    """
    path = run / STARTS
    lines = path.read_bytes().splitlines() if path.is_file() else ()
    return [_parsed(Start, path, number, line, "start") for number, line in enumerate(lines, 1)]


def whole_lines(path: Path) -> tuple[list[bytes], bool]:
    """The lines of a file, and whether another one was cut off; none of a missing file."""
    if not path.is_file():
        return [], False
    *lines, rest = path.read_bytes().split(b"\n")
    return lines, bool(rest)


def smoothed(y: np.ndarray, share: float = SMOOTHED_SHARE) -> np.ndarray:
    """The mean over a share of the points around each one, over fewer at both ends.

    Args:
      y: (N,); NaN and infinity are left out.
    Returns: (N,); NaN where no point around is a number.
    """
    half = max(1, round(len(y) * share / 2))
    known = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    low = np.maximum(np.arange(len(y)) - half, 0)
    high = np.minimum(np.arange(len(y)) + half + 1, len(y))
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def _parsed(kind: type[ReadT], path: Path, number: int, line: bytes, name: str) -> ReadT:
    try:
        return kind.model_validate_json(line, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        reason = ": ".join(filter(None, [".".join(map(str, problem["loc"])), problem["msg"]]))
        raise DamageError(
            f"'{path}': line {number} is not a {name} ({reason}). Remove the line, or move the file away: a run "
            "resumes without it."
        ) from error


def _numbers(values: Iterable[Any]) -> np.ndarray:
    """Convert to float64, with NaN where a value is None or beyond ``LARGEST``."""
    numbers = np.array(list(values), np.float64)
    numbers[np.abs(numbers) > LARGEST] = np.nan
    return numbers
