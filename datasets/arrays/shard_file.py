"""One open shard file: its index is checked, its rows are read in place.

An uncompressed shard is one array. Compressed chunks are decoded one by one.
"""

from __future__ import annotations

import math
import os
import weakref
from pathlib import Path

import google_crc32c
import numpy as np

from ...errors import DamageError
from ..disk.cached import cached_property
from ..disk.faults import named_faults
from ..format.zarr_shard import CRC_BYTES, ArrayLayout, unpack_chunk

REPAIR = "Run 'leandit verify STORE --repair --source PATH': it restores this shard."


class ShardFile:
    """A shard file that is open for reading.

    Args:
      path: of the file; the caller has checked its size.
      layout: of its array.
      num_rows: rows in the shard.
      mapped: read by memory map; else by ``pread``: on a network file system a failed ``pread`` raises an error, a
        failed map ends the process.
      remedy: what to do if it is damaged, for the error.
    Raises:
      DamageError: the index does not match its checksum, or points outside the file.
      ResourceError: the disk or this machine failed; the methods that read raise it too.
    """

    def __init__(
        self, path: Path, layout: ArrayLayout, num_rows: int, *, mapped: bool = True, remedy: str = REPAIR
    ) -> None:
        self.path = path
        self._layout = layout
        self._num_rows = num_rows
        self._remedy = remedy
        with named_faults(path):
            self.file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            close = weakref.finalize(self, os.close, self.file)
            self.size = os.fstat(self.file).st_size
        if not self.size:
            raise self._damage("the file is empty")
        self._map = None
        if mapped:
            with named_faults(path):
                self._map = np.memmap(path, np.uint8, mode="r")
            self.size = len(self._map)
        self._offsets, self._lengths = self._read_index()
        if mapped:
            close()  # a map needs no descriptor, and descriptors are limited

    @cached_property
    def rows(self) -> np.ndarray | None:
        """(n, ...) view of the whole shard; None if it is compressed or not mapped."""
        if self._map is None or self._layout.codec != "none":
            return None
        payload = self._map[: self._num_rows * self._layout.row_bytes].view(np.ndarray)
        return payload.view(self._layout.disk_dtype).reshape(self._num_rows, *self._layout.shape[1:])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop, (stop - start, ...): a view if uncompressed and mapped, else a copy."""
        if self.rows is not None:
            return self.rows[start:stop]
        out = np.empty((stop - start, *self._layout.shape[1:]), self._layout.dtype)
        self.read_into(np.arange(start, stop), out, np.arange(stop - start))
        return out

    def read_into(self, rows: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        """Gather rows: ``out[where] = rows``.

        Args:
          rows: (B,) int64, all of this shard.
          out: (N, ...) of the layout's dtype, contiguous.
          where: (B,) int64, their places in ``out``.
        """
        if self.rows is not None:
            out[where] = self.rows[rows]
        elif self._layout.codec == "none":
            self._read_runs(rows, out, where)
        else:  # consecutive rows of one chunk read it once
            chunks, within = np.divmod(rows, self._layout.chunk_rows)
            last, values = -1, np.empty(0)
            for place, chunk, row in zip(where.tolist(), chunks.tolist(), within.tolist(), strict=True):
                if chunk != last:
                    last, values = chunk, self._chunk(chunk)
                out[place] = values[row]

    def place(self, row: int) -> tuple[int, int]:
        """First byte in the file and bytes of a row of this shard; if compressed, those of its chunk."""
        chunk, within = divmod(row, self._layout.chunk_rows)
        offset, length = int(self._offsets[chunk]), int(self._lengths[chunk])
        if self._layout.codec != "none":
            return offset, length
        return offset + within * self._layout.row_bytes, self._layout.row_bytes

    def _damage(self, what: str) -> DamageError:
        return DamageError(f"shard '{self.path}': {what}. {self._remedy}")

    def _read_index(self) -> tuple[np.ndarray, np.ndarray]:
        """(chunks,) uint64 offsets and lengths of the chunks that hold rows."""
        layout = self._layout
        index_bytes = layout.shard_rows // layout.chunk_rows * 16
        start = self.size - index_bytes - CRC_BYTES
        tail = self._bytes(start, index_bytes + CRC_BYTES) if start >= 0 else b""
        index, checksum = tail[:index_bytes], int.from_bytes(tail[index_bytes:], "little")
        if start < 0 or google_crc32c.value(index) != checksum:
            raise self._damage("the index does not match its checksum")
        num_chunks = math.ceil(self._num_rows / layout.chunk_rows)
        entries = np.frombuffer(index, "<u8").reshape(-1, 2)[:num_chunks]
        offsets, lengths = entries[:, 0].copy(), entries[:, 1].copy()
        # Not by their sum, which could overflow.
        is_outside = (offsets > start) | (lengths > start - offsets)
        if len(entries) != num_chunks or np.any(is_outside):
            raise self._damage("the index names missing chunks")
        if layout.codec == "none":
            consecutive = np.arange(num_chunks, dtype=np.uint64) * np.uint64(layout.chunk_bytes)
            if not np.array_equal(offsets, consecutive) or np.any(lengths != layout.chunk_bytes):
                raise self._damage("its rows do not follow one another")
        return offsets, lengths

    def _bytes(self, offset: int, length: int) -> bytes:
        if self._map is not None:
            return self._map[offset : offset + length].tobytes()
        with named_faults(self.path):
            content = os.pread(self.file, length, offset)
        if len(content) != length:
            raise self._damage(f"it ends at byte {offset + len(content)}, expected {offset + length}")
        return content

    def _read_runs(self, rows: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        """Read each run of consecutive rows with one call, directly into ``out``."""
        row_bytes = self._layout.row_bytes
        edges = np.flatnonzero((np.diff(rows) != 1) | (np.diff(where) != 1)) + 1
        for first, last in zip([0, *edges], [*edges, len(rows)], strict=True):
            place = int(where[first])
            target = out[place : place + int(last - first)].reshape(-1).view(np.uint8).data
            offset, done = int(rows[first]) * row_bytes, 0
            while done < len(target):  # short reads are allowed
                with named_faults(self.path):
                    count = os.preadv(self.file, [target[done:]], offset + done)
                if not count:
                    raise self._damage(f"it ends at byte {offset + done}, expected {offset + len(target)}")
                done += count

    def _chunk(self, chunk: int) -> np.ndarray:
        """(chunk_rows, ...) of one compressed chunk, decoded and checked."""
        layout, shape = self._layout, (self._layout.chunk_rows, *self._layout.shape[1:])
        offset, length = int(self._offsets[chunk]), int(self._lengths[chunk])
        stored = self._bytes(offset, length)
        payload, checksum = stored[:-CRC_BYTES], int.from_bytes(stored[-CRC_BYTES:], "little")
        if google_crc32c.value(payload) != checksum:
            raise self._damage(f"chunk {chunk} does not match its checksum")
        decoded = np.empty(shape, layout.disk_dtype)
        try:
            unpack_chunk(payload, decoded)
        except ValueError as error:
            raise self._damage(f"chunk {chunk} cannot be decoded ({error})") from error
        return decoded
