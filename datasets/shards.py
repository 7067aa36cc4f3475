"""A Zarr v3 shard and its memory map: the bytes of one shard file, and the rows read back out of it.

Arrays are chunked along axis 0 only, so a standard shard file is its rows, one after the other, then an index. An
uncompressed shard is therefore one contiguous array, and is read by memory map with no copy. The layout is pure Zarr
(``sharding_indexed``, index at the end, crc32c): zarr-python writes the same bytes (a test compares them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numpy as np

from .errors import DamageError, RecipeError

ABSENT = 2**64 - 1  # offset and length of a chunk that is not there (Zarr v3, sharding codec, "binary shard format")
CRC_BYTES = 4

# name in a recipe -> (Zarr v3 codec, numcodecs codec giving the same bytes). Sizes and speeds: FORMAT.md.
CODECS: dict[str, tuple[dict[str, Any], Any] | None] = {
    "none": None,
    "zstd": (
        {"name": "zstd", "configuration": {"level": 3, "checksum": False}},
        numcodecs.Zstd(level=3),
    ),
    "gzip": ({"name": "gzip", "configuration": {"level": 5}}, numcodecs.GZip(level=5)),
    **{
        f"blosc-{cname}": (
            {
                "name": "blosc",
                "configuration": {
                    "cname": cname,
                    "clevel": 5,
                    "shuffle": "bitshuffle",
                    "typesize": 2,
                    "blocksize": 0,
                },
            },
            numcodecs.Blosc(cname=cname, clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE),
        )
        for cname in ("lz4", "zstd")
    },
}


@dataclass(frozen=True)
class ArrayLayout:
    """Where the rows of one stored array lie.

    Args:
      path: of the array's folder within the store.
      shape: (rows, ...).
      dtype: numpy name, little-endian on disk: "float16", "float32" or "int64" and the like.
      shard_rows, chunk_rows: rows in a shard and in an inner chunk; the first is a multiple of the second.
      codec: a key of CODECS.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    shard_rows: int
    chunk_rows: int = 1
    codec: str = "none"

    @property
    def num_shards(self) -> int:
        """Number of shard files."""
        return math.ceil(self.shape[0] / self.shard_rows)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of an inner chunk before compression."""
        return self.chunk_rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row before compression."""
        return math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize

    def rows_of(self, shard: int) -> range:
        """Rows of the array that the shard holds."""
        return range(shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.shape[0]))

    def shard_path(self, shard: int) -> str:
        """Path of the shard file within the store (Zarr's default chunk keys)."""
        return "/".join([self.path, "c", str(shard), *["0"] * (len(self.shape) - 1)])

    def metadata(self) -> dict[str, Any]:
        """The array's ``zarr.json``."""
        numbers: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        compression = CODECS[self.codec]
        if compression:
            codec = compression[0]
            if codec["name"] == "blosc":
                typed = codec["configuration"] | {"typesize": np.dtype(self.dtype).itemsize}
                codec = codec | {"configuration": typed}
            numbers += [codec, {"name": "crc32c"}]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [self.shard_rows, *self.shape[1:]]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": "NaN" if self.dtype.startswith("float") else 0,
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [self.chunk_rows, *self.shape[1:]],
                        "codecs": numbers,
                        "index_codecs": [
                            {"name": "bytes", "configuration": {"endian": "little"}},
                            {"name": "crc32c"},
                        ],
                        "index_location": "end",
                    },
                }
            ],
            "attributes": {},
            "storage_transformers": [],
        }

    @classmethod
    def from_metadata(cls, path: str, metadata: dict[str, Any]) -> ArrayLayout:
        """Read a ``zarr.json`` that ``metadata`` wrote.

        Raises: DamageError: it is not one of ours, so its shards cannot be mapped.
        """
        try:
            shape = tuple(metadata["shape"])
            sharding = metadata["codecs"][0]["configuration"]
            codec = "none"
            if len(sharding["codecs"]) > 1:
                codec = _codec_name(sharding["codecs"][1])
            layout = cls(
                path=path,
                shape=shape,
                dtype=metadata["data_type"],
                shard_rows=metadata["chunk_grid"]["configuration"]["chunk_shape"][0],
                chunk_rows=sharding["chunk_shape"][0],
                codec=codec,
            )
            known = layout.metadata() == metadata
        except (KeyError, IndexError, TypeError) as error:
            raise DamageError(f"array '{path}': zarr.json is not one that leandit writes ({error!r}).") from error
        if not known:
            raise DamageError(f"array '{path}': zarr.json is not one that leandit writes; open it with zarr instead.")
        return layout


