"""The loss of held-out records, as a line of ``metrics.jsonl`` has it."""

from __future__ import annotations

from dataclasses import dataclass


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
    loss_by_time: list[float | None]
    averaged_loss_by_time: list[float | None]
    num_images: int
    seconds: float
    share: float
