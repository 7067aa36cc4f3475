"""The loss of held-out records while a run trains; the run computes what it would without it, bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from ....datasets.batches.batch import Batch
from ...metrics.held_out import HeldOutLoss
from ..state import Run
from .fixed_draws import NUM_TIMES, losses_at_fixed_times, noise_keys
from .held_out import Group, HeldOut

MOST_SHARE = 0.01  # of a run's time, above which a warning says what would be less


class Evaluation:
    """Evaluates held-out records every ``run.evaluate_every`` steps; all ranks share the work.

    Args:
      state: of the run.
      warn: called once if evaluations take more than a hundredth of the time.
    Raises: RecipeError: ``data.holdout`` holds out no record.
    """

    def __init__(self, state: Run, warn: Callable[[str], None]) -> None:
        self._state, self._warn = state, warn
        recipe, reader = state.recipe, state.loader.dataset.reader
        self._held_out = HeldOut(reader, recipe.data, state.spec, recipe.run.evaluate_images)
        self._groups: list[Group] = []
        self._batches: dict[int, tuple[Batch, Tensor]] = {}  # this rank's groups, with the keys of their noise
        self._last_end, self._num_evaluations = time.perf_counter(), 0

    def is_due(self, step: int) -> bool:
        """Whether a step ends with an evaluation."""
        section = self._state.recipe.run
        return step % section.evaluate_every == 0 or step == section.steps

    def evaluate(self) -> HeldOutLoss:
        """Evaluate the weights and their average; a collective call, after which nothing has changed."""
        start = self._synchronised_time()
        groups = self._held_out.groups(self._state.step)
        if groups is not self._groups:  # another stage has begun
            self._groups, self._batches = groups, {}
        losses = []
        for weights in (nullcontext(), self._state.engine.averaged()):
            with weights:
                losses.append(self._mean_losses())
        end = self._synchronised_time()
        share = (end - start) / (end - self._last_end)
        self._last_end, self._num_evaluations = end, self._num_evaluations + 1
        if share > MOST_SHARE and self._num_evaluations == 2 and self._state.ranks.is_first:  # the first one reads
            every = math.ceil(self._state.recipe.run.evaluate_every * share / MOST_SHARE)
            self._warn(
                f"evaluating held-out records takes {share:.1%} of the time; run.evaluate_every={every} takes 1%"
            )
        (loss, by_time), (averaged_loss, averaged_by_time) = losses
        return HeldOutLoss(
            loss=loss,
            averaged_loss=averaged_loss,
            loss_by_time=by_time,
            averaged_loss_by_time=averaged_by_time,
            num_images=sum(map(len, groups)),
            seconds=end - start,
            share=share,
        )

    def _mean_losses(self) -> tuple[float | None, list[float | None]]:
        """Mean over records and times, and over the records at each time."""
        groups, (rank, world_size) = self._groups, (self._state.ranks.rank, self._state.ranks.world_size)
        starts = [0]
        for group in groups:
            starts.append(starts[-1] + len(group))
        table = torch.zeros(starts[-1], NUM_TIMES, device=self._state.device)
        for first in range(0, len(groups), world_size):
            # A sharded model needs every rank in every forward: one without a group computes another's again.
            number = (first + rank) % len(groups)
            losses = losses_at_fixed_times(self._state, *self._batch(number))
            if first + rank < len(groups):
                table[starts[number] : starts[number + 1]] = losses
        if world_size > 1:
            dist.all_reduce(table)  # each loss and zeros
        by_time = table.double().cpu().mean(0)  # in a fixed order, whatever the ranks
        return _finite(by_time.mean()), [_finite(value) for value in by_time]

    def _batch(self, number: int) -> tuple[Batch, Tensor]:
        """The records of a group on the device, and the keys of their noise; read once, kept in the CPU's memory."""
        if number not in self._batches:
            group = self._groups[number]
            self._batches[number] = self._held_out.read(group), torch.from_numpy(noise_keys(group.hashes))
        batch, keys = self._batches[number]
        device = self._state.device
        return batch.to(device), keys.to(device)

    def _synchronised_time(self) -> float:
        if self._state.device.type == "cuda":
            torch.cuda.synchronize(self._state.device)
        return time.perf_counter()


def _finite(value: Tensor) -> float | None:
    return float(value) if value.isfinite() else None
