"""A spot check of every shard when it is first opened: is it the shard that the tables describe?

File sizes and the checksum of the index do not reveal swapped shards, or a shard of another store. The checksum of one
row does; ``leandit verify`` reads all rows.
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


def _wrong_shard(store: ProbedStore, layout: ArrayLayout, shard: int) -> DamageError:
    return DamageError(
        f"store '{store.path}': shard '{layout.shard_path(shard)}' holds other rows than were written, perhaps "
        "another shard's. Run 'leandit verify --repair --source PATH': it finds all that is wrong."
    )


def check_latents(store: ProbedStore, bucket: str) -> ShardCheck:
    """Check a bucket's shards by their first stored record."""

    def check(layout: ArrayLayout, shard: int, first: int, mapped: ShardFile) -> None:
        index, rows = store.index(bucket), layout.rows_of(shard)
        position = int(np.searchsorted(index.rows, first))
        if position == len(index.rows) or index.rows[position] >= first + len(rows):
            return  # no stored record lies in it
        row = int(index.rows[position]) - first
        checksum = int(store.checksums[index.records[position]])
        rows_read = [mapped.read(row, row + 1)]
        if store.spec.latent.flip:  # the checksum covers the row of both arrays
            path = layout.path.removesuffix("_flip")
            flipped = layout.path != path
            other = replace(layout, path=path if flipped else f"{path}_flip")
            rows_read.append(store.folder.open(other, shard, mapped=True).read(row, row + 1))
            rows_read = rows_read[::-1] if flipped else rows_read
        if int(row_checksum(*rows_read), 16) != checksum:
            raise _wrong_shard(store, layout, shard)

    return check


def check_captions(store: ProbedStore) -> ShardCheck:
    """Check the shards of caption embeddings, or of their scales, by their first caption."""

    def check(layout: ArrayLayout, shard: int, first: int, mapped: ShardFile) -> None:
        offsets = store.tokens.offsets
        caption = int(np.searchsorted(offsets, first))
        if caption == len(offsets) or offsets[caption] >= first + len(layout.rows_of(shard)):
            return
        start = int(offsets[caption]) - first
        checksum = int(store.caption_checksums[caption])
        stop = start + int(store.tokens.lengths[caption])
        rows_read = [mapped.read(start, stop)]
        if store.spec.text and store.spec.text.dtype == "int8":  # the checksum covers the rows of both arrays
            other = _twin(store, layout)
            rows_read.append(store.folder.open(other, shard, mapped=True).read(start, stop))
            rows_read = rows_read[::-1] if layout.path.endswith(SCALES) else rows_read
        if int(row_checksum(*rows_read), 16) != checksum:
            raise _wrong_shard(store, layout, shard)

    return check


def _twin(store: ProbedStore, layout: ArrayLayout) -> ArrayLayout:
    """Layout of the scales of int8 tokens, or of the tokens that scales belong to."""
    folder = layout.path.removesuffix(SCALES).removesuffix(EMBEDDINGS)
    if layout.path.endswith(EMBEDDINGS):
        return replace(layout, path=folder + SCALES, shape=layout.shape[:1], dtype="float32")
    assert store.spec.text is not None
    return replace(layout, path=folder + EMBEDDINGS, shape=(layout.shape[0], store.spec.text.width), dtype="int8")


def check_whole(store: ProbedStore) -> ShardCheck:
    """Check small arrays by the hash of the file: no table has checksums of their rows."""

    def check(layout: ArrayLayout, shard: int, first: int, mapped: ShardFile) -> None:
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
    folder, _, rest = path.partition("/")
    if folder == "buckets":
        return check_latents(store, rest.split("/")[0])
    return check_captions(store) if path in (EMBEDDINGS, SCALES) else check_whole(store)
