"""The second stage of a batch: the records that its order names are looked up in the index of their store.

What is looked up for a record depends only on its position and its epoch, so batches may be looked up alone or
together; a hundred cost little more than ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import RecipeError
from ..format.row_layout import view_suffixes
from ..order.batch_plan import BatchPlan, PlannedBatch
from ..order.caption_odds import CaptionOdds, choose_captions
from ..order.shuffle import PURPOSE_CAPTION, PURPOSE_VIEW, keyed_choice, keyed_uniform
from ..order.slices import rank_slice
from ..revisions.records import BucketIndex
from ..store import LatentStore
from .latents import draw_keys


@dataclass(frozen=True, eq=False, kw_only=True)
class ResolvedBatch:
    """A rank's slice of one global batch, looked up and not yet read.

    Args:
      number: number of the global batch, over all epochs.
      store: index into the reader's stores.
      bucket: "HxW" in pixels.
      epoch: epoch of the batch.
      global_size: number of records in the global batch.
      rows: (B,) int64 rows in ``store.latents(bucket)``.
      records: (B,) int64 positions in the records table.
      labels: (B,) int64 class indexes, -1 for none.
      views: (B,) int64 the crop of each image, flipped or not, as ``view_suffixes`` numbers them; None if the store has
        one view.
      caption_ids: (B,) int64 the caption chosen for each record, or None.
      draw_keys: (B,) int64 keys of the posterior draw, or None without a posterior.
    """

    number: int
    store: int
    bucket: str
    epoch: int
    global_size: int
    rows: np.ndarray
    records: np.ndarray
    labels: np.ndarray
    views: np.ndarray | None = None
    caption_ids: np.ndarray | None = None
    draw_keys: np.ndarray | None = None


class Resolver:
    """Looks up a rank's slices of planned batches.

    Args:
      stores: the store of each plan.
      plans: the plans of the order, as ``BatchOrder.plans``.
      rank: the slice of every global batch that is looked up.
      world_size: number of slices.
      captions: whether a caption is chosen for each record of a store with captions.
      seed: seed of the posterior draw and of the choice of caption and view; None: the seed of each plan.
      caption_odds: how often each caption of a record is drawn, for each store; None for uniform draws.
    Raises: RecipeError: a plan was made for another store; IndexError: there is no such rank.
    """

    def __init__(
        self,
        stores: Sequence[LatentStore],
        plans: Sequence[BatchPlan],
        *,
        rank: int = 0,
        world_size: int = 1,
        captions: bool = True,
        seed: int | None = None,
        caption_odds: Sequence[CaptionOdds | None] = (),
    ) -> None:
        if isinstance(stores, LatentStore) or len(stores) != len(plans):
            count = "one, not in a list" if isinstance(stores, LatentStore) else len(stores)
            raise RecipeError(f"stores of a reader: {count}; expected a list of {len(plans)}, one for each plan.")
        if not 0 <= rank < world_size:
            raise IndexError(f"rank {rank} of {world_size} ranks: expected 0 to {world_size - 1}")
        self.stores = list(stores)
        self.plans = list(plans)
        self.rank = rank
        self.world_size = world_size
        self.seeds = [plan.seed if seed is None else seed for plan in plans]
        self._check_plans()
        self._has_captions = [captions and bool(store.texts) for store in stores]
        odds = list(caption_odds) if captions else []
        odds += [None] * (len(self.stores) - len(odds))
        self.caption_odds = [None if each is None else each.identity() for each in odds] if any(odds) else None
        self._caption_bounds = [
            None if each is None else each.bounds(store) for each, store in zip(odds, self.stores, strict=True)
        ]

    def resolve(self, planned: Sequence[PlannedBatch], first: int = 0) -> list[ResolvedBatch]:
        """Look up this rank's slices of consecutive batches, those of one store and bucket together.

        Args:
          planned: the global batches.
          first: number of the first of them.
        """
        slices = [rank_slice(len(batch.positions), self.rank, self.world_size) for batch in planned]
        groups: dict[tuple[int, str], list[int]] = {}
        for i, batch in enumerate(planned):
            groups.setdefault((batch.plan, batch.bucket), []).append(i)
        resolved: dict[int, ResolvedBatch] = {}
        for (store, bucket), members in groups.items():
            positions = [planned[i].positions[slices[i]] for i in members]
            epochs = [np.full(len(planned[i].positions[slices[i]]), planned[i].epoch) for i in members]
            columns = self._columns(store, bucket, np.concatenate(positions), np.concatenate(epochs))
            stop = 0
            for i, batch_positions in zip(members, positions, strict=True):
                start = stop
                stop = start + len(batch_positions)
                resolved[i] = ResolvedBatch(
                    number=first + i,
                    store=store,
                    bucket=bucket,
                    epoch=planned[i].epoch,
                    global_size=len(planned[i].positions),
                    **{name: column[start:stop] for name, column in columns.items()},
                )
        return [resolved[i] for i in range(len(planned))]

    def _columns(self, number: int, bucket: str, positions: np.ndarray, epochs: np.ndarray) -> dict[str, np.ndarray]:
        """The (B,) columns of a ``ResolvedBatch``, those that are None left out.

        Args:
          number: index of the store.
          positions: (B,) int64 positions within the bucket.
          epochs: (B,) int64 epoch of each record.
        """
        store = self.stores[number]
        seed = self.seeds[number]
        index = store.index(bucket)
        rows, records, labels = index.take(positions)
        columns = {"rows": rows, "records": records, "labels": labels}
        num_views = len(view_suffixes(store.spec))
        if num_views > 1:
            choices = np.full(len(records), num_views)
            columns["views"] = keyed_choice(choices, seed=seed, epoch=epochs, records=records, purpose=PURPOSE_VIEW)
        if self._has_captions[number]:
            columns["caption_ids"] = self._captions(number, bucket, index, positions, epochs, records)
        if store.spec.latent.has_posterior:
            columns["draw_keys"] = draw_keys(seed, epochs, records).numpy()
        return columns

    def _captions(
        self,
        number: int,
        bucket: str,
        index: BucketIndex,
        positions: np.ndarray,
        epochs: np.ndarray,
        records: np.ndarray,
    ) -> np.ndarray:
        """(B,) int64 id of the caption that is drawn for each record."""
        seed = self.seeds[number]
        bounds = self._caption_bounds[number]
        if bounds is not None:
            uniform = keyed_uniform(seed=seed, epoch=epochs, records=records, purpose=PURPOSE_CAPTION)
            return choose_captions(bounds[bucket], index, positions, uniform).astype(np.int64)
        starts = index.caption_starts[positions]
        num_captions = index.caption_starts[positions + 1] - starts
        choices = keyed_choice(num_captions, seed=seed, epoch=epochs, records=records, purpose=PURPOSE_CAPTION)
        return index.caption_ids[starts + choices].astype(np.int64)

    def _check_plans(self) -> None:
        for store, plan in zip(self.stores, self.plans, strict=True):
            check_fit(store, plan)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._check_plans()  # an incomplete store may have grown since


def check_fit(store: LatentStore, plan: BatchPlan) -> None:
    """Check that a plan was made for this store.

    Raises: RecipeError: names the bucket and both counts.
    """
    if plan.selection and plan.selection.content_hash != store.content_hash:
        raise RecipeError(
            f"store '{store.path}': the plan's selection was made from another store, or another revision of it. "
            "Create it again with RecordFilter.select."
        )
    for bucket in {**plan.buckets, **store.buckets}:
        stored, planned = store.buckets.get(bucket, 0), plan.buckets.get(bucket, 0)
        if plan.selection:  # the plan may have only a part of the records
            planned = plan.selection.num_stored.get(bucket, 0)
        if planned != stored:
            raise RecipeError(
                f"store '{store.path}': it has {stored} records in bucket '{bucket}', the plan was made for a store "
                f"with {planned} there. Make the plan from store.buckets, or from a selection of this store."
            )
