"""BatchPlan: the records of every batch, as a pure function of (seed, number), without an array of N.

    plan = BatchPlan(store.buckets, global_batch=256, seed=0)
    plan.batch_at(1_000_000)            # bucket, positions and epochs of a global batch
    plan.place_of(1_000_000)            # its epoch, and its index in the epoch

Global batches are counted from 0 over all epochs, so the state of a reader is one integer. Each batch holds records of
one bucket; the batches of all buckets are shuffled within an epoch. Every record comes once per epoch, except those
that do not fill a batch (``leftovers``). Ranks and microbatches only cut a global batch, see ``slices.py``.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ..disk.cached import cached_property
from ..errors import RecipeError
from .shuffle import (
    PURPOSE_BATCHES,
    PURPOSE_BLOCKS,
    PURPOSE_RECORDS,
    ShardWindow,
    keyed_hash,
    permute,
    permute_groups,
    permute_in_windows,
)
from .slices import by_bucket

if TYPE_CHECKING:
    from .filters import Selection

Leftovers = Literal["short", "carry", "drop"]
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


@dataclass(frozen=True)
class BatchPlan:
    """The batches of every epoch.

    Args:
      buckets: records per bucket; the order of the mapping is part of the plan.
      global_batch: records in a full batch, over all ranks: one number, or one per bucket.
      seed: of the order.
      leftovers: what happens to records of a bucket that do not fill a batch. "short": they form a smaller batch.
        "carry": they share a batch with the first records of the next epoch, so that all batches are full (a record may
        be in such a batch twice). "drop": they are skipped in this epoch; the next epoch skips others.
      window: read from a few shards at a time; None to shuffle over all. Its blocks count positions (of the selection,
        if there is one), so rejected records shift a block into the next shard.
      selection: the records to train on, with counts equal to ``buckets``; None for all.
    Raises: RecipeError: a size below 1, a bucket without a size, unknown ``leftovers``, or "drop" leaves no batch.
    """

    buckets: Mapping[str, int]
    global_batch: int | Mapping[str, int]
    seed: int
    leftovers: Leftovers = "short"
    window: ShardWindow | None = None
    selection: Selection | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.seed, Integral):
            raise RecipeError(f"a seed of {self.seed!r}: needed a whole number.")
        object.__setattr__(self, "seed", int(self.seed))  # numpy integers overflow, and are not JSON
        if self.leftovers not in get_args(Leftovers):
            raise RecipeError(f"leftovers {self.leftovers!r}: needed one of {', '.join(get_args(Leftovers))}.")
        numbers = [(f"bucket '{bucket}': a batch size", size) for bucket, size in self.batch_sizes.items()]
        if self.window:
            numbers += [(f"bucket '{bucket}': rows of a block", rows) for bucket, rows in self.shard_rows.items()]
            numbers.append(("shards of a window", self.window.shards))
        for what, number in numbers:
            if number < 1:
                raise RecipeError(f"{what}: {number}; needed at least 1.")
        if self.selection and dict(self.selection.counts) != dict(self.buckets):
            raise RecipeError("the selection has other counts than the plan's buckets; give the plan selection.counts.")
        if self.num_records and not self._rate:
            raise RecipeError(
                "leftovers 'drop': no bucket has the records of one batch, so nothing would be trained on. "
                "Lower the batch size, or take 'carry'."
            )

    @cached_property
    def batch_sizes(self) -> dict[str, int]:
        """Records in a full batch of each bucket."""
        return by_bucket("batch size", self.global_batch, self.buckets)

    @cached_property
    def shard_rows(self) -> dict[str, int]:
        """Records in a block of each bucket.

        Raises: RecipeError: the plan has no window.
        """
        if self.window is None:
            raise RecipeError("the plan shuffles over all shards; for blocks it needs a window.")
        return by_bucket("rows of a block", self.window.rows, self.buckets)

    @cached_property
    def _table(self) -> list[tuple[str, int, int]]:
        """Name, records and batch size of each bucket."""
        return [(bucket, count, self.batch_sizes[bucket]) for bucket, count in self.buckets.items()]

    @cached_property
    def _counts(self) -> np.ndarray:
        return np.array([count for _, count, _ in self._table], np.int64)

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.array([size for _, _, size in self._table], np.int64)

    @property
    def plans(self) -> tuple[BatchPlan, ...]:
        """The plan itself, as of ``BatchOrder``."""
        return (self,)

    @property
    def num_records(self) -> int:
        """Records in an epoch."""
        return sum(self.buckets.values())

    @property
    def batches_per_epoch(self) -> int:
        """Number of global batches in an epoch, including smaller ones.

        Raises: RecipeError: with "carry" it varies by epoch (see ``num_batches``).
        """
        if self.leftovers == "carry":
            raise RecipeError("leftovers 'carry': the number of batches varies by epoch.")
        return self.num_batches(0)

    def num_batches(self, epoch: int) -> int:
        """Number of global batches in an epoch; with "carry" it varies, and can be 0."""
        return self.batches_before(epoch + 1) - self.batches_before(epoch)

    def num_left_over(self, epoch: int) -> int:
        """Records that do not fill a batch at the end of an epoch: skipped ("drop"), or carried over ("carry")."""
        if self.leftovers == "short":
            return 0
        epochs = epoch + 1 if self.leftovers == "carry" else 1
        return sum(epochs * count % size for _, count, size in self._table)

    @property
    def never_read(self) -> dict[str, int]:
        """Records of buckets that "drop" skips in every epoch, because they never fill a batch."""
        return {b: count for b, count, size in self._table if self.leftovers == "drop" and 0 < count < size}

    def batches_before(self, epoch: int) -> int:
        """Number of global batches in all epochs before this one."""
        return sum(self._ordinals(epoch))

    def _ordinals(self, epoch: int) -> list[int]:
        """Batches of each bucket in all epochs before this one."""
        if self.leftovers == "carry":
            return [epoch * count // size for _, count, size in self._table]
        if self.leftovers == "drop":
            return [epoch * (count // size) for _, count, size in self._table]
        return [epoch * -(-count // size) for _, count, size in self._table]

    @cached_property
    def _rate(self) -> Fraction:
        """Batches in an epoch, on average over all epochs."""
        if self.leftovers == "carry":
            return sum((Fraction(count, size) for _, count, size in self._table), Fraction(0))
        return Fraction(self.num_batches(0))

    def place_of(self, number: int) -> tuple[int, int]:
        """Epoch of a global batch, and its index within.

        Raises: IndexError: the number is negative or from MAX_NUMBER on, or the plan has no records.
        """
        epoch, first, end = self._last_place[0]
        if first <= number < end:
            return epoch, number - first
        if not 0 <= number < MAX_NUMBER or not self._rate:
            raise IndexError(f"batch {number} of a plan of {self.num_records} records")
        # Rounding down removes less than one batch per bucket, so the epoch lies between these two.
        low, high = int(number / self._rate), -int(-(number + len(self._table)) // self._rate)
        epoch = low + bisect.bisect_right(range(low + 1, high + 1), number, key=self.batches_before)
        self._last_place[0] = epoch, self.batches_before(epoch), self.batches_before(epoch + 1)
        return epoch, number - self.batches_before(epoch)

    @cached_property
    def _last_place(self) -> list[tuple[int, int, int]]:
        """Epoch that was asked for last, its first batch, and the one behind its last: fractions are slow."""
        return [(0, 0, 0)]

    def batch_at(self, number: int) -> PlannedBatch:
        """Global batch ``number``, counted from 0 over all epochs.

        Raises: IndexError: the number is negative, or the plan has no records.
        """
        return self.batches(number, 1)[0]

    def batch(self, epoch: int, index: int) -> PlannedBatch:
        """Global batch number ``index`` of an epoch.

        Raises: IndexError: the epoch has fewer batches.
        """
        if not 0 <= index < self.num_batches(epoch):
            raise IndexError(f"batch {index} of an epoch of {self.num_batches(epoch)}")
        return self._fill(self._spans(epoch, index, 1))[0]

    def batches(self, first: int, count: int) -> list[PlannedBatch]:
        """Global batches ``first`` to ``first + count - 1``; sixteen at once take little longer than one.

        Raises: IndexError: as ``batch_at``.
        """
        (epoch, index), spans = self.place_of(first), list[np.ndarray]()
        while count:
            if in_epoch := min(count, self.num_batches(epoch) - index):  # with "carry", an epoch can have none
                spans.append(self._spans(epoch, index, in_epoch))
            epoch, index, count = epoch + 1, 0, count - in_epoch
        return self._fill(np.concatenate(spans)) if spans else []

    def _spans(self, epoch: int, index: int, count: int) -> np.ndarray:
        """Batches ``index`` to ``index + count - 1`` of an epoch, as (count, 3) spans of their buckets' streams."""
        before, after = self._ordinals(epoch), self._ordinals(epoch + 1)
        totals, spans = [high - low for low, high in zip(before, after, strict=True)], list[np.ndarray]()
        while count:
            # Batches are permuted within a round, which shuffles the buckets.
            later = range(1, self._num_rounds)
            number = bisect.bisect_right(later, index, key=lambda r: sum(self._until_round(totals, r)))
            lows, highs = self._until_round(totals, number), self._until_round(totals, number + 1)
            starts = np.array([0, *accumulate(high - low for low, high in zip(lows, highs, strict=True))])
            first = index - sum(lows)
            taken = min(count, int(starts[-1]) - first)
            key = keyed_hash(self.seed, epoch, PURPOSE_BATCHES, *([number] if self.window else []))
            places = permute(np.arange(first, first + taken), int(starts[-1]), key)
            which = np.searchsorted(starts, places, side="right") - 1
            ordinals = np.array(lows)[which] + places - starts[which]
            spans.append(self._cut_streams(epoch, which, np.array(before)[which], ordinals))
            index, count = index + taken, count - taken
        return np.concatenate(spans)

    def _cut_streams(self, epoch: int, which: np.ndarray, before: np.ndarray, ordinals: np.ndarray) -> np.ndarray:
        """(n, 3) bucket, start, stop of the batches with these ordinals in an epoch; ``before``: in earlier epochs."""
        counts, sizes = self._counts[which], self._sizes[which]
        if self.leftovers == "carry":
            starts = (before + ordinals) * sizes
            return np.stack([which, starts, starts + sizes], axis=1)
        starts = epoch * counts + ordinals * sizes
        return np.stack([which, starts, np.minimum(starts + sizes, (epoch + 1) * counts)], axis=1)

    @cached_property
    def _num_rounds(self) -> int:
        """Number of rounds of an epoch, within which batches are shuffled: windows of the longest bucket, or 1."""
        if self.window is None:
            return 1
        return max(-(-n // (self.window.shards * self.shard_rows[bucket])) for bucket, n in self.buckets.items())

    def _until_round(self, counts: Sequence[int], number: int) -> list[int]:
        """Batches of each bucket before a round, from those in the epoch."""
        return [count * number // self._num_rounds for count in counts]

    def _fill(self, spans: np.ndarray) -> list[PlannedBatch]:
        """The batches at some spans, computed together.

        Args:
          spans: (n, 3) int64 bucket, start, stop of each batch in its bucket's stream, which concatenates the epochs.
        """
        which, epochs, places, lengths = self._pieces(spans)
        keys, groups = np.unique(epochs * len(self._table) + which, return_inverse=True)
        orders = [divmod(key, len(self._table)) for key in keys.tolist()]
        edges = np.cumsum(lengths) - lengths
        inside = np.arange(lengths.sum()) + np.repeat(places - edges, lengths)
        found = self._shuffled(inside, np.repeat(groups, lengths), orders)
        of_each, batches = np.repeat(epochs, lengths), []
        stops = np.cumsum(spans[:, 2] - spans[:, 1]).tolist()
        for number, (start, stop) in zip(spans[:, 0].tolist(), pairwise([0, *stops]), strict=True):
            bucket, positions = self._table[number][0], found[start:stop]
            chosen = self.selection.positions[bucket] if self.selection else None
            positions = positions if chosen is None else chosen[positions].astype(np.int64)
            batches.append(PlannedBatch(bucket, positions, of_each[start:stop]))
        return batches

    def _pieces(self, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Split spans at the ends of epochs: bucket, epoch, first place in the epoch and length of each piece."""
        which, starts, stops = spans.T
        epochs, places = np.divmod(starts, self._counts[which])
        lengths = stops - starts
        if (places + lengths <= self._counts[which]).all():
            return which, epochs, places, lengths
        pieces = []
        for number, start, stop in spans.tolist():
            while start < stop:
                epoch, place = divmod(start, self._table[number][1])
                length = min(stop - start, self._table[number][1] - place)
                pieces.append((number, epoch, place, length))
                start += length
        which, epochs, places, lengths = np.array(pieces).T
        return which, epochs, places, lengths

    def _shuffled(self, places: np.ndarray, groups: np.ndarray, orders: Sequence[tuple[int, int]]) -> np.ndarray:
        """Permute (B,) places, each by the permutation of (epoch, bucket) ``orders[group]``."""
        sizes = [self._table[which][1] for _, which in orders]
        keys = [keyed_hash(self.seed, epoch, PURPOSE_RECORDS, which) for epoch, which in orders]
        if self.window is None:
            return permute_groups(places, groups, sizes, keys)
        found = np.empty(len(places), np.int64)
        for group, (epoch, which) in enumerate(orders):
            of_group = groups == group
            found[of_group] = permute_in_windows(
                places[of_group],
                sizes[group],
                rows=self.shard_rows[self._table[which][0]],
                shards=self.window.shards,
                block_key=keyed_hash(self.seed, epoch, PURPOSE_BLOCKS, which),
                row_key=keys[group],
            )
        return found

    def identity(self) -> dict[str, Any]:
        """Plain values of everything that decides the order."""
        rows = self.shard_rows if self.window else {}
        return {
            "kind": "plan",
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "leftovers": self.leftovers,
            "window_shards": self.window.shards if self.window else 0,
            "filter": dict(self.selection.identity) if self.selection else None,
            "bucket_order": list(self.buckets),
            "buckets": {
                name: {"records": count, "batch_size": size} | ({"shard_rows": rows[name]} if self.window else {})
                for name, count, size in self._table
            },
        }
