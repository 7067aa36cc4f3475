"""The data of a run: which records of which stores train, in which order, their loader, and the empty caption."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...datasets.batches.batch import Batch
from ...datasets.batches.captions import caption_of
from ...datasets.batches.gather import Gatherer
from ...datasets.batches.reader import BatchReader
from ...datasets.batches.resolve import Resolver
from ...datasets.batches.row_checks import RowChecks
from ...datasets.batches.stream import BatchStream, is_gpu
from ...datasets.format.schema import LatentStatistics, StoreSpec
from ...datasets.loader import check_not_empty, shard_window
from ...datasets.order.batch_plan import BatchOrder, BatchPlan
from ...datasets.order.caption_odds import CaptionOdds
from ...datasets.order.filters import RecordFilter, ScoreTable
from ...datasets.order.mixture import Mixture
from ...datasets.order.slices import batch_sizes_by_tokens
from ...datasets.store import LatentStore
from ..config import TrainRecipe
from ..data_recipe import DataSection, RecordsSection
from ..models.build import pixels_per_token
from ..models.conditioning import join_texts, null_length
from ..models.spec import ModelSpec
from ..parallel.ranks import ALONE, Ranks
from ..techniques.registry import techniques_of

LOG = logging.getLogger(__name__)


def build_stream(
    recipe: TrainRecipe,
    stores: Sequence[LatentStore],
    spec: ModelSpec,
    device: torch.device,
    warn: Callable[[str], None],
    ranks: Ranks = ALONE,
    statistics: LatentStatistics | None = None,
) -> BatchStream:
    """The batches of a rank.

    Args:
      stores: those that the recipe names, in order, else the only one.
      warn: called with the number of filtered records, and with buckets that never fill a batch.
      statistics: that the run began with, for ``latent.normalise``; None: those of the stores.
    Raises: RecipeError: a filter leaves no record, one image exceeds ``data.batch_tokens``, or there is no batch;
      RunError: a store has no records.
    """
    sections = recipe.data.mixture or [recipe.data]
    plans = [
        store_plan(recipe, section, store, spec, recipe.run.seed + number, warn)
        for number, (section, store) in enumerate(zip(sections, stores, strict=True))
    ]
    order = batch_order(recipe.data, plans, recipe.run.seed)
    reader = BatchReader(
        stores,
        order,
        resolver=Resolver(
            stores,
            order.plans,
            rank=ranks.rank,
            world_size=ranks.world_size,
            captions=spec.takes_text,
            caption_odds=[caption_odds(section) for section in sections],
        ),
        gatherer=Gatherer(
            stores,
            texts=texts_read(spec, stores[0].spec),
            features=[name for technique in techniques_of(recipe) for name in technique.features],
            companions=[spec.reference] if spec.reference else [],
            pin=is_gpu(device),
        ),
        checks=RowChecks(stores, recipe.data.check),
        normalise=recipe.latent.normalise,
        statistics=statistics,
        pads=False,
    )
    return BatchStream(reader, prefetch=recipe.run.prefetch, device=device)


def texts_read(spec: ModelSpec, store: StoreSpec) -> list[str]:
    """Names of the text encoders whose captions a model reads: those of its roles, or the first of the store."""
    if not spec.takes_text:
        return []
    if spec.texts:
        return [text.name for text in spec.texts]
    return [store.text_encoders[0].name]


def batch_order(data: DataSection, plans: Sequence[BatchPlan], seed: int) -> BatchOrder:
    """The order that a recipe asks for: a plan, or a mixture of plans.

    Args:
      plans: one for each store that the recipe names, in order, else the only one.
      seed: of the shuffle of mixtures.
    """
    if len(plans) == 1:
        return plans[0]
    weights = [section.weight for section in data.mixture]
    return Mixture(list(zip(plans, weights, strict=True)), seed)


def store_plan(
    recipe: TrainRecipe,
    section: RecordsSection,
    store: LatentStore,
    spec: ModelSpec,
    seed: int,
    warn: Callable[[str], None],
) -> BatchPlan:
    """The batches of one store.

    Raises: as ``build_stream``.
    """
    data, selection = recipe.data, None
    if section.has_filter or data.holdout:
        scores = None
        if section.scores:
            scores = ScoreTable(section.scores, section.score_column, section.min_score, section.score_key)
        aspects = section.min_aspect or None, section.max_aspect or None
        selection = RecordFilter(section.labels or None, *aspects, scores, data.holdout).select(store)
        warn(f"store '{store.path}': {selection.describe()}")
    buckets = selection.counts if selection else store.buckets
    sizes = recipe.run.global_batch
    if data.batch_tokens:
        used = [bucket for bucket, count in buckets.items() if count]  # a filter may empty the others
        sizes = batch_sizes_by_tokens(used, data.batch_tokens, pixels_per_token(spec, store.spec.latent))
        sizes |= dict.fromkeys(buckets.keys() - sizes.keys(), 1)
    window = shard_window(store, data.window_shards, selection) if data.window_shards else None
    plan = BatchPlan(buckets, sizes, seed, leftovers=data.leftovers, window=window, selection=selection)
    check_not_empty(store, plan)
    LOG.info(
        "store '%s': records of each bucket %s, images of a batch %s, leftovers %s",
        store.path,
        dict(buckets),
        sizes,
        data.leftovers,
    )
    if plan.never_read:
        names = ", ".join(f"{bucket} ({count})" for bucket, count in plan.never_read.items())
        warn(f"data.leftovers 'drop': the records of {names} are never read, because they do not fill a batch")
    return plan


def caption_odds(section: RecordsSection) -> CaptionOdds | None:
    """Odds of each caption of a record; None if all are drawn alike."""
    if not (section.caption_scores or section.original_share):
        return None
    scores = section.caption_scores, section.score_key, section.min_caption_score
    return CaptionOdds(*scores, section.caption_temperature, section.original_share)


def null_captions(
    spec: ModelSpec, store: StoreSpec, null_of: Callable[[str], tuple[np.ndarray | None, np.ndarray | None]]
) -> tuple[Tensor | None, Tensor | None]:
    """The empty caption as the model sees it, (L, D) and (P,) float32; None for what it does not read.

    L is max_tokens, or for a model of valid tokens alone their number; None too if the store does not say it.

    Args:
      null_of: tokens (max_tokens, D) and pooled vector (P,) of the empty caption, by name of the text encoder.
    """
    if not spec.takes_text:
        return None, None
    if not spec.texts:
        tokens = null_of("")[0]
        assert tokens is not None
        length = null_length(spec, store.text)
        return torch.from_numpy(tokens[:length]).float() if length else None, None
    nulls = {}
    for text in spec.texts:
        nulls[text.name] = caption_of(*null_of(text.name))
    captions, pooled = join_texts(spec, nulls)
    return captions[0], None if pooled is None else pooled[0]


def stored_null(store: LatentStore, name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Tokens and pooled vector of the empty caption in a store, None for what its encoder does not give."""
    text = store.text(name)
    return text.null if text.spec.has_tokens else None, text.null_pooled if text.spec.pooled_width else None


def longest_caption(spec: ModelSpec, store: StoreSpec) -> int:
    """Caption tokens of an image, at most; 0 for a class-conditional model."""
    if not spec.takes_text:
        return 0
    return spec.joined_tokens or (store.text.max_tokens if store.text else 0)


def buckets_of_stores(stores: Sequence[LatentStore]) -> dict[str, int]:
    """Records of each bucket, over all stores."""
    return dict(sum((Counter(store.buckets) for store in stores), Counter()))


def endless(stream: BatchStream) -> Iterator[Batch]:
    """Batches of successive epochs, without end."""
    while True:
        yield from stream
