"""The torch side of a store: whole batches through a ``torchdata`` ``StatefulDataLoader``.

    for batch in make_loader(store, global_batch=256, seed=0):      # one epoch
        ...                                                         # batch.latents, .labels, .captions

The state of a loader is one number and what must not change. Threads read ahead: worker processes make a cheap loader
ten times slower. To use them anyway, read batches by number, in any order:

    DataLoader(BatchReader([store], plan), batch_size=None, sampler=range(step, steps), num_workers=4)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from ..errors import RecipeError, RunError
from .batches.batch import Batch
from .batches.captions import TextForm
from .batches.gather import Gatherer
from .batches.latents import Normalise
from .batches.reader import BatchReader
from .batches.resolve import Resolver
from .batches.row_checks import RowCheck, RowChecks
from .batches.stream import BatchStream, is_gpu
from .order.batch_plan import BatchPlan, Leftovers
from .order.caption_odds import CaptionOdds
from .order.filters import Selection
from .order.shuffle import ShardWindow
from .store import LatentStore


def make_loader(
    store: LatentStore,
    *,
    global_batch: int | Mapping[str, int],
    seed: int = 0,
    leftovers: Leftovers = "short",
    window: ShardWindow | None = None,
    selection: Selection | None = None,
    rank: int = 0,
    world_size: int = 1,
    text: TextForm = "padded",
    texts: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    companions: Sequence[str] | None = None,
    prefetch: int = 2,
    device: torch.device | str | None = None,
    caption_odds: CaptionOdds | None = None,
    normalise: Normalise = "encoder",
    check: RowCheck = "first",
    collate_fn: Callable[[Batch], Any] | None = None,
) -> StatefulDataLoader:
    """Loader over a store: each pass is one epoch, ``state_dict()`` resumes at any batch.

    It is ``torchdata``'s own over a ``BatchStream``, its ``dataset``. A state that is loaded counts, and is checked,
    when the loader is iterated next.

    Args:
      store: an open store.
      global_batch: records in a full batch, over all ranks; one number, or one for each bucket.
      seed: for the order, the posterior draw, and the choice of caption and view (crop and flip).
      leftovers: what happens to records of a bucket that do not fill a batch (``BatchPlan``).
      window: a shuffle for slow disks (``ShardWindow``).
      selection: the records to train on (``RecordFilter.select``); None for all.
      rank: this process reads its slice of every global batch.
      world_size: number of slices.
      text: captions "padded" to the longest of the batch, "packed" one after the other, or "none".
      texts: names of the text encoders to read; None for all in the store.
      features: names of the image features to read; None for all in the store.
      companions: names of the companion images, likewise.
      prefetch: batches read ahead.
      device: as in ``BatchStream``.
      caption_odds: how often each caption of a record is drawn; None for uniform draws.
      normalise: the latents, as for the "encoder", by the statistics of the "store", or "none": raw.
      check: when rows are compared with their checksums: the "first" time that this process reads them, "always" or
        "never". A batch with a damaged row raises DamageError instead of being handed out.
      collate_fn: turns each batch into what the loop reads, such as one of ``leandit.adapters``; None for the batch.
    Raises: RunError: the store has no records; RecipeError: the selection belongs to another store, or an argument is
      wrong.
    """
    device = None if device is None else torch.device(device)
    if text not in get_args(TextForm):
        raise RecipeError(f"text {text!r}: expected one of {', '.join(get_args(TextForm))}.")
    buckets = selection.counts if selection else store.buckets
    plan = BatchPlan(buckets, global_batch, seed, leftovers=leftovers, window=window, selection=selection)
    reader = BatchReader(
        [store],
        plan,
        resolver=Resolver(
            [store],
            [plan],
            rank=rank,
            world_size=world_size,
            captions=text != "none",
            caption_odds=[caption_odds],
        ),
        gatherer=Gatherer(
            [store],
            texts=[] if text == "none" else texts,
            features=features,
            companions=companions,
            pin=is_gpu(device),
        ),
        checks=RowChecks([store], check),
        normalise=normalise,
        pads=text == "padded",
    )
    check_not_empty(store, plan)
    stream = BatchStream(reader, prefetch=prefetch, device=device)
    collate: Any = collate_fn  # torchdata calls it with a list of samples, or as here with each batch
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 calls it, torch 2.13 warns
        # With a generator of its own, a loader draws no seed for workers from torch's global one.
        return StatefulDataLoader(
            stream, batch_size=None, num_workers=0, collate_fn=collate, generator=torch.Generator()
        )


def shard_window(store: LatentStore, shards: int, selection: Selection | None = None) -> ShardWindow:
    """A window of ``shards`` shards of each bucket; a selection makes its blocks smaller."""
    rows = {}
    for bucket, count in store.buckets.items():
        trains = selection.counts[bucket] if selection else count
        rows[bucket] = max(1, round(store.latents(bucket).shard_rows * trains / max(1, count)))
    return ShardWindow(shards, rows)


def check_not_empty(store: LatentStore, plan: BatchPlan) -> None:
    """Raises: RunError: the store has no records."""
    if not plan.num_records:
        raise RunError(f"store '{store.path}': it holds no records, so there is nothing to train on.")
