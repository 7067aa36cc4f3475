"""The Parquet tables of a store: written deterministically, validated when read, a row group at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from ...errors import DamageError, RecipeError
from ..disk.faults import fault_of, is_fault
from ..disk.spill import BATCH_ROWS, MAX_BATCH_BYTES, map_table, map_written, one_chunk
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
NEVER_NULL = ("key", "revision", "row", "label", "status", "text", "num_tokens", "truncated")
MAX_LABEL = (1 << 31) - 1
MAX_NAMES_BYTES = 256 << 20  # of a text column of BATCH_ROWS rows, other than the captions: 16 KiB a row
MAX_LIST = 256  # values: the captions of one record
MAX_TEXT_PER_BYTE = 256  # bytes of a column of a row group by those of the file, where they exceed MAX_BATCH_BYTES
ROW_GROUP = 1 << 16  # rows: what reading one record or caption takes into memory


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


def check_table(path: Path, *, num_rows: int | None, texts: bool) -> None:
    """Refuse a table that would fill the memory: repeated values compress to nothing.

    The limits follow from what the store says of itself and from what a precompute writes: as many rows as the manifest
    counts, in row groups of ROW_GROUP; at most MAX_LIST values in a list; captions of which BATCH_ROWS rows fit into
    MAX_BATCH_BYTES, as the plan demands, and names in MAX_NAMES_BYTES. How well a table compresses is no sign of
    damage: a million images of one file share one path.

    Args:
      num_rows: rows of the table by the manifest; None for the table of a plan, which nothing else counts.
      texts: the caller will read texts as plain strings, not as dictionaries.
    Raises: DamageError: not Parquet, wrong columns, another number of rows, or more values than a store may hold.
    """
    with _opened(path) as file:
        parquet = pq.ParquetFile(file)
        _check_columns(path, parquet.schema_arrow)
        metadata = parquet.metadata
        if num_rows is not None and metadata.num_rows != num_rows:
            raise ValueError(f"it claims {metadata.num_rows} rows, the manifest counts {num_rows}")
        # Reads every value, a few at a time, and keeps none. Without it, asking a damaged footer what a column claims
        # ends the process: pyarrow does not turn that into an exception (26.0).
        if parquet.scan_contents() != metadata.num_rows:
            raise ValueError(f"row count differs from the footer ({metadata.num_rows})")
        for number in range(metadata.num_row_groups):
            _check_row_group(metadata.row_group(number), number, file.size())
        if texts:
            _check_texts(file, _texts(parquet))


def _check_columns(path: Path, schema: pa.Schema) -> None:
    expected = SCHEMAS[path.name]
    columns = [(field.name, field.type) for field in schema]
    if columns[: len(expected)] != [(field.name, field.type) for field in expected]:
        raise ValueError("its columns do not match its file name")


def _check_row_group(group: pq.RowGroupMetaData, number: int, file_bytes: int) -> None:
    """Refuse a row group with more rows, values or bytes than a precompute writes."""
    if group.num_rows > ROW_GROUP:
        raise ValueError(f"row group {number} has {group.num_rows} rows, expected at most {ROW_GROUP}")
    max_bytes = max(MAX_BATCH_BYTES, MAX_TEXT_PER_BYTE * file_bytes)
    for index in range(group.num_columns):
        column = group.column(index)
        if column.num_values > MAX_LIST * group.num_rows:
            raise ValueError(f"column {index} claims {column.num_values} values in {group.num_rows} rows")
        if column.total_uncompressed_size > max_bytes:
            raise ValueError(f"column {index} claims {column.total_uncompressed_size} bytes in {file_bytes} bytes")


def _check_texts(file: pa.NativeFile, names: list[str]) -> None:
    """Refuse a text that is stored once, is long, and is named in many rows: as plain strings it would be copied."""
    parquet = pq.ParquetFile(file, read_dictionary=names)
    for name in names:
        max_bytes = MAX_BATCH_BYTES if name == "text" else MAX_NAMES_BYTES
        for batch in parquet.iter_batches(BATCH_ROWS, columns=[name], use_threads=False):
            column = batch.column(0)
            lengths = pc.binary_length(column.dictionary).take(column.indices)
            num_bytes = pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0
            if num_bytes > max_bytes:
                raise ValueError(f"{batch.num_rows} rows of column '{name}' would be {num_bytes} bytes")


def read_batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Read a Parquet table of ours, which ``check_table`` has passed, in batches of BATCH_ROWS.

    Args:
      columns: only these, with texts as dictionaries; None for all.
    Raises: DamageError: not Parquet, a column is missing, or a null where there is none.
    """
    with _opened(path) as file:
        parquet = pq.ParquetFile(file)
        if missing := set(columns or ()) - set(parquet.schema_arrow.names):
            raise ValueError(f"it has no column '{min(missing)}'")
        if columns is not None:
            parquet = pq.ParquetFile(file, read_dictionary=_texts(parquet))
        # In one thread, as fast for these few columns: what threads allocate stays with their heaps when it is freed.
        for batch in parquet.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
            yield _valid(path, batch)


