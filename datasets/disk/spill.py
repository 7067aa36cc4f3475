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
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from ...errors import ResourceError

BATCH_ROWS = 1 << 14  # of a mapped table
LARGE_BYTES = 1 << 24  # of an array that the kernel should be able to evict
MAX_BATCH_BYTES = 1 << 30  # of such a batch: texts of a column must fit into 2 GiB


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Turn the error of a temporary file that cannot be made or is full into a ResourceError with folder and purpose.

    Other OSErrors are raised unchanged: a source that is read meanwhile may cause them.
    """
    try:
        yield
    except OSError as error:
        full, large = "Free some space there, or set", "Raise 'ulimit -f', or set"
        advice = {errno.ENOSPC: full, errno.EDQUOT: full, errno.EFBIG: large}.get(error.errno or 0)
        if not advice and not (error.errno == errno.ENOENT and error.filename is None):  # tempfile: no usable folder
            raise
        raise ResourceError(
            f"{what}: '{_folder()}' cannot hold it ({error}). {advice or 'Set'} TMPDIR to another folder."
        ) from error


def _folder() -> str:
    with suppress(OSError):
        return tempfile.gettempdir()
    return os.environ.get("TMPDIR", "")


def map_written(write: Callable[[BinaryIO], Any], what: str) -> memoryview:
    """Call a function that writes a temporary file, and map the result.

    Args:
      what: the content, for the error.
    Raises: ResourceError: the folder for temporary files is full.
    """
    with named_errors(what), tempfile.TemporaryFile(prefix="leandit-") as file:
        write(file)
        file.flush()
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def map_table(schema: pa.Schema, batches: Iterable[pa.RecordBatch], what: str) -> pa.Table:
    """Write batches to a temporary file as they arrive, and map it.

    Returns: a table with a chunk for each batch.
    Raises: ResourceError: the folder for temporary files is full.
    """

    def write(file: BinaryIO) -> None:
        with pa.ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)

    return pa.ipc.open_file(pa.py_buffer(map_written(write, what))).read_all()


def map_array(length: int, dtype: Any, what: str) -> np.ndarray:
    """Zeros, in a temporary file where they are many.

    Returns: (length,), for reading and writing.
    Raises: ResourceError: the folder for temporary files is full.
    """
    num_bytes = length * np.dtype(dtype).itemsize
    if num_bytes < LARGE_BYTES:
        return np.zeros(length, dtype)
    with named_errors(what), tempfile.TemporaryFile(prefix="leandit-") as file:
        if hasattr(os, "posix_fallocate"):  # a sparse file would cause a SIGBUS once the disk is full
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:  # macOS
            for start in range(0, num_bytes, 1 << 20):
                file.write(bytes(min(1 << 20, num_bytes - start)))
            file.flush()
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype)


def one_chunk(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The same values in one chunk; more than 2 GiB of text stay in several."""
    return pa.table([column], ["column"]).combine_chunks()["column"]


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
                f"{num_bytes >> 20} MiB of texts in {count} consecutive records; expected at most "
                f"{MAX_BATCH_BYTES >> 20} MiB in {num_rows}. Shorten the captions of the source."
            )
        if count >= num_rows:
            table, whole = pa.Table.from_batches(waiting).combine_chunks(), count - count % num_rows
            yield from table.slice(0, whole).to_batches(max_chunksize=num_rows)
            rest = table.slice(whole)
            waiting, count, num_bytes = rest.to_batches(), rest.num_rows, rest.nbytes
    if count:
        yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()


class TakenColumn(Sequence[Any]):
    """Values of a column at some positions, each read on access; none is held in memory.

    Args:
      column: of a mapped table.
      positions: (N,) int64.
    """

    def __init__(self, column: pa.ChunkedArray, positions: np.ndarray) -> None:
        self._column, self._positions = column, positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return self._column[int(self._positions[index])].as_py()
