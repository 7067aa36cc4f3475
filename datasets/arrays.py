"""Reading the rows of a stored array: its shard files, mapped when they are first touched."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import google_crc32c
import numpy as np

from .errors import DamageError
from .shards import CODECS, CRC_BYTES, ArrayLayout


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
        offsets, lengths = self._index[:, 0], self._index[:, 1]
        # Not by their sum, which wraps around: absent chunks are the largest number there is.
        if len(self._index) != num_chunks or np.any(offsets > start) or np.any(lengths > start - offsets):
            raise self._damage("the index names chunks that are not there")
        # Contiguous and in order: then the file is one array. Checked, because a writer that drops chunks equal to the
        # fill value moves all later ones by a row.
        wanted = np.arange(num_chunks, dtype=np.uint64) * layout.chunk_bytes
        dense = np.array_equal(offsets, wanted) and np.all(lengths == layout.chunk_bytes)
        if layout.codec == "none" and not dense:
            raise self._damage("the chunks are not contiguous")

    def _damage(self, what: str) -> DamageError:
        return DamageError(
            f"shard '{self._path}': {what}. Run 'leandit verify --repair --source PATH': it makes this shard anew."
        )

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
        first, last = start // chunk_rows, -(-stop // chunk_rows)
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
        # Blosc believes the size in its header, and would read beyond the buffer.
        if self._layout.codec.startswith("blosc") and payload[12:16] != len(payload).to_bytes(4, "little"):
            raise self._damage(f"chunk {chunk} has not the size that its Blosc header says")
        decoded = np.zeros((self._layout.chunk_rows, *self._layout.shape[1:]), self._layout.dtype)
        try:
            compression[1].decode(payload, out=decoded)  # into a buffer of the right size: what claims more is refused
        except (RuntimeError, ValueError, OSError, EOFError, zlib.error) as error:
            raise self._damage(f"chunk {chunk} cannot be decoded ({error})") from error
        return decoded


class ShardedArray:
    """A stored array: a sequence of rows over all its shards, each shard mapped when it is first touched.

    Args:
      root: the store.
      layouts: of the Zarr arrays that follow each other: one for each revision that added rows.
      sizes: bytes of each shard file by its path, as the manifest says; checked again when a shard is mapped.
      check: called with each shard when it is mapped, to refuse one that is not what it should be (``probe.py``).
    """

    def __init__(
        self,
        root: Path,
        layouts: Sequence[ArrayLayout],
        sizes: Mapping[str, int] | None = None,
        check: Callable[[ArrayLayout, int, int, MappedShard], None] | None = None,
    ) -> None:
        self._root, self._sizes, self._check = root, sizes, check
        self._places = [(layout, shard) for layout in layouts for shard in range(layout.num_shards)]
        counts = [len(layout.rows_of(shard)) for layout, shard in self._places]
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)  # of each shard, then the end
        self._shards: dict[int, MappedShard] = {}
        self.path, self.dtype = layouts[-1].path, layouts[-1].dtype
        self.row_shape, self.row_bytes = layouts[-1].shape[1:], layouts[-1].row_bytes

    def __len__(self) -> int:
        return int(self._starts[-1])

    def locate(self, row: int) -> tuple[ArrayLayout, int]:
        """The Zarr array that holds a row, and the number of its shard."""
        return self._places[self._shard_of(row)]

    def __getitem__(self, row: int) -> np.ndarray:
        """One row, (...): a read-only mapped view where uncompressed."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"array '{self.path}': row {row}, there are {len(self)}")
        row %= len(self)
        return self.read(row, row + 1)[0]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop, (stop - start, ...): a mapped view where they lie in one uncompressed shard."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"array '{self.path}': rows {start} to {stop}, there are {len(self)}")
        parts = []
        while start < stop:
            shard = self._shard_of(start)
            base, end = int(self._starts[shard]), int(self._starts[shard + 1])
            parts.append(self._shard(shard).read(start - base, min(stop, end) - base))
            start = end
        if not parts:
            return np.empty((0, *self.row_shape), self.dtype)
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
            raise IndexError(f"array '{self.path}': rows {rows.min()} to {rows.max()}, there are {len(self)}")
        shape = (len(rows), *self.row_shape)
        if out is None:
            out = np.empty(shape, self.dtype)
        elif out.shape != shape or out.dtype != np.dtype(self.dtype):
            raise ValueError(f"out is {out.dtype} {out.shape}, needed {self.dtype} {shape}")
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        for shard in np.unique(shards):
            where = np.flatnonzero(shards == shard)
            local = rows[where] - self._starts[shard]
            mapped = self._shard(int(shard))
            if mapped.rows is None:
                for position, row in zip(where, local, strict=True):
                    out[position] = mapped.read(row, row + 1)[0]
            elif len(where) == len(rows):
                np.take(mapped.rows, local, axis=0, out=out, mode="clip")  # in bounds already; "raise" would buffer
            else:
                out[where] = mapped.rows[local]
        return out

    def _shard_of(self, row: int) -> int:
        return int(np.searchsorted(self._starts, row, side="right")) - 1

    def _shard(self, shard: int) -> MappedShard:
        if shard not in self._shards:
            layout, number = self._places[shard]
            name = layout.shard_path(number)
            path = self._root / name
            size = path.stat().st_size if path.is_file() else None
            if size is None or (self._sizes is not None and size != self._sizes.get(name)):
                was = "is missing" if size is None else f"has {size} bytes, not those of the manifest"
                raise DamageError(
                    f"shard '{path}': {was}. Run 'leandit verify --repair --source PATH': it makes this shard anew."
                )
            mapped = MappedShard(path, layout, len(layout.rows_of(number)))
            if self._check:
                self._check(layout, number, int(self._starts[shard]), mapped)
            self._shards[shard] = mapped
        return self._shards[shard]
