"""Checks the rows of a batch against the checksums in the tables, before the batch is used.

Opening a store compares sizes and one row a shard; only its checksum shows a changed byte within a row. The thread that
reads a batch reads its unchecked rows again, now from the page cache, and hashes them: a few percent of the first pass,
nothing afterwards. A store at a URL needs no such checks: every shard is hashed when it is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ...errors import DamageError
from ..arrays.shard_file import REPAIR
from ..arrays.sharded_array import ShardedArray
from ..arrays.tokens import CaptionTokens
from ..disk.hashing import xxh3_64
from ..format.row_layout import LATENTS, bucket_part, row_arrays
from ..store import LatentStore
from .batch import Records

RowCheck = Literal["first", "always", "never"]
"""When rows are checked: the first time that this process reads them, each time, or never."""

Place = tuple[ShardedArray, np.ndarray, np.ndarray | None]
"""An array, the first row in it of each of B records or captions, and their numbers of rows; None for one each."""


class RowChecks:
    """Checks the rows of batches, in any thread: two of them may check a row that both read.

    Args:
      stores: that are read.
      when: rows are checked.
      groups: names of the features and companion images that are read beside the latents.
    """

    def __init__(self, stores: Sequence[LatentStore], when: RowCheck, groups: Sequence[str]) -> None:
        self._stores, self._when, self._groups = stores, when, groups
        self._checked: dict[tuple[int, str], np.ndarray] = {}  # a bit for each record or caption of each store

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
        bits = self._bits(number, "records", store.checksums())
        new = _missing(bits, read.records)
        rows, records = read.rows[new], read.records[new]
        for group in (LATENTS, *self._groups) if len(new) else ():
            check_rows(store, bucket, group, rows, records)
        self._add(bits, records)
        if read.caption_ids is not None:
            bits = self._bits(number, "captions", store.caption_checksums(store.texts[0]))
            ids = read.caption_ids[_missing(bits, read.caption_ids)]
            for name in store.texts if len(ids) else ():
                places = _caption_places(store.text(name), ids)
                if (i := _first_damaged(places, store.caption_checksums(name)[ids])) is not None:
                    text = store.captions["text"][int(ids[i])].as_py()
                    raise _damage(store, f"caption {ids[i]} ({text[:60]!r}) of text encoder '{name}'", places, i)
            self._add(bits, ids)

    def _bits(self, number: int, kind: str, checksums: np.ndarray) -> np.ndarray:
        if (number, kind) not in self._checked:
            self._checked[number, kind] = np.zeros(-(-len(checksums) // 8), np.uint8)
        return self._checked[number, kind]

    def _add(self, bits: np.ndarray, positions: np.ndarray) -> None:
        if self._when == "first":
            np.bitwise_or.at(bits, positions >> 3, np.left_shift(1, positions & 7).astype(np.uint8))


def group_arrays(store: LatentStore, bucket: str, group: str) -> list[ShardedArray]:
    """The arrays of the latents, a feature or a companion of a bucket, of one view after the other."""
    return [store.array(f"{bucket_part(bucket)}/{path}") for path in row_arrays(store.spec, bucket, group)]


def _missing(bits: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Indexes of the positions, (B,), whose bit is not set, each position once."""
    new = np.flatnonzero(bits[positions >> 3] >> (positions & 7).astype(np.uint8) & 1 == 0)
    return new[np.unique(positions[new], return_index=True)[1]]


def check_rows(store: LatentStore, bucket: str, group: str, rows: np.ndarray, records: np.ndarray) -> None:
    """Compare rows of a group (the latents, a feature, a companion) with their checksums in the records table.

    Args:
      rows: (B,) in the arrays of the group.
      records: (B,) positions of their records in that table.
    Raises: DamageError: names the first damaged record.
    """
    places: list[Place] = [(array, rows, None) for array in group_arrays(store, bucket, group)]
    if (i := _first_damaged(places, store.checksums(group)[records])) is not None:
        key = store.record_columns(("key",))["key"][int(records[i])].as_py()
        raise _damage(store, f"record '{key}' (bucket '{bucket}', row {rows[i]})", places, i)


def _caption_places(captions: CaptionTokens, ids: np.ndarray) -> list[Place]:
    """Where captions of a text encoder lie: their tokens, then their pooled vectors."""
    places = list[Place]()
    if captions.spec.has_tokens:
        places += [(array, captions.starts[ids], captions.lengths[ids]) for array in captions.arrays]
    if captions.spec.pooled_width:
        places.append((captions.pooled, captions.pooled_rows[ids], None))
    return places


def _first_damaged(places: Sequence[Place], checksums: np.ndarray) -> int | None:
    """The first of B records or captions whose rows in all arrays together do not have its checksum; None if all do."""
    stored = list[Any]()
    for array, starts, lengths in places:
        rows = array.take(starts) if lengths is None else array.take_ranges(starts, lengths)
        as_bytes = rows.reshape(len(rows), -1).view(np.uint8)
        stored.append(as_bytes if lengths is None else np.split(as_bytes, np.cumsum(lengths)[:-1]))
    parts = enumerate(zip(checksums, *stored, strict=True))
    return next((i for i, (checksum, *rows) in parts if xxh3_64(*rows) != checksum), None)


def _damage(store: LatentStore, what: str, places: Sequence[Place], i: int) -> DamageError:
    shards = [path for array, starts, _ in places for path in array.shard_paths(starts[i : i + 1])]
    names = " or ".join(f"'{path}'" for path in shards)
    return DamageError(
        f"store '{store.path}': {what} in shard {names} does not match its checksum: its bytes differ from those "
        f"written. {REPAIR}"
    )
