"""First position of each item of a long stream, in bounded memory; items with equal digests are equal.

Digests are partitioned by their first bits, so that equal ones fall into one part, which fits into memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa

from ....datasets.disk.spill import GrowingArray, map_array

NUM_PARTS = 256  # 9 MB each for 100 M things
SPREAD = 1 << 18  # things that are spread at once
ENTRY = np.dtype([("high", "u8"), ("low", "u8"), ("position", "i8")])


def digests(texts: pa.StringArray) -> np.ndarray:
    """(N, 2) uint64, BLAKE2b of 128 bits, so collisions cannot be constructed."""
    _, offsets, letters = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].tolist()
    view = memoryview(letters or b"")
    joined = b"".join(hashlib.blake2b(view[a:b], digest_size=16).digest() for a, b in pairwise(ends))
    return np.frombuffer(joined, np.uint64).reshape(-1, 2)


def first_positions(stream: Iterable[np.ndarray], what: str) -> np.ndarray:
    """First position of each item's digest.

    Args:
      stream: (n, 2) uint64 digests, in order.
      what: the items, for the error of a full disk.
    Returns: (N,) int64, in a mapped temporary file; of a new item its own position.
    """
    spread, counts = GrowingArray(ENTRY, what), []
    for entries in _entries(stream):
        parts = (entries["high"] >> np.uint64(64 - NUM_PARTS.bit_length() + 1)).astype(np.int64)
        spread.append(entries[np.argsort(parts, kind="stable")])
        counts.append(np.bincount(parts, minlength=NUM_PARTS))
    everything = spread.close()
    first = map_array(len(everything), "int64", what)
    if not counts:
        return first
    lengths = np.array(counts)  # (spreads, parts)
    ends = np.cumsum(lengths.ravel()).reshape(lengths.shape)
    for part in range(NUM_PARTS):
        pieces = [everything[end - length : end] for end, length in zip(ends[:, part], lengths[:, part], strict=True)]
        _find_first(np.concatenate(pieces), first)
    return first


def _entries(stream: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Digests with their positions, in batches."""
    position, waiting, count = 0, [], 0
    for digest_batch in stream:
        entries = np.empty(len(digest_batch), ENTRY)
        entries["high"], entries["low"] = digest_batch[:, 0], digest_batch[:, 1]
        entries["position"] = np.arange(position, position + len(digest_batch))
        position, count = position + len(digest_batch), count + len(digest_batch)
        waiting.append(entries)
        if count >= SPREAD:
            yield np.concatenate(waiting)
            waiting, count = [], 0
    if count:
        yield np.concatenate(waiting)


def _find_first(entries: np.ndarray, first: np.ndarray) -> None:
    """Fill in the first positions of one part, whose entries are in order of position."""
    entries = entries[np.lexsort((entries["low"], entries["high"]))]  # stable: of equal ones, the first comes first
    is_new = np.ones(len(entries), bool)
    is_new[1:] = (entries["high"][1:] != entries["high"][:-1]) | (entries["low"][1:] != entries["low"][:-1])
    begins = np.maximum.accumulate(np.where(is_new, np.arange(len(entries)), 0))
    first[entries["position"]] = entries["position"][begins]
