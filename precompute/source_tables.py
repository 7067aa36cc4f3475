"""Tables that name pictures: ``metadata.jsonl``, a JSONL or Parquet manifest, PixArt's ``data_info.json`` as it is.

A row names a file by its path relative to the table's folder, and never one outside of the source. A table is read a
row at a time, whatever its size.
"""

from __future__ import annotations

import codecs
import json
import os
import reprlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from ..datasets.errors import SourceError
from .source_files import SourceFiles
from .source_record import CAPTION_NAMES, SourceRecord, captions_of, label_of, size_of, usable_key

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

METADATA = "metadata.jsonl"
PIXART = "data_info.json"
PIXART_TABLE, PIXART_PICTURES = f"InternData/{PIXART}", "InternImgs"  # as PixArt's trainer expects them
PATH_NAMES = ("file_name", "path")
MAX_LINE_BYTES = 1 << 24  # of a JSON row
READ_BYTES = 1 << 20
WHITE_SPACE = (" ", "\t", "\r", "\n")
TABLE_ROWS = 1024  # of a Parquet file, at once
MAX_BATCH_BYTES = 256 << 20  # of text in them
BUFFER_BYTES = 1 << 20  # of each column, as it is read
PARQUET_ERRORS = (pa.ArrowException, OSError, ValueError)  # what pyarrow raises for a damaged file
PARQUET_NAMES = (*PATH_NAMES, *CAPTION_NAMES, "label", "cls", "height", "width")


def pixart_folder(source: str) -> str:
    """The folder of ``InternData`` and ``InternImgs``, where a source is one of PixArt's, else the source."""
    inside = source.rstrip("/").removesuffix(f"/{PIXART}")
    return inside.removesuffix("InternData") or "." if f"/{inside}".endswith("/InternData") else source


def find_table(files: SourceFiles) -> str | None:
    """Path of the table of a source; None where there is none."""
    if files.only is not None:
        return files.only if files.only.endswith((".jsonl", ".json", ".parquet")) else None
    return next((name for name in (METADATA, PIXART, PIXART_TABLE) if files.look(name)), None)


def table_records(files: SourceFiles, table: str) -> Iterator[SourceRecord]:
    """A record for each row: path (``file_name`` or ``path``), perhaps a label and captions.

    Raises: SourceError: a row is no JSON object with a path, named by its number.
    """
    folder = _pictures_of(files, table)
    with files.open(table) as file:
        rows = _parquet_rows if table.endswith(".parquet") else _lines if table.endswith(".jsonl") else _array
        for where, row in rows(file, f"source '{_shown(files, table)}'"):
            yield _row_record(files, folder, row, where)


def _shown(files: SourceFiles, table: str) -> str:
    return files.name if files.only == table else f"{files.name}/{table}"


def _pictures_of(files: SourceFiles, table: str) -> str:
    """Folder, within the source, to which the rows' paths are relative."""
    return PIXART_PICTURES if table == PIXART_TABLE else ""


def _row_record(files: SourceFiles, folder: str, row: Any, where: str) -> SourceRecord:
    try:
        name = next((row[name] for name in PATH_NAMES if row.get(name) is not None), None)
        if not isinstance(name, str):
            raise TypeError(f"'file_name' is {type(name).__name__}")
    except (AttributeError, TypeError) as error:
        raise _no_row(where, error) from error
    key, unusable = usable_key(name)
    if unusable:
        return SourceRecord(key, key, problem=unusable)
    inside = os.path.normpath(name)
    if os.path.isabs(inside) or inside.split(os.sep)[0] == "..":
        return SourceRecord(name, name, problem=("bad_metadata", "file_name leaves the source folder"))
    try:
        label, captions = label_of(row), captions_of(row)
    except (TypeError, ValueError) as error:
        return SourceRecord(name, inside, problem=("bad_metadata", str(error)))
    found = files.look(f"{folder}/{inside}" if folder else inside)
    if found is None:
        return SourceRecord(name, inside, problem=("missing_file", f"there is no '{name}'"))
    return found.record(key=name, label=label, captions=captions, size=size_of(row))


def _no_row(where: str, error: BaseException) -> SourceError:
    return SourceError(f"{where}: needed a JSON object with 'file_name' (or 'path') as text ({reprlib.repr(error)}).")


