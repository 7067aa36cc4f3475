"""A Zarr v3 shard: the layout of an array, and the bytes of one shard file (``sharded_array.py`` reads them back).

Arrays are chunked along axis 0 only, so a standard shard file is its rows, one after the other, then an index. An
uncompressed shard is therefore one contiguous array, and is read by memory map with no copy. The layout is pure Zarr
(``sharding_indexed``, index at the end, crc32c): zarr-python writes the same bytes (a test compares them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import google_crc32c
import numcodecs.blosc
import numpy as np
from pydantic import ConfigDict, Field

from ..disk.cached import cached_property
from .token_dtypes import BFLOAT16_NAN

ABSENT = 2**64 - 1  # offset and length of a chunk that is not there (Zarr v3, sharding codec, "binary shard format")
CRC_BYTES = 4
# Limits for untrusted stores: a decoded chunk takes memory, mapped rows do not.
MAX_DECODED_BYTES = 1 << 28
MAX_MAPPED = 1 << 40  # rows of an array, bytes of a chunk

CODECS = ("none", "blosc")  # names in a recipe; sizes and speeds: FORMAT.md
BLOSC_LEVEL = 3  # of zstd within blosc; docs/benchmarks.md compares them
BLOSC_HEADER_BYTES = 16
# One thread, as zarr-python sets it too: the threads of blosc are shared by the process, and do not survive a fork.
numcodecs.blosc.use_threads = False

# Stores are not trusted: pydantic checks these types where an array comes from a manifest.
Count = Annotated[int, Field(ge=0, le=1 << 48)]
Rows = Annotated[int, Field(ge=1, le=MAX_MAPPED)]
Revision = Annotated[int, Field(ge=1, le=999_999_999)]
# Each part begins with a letter or a digit, so no path leaves the store.
StorePath = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.]{0,99}(/[a-z0-9][a-z0-9_.]{0,99}){0,15}$")]


class RowRange(NamedTuple):
    """Rows of an array that one revision added: the first, and the one behind the last."""

    revision: Revision
    first: Count
    end: Count


@dataclass(frozen=True)
class ArrayLayout:
    """Shape, dtype, shards and codec of a stored array, as a manifest has them.

    Args:
      path: of the array's folder within the store.
      shape: (rows, ...), gaps included.
      dtype: numpy name, little-endian on disk. "uint16" holds the bits of bfloat16 numbers.
      shard_rows, chunk_rows: rows in a shard and in an inner chunk; the first is a multiple of the second.
      codec: a key of CODECS.
      ranges: rows that each revision added, in order; empty for all rows in revision 1. The first begins at row 0, each
        other one at a shard, so shards never change when an array grows; rows between two ranges do not exist. A
        revision that adds an array to earlier rows has several.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    path: StorePath
    shape: Annotated[tuple[Count, ...], Field(min_length=1, max_length=4)]
    dtype: Annotated[str, Field(pattern="^(float16|float32|uint16|u?int8)$")]
    shard_rows: Rows
    chunk_rows: Rows = 1
    codec: Annotated[str, Field(pattern="^(none|blosc)$")] = "none"
    ranges: Annotated[tuple[RowRange, ...], Field(min_length=1)] = ()

    @property
    def row_ranges(self) -> tuple[RowRange, ...]:
        """``ranges``, or the one of all rows."""
        return self.ranges or (RowRange(1, 0, self.shape[0]),)

    @cached_property
    def shards(self) -> np.ndarray:
        """(S,) int64 numbers of the shard files, in order."""
        return np.concatenate([np.arange(*self._shards_in(one), dtype=np.int64) for one in self.row_ranges])

    @property
    def num_shards(self) -> int:
        """Number of shard files."""
        return sum(last - first for first, last in map(self._shards_in, self.row_ranges))

    def shards_of(self, revision: int) -> list[int]:
        """Numbers of the shards that a revision added."""
        return [n for one in self.row_ranges if one.revision == revision for n in range(*self._shards_in(one))]

    def _shards_in(self, rows: RowRange) -> tuple[int, int]:
        return rows.first // self.shard_rows, -(-rows.end // self.shard_rows)

    def next_shard_row(self) -> int:
        """First row behind all shards, where the next revision begins."""
        return -(-self.shape[0] // self.shard_rows) * self.shard_rows

    def grown(self, added: RowRange) -> ArrayLayout:
        """The array with a further range of rows."""
        return replace(self, shape=(added.end, *self.shape[1:]), ranges=(*self.row_ranges, added))

    def has_rows(self, rows: np.ndarray) -> np.ndarray:
        """Whether rows lie in one of the ranges, elementwise."""
        return np.any([(rows >= first) & (rows < end) for _, first, end in self.row_ranges], axis=0)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of an inner chunk before compression."""
        return self.chunk_rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row before compression."""
        return math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize

    @property
    def disk_dtype(self) -> np.dtype:
        """The dtype on disk, little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def fill_value(self) -> float | int:
        """The value of rows that were never written."""
        if self.dtype == "uint16":
            return BFLOAT16_NAN
        return float("nan") if self.dtype.startswith("float") else 0

    def rows_of(self, shard: int) -> range:
        """Rows of the array that the shard holds."""
        start = shard * self.shard_rows
        end = next((end for _, first, end in self.row_ranges if first <= start < end), start)
        return range(start, min(start + self.shard_rows, end))

    def shard_path(self, shard: int) -> str:
        """Path of the shard file within the store (Zarr's default chunk keys)."""
        return "/".join([self.path, "c", str(shard), *["0"] * (len(self.shape) - 1)])

    def metadata(self) -> dict[str, Any]:
        """The array's ``zarr.json``; a test compares it with zarr-python's own."""
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        codecs: list[dict[str, Any]] = [little]
        if self.codec == "blosc":
            configuration = {
                "typesize": self.disk_dtype.itemsize,
                "cname": "zstd",
                "clevel": BLOSC_LEVEL,
                "shuffle": "bitshuffle",
                "blocksize": 0,
            }
            codecs += [{"name": "blosc", "configuration": configuration}, {"name": "crc32c"}]
        sharding = {
            "chunk_shape": [self.chunk_rows, *self.shape[1:]],
            "codecs": codecs,
            "index_codecs": [little, {"name": "crc32c"}],
            "index_location": "end",
        }
        grid = {"chunk_shape": [self.shard_rows, *self.shape[1:]]}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": grid},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": "NaN" if math.isnan(self.fill_value) else self.fill_value,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {"bits_of": "bfloat16"} if self.dtype == "uint16" else {},
            "storage_transformers": [],
        }

    def problem(self) -> str:
        """Describe what no array of ours has, such as ranges that overlap; "" if there is nothing.

        Stores are not trusted: a mapped shard of a wrong size would end the process, a large chunk fill its memory.
        """
        numbers = (*self.shape, self.shard_rows, self.chunk_rows)
        if not 1 <= len(self.shape) <= 4 or not all(0 < n <= MAX_MAPPED for n in numbers):
            return f"shape {self.shape}, {self.shard_rows} rows a shard, {self.chunk_rows} a chunk"
        limit = MAX_MAPPED if self.codec == "none" else MAX_DECODED_BYTES
        if self.chunk_bytes > limit or self.shard_rows % self.chunk_rows:
            return f"chunks of {self.chunk_bytes} bytes, {self.chunk_rows} rows, in shards of {self.shard_rows} rows"
        revision, row = 1, 0
        for added in self.row_ranges:
            if added.revision < revision or not row <= added.first < added.end or added.first % self.shard_rows:
                return f"rows {added.first} to {added.end} of revision {added.revision} after row {row}"
            revision, row = added.revision, added.end
        if self.row_ranges[0].first:
            return f"rows that begin with {self.row_ranges[0].first}"
        return "" if row == self.shape[0] else f"{self.shape[0]} rows, but the last range ends at {row}"


def pack_shard(layout: ArrayLayout, rows: np.ndarray) -> list[Any]:
    """Encode the rows of one shard as the parts of its file: the chunks in order, then the index.

    Args:
      rows: (n, ...) of the layout's dtype; the last shard may have fewer rows.
    Returns: contiguous buffers that follow each other in the file.
    """
    rows = np.ascontiguousarray(rows, dtype=layout.disk_dtype)
    num_chunks = math.ceil(len(rows) / layout.chunk_rows)
    missing = num_chunks * layout.chunk_rows - len(rows)
    if missing:  # chunks are always whole: pad the last one
        rows = np.concatenate([rows, np.full((missing, *rows.shape[1:]), layout.fill_value, rows.dtype)])
    if layout.codec == "none":
        parts: list[Any] = [rows.view(np.uint8).reshape(-1).data] if rows.size else []
        lengths = np.full(num_chunks, layout.chunk_bytes, np.uint64)
    else:
        parts = []
        for i in range(num_chunks):
            packed = pack_chunk(rows[i * layout.chunk_rows : (i + 1) * layout.chunk_rows])
            parts.append(packed + google_crc32c.value(packed).to_bytes(CRC_BYTES, "little"))
        lengths = np.array([len(part) for part in parts], np.uint64)
    index = np.full((layout.shard_rows // layout.chunk_rows, 2), ABSENT, "<u8")
    index[:num_chunks, 0] = np.cumsum(lengths) - lengths
    index[:num_chunks, 1] = lengths
    index_bytes = index.tobytes()
    return [*parts, index_bytes + google_crc32c.value(index_bytes).to_bytes(CRC_BYTES, "little")]


def pack_chunk(chunk: np.ndarray) -> bytes:
    """Compress a contiguous chunk with blosc: zstd after a shuffle of the bits of its numbers."""
    blosc = numcodecs.blosc.Blosc(cname="zstd", clevel=BLOSC_LEVEL, shuffle=numcodecs.blosc.BITSHUFFLE)
    return bytes(blosc.encode(chunk))


def unpack_chunk(packed: bytes, out: np.ndarray) -> None:
    """Decompress a chunk of blosc.

    The header is checked first, because blosc reads as many bytes as it says: a false one would end the process.

    Args:
      packed: the chunk without its checksum.
      out: contiguous, of the bytes of the chunk, which it receives.
    Raises: ValueError: the chunk is of another size, or cannot be decoded.
    """
    if len(packed) < BLOSC_HEADER_BYTES:
        raise ValueError(f"{len(packed)} bytes, expected a header of {BLOSC_HEADER_BYTES}")
    num_bytes = int.from_bytes(packed[4:8], "little")
    packed_bytes = int.from_bytes(packed[12:16], "little")
    if num_bytes != out.nbytes or packed_bytes != len(packed):
        raise ValueError(
            f"its header says {num_bytes} bytes in {packed_bytes}, expected {out.nbytes} bytes in {len(packed)}"
        )
    try:
        numcodecs.blosc.decompress(packed, out)
    except (RuntimeError, ValueError) as error:
        raise ValueError(str(error)) from error