def batches_of_parquet(content: memoryview | bytes, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read columns of a table that this process has just made, from its bytes, in batches of BATCH_ROWS."""
    few = [name for name in ("bucket", "status") if name in columns]  # distinct texts
    parquet = pq.ParquetFile(pa.BufferReader(pa.py_buffer(content)), read_dictionary=few)
    yield from parquet.iter_batches(BATCH_ROWS, columns=list(columns), use_threads=False)


def read_row_group(path: Path, position: int) -> tuple[int, pa.Table]:
    """Read the row group of a row, of a Parquet table of ours that ``check_table`` has passed.

    Returns: position of the group's first row, and its rows.
    Raises: DamageError: not readable, or the table has no such row.
    """
    with _opened(path) as file:
        parquet, first = pq.ParquetFile(file), 0
        for number in range(parquet.num_row_groups):
            count = parquet.metadata.row_group(number).num_rows
            if position < first + count:
                return first, _valid(path, parquet.read_row_group(number, use_threads=False))
            first += count
        raise ValueError(f"it has no row {position}")


def map_parquet(path: Path, num_rows: int | None = None) -> pa.Table:
    """Read a Parquet table of ours, whose hash was checked before, into a mapped temporary file.

    Args:
      num_rows: as for ``check_table``.
    Raises: as ``read_batches``; ResourceError: the folder for temporary files is full.
    """
    check_table(path, num_rows=num_rows, texts=True)
    with _opened(path) as file:
        schema = pq.ParquetFile(file).schema_arrow
    return map_table(schema, read_batches(path), f"table '{path}'")


@contextmanager
def _opened(path: Path) -> Iterator[pa.NativeFile]:
    """A table's file, read by Arrow into its own memory: a thread of Arrow that frees Python's at process exit aborts.

    Raises: DamageError for all that it raises about the content.
    """
    try:
        with pa.OSFile(str(path)) as file:
            yield file
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and is_fault(error):
            raise fault_of(path, error) from error
        raise DamageError(f"table '{path}': not a readable leandit Parquet file ({error}).") from error


def _valid(path: Path, rows: Any) -> Any:
    """Rows with valid offsets, UTF-8 and no null where there is none."""
    rows.validate(full=True)
    if nulls := [name for name in NEVER_NULL if name in rows.schema.names and rows.column(name).null_count]:
        raise DamageError(f"table '{path}': nulls in column '{nulls[0]}'; expected none.")
    return rows


def _texts(parquet: pq.ParquetFile) -> list[str]:
    return [field.name for field in parquet.schema_arrow if field.type == pa.string()]


def table_problem(
    spec: StoreSpec, revision: int, records: pa.Table | pa.RecordBatch, num_captions: int, captions: Any = None
) -> str:
    """Describe invalid values in the tables of a revision, such as rows outside of its arrays; "" if there are none.

    Args:
      records: all columns of the table, or some.
    """
    columns = records.schema.names
    for name in pc.unique(records["bucket"]).drop_null().to_pylist() if "bucket" in columns else ():
        try:
            sides = bucket_size(name)
        except RecipeError:
            return f"a bucket named {name[:40]!r}"
        if min(sides) < spec.latent.downscale:
            return f"bucket {name!r}, smaller than one position of a latent"
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
        ends = pc.min_max(values).as_py()
        if values.null_count or (len(values) and not low <= ends["min"] <= ends["max"] <= high):
            return f"a {what} of {ends['min']} to {ends['max']}, it must be {low} to {high}"
    return ""


def _falls(numbers: pa.ChunkedArray) -> bool:
    """Whether a number is smaller than its predecessor."""
    last = -1
    for chunk in numbers.chunks:
        if len(chunk) and (chunk[0].as_py() < last or pc.any(pc.less(chunk[1:], chunk[:-1])).as_py()):
            return True
        last = chunk[-1].as_py() if len(chunk) else last
    return False
