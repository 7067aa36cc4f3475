"""Reading the rows of a stored array over all its shards: views in place, and whole batches by one gather.

Uncompressed shards are mapped on first use into one range of addresses (``address_window.py``), where all rows form
one numpy array. Other shards are read one by one: compressed or sparse ones, those beyond the limit on maps, and all of
them with ``access="pread"``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..disk.fork_safe import reset_in_forks
from ..errors import RowOutOfRange
from ..format.zarr_shard import ArrayLayout
from .address_window import AddressWindow
from .shard_file import ShardFile
from .shard_folder import ShardCheck, ShardFolder

JOB_BYTES = 1 << 18  # of rows that one thread reads or decodes at a time


class ShardedArray:
    """A stored array: a sequence of rows over all its shards, each opened on first use. Thread-safe.

    Index it like a numpy array: ``array[7]``, ``array[10:20]``, ``array[[3, 1]]``, ``array[mask]``, ``array[7, :4]``.

    An array that has grown may have gaps: rows between the last one of a revision and the first of the next.

    Args:
      folder: of the shards.
      layout: of the array.
      check: called with each shard when it is opened, to refuse wrong ones (``probe.py``).
    """

    def __init__(self, folder: ShardFolder, layout: ArrayLayout, check: ShardCheck | None = None) -> None:
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
        self.reset()
        reset_in_forks(self)

    def reset(self) -> None:
        """Close everything."""
        self._window: AddressWindow | None = None
        self._grid = np.empty(0)  # all rows of the window, including gaps
        self._is_grid = False  # no gaps, all shards mapped: rows need no shift
        self._in_window = np.zeros(len(self._starts), bool)
        self._opened = np.zeros(len(self._starts), bool)
        self._shift = np.zeros(len(self._starts), np.int64)  # from row to grid position, by shard

    def __len__(self) -> int:
        return self._layout.shape[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        # Without this, Python would take the IndexError of a gap for the end of the array, and so would numpy.
        return (self[row] for row in range(len(self)))

    def place(self, row: int) -> tuple[str, int, int]:
        """Path within the store of the shard of a row, and first byte and bytes there, as ``ShardFile.place``."""
        shard = row // self.shard_rows
        opened = self._folder.open(self._layout, shard, mapped=False)
        return self._layout.shard_path(shard), *opened.place(row - shard * self.shard_rows)

    def shard_paths(self, rows: np.ndarray) -> list[str]:
        """Paths within the store of the shards that hold these rows."""
        return [self._layout.shard_path(shard) for shard in np.unique(rows // self.shard_rows).tolist()]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, then the shape of each: (N, 2C, H, W) of moments."""
        return len(self), *self.row_shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return 1 + len(self.row_shape)

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
                raise TypeError(f"array '{self.path}': needed integers and slices behind the rows, got {which}")
            found = self[rows]
            return found[tuple(inner) if isinstance(rows, (int, np.integer)) else (slice(None), *inner)]
        if isinstance(which, slice):
            rows = range(*which.indices(len(self)))
            return (
                self.read(rows.start, max(rows.start, rows.stop)) if rows.step == 1 else self.take(np.array(rows, int))
            )
        if isinstance(which, (int, np.integer)) and not isinstance(which, bool):
            if not -len(self) <= which < len(self):
                raise RowOutOfRange(f"array '{self.path}': row {which}, there are {len(self)}")
            row = int(which) % len(self)
            return self.read(row, row + 1)[0]
        rows = np.asarray(which)
        if rows.dtype == bool:
            if rows.shape != (len(self),):
                raise RowOutOfRange(f"array '{self.path}': a mask of {rows.shape}, needed ({len(self)},)")
            rows = np.flatnonzero(rows)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise TypeError(f"array '{self.path}': rows are {rows.dtype} {rows.shape}, needed integers (B,)")
        return self.take(self._from_end(rows))

    def _from_end(self, rows: np.ndarray) -> np.ndarray:
        """Rows counted from 0, of which negative ones were counted from the end."""
        rows = rows.astype(np.int64)
        if len(rows) and not -len(self) <= rows.min() <= rows.max() < len(self):
            raise RowOutOfRange(f"array '{self.path}': rows {rows.min()} to {rows.max()}, there are {len(self)}")
        return np.where(rows < 0, rows + len(self), rows)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop, (stop - start, ...): a mapped view where they lie in one uncompressed shard."""
        if not 0 <= start <= stop <= len(self):
            raise RowOutOfRange(f"array '{self.path}': rows {start} to {stop}, there are {len(self)}")
        parts = []
        while start < stop:
            shard = int(self._shards_of(np.array([start]))[0])
            base, end = int(self._starts[shard]), min(stop, int(self._ends[shard]))
            if not self._opened[shard]:
                self._prepare(np.array([shard]))
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
            raise TypeError(f"rows are {rows.dtype}, needed integers")
        rows = rows.astype(np.int64, copy=False)
        # Before any arithmetic of addresses: a row in a gap between shards would be read without an error.
        if len(rows) and rows.view(np.uint64).max() >= len(self):  # what is negative is very large, too
            raise RowOutOfRange(f"array '{self.path}': rows {rows.min()} to {rows.max()}, there are {len(self)}")
        shape = (len(rows), *self.row_shape)
        if out is None:
            out = np.empty(shape, self.dtype)
        elif out.shape != shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}, needed contiguous {self.dtype} {shape}")
        if not len(rows):
            return out
        shards = None
        if not self._is_grid:
            shards = self._shards_of(rows)
            self._prepare(shards)
        # Bounds were checked; the other modes of numpy would buffer the output, or check again.
        if shards is None:
            self._grid.take(rows, axis=0, out=out, mode="clip")
        elif self._in_window[shards].all():
            self._grid.take(rows + self._shift[shards], axis=0, out=out, mode="clip")
        else:
            self._take_apart(shards, rows, out)
        return out

    def take_ranges(self, starts: np.ndarray, lengths: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
        """Gather ranges of rows, one after the other, as the tokens of captions.

        Args:
          starts, lengths: (B,) integers.
          out: (lengths.sum(), ...), as of ``take``.
        Returns: (lengths.sum(), ...).
        """
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        fits = out is not None and self._may_copy(starts, lengths, total, out)
        mapped = self._mapped_at(starts, lengths) if fits else None
        if out is None or mapped is None:
            rows = np.repeat(starts - (ends - lengths), lengths) + np.arange(total)
            return self.take(rows, out=out)
        # A copy of a long range is faster than a gather of its rows.
        for start, length, end in zip(mapped.tolist(), lengths.tolist(), ends.tolist(), strict=True):
            out[end - length : end] = self._grid[start : start + length]
        return out

    def _mapped_at(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """(B,) where ranges begin in the window; None if one is not mapped in one piece."""
        if self._is_grid:
            return starts
        if lengths.min() < 1:  # an empty range may begin behind the last shard
            return None
        shards = self._shards_of(starts)
        self._prepare(shards)
        within = starts + lengths <= self._ends[shards]
        return starts + self._shift[shards] if np.all(within & self._in_window[shards]) else None

    def _may_copy(self, starts: np.ndarray, lengths: np.ndarray, total: int, out: np.ndarray) -> bool:
        """Whether ranges lie within the array, and ``out`` fits; else ``take`` raises."""
        is_within = len(starts) and starts.min() >= 0 and lengths.min() >= 0 and (starts + lengths).max() <= len(self)
        is_fit = out.shape == (total, *self.row_shape) and out.dtype == self.dtype and out.flags.c_contiguous
        return bool(is_within and is_fit)

    def _shards_of(self, rows: np.ndarray) -> np.ndarray:
        """(B,) positions of the shards that hold rows, among those that exist.

        Raises: RowOutOfRange: a row lies in a gap.
        """
        if not self._has_gaps:
            return rows // self.shard_rows
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        missing = (shards < 0) | (rows >= self._ends[shards])
        if missing.any():
            raise RowOutOfRange(f"array '{self.path}': row {rows[missing][0]} lies in a gap, no record has it")
        return shards

    def _prepare(self, shards: np.ndarray) -> None:
        """Open shards, (B,) positions, that were not yet."""
        if self._opened[shards].all():
            return
        with self._folder.lock:
            if self._may_map and self._window is None:
                self._open_window()
            wanted = np.zeros(len(self._opened), bool)
            wanted[shards] = True
            for shard in np.flatnonzero(wanted & ~self._opened).tolist():
                if self._window is not None:
                    self._map(shard)
                self._opened[shard] = True
            self._is_grid = bool(not self._has_gaps and self._in_window.all() and not self._shift.any())

    def _open_window(self) -> None:
        try:
            window = AddressWindow(len(self._starts), self.row_bytes, self.shard_rows * self.row_bytes)
        except OSError:
            self._may_map = False  # each is mapped alone; the least recently used ones are closed
            return
        self._shift = np.arange(len(self._starts), dtype=np.int64) * window.slot_rows - self._starts
        self._grid = window.bytes.view(self._layout.disk_dtype).reshape(-1, *self.row_shape)
        self._window = window

    def _map(self, shard: int) -> None:
        """Map a shard into the window, if it is dense."""
        assert self._window is not None
        opened = self._folder.open(self._layout, self._number(shard), mapped=False)
        if opened.is_dense:
            self._check_shard(shard, opened)
            with contextlib.suppress(OSError):  # too many maps: then it is read by itself
                self._window.map_file(shard, opened.file, min(opened.size, self._window.slot_bytes))
                self._in_window[shard] = True

    def _kept(self, shard: int) -> ShardFile:
        """A shard that is not in the window."""
        number = self._number(shard)
        return self._folder.keep_open(self._layout, number, lambda opened: self._check_shard(shard, opened))

    def _number(self, shard: int) -> int:
        return int(self._starts[shard]) // self.shard_rows

    def _check_shard(self, shard: int, opened: ShardFile) -> None:
        if self._check:
            self._check(self._layout, self._number(shard), opened)

    def _take_apart(self, shards: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        """Gather shard by shard, in threads; rows in their order on disk, so that none is read or decoded twice."""
        order = np.argsort(rows, kind="stable")
        jobs = []
        edges = np.flatnonzero(np.diff(shards[order])) + 1
        groups = np.split(order, edges)
        self._folder.mark_used(self.shard_paths(rows[order]))
        rows_per_job = max(1, JOB_BYTES // self.row_bytes)
        for group in groups:
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
