"""What a run says of itself: ``metrics.jsonl`` with units in its keys, and the same figures for TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..datasets.errors import RunError
from ..datasets.files import write_atomic

METRICS = "metrics.jsonl"


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


class Window:
    """Figures since the last report; the device is waited for only when they are read."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._start, self._wait, self._images = time.perf_counter(), 0.0, 0
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []

    @property
    def is_empty(self) -> bool:
        """No step since the last report."""
        return not self._losses

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for data."""
        start = time.perf_counter()
        yield
        self._wait += time.perf_counter() - start

    def add(self, loss: Tensor, grad_norm: Tensor, num_images: int) -> None:
        """Count one step."""
        self._losses.append(loss)
        self._norms.append(grad_norm)
        self._images += num_images

    def report(self, *, step: int, num_images: int, epoch: int, learning_rate: float) -> StepReport:
        """Read the figures and begin anew.

        Raises: RunError: the loss is not finite.
        """
        loss, norm = torch.stack(self._losses).mean().item(), torch.stack(self._norms).mean().item()
        seconds = time.perf_counter() - self._start
        figures = StepReport(
            step=step,
            num_images=num_images,
            epoch=epoch,
            loss=loss,
            grad_norm=norm,
            learning_rate=learning_rate,
            seconds_per_step=seconds / len(self._losses),
            images_per_second=self._images / seconds,
            data_wait_share=self._wait / seconds,
        )
        self._reset()
        if not math.isfinite(loss):
            raise RunError(
                f"step {step}: the loss is {loss}. Nothing of the last steps was saved; "
                "lower optimizer.lr or set run.grad_clip, then run the same command again."
            )
        return figures


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
