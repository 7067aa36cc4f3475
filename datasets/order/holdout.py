"""Records that never train: a share of a store, chosen by a hash of the key alone.

No seed and no position is part of it: a record that is held out stays so while the store grows, in every run, and in
every store that has its key. A larger share holds out the same records and more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import xxhash

if TYPE_CHECKING:
    from ..store import LatentStore

SEED = 0x686F6C64  # part of the choice: another one would let held-out records train
KEYS_AT_ONCE = 1 << 16  # as Python strings


def key_hashes(store: LatentStore, records: np.ndarray | None = None) -> np.ndarray:
    """Hash of each record's key, (N,) uint64, evenly spread.

    Args:
      records: (N,) positions in the records table; None: all.
    """
    keys = store.record_columns(("key",))["key"]
    keys = keys if records is None else keys.take(pa.array(records))
    hashes = np.empty(len(keys), np.uint64)
    for start in range(0, len(keys), KEYS_AT_ONCE):
        texts = keys.slice(start, KEYS_AT_ONCE).cast(pa.string()).to_pylist()
        hashes[start : start + len(texts)] = [xxhash.xxh3_64_intdigest(text.encode(), seed=SEED) for text in texts]
    return hashes


def is_held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """(N,) bool of (N,) hashes.

    Args:
      share: from 0 to below 1.
    """
    return hashes < np.uint64(int(share * 2.0**64))
