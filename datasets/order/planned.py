"""One planned batch, the element of every order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ORDER_VERSION = 1  # incremented when the same identity gives another order
MAX_NUMBER = 1 << 48  # batches; up to here the records of a bucket, counted over all epochs, fit into 64 bits


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """One global batch, all of one bucket.

    Args:
      bucket: "HxW" in pixels.
      positions: (B,) int64 positions within the bucket's stored records (see ``LatentStore.index``).
      epochs: (B,) int64 epoch of each record, never falling; with "carry" a batch can hold several.
      plan: index into the order's ``plans``.
    """

    bucket: str
    positions: np.ndarray
    epochs: np.ndarray
    plan: int = 0

    @property
    def epoch(self) -> int:
        """Epoch that the batch belongs to: the one in which it is complete."""
        return int(self.epochs[-1])
