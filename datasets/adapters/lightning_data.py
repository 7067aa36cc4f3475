"""A store as a ``LightningDataModule``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    from lightning import LightningDataModule
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("a data module needs Lightning: pip install lightning") from error

from ..batches.batch import Batch
from ..loader import BatchLoader, make_loader
from ..store import LatentStore


class StoreData(LightningDataModule):
    """The batches of a store, the slice of its rank on each rank.

    Lightning's checkpoints have the position of the loader, so a fit goes on with the next batch, also within an epoch.

    Args:
      store: an open store.
      batch_size: records of a batch on each rank.
      collate_fn, options: further arguments of ``make_loader``. "carry" and "drop" leave no rank without records.
    """

    def __init__(
        self, store: LatentStore, batch_size: int, collate_fn: Callable[[Batch], Any] | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.store, self.batch_size = store, batch_size
        self.options = {"leftovers": "drop", **options, "collate_fn": collate_fn}

    def train_dataloader(self) -> BatchLoader:
        """The loader of this rank."""
        ranks = {"rank": 0, "world_size": 1}
        if self.trainer is not None:
            ranks = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        return make_loader(self.store, global_batch=self.batch_size * ranks["world_size"], **ranks, **self.options)
