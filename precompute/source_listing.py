"""The records of a source in bounded memory: batches of a table in a temporary file, mapped, and read as records.

Ten million records as Python objects are several gigabytes; here they are a file that the kernel may drop from memory
at any time. It has no name any more once it is mapped, so nothing is left of it, however the process ends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import overload

import numpy as np
import pyarrow as pa
import xxhash

from ..datasets.errors import ResourceError
from .source_record import SourceRecord

BATCH_ROWS = 1 << 14
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("path", pa.string()),
        ("offset", pa.int64()),
        ("num_bytes", pa.int64()),
        ("mtime_ns", pa.int64()),
        ("label", pa.int32()),
        ("captions", pa.list_(pa.string())),
        ("reason", pa.string()),  # null where there is no problem
        ("detail", pa.string()),
    ]
)


class Listing(Sequence[SourceRecord]):
    """Records of a source in their order; a record is made when it is asked for.

    A key that stands there again is a reject, ``duplicate_key``: the first one counts.

    Args:
      batches: of SCHEMA, all of BATCH_ROWS but the last.
      repeated: positions whose key stands before them.
    """

    def __init__(self, batches: Callable[[int], pa.RecordBatch], length: int, repeated: dict[int, int]) -> None:
        self._batch, self._length, self._repeated = batches, length, repeated
        self._latest: tuple[int, list[SourceRecord]] = -1, []  # replaced as one, so any thread may read it

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[SourceRecord]:
        for number in range(-(-self._length // BATCH_ROWS)):
            yield from self._records(number)

    @overload
    def __getitem__(self, index: int) -> SourceRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[SourceRecord]: ...
    def __getitem__(self, index: int | slice) -> SourceRecord | list[SourceRecord]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"record {index} of {self._length}")
        number, row = divmod(index % self._length, BATCH_ROWS)
        latest = self._latest
        if latest[0] != number:
            latest = self._latest = number, self._records(number)
        return latest[1][row]

    def largest_label(self) -> int:
        """Of all records but those that repeat a key; -1 where none has a label."""
        largest = -1
        for number in range(-(-self._length // BATCH_ROWS)):
            labels = self._batch(number)["label"].to_numpy().copy()
            first = number * BATCH_ROWS
            again = [i - first for i in self._repeated if first <= i < first + BATCH_ROWS] if self._repeated else []
            labels[again] = -1
            largest = max(largest, int(labels.max()))
        return largest

    def _records(self, number: int) -> list[SourceRecord]:
        columns = self._batch(number).to_pydict()
        reasons, details = columns.pop("reason"), columns.pop("detail")
        columns["captions"] = [tuple(texts) for texts in columns["captions"]]
        problems = [reason and (reason, detail) for reason, detail in zip(reasons, details, strict=True)]
        records = [SourceRecord(*row) for row in zip(*columns.values(), problems, strict=True)]
        for row in range(len(records)) if self._repeated else ():
            first = self._repeated.get(number * BATCH_ROWS + row)
            if first is not None:
                problem = ("duplicate_key", f"record {first + 1} of the source has the same key")
                records[row] = SourceRecord(records[row].key, records[row].path, problem=problem)
        return records


def spool(records: Iterable[SourceRecord], progress: Callable[[int], None]) -> Listing:
    """Write records to a temporary file as they come, and map it.

    Args:
      progress: called with the number of records so far.
    Raises: ResourceError: the folder for temporary files is full.
    """
    hashes: list[np.ndarray] = []
    length = 0
    with tempfile.NamedTemporaryFile(prefix="leandit-listing-") as file, _named_errors():
        with pa.OSFile(file.name, "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            for batch, digests in _batches(records):
                writer.write_batch(batch)
                hashes.append(digests)
                length += len(digests)
                progress(length)
        reader = pa.ipc.open_file(pa.memory_map(file.name))
    repeated = _repeated(np.concatenate(hashes), reader.get_batch) if hashes else {}
    return Listing(reader.get_batch, length, repeated)


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # what reading a source raises is a SourceError
        raise ResourceError(
            f"the list of the source: '{tempfile.gettempdir()}' cannot hold it ({error}). Free some space there, or "
            "name another folder in the environment as TMPDIR."
        ) from error


def _batches(records: Iterable[SourceRecord]) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """Batches of records, and the XXH3-64 of their keys."""
    columns: list[list] = [[] for _ in SCHEMA]
    for r in records:
        reason, detail = r.problem or (None, None)
        values = (r.key, r.path, r.offset, r.num_bytes, r.mtime_ns, r.label, r.captions, reason, detail)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        if len(columns[0]) == BATCH_ROWS:
            yield _batch(columns)
            columns = [[] for _ in SCHEMA]
    if columns[0]:
        yield _batch(columns)


def _batch(columns: list[list]) -> tuple[pa.RecordBatch, np.ndarray]:
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    digests = np.array([xxhash.xxh3_64_intdigest(key.encode()) for key in columns[0]], np.uint64)
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA), digests


def _repeated(digests: np.ndarray, batch: Callable[[int], pa.RecordBatch]) -> dict[int, int]:
    """Position of each key that stands there again, and where it stands first; equal hashes are looked at."""
    order = np.argsort(digests, kind="stable")
    equal = np.flatnonzero(digests[order][1:] == digests[order][:-1])
    suspects = np.unique(np.concatenate([order[equal], order[equal + 1]]))  # in the order of the source
    first: dict[str, int] = {}
    repeated = {}
    for position in suspects.tolist():
        number, row = divmod(position, BATCH_ROWS)
        key = batch(number)["key"][row].as_py()
        if (before := first.setdefault(key, position)) != position:
            repeated[position] = before
    return repeated
