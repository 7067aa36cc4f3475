"""A spot check of every shard when it is first opened: is it the shard that the tables describe?

File sizes and the checksum of the index do not reveal swapped shards, or a shard of another store. The checksum of one
row does; ``leandit verify`` reads all rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...errors import DamageError
from ..disk.hashing import xxh3_64, xxh3_file
from ..format.row_layout import POOLED, ArrayGroup
from .shard_file import ShardFile

if TYPE_CHECKING:
    from ..store import LatentStore


def check_shard(store: LatentStore, group: ArrayGroup, path: str, shard: int, opened: ShardFile) -> None:
    """Check a shard by its first record or caption, or a null caption by the hash of its file.

    Args:
      store: the store of the shard.
      group: of the array.
      path: of the array.
    Raises: DamageError: it holds other rows than were written.
    """
    layout = store.layout(path)
    name = layout.shard_path(shard)
    if group.is_null:  # at a URL, it was hashed when it was fetched
        entry = store.files.get(name)
        is_right = store.remote is not None or entry is None or xxh3_file(store.path / name) == entry.xxh3_128
    else:
        is_right = _first_item_is_right(store, group, path, shard, opened)
    if not is_right:
        shards = [name] if group.is_null else [store.layout(array).shard_path(shard) for array in group.rows]
        names = " or ".join(f"'{each}'" for each in shards)
        raise DamageError(
            f"store '{store.path}': shard {names} holds rows that differ from those written, perhaps another shard's. "
            "Run 'leandit verify STORE --repair --source PATH': it finds all damage."
        )


def _first_item_is_right(store: LatentStore, group: ArrayGroup, path: str, shard: int, opened: ShardFile) -> bool:
    """Whether the first stored record or caption of a shard has its checksum, over all arrays of the group."""
    tokens, index = (None, store.index(group.bucket)) if group.bucket else (store.text(group.name), None)

    def first_rows(array: str) -> np.ndarray:
        """First row of every item in an array, ascending."""
        if index is not None:
            return index.rows
        assert tokens is not None
        return tokens.pooled_rows if array.endswith(f"/{POOLED}") else tokens.starts

    rows = store.layout(path).rows_of(shard)
    firsts = first_rows(path)
    bounds = np.minimum([rows.start, rows.stop], np.iinfo(firsts.dtype).max).astype(firsts.dtype)  # not a copy of all
    items = range(*np.searchsorted(firsts, bounds).tolist())
    if index is not None:
        checksums = store.checksums(group.name)[index.records[items.start : items.stop]]
    else:
        checksums = store.caption_checksums(group.name)[items.start : items.stop]
    if not checksums.any():
        return True  # nothing that is stored begins in it
    item, checksum = items[int(np.argmax(checksums != 0))], int(checksums[checksums != 0][0])
    parts = []
    for array in group.rows:
        layout, is_one = store.layout(array), tokens is None or array.endswith(f"/{POOLED}")
        file = opened if array == path else store.folder.open(layout, shard, mapped=store.folder.access == "map")
        first = int(first_rows(array)[item]) - shard * layout.shard_rows
        parts.append(file.read(first, first + (1 if is_one else int(tokens.lengths[item]))))  # pyright: ignore
    return xxh3_64(*parts) == checksum
