"""The fourth stage of a batch: its rows are compared with the checksums in the tables before the batch is used.

Opening a store compares sizes and one row a shard; only its checksum shows a changed byte within a row. The memory that
was gathered is hashed, so no row is read twice: what is compared is what trains. Later passes hash nothing. A store at
a URL needs no such checks: every shard is hashed when it is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from ...errors import DamageError, RecipeError
from ..arrays.shard_file import REPAIR
from ..arrays.sharded_array import ShardedArray
from ..disk.hashing import xxh3_rows
from ..format.row_layout import POOLED, view_suffixes
from ..store import LatentStore
from .gather import GatheredBatch, GatheredCaptions, record_arrays
from .resolve import ResolvedBatch

RowCheck = Literal["first", "always", "never"]
"""When rows are checked: the first time that this process reads them, each time, or never."""


class RowChecks:
    """Checks the rows of batches, in any thread: two of them may check a row that both read.

    Args:
      stores: the stores that batches are read from.
      when: when rows are checked.
    Raises: RecipeError: ``when`` is unknown.
    """

    def __init__(self, stores: Sequence[LatentStore], when: RowCheck = "first") -> None:
        if when not in get_args(RowCheck):
            raise RecipeError(f"check {when!r}: expected one of {', '.join(get_args(RowCheck))}.")
        self._stores = list(stores)
        self._when: RowCheck = when
        self._checked: dict[tuple[int, str], np.ndarray] = {}  # a bit for each record and each caption of each store

    def __reduce__(self) -> tuple[Any, ...]:
        return RowChecks, (self._stores, self._when)

    def check(self, resolved: ResolvedBatch, gathered: GatheredBatch) -> None:
        """Check the rows of a batch that have not been checked.

        Raises: DamageError: names the first damaged record or caption, its shard and the remedy; again on each call.
        """
        store = self._stores[resolved.store]
        if self._when == "never" or store.remote is not None:
            return
        bits = self._bits(resolved.store, "records", store.num_records)
        unchecked = _unchecked(bits, resolved.records)
        if len(unchecked):
            everything = len(unchecked) == len(resolved.rows)
            selected = slice(None) if everything else unchecked  # a slice copies nothing
            for group, arrays in gathered.records.items():
                check_records(
                    store,
                    resolved.bucket,
                    group,
                    [array[selected] for array in arrays.values()],
                    rows=resolved.rows[selected],
                    records=resolved.records[selected],
                    views=None if resolved.views is None else resolved.views[selected],
                )
            self._mark(bits, resolved.records[unchecked])
        if resolved.caption_ids is None:
            return
        bits = self._bits(resolved.store, "captions", store.num_captions)
        unchecked = _unchecked(bits, resolved.caption_ids)
        if len(unchecked):
            for name, captions in gathered.captions.items():
                _check_captions(store, name, resolved.caption_ids, captions, unchecked)
            self._mark(bits, resolved.caption_ids[unchecked])

    def _bits(self, store: int, table: str, num_rows: int) -> np.ndarray:
        if (store, table) not in self._checked:
            self._checked[store, table] = np.zeros(-(-num_rows // 8), np.uint8)
        return self._checked[store, table]

    def _mark(self, bits: np.ndarray, positions: np.ndarray) -> None:
        if self._when == "first":
            np.bitwise_or.at(bits, positions >> 3, np.left_shift(1, positions & 7).astype(np.uint8))


def _unchecked(bits: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Indexes of the positions, (B,), whose bit is not set, each position once."""
    is_set = bits[positions >> 3] >> (positions & 7).astype(np.uint8) & 1
    indexes = np.flatnonzero(is_set == 0)
    return indexes[np.unique(positions[indexes], return_index=True)[1]]


def check_records(
    store: LatentStore,
    bucket: str,
    group: str,
    gathered: Sequence[np.ndarray],
    *,
    rows: np.ndarray,
    records: np.ndarray,
    views: np.ndarray | None = None,
) -> None:
    """Compare gathered rows of the latents, a feature or a companion with their checksums in the records table.

    Args:
      group: LATENTS, or the name of the feature or companion.
      gathered: (B, ...) rows of each array of the group, in the order of the checksum.
      rows: (B,) int64 their rows in the arrays of the group.
      records: (B,) int64 positions of their records in that table.
      views: (B,) int64 the view of each row; None: the planned crop, not flipped.
    Raises: DamageError: names the first damaged record.
    """
    parts = gathered
    if len(view_suffixes(store.spec)) > 1:
        arrays = list(record_arrays(store, bucket, group).values())
        drawn = np.zeros(len(rows), np.int64) if views is None else views
        parts = _all_views(arrays, gathered, rows, drawn)
    hashes = xxh3_rows([part.reshape(len(part), -1).view(np.uint8) for part in parts])
    damaged = np.flatnonzero(hashes != store.checksums(group)[records])
    if len(damaged):
        i = int(damaged[0])
        key = store.record_columns(("key",))["key"][int(records[i])].as_py()
        shards = list[str]()
        for views_of_array in record_arrays(store, bucket, group).values():
            for array in views_of_array:
                shards += array.shard_paths(rows[i : i + 1])
        raise _damage(store, f"record '{key}' (bucket '{bucket}', row {rows[i]})", shards)


def _all_views(
    arrays: Sequence[Sequence[ShardedArray]],
    gathered: Sequence[np.ndarray],
    rows: np.ndarray,
    drawn: np.ndarray,
) -> list[np.ndarray]:
    """(B, ...) rows of every view in the order of the checksum, which is of all views; those not drawn are read now.

    Args:
      arrays: for each array of a group, the arrays of all views.
      drawn: (B,) int64 the view that was gathered of each row.
    """
    parts = list[np.ndarray]()
    for view in range(len(arrays[0])):
        is_other = drawn != view
        for gathered_rows, views_of_array in zip(gathered, arrays, strict=True):
            part = gathered_rows.copy()
            part[is_other] = views_of_array[view].take(rows[is_other])
            parts.append(part)
    return parts


def _check_captions(
    store: LatentStore, name: str, caption_ids: np.ndarray, gathered: GatheredCaptions, indexes: np.ndarray
) -> None:
    """Compare gathered captions of a text encoder with their checksums in the captions table.

    Args:
      caption_ids: (B,) ids of the captions.
      indexes: indexes of the captions to compare.
    Raises: DamageError: names the first damaged caption.
    """
    ends = np.cumsum(gathered.lengths)
    starts = ends - gathered.lengths
    parts = list[list[np.ndarray]]()
    for array_name, array in gathered.arrays.items():
        row_bytes = array.reshape(len(array), -1).view(np.uint8)
        if array_name == POOLED:
            parts.append([row_bytes[i] for i in indexes])
        else:
            parts.append([row_bytes[starts[i] : ends[i]] for i in indexes])
    hashes = xxh3_rows(parts)
    damaged = np.flatnonzero(hashes != store.caption_checksums(name)[caption_ids[indexes]])
    if len(damaged):
        caption_id = int(caption_ids[indexes[damaged[0]]])
        text = store.captions["text"][caption_id].as_py()
        raise _damage(
            store,
            f"caption {caption_id} ({text[:60]!r}) of text encoder '{name}'",
            store.text(name).shard_paths(caption_id),
        )


def _damage(store: LatentStore, what: str, shards: Sequence[str]) -> DamageError:
    names = " or ".join(f"'{path}'" for path in shards)
    return DamageError(
        f"store '{store.path}': {what} in shard {names} does not match its checksum: its bytes differ from those "
        f"written. {REPAIR}"
    )
