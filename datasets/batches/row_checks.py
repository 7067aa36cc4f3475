"""Checks the rows of a batch against the checksums in the tables, before the batch is used.

Opening a store compares sizes and one row a shard; only its checksum shows a changed byte within a row. The thread that
reads a batch reads its unchecked rows again, now from the page cache, and hashes them: a few percent of the first pass,
nothing afterwards. A store at a URL needs no such checks: every shard is hashed when it is fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from ..arrays.shard_file import REPAIR
from ..arrays.sharded_array import ShardedArray
from ..disk.hashing import xxh3_64
from ..errors import DamageError
from ..format.row_layout import LATENTS, bucket_part, row_arrays
from ..store import LatentStore
from .lookup import Records

RowCheck = Literal["first", "always", "never"]
"""When rows are checked: the first time that this process reads them, each time, or never."""


class RowChecks:
    """Checks the rows of batches, in any thread: two of them may check a row that both read.

    Args:
      stores: that are read.
      when: rows are checked.
      groups: names of the features and companion pictures that are read beside the latents.
    """

    def __init__(self, stores: Sequence[LatentStore], when: RowCheck, groups: Sequence[str]) -> None:
        self._stores, self._when, self._groups = stores, when, groups
        self._checked: dict[tuple[int, str], _Positions] = {}  # records and captions of each store

    def __reduce__(self) -> tuple[Any, ...]:
        return RowChecks, (self._stores, self._when, self._groups)

    def check(self, number: int, bucket: str, read: Records) -> None:
        """Check the rows that were read for a batch.

        Args:
          number: of the store.
        Raises: DamageError: names the first damaged record or caption, its shard and the remedy; again on each call.
        """
        store = self._stores[number]
        if self._when == "never" or store.remote is not None:
            return
        records = self._positions(number, "records", len(store.checksums))
        new = records.missing(read.records)
        for group in (LATENTS, *self._groups) if len(new) else ():
            _check_records(store, bucket, group, read.rows[new], read.records[new])
        if self._when == "first":
            records.add(read.records[new])
        if read.caption_ids is not None:
            num_captions = len(store.caption_checksums(store.texts[0]))
            captions = self._positions(number, "captions", num_captions)
            ids = read.caption_ids[captions.missing(read.caption_ids)]
            for name in store.texts if len(ids) else ():
                _check_captions(store, name, ids)
            if self._when == "first":
                captions.add(ids)

    def _positions(self, number: int, kind: str, count: int) -> _Positions:
        if (number, kind) not in self._checked:
            self._checked[number, kind] = _Positions(count)
        return self._checked[number, kind]


class _Positions:
    """A set of positions below ``count``, in a bit each."""

    def __init__(self, count: int) -> None:
        self._bits = np.zeros(-(-count // 8), np.uint8)

    def add(self, positions: np.ndarray) -> None:
        """Add positions, (B,)."""
        np.bitwise_or.at(self._bits, positions >> 3, np.left_shift(1, positions & 7).astype(np.uint8))

    def missing(self, positions: np.ndarray) -> np.ndarray:
        """Indexes of the positions, (B,), that are not in the set, each position once."""
        new = np.flatnonzero(self._bits[positions >> 3] >> (positions & 7).astype(np.uint8) & 1 == 0)
        return new[np.unique(positions[new], return_index=True)[1]]


def _check_records(store: LatentStore, bucket: str, group: str, rows: np.ndarray, records: np.ndarray) -> None:
    """Compare the rows of a group of arrays; those of a record share a checksum."""
    arrays = [store.array(f"{bucket_part(bucket)}/{path}") for path in row_arrays(store.spec, bucket, group)]
    stored = [_as_bytes(array.take(rows)) for array in arrays]
    for i, wrong in enumerate(_differ(zip(*stored, strict=True), store.checksums_of(group)[records])):
        if wrong:
            key = store.record_columns(("key",))["key"][int(records[i])].as_py()
            shards = [path for array in arrays for path in array.shard_paths(rows[i : i + 1])]
            raise _damage(store, f"record '{key}' (bucket '{bucket}', row {rows[i]})", shards)


def _check_captions(store: LatentStore, name: str, ids: np.ndarray) -> None:
    """Compare the rows of captions of a text encoder: those of its tokens, then its pooled vector."""
    captions, places = store.text(name), list[tuple[ShardedArray, np.ndarray]]()
    stored: list[Iterable[np.ndarray]] = []
    if captions.spec.has_tokens:
        starts, lengths = captions.starts[ids], captions.lengths[ids]
        ends = np.cumsum(lengths)[:-1]
        for array in captions.arrays:
            stored.append(np.split(_as_bytes(array.take_ranges(starts, lengths)), ends))
            places.append((array, starts))
    if captions.spec.pooled_width:
        rows = captions.pooled_rows[ids]
        stored.append(_as_bytes(captions.pooled.take(rows)))
        places.append((captions.pooled, rows))
    for i, wrong in enumerate(_differ(zip(*stored, strict=True), store.caption_checksums(name)[ids])):
        if wrong:
            text = store.captions["text"][int(ids[i])].as_py()
            shards = [path for array, rows in places for path in array.shard_paths(rows[i : i + 1])]
            raise _damage(store, f"caption {ids[i]} ({text[:60]!r}) of text encoder '{name}'", shards)


def _differ(stored: Iterable[Sequence[np.ndarray]], checksums: np.ndarray) -> Iterable[bool]:
    """Whether the bytes of each item differ from its checksum."""
    return (xxh3_64(*parts) != checksum for parts, checksum in zip(stored, checksums, strict=True))


def _as_bytes(rows: np.ndarray) -> np.ndarray:
    """(B, bytes of a row) uint8."""
    return rows.reshape(len(rows), -1).view(np.uint8)


def _damage(store: LatentStore, what: str, shards: Sequence[str]) -> DamageError:
    names = " or ".join(f"'{path}'" for path in shards)
    return DamageError(
        f"store '{store.path}': {what} in shard {names} does not match its checksum: its bytes are not those that were "
        f"written. {REPAIR}"
    )
