"""Look up rows, labels, captions and draws of planned batches, many batches at once. Nothing is read here.

The result for a record depends only on its position and epoch, so batches may be looked up alone or together; a hundred
cost little more than ten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..format.row_layout import view_suffixes
from ..order.batch_plan import PlannedBatch
from ..order.caption_odds import choose_captions
from ..order.shuffle import PURPOSE_CAPTION, PURPOSE_VIEW, keyed_choice, keyed_uniform
from ..order.slices import rank_slice
from ..store import LatentStore
from .latents import draw_keys


class Records(NamedTuple):
    """Some records of one bucket.

    Args:
      rows: (B,) int64 in ``store.latents(bucket)``.
      records: (B,) int64 positions in the records table.
      labels: (B,) class index, -1 for none.
      views: (B,) int64 the crop to read of each image, flipped or not, as ``view_suffixes`` numbers them; None if the
        store has one view.
      caption_ids: (B,) int64 the caption chosen for each, or None.
      draw_keys: (B,) int64 keys of the posterior draw, or None without a posterior.
    """

    rows: np.ndarray
    records: np.ndarray
    labels: np.ndarray
    views: np.ndarray | None
    caption_ids: np.ndarray | None
    draw_keys: np.ndarray | None


class WantedBatch(NamedTuple):
    """A global batch, and a rank's records of it, before they are read."""

    planned: PlannedBatch
    wanted: Records


@dataclass(frozen=True)
class Lookup:
    """Looks up a rank's slices of planned batches.

    Args:
      stores: one for each of the order's plans.
      seeds: of the posterior draw and the choice of caption and view, one for each plan.
      rank, world_size: select the slice of every global batch.
      captions: choose one for each record, if the store has captions.
      caption_bounds: of each store, by bucket, from ``CaptionOdds.bounds``; None for uniform draws.
    """

    stores: Sequence[LatentStore]
    seeds: Sequence[int]
    rank: int
    world_size: int
    captions: bool
    caption_bounds: Sequence[Mapping[str, np.ndarray] | None]

    def batches(self, planned: Sequence[PlannedBatch]) -> list[WantedBatch]:
        """Look up planned batches, in their order: those of a store and bucket together."""
        slices = [rank_slice(len(batch.positions), self.rank, self.world_size) for batch in planned]
        groups: dict[tuple[int, str], list[int]] = {}
        for number, batch in enumerate(planned):
            groups.setdefault((batch.plan, batch.bucket), []).append(number)
        found: dict[int, WantedBatch] = {}
        for (plan, bucket), numbers in groups.items():
            positions = [planned[number].positions[slices[number]] for number in numbers]
            epochs = [planned[number].epochs[slices[number]] for number in numbers]
            columns = self._columns(plan, bucket, np.concatenate(positions), np.concatenate(epochs))
            stop = 0
            for number, of_batch in zip(numbers, positions, strict=True):
                start, stop = stop, stop + len(of_batch)
                parts = [None if column is None else column[start:stop] for column in columns]
                found[number] = WantedBatch(planned[number], Records(*parts))  # pyright: ignore[reportArgumentType]
        return [found[number] for number in range(len(planned))]

    def _columns(self, plan: int, bucket: str, positions: np.ndarray, epochs: np.ndarray) -> Records:
        store = self.stores[plan]
        index, latent = store.index(bucket), store.spec.latent
        rows, records, labels = index.take(positions)
        keyed: dict[str, Any] = {"seed": self.seeds[plan], "epoch": epochs, "records": records}
        views, captions, keys = None, None, None
        if (num_views := len(view_suffixes(store.spec))) > 1:
            views = keyed_choice(np.full(len(records), num_views), **keyed, purpose=PURPOSE_VIEW)
        if store.texts and self.captions:
            if bounds := self.caption_bounds[plan]:
                uniform = keyed_uniform(**keyed, purpose=PURPOSE_CAPTION)
                captions = choose_captions(bounds[bucket], index, positions, uniform)
            else:
                starts = index.caption_starts[positions]
                choices = index.caption_starts[positions + 1] - starts
                captions = index.caption_ids[starts + keyed_choice(choices, **keyed, purpose=PURPOSE_CAPTION)]
        captions = None if captions is None else captions.astype(np.int64)
        if latent.has_posterior:
            keys = draw_keys(self.seeds[plan], epochs, records).numpy()
        return Records(rows, records, labels, views, captions, keys)