def _lines(file: BinaryIO, table: str) -> Iterator[tuple[str, Any]]:
    """JSON objects, one a line."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        where = f"{table}, line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise SourceError(f"{where}: longer than {MAX_LINE_BYTES >> 20} MiB. Shorten it.")
        if line.strip():
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise _no_row(where, error) from error
            yield where, row


def _array(file: BinaryIO, table: str) -> Iterator[tuple[str, Any]]:
    """Objects of one JSON array, decoded one at a time."""
    text, number = _JsonText(file), 1
    try:
        text.expect("[")
        while text.peek() != "]":
            if number > 1:
                text.expect(",")
            row = text.value()
            yield f"{table}, row {number}", row
            number += 1
        text.expect("]")
        if text.peek():
            raise ValueError("more follows the list")
    except (ValueError, RecursionError) as error:
        raise _no_row(f"{table}, row {number}", error) from error


class _JsonText:
    """JSON text that is read as far as it is needed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._text, self._position = file, "", 0
        self._decode, self._parse = codecs.getincrementaldecoder("utf-8-sig")().decode, json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """The next character that is no white space, "" at the end."""
        while True:
            while self._text[self._position : self._position + 1] in WHITE_SPACE:
                self._position += 1
            if self._position < len(self._text) or not self._read_more():
                return self._text[self._position : self._position + 1]

    def expect(self, character: str) -> None:
        """Step over a character. Raises: ValueError: there is another."""
        if (found := self.peek()) != character:
            raise ValueError(f"needed {character!r}, got {found!r}")
        self._position += 1

    def value(self) -> Any:
        """Step over a value. Raises: ValueError: it is damaged, or too long; RecursionError: too deep."""
        self.peek()
        while True:
            try:
                found, self._position = self._parse(self._text, self._position)
                return found
            except ValueError:
                if len(self._text) - self._position > MAX_LINE_BYTES or not self._read_more():
                    raise

    def _read_more(self) -> bool:
        more = self._file.read(READ_BYTES)
        self._text, self._position = self._text[self._position :] + self._decode(more, final=not more), 0
        return bool(more)


def _parquet_rows(file: BinaryIO, table: str) -> Iterator[tuple[str, Any]]:
    """Rows of a Parquet table, only the columns that say something of a picture."""
    number = 0
    try:
        parquet = open_parquet(file)
        names = [name for name in PARQUET_NAMES if name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(TABLE_ROWS, columns=names):
            check_texts(batch, f"{table}, after row {number}")
            for row in batch.to_pylist():
                number += 1
                yield f"{table}, row {number}", row
    except PARQUET_ERRORS as error:
        raise SourceError(f"{table}: not a readable Parquet file ({error}). Restore it.") from error


def open_parquet(file: BinaryIO) -> pq.ParquetFile:
    """Open a Parquet file of others to read it as a stream, a few rows at a time.

    Raises: one of ``PARQUET_ERRORS``.
    """
    metadata = pq.read_metadata(file)
    # Texts as dictionaries: one that is repeated in every row takes room once, as in the file. Not those in lists,
    # which pyarrow cannot hand out so (26.0).
    leaves = [metadata.schema.column(i) for i in range(metadata.num_columns)]
    texts = [leaf.path for leaf in leaves if leaf.path in PARQUET_NAMES and leaf.physical_type == "BYTE_ARRAY"]
    file.seek(0)
    return pq.ParquetFile(file, metadata=metadata, read_dictionary=texts, buffer_size=BUFFER_BYTES)


def check_texts(batch: pa.RecordBatch, where: str) -> None:
    """Refuse texts that would fill the memory as Python objects.

    Raises: SourceError.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        total = column.nbytes
        if pa.types.is_dictionary(column.type):
            lengths = pc.cast(pc.binary_length(column.dictionary), pa.int64())
            total = pc.sum(lengths.take(column.indices)).as_py() or 0
        if total > MAX_BATCH_BYTES:
            raise SourceError(
                f"{where}: column '{name}' has {total >> 20} MiB in {batch.num_rows} rows, at most "
                f"{MAX_BATCH_BYTES >> 20} MiB are taken. Shorten its texts."
            )