def _codec_name(codec: dict[str, Any]) -> str:
    for name, known in CODECS.items():
        if known and known[0]["name"] == codec["name"]:
            settings, wanted = codec["configuration"], known[0]["configuration"]
            if all(settings.get(key) == value for key, value in wanted.items() if key != "typesize"):
                return name
    raise KeyError(f"codec {codec}")


def check_codec(name: str) -> None:
    """Refuse a codec that is not on the list.

    Raises: RecipeError.
    """
    if name not in CODECS:
        raise RecipeError(f"store.codec '{name}': needed one of {', '.join(CODECS)}.")


def pack_shard(layout: ArrayLayout, rows: np.ndarray) -> list[Any]:
    """Encode the rows of one shard as the parts of its file: the chunks in order, then the index.

    Args:
      rows: (n, ...) of the layout's dtype; n may be smaller than a shard in the last one.
    Returns: contiguous buffers that follow each other in the file.
    """
    rows = np.ascontiguousarray(rows, dtype=np.dtype(layout.dtype).newbyteorder("<"))
    num_chunks = math.ceil(len(rows) / layout.chunk_rows)
    missing = num_chunks * layout.chunk_rows - len(rows)
    if missing:  # a chunk is always whole; what no row fills holds the fill value
        fill = np.nan if rows.dtype.kind == "f" else 0
        rows = np.concatenate([rows, np.full((missing, *rows.shape[1:]), fill, rows.dtype)])
    compression = CODECS[layout.codec]
    if compression is None:
        parts: list[Any] = [rows.view(np.uint8).reshape(-1).data] if rows.size else []
        lengths = np.full(num_chunks, layout.chunk_bytes, np.uint64)
    else:
        parts = []
        for i in range(num_chunks):
            chunk = rows[i * layout.chunk_rows : (i + 1) * layout.chunk_rows]
            encoded = bytes(compression[1].encode(np.ascontiguousarray(chunk)))
            parts.append(encoded + google_crc32c.value(encoded).to_bytes(CRC_BYTES, "little"))
        lengths = np.array([len(part) for part in parts], np.uint64)
    index = np.full((layout.shard_rows // layout.chunk_rows, 2), ABSENT, "<u8")
    index[:num_chunks, 0] = np.cumsum(lengths) - lengths
    index[:num_chunks, 1] = lengths
    index_bytes = index.tobytes()
    return [*parts, index_bytes + google_crc32c.value(index_bytes).to_bytes(CRC_BYTES, "little")]


class MappedShard:
    """One shard file, mapped read-only.

    Args:
      path: of the shard file; its size has been checked against the manifest.
      num_rows: rows that it holds.
    Raises: DamageError: the index does not fit its checksum, or names chunks that are not there.
    """

    def __init__(self, path: Path, layout: ArrayLayout, num_rows: int) -> None:
        self._path, self._layout, self._num_rows = path, layout, num_rows
        if not path.stat().st_size:
            raise self._damage("the file is empty")
        self._bytes = np.memmap(path, np.uint8, mode="r")
        index_bytes = layout.shard_rows // layout.chunk_rows * 16
        start = len(self._bytes) - index_bytes - CRC_BYTES
        index = self._bytes[start : start + index_bytes].tobytes() if start >= 0 else b""
        checksum = int.from_bytes(self._bytes[len(self._bytes) - CRC_BYTES :].tobytes(), "little")
        if start < 0 or google_crc32c.value(index) != checksum:
            raise self._damage("the index does not fit its checksum")
        num_chunks = math.ceil(num_rows / layout.chunk_rows)
        self._index = np.frombuffer(index, "<u8").reshape(-1, 2)[:num_chunks]
        if not np.all(self._index.sum(axis=1) <= start):  # an absent chunk wraps around to a huge number as well
            raise self._damage("the index names chunks that are not there")
        # Contiguous and in order: then the file is one array. Checked, because a writer that drops chunks equal to the
        # fill value moves all later ones by a row.
        wanted = np.arange(num_chunks, dtype=np.uint64) * layout.chunk_bytes
        dense = np.array_equal(self._index[:, 0], wanted) and np.all(self._index[:, 1] == layout.chunk_bytes)
        if layout.codec == "none" and not dense:
            raise self._damage("the chunks are not contiguous")

    def _damage(self, what: str) -> DamageError:
        return DamageError(f"shard '{self._path}': {what}. Delete the file and run the same precompute command again.")

    @cached_property
    def rows(self) -> np.ndarray | None:
        """(n, ...) view of the whole shard, or None where it is compressed."""
        if self._layout.codec != "none":
            return None
        payload = self._bytes[: self._num_rows * self._layout.row_bytes]
        dtype = np.dtype(self._layout.dtype).newbyteorder("<")
        return payload.view(np.ndarray).view(dtype).reshape(self._num_rows, *self._layout.shape[1:])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop: a view where uncompressed, else decoded and checked."""
        if self.rows is not None:
            return self.rows[start:stop]
        chunk_rows = self._layout.chunk_rows
        first, last = start // chunk_rows, math.ceil(stop / chunk_rows)
        chunks = [self._decode(i) for i in range(first, last)]
        rows = np.concatenate(chunks) if chunks else np.empty((0, *self._layout.shape[1:]), self._layout.dtype)
        return rows[start - first * chunk_rows : stop - first * chunk_rows]

    def _decode(self, chunk: int) -> np.ndarray:
        offset, length = (int(n) for n in self._index[chunk])
        encoded = self._bytes[offset : offset + length].tobytes()
        payload, checksum = encoded[:-CRC_BYTES], int.from_bytes(encoded[-CRC_BYTES:], "little")
        if google_crc32c.value(payload) != checksum:
            raise self._damage(f"chunk {chunk} does not fit its checksum")
        compression = CODECS[self._layout.codec]
        assert compression is not None
        decoded = np.frombuffer(compression[1].decode(payload), np.dtype(self._layout.dtype).newbyteorder("<"))
        return decoded.reshape(self._layout.chunk_rows, *self._layout.shape[1:])


class ShardedArray:
    """A stored array: a sequence of rows over all its shards, each shard mapped when it is first touched.

    Args:
      root: the store.
      layout: of the array.
    """

    def __init__(self, root: Path, layout: ArrayLayout) -> None:
        self.layout = layout
        self._root = root
        self._shards: dict[int, MappedShard] = {}

    def __len__(self) -> int:
        return self.layout.shape[0]

    def __getitem__(self, row: int) -> np.ndarray:
        """One row, (...): a read-only mapped view where uncompressed."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"array '{self.layout.path}': row {row}, there are {len(self)}")
        row %= len(self)
        return self.read(row, row + 1)[0]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop, (stop - start, ...): a mapped view where they lie in one uncompressed shard."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"array '{self.layout.path}': rows {start} to {stop}, there are {len(self)}")
        size = self.layout.shard_rows
        parts = []
        for shard in range(start // size, math.ceil(stop / size)):
            base = shard * size
            parts.append(self._shard(shard).read(max(start - base, 0), min(stop - base, size)))
        if not parts:
            return np.empty((0, *self.layout.shape[1:]), self.layout.dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def take(self, rows: Sequence[int] | np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
        """Gather rows in the order given.

        Args:
          rows: (B,) integers, 0 <= row < len(self).
          out: (B, ...) of the array's dtype, reused; else a new array.
        Returns: (B, ...).
        Raises: IndexError: a row is out of bounds; ValueError: ``out`` does not fit.
        """
        rows = np.asarray(rows)
        if rows.dtype.kind not in "iu" and rows.size:
            raise TypeError(f"rows are {rows.dtype}, needed integers")
        rows = rows.astype(np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"array '{self.layout.path}': rows {rows.min()} to {rows.max()}, there are {len(self)}")
        shape = (len(rows), *self.layout.shape[1:])
        if out is None:
            out = np.empty(shape, self.layout.dtype)
        elif out.shape != shape or out.dtype != np.dtype(self.layout.dtype):
            raise ValueError(f"out is {out.dtype} {out.shape}, needed {self.layout.dtype} {shape}")
        shards = rows // self.layout.shard_rows
        for shard in np.unique(shards):
            where = np.flatnonzero(shards == shard)
            local = rows[where] - shard * self.layout.shard_rows
            mapped = self._shard(int(shard))
            if mapped.rows is None:
                for position, row in zip(where, local, strict=True):
                    out[position] = mapped.read(row, row + 1)[0]
            elif len(where) == len(rows):
                np.take(mapped.rows, local, axis=0, out=out, mode="clip")  # in bounds already; "raise" would buffer
            else:
                out[where] = mapped.rows[local]
        return out

    def _shard(self, shard: int) -> MappedShard:
        if shard not in self._shards:
            path = self._root / self.layout.shard_path(shard)
            self._shards[shard] = MappedShard(path, self.layout, len(self.layout.rows_of(shard)))
        return self._shards[shard]
