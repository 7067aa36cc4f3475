"""BatchPlan: which records training reads at which step. A pure function of (seed, epoch, step); no array of N is held.

An epoch is a fixed set of global batches: each bucket is permuted and cut into batches, and the batches of all buckets
are permuted among each other. Every record comes exactly once per epoch; what is left of a bucket makes one smaller
batch. Both permutations are keyed and computed index by index, so any step of a store of any size is known at once.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

FEISTEL_ROUNDS = 6
# What a keyed hash is asked for; the numbers are part of the batch order and must not change.
PURPOSE_BATCHES, PURPOSE_RECORDS, PURPOSE_CAPTION, PURPOSE_FLIP = range(4)


@dataclass(frozen=True)
class PlannedBatch:
    """One global batch, all of one bucket.

    ``positions``: (B,) positions within the bucket's stored records (see ``LatentStore.index``).
    """

    bucket: str
    positions: np.ndarray


@dataclass(frozen=True)
class BatchPlan:
    """The batches of every epoch.

    Args:
      buckets: stored records per bucket; the order of the mapping is part of the plan.
      global_batch: records in a full batch, over all ranks.
      seed: of the order.
    """

    buckets: Mapping[str, int]
    global_batch: int
    seed: int

    @cached_property
    def _starts(self) -> list[int]:
        """First batch number of each bucket, and the total."""
        return [0, *accumulate(-(-count // self.global_batch) for count in self.buckets.values())]

    @property
    def batches_per_epoch(self) -> int:
        """Number of global batches in an epoch, the smaller ones included."""
        return self._starts[-1]

    @property
    def num_records(self) -> int:
        """Records in an epoch."""
        return sum(self.buckets.values())

    def batch(self, epoch: int, index: int) -> PlannedBatch:
        """Global batch number ``index`` of an epoch.

        Raises: IndexError: the epoch has fewer batches.
        """
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(f"batch {index} of an epoch of {self.batches_per_epoch}")
        key = keyed_hash(self.seed, epoch, PURPOSE_BATCHES)
        number = int(permute(np.array([index]), self.batches_per_epoch, key)[0])
        which = bisect.bisect_right(self._starts, number) - 1
        bucket, count = list(self.buckets.items())[which]
        start = (number - self._starts[which]) * self.global_batch
        places = np.arange(start, min(start + self.global_batch, count))
        return PlannedBatch(bucket, permute(places, count, keyed_hash(self.seed, epoch, PURPOSE_RECORDS, which)))


def permute(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """Apply a keyed permutation of range(size) to some indices.

    A Feistel network over the next even number of bits, walked until the value falls back into the range; on average
    under four walks, whatever the size.

    Args:
      indices: (B,) integers in 0..size - 1.
    Returns: (B,) int64.
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 3 (cycle walking).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    values = np.asarray(indices).astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for round_number in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(right + np.uint64(keyed_hash(key, round_number))) & mask)
        values[outside] = (left << half) | right
        outside = values >= size
    return values.astype(np.int64)


def keyed_choice(num_choices: np.ndarray, *, seed: int, epoch: int, records: np.ndarray, purpose: int) -> np.ndarray:
    """One number in range(num_choices) a record, (B,) int64: a function of (seed, epoch, record, purpose) alone."""
    hashes = _mix(records.astype(np.uint64) + np.uint64(keyed_hash(seed, epoch, purpose)))
    return ((hashes >> np.uint64(32)) * num_choices.astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def keyed_hash(*values: int) -> int:
    """Mix integers into one of 64 bits; the order of the arguments matters."""
    state = np.zeros(1, np.uint64)
    for value in values:
        state = _mix(state ^ np.uint64(value % 2**64))
    return int(state[0])


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's step on every element (Steele, Lea and Flood 2014, figure 12); wraps around at 64 bits."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
