"""The images that a model edits: a companion of each record, and the record's caption, which says what to change."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...datasets.batches.latents import mean_latents
from ...datasets.batches.row_checks import check_rows
from ...datasets.format.schema import LatentSpec
from ...datasets.store import LatentStore


class EditRecords:
    """The records of a bucket, to edit their companion image.

    Args:
      name: of the companion.
      latent: how stored rows become the model's input.
      check: compare the rows with their checksums when they are read; those of a store at a URL already were.
    Raises: UnknownKey: the store has no such bucket or companion.
    """

    def __init__(self, store: LatentStore, name: str, bucket: str, latent: LatentSpec, *, check: bool = True) -> None:
        self.store, self._latent, self._place = store, latent, (bucket, name)
        self._checks = check and store.remote is None
        self._index, self._images = store.index(bucket), store.companion(name, bucket)

    def __len__(self) -> int:
        return len(self._index)

    def caption_ids(self, positions: np.ndarray) -> list[int]:
        """Ids of the first captions of records, by their positions in the index of the bucket."""
        return self._index.caption_ids[self._index.caption_starts[:-1][positions]].tolist()

    def latents(self, positions: np.ndarray) -> Tensor:
        """Their images as the model sees them: (B, C, H, W) float32, the mean of the posterior, shifted and scaled.

        Raises: DamageError: a row does not match its checksum.
        """
        rows = self._index.rows[positions]
        if self._checks:
            check_rows(self.store, *self._place, rows, self._index.records[positions])
        return mean_latents(torch.from_numpy(self._images.take(rows)), self._latent)
