"""Pictures through a network, over all processes; the first one gets the results in the order of the pictures.

A batch holds pictures of fixed numbers and process r of n takes the batches r, r + n, r + 2n and so on, so the number
of processes changes neither what is computed together nor the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import distributed

from ....precompute.progress.clock import Progress
from ....train.parallel.watchdog import Watchdog
from ....train.sampling.guided import float32_products
from .pictures import PictureSet

BATCH = 64  # pictures that go through the network together; another number changes the rounding
Compute = Callable[[list[np.ndarray], np.ndarray], np.ndarray]
"""Pictures of a batch and their numbers to one row for each."""


class Team:
    """The processes of an evaluation.

    Args:
      watchdog: of its ranks, which are connected if there are several; it ends all of them if one fails.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._ranks, self._watchdog = watchdog.ranks, watchdog
        self._group: Any = distributed.new_group(backend="gloo") if self._ranks.world_size > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this process gets the results."""
        return self._ranks.is_first

    def wait(self) -> None:
        """Wait for all processes."""
        self._watchdog.gather(None)

    def run(self, pictures: PictureSet, compute: Compute, stage: str, progress: Progress) -> Iterator[np.ndarray]:
        """Compute all batches; a collective call, to be iterated to its end in all processes.

        Returns: for the first process the results of each batch, in order; for others nothing.
        """
        ranks, count = self._ranks, len(pictures)
        batches = [np.arange(start, min(start + BATCH, count)) for start in range(0, count, BATCH)]
        own = batches[ranks.rank :: ranks.world_size]
        read = pictures.batches(iter(own))
        for first in range(0, len(batches), ranks.world_size):
            index = first // ranks.world_size
            with float32_products(tf32=False):  # torch allows it for convolutions
                result = compute(next(read), own[index]) if index < len(own) else None
            yield from self._collected(result)
            progress(stage, int(batches[min(first + ranks.world_size, len(batches)) - 1][-1]) + 1, count)

    def _collected(self, result: np.ndarray | None) -> list[np.ndarray]:
        """Results of a round in the order of the processes; empty for others than the first."""
        if self._group is None:
            return [result] if result is not None else []
        found: list[Any] | None = [None] * self._ranks.world_size if self.is_first else None
        distributed.gather_object(result, found, dst=0, group=self._group)
        return [rows for rows in found or () if rows is not None]
