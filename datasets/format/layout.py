"""The layout of a store: paths, arrays with their shard and chunk sizes, and the list of shard tasks. Pure functions.

A store grows in revisions. The first is at the root, each later one in a folder of its own with the same layout, so
files of an earlier revision never change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..disk.cached import cached_property
from ..disk.hashing import canonical_json
from ..disk.spill import map_array
from .buckets import bucket_size
from .schema import StoreSpec
from .token_dtypes import ON_DISK
from .zarr_shard import ArrayLayout, pack_shard

MANIFEST = "manifest.json"
GROUP = "zarr.json"
RECORDS = "records.parquet"
CAPTIONS = "captions.parquet"
PLAN = "plan"
PLAN_FILE = "plan.json"
REVISIONS = "revisions"
LEASES = "leases"
REMOTE_ABOUT = "about.json"  # next to the local part of a store at a URL

CAPTION_PART = "captions"
NULL_PART = "null_caption"
EMBEDDINGS = "captions/embeddings"
SCALES = "captions/scales"
NULL_EMBEDDING = "captions/null"
NULL_SCALES = "captions/null_scales"
OFFSETS = "captions/offsets"
LENGTHS = "captions/lengths"

# More rows make reads no faster; a shard's index (16 bytes a row) and commit record (38 bytes a row) stay small.
MAX_SHARD_ROWS = 8192
TOKEN_CHUNK_BYTES = 1 << 16  # of small tokens in a Zarr chunk


def revision_prefix(revision: int) -> str:
    """Folder of a revision within the store, with a slash at its end; empty for the first."""
    return "" if revision == 1 else f"{REVISIONS}/{revision:06d}/"


def revisions_with(root: Path, name: str) -> list[int]:
    """Revisions of a store that have a file, in order."""
    numbers = [1] if (root / name).is_file() else []
    for path in root.glob(f"{REVISIONS}/*/{name}"):
        number = path.relative_to(root / REVISIONS).parts[0]
        if (
            re.fullmatch(r"[0-9]{6,9}", number)
            and int(number) > 1
            and path == root / revision_prefix(int(number)) / name
            and path.is_file()
        ):
            numbers.append(int(number))
    return sorted(numbers)


def group_json(spec: StoreSpec) -> bytes:
    """Metadata of a revision's root group."""
    attributes = {"leandit": spec.model_dump()}
    return canonical_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def bucket_part(bucket: str) -> str:
    """Name of the part, and folder, of a bucket."""
    return f"buckets/{bucket}"


def commit_path(revision: int, part: str, shard: int) -> str:
    """Path of a shard task's commit record within the store."""
    return f"{revision_prefix(revision)}commits/{part}/{shard:06d}.json"


