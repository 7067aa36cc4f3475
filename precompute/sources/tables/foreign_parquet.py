"""Parquet files of others: read as a stream, some rows at a time, within the bounds of memory that rows may take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from ....datasets.errors import SourceError

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

TABLE_ROWS = 1024  # at once
READ_ROWS = 1 << 16  # at once, where their texts are dictionaries: each batch carries a whole one
MAX_BATCH_BYTES = 256 << 20  # of text in TABLE_ROWS, and in all that are on their way
BUFFER_BYTES = 1 << 20  # of each column, as it is read
PARQUET_ERRORS = (pa.ArrowException, OSError, ValueError)  # what pyarrow raises for a damaged file


def open_parquet(file: BinaryIO, texts: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a Parquet file of others to read it as a stream.

    Args:
      texts: columns that are read as dictionaries, if they hold texts: one that is repeated in every row takes room
        once, as in the file. Not texts in lists, which pyarrow cannot hand out so (26.0).
    Raises: one of ``PARQUET_ERRORS``.
    """
    metadata = pq.read_metadata(file)
    leaves = [metadata.schema.column(i) for i in range(metadata.num_columns)]
    whole = [leaf.path for leaf in leaves if leaf.path in texts and leaf.physical_type == "BYTE_ARRAY"]
    file.seek(0)
    return pq.ParquetFile(file, metadata=metadata, read_dictionary=whole, buffer_size=BUFFER_BYTES)


def read_rows(parquet: pq.ParquetFile, names: Sequence[str], where: str) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Columns of a file, TABLE_ROWS at a time, and the bytes that these rows take.

    Raises: SourceError: two columns of one name, or texts that would fill the memory; or one of ``PARQUET_ERRORS``.
    """
    if twice := [name for name in names if len(parquet.schema_arrow.get_all_field_indices(name)) > 1]:
        raise SourceError(f"{where}: two columns are called '{twice[0]}'. Leave one of them out, or rename it.")
    kinds = [parquet.schema_arrow.field(name).type for name in names]
    is_small = all(pa.types.is_dictionary(kind) or pa.types.is_primitive(kind) for kind in kinds)
    done = 0
    for batch in parquet.iter_batches(READ_ROWS if is_small else TABLE_ROWS, columns=list(names)):
        batch.validate(full=True)  # indices, and that text is UTF-8
        sizes = [_text_bytes(column) for column in batch.columns]
        for start in range(0, batch.num_rows, TABLE_ROWS):
            rows = batch.slice(start, TABLE_ROWS)
            totals = [
                column.nbytes if size is None else int(size[start : start + TABLE_ROWS].sum())
                for column, size in zip(rows.columns, sizes, strict=True)
            ]
            for name, total in zip(batch.schema.names, totals, strict=True):
                if total > MAX_BATCH_BYTES:
                    raise SourceError(
                        f"{where}, after row {done}: column '{name}' has {total >> 20} MiB in {rows.num_rows} rows, at "
                        f"most {MAX_BATCH_BYTES >> 20} MiB are taken. Shorten its texts."
                    )
            plain = [c.dictionary.take(c.indices) if pa.types.is_dictionary(c.type) else c for c in rows.columns]
            yield pa.RecordBatch.from_arrays(plain, names=batch.schema.names), sum(totals)
            done += rows.num_rows


def _text_bytes(column: pa.Array) -> np.ndarray | None:
    """(N,) int64, bytes of the text of each row of a dictionary; None of any other column."""
    if not pa.types.is_dictionary(column.type):
        return None
    lengths = pc.cast(pc.binary_length(column.dictionary), pa.int64())
    return pc.fill_null(lengths.take(column.indices), 0).to_numpy()
