"""The arrays of one text encoder: where each caption's tokens lie. Pure functions.

Tokens of all captions stand one after the other, so nothing is padded. No caption straddles two shards: each shard can
be encoded alone, and each caption is one contiguous view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from ..disk.cached import cached_property
from ..disk.spill import map_array
from .schema import TextSpec
from .token_dtypes import ON_DISK
from .zarr_shard import ArrayLayout, RowRange

CAPTION_PART = "captions"
NULL_PART = "null_caption"
# Names of the arrays in a text encoder's folder.
EMBEDDINGS, SCALES, POOLED = "embeddings", "scales", "pooled"
NULL_EMBEDDING, NULL_SCALES, NULL_POOLED = "null", "null_scales", "null_pooled"
CAPTION_ARRAYS = {EMBEDDINGS, SCALES, POOLED, NULL_EMBEDDING, NULL_SCALES, NULL_POOLED}

# More rows make reads no faster; a shard's index (16 bytes a row) and commit record (38 bytes a row) stay small.
MAX_SHARD_ROWS = 8192
TOKEN_CHUNK_BYTES = 1 << 16  # of small tokens in a Zarr chunk


def caption_folder(name: str) -> str:
    """Folder of a text encoder's arrays; ``name`` is empty for that of ``[text]``."""
    return f"{CAPTION_PART}/{name}" if name else CAPTION_PART


def caption_arrays(spec: TextSpec) -> list[str]:
    """Arrays that hold rows of a caption, in the order of its checksum."""
    tokens = [EMBEDDINGS, *([SCALES] if spec.dtype == "int8" else ())] if spec.has_tokens else []
    return [*tokens, *([POOLED] if spec.pooled_width else ())]


def place_captions(num_tokens: Sequence[int] | np.ndarray, shard_rows: int, first_row: int = 0) -> np.ndarray:
    """First row of each caption's tokens: consecutive, but no caption straddles two shards.

    A caption that does not fit into the rest of a shard starts the next one; the rows left over hold NaN.

    Args:
      num_tokens: of each caption, at least one and at most ``shard_rows``.
      first_row: of the first caption, which begins a shard.
    Returns: (num_captions,) int64, mapped.
    """
    lengths = np.asarray(num_tokens, np.int64 if isinstance(num_tokens, Sequence) else None)
    starts = map_array(len(lengths), "int64", "places of captions")
    first, row = 0, first_row
    while first < len(lengths):  # once a shard
        following = lengths[first : first + shard_rows]
        ends = np.cumsum(following, dtype=np.int64)
        count = int(np.searchsorted(ends, shard_rows, side="right"))
        assert count, f"a caption of {following[0]} tokens does not fit into a shard of {shard_rows}"
        starts[first : first + count] = row + ends[:count] - following[:count]
        first, row = first + count, row + shard_rows
    return starts


def num_stored_tokens(spec: TextSpec, num_tokens: pa.ChunkedArray) -> np.ndarray:
    """(num_captions,) rows of each caption: its tokens, or max_tokens where the padding is stored too.

    Args:
      num_tokens: (num_captions,) from the captions table.
    """
    return np.full(len(num_tokens), spec.max_tokens, np.int32) if spec.full_length else num_tokens.to_numpy()


def pooled_rows(spec: TextSpec, starts: np.ndarray) -> np.ndarray:
    """Row of each caption's pooled vector, from its start: captions that have both are stored at full length."""
    return starts // spec.max_tokens if spec.has_tokens else starts


@dataclass(frozen=True)
class CaptionLayout:
    """The captions that a revision adds to the arrays of one text encoder.

    Args:
      name: of the text encoder; empty for that of ``[text]``.
      num_tokens: (num_captions,) stored tokens of each caption.
      shard_mib: size at which a shard is full.
      revision: that adds them.
      first_caption: id of the first one.
      before: arrays of earlier revisions, by path; empty if the text encoder is new.
    """

    name: str
    spec: TextSpec
    num_tokens: np.ndarray
    shard_mib: int
    codec: str
    revision: int = 1
    first_caption: int = 0
    before: Mapping[str, ArrayLayout] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Of the arrays, within the store."""
        return caption_folder(self.name)

    @cached_property
    def starts(self) -> np.ndarray:
        """(num_captions,) first row of each caption's tokens; of pooled vectors alone, its row."""
        if not self.spec.has_tokens:
            return self._first_row(POOLED, self._pooled_rows()) + np.arange(len(self.num_tokens))
        shard_rows = self._shard_rows()[0]
        return place_captions(self.num_tokens, shard_rows, self._first_row(EMBEDDINGS, shard_rows))

    @cached_property
    def arrays(self) -> list[ArrayLayout]:
        """Arrays of which a task writes a shard: tokens (rows, D), for int8 scales (rows,), pooled (captions, P)."""
        arrays, starts = [], self.starts
        if self.spec.has_tokens:
            sizes = self._shard_rows()
            arrays = self._tokens(EMBEDDINGS, SCALES, int(starts[-1] + self.num_tokens[-1]), *sizes, self.codec)
        if self.spec.pooled_width:
            end = int(pooled_rows(self.spec, starts[-1:])[0]) + 1
            arrays.append(self._pooled(POOLED, end, self._pooled_rows(), self.codec))
        return arrays

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
        """Captions of a shard, counted from the first one that the revision adds."""
        array = self.arrays[0]
        rows = range(shard * array.shard_rows, (shard + 1) * array.shard_rows)
        first, last = np.searchsorted(self.starts, [rows.start, rows.stop])
        return range(int(first), int(last))

    def starts_of(self, caption: int) -> list[int]:
        """First row of a caption in each of ``arrays``; counted as of ``captions_of``."""
        start = self.starts[caption : caption + 1]
        pooled = int(pooled_rows(self.spec, start)[0])
        return [pooled if array.path.endswith(f"/{POOLED}") else int(start[0]) for array in self.arrays]

    def _first_row(self, name: str, shard_rows: int) -> int:
        """First row that the revision adds to an array: its next shard."""
        before = self.before.get(f"{self.folder}/{name}")
        return -(-before.shape[0] // shard_rows) * shard_rows if before else 0

    def _layout(
        self, name: str, shape: tuple[int, ...], dtype: str, shard_rows: int, chunk_rows: int, codec: str
    ) -> ArrayLayout:
        """An array with the rows that the revision adds, after those of earlier ones."""
        path = f"{self.folder}/{name}"
        added = RowRange(self.revision, self._first_row(name, shard_rows), shape[0])
        if before := self.before.get(path):
            return before.grown(added)
        return ArrayLayout(path, shape, dtype, shard_rows, chunk_rows, codec, (added,))

    def _tokens(
        self, tokens: str, scales: str, rows: int, shard_rows: int, chunk_rows: int, codec: str
    ) -> list[ArrayLayout]:
        sizes, dtype = (shard_rows, chunk_rows, codec), self.spec.dtype
        layouts = [self._layout(tokens, (rows, self.spec.width), ON_DISK[dtype], *sizes)]
        if dtype == "int8":
            # Sharded like the tokens: one task writes the same shard of both.
            layouts.append(self._layout(scales, (rows,), "float32", *sizes))
        return layouts

    def _pooled(self, name: str, rows: int, shard_rows: int, codec: str) -> ArrayLayout:
        return self._layout(name, (rows, self.spec.pooled_width), ON_DISK[self.spec.pooled_dtype], shard_rows, 1, codec)

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
