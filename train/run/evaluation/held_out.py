"""The loss of held-out records while a run trains; the run computes what it would without it, bit for bit.

It can be compared over the steps of a run: at eight fixed times, with noise that is fixed for each record; or, as
MLPerf Training does, each record at one of eight times in turn. Records are evaluated in groups of one forward each,
which depend on stores and recipe alone. A forward adds in an order that may depend on the images beside each other, so
ranks share groups, never images of one: each loss is the same to the bit at any number of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ....datasets.batches.batch import Batch
from ....datasets.batches.latents import keyed_noise
from ....datasets.batches.resolve import ResolvedBatch
from ....datasets.order.shuffle import mix
from ....errors import RecipeError
from ...data_recipe import Objective, batch_shares
from ...metrics.flops import latent_size_of, tokens_per_image
from ...metrics.history import NUM_TIMES, OFFSETS, HeldOutLoss
from ...models.conditioning import Microbatch, select
from ...objectives.losses import PLAIN, TRAIN_STEPS, objective_losses
from ..state import Run

GROUP_TOKENS = 8192  # image tokens of a forward: enough to keep a GPU busy, far fewer than a training step holds
MOST_SHARE = 0.01  # of a run's time, above which a warning says what would be less


class Group(NamedTuple):
    """Held-out records that go through the model together.

    Args:
      store: index of their store.
      bucket: of all of them.
      positions: (B,) int64 within the bucket.
      hashes: (B,) uint64 of their keys.
    """

    store: int
    bucket: str
    positions: np.ndarray
    hashes: np.ndarray


class Evaluation:
    """Evaluates held-out records every ``run.evaluate_every`` steps; all ranks share the work.

    Args:
      warn: called once if evaluations take more than a hundredth of the time.
    Raises: RecipeError: ``data.holdout`` holds out no record of the stores.
    """

    def __init__(self, run: Run, warn: Callable[[str], None]) -> None:
        self._run, self._warn = run, warn
        self._reader = run.loader.reader
        self._batches: dict[int, tuple[Batch, Tensor]] = {}  # this rank's groups, with the keys of their noise
        self._last_end, self._num_evaluations = time.perf_counter(), 0
        self._is_mlperf = run.recipe.run.evaluate_times == "mlperf"
        data = run.recipe.data
        self.groups: list[Group] = []
        """Groups of all stores, each by its share of the batches."""
        for number, share in enumerate(batch_shares(data.mixture) or [1.0]):
            self.groups += self._groups_of(number, share)
        if not self.groups:
            names = ", ".join(f"'{store.path}'" for store in self._reader.stores)
            raise RecipeError(
                f"data.holdout {data.holdout:g}: it holds out no record of {names}, so there is none to evaluate. "
                "Raise it, or set run.evaluate_every=0."
            )

    def is_due(self, step: int) -> bool:
        """Whether a step ends with an evaluation."""
        section = self._run.recipe.run
        return step % section.evaluate_every == 0 or step == section.steps

    def evaluate(self) -> HeldOutLoss:
        """Evaluate the weights and their average; a collective call, after which nothing has changed."""
        run, start = self._run, self._synchronized_time()
        groups, losses = self.groups, []
        for weights in (nullcontext(), run.engine.averaged()):
            with weights:
                losses.append(self._mean_losses(groups))
        end = self._synchronized_time()
        share = (end - start) / (end - self._last_end)
        self._last_end, self._num_evaluations = end, self._num_evaluations + 1
        if share > MOST_SHARE and self._num_evaluations == 2 and run.ranks.is_first:  # the first one reads
            every = math.ceil(run.recipe.run.evaluate_every * share / MOST_SHARE)
            self._warn(
                f"evaluating held-out records takes {share:.1%} of the time; run.evaluate_every={every} takes 1%"
            )
        (loss, *by_time), (averaged_loss, *averaged_by_time) = losses
        num_images = sum(len(group.positions) for group in groups)
        return HeldOutLoss(loss, averaged_loss, by_time, averaged_by_time, num_images, end - start, share)

    def _groups_of(self, number: int, share: float) -> list[Group]:
        """Groups of a store: the records with the smallest hashes, so that the same ones are at every step."""
        store, selection = self._reader.stores[number], self._reader.order.plans[number].selection
        assert selection is not None
        hashes = {
            bucket: store.numbers("keys")[store.index(bucket).records[positions]]
            for bucket, positions in selection.held_out.items()
        }
        most = max(1, int(self._run.recipe.run.evaluate_images * share))
        limit = np.sort(np.concatenate(list(hashes.values())))[:most][-1:]  # empty if there is none
        groups = []
        for bucket, positions in selection.held_out.items():
            chosen = np.argsort(hashes[bucket])
            chosen = chosen[hashes[bucket][chosen] <= limit] if len(limit) else chosen
            tokens = tokens_per_image(self._run.spec, latent_size_of(bucket, store.spec.latent))
            size = max(1, GROUP_TOKENS // (tokens * (1 if self._is_mlperf else NUM_TIMES)))
            for start in range(0, len(chosen), size):
                part = chosen[start : start + size]
                groups.append(Group(number, bucket, positions[part], hashes[bucket][part]))
        return groups

    def read(self, group: Group) -> Batch:
        """The records of a group with their first captions and planned crops, not flipped, in the CPU's memory."""
        store, positions = self._reader.stores[group.store], group.positions
        index = store.index(group.bucket)
        rows, records, labels = index.take(positions)
        resolved = ResolvedBatch(
            number=0,
            store=group.store,
            bucket=group.bucket,
            epoch=0,
            global_size=len(positions),
            rows=rows,
            records=records,
            labels=labels,
            views=None,
            caption_ids=index.caption_ids[index.caption_starts[positions]] if self._run.spec.takes_text else None,
            draw_keys=posterior_keys(group.hashes) if store.spec.latent.has_posterior else None,
        )
        return self._reader.read(resolved)

    def _mean_losses(self, groups: list[Group]) -> list[float | None]:
        """Mean over records and times, then over the records at each time; None: not finite, or no record has it."""
        ranks, starts = self._run.ranks, np.cumsum([0, *(len(group.positions) for group in groups)])
        numbers = torch.arange(int(starts[-1]), device=self._run.device)[:, None]
        times = numbers % NUM_TIMES if self._is_mlperf else torch.arange(NUM_TIMES).to(numbers).expand(len(numbers), -1)
        table = torch.zeros(times.shape, device=self._run.device)
        for first in range(0, len(groups), ranks.world_size):
            # A sharded model needs every rank in every forward: one without a group computes another's again.
            number = (first + ranks.rank) % len(groups)
            if number not in self._batches:
                keys = torch.from_numpy(noise_keys(groups[number].hashes))
                self._batches[number] = self.read(groups[number]), keys
            batch, keys = self._batches[number]
            rows = slice(starts[number], starts[number + 1])
            losses = losses_at_fixed_times(
                self._run, batch.to(self._run.device), keys.to(self._run.device), times[rows]
            )
            if first + ranks.rank < len(groups):
                table[rows] = losses
        if ranks.world_size > 1:
            dist.all_reduce(table)  # each loss and zeros
        losses, times = table.double().cpu(), times.cpu()  # whose means are in a fixed order, whatever the ranks
        by_time = torch.stack([losses[times == number].mean() for number in range(NUM_TIMES)])
        mean = by_time[times.unique()].mean()  # over the times that a record has
        return [loss if math.isfinite(loss) else None for loss in (mean.item(), *by_time.tolist())]

    def _synchronized_time(self) -> float:
        if self._run.device.type == "cuda":
            torch.cuda.synchronize(self._run.device)
        return time.perf_counter()


