"""How often each caption of a record is drawn: by scores from a user's table, and by a share for the first caption.

Without either, draws are uniform. A draw is always a function of (seed, epoch, record).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...errors import RecipeError
from ..disk.hashing import xxh3_file
from ..revisions.records import BucketIndex
from .filters import lines_by_key

if TYPE_CHECKING:
    from ..store import LatentStore

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them
SCORES = "scores"  # column of the table: a list of numbers for each record, one a caption


@dataclass(frozen=True)
class CaptionOdds:
    """Weights for drawing captions.

    Args:
      scores: Parquet file with a list of scores for each record in its column "scores", one a caption, in the record's
        order; "" for none.
      key: its column with the records' keys.
      minimum: captions with a lower score are not drawn, unless all of a record are lower: then its best is.
      temperature: a caption is drawn in proportion to score ** (1 / temperature).
      original_share: share of draws that take a record's first caption; 0: it is drawn as the others are.
    Source: NVlabs/Sana, ``weighted_sample_clipscore``; PixArt-sigma, ``real_prompt_ratio``.
    """

    scores: str | Path = ""
    key: str = "key"
    minimum: float = 0.0
    temperature: float = 1.0
    original_share: float = 0.0

    def identity(self) -> dict[str, Any]:
        """Plain values of everything that decides the odds, with the table's hash in place of its path."""
        return {
            "scores": xxh3_file(self.scores) if self.scores else "",
            "key": self.key,
            "minimum": float(self.minimum),
            "temperature": float(self.temperature),
            "original_share": float(self.original_share),
        }

    def bounds(self, store: LatentStore) -> dict[str, np.ndarray]:
        """Cumulative draw probability within each record's captions, by bucket: (M,) beside ``caption_ids``, float64.

        Raises: RecipeError: the table cannot be used, or has another number of scores than a record has captions.
        """
        table = None
        if self.scores:
            where, kind = f"caption scores '{self.scores}'", pa.list_(pa.float64())
            table = lines_by_key(where, self.scores, self.key, SCORES, kind, store)
        bounds = {}
        for bucket in store.buckets:
            index = store.index(bucket)
            if not len(index):
                continue
            firsts, counts = index.caption_starts[:-1], np.diff(index.caption_starts)
            weights = np.ones(len(index.caption_ids))
            if table is not None:
                weights = self._weights(self._scores(*table, index, store), firsts, counts)
            shares = weights / np.repeat(np.add.reduceat(weights, firsts), counts)
            if self.original_share:
                shares = self._with_original(weights, firsts, counts)
            sums = np.cumsum(shares)
            bounds[bucket] = sums - np.repeat(sums[firsts] - shares[firsts], counts)
        return bounds

    def _scores(self, lines: np.ndarray, column: pa.Array, index: BucketIndex, store: LatentStore) -> np.ndarray:
        """(M,) score of each caption of a bucket, NaN for none.

        Args:
          lines: (N,) position of each record in ``column``, -1 for none.
        """
        line, num_captions = lines[index.records], np.diff(index.caption_starts)
        lists = pc.fill_null(column, [])
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
        lengths = np.append(lengths, 0)  # of line -1
        num_scores = lengths[line]
        if np.any(wrong := (num_scores > 0) & (num_scores != num_captions)):
            at = int(np.argmax(wrong))
            raise RecipeError(
                f"caption scores '{self.scores}': record '{store.record_at(int(index.records[at])).key}' has "
                f"{num_scores[at]} scores and {num_captions[at]} captions in store '{store.path}'. Expected one for "
                "each, in the same order."
            )
        values = pc.fill_null(lists.flatten(), math.nan).to_numpy(zero_copy_only=False)
        scores, is_scored = np.full(len(index.caption_ids), np.nan), np.repeat(num_scores > 0, num_captions)
        offsets = (np.cumsum(lengths) - lengths)[line] - index.caption_starts[:-1]
        scores[is_scored] = values[(np.repeat(offsets, num_captions) + np.arange(len(scores)))[is_scored]]
        return scores

    def _weights(self, scores: np.ndarray, firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """(M,) of scores, NaN for none; at least one of each record is above 0."""
        known = np.nan_to_num(scores, nan=-np.inf)
        best = np.repeat(np.maximum.reduceat(known, firsts), counts)
        usable = (known >= self.minimum) & (known > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.where(usable, (known / best) ** (1 / self.temperature), 0.0)  # of the best: no overflow
        none = np.repeat(np.add.reduceat(weights, firsts), counts) == 0
        is_first = np.zeros(len(scores), bool)
        is_first[firsts] = True
        only = np.where(np.isneginf(best), is_first, known == best)  # without scores the first caption, as in Sana
        return np.where(none, only, weights)

    def _with_original(self, weights: np.ndarray, firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        others = weights.copy()
        others[firsts] = 0
        totals = np.repeat(np.add.reduceat(others, firsts), counts)
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = np.where(totals > 0, (1 - self.original_share) * others / totals, 0.0)
        shares[firsts] = np.where(totals[firsts] > 0, self.original_share, 1.0)
        return shares


def choose_captions(bounds: np.ndarray, index: BucketIndex, positions: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """(B,) id of one of the captions of each record.

    Args:
      bounds: of the bucket, from ``CaptionOdds.bounds``.
      positions: (B,) of the records in the bucket.
      uniform: (B,) from 0 to below 1.
    """
    places, last = index.caption_starts[positions], index.caption_starts[positions + 1] - 1
    while True:
        further = (places < last) & (uniform >= bounds[places])
        if not further.any():
            return index.caption_ids[places]
        places += further
