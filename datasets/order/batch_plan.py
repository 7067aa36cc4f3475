"""BatchPlan: the records of every batch, as a pure function of (seed, number), without an array of N.

    plan = BatchPlan(store.buckets, global_batch=256, seed=0)
    plan.batch_at(1_000_000)            # bucket, positions and epoch of a global batch
    plan.place_of(1_000_000)            # its epoch, and its index in the epoch

Global batches are counted from 0 over all epochs, so the state of a reader is one integer. Each batch holds records of
one bucket; the batches of all buckets are shuffled within an epoch. Every record comes once per epoch, except those
that do not fill a batch (``leftovers``). Ranks and microbatches only cut a global batch, see ``slices.py``.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

Leftovers = Literal["short", "drop"]
ORDER_VERSION = 1  # incremented when the same identity gives another order
MAX_NUMBER = 1 << 48  # batches; up to here the records of a bucket, counted over all epochs, fit into 64 bits


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """One global batch, all of one bucket.

    Args:
      bucket: "HxW" in pixels.
      positions: (B,) int64 positions within the bucket's stored records (see ``LatentStore.index``).
      epoch: that the batch belongs to.
      plan: index into the order's ``plans``.
    """

    bucket: str
    positions: np.ndarray
    epoch: int
    plan: int = 0


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
        "drop": they are skipped in this epoch; the next epoch skips others.
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
        if self.num_records and not self.batches_per_epoch:
            raise RecipeError(
                "leftovers 'drop': no bucket has enough records for one batch, so nothing would be trained on. "
                "Lower the batch size, or use 'short'."
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

    @cached_property
    def batches_per_epoch(self) -> int:
        """Number of global batches in an epoch, smaller ones included."""
        return int(self._num_batches.sum())

    @cached_property
    def _num_batches(self) -> np.ndarray:
        """(K,) batches of each bucket in an epoch."""
        if self.leftovers == "drop":
            return self._counts // self._sizes
        return -(-self._counts // self._sizes)

    def place_of(self, number: int) -> tuple[int, int]:
        """Epoch of a global batch, and its index within.

        Raises: IndexError: the number is negative or from MAX_NUMBER on, or the plan has no records.
        """
        if not 0 <= number < MAX_NUMBER or not self.batches_per_epoch:
            raise IndexError(f"batch {number} of a plan of {self.num_records} records")
        return divmod(number, self.batches_per_epoch)

    def batch_at(self, number: int) -> PlannedBatch:
        """Global batch ``number``, counted from 0 over all epochs. Raises: IndexError: as ``place_of``."""
        return self.batches(number, 1)[0]

    def batches(self, first: int, count: int) -> list[PlannedBatch]:
        """Global batches ``first`` to ``first + count - 1``; sixteen at once take little longer than one.

        Raises: IndexError: as ``place_of``.
        """
        epoch, index = self.place_of(first)
        planned: list[PlannedBatch] = []
        while len(planned) < count:
            num_left = min(count - len(planned), self.batches_per_epoch - index)
            planned += self._fill(epoch, self._spans(epoch, index, num_left))
            epoch += 1
            index = 0
        return planned

    def _spans(self, epoch: int, index: int, count: int) -> np.ndarray:
        """Batches ``index`` to ``index + count - 1`` of an epoch: (count, 3) of bucket, first place and end in it."""
        totals = self._num_batches
        spans: list[np.ndarray] = []
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
            begins = ordinals * self._sizes[which]
            ends = np.minimum(begins + self._sizes[which], self._counts[which])
            spans.append(np.stack([which, begins, ends], axis=1))
            index, count = index + taken, count - taken
        return np.concatenate(spans)

    def _fill(self, epoch: int, spans: np.ndarray) -> list[PlannedBatch]:
        """The batches of an epoch at (n, 3) spans, computed together."""
        lengths = spans[:, 2] - spans[:, 1]
        edges = np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) + np.repeat(spans[:, 1] - edges, lengths)
        buckets, groups = np.unique(spans[:, 0], return_inverse=True)
        shuffled = self._shuffled(places, np.repeat(groups, lengths), epoch, buckets.tolist())
        batches: list[PlannedBatch] = []
        for number, start, length in zip(spans[:, 0].tolist(), edges.tolist(), lengths.tolist(), strict=True):
            bucket = self._names[number]
            positions = shuffled[start : start + length]
            chosen = self.selection.positions[bucket] if self.selection else None
            if chosen is not None:
                positions = chosen[positions].astype(np.int64)
            batches.append(PlannedBatch(bucket, positions, epoch))
        return batches

    def _shuffled(self, places: np.ndarray, groups: np.ndarray, epoch: int, buckets: Sequence[int]) -> np.ndarray:
        """Permute (B,) places of an epoch, each by the permutation of its bucket, ``buckets[group]``."""
        sizes = [int(self._counts[which]) for which in buckets]
        keys = [keyed_hash(self.seed, epoch, PURPOSE_RECORDS, which) for which in buckets]
        if self.window is None:
            return permute_groups(places, groups, sizes, keys)
        shuffled = np.empty(len(places), np.int64)
        for group, which in enumerate(buckets):
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
