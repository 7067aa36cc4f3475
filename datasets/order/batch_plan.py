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
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np

from ...errors import RecipeError
from ..disk.cached import cached_property
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


class BatchOrder(Protocol):
    """An endless sequence of global batches, each a function of its number: a plan, or a mixture of plans."""

    @property
    def plans(self) -> tuple[BatchPlan, ...]:
        """The plans; ``PlannedBatch.plan`` is an index into them. Each reads one store."""
        ...

    def batches(self, first: int, count: int) -> list[PlannedBatch]:
        """Global batches ``first`` to ``first + count - 1``; sixteen at once take little longer than one.

        Raises: IndexError: the number is negative.
        """
        ...

    def identity(self) -> dict[str, Any]:
        """Plain values of everything that decides the order, except the stores' root hashes."""
        ...


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
            raise RecipeError(f"a seed of {self.seed!r}: expected a whole number.")
        object.__setattr__(self, "seed", int(self.seed))  # numpy integers overflow, and are not JSON
        if self.leftovers not in get_args(Leftovers):
            raise RecipeError(f"leftovers {self.leftovers!r}: expected one of {', '.join(get_args(Leftovers))}.")
        numbers = [(f"bucket '{bucket}': a batch size", size) for bucket, size in self.batch_sizes.items()]
        if self.window:
            numbers += [(f"bucket '{bucket}': rows of a block", rows) for bucket, rows in self._block_rows.items()]
            numbers.append(("shards of a window", self.window.shards))
        for what, number in numbers:
            if number < 1:
                raise RecipeError(f"{what}: {number}; expected at least 1.")
        if self.selection and dict(self.selection.counts) != dict(self.buckets):
            raise RecipeError("the selection's counts differ from the plan's buckets; give the plan selection.counts.")
        if self.num_records and not self._rate:
            raise RecipeError(
                "leftovers 'drop': no bucket has enough records for one batch, so nothing would be trained on. "
                "Lower the batch size, or use 'carry'."
            )

    @cached_property
    def batch_sizes(self) -> dict[str, int]:
        """Records in a full batch of each bucket."""
        return by_bucket("batch size", self.global_batch, self.buckets)

    @cached_property
    def _block_rows(self) -> dict[str, int]:
        """Records in a block of each bucket; empty without a window."""
        return by_bucket("rows of a block", self.window.rows, self.buckets) if self.window else {}

    @cached_property
    def _names(self) -> list[str]:
        return list(self.buckets)

    @cached_property
    def _counts(self) -> np.ndarray:
        """(K,) records of each bucket."""
        return np.array(list(self.buckets.values()), np.int64)

    @cached_property
    def _sizes(self) -> np.ndarray:
        """(K,) records in a full batch of each bucket."""
        return np.array(list(self.batch_sizes.values()), np.int64)

    @property
    def plans(self) -> tuple[BatchPlan, ...]:
        """The plan itself, for ``BatchOrder``."""
        return (self,)

    @property
    def num_records(self) -> int:
        """Records in an epoch."""
        return sum(self.buckets.values())

    @property
    def never_read(self) -> dict[str, int]:
        """Records of buckets that "drop" skips in every epoch, because they never fill a batch."""
        sizes = self.batch_sizes
        return {b: n for b, n in self.buckets.items() if self.leftovers == "drop" and 0 < n < sizes[b]}

    def num_batches(self, epoch: int) -> int:
        """Number of global batches in an epoch, smaller ones included; with "carry" it varies, and can be 0."""
        return self.batches_before(epoch + 1) - self.batches_before(epoch)

    def batches_before(self, epoch: int) -> int:
        """Number of global batches in all epochs before this one."""
        return sum(self._ordinals(epoch))

    def _ordinals(self, epoch: int) -> list[int]:
        """Batches of each bucket in all epochs before this one."""
        pairs = [(count, self.batch_sizes[bucket]) for bucket, count in self.buckets.items()]
        if self.leftovers == "carry":
            return [epoch * count // size for count, size in pairs]
        if self.leftovers == "drop":
            return [epoch * (count // size) for count, size in pairs]
        return [epoch * -(-count // size) for count, size in pairs]

    @cached_property
    def _rate(self) -> Fraction:
        """Batches in an epoch, on average over all epochs."""
        if self.leftovers != "carry":
            return Fraction(self.num_batches(0))
        return sum((Fraction(n, self.batch_sizes[bucket]) for bucket, n in self.buckets.items()), Fraction(0))

    def place_of(self, number: int) -> tuple[int, int]:
        """Epoch of a global batch, and its index within.

        Raises: IndexError: the number is negative or from MAX_NUMBER on, or the plan has no records.
        """
        epoch, first, end = self._last_place[0]
        if not first <= number < end:
            if not 0 <= number < MAX_NUMBER or not self._rate:
                raise IndexError(f"batch {number} of a plan of {self.num_records} records")
            # Rounding down removes less than one batch per bucket, so the epoch lies between these two.
            low, high = int(number / self._rate), -int(-(number + len(self.buckets)) // self._rate)
            epoch = low + bisect.bisect_right(range(low + 1, high + 1), number, key=self.batches_before)
            first, end = self.batches_before(epoch), self.batches_before(epoch + 1)
            self._last_place[0] = epoch, first, end
        return epoch, number - first

    @cached_property
    def _last_place(self) -> list[tuple[int, int, int]]:
        """The last epoch that ``place_of`` found, its first batch, and the end of its batches: fractions are slow."""
        return [(0, 0, 0)]

    def batch_at(self, number: int) -> PlannedBatch:
        """Global batch ``number``, counted from 0 over all epochs. Raises: IndexError: as ``place_of``."""
        return self.batches(number, 1)[0]

    def batches(self, first: int, count: int) -> list[PlannedBatch]:
        """Global batches ``first`` to ``first + count - 1``; sixteen at once take little longer than one.

        Raises: IndexError: as ``place_of``.
        """
        (epoch, index), spans = self.place_of(first), list[np.ndarray]()
        while count:
            if in_epoch := min(count, self.num_batches(epoch) - index):  # with "carry", an epoch can have none
                spans.append(self._spans(epoch, index, in_epoch))
            epoch, index, count = epoch + 1, 0, count - in_epoch
        return self._fill(np.concatenate(spans)) if spans else []

    def _spans(self, epoch: int, index: int, count: int) -> np.ndarray:
        """Batches ``index`` to ``index + count - 1`` of an epoch, as (count, 3) spans of their buckets' streams.

        A bucket's stream concatenates its epochs; a span is (bucket, start, stop) in it.
        """
        before, spans = np.array(self._ordinals(epoch)), list[np.ndarray]()
        totals = np.array(self._ordinals(epoch + 1)) - before
        # Batches are permuted within a round: windows of the longest bucket, or all of the epoch.
        rounds = 1
        if self.window:
            blocks = zip(self.buckets.values(), self._block_rows.values(), strict=True)
            rounds = max(-(-n // (self.window.shards * rows)) for n, rows in blocks)
        while count:
            number = bisect.bisect_right(range(1, rounds), index, key=lambda r: int((totals * r // rounds).sum()))
            lows = totals * number // rounds
            starts = np.concatenate([[0], np.cumsum(totals * (number + 1) // rounds - lows)])
            first, length = index - int(lows.sum()), int(starts[-1])
            taken = min(count, length - first)
            key = keyed_hash(self.seed, epoch, PURPOSE_BATCHES, *([number] if self.window else []))
            places = permute(np.arange(first, first + taken), length, key)
            which = np.searchsorted(starts, places, side="right") - 1
            ordinals = lows[which] + places - starts[which]  # of each batch among those of its bucket and epoch
            counts, sizes = self._counts[which], self._sizes[which]
            if self.leftovers == "carry":
                begins = (before[which] + ordinals) * sizes
                ends = begins + sizes
            else:
                begins = epoch * counts + ordinals * sizes
                ends = np.minimum(begins + sizes, (epoch + 1) * counts)
            spans.append(np.stack([which, begins, ends], axis=1))
            index, count = index + taken, count - taken
        return np.concatenate(spans)

    def _fill(self, spans: np.ndarray) -> list[PlannedBatch]:
        """The batches at (n, 3) spans, computed together."""
        which, epochs, places, lengths = self._pieces(spans)
        keys, groups = np.unique(epochs * len(self._names) + which, return_inverse=True)
        orders = [divmod(key, len(self._names)) for key in keys.tolist()]
        edges = np.cumsum(lengths) - lengths
        inside = np.arange(lengths.sum()) + np.repeat(places - edges, lengths)
        shuffled = self._shuffled(inside, np.repeat(groups, lengths), orders)
        record_epochs, batches = np.repeat(epochs, lengths), []
        stops = np.cumsum(spans[:, 2] - spans[:, 1]).tolist()
        for number, (start, stop) in zip(spans[:, 0].tolist(), pairwise([0, *stops]), strict=True):
            bucket, positions = self._names[number], shuffled[start:stop]
            chosen = self.selection.positions[bucket] if self.selection else None
            positions = positions if chosen is None else chosen[positions].astype(np.int64)
            batches.append(PlannedBatch(bucket, positions, record_epochs[start:stop]))
        return batches

    def _pieces(self, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Split spans at the ends of epochs: bucket, epoch, first place in the epoch and length of each piece."""
        which, starts, stops = spans.T
        epochs, places = np.divmod(starts, self._counts[which])
        lengths = stops - starts
        if (places + lengths > self._counts[which]).any():
            pieces = []
            for number, start, stop in spans.tolist():
                while start < stop:
                    epoch, place = divmod(start, int(self._counts[number]))
                    length = min(stop - start, int(self._counts[number]) - place)
                    pieces.append((number, epoch, place, length))
                    start += length
            which, epochs, places, lengths = np.array(pieces).T
        return which, epochs, places, lengths

    def _shuffled(self, places: np.ndarray, groups: np.ndarray, orders: Sequence[tuple[int, int]]) -> np.ndarray:
        """Permute (B,) places, each by the permutation of (epoch, bucket) ``orders[group]``."""
        sizes = [int(self._counts[which]) for _, which in orders]
        keys = [keyed_hash(self.seed, epoch, PURPOSE_RECORDS, which) for epoch, which in orders]
        if self.window is None:
            return permute_groups(places, groups, sizes, keys)
        shuffled = np.empty(len(places), np.int64)
        for group, (epoch, which) in enumerate(orders):
            of_group = groups == group
            shuffled[of_group] = permute_in_windows(
                places[of_group],
                sizes[group],
                rows=self._block_rows[self._names[which]],
                shards=self.window.shards,
                block_key=keyed_hash(self.seed, epoch, PURPOSE_BLOCKS, which),
                row_key=keys[group],
            )
        return shuffled

    def identity(self) -> dict[str, Any]:
        """Plain values of everything that decides the order."""
        buckets = {name: {"records": n, "batch_size": self.batch_sizes[name]} for name, n in self.buckets.items()}
        for name, rows in self._block_rows.items():
            buckets[name]["shard_rows"] = rows
        return {
            "kind": "plan",
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "leftovers": self.leftovers,
            "window_shards": self.window.shards if self.window else 0,
            "filter": dict(self.selection.identity) if self.selection else None,
            "bucket_order": list(self.buckets),
            "buckets": buckets,
        }


def changed_fields(before: Any, now: Any, name: str = "") -> list[str]:
    """Differences of two identities, field by field: ["seed: was 1, is now 2"]."""
    if isinstance(before, dict) and isinstance(now, dict):
        dotted = f"{name}." if name else ""
        keys = [*before, *(key for key in now if key not in before)]
        return [line for key in keys for line in changed_fields(before.get(key), now.get(key), f"{dotted}{key}")]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [line for i, pair in pairs for line in changed_fields(*pair, f"{name}[{i}]")]
    is_same = before == now and isinstance(before, bool) == isinstance(now, bool)  # True == 1
    return [] if is_same else [f"{name}: was {before!r}, is now {now!r}"]
