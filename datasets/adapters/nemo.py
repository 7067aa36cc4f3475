"""A store as ``data.dataloader`` of NeMo AutoModel's diffusion recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..loader import make_loader
from ..store import LatentStore
from .trainers import nemo_automodel


@dataclass
class StoreDataloaderConfig:
    """The ``_target_`` of ``data.dataloader`` in a recipe; its fields are the other keys there.

    Args:
      store: path or URL.
      seed: of the order and the posterior draw.
      tokens, pooled, reads_mask: as of ``nemo_automodel``.
      drop_last: leave out the records of a bucket that fill no batch; else they fill one with the first records of the
        next epoch, as a rank without records would have no loss.
      prefetch: batches read ahead.
    """

    store: str
    seed: int = 0
    tokens: str | None = None
    pooled: str | None = None
    reads_mask: bool = False
    drop_last: bool = True
    prefetch: int = 2

    def build(self, *, dp_rank: int, dp_world_size: int, batch_size: int) -> Any:
        """The loader of a rank, in NeMo AutoModel's ``DiffusionDataloaderBuild``.

        It is a ``StatefulDataLoader``, so the recipe's checkpoints have its position. It shuffles by itself and has
        no sampler.

        Args:
          batch_size: records of a batch on each rank.
        """
        from nemo_automodel.components.datasets.diffusion.loader import (  # pyright: ignore[reportMissingImports]
            DiffusionDataloaderBuild,
        )

        store = LatentStore(self.store)
        named = nemo_automodel(store, tokens=self.tokens, pooled=self.pooled, reads_mask=self.reads_mask)
        loader = make_loader(
            store,
            global_batch=batch_size * dp_world_size,
            seed=self.seed,
            leftovers="drop" if self.drop_last else "carry",
            rank=dp_rank,
            world_size=dp_world_size,
            prefetch=self.prefetch,
            collate_fn=named,
        )
        return DiffusionDataloaderBuild(dataloader=loader, sampler=None, drop_last=self.drop_last)
