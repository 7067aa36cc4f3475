"""A look into every shard when it is first mapped: is it the one that the tables speak of?

Sizes and the index's checksum cannot tell two shards in each other's place, or one of another store. One row of it can,
by its checksum, at the price of one row; ``leandit verify`` reads all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from ..disk.cached import cached_property
from ..disk.hashing import xxh3_file
from ..errors import DamageError
from ..format.layout import EMBEDDINGS, SCALES
from ..format.schema import Manifest, StoreSpec
from ..format.zarr_shard import ArrayLayout
from ..revisions.writer import row_checksum
from .bucket_index import BucketIndex
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

    @cached_property
    def tokens(self) -> CaptionTokens:
        """Token rows of each caption."""
        ...

    @property
    def checksums(self) -> np.ndarray:
        """Of each record's latents."""
        ...

    @cached_property
    def caption_checksums(self) -> np.ndarray:
        """Of each caption's tokens."""
        ...


def _refuse(store: ProbedStore, layout: ArrayLayout, shard: int) -> DamageError:
    return DamageError(
        f"store '{store.path}': shard '{layout.shard_path(shard)}' holds other rows than were written, perhaps "
        "another shard's. Run 'leandit verify --repair --source PATH': it finds all that is wrong."
    )


def check_latents(store: ProbedStore, bucket: str) -> ShardCheck:
    """A check of a bucket's shards by their first stored record."""

    def check(layout: ArrayLayout, shard: int, first: int, mapped: ShardFile) -> None:
        index, rows = store.index(bucket), layout.rows_of(shard)
        position = int(np.searchsorted(index.rows, first))
        if position == len(index.rows) or index.rows[position] >= first + len(rows):
            return  # no record of it is left, so nobody reads it
        row = int(index.rows[position]) - first
        wanted = int(store.checksums[index.records[position]])
        found = [mapped.read(row, row + 1)]
        if store.spec.latent.flip:  # the checksum covers the row of both arrays
            path = layout.path.removesuffix("_flip")
            flipped = layout.path != path
            other = replace(layout, path=path if flipped else f"{path}_flip")
            found.append(store.folder.open(other, shard, mapped=True).read(row, row + 1))
            found = found[::-1] if flipped else found
        if int(row_checksum(*found), 16) != wanted:
            raise _refuse(store, layout, shard)

    return check


def check_captions(store: ProbedStore) -> ShardCheck:
    """A check of the shards of caption embeddings, or of their scales, by their first caption."""

    def check(layout: ArrayLayout, shard: int, first: int, mapped: ShardFile) -> None:
        offsets = store.tokens.offsets
        caption = int(np.searchsorted(offsets, first))
        if caption == len(offsets) or offsets[caption] >= first + len(layout.rows_of(shard)):
            return
        start = int(offsets[caption]) - first
        wanted = int(store.caption_checksums[caption])
        stop = start + int(store.tokens.lengths[caption])
        found = [mapped.read(start, stop)]
        if store.spec.text and store.spec.text.dtype == "int8":  # the checksum covers the rows of both arrays
            other = _twin(store, layout)
            found.append(store.folder.open(other, shard, mapped=True).read(start, stop))
            found = found[::-1] if layout.path.endswith(SCALES) else found
        if int(row_checksum(*found), 16) != wanted:
            raise _refuse(store, layout, shard)

    return check


def _twin(store: ProbedStore, layout: ArrayLayout) -> ArrayLayout:
    """Layout of the scales of an array of int8 tokens, or of the tokens of an array of scales."""
    folder = layout.path.removesuffix(SCALES).removesuffix(EMBEDDINGS)
    if layout.path.endswith(EMBEDDINGS):
        return replace(layout, path=folder + SCALES, shape=layout.shape[:1], dtype="float32")
    assert store.spec.text is not None
    return replace(layout, path=folder + EMBEDDINGS, shape=(layout.shape[0], store.spec.text.width), dtype="int8")


def check_whole(store: ProbedStore) -> ShardCheck:
    """A check of small arrays, which no table holds a checksum of, by the hash of the file."""

    def check(layout: ArrayLayout, shard: int, first: int, mapped: ShardFile) -> None:
        if store.folder.remote is not None:
            return  # it was hashed when it came
        path = layout.shard_path(shard)
        entries = store.manifest.files if store.manifest else []
        entry = next((entry for entry in entries if entry.path == path), None)
        if entry and xxh3_file(store.path / path) != entry.xxh3_128:
            raise _refuse(store, layout, shard)

    return check


def check_of(store: ProbedStore, path: str) -> ShardCheck:
    """The check of an array, by its path within a revision."""
    folder, _, rest = path.partition("/")
    if folder == "buckets":
        return check_latents(store, rest.split("/")[0])
    return check_captions(store) if path in (EMBEDDINGS, SCALES) else check_whole(store)
