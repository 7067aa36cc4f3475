"""Which held-out records are evaluated, in groups of one forward each; and how they are read.

The groups depend on the stores and the recipe alone. A forward adds in an order that may depend on the images beside
each other, so ranks share groups, never images of one: each loss is the same to the bit at any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....datasets.batches.batch import Batch
from ....datasets.batches.lookup import Records
from ....datasets.batches.reader import BatchReader
from ....datasets.errors import RecipeError
from ....datasets.order.holdout import key_hashes
from ....datasets.order.planned import PlannedBatch
from ...data_recipe import DataSection
from ...metrics.flops import latent_size_of, tokens_per_image
from ...models.spec import ModelSpec
from .fixed_draws import NUM_TIMES, posterior_keys

GROUP_TOKENS = 8192  # image tokens of a forward: enough to keep a GPU busy, far fewer than a training step holds


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
        if tuple(stage) not in self._groups:
            self._groups[tuple(stage)] = [
                group for number, share in stage.items() for group in self._groups_of(number, share)
            ]
        return self._groups[tuple(stage)]

    def _stage(self, step: int) -> dict[int, float]:
        """Indexes of the stores that train at a step, with their shares."""
        return {number: turn.share for number, turn in enumerate(self._turns) if turn.has(step)} or {0: 1.0}

    def _groups_of(self, number: int, share: float) -> list[Group]:
        store, selection = self._reader.stores[number], self._reader.order.plans[number].selection
        assert selection is not None
        names = list(selection.held_out)
        positions = np.concatenate([selection.held_out[name] for name in names])
        buckets = np.repeat(np.arange(len(names)), [len(selection.held_out[name]) for name in names])
        records = [store.index(name).records[selection.held_out[name]] for name in names]
        hashes = key_hashes(store, np.concatenate(records))
        chosen = np.argsort(hashes)[: max(1, int(self._most * share))]
        groups = []
        for place, bucket in enumerate(names):
            of_bucket = chosen[buckets[chosen] == place]
            tokens = tokens_per_image(self._spec, latent_size_of(bucket, store.spec.latent))
            size = max(1, GROUP_TOKENS // (NUM_TIMES * tokens))
            for start in range(0, len(of_bucket), size):
                part = of_bucket[start : start + size]
                groups.append(Group(number, bucket, positions[part], hashes[part]))
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
