"""The Parquet tables of a store: written deterministically, validated when read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from ..disk.spill import BATCH_ROWS, map_table, map_written, one_chunk
from ..errors import DamageError, RecipeError
from .buckets import bucket_size
from .layout import CAPTIONS, RECORDS, SOURCES
from .schema import FALLBACK, StoreSpec
from .table_schemas import CAPTIONS_SCHEMA, PLACES, PLAN_SCHEMA, RECORDS_SCHEMA, suffixes

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

# First columns of each table, by the name of its file.
SCHEMAS = {
    RECORDS: RECORDS_SCHEMA,
    CAPTIONS: CAPTIONS_SCHEMA,
    SOURCES: pa.schema([PLAN_SCHEMA.field(name) for name in PLACES]),
}
MAX_LABEL = 1 << 31
# Limits per byte of a file, far beyond any of ours: a stored record has 16 bytes of incompressible checksums.
MAX_ROWS_PER_BYTE, MAX_VALUES_PER_BYTE, MAX_TEXT_PER_BYTE = 4, 16, 256
ROW_GROUP = 1 << 16  # rows: what reading one record or caption takes into memory
SMALL_TABLE = 1 << 16  # bytes that every table is allowed


def parquet_file(table: pa.Table) -> memoryview:
    """A table as the bytes of a Parquet file, in a mapped temporary file; the same bytes whatever chunks it has."""
    parts = (table.slice(start, ROW_GROUP) for start in row_groups(table.num_rows))
    whole = ([one_chunk(column) for column in part.columns] for part in parts)  # else pages would end where chunks do
    return parquet_of_groups(table.schema, (pa.table(columns, schema=table.schema) for columns in whole))


def parquet_of_groups(schema: pa.Schema, groups: Iterable[pa.Table]) -> memoryview:
    """Tables as the row groups of one Parquet file, likewise; each is dropped before the next one comes.

    Args:
      groups: of ``row_groups``.
    """

    def write(file: BinaryIO) -> None:
        with pq.ParquetWriter(file, schema, compression="zstd", write_statistics=True) as writer:
            for group in groups:
                writer.write_table(group, ROW_GROUP)

    return map_written(write, "a table of the store")


def row_groups(num_rows: int) -> range:
    """First row of each row group of a table; of an empty one too."""
    return range(0, max(1, num_rows), ROW_GROUP)


def check_table(path: Path) -> None:
    """Check columns, and that no value needs more memory than a table of this size can. Raises: DamageError."""
    try:
        with pa.OSFile(str(path)) as file:
            _check_parquet(file, SCHEMAS[path.name], expand=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def read_row_group(path: Path, position: int) -> tuple[int, pa.Table]:
    """Read the row group of a row, of a Parquet table of ours that ``check_table`` has passed.

    Returns: position of the group's first row, and its rows.
    Raises: DamageError: not readable, or the table has no such row.
    """
    try:
        file, first = pq.ParquetFile(path), 0
        for number in range(file.num_row_groups):
            count = file.metadata.row_group(number).num_rows
            if position < first + count:
                break
            first += count
        else:
            raise ValueError(f"it has no row {position}")
        table = file.read_row_group(number, use_threads=False)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    _check_nulls(path, table)
    return first, table


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet table of ours, whose hash was checked before.

    Args:
      columns: only these, with texts as dictionaries; None for all.
    Raises: DamageError: not Parquet, wrong columns, or more values than the file can hold.
    """
    wanted = SCHEMAS[path.name]
    try:
        # Arrow's memory, not Python's: an Arrow thread may free it at process exit, where taking Python's lock would
        # abort a command that has succeeded.
        with pa.OSFile(str(path)) as file:
            content = file.read_buffer()
        _check_parquet(pa.BufferReader(content), wanted, expand=columns is None)
        texts = None if columns is None else _texts(wanted)
        # In one thread, as fast for these few columns: what threads allocate stays with their heaps when it is freed.
        table = pq.ParquetFile(pa.BufferReader(content), read_dictionary=texts).read(columns=columns, use_threads=False)
        table.validate(full=True)  # offsets, and that text is UTF-8
        if missing := set(columns or ()) - set(table.column_names):
            raise ValueError(f"it has no column '{min(missing)}'")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    _check_nulls(path, table)
    return table


def map_plan_table(path: Path) -> pa.Table:
    """Read a table of a plan, whose hash was checked before, into a mapped temporary file.

    Raises: as ``read_table``; ResourceError: the folder for temporary files is full.
    """
    wanted = SCHEMAS[path.name]
    try:
        with pa.OSFile(str(path)) as file:
            _check_parquet(file, wanted, expand=True)
            parquet = pq.ParquetFile(file)
            table = map_table(parquet.schema_arrow, _valid_batches(parquet), f"table '{path}'")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    _check_nulls(path, table)
    return table


