"""The data of a run: which records train, in which order, and the loader that reads them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...datasets.loader import BatchLoader, make_loader, shard_window
from ...datasets.order.caption_odds import CaptionOdds
from ...datasets.order.filters import RecordFilter, ScoreTable, Selection
from ...datasets.order.slices import batch_sizes_by_tokens
from ...datasets.store import LatentStore
from ..config import DataSection, TrainRecipe
from ..models.build import pixels_per_token
from ..models.spec import ModelSpec
from ..parallel.ranks import ALONE, Ranks


def build_loader(
    recipe: TrainRecipe,
    store: LatentStore,
    spec: ModelSpec,
    device: torch.device,
    warn: Callable[[str], None],
    ranks: Ranks = ALONE,
) -> BatchLoader:
    """The loader of a rank.

    Args:
      warn: called with the number of filtered records, and with buckets that never fill a batch.
    Raises: RecipeError: the filter leaves no record, one image exceeds ``data.batch_tokens``, or there is no batch.
    """
    data = recipe.data
    selection = select_records(data, store)
    if selection:
        warn(f"store '{store.path}': {selection.describe()}")
    buckets = selection.counts if selection else store.buckets
    sizes = recipe.run.global_batch
    if data.batch_tokens:
        used = [bucket for bucket, count in buckets.items() if count]  # a filter may empty the others
        sizes = batch_sizes_by_tokens(used, data.batch_tokens, pixels_per_token(spec, store.spec.latent))
        sizes |= dict.fromkeys(buckets.keys() - sizes.keys(), 1)
    loader = make_loader(
        store,
        global_batch=sizes,
        seed=recipe.run.seed,
        leftovers=data.leftovers,
        window=shard_window(store, data.window_shards, selection) if data.window_shards else None,
        selection=selection,
        rank=ranks.rank,
        world_size=ranks.world_size,
        text="padded" if spec.takes_text else "none",
        prefetch=recipe.run.prefetch,
        device=device,
        caption_odds=caption_odds(data) if spec.takes_text else None,
    )
    for plan in loader.dataset.reader.order.plans:
        if plan.never_read:
            names = ", ".join(f"{bucket} ({count})" for bucket, count in plan.never_read.items())
            warn(f"data.leftovers 'drop': never read, because they fill no batch, are the records of {names}")
    return loader


def caption_odds(data: DataSection) -> CaptionOdds | None:
    """Odds of each caption of a record; None if all are drawn alike."""
    if not (data.caption_scores or data.original_share):
        return None
    return CaptionOdds(
        data.caption_scores, data.score_key, data.min_caption_score, data.caption_temperature, data.original_share
    )


def select_records(data: DataSection, store: LatentStore) -> Selection | None:
    """The records that pass the recipe's filter; None without a filter.

    Raises: RecipeError: as ``RecordFilter.select``.
    """
    if not (data.labels or data.min_aspect or data.max_aspect or data.scores):
        return None
    scores = ScoreTable(data.scores, data.score_column, data.min_score, data.score_key) if data.scores else None
    return RecordFilter(data.labels or None, data.min_aspect or None, data.max_aspect or None, scores).select(store)
