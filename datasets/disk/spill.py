"""Tables and arrays that may exceed memory, mapped from unnamed temporary files.

The kernel evicts their pages as needed. The files have no name, so nothing remains however the process ends. They lie
in ``tempfile``'s folder (TMPDIR); on a tmpfs they would take memory after all.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..errors import ResourceError

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

BATCH_ROWS = 1 << 14  # of a mapped table
MAX_BATCH_BYTES = 1 << 30  # of such a batch: texts of a column must fit into 2 GiB


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Turn an OSError of a temporary file into a ResourceError that names its folder and purpose."""
    try:
        yield
    except OSError as error:
        full, large = "Free some space there, or name", "Raise 'ulimit -f', or name"
        advice = {errno.ENOSPC: full, errno.EDQUOT: full, errno.EFBIG: large}.get(error.errno or 0, "Name")
        raise ResourceError(
            f"{what}: '{tempfile.gettempdir()}' cannot hold it ({error}). {advice} another folder in the environment "
            "as TMPDIR."
        ) from error


def map_table(schema: pa.Schema, batches: Iterable[pa.RecordBatch], what: str) -> pa.Table:
    """Write batches to a temporary file as they arrive, and map it.

    Args:
      what: the content, for the error.
    Returns: a table with a chunk for each batch.
    Raises: ResourceError: the folder for temporary files is full.
    """
    with named_errors(what):
        file = tempfile.TemporaryFile(prefix="leandit-table-")  # noqa: SIM115 (the next line closes it)
    with file:
        path = f"/proc/self/fd/{file.fileno()}"
        with named_errors(what):
            sink = pa.OSFile(path, "wb")
            writer = pa.ipc.new_file(sink, schema)
        with sink:
            for batch in batches:
                with named_errors(what):
                    writer.write_batch(batch)
            with named_errors(what):
                writer.close()
        return pa.ipc.open_file(pa.memory_map(path)).read_all()


def map_array(length: int, dtype: str | np.dtype, what: str) -> np.ndarray:
    """Zeros in a temporary file.

    Returns: (length,), mapped for reading and writing.
    Raises: ResourceError: the folder for temporary files is full.
    """
    if not length:
        return np.empty(0, dtype)
    with tempfile.TemporaryFile(prefix="leandit-array-") as file, named_errors(what):
        num_bytes = length * np.dtype(dtype).itemsize
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # a sparse file would cause a SIGBUS later
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype)


class GrowingArray:
    """Numbers that arrive a few at a time, in a temporary file.

    Args:
      what: the content, for the error.
    """

    def __init__(self, dtype: str | np.dtype, what: str) -> None:
        self._dtype, self._what, self._length = np.dtype(dtype), what, 0
        with named_errors(what):
            self._file = tempfile.TemporaryFile(prefix="leandit-array-")  # noqa: SIM115 (``close`` closes it)

    def append(self, values: np.ndarray) -> None:
        """Append numbers.

        Raises: ResourceError: the folder for temporary files is full.
        """
        with named_errors(self._what):
            self._file.write(np.ascontiguousarray(values, self._dtype).data)
        self._length += len(values)

    def close(self) -> np.ndarray:
        """All numbers, mapped; nothing can be appended afterwards."""
        with self._file, named_errors(self._what):
            self._file.flush()
            if not self._length:
                return np.empty(0, self._dtype)
            return np.memmap(self._file, self._dtype, "r", shape=(self._length,)).view(np.ndarray)


def map_written(write: Callable[[BinaryIO], None], what: str) -> memoryview:
    """Call a function that writes a temporary file, and map the result.

    Raises: ResourceError: the folder for temporary files is full.
    """
    with tempfile.TemporaryFile(prefix="leandit-file-") as file, named_errors(what):
        write(file)
        file.flush()
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def one_chunk(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The same values in one chunk, texts in a mapped file. More than 2 GiB of text is returned unchanged."""
    if column.num_chunks == 1 or column.type != pa.string():
        return column if column.num_chunks == 1 else pa.chunked_array([column.combine_chunks()], column.type)
    lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy()
    offsets = np.zeros(len(column) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] >= 1 << 31:
        return column
    letters, done = map_array(int(offsets[-1]), "uint8", "texts of a table"), 0
    for chunk in column.chunks:
        if (count := pc.sum(pc.binary_length(chunk)).as_py() or 0) == 0:
            continue
        _, bounds, data = chunk.buffers()
        first = np.frombuffer(bounds, np.int32)[chunk.offset]
        letters[done : done + count] = np.frombuffer(data, np.uint8)[first : first + count]
        done += count
    valid = pc.is_valid(column).combine_chunks().buffers()[1] if column.null_count else None
    buffers = [valid, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(letters)]
    return pa.chunked_array([pa.Array.from_buffers(pa.string(), len(column), buffers)])


def rebatched(batches: Iterable[pa.RecordBatch], num_rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of ``num_rows``; the last may be smaller.

    Raises: ResourceError: a batch takes more than a gigabyte.
    """
    waiting: list[pa.RecordBatch] = []
    count = num_bytes = 0
    for batch in batches:
        waiting.append(batch)
        count, num_bytes = count + batch.num_rows, num_bytes + batch.nbytes
        if num_bytes > MAX_BATCH_BYTES:
            raise ResourceError(
                f"{num_bytes >> 20} MiB of texts in {count} consecutive records; needed at most "
                f"{MAX_BATCH_BYTES >> 20} MiB in {num_rows}. Shorten the captions of the source."
            )
        if count < num_rows:
            continue
        table = pa.Table.from_batches(waiting)
        while count >= num_rows:
            (whole,) = table.slice(0, num_rows).combine_chunks().to_batches()
            yield whole
            table, count = table.slice(num_rows), count - num_rows
        waiting, num_bytes = table.to_batches(), table.nbytes
    if count:
        (rest,) = pa.Table.from_batches(waiting).combine_chunks().to_batches()
        yield rest


class TakenColumn(Sequence[Any]):
    """Values of a column at some positions, each read on access; none is held in memory.

    Args:
      column: of a mapped table.
      positions: (N,) int64.
    """

    def __init__(self, column: pa.ChunkedArray, positions: np.ndarray) -> None:
        self._chunks, self._positions = column.chunks, positions
        self._starts = np.cumsum([0, *(len(chunk) for chunk in self._chunks)])

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        position = self._positions[index]
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self._chunks[number][int(position - self._starts[number])].as_py()
