"""Checks rows of batches against the checksums in the tables, in a thread, while the batches are used.

Opening a store compares sizes and one row a shard; only its checksum shows a changed byte within a row. The thread
reads the rows again, so that the reader does not wait for the hash. It rests most of the time, so that neither the
reader nor a training loop waits for Python's lock: WORK_SHARE of a core checks about 15,000 rows of 8 KiB a second. A
caller that waits for the checks, before a checkpoint for example, lets it work all the time.

A store at a URL needs no such checks: every shard is hashed when it is fetched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np

from ..arrays.shard_file import REPAIR
from ..arrays.sharded_array import ShardedArray
from ..disk.fork_safe import reset_in_forks
from ..disk.hashing import xxh3_64
from ..errors import DamageError
from ..format.row_layout import LATENTS, bucket_part, row_arrays
from ..store import LatentStore
from .buffer_pool import BufferPool
from .lookup import Records

RowCheck = Literal["first", "always", "never"]
"""When rows are checked: the first time that this process reads them, each time, or never."""

CHUNK_BYTES = 1 << 18  # read at a time: it stays in the cache until it is hashed
WORK_SHARE = 1 / 32  # of the time of a core


class RowChecks:
    """Checks the rows of batches in a thread. Thread-safe.

    Args:
      stores: that are read.
      when: rows are checked; "never" makes ``add`` do nothing.
      groups: names of the features and companion pictures that are read beside the latents.
    """

    def __init__(self, stores: Sequence[LatentStore], when: RowCheck, groups: Sequence[str]) -> None:
        self._stores, self._when, self._groups = stores, when, groups
        self._is_checked = [when != "never" and store.remote is None for store in stores]
        self.reset()
        reset_in_forks(self)

    def reset(self) -> None:
        """Start without a thread, and with no row checked."""
        self._checker: _Checker | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowChecks, (self._stores, self._when, self._groups)

    def add(self, number: int, bucket: str, read: Records) -> None:
        """Check rows that were read; returns at once.

        Args:
          number: of the store.
        Raises: DamageError: rows that were added before are damaged.
        """
        if not self._is_checked[number]:
            return
        with self._lock:
            if self._checker is None:
                self._checker = _Checker(self._stores, self._groups, once=self._when == "first")
                threading.Thread(target=self._checker.run, name="leandit-check", daemon=True).start()
            checker = self._checker  # another thread may close it
        checker.raise_found()
        if not checker.has_seen_all[number]:
            checker.queue.put((number, bucket, read))

    def finish(self) -> None:
        """Wait until everything that was added is checked.

        Raises: DamageError: names the first damaged record or caption, its shard and the remedy.
        """
        if self._checker is not None:
            self._checker.finish()
            self._checker.raise_found()

    def close(self) -> None:
        """End the thread; what is not yet checked is not."""
        with self._lock:
            if self._checker is not None:
                self._checker.end()
                self._checker = None

    def __del__(self) -> None:
        if "_lock" in vars(self):
            self.close()


class _Checker:
    """The work of the thread. It holds no reference to ``RowChecks``, whose end ends it.

    Args:
      stores, groups: as of ``RowChecks``.
      once: check each record and each caption once.
    """

    def __init__(self, stores: Sequence[LatentStore], groups: Sequence[str], *, once: bool) -> None:
        self.queue: SimpleQueue[tuple[int, str, Records] | threading.Event | None] = SimpleQueue()
        self._ends = False
        self._stores, self._groups = stores, (LATENTS, *groups)
        self._seen: dict[int, _SeenOfStore] | None = {} if once else None
        self.has_seen_all = [False] * len(stores)  # then ``add`` need not be called
        self._buffers, self._is_awaited = BufferPool(), threading.Event()
        self._found: BaseException | None = None

    def finish(self) -> None:
        """Wait until the queue is empty."""
        reached = threading.Event()
        self.queue.put(reached)
        self._is_awaited.set()
        reached.wait()

    def end(self) -> None:
        """Leave what is in the queue, and end the thread."""
        self._ends = True
        self.queue.put(None)
        self._is_awaited.set()

    def raise_found(self) -> None:
        """Raises: DamageError: a row is damaged."""
        if self._found is not None:
            raise self._found

    def run(self) -> None:
        """Check what is in the queue, until it holds None."""
        while (item := self.queue.get()) is not None and not self._ends:
            if isinstance(item, threading.Event):
                self._is_awaited.clear()
                item.set()
            elif self._found is None:
                try:
                    self._check(*item)
                except Exception as error:  # noqa: BLE001 - the reader raises it
                    self._found = error

    def _check(self, number: int, bucket: str, read: Records) -> None:
        store, rows, records = self._stores[number], read.rows, read.records
        captions = np.empty(0, np.int64) if read.caption_ids is None else read.caption_ids
        if self._seen is not None:
            began = time.thread_time()
            seen = self._seen.get(number) or self._seen.setdefault(number, _SeenOfStore(store))
            new = seen.records.new(records)
            rows, records = rows[new], records[new]
            captions = captions[seen.captions.new(captions)]
            left = seen.records.remaining + (seen.captions.remaining if read.caption_ids is not None else 0)
            self.has_seen_all[number] = left == 0
            self._rest(began)
        for group in self._groups if len(rows) else ():
            self._check_records(store, bucket, group, rows, records)
        for name in store.texts if len(captions) else ():
            self._check_captions(store, name, captions)

    def _check_records(
        self, store: LatentStore, bucket: str, group: str, rows: np.ndarray, records: np.ndarray
    ) -> None:
        """Compare the rows of a group of arrays, whose rows of a record share a checksum."""
        arrays = [store.array(f"{bucket_part(bucket)}/{path}") for path in row_arrays(store.spec, bucket, group)]
        expected = store.checksums_of(group)[records]
        for part in self._chunks(np.full(len(rows), sum(array.row_bytes for array in arrays))):
            read = [_as_bytes(self._take(array, rows[part])) for array in arrays]
            for i, row in enumerate(zip(*read, strict=True), part.start):
                if xxh3_64(*row) != expected[i]:
                    key = store.record_columns(("key",))["key"][int(records[i])].as_py()
                    what = f"record '{key}' (bucket '{bucket}', row {rows[i]})"
                    raise _damage(
                        store, what, [path for array in arrays for path in array.shard_paths(rows[i : i + 1])]
                    )

    def _check_captions(self, store: LatentStore, name: str, ids: np.ndarray) -> None:
        """Compare the rows of captions of a text encoder."""
        captions, expected = store.text(name), store.caption_checksums(name)[ids]
        tokens = captions.arrays if captions.spec.has_tokens else []
        pooled = [captions.pooled] if captions.spec.pooled_width else []
        starts, lengths = (captions.offsets[ids], captions.lengths[ids]) if tokens else (ids, np.zeros_like(ids))
        sizes = lengths * sum(array.row_bytes for array in tokens) + sum(array.row_bytes for array in pooled)
        for part in self._chunks(sizes):
            read = [_as_bytes(self._take_ranges(array, starts[part], lengths[part])) for array in tokens]
            vectors = [_as_bytes(self._take(array, ids[part])) for array in pooled]
            ends = np.cumsum(lengths[part]).tolist()
            for i, end in enumerate(ends, part.start):
                own = [rows[end - lengths[i] : end] for rows in read] + [rows[i - part.start] for rows in vectors]
                if xxh3_64(*own) != expected[i]:
                    text = store.captions["text"][int(ids[i])].as_py()
                    what = f"caption {ids[i]} ({text[:60]!r}) of text encoder '{name}'"
                    shards = [path for array in tokens for path in array.shard_paths(starts[i : i + 1])]
                    shards += [path for array in pooled for path in array.shard_paths(ids[i : i + 1])]
                    raise _damage(store, what, shards)

    def _chunks(self, sizes: np.ndarray) -> Iterator[slice]:
        """Consecutive items of about CHUNK_BYTES together, at least one; rests after each.

        Args:
          sizes: (B,) bytes of each item.
        """
        numbers = (np.cumsum(sizes) - sizes) // CHUNK_BYTES
        for start, stop in pairwise([0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(sizes)]):
            began = time.thread_time()
            yield slice(start, stop)
            self._rest(began)

    def _rest(self, began: float) -> None:
        """Rest after work that began at ``began``, unless a caller waits."""
        self._is_awaited.wait((time.thread_time() - began) * (1 / WORK_SHARE - 1))

    def _take(self, array: ShardedArray, rows: np.ndarray) -> np.ndarray:
        return array.take(rows, out=self._buffers.take((len(rows), *array.row_shape), array.dtype))

    def _take_ranges(self, array: ShardedArray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        out = self._buffers.take((int(lengths.sum()), *array.row_shape), array.dtype)
        return array.take_ranges(starts, lengths, out=out)


class _SeenOfStore:
    """The records and captions of a store that were checked, or will be soon."""

    def __init__(self, store: LatentStore) -> None:
        self.records = _Seen(len(store), len(store.checksums))
        num_captions = len(store.caption_checksums(store.texts[0])) if store.texts else 0
        self.captions = _Seen(num_captions, num_captions)


class _Seen:
    """A bit for each record or caption.

    Args:
      count: of those that can be read.
      positions: of all.
    """

    def __init__(self, count: int, positions: int) -> None:
        self.remaining, self._bits = count, np.zeros(-(-positions // 8), np.uint8)

    def new(self, positions: np.ndarray) -> np.ndarray:
        """Indexes of the positions, (B,), that were not asked for before, each position once."""
        places, bits = positions >> 3, np.left_shift(1, positions & 7).astype(np.uint8)
        new = np.flatnonzero(self._bits[places] & bits == 0)
        new = new[np.unique(positions[new], return_index=True)[1]]
        np.bitwise_or.at(self._bits, places[new], bits[new])
        self.remaining -= len(new)
        return new


def _as_bytes(rows: np.ndarray) -> np.ndarray:
    """(B, bytes of a row) uint8."""
    return rows.reshape(len(rows), -1).view(np.uint8)


def _damage(store: LatentStore, what: str, shards: Sequence[str]) -> DamageError:
    names = " or ".join(f"'{path}'" for path in shards)
    return DamageError(
        f"store '{store.path}': {what} in shard {names} does not match its checksum: its bytes are not those that were "
        f"written. {REPAIR}"
    )
