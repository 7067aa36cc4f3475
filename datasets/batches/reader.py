"""Reading one global batch: the records that its order names, gathered from the store into reused memory.

A batch is a function of its number: any rank, worker or thread may read it, at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch.utils.data import Dataset

from ...errors import RecipeError
from ..arrays.sharded_array import ShardedArray
from ..disk.fork_safe import reset_in_forks
from ..format.row_layout import LATENTS, view_suffixes
from ..format.schema import LatentStatistics
from ..order.alike import check_alike, store_names
from ..order.batch_plan import BatchOrder, BatchPlan, PlannedBatch
from ..order.caption_odds import CaptionOdds, choose_captions
from ..order.shuffle import PURPOSE_CAPTION, PURPOSE_VIEW, keyed_choice, keyed_uniform
from ..order.slices import rank_slice
from ..revisions.latent_statistics import merge_statistics
from ..store import LatentStore
from .batch import Batch, FeatureBatch, Records
from .buffer_pool import BufferPool
from .captions import TextForm, read_captions
from .latents import Normalise, draw_keys, normalised_as
from .row_checks import RowCheck, RowChecks, group_arrays
from .view_sizes import DrawnViews, ViewSizes

PLANNED_AHEAD = 32  # batches planned together: one alone takes a tenth of the time of all
DROPPED = ("_planned", "_groups", "_lock", "_view_sizes")  # when a reader is pickled
KEPT_GROUPS = 2  # of planned batches: threads read on both sides of a boundary


class WantedBatch(NamedTuple):
    """A global batch, and a rank's records of it, before they are read."""

    planned: PlannedBatch
    records: Records


