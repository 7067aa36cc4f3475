"""Rows of an array over all its shards, in any order: mapped, gathered, or decoded.

Uncompressed shards are mapped side by side into one range of addresses, so a batch is one gather over all of them.
What cannot be mapped so (compressed shards, ``pread``, remote stores, too many files) is read shard by shard
in threads, with the same results.

Reading a lost file of a mapped store ends the process with SIGBUS. Damage that is found on opening is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...errors import RowOutOfRange
from ..format.zarr_shard import ArrayLayout
from .address_window import AddressWindow
from .shard_file import ShardFile
from .shard_folder import ShardFolder

JOB_BYTES = 1 << 18  # of rows that one thread reads or decodes at a time


class ShardedArray:
    """A stored array: a sequence of rows over all its shards, each opened on first use. Thread-safe.

    Index it like a numpy array: ``array[7]``, ``array[10:20]``, ``array[[3, 1]]``, ``array[mask]``, ``array[7, :4]``.

    An array that has grown may have gaps: rows between the last one of a revision and the first of the next.

    Args:
      folder: of the shards.
      layout: of the array.
      check: called with the number of a shard and the open shard when it is first read, to refuse a wrong one.
    """

    def __init__(
        self, folder: ShardFolder, layout: ArrayLayout, check: Callable[[int, ShardFile], None] = lambda *_: None
    ) -> None:
        self._folder, self._check, self._layout = folder, check, layout
        self._starts = layout.shards * layout.shard_rows  # first row of each shard that exists
        self._ends = np.minimum(self._starts + layout.shard_rows, layout.shape[0])
        for _, _, end in layout.row_ranges:  # a range begins at a shard, and ends anywhere in one
            self._ends[np.searchsorted(self._starts, end) - 1] = end
        self._has_gaps = len(layout.row_ranges) > 1
        self.path, self.dtype = layout.path, np.dtype(layout.dtype)
        self.row_shape, self.row_bytes, self.shard_rows = layout.shape[1:], layout.row_bytes, layout.shard_rows
        # Not if shards are evicted: a slot of the window cannot be freed while views of it exist.
        self._may_map = folder.access == "map" and folder.remote is None and layout.codec == "none"
        self._window: AddressWindow | None = None
        self._grid = np.empty(0)  # all rows of the window, including gaps
        self._is_grid = False  # no gaps, all shards mapped: rows need no shift
        self._in_window = np.zeros(len(self._starts), bool)
        self._opened = np.zeros(len(self._starts), bool)
        self._shift = np.zeros(len(self._starts), np.int64)  # from row to grid position, by shard

    def __len__(self) -> int:
        return self._layout.shape[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        # Without this, Python and numpy would take the IndexError of a gap for the end of the array.
        return (self[row] for row in range(len(self)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, then the shape of each: (N, 2C, H, W) of moments."""
        return len(self), *self.row_shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return 1 + len(self.row_shape)

    def place(self, row: int) -> tuple[str, int, int]:
        """Path within the store of the shard of a row, and first byte and bytes there, as ``ShardFile.place``."""
        shard = row // self.shard_rows
        opened = self._folder.open(self._layout, shard, mapped=False)
        return self._layout.shard_path(shard), *opened.place(row - shard * self.shard_rows)

    def shard_paths(self, rows: np.ndarray) -> list[str]:
        """Paths within the store of the shards that hold these rows."""
        return [self._layout.shard_path(shard) for shard in np.unique(rows // self.shard_rows).tolist()]

    def __getitem__(self, which: int | slice | Sequence[int] | np.ndarray | tuple[Any, ...]) -> np.ndarray:
        """Rows as numpy gives them, negative numbers from the end.

        Args:
          which: a row, a slice, rows in any order, or a mask of all rows; in a tuple also integers and slices of the
            dimensions of a row.
        Returns: of a row, and of a slice within a shard, a read-only mapped view where uncompressed; else a copy.
        Raises: RowOutOfRange; TypeError: something else was given; DamageError: as ``take``.
        """
        if isinstance(which, tuple):
            rows, *inner = which or (slice(None),)
            if not all(isinstance(part, (int, np.integer, slice)) for part in inner):
                raise TypeError(f"array '{self.path}': expected integers and slices after the row index, got {which}")
            taken = self[rows]
            return taken[tuple(inner) if isinstance(rows, (int, np.integer)) else (slice(None), *inner)]
        if isinstance(which, slice):
            rows = range(*which.indices(len(self)))
            is_run = rows.step == 1
            return self.read(rows.start, max(rows.start, rows.stop)) if is_run else self.take(np.array(rows, int))
        if isinstance(which, (int, np.integer)) and not isinstance(which, bool):
            row = int(self._from_end(np.array([which]))[0])
            return self.read(row, row + 1)[0]
        rows = np.asarray(which)
        if rows.dtype == bool:
            if rows.shape != (len(self),):
                raise RowOutOfRange(f"array '{self.path}': a mask of {rows.shape}, expected ({len(self)},)")
            rows = np.flatnonzero(rows)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise TypeError(f"array '{self.path}': rows are {rows.dtype} {rows.shape}, expected integers (B,)")
        return self.take(self._from_end(rows))

    def _from_end(self, rows: np.ndarray) -> np.ndarray:
        """Rows counted from 0, of which negative ones were counted from the end."""
        rows = rows.astype(np.int64)
        if len(rows) and not -len(self) <= rows.min() <= rows.max() < len(self):
            raise self._out_of_range(int(rows.min()), int(rows.max()))
        return np.where(rows < 0, rows + len(self), rows)

    def _out_of_range(self, first: int, last: int) -> RowOutOfRange:
        rows = f"row {first}" if first == last else f"rows {first} to {last}"
        return RowOutOfRange(f"array '{self.path}': {rows} out of range: it has {len(self)}")

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop, (stop - start, ...): a mapped view where they lie in one uncompressed shard."""
        if not 0 <= start <= stop <= len(self):
            raise self._out_of_range(start, stop)
        parts = []
        while start < stop:
            shard = int(self._prepare(np.array([start]))[0])
            base, end = int(self._starts[shard]), min(stop, int(self._ends[shard]))
            if self._in_window[shard]:
                parts.append(self._grid[start + self._shift[shard] : end + self._shift[shard]])
            else:
                parts.append(self._kept(shard).read(start - base, end - base))
            start = end
        if not parts:
            return np.empty((0, *self.row_shape), self.dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def take(self, rows: Sequence[int] | np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
        """Gather rows in the order given.

        Args:
          rows: (B,) integers, 0 <= row < len(self).
          out: (B, ...) of the array's dtype, contiguous, reused; else a new array.
        Returns: (B, ...).
        Raises: RowOutOfRange; ValueError: ``out`` does not fit; DamageError: a shard is not what was written.
        """
        rows = np.asarray(rows)
        if rows.dtype.kind not in "iu" and rows.size:
            raise TypeError(f"rows are {rows.dtype}, expected integers")
        rows = rows.astype(np.int64, copy=False)
        # Before any arithmetic of addresses: a row in a gap between shards would be read without an error.
        if len(rows) and rows.view(np.uint64).max() >= len(self):  # negatives wrap past len(self)
            raise self._out_of_range(int(rows.min()), int(rows.max()))
        out = self._buffer(len(rows), out)
        if not len(rows):
            return out
        # Bounds were checked; the other modes of numpy would buffer the output, or check again.
        if self._is_grid:
            self._grid.take(rows, axis=0, out=out, mode="clip")
            return out
        shards = self._prepare(rows)
        if self._in_window[shards].all():
            self._grid.take(rows + self._shift[shards], axis=0, out=out, mode="clip")
        else:
            self._take_apart(shards, rows, out)
        return out

    def take_ranges(self, starts: np.ndarray, lengths: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
        """Gather ranges of rows, one after the other, as the tokens of captions.

        Args:
          starts, lengths: (B,) integers.
          out: (lengths.sum(), ...), as in ``take``.
        Returns: (lengths.sum(), ...).
        """
        starts, lengths = (np.asarray(one, np.int64) for one in (starts, lengths))
        ends = np.cumsum(lengths)
        out = self._buffer(int(ends[-1]) if len(ends) else 0, out)
        mapped = self._mapped_at(starts, lengths)
        if mapped is None:
            return self.take(np.repeat(starts - (ends - lengths), lengths) + np.arange(len(out)), out=out)
        # A copy of a long range is faster than a gather of its rows.
        for start, length, end in zip(mapped.tolist(), lengths.tolist(), ends.tolist(), strict=True):
            out[end - length : end] = self._grid[start : start + length]
        return out

    def _mapped_at(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """(B,) where ranges begin in the window; None if one is not mapped in one piece, or does not exist."""
        if not len(starts) or lengths.min() < 1 or starts.min() < 0 or (starts + lengths).max() > len(self):
            return None
        if self._is_grid:
            return starts
        shards = self._prepare(starts)
        within = starts + lengths <= self._ends[shards]
        return starts + self._shift[shards] if np.all(within & self._in_window[shards]) else None

    def _buffer(self, num_rows: int, out: np.ndarray | None) -> np.ndarray:
        """Memory for rows: ``out`` if it is given. Raises: ValueError: it does not fit."""
        shape = (num_rows, *self.row_shape)
        if out is None:
            return np.empty(shape, self.dtype)
        if out.shape != shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}, expected contiguous {self.dtype} {shape}")
        return out

    def _prepare(self, rows: np.ndarray) -> np.ndarray:
        """Open the shards that hold rows, and return their positions among those that exist, (B,).

        Raises: RowOutOfRange: a row lies in a gap.
        """
        if self._has_gaps:
            shards = np.searchsorted(self._starts, rows, side="right") - 1
            missing = (shards < 0) | (rows >= self._ends[shards])
            if missing.any():
                raise RowOutOfRange(f"array '{self.path}': row {rows[missing][0]} lies in a gap: no record uses it")
        else:
            shards = rows // self.shard_rows
        if self._opened[shards].all():
            return shards
        with self._folder.lock:
            if self._may_map and self._window is None:
                self._open_window()
            for shard in np.unique(shards[~self._opened[shards]]).tolist():
                if self._window is not None:
                    self._map(shard, self._window)
                self._opened[shard] = True
            self._is_grid = bool(not self._has_gaps and self._in_window.all() and not self._shift.any())
        return shards

    def _open_window(self) -> None:
        try:
            window = AddressWindow(len(self._starts), self.row_bytes, self.shard_rows * self.row_bytes)
        except OSError:
            self._may_map = False  # each is mapped alone; the least recently used ones are closed
            return
        self._shift = np.arange(len(self._starts), dtype=np.int64) * window.slot_rows - self._starts
        self._grid = window.bytes.view(self._layout.disk_dtype).reshape(-1, *self.row_shape)
        self._window = window

    def _map(self, shard: int, window: AddressWindow) -> None:
        """Map a shard into the window."""
        opened = self._folder.open(self._layout, self._number(shard), mapped=False)
        self._check(self._number(shard), opened)
        with contextlib.suppress(OSError):  # too many maps: then it is read by itself
            window.map_file(shard, opened.file, min(opened.size, window.slot_bytes))
            self._in_window[shard] = True

    def _kept(self, shard: int) -> ShardFile:
        """A shard that is not in the window."""
        number = self._number(shard)
        return self._folder.keep_open(self._layout, number, lambda opened: self._check(number, opened))

    def _number(self, shard: int) -> int:
        return int(self._starts[shard]) // self.shard_rows

    def _take_apart(self, shards: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        """Gather shard by shard, in threads; rows in their order on disk, so that none is read or decoded twice."""
        order = np.argsort(rows, kind="stable")
        self._folder.mark_used(self.shard_paths(rows))
        rows_per_job, jobs = max(1, JOB_BYTES // self.row_bytes), []
        for group in np.split(order, np.flatnonzero(np.diff(shards[order])) + 1):
            shard = int(shards[group[0]])
            for first in range(0, len(group), rows_per_job):
                where = group[first : first + rows_per_job]
                jobs.append(lambda shard=shard, where=where: self._take_some(shard, rows[where], out, where))
        self._folder.run(jobs)

    def _take_some(self, shard: int, rows: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        if self._in_window[shard]:
            out[where] = self._grid[rows + self._shift[shard]]
        else:
            self._kept(shard).read_into(rows - self._starts[shard], out, where)
