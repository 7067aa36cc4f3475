"""Reading one global batch: order, resolve, gather, check, one stage after the other.

The order (``order/``) names the records of a batch; the resolver (``resolve.py``) looks them up; the gatherer
(``gather.py``) reads their rows; the row checks (``row_checks.py``) compare these with their checksums. A batch is a
function of its number: any rank, worker or thread may read it, at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..disk.fork_safe import reset_in_forks
from ..format.row_layout import LATENTS
from ..format.schema import LatentStatistics
from ..order.batch_plan import BatchOrder
from ..revisions.latent_statistics import merge_statistics
from ..store import LatentStore
from .batch import Batch, FeatureBatch
from .captions import Captions, captions_from_rows
from .gather import GatheredBatch, Gatherer
from .latents import Normalise, normalised_as
from .resolve import ResolvedBatch, Resolver
from .row_checks import RowChecks
from .view_sizes import DrawnViews, ViewSizes

PLANNED_AHEAD = 32  # batches planned and looked up together: one alone takes a tenth of the time of all
KEPT_GROUPS = 2  # groups of so many batches that are kept: threads read on both sides of a boundary


class BatchReader(Dataset):
    """Global batches by number; a map-style dataset of infinite length.

    Args:
      stores: one store for each of the order's plans.
      order: the batches in order.
      resolver: looks up the records of a batch; None: those of all ranks, with a caption each.
      gatherer: reads their rows; None: those of every array of the stores.
      checks: compares the rows with their checksums; None: never.
      normalise: normalisation of the latents, as in ``normalised_as``.
      statistics: statistics of the latents for "store"; None: those of all stores together.
      pads: captions are padded to the longest of the batch, not packed.
    Raises: RecipeError: a plan or selection belongs to another store, or the stores cannot be mixed.
    """

    def __init__(
        self,
        stores: Sequence[LatentStore],
        order: BatchOrder,
        *,
        resolver: Resolver | None = None,
        gatherer: Gatherer | None = None,
        checks: RowChecks | None = None,
        normalise: Normalise = "encoder",
        statistics: LatentStatistics | None = None,
        pads: bool = True,
    ) -> None:
        self.resolver = resolver or Resolver(stores, order.plans)
        self.gatherer = gatherer or Gatherer(stores)
        self.checks = checks or RowChecks(stores, "never")
        self.stores = list(stores)
        self.order = order
        self.statistics = (statistics or pooled_statistics(stores)) if normalise == "store" else None
        self.latent_specs = [normalised_as(store.spec.latent, normalise, self.statistics) for store in stores]
        self.pads = pads
        self.reset()
        reset_in_forks(self)

    def reset(self) -> None:
        """Drop all planned batches."""
        sizes = {id(store): ViewSizes(store) for store in self.stores}
        self._view_sizes = [sizes[id(store)] for store in self.stores]
        self._resolved: dict[int, list[ResolvedBatch]] = {}  # by number // PLANNED_AHEAD
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Batch:
        """Read this rank's slice of a global batch; sequential reads are cheapest: they are planned together."""
        return self.read(self.resolve(number))

    def resolve(self, number: int) -> ResolvedBatch:
        """Plan and look up a global batch, with those beside it.

        Raises: IndexError: the number is negative.
        """
        if number < 0:
            raise IndexError(f"batch {number}: expected a number from 0")
        group, index = divmod(number, PLANNED_AHEAD)
        with self._lock:  # so that a group is planned once, by the first thread that needs it
            if group not in self._resolved:
                first = group * PLANNED_AHEAD
                planned = self.order.batches(first, PLANNED_AHEAD)
                for old in list(self._resolved)[: 1 - KEPT_GROUPS]:
                    del self._resolved[old]
                self._resolved[group] = self.resolver.resolve(planned, first)
            return self._resolved[group][index]

    def read(self, resolved: ResolvedBatch) -> Batch:
        """Read a batch that is looked up.

        Raises: DamageError: a shard or a row is not what was written.
        """
        gathered = self.gatherer.gather(resolved)
        self.checks.check(resolved, gathered)
        return self._batch(resolved, gathered)

    def _batch(self, resolved: ResolvedBatch, gathered: GatheredBatch) -> Batch:
        store = self.stores[resolved.store]
        draw_keys = None if resolved.draw_keys is None else _copied(resolved.draw_keys)
        texts = dict[str, Captions]()
        for name, captions in gathered.captions.items():
            texts[name] = captions_from_rows(store.text(name).spec, captions, len(resolved.rows))
        return Batch(
            stored=_only_array(gathered.records[LATENTS]),
            labels=_copied(resolved.labels),
            records=_copied(resolved.records),
            draw_keys=draw_keys,
            spec=self.latent_specs[resolved.store],
            bucket=resolved.bucket,
            number=resolved.number,
            global_size=resolved.global_size,
            epoch=resolved.epoch,
            store=resolved.store,
            texts=texts,
            pads=self.pads,
            features={name: _feature(gathered.records[name]) for name in self.gatherer.features},
            stored_companions={name: _only_array(gathered.records[name]) for name in self.gatherer.companions},
            drawn=DrawnViews(self._view_sizes[resolved.store], resolved.bucket, resolved.records, resolved.views),
        )

    def fetch_ahead(self, first: int, count: int) -> None:
        """Prefetch the shards of these batches, in order, from stores at a URL."""
        paths: dict[LatentStore, list[str]] = {store: [] for store in self.stores}
        for number in range(first, first + count):
            resolved = self.resolve(number)
            paths[self.stores[resolved.store]] += self.gatherer.shard_paths(resolved)
        for store, store_paths in paths.items():
            if store.remote is not None:
                store.remote.prefetch(store_paths)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.reset()
        reset_in_forks(self)


def pooled_statistics(stores: Sequence[LatentStore]) -> LatentStatistics | None:
    """Statistics of the latents of all stores, each counted once; None if one of them has none."""
    statistics = {store.content_hash: store.manifest and store.manifest.statistics for store in stores}
    available = [of_store for of_store in statistics.values() if of_store]
    return merge_statistics(available) if len(available) == len(statistics) else None


def _feature(arrays: Mapping[str, np.ndarray]) -> FeatureBatch:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return FeatureBatch(
        stored_patches=tensors.get("patches"),
        patch_scales=tensors.get("patch_scales"),
        stored_cls=tensors.get("cls"),
        cls_scales=tensors.get("cls_scales"),
    )


def _only_array(arrays: Mapping[str, np.ndarray]) -> torch.Tensor:
    """The rows of a group that has one array."""
    (array,) = arrays.values()
    return torch.from_numpy(array)


def _copied(column: np.ndarray) -> torch.Tensor:
    """A copy that the caller may change: the column stays for the next read of the batch."""
    return torch.from_numpy(column.copy())