def latent_layouts(spec: StoreSpec, bucket: str, num_rows: int, *, prefix: str = "") -> list[ArrayLayout]:
    """Arrays of one bucket: the latents or moments, then the flipped ones if the store has them."""
    height_px, width_px = bucket_size(bucket)
    latent = spec.latent
    shape = (num_rows, latent.stored_channels, height_px // latent.downscale, width_px // latent.downscale)
    row_bytes = int(np.prod(shape[1:])) * np.dtype(latent.dtype).itemsize
    shard_rows = max(1, min(MAX_SHARD_ROWS, (spec.shard_mib << 20) // row_bytes))
    names = [latent.array, f"{latent.array}_flip"] if latent.flip else [latent.array]
    return [
        ArrayLayout(f"{prefix}{bucket_part(bucket)}/{name}", shape, latent.dtype, shard_rows, codec=spec.codec)
        for name in names
    ]


def place_captions(num_tokens: Sequence[int] | np.ndarray, shard_rows: int) -> np.ndarray:
    """First row of each caption's tokens: consecutive, but no caption straddles two shards.

    A caption that does not fit into the rest of a shard starts the next one; the rows left over hold NaN. So each shard
    can be encoded alone, and each caption is one contiguous view.

    Args:
      num_tokens: of each caption, at least one and at most ``shard_rows``.
    Returns: (num_captions,) int64, mapped.
    """
    lengths = np.asarray(num_tokens, np.int64 if isinstance(num_tokens, Sequence) else None)
    offsets = map_array(len(lengths), "int64", "places of captions")
    first, row = 0, 0
    while first < len(lengths):  # once a shard
        following = lengths[first : first + shard_rows]
        ends = np.cumsum(following, dtype=np.int64)
        count = int(np.searchsorted(ends, shard_rows, side="right"))
        assert count, f"a caption of {following[0]} tokens does not fit into a shard of {shard_rows}"
        offsets[first : first + count] = row + ends[:count] - following[:count]
        first, row = first + count, row + shard_rows
    return offsets


@dataclass(frozen=True)
class RevisionLayout:
    """The layout of everything that one revision adds to a store.

    Args:
      spec: of the revision.
      revision: its number, from 1.
      bucket_rows: rows that it adds to each bucket.
      num_tokens: (num_captions,) tokens of each caption that it adds.
      has_null: it has the null caption; later revisions of a stack use the first one's.
    """

    spec: StoreSpec
    revision: int
    bucket_rows: Mapping[str, int]
    num_tokens: np.ndarray
    has_null: bool

    @property
    def prefix(self) -> str:
        """Folder within the store, with a slash at its end; empty for the first revision."""
        return revision_prefix(self.revision)

    @cached_property
    def offsets(self) -> np.ndarray:
        """(num_captions,) first row of each caption's tokens."""
        if not self.has_captions:
            return np.empty(0, np.int64)
        return place_captions(self.num_tokens, self._embedding_rows()[0])

    @property
    def has_captions(self) -> bool:
        """The revision adds captions."""
        return self.spec.text is not None and len(self.num_tokens) > 0

    @cached_property
    def latents(self) -> dict[str, list[ArrayLayout]]:
        """Arrays of each bucket."""
        return {
            bucket: latent_layouts(self.spec, bucket, rows, prefix=self.prefix)
            for bucket, rows in self.bucket_rows.items()
        }

    @cached_property
    def arrays(self) -> dict[str, ArrayLayout]:
        """All arrays, by their path within the store."""
        layouts = [layout for layouts in self.latents.values() for layout in layouts]
        if self.has_captions:
            layouts += [*self._embeddings(), *self._caption_index()]
        if self.has_null:
            layouts += self._null()
        return {layout.path: layout for layout in layouts}

    def part_arrays(self, part: str) -> list[ArrayLayout]:
        """Arrays of which each task of a part writes a shard."""
        if part in (NULL_PART, CAPTION_PART):
            paths = (NULL_EMBEDDING, NULL_SCALES) if part == NULL_PART else (EMBEDDINGS, SCALES)
            return [self.arrays[self.prefix + path] for path in paths[: 2 if self._has_scales else 1]]
        return self.latents[part.removeprefix("buckets/")]

    def num_bytes(self, tasks: Iterable[tuple[str, int]]) -> int:
        """Bytes of the shards of some tasks, uncompressed."""
        return sum(
            len(array.rows_of(shard)) * array.row_bytes for part, shard in tasks for array in self.part_arrays(part)
        )

    def tasks(self) -> list[tuple[str, int]]:
        """All tasks, (part, shard), of the revision, in the order in which they are done."""
        parts = [NULL_PART] if self.has_null else []
        parts += [CAPTION_PART] if self.has_captions else []
        parts += [bucket_part(bucket) for bucket in self.bucket_rows]
        return [(part, shard) for part in parts for shard in range(self.part_arrays(part)[0].num_shards)]

    def rows_of(self, part: str, shard: int) -> range:
        """Rows of the part's arrays that a task writes."""
        return self.part_arrays(part)[0].rows_of(shard)

    def captions_of(self, shard: int) -> range:
        """Captions of a shard of the embeddings, counted within the revision."""
        rows = self.rows_of(CAPTION_PART, shard)
        first, last = np.searchsorted(self.offsets, [rows.start, rows.stop])
        return range(int(first), int(last))

    def static_files(self) -> dict[str, bytes]:
        """Files that follow from the plan alone: the metadata of all groups and arrays, and the caption index."""
        group: dict[str, Any] = {"zarr_format": 3, "node_type": "group"}
        files = {self.prefix + GROUP: group_json(self.spec)}
        groups = {bucket_part(bucket) for bucket in self.bucket_rows}
        groups |= {"buckets"} if groups else set()
        groups |= {"captions"} if self.has_captions or self.has_null else set()
        paths = [self.prefix + name for name in groups] + ([REVISIONS] if self.prefix else [])
        files |= {f"{path}/{GROUP}": canonical_json(group | {"attributes": {}}) for path in paths}
        for path, layout in self.arrays.items():
            files[f"{path}/{GROUP}"] = canonical_json(layout.metadata())
        if self.has_captions:
            for layout, values in zip(self._caption_index(), (self.offsets, self.num_tokens), strict=True):
                files[layout.shard_path(0)] = b"".join(pack_shard(layout, values))
        return files

    def _embedding_rows(self) -> tuple[int, int]:
        """Rows of a shard and of an inner chunk of the embeddings."""
        assert self.spec.text is not None
        row_bytes = self.spec.text.width * np.dtype(ON_DISK[self.spec.text.dtype]).itemsize
        chunk_rows = max(1, TOKEN_CHUNK_BYTES // row_bytes)
        # At least one caption of full length fits, since no caption straddles two shards.
        shard_rows = max((self.spec.shard_mib << 20) // row_bytes, self.spec.text.max_tokens)
        return -(-shard_rows // chunk_rows) * chunk_rows, chunk_rows

    @property
    def _has_scales(self) -> bool:
        """Whether tokens are int8, with a scale each."""
        return self.spec.text is not None and self.spec.text.dtype == "int8"

    def _embeddings(self) -> list[ArrayLayout]:
        """Array of all caption tokens, (rows, D), and for int8 the array of their scales, (rows,)."""
        assert self.spec.text is not None
        rows, width = int(self.offsets[-1] + self.num_tokens[-1]), self.spec.text.width
        sizes, codec = self._embedding_rows(), self.spec.codec
        tokens = ArrayLayout(self.prefix + EMBEDDINGS, (rows, width), ON_DISK[self.spec.text.dtype], *sizes, codec)
        # Sharded like the tokens: one task writes the same shard of both.
        scales = ArrayLayout(self.prefix + SCALES, (rows,), "float32", *sizes, codec)
        return [tokens, scales] if self._has_scales else [tokens]

    def _null(self) -> list[ArrayLayout]:
        """Array of the null caption at full length, (max_tokens, D), and its scales: one shard of one chunk each."""
        assert self.spec.text is not None
        count, dtype = self.spec.text.max_tokens, ON_DISK[self.spec.text.dtype]
        tokens = ArrayLayout(self.prefix + NULL_EMBEDDING, (count, self.spec.text.width), dtype, count, count)
        scales = ArrayLayout(self.prefix + NULL_SCALES, (count,), "float32", count, count)
        return [tokens, scales] if self._has_scales else [tokens]

    def _caption_index(self) -> list[ArrayLayout]:
        """Arrays of the first row and the number of rows of each caption."""
        count = len(self.num_tokens)
        return [ArrayLayout(self.prefix + path, (count,), "int64", count, count) for path in (OFFSETS, LENGTHS)]


def is_picture_task(task: tuple[str, int]) -> bool:
    """Whether a task encodes pictures, not captions."""
    return task[0] not in (CAPTION_PART, NULL_PART)
