"""The loss of held-out records while a run trains; the run computes what it would without it, bit for bit.

Records are evaluated in groups of one forward each, which depend on stores and recipe alone. A forward adds in an order
that may depend on the images beside each other, so ranks share groups, never images of one: each loss is the same to
the bit at any number of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ....datasets.batches.batch import Batch
from ....datasets.batches.lookup import Records
from ....datasets.batches.reader import BatchReader
from ....datasets.errors import RecipeError
from ....datasets.order.holdout import key_hashes
from ....datasets.order.planned import PlannedBatch
from ...data_recipe import DataSection
from ...metrics.flops import latent_size_of, tokens_per_image
from ...metrics.history import HeldOutLoss
from ...models.spec import ModelSpec
from ..state import Run
from .fixed_draws import NUM_TIMES, losses_at_fixed_times, noise_keys, posterior_keys

GROUP_TOKENS = 8192  # image tokens of a forward: enough to keep a GPU busy, far fewer than a training step holds
MOST_SHARE = 0.01  # of a run's time, above which a warning says what would be less


@dataclass(frozen=True, eq=False)
class Group:
    """Held-out records that go through the model together.

    Args:
      store: index of their store, as of ``PlannedBatch.plan``.
      bucket: of all of them.
      positions: (B,) int64 within the bucket.
      hashes: (B,) uint64 of their keys.
    """

    store: int
    bucket: str
    positions: np.ndarray
    hashes: np.ndarray

    def __len__(self) -> int:
        return len(self.positions)


class HeldOut:
    """The held-out records of a run.

    Args:
      reader: of the run, whose plans hold out records.
      data: of the recipe, with the stages.
      most: records to evaluate; those with the smallest hashes are, so that the same ones are at every step.
    Raises: RecipeError: a stage has none.
    """

    def __init__(self, reader: BatchReader, data: DataSection, spec: ModelSpec, most: int) -> None:
        self._reader, self._turns, self._spec, self._most = reader, data.turns, spec, most
        self._groups: dict[tuple[int, ...], list[Group]] = {}
        for start in {turn.start for turn in self._turns} or {0}:
            if not self.groups(start + 1):
                names = ", ".join(f"'{reader.stores[number].path}'" for number in self._stage(start + 1))
                raise RecipeError(
                    f"data.holdout {data.holdout:g}: it holds out no record of {names}, so there is none to evaluate. "
                    "Raise it, or set run.evaluate_every=0."
                )

    def groups(self, step: int) -> list[Group]:
        """Those to evaluate at a step: of the stores of its stage, by their shares of the batches."""
        stage = self._stage(step)
        if (key := tuple(stage)) not in self._groups:
            self._groups[key] = [one for number, share in stage.items() for one in self._groups_of(number, share)]
        return self._groups[key]

    def _stage(self, step: int) -> dict[int, float]:
        """Indexes of the stores that train at a step, with their shares."""
        return {number: turn.share for number, turn in enumerate(self._turns) if turn.has(step)} or {0: 1.0}

    def _groups_of(self, number: int, share: float) -> list[Group]:
        store, selection = self._reader.stores[number], self._reader.order.plans[number].selection
        assert selection is not None
        hashes = {
            bucket: key_hashes(store, store.index(bucket).records[positions])
            for bucket, positions in selection.held_out.items()
        }
        every = np.sort(np.concatenate(list(hashes.values())))
        limit = every[: max(1, int(self._most * share))][-1:]  # empty if there is none
        groups = []
        for bucket, positions in selection.held_out.items():
            chosen = np.argsort(hashes[bucket])
            chosen = chosen[hashes[bucket][chosen] <= limit] if len(limit) else chosen
            tokens = tokens_per_image(self._spec, latent_size_of(bucket, store.spec.latent))
            size = max(1, GROUP_TOKENS // (NUM_TIMES * tokens))
            for start in range(0, len(chosen), size):
                part = chosen[start : start + size]
                groups.append(Group(number, bucket, positions[part], hashes[bucket][part]))
        return groups

    def read(self, group: Group) -> Batch:
        """The records of a group with their first captions, not flipped, in the CPU's memory."""
        store = self._reader.stores[group.store]
        index, positions = store.index(group.bucket), group.positions
        wanted = Records(
            rows=index.rows.take(positions),
            records=index.records.take(positions),
            labels=index.labels.take(positions),
            flipped=None,
            caption_ids=index.caption_ids[index.caption_starts[positions]] if self._spec.takes_text else None,
            draw_keys=posterior_keys(group.hashes) if store.spec.latent.has_posterior else None,
        )
        planned = PlannedBatch(group.bucket, positions, np.zeros(len(group), np.int64), group.store)
        return self._reader.read(planned, wanted)


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
        state, start = self._state, self._synchronized_time()
        groups = self._held_out.groups(state.step)
        if groups is not self._groups:  # another stage has begun
            self._groups, self._batches = groups, {}
        losses = []
        for weights in (nullcontext(), state.engine.averaged()):
            with weights:
                losses.append(self._mean_losses())
        end = self._synchronized_time()
        share = (end - start) / (end - self._last_end)
        self._last_end, self._num_evaluations = end, self._num_evaluations + 1
        if share > MOST_SHARE and self._num_evaluations == 2 and state.ranks.is_first:  # the first one reads
            every = math.ceil(state.recipe.run.evaluate_every * share / MOST_SHARE)
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
        groups, ranks = self._groups, self._state.ranks
        starts = np.cumsum([0, *map(len, groups)])
        table = torch.zeros(int(starts[-1]), NUM_TIMES, device=self._state.device)
        for first in range(0, len(groups), ranks.world_size):
            # A sharded model needs every rank in every forward: one without a group computes another's again.
            number = (first + ranks.rank) % len(groups)
            losses = losses_at_fixed_times(self._state, *self._batch(number))
            if first + ranks.rank < len(groups):
                table[starts[number] : starts[number + 1]] = losses
        if ranks.world_size > 1:
            dist.all_reduce(table)  # each loss and zeros
        by_time = table.double().cpu().mean(0)  # in a fixed order, whatever the ranks
        return _finite(by_time.mean()), [_finite(value) for value in by_time]

    def _batch(self, number: int) -> tuple[Batch, Tensor]:
        """The records of a group on the device, and the keys of their noise; read once, kept in the CPU's memory."""
        if number not in self._batches:
            group = self._groups[number]
            self._batches[number] = self._held_out.read(group), torch.from_numpy(noise_keys(group.hashes))
        batch, keys = self._batches[number]
        return batch.to(self._state.device), keys.to(self._state.device)

    def _synchronized_time(self) -> float:
        if self._state.device.type == "cuda":
            torch.cuda.synchronize(self._state.device)
        return time.perf_counter()


def _finite(value: Tensor) -> float | None:
    return float(value) if value.isfinite() else None