@torch.no_grad()
def losses_at_fixed_times(run: Run, batch: Batch, noise: Tensor, numbers: Tensor) -> Tensor:
    """Plain loss of each record of a batch at some of the eight times, in one forward with all tokens in all blocks.

    The run does not change. Blocks are not compiled for it: they would be for each of its shapes.

    Args:
      batch: on the run's device.
      noise: (B, 8) int64 keys, there too.
      numbers: (B, K) int64 of times, there too.
    Returns: (B, K) float32.
    """
    objective, count, width = run.recipe.objective, len(batch), run.spec.class_width
    keys, offset = noise.gather(1, numbers).flatten(), OFFSETS[run.recipe.run.evaluate_times]
    conditioning = run.conditioning(batch)
    targets = run.read_targets(batch, run.token_grid(batch.latents), trains=False)
    repeated = [image for image in range(count) for _ in range(numbers.shape[1])]
    latents, conditioning, targets = select((batch.latents, conditioning, targets), repeated)
    images = Microbatch(
        latents,
        noise=keyed_noise(keys, tuple(latents.shape[1:])),
        times=fixed_times(objective, run.device, offset)[numbers.flatten()],
        conditioning=conditioning,
        draws={"class_noise": keyed_noise(keys + 1, (width,))} if width else {},
        targets=targets,
    )
    run.engine.model.eval()
    with torch.compiler.set_stance("force_eager"):
        output = run.predict(images, run.inputs(images)).output
    losses = objective_losses(objective, output, images.latents, images.noise, images.times)
    return losses[PLAIN].view(numbers.shape)


def fixed_times(section: Objective, device: torch.device, offset: float = OFFSETS["all"]) -> Tensor:
    """The eight times, (8,) float32: of "ddpm" whole steps below 1000, of "flow" from 0 (data) to 1 (noise)."""
    times = [(number + offset) / NUM_TIMES for number in range(NUM_TIMES)]
    if section.kind == "ddpm":
        times = [float(int(share * TRAIN_STEPS)) for share in times]
    return torch.tensor(times, device=device)


def posterior_keys(hashes: np.ndarray) -> np.ndarray:
    """Keys of the posterior draws of records, (B,) int64 of their (B,) uint64 hashes."""
    return mix(hashes).view(np.int64)


def noise_keys(hashes: np.ndarray) -> np.ndarray:
    """Keys of the noise at each time, (B, 8) int64 of (B,) uint64 hashes."""
    numbers = np.arange(1, NUM_TIMES + 1, dtype=np.uint64)
    return mix(mix(hashes)[:, None] + numbers).view(np.int64)
