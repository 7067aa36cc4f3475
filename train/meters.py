"""What a run says of itself: ``metrics.jsonl`` with units in its keys, and the same figures for TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..datasets.errors import RunError
from ..datasets.files import write_atomic
from ..datasets.store import LatentStore
from .precision import SMALLEST_SCALE
from .ranks import Meeting

METRICS = "metrics.jsonl"
MOST_NAMED = 5  # records in a message


@dataclass(frozen=True)
class StepReport:
    """The figures of some steps.

    Args:
      step: last of them.
      num_images: seen since the start of the run.
      epoch: of the last batch.
      loss, grad_norm: means over the steps; the norm is taken before clipping.
      learning_rate: of the last step.
      seconds_per_step, images_per_second: over the steps.
      data_wait_share: of the time, 0 to 1, in which the step waited for its batch.
      skipped_steps: whose gradients overflowed, so that nothing was updated (float16).
      loss_scale: of the last step, or None where losses are not scaled.
    """

    step: int
    num_images: int
    epoch: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds_per_step: float
    images_per_second: float
    data_wait_share: float
    skipped_steps: int
    loss_scale: float | None


class Trace(NamedTuple):
    """What is kept of a step until its figures are read; tensors on the device.

    Args:
      step: which.
      loss: () this rank's share of the mean over the global batch.
      grad_norm: () over all ranks, before clipping.
      skipped: () 1 where nothing was updated, else 0.
      num_images: of the global batch.
      losses: (B,) of each image of this rank.
      records: (B,) their positions in the records table.
      store: which of the stores they are of.
    """

    step: int
    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    num_images: int
    losses: Tensor
    records: Tensor
    store: int


class Window:
    """Figures since the last report; the device is waited for only when they are read.

    Args:
      meeting: with the other ranks, which read their figures together.
      stores: that the batches are of, to name records.
      may_skip: a gradient that is not finite is no error (float16, whose loss scale then shrinks).
    """

    def __init__(self, meeting: Meeting, stores: Sequence[LatentStore], *, may_skip: bool = False) -> None:
        self._meeting, self._stores, self._may_skip = meeting, stores, may_skip
        self._reset()

    def _reset(self) -> None:
        self._start, self._wait, self._images = time.perf_counter(), 0.0, 0
        self._traces: list[Trace] = []

    @property
    def is_empty(self) -> bool:
        """No step since the last report."""
        return not self._traces

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for data."""
        start = time.perf_counter()
        yield
        self._wait += time.perf_counter() - start

    def add(self, trace: Trace) -> None:
        """Count one step."""
        self._traces.append(trace)
        self._images += trace.num_images

    def report(
        self, *, step: int, num_images: int, epoch: int, learning_rate: float, scale: float | None
    ) -> StepReport:
        """Read the figures and begin anew; all ranks do so after the same steps.

        Args:
          scale: of the loss, with float16.
        Raises: RunError: a loss or a gradient is not finite; it names the records.
        """
        columns = [(trace.loss, trace.grad_norm, trace.skipped) for trace in self._traces]
        losses, norms, skipped = (torch.stack(column) for column in zip(*columns, strict=True))
        if self._meeting.ranks.world_size > 1:
            dist.all_reduce(losses)
        good = skipped == 0
        loss, num_skipped = losses.mean().item(), int(skipped.sum().item())
        seconds = time.perf_counter() - self._start
        if not math.isfinite(loss) or (num_skipped and not self._may_skip):
            self._refuse(losses, skipped)
        if scale is not None and scale < SMALLEST_SCALE:
            raise RunError(
                f"step {step}: the loss scale of fp16 has shrunk to {scale:g}, and gradients still overflow. Train "
                "with --set run.precision=bf16, or a lower optimizer.lr."
            )
        figures = StepReport(
            step=step,
            num_images=num_images,
            epoch=epoch,
            loss=loss,
            grad_norm=norms[good].mean().item() if num_skipped < len(norms) else math.inf,
            learning_rate=learning_rate,
            seconds_per_step=seconds / len(self._traces),
            images_per_second=self._images / seconds,
            data_wait_share=self._wait / seconds,
            skipped_steps=num_skipped,
            loss_scale=scale,
        )
        self._reset()
        return figures

    def _refuse(self, losses: Tensor, skipped: Tensor) -> NoReturn:
        """Stop at the first step whose loss or gradient is not finite, naming the records that made it so.

        Raises: RunError: on every rank, the same.
        """
        bad = (~losses.isfinite() | ((skipped != 0) & (not self._may_skip))).tolist().index(True)
        trace = self._traces[bad]
        guilty = trace.records[~trace.losses.isfinite()].tolist()
        keys = [key for said in self._meeting.gather([self._key(trace, record) for record in guilty]) for key in said]
        self._meeting.leave()  # every rank says the same, and none of them is dead
        names = ", ".join(f"'{key}'" for key in keys[:MOST_NAMED])
        more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
        what = f"the loss of records {names}{more} is" if keys else "the losses are finite, but the gradient is"
        raise RunError(
            f"step {trace.step}: {what} not finite. That update was not made, and nothing since the last checkpoint "
            "was saved. Look at the records with 'leandit inspect STORE KEY'; lower optimizer.lr or set run.grad_clip; "
            "then run the same command again."
        )

    def _key(self, trace: Trace, record: int) -> str:
        return self._stores[trace.store].record_at(record).key


class Meters:
    """Writes the reports of a run.

    Args:
      run: its folder.
      step: from which it goes on; lines of later steps, of a process that died after its last checkpoint, are dropped.
    """

    def __init__(self, run: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self._path = run / METRICS
        kept = [line for line in _lines(self._path) if json.loads(line)["step"] <= step]
        write_atomic(self._path, "".join(kept).encode())
        self._tensorboard = SummaryWriter(run / "tensorboard", purge_step=step + 1)

    def write(self, report: StepReport) -> None:
        """Append one report."""
        values = asdict(report)
        with open(self._path, "a") as file:
            file.write(json.dumps(values) + "\n")
        for name in ("loss", "grad_norm", "learning_rate", "images_per_second", "data_wait_share"):
            self._tensorboard.add_scalar(name, values[name], report.step)

    def close(self) -> None:
        """Flush everything."""
        self._tensorboard.close()


def _lines(path: Path) -> list[str]:
    """Whole lines of a metrics file; one that a crash cut off is left out."""
    if not path.is_file():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
