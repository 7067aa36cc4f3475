"""A spot check of every shard when it is first opened: is it the shard that the tables describe?

File sizes and the checksum of the index do not reveal swapped shards, or a shard of another store. The checksum of one
row does; ``leandit verify`` reads all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ..disk.hashing import xxh3_64, xxh3_file
from ..errors import DamageError
from ..format.caption_layout import EMBEDDINGS, POOLED, SCALES
from ..format.layout import sharing_checksums
from ..format.row_layout import LATENTS
from ..format.schema import Manifest, StoreSpec
from ..format.zarr_shard import ArrayLayout
from ..revisions.records import BucketIndex
from .caption_tokens import CaptionTokens
from .shard_file import ShardFile
from .shard_folder import ShardCheck, ShardFolder


class ProbedStore(Protocol):
    """What the checks need of a ``LatentStore``."""

    path: Path
    folder: ShardFolder
    spec: StoreSpec
    manifest: Manifest | None

    def index(self, bucket: str) -> BucketIndex:
        """Rows and records of a bucket."""
        ...

    def text(self, name: str = "") -> CaptionTokens:
        """Captions of a text encoder."""
        ...

    def checksums_of(self, group: str) -> np.ndarray:
        """Of each record's latents, or rows of a feature."""
        ...

    def caption_checksums(self, name: str = "") -> np.ndarray:
        """Of each caption's rows of a text encoder."""
        ...

    def layout(self, path: str) -> ArrayLayout:
        """An array."""
        ...


def _wrong_shard(store: ProbedStore, layout: ArrayLayout, shard: int) -> DamageError:
    return DamageError(
        f"store '{store.path}': shard '{layout.shard_path(shard)}' holds other rows than were written, perhaps "
        "another shard's. Run 'leandit verify --repair --source PATH': it finds all that is wrong."
    )


def check_rows(store: ProbedStore, path: str) -> ShardCheck:
    """Check the shards of a bucket's array by their first stored record."""
    _, bucket, *inside, _ = path.split("/")
    group = inside[1] if inside else LATENTS

    def check(layout: ArrayLayout, shard: int, mapped: ShardFile) -> None:
        index, rows = store.index(bucket), layout.rows_of(shard)
        position = int(np.searchsorted(index.rows, rows.start))
        if position == len(index.rows) or index.rows[position] >= rows.stop:
            return  # no stored record lies in it
        row = int(index.rows[position]) - rows.start
        checksum = int(store.checksums_of(group)[index.records[position]])
        opened = _with_twins(store, layout, shard, mapped, sharing_checksums(store.spec, path))
        if xxh3_64(*(file.read(row, row + 1) for file in opened)) != checksum:
            raise _wrong_shard(store, layout, shard)

    return check


def check_captions(store: ProbedStore, name: str) -> ShardCheck:
    """Check the shards of a text encoder by their first caption that has a checksum."""

    def check(layout: ArrayLayout, shard: int, mapped: ShardFile) -> None:
        tokens, rows = store.text(name), layout.rows_of(shard)
        of_array = tokens.pooled_rows if layout.path.endswith(f"/{POOLED}") else tokens.starts
        captions = range(*np.searchsorted(of_array, [rows.start, rows.stop]).tolist())
        checksums = store.caption_checksums(name)[captions.start : captions.stop]
        if not checksums.any():
            return
        caption = captions[int(np.argmax(checksums != 0))]
        opened = zip(tokens.paths, _with_twins(store, layout, shard, mapped, tokens.paths), strict=True)
        parts = []
        for path, file in opened:
            is_pooled = path.endswith(f"/{POOLED}")
            first = int((tokens.pooled_rows if is_pooled else tokens.starts)[caption])
            first -= shard * store.layout(path).shard_rows
            parts.append(file.read(first, first + (1 if is_pooled else int(tokens.lengths[caption]))))
        if xxh3_64(*parts) != int(store.caption_checksums(name)[caption]):
            raise _wrong_shard(store, layout, shard)

    return check


def _with_twins(
    store: ProbedStore, layout: ArrayLayout, shard: int, mapped: ShardFile, paths: Sequence[str]
) -> list[ShardFile]:
    """The same shard of all arrays that share checksums, in order; ``layout``, ``mapped``: of one, which is open."""
    return [
        mapped if path == layout.path else store.folder.open(store.layout(path), shard, mapped=True) for path in paths
    ]


def check_whole(store: ProbedStore) -> ShardCheck:
    """Check small arrays by the hash of the file: no table has checksums of their rows."""

    def check(layout: ArrayLayout, shard: int, mapped: ShardFile) -> None:
        if store.folder.remote is not None:
            return  # it was hashed when it was fetched
        path = layout.shard_path(shard)
        entries = store.manifest.files if store.manifest else []
        entry = next((entry for entry in entries if entry.path == path), None)
        if entry and xxh3_file(store.path / path) != entry.xxh3_128:
            raise _wrong_shard(store, layout, shard)

    return check


def check_of(store: ProbedStore, path: str) -> ShardCheck:
    """The check of an array, by its path within a revision."""
    folder, *inside, name = path.split("/")
    if folder == "buckets":
        return check_rows(store, path)
    if name in (EMBEDDINGS, SCALES, POOLED):
        return check_captions(store, inside[0] if inside else "")
    return check_whole(store)
