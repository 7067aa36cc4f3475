"""How often each caption of a record is drawn: by scores from a user's table, and by a share for the first caption.

Without either, draws are uniform. A draw is always a function of (seed, epoch, record).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..disk.hashing import xxh3_file
from ..errors import RecipeError
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
        """Of each bucket, (M,) float64 beside ``BucketIndex.caption_ids``: the share of draws up to each caption's end.

        Raises: RecipeError: the table cannot be used, or has another number of scores than a record has captions.
        """
        read = _read_scores(self.scores, self.key, store) if self.scores else None
        found = {}
        for bucket in store.buckets:
            index = store.index(bucket)
            if not len(index):
                continue
            firsts, counts = index.caption_starts[:-1], np.diff(index.caption_starts)
            weights = np.ones(len(index.caption_ids))
            if read is not None:
                weights = self._weights(_scores_of(read, index, self.scores, store), firsts, counts)
            shares = weights / np.repeat(np.add.reduceat(weights, firsts), counts)
            if self.original_share:
                shares = self._with_original(weights, firsts, counts)
            sums = np.cumsum(shares)
            found[bucket] = sums - np.repeat(sums[firsts] - shares[firsts], counts)
        return found

    def _weights(self, scores: np.ndarray, firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """(M,) of scores, NaN for none; in each record one at least is above 0."""
        known = np.nan_to_num(scores, nan=-np.inf)
        best = np.repeat(np.maximum.reduceat(known, firsts), counts)
        usable = (known >= self.minimum) & (known > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.where(usable, (known / best) ** (1 / self.temperature), 0.0)  # of the best: no overflow
        none = np.repeat(np.add.reduceat(weights, firsts), counts) == 0
        is_first = np.zeros(len(scores), bool)
        is_first[firsts] = True
        only = np.where(
            np.isneginf(best), is_first, known == best
        )  # the first caption if there are no scores, as in Sana
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
    starts = index.caption_starts[positions]
    last = index.caption_starts[positions + 1] - 1
    places = starts.copy()
    while True:
        further = (places < last) & (uniform >= bounds[places])
        if not further.any():
            return index.caption_ids[places]
        places += further


class _Scores(NamedTuple):
    """Lists of scores: of record r those from ``first[r]`` on, ``count[r]`` of them; -1 where it has none."""

    first: np.ndarray
    count: np.ndarray
    values: np.ndarray


def _read_scores(path: str | Path, key: str, store: LatentStore) -> _Scores:
    where, stored = f"caption scores '{path}'", np.ones(len(store.checksums), bool)
    lines, column = lines_by_key(where, path, key, SCORES, pa.list_(pa.float64()), store, stored)
    lists = pc.fill_null(column, [])
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    offsets = np.cumsum(lengths) - lengths
    first, count = np.full(len(lines), -1), np.full(len(lines), -1)
    first[lines >= 0], count[lines >= 0] = offsets[lines[lines >= 0]], lengths[lines[lines >= 0]]
    return _Scores(first, count, pc.fill_null(lists.flatten(), math.nan).to_numpy(zero_copy_only=False))


def _scores_of(read: _Scores, index: BucketIndex, path: str | Path, store: LatentStore) -> np.ndarray:
    """(M,) score of each caption of a bucket, NaN for none."""
    counts, there = np.diff(index.caption_starts), read.count[index.records]
    if np.any(wrong := (there > 0) & (there != counts)):
        at = int(np.argmax(wrong))
        key = store.record_columns(("key",))["key"][int(index.records[at])].as_py()
        raise RecipeError(
            f"caption scores '{path}': record '{key}' has {there[at]} scores and {counts[at]} captions in store "
            f"'{store.path}'. Needed one for each, in the same order."
        )
    scores, has = np.full(len(index.caption_ids), np.nan), np.repeat(there > 0, counts)
    place = np.repeat(read.first[index.records] - index.caption_starts[:-1], counts) + np.arange(len(scores))
    scores[has] = read.values[place[has]]
    return scores