def _valid_batches(parquet: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    for batch in parquet.iter_batches(BATCH_ROWS, use_threads=False):
        batch.validate(full=True)  # offsets, and that text is UTF-8
        yield batch


def _unreadable(path: Path, error: Exception) -> DamageError:
    return DamageError(f"table '{path}': not a readable Parquet file of ours ({error}).")


def _check_nulls(path: Path, table: pa.Table) -> None:
    never_null = ("key", "revision", "row", "label", "status", "text", "num_tokens", "truncated")
    if nulls := [name for name in never_null if name in table.column_names and table[name].null_count]:
        raise DamageError(f"table '{path}': nulls in column '{nulls[0]}', where there are none.")


def _texts(schema: pa.Schema) -> list[str]:
    return [field.name for field in schema if field.type == pa.string()]


def _check_parquet(content: pa.NativeFile, wanted: pa.Schema, *, expand: bool) -> None:
    """Refuse a table that would fill the memory: repeated values compress to nothing.

    Args:
      expand: texts will be read as they are, not as dictionaries.

    Raises: ValueError, pa.ArrowException.
    """
    file_bytes = content.size()
    room = file_bytes + SMALL_TABLE
    file = pq.ParquetFile(content)
    if [(field.name, field.type) for field in file.schema_arrow][: len(wanted)] != [(f.name, f.type) for f in wanted]:
        raise ValueError("its columns are not those of its name")
    metadata = file.metadata
    if metadata.num_rows > MAX_ROWS_PER_BYTE * room:
        raise ValueError(f"it claims {metadata.num_rows} rows in {file_bytes} bytes")
    # Reads every value, a few at a time, and keeps none. Without it, asking a damaged footer what a column claims ends
    # the process: that pyarrow does not turn into an exception (26.0).
    if file.scan_contents() != metadata.num_rows:
        raise ValueError(f"it has not the {metadata.num_rows} rows that it claims")
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    for column in range(metadata.num_columns):
        parts = [group.column(column) for group in groups]
        values, size = sum(p.num_values for p in parts), sum(p.total_uncompressed_size for p in parts)
        if values > MAX_VALUES_PER_BYTE * room or size > MAX_TEXT_PER_BYTE * room:
            raise ValueError(f"column {column} claims {values} values of {size} bytes in {file_bytes} bytes")
    texts = _texts(wanted)
    file = pq.ParquetFile(content, read_dictionary=texts)
    for name in texts if expand else ():  # a long text that stands there once can be named in every row
        size = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=[name], use_threads=False):
            column = batch.column(0)
            lengths = pc.binary_length(column.dictionary).take(column.indices)
            size += pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0
        if size > MAX_TEXT_PER_BYTE * room:
            raise ValueError(f"column '{name}' would be {size} bytes, from a file of {file_bytes}")


def table_problem(
    spec: StoreSpec, revision: int, records: pa.Table, num_captions: int, captions: pa.Table | None = None
) -> str:
    """Describe invalid values in the tables of a revision, such as rows outside of its arrays; "" if there are none.

    Args:
      records: all columns of the table, or some.
    """
    columns = records.column_names
    for name in pc.unique(records["bucket"]).drop_null().to_pylist() if "bucket" in columns else ():
        try:
            sides = bucket_size(name)
        except RecipeError:
            return f"a bucket named {name[:40]!r}"
        if min(sides) < spec.latent.downscale:
            return f"bucket {name!r}, smaller than one place of a latent"
    for how in pc.unique(records["fallback"]).drop_null().to_pylist() if "fallback" in columns else ():
        if not re.fullmatch(FALLBACK, how):
            return f"a record encoded as {how[:40]!r}"
    limits = {"revision": (1, revision), "row": (-1, 1 << 40), "label": (-1, MAX_LABEL)}
    bounds = [(name, records[name], *limit) for name, limit in limits.items() if name in columns]
    if "caption_ids" in columns:
        bounds.append(("caption id", pc.list_flatten(records["caption_ids"]), 0, num_captions - 1))
    if captions is not None:
        bounds.append(("revision", captions["revision"], 1, revision))
        for name, suffix in suffixes(spec).items():
            longest = spec.text_encoder_of(name).spec.max_tokens
            bounds.append(("length", captions[f"num_tokens{suffix}"], 1, longest))
        if not spec.text_encoders and captions.num_rows:
            return "captions, without a text encoder"
        if _falls(captions["revision"]):
            return "captions that are not in order of their revision"
    for what, values, low, high in bounds:
        found = pc.min_max(values).as_py()
        if values.null_count or (len(values) and not low <= found["min"] <= found["max"] <= high):
            return f"a {what} of {found['min']} to {found['max']}, it must be {low} to {high}"
    return ""


def _falls(numbers: pa.ChunkedArray) -> bool:
    """Whether a number is smaller than its predecessor."""
    last = -1
    for chunk in numbers.chunks:
        values = chunk.to_numpy()
        if len(values) and (values[0] < last or np.any(np.diff(values) < 0)):
            return True
        last = values[-1] if len(values) else last
    return False