class BatchReader(Dataset):
    """Global batches by number; a map-style dataset of infinite length.

    Args:
      stores: one for each of the order's plans.
      order: the batches in order.
      rank: this reader reads its slice of every global batch.
      world_size: number of slices.
      text: form of the captions, or "none".
      features: names of the image features to read; None for all in the store.
      companions: names of the companion images, likewise.
      pin: use page-locked memory.
      seed: for the posterior draw and the choice of caption and view; None: each plan's.
      caption_odds: how often each caption of a record is drawn, for each store; None for uniform draws.
      normalise: the latents, as in ``normalised_as``.
      statistics: for "store"; None: those of all stores together.
      check: when rows are compared with their checksums.
    Raises: RecipeError: a plan or selection belongs to another store, the stores cannot be mixed, ``text`` or ``check``
      is unknown; IndexError: no such rank.
    """

    def __init__(
        self,
        stores: Sequence[LatentStore],
        order: BatchOrder,
        *,
        rank: int = 0,
        world_size: int = 1,
        text: TextForm = "padded",
        features: Sequence[str] | None = None,
        companions: Sequence[str] | None = None,
        pin: bool = False,
        seed: int | None = None,
        caption_odds: Sequence[CaptionOdds | None] = (),
        normalise: Normalise = "encoder",
        statistics: LatentStatistics | None = None,
        check: RowCheck = "never",
    ) -> None:
        if isinstance(stores, LatentStore) or len(stores) != len(order.plans):
            count = "one, not in a list" if isinstance(stores, LatentStore) else len(stores)
            raise RecipeError(f"stores of a reader: {count}; expected a list of {len(order.plans)}, one for each plan.")
        self.stores, self.order = list(stores), order
        self.seeds = [plan.seed if seed is None else seed for plan in order.plans]
        rank_slice(0, rank, world_size)  # checks the rank
        self._rank, self._world_size = rank, world_size
        if text not in get_args(TextForm):
            raise RecipeError(f"text {text!r}: expected one of {', '.join(get_args(TextForm))}.")
        if check not in get_args(RowCheck):
            raise RecipeError(f"check {check!r}: expected one of {', '.join(get_args(RowCheck))}.")
        for store, plan in zip(self.stores, order.plans, strict=True):
            check_fit(store, plan)
        self._features = list(self.stores[0].features if features is None else features)
        self._companions = list(self.stores[0].companions if companions is None else companions)
        named_specs = list(zip(store_names(self.stores), [store.spec for store in self.stores], strict=True))
        check_alike(named_specs, captions=text != "none", features=self._features)
        self.statistics = (statistics or pooled_statistics(self.stores)) if normalise == "store" else None
        self.latent_specs = [normalised_as(store.spec.latent, normalise, self.statistics) for store in self.stores]
        self._text: TextForm = text
        for store in self.stores:
            _check_has(store, "feature", self._features, store.features)
            _check_has(store, "companion", self._companions, store.companions)
            first, kinds = ({one.name: one.kind for one in each.spec.companions} for each in (self.stores[0], store))
            for name in self._companions:
                if kinds[name] != first[name]:
                    raise RecipeError(
                        f"store '{store.path}': '{name}' is of kind '{kinds[name]}', of '{first[name]}' in "
                        f"'{self.stores[0].path}'. Leave it out, or mix other stores."
                    )
        odds = caption_odds if caption_odds and text != "none" else [None] * len(self.stores)
        self._caption_bounds = [one and one.bounds(store) for one, store in zip(odds, self.stores, strict=True)]
        self.caption_odds = [of_store and of_store.identity() for of_store in odds] if any(odds) else None
        self._buffers = BufferPool(pin=pin)
        self._checks = RowChecks(self.stores, check, (*self._features, *self._companions))
        self.reset()
        reset_in_forks(self)

    def reset(self) -> None:
        """Drop all planned batches."""
        of_stores = {id(store): ViewSizes(store) for store in self.stores}
        self._view_sizes = [of_stores[id(store)] for store in self.stores]
        self._groups: dict[tuple[int, str, str], dict[str, list[ShardedArray]]] = {}
        self._planned: dict[int, list[WantedBatch]] = {}  # by number // PLANNED_AHEAD
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Batch:
        """Read this rank's slice of a global batch; sequential reads are cheapest: they are planned together."""
        if number < 0:
            raise IndexError(f"batch {number}: expected a number from 0")
        return self.read(*self._look_up(number), number)

    def read(self, planned: PlannedBatch, wanted: Records, number: int = 0) -> Batch:
        """Read some records of a planned batch: a rank's slice, or any that the caller has looked up.

        Args:
          number: of the global batch.
        Raises: DamageError: a shard or a row is not what was written.
        """
        store, bucket, texts = self.stores[planned.plan], planned.bucket, {}
        if wanted.caption_ids is not None:
            texts = {name: read_captions(store.text(name), wanted.caption_ids, self._buffers) for name in store.texts}
        groups = {
            group: {
                name: torch.from_numpy(self._take(arrays, wanted))
                for name, arrays in self._arrays(planned.plan, bucket, group).items()
            }
            for group in (LATENTS, *self._companions, *self._features)
        }
        batch = Batch(
            stored=_only(groups[LATENTS]),
            labels=_tensor(wanted.labels),
            records=_tensor(wanted.records),
            draw_keys=None if wanted.draw_keys is None else _tensor(wanted.draw_keys),
            spec=self.latent_specs[planned.plan],
            bucket=bucket,
            number=number,
            global_size=len(planned.positions),
            epoch=planned.epoch,
            store=planned.plan,
            texts=texts,
            pads=self._text == "padded",
            features={name: FeatureBatch(**groups[name]) for name in self._features},
            stored_companions={name: _only(groups[name]) for name in self._companions},
            drawn=DrawnViews(self._view_sizes[planned.plan], bucket, wanted.records, wanted.views),
        )
        self._checks.check(planned.plan, bucket, wanted)
        return batch

    def fetch_ahead(self, first: int, count: int) -> None:
        """Prefetch the shards of these batches, in order, from stores at a URL."""
        wanted: dict[int, list[str]] = {number: [] for number in range(len(self.stores))}
        for number in range(first, first + count):
            planned, records = self._look_up(number)
            wanted[planned.plan] += self._shards_of(planned, records)
        for store in dict.fromkeys(self.stores):
            if store.remote is not None:
                store.remote.prefetch(
                    path for number, paths in wanted.items() if self.stores[number] is store for path in paths
                )

    def _shards_of(self, planned: PlannedBatch, wanted: Records) -> list[str]:
        """Paths of the shards that a slice of a batch may read."""
        store = self.stores[planned.plan]
        groups = [
            self._arrays(planned.plan, planned.bucket, name) for name in (LATENTS, *self._companions, *self._features)
        ]
        arrays = [array for group in groups for pair in group.values() for array in pair if array is not None]
        paths = [path for array in arrays for path in array.shard_paths(wanted.rows)]
        for tokens in map(store.text, store.texts) if wanted.caption_ids is not None else ():
            starts = tokens.starts[wanted.caption_ids]
            for array in tokens.arrays if tokens.spec.has_tokens else ():
                paths += array.shard_paths(starts)
            if tokens.spec.pooled_width:
                paths += tokens.pooled.shard_paths(tokens.pooled_rows[wanted.caption_ids])
        return paths

    def _look_up(self, number: int) -> WantedBatch:
        group, place = divmod(number, PLANNED_AHEAD)
        with self._lock:  # so that a group is planned once, by the first thread that needs it
            if group not in self._planned:
                planned = self.order.batches(group * PLANNED_AHEAD, PLANNED_AHEAD)
                kept = list(self._planned.items())[-KEPT_GROUPS + 1 :]
                self._planned = dict([*kept, (group, self._looked_up(planned))])
            return self._planned[group][place]

    def _looked_up(self, planned: Sequence[PlannedBatch]) -> list[WantedBatch]:
        """Look up planned batches, in their order: those of a store and bucket together.

        The result for a record depends only on its position and epoch, so batches may be looked up alone or together; a
        hundred cost little more than ten.
        """
        slices = [rank_slice(len(batch.positions), self._rank, self._world_size) for batch in planned]
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
        """Rows, labels, captions and draws of records of a bucket, by their positions in it and epochs, (B,) each."""
        store = self.stores[plan]
        index, latent = store.index(bucket), store.spec.latent
        rows, records, labels = index.take(positions)
        keyed: dict[str, Any] = {"seed": self.seeds[plan], "epoch": epochs, "records": records}
        views, captions, keys = None, None, None
        if (num_views := len(view_suffixes(store.spec))) > 1:
            views = keyed_choice(np.full(len(records), num_views), **keyed, purpose=PURPOSE_VIEW)
        if store.texts and self._text != "none":
            if bounds := self._caption_bounds[plan]:
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

    def _arrays(self, number: int, bucket: str, group: str) -> dict[str, list[ShardedArray]]:
        """The arrays of a group of a store, those of all views of an image, by the field of the batch."""
        found = self._groups.get((number, bucket, group))
        if found is None:
            arrays = group_arrays(self.stores[number], bucket, group)
            count = len(arrays) // len(view_suffixes(self.stores[number].spec))
            names = [array.path.rpartition("/")[2] for array in arrays[:count]]
            fields = [f"stored_{name}" if name in ("patches", "cls") else name for name in names]
            views = [arrays[place::count] for place in range(count)]
            found = self._groups[number, bucket, group] = dict(zip(fields, views, strict=True))
        return found

    def _take(self, arrays: Sequence[ShardedArray], wanted: Records) -> np.ndarray:
        """(B, ...) stored rows, each of the view that the draw says.

        Args:
          arrays: of all views.
        """
        stored = self._buffers.take((len(wanted.rows), *arrays[0].row_shape), arrays[0].dtype)
        arrays[0].take(wanted.rows, out=stored)
        for view, array in enumerate(arrays[1:], 1) if wanted.views is not None else ():
            drawn = wanted.views == view
            stored[drawn] = array.take(wanted.rows[drawn])
        return stored

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in DROPPED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for store, plan in zip(self.stores, self.order.plans, strict=True):
            check_fit(store, plan)  # an incomplete store may have grown since
        self.reset()
        reset_in_forks(self)


def pooled_statistics(stores: Sequence[LatentStore]) -> LatentStatistics | None:
    """Statistics of the latents of all stores, each counted once; None if one of them has none."""
    statistics = {store.content_hash: store.manifest and store.manifest.statistics for store in stores}
    available = [of_store for of_store in statistics.values() if of_store]
    return merge_statistics(available) if len(available) == len(statistics) else None


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


def _check_has(store: LatentStore, what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raises: RecipeError: a store lacks a feature or companion."""
    if missing := set(names) - set(known):
        found = ", ".join(known) or "none"
        raise RecipeError(f"store '{store.path}': it has no {what} '{min(missing)}'. Available: {found}.")


def _only(values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The only value of a group of one array."""
    (value,) = values.values()
    return value


def _tensor(column: np.ndarray) -> torch.Tensor:
    """A copy that the caller may change: the column stays for the next read of the batch."""
    return torch.from_numpy(column.copy())
