"""Untrusted Parquet files, streamed within a memory limit."""

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
    """Open an untrusted Parquet file as a stream.

    Args:
      texts: columns to read as dictionaries if they hold text, so that a repeated text takes memory once; not lists of
        text, which pyarrow cannot read this way (26.0).
    Raises: one of ``PARQUET_ERRORS``.
    """
    metadata = pq.read_metadata(file)
    leaves = [metadata.schema.column(i) for i in range(metadata.num_columns)]
    whole = [leaf.path for leaf in leaves if leaf.path in texts and leaf.physical_type == "BYTE_ARRAY"]
    file.seek(0)
    return pq.ParquetFile(file, metadata=metadata, read_dictionary=whole, buffer_size=BUFFER_BYTES)


def read_rows(parquet: pq.ParquetFile, names: Sequence[str], where: str) -> Iterator[pa.RecordBatch]:
    """Columns of a file, TABLE_ROWS at a time.

    Raises: SourceError: two columns of the same name, or texts that would fill the memory; one of ``PARQUET_ERRORS``.
    """
    if twice := [name for name in names if len(parquet.schema_arrow.get_all_field_indices(name)) > 1]:
        raise SourceError(f"{where}: two columns are called '{twice[0]}'. Remove or rename one.")
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
                        f"{where}, after row {done}: column '{name}' has {total >> 20} MiB in {rows.num_rows} rows; "
                        f"needed at most {MAX_BATCH_BYTES >> 20} MiB. Shorten its texts."
                    )
            plain = [c.dictionary.take(c.indices) if pa.types.is_dictionary(c.type) else c for c in rows.columns]
            yield pa.RecordBatch.from_arrays(plain, names=batch.schema.names)
            done += rows.num_rows


def _text_bytes(column: pa.Array) -> np.ndarray | None:
    """(N,) int64, text bytes of each row of a dictionary; None for other columns."""
    if not pa.types.is_dictionary(column.type):
        return None
    lengths = pc.cast(pc.binary_length(column.dictionary), pa.int64())
    return pc.fill_null(lengths.take(column.indices), 0).to_numpy()
