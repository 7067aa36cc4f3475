"""The arrays of one text encoder in one revision: where each caption's tokens lie. Pure functions.

Tokens of all captions stand one after the other, so nothing is padded. No caption straddles two shards: each shard can
be encoded alone, and each caption is one contiguous view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..disk.cached import cached_property
from ..disk.spill import map_array
from .schema import TextSpec
from .token_dtypes import ON_DISK
from .zarr_shard import ArrayLayout

CAPTION_PART = "captions"
NULL_PART = "null_caption"
# Names of the arrays in a text encoder's folder.
EMBEDDINGS, SCALES, POOLED, OFFSETS, LENGTHS = "embeddings", "scales", "pooled", "offsets", "lengths"
NULL_EMBEDDING, NULL_SCALES, NULL_POOLED = "null", "null_scales", "null_pooled"
CAPTION_ARRAYS = {EMBEDDINGS, SCALES, POOLED, OFFSETS, LENGTHS, NULL_EMBEDDING, NULL_SCALES, NULL_POOLED}

# More rows make reads no faster; a shard's index (16 bytes a row) and commit record (38 bytes a row) stay small.
MAX_SHARD_ROWS = 8192
TOKEN_CHUNK_BYTES = 1 << 16  # of small tokens in a Zarr chunk


def caption_folder(name: str) -> str:
    """Folder of a text encoder's arrays within a revision; ``name`` is empty for that of ``[text]``."""
    return f"{CAPTION_PART}/{name}" if name else CAPTION_PART


def caption_arrays(spec: TextSpec) -> list[str]:
    """Arrays that hold rows of a caption, in the order of its checksum."""
    tokens = [EMBEDDINGS, *([SCALES] if spec.dtype == "int8" else ())] if spec.has_tokens else []
    return [*tokens, *([POOLED] if spec.pooled_width else ())]


def place_captions(num_tokens: Sequence[int] | np.ndarray, shard_rows: int) -> np.ndarray:
    """First row of each caption's tokens: consecutive, but no caption straddles two shards.

    A caption that does not fit into the rest of a shard starts the next one; the rows left over hold NaN.

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
class CaptionLayout:
    """The arrays of one text encoder in one revision.

    Args:
      prefix: of the revision's folder.
      name: of the text encoder; empty for that of ``[text]``.
      num_tokens: (num_captions,) stored tokens of each caption that the revision adds.
      shard_mib: size at which a shard is full.
    """

    prefix: str
    name: str
    spec: TextSpec
    num_tokens: np.ndarray
    shard_mib: int
    codec: str

    @property
    def folder(self) -> str:
        """Of the arrays, within the store."""
        return self.prefix + caption_folder(self.name)

    @cached_property
    def offsets(self) -> np.ndarray:
        """(num_captions,) first row of each caption's tokens."""
        return place_captions(self.num_tokens, self._shard_rows()[0])

    @cached_property
    def arrays(self) -> list[ArrayLayout]:
        """Arrays of which a task writes a shard: tokens (rows, D), for int8 scales (rows,), pooled (captions, P)."""
        arrays = []
        if self.spec.has_tokens:
            rows, sizes = int(self.offsets[-1] + self.num_tokens[-1]), self._shard_rows()
            arrays = self._tokens(EMBEDDINGS, SCALES, rows, *sizes, self.codec)
        if self.spec.pooled_width:
            count, shard_rows = len(self.num_tokens), self._pooled_rows()
            arrays.append(self._pooled(POOLED, count, shard_rows, self.codec))
        return arrays

    @cached_property
    def index(self) -> list[ArrayLayout]:
        """Arrays of the first row and the number of rows of each caption; none if only pooled vectors are stored."""
        count = len(self.num_tokens)
        paths = (OFFSETS, LENGTHS) if self.spec.has_tokens else ()
        return [ArrayLayout(f"{self.folder}/{path}", (count,), "int64", count, count) for path in paths]

    @cached_property
    def null(self) -> list[ArrayLayout]:
        """The same as ``arrays`` for the null caption at full length: one shard of one chunk each."""
        count, arrays = self.spec.max_tokens, []
        if self.spec.has_tokens:
            arrays = self._tokens(NULL_EMBEDDING, NULL_SCALES, count, count, count, "none")
        if self.spec.pooled_width:
            arrays.append(self._pooled(NULL_POOLED, 1, 1, "none"))
        return arrays

    def captions_of(self, shard: int) -> range:
        """Captions of a shard, counted within the revision."""
        rows = self.arrays[0].rows_of(shard)
        if not self.spec.has_tokens:
            return rows
        first, last = np.searchsorted(self.offsets, [rows.start, rows.stop])
        return range(int(first), int(last))

    def starts_of(self, caption: int) -> list[int]:
        """First row of a caption in each of ``arrays``."""
        tokens = int(self.offsets[caption]) if self.spec.has_tokens else 0
        return [caption if array.path.endswith(f"/{POOLED}") else tokens for array in self.arrays]

    def _tokens(
        self, tokens: str, scales: str, rows: int, shard_rows: int, chunk_rows: int, codec: str
    ) -> list[ArrayLayout]:
        sizes, dtype = (shard_rows, chunk_rows, codec), self.spec.dtype
        layouts = [ArrayLayout(f"{self.folder}/{tokens}", (rows, self.spec.width), ON_DISK[dtype], *sizes)]
        if dtype == "int8":
            # Sharded like the tokens: one task writes the same shard of both.
            layouts.append(ArrayLayout(f"{self.folder}/{scales}", (rows,), "float32", *sizes))
        return layouts

    def _pooled(self, path: str, rows: int, shard_rows: int, codec: str) -> ArrayLayout:
        dtype = ON_DISK[self.spec.pooled_dtype]
        return ArrayLayout(f"{self.folder}/{path}", (rows, self.spec.pooled_width), dtype, shard_rows, 1, codec)

    def _shard_rows(self) -> tuple[int, int]:
        """Rows of a shard and of an inner chunk of the tokens."""
        row_bytes = self.spec.width * np.dtype(ON_DISK[self.spec.dtype]).itemsize
        fitting = (self.shard_mib << 20) // row_bytes
        if self.spec.full_length:  # whole captions, so that a shard of pooled vectors has the same ones
            length = self.spec.max_tokens
            return max(1, min(fitting // length, MAX_SHARD_ROWS)) * length, length
        chunk_rows = max(1, TOKEN_CHUNK_BYTES // row_bytes)
        # At least one caption of full length fits, since no caption straddles two shards.
        shard_rows = max(fitting, self.spec.max_tokens)
        return -(-shard_rows // chunk_rows) * chunk_rows, chunk_rows

    def _pooled_rows(self) -> int:
        """Captions of a shard of pooled vectors; with tokens (of full length) those of a shard of them."""
        if self.spec.has_tokens:
            return self._shard_rows()[0] // self.spec.max_tokens
        row_bytes = self.spec.pooled_width * np.dtype(ON_DISK[self.spec.pooled_dtype]).itemsize
        return max(1, min(MAX_SHARD_ROWS, (self.shard_mib << 20) // row_bytes))
