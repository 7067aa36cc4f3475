"""Tables that name pictures: ``metadata.jsonl``, a JSONL or Parquet manifest, PixArt's ``data_info.json`` as it is.

A row names a file by its path relative to the table's folder, and never one outside of the source. A table is read
some rows at a time, whatever its size; what they say is made into records in ``source_rows.py``.
"""

from __future__ import annotations

import codecs
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, Self

import pyarrow as pa

from ..datasets.errors import SourceError
from .foreign_parquet import MAX_BATCH_BYTES, PARQUET_ERRORS, TABLE_ROWS, open_parquet, read_rows
from .source_files import FoundFile, SourceFiles, shown
from .source_rows import PATH_NAMES, ROW_NAMES, CheckedRows, Rows, check_rows, no_row

METADATA = "metadata.jsonl"
PIXART = "data_info.json"
PIXART_TABLE, PIXART_PICTURES = f"InternData/{PIXART}", "InternImgs"  # as PixArt's trainer expects them
MAX_LINE_BYTES = 1 << 24  # of a JSON row
READ_BYTES = 1 << 20
WHITE_SPACE = (" ", "\t", "\r", "\n")
OBJECT_BYTES = 20  # that a byte of JSON may take as objects
LOOKERS = 32  # threads that look up the files of rows
LOOKED = 64  # files that one of them looks up at a time
PROBED = 16  # files of each batch by which it is seen whether looks take long
SLOW_LOOK_SECONDS = 1e-4  # a look that takes longer is a message; what the kernel knows takes microseconds
AHEAD = 4  # batches of rows whose files are being looked up


def pixart_folder(source: str) -> str:
    """The folder of ``InternData`` and ``InternImgs``, where a source is one of PixArt's, else the source."""
    inside = source.rstrip("/").removesuffix(f"/{PIXART}")
    return inside.removesuffix("InternData") or "." if f"/{inside}".endswith("/InternData") else source


def find_table(files: SourceFiles) -> str | None:
    """Path of the table of a source; None where there is none."""
    if files.only is not None:
        return files.only if files.only.endswith((".jsonl", ".json", ".parquet")) else None
    return next((name for name in (METADATA, PIXART, PIXART_TABLE) if files.look(name)), None)


def table_batches(files: SourceFiles, table: str) -> Iterator[pa.RecordBatch]:
    """A record for each row, in batches of the listing: path (``file_name`` or ``path``), perhaps a label and captions.

    Raises: SourceError: a row is no JSON object with a path, named by its number.
    """
    folder = _pictures_of(files, table)
    kind = _parquet_rows if table.endswith(".parquet") else _lines if table.endswith(".jsonl") else _array
    ahead: deque[tuple[CheckedRows, int, Callable[[], list[FoundFile | None]]]] = deque()
    wrong: SourceError | None = None
    with files.open(table) as file, _LookUps(files) as look_ups:
        try:
            for rows, num_bytes in kind(file, f"source '{shown(files, table)}'"):
                checked = check_rows(rows, folder)
                ahead.append((checked, num_bytes, look_ups.start(checked.paths.to_pylist())))
                while len(ahead) > AHEAD or sum(size for _, size, _ in ahead) > MAX_BATCH_BYTES:
                    before, _, found = ahead.popleft()
                    yield before.batch(files, folder, found())
        except SourceError as error:
            wrong = error  # unless a row before it is wrong as well
        for before, _, found in ahead:
            yield before.batch(files, folder, found())
    if wrong:
        raise wrong


class _LookUps:
    """Looks up the files that rows name: one after the other, or by threads where each look is a message.

    Threads where nobody waits would only hinder each other, so it is measured.
    """

    def __init__(self, files: SourceFiles) -> None:
        self._files, self._is_slow = files, False
        self._pool = ThreadPoolExecutor(LOOKERS, thread_name_prefix="leandit-list")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, paths: list[str]) -> Callable[[], list[FoundFile | None]]:
        """Begin to look up some files; what is returned waits for them and says what they are."""
        first: list[FoundFile | None] = []
        if not self._is_slow:
            started = time.perf_counter()
            first = self._look(paths[:PROBED])
            self._is_slow = time.perf_counter() - started > SLOW_LOOK_SECONDS * len(first)
        rest = paths[len(first) :]
        if not self._is_slow:
            first += self._look(rest)
            return lambda: first
        parts = [self._pool.submit(self._look, rest[i : i + LOOKED]) for i in range(0, len(rest), LOOKED)]
        return lambda: [*first, *(found for part in parts for found in part.result())]

    def _look(self, paths: list[str]) -> list[FoundFile | None]:
        return [self._files.look(path) for path in paths]


def _pictures_of(files: SourceFiles, table: str) -> str:
    """Folder, within the source, to which the rows' paths are relative."""
    return PIXART_PICTURES if table == PIXART_TABLE else ""


def _lines(file: BinaryIO, table: str) -> Iterator[tuple[Rows, int]]:
    """JSON objects, one a line."""
    return _together(_objects_of_lines(file, table))


def _objects_of_lines(file: BinaryIO, table: str) -> Iterator[tuple[Any, str, int]]:
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
                raise no_row(where, error) from error
            yield row, where, len(line)


def _array(file: BinaryIO, table: str) -> Iterator[tuple[Rows, int]]:
    """Objects of one JSON array, decoded one at a time."""
    return _together(_objects_of_array(file, table))


def _objects_of_array(file: BinaryIO, table: str) -> Iterator[tuple[Any, str, int]]:
    text, number = _JsonText(file), 1
    try:
        text.expect("[")
        while text.peek() != "]":
            if number > 1:
                text.expect(",")
            value, num_chars = text.value()
            yield value, f"{table}, row {number}", num_chars
            number += 1
        text.expect("]")
        if text.peek():
            raise ValueError("more follows the list")
    except (ValueError, RecursionError) as error:
        raise no_row(f"{table}, row {number}", error) from error


def _together(objects: Iterable[tuple[Any, str, int]]) -> Iterator[tuple[Rows, int]]:
    """Rows as JSON has them, many at once, and the bytes that they take; only what says something of a picture."""
    values, wheres, num_bytes = [], [], 0
    for value, where, size in objects:
        known = {name: value[name] for name in ROW_NAMES if name in value} if isinstance(value, dict) else value
        values.append(known)
        wheres.append(where)
        num_bytes += size
        if len(values) == TABLE_ROWS or num_bytes > MAX_LINE_BYTES:
            yield Rows(values, wheres.__getitem__), num_bytes * OBJECT_BYTES
            values, wheres, num_bytes = [], [], 0
    if values:
        yield Rows(values, wheres.__getitem__), num_bytes * OBJECT_BYTES


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

    def value(self) -> tuple[Any, int]:
        """Step over a value.

        Returns: it, and the number of its characters.
        Raises: ValueError: it is damaged, or too long; RecursionError: too deep.
        """
        self.peek()
        while True:
            try:
                start = self._position
                found, self._position = self._parse(self._text, start)
                return found, self._position - start
            except ValueError:
                if len(self._text) - self._position > MAX_LINE_BYTES or not self._read_more():
                    raise

    def _read_more(self) -> bool:
        more = self._file.read(READ_BYTES)
        self._text, self._position = self._text[self._position :] + self._decode(more, final=not more), 0
        return bool(more)


def _parquet_rows(file: BinaryIO, table: str) -> Iterator[tuple[Rows, int]]:
    """Rows of a Parquet table, only the columns that say something of a picture, and the bytes of their texts."""
    number = 1
    try:
        parquet = open_parquet(file, ROW_NAMES)
        names = [name for name in ROW_NAMES if name in parquet.schema_arrow.names]
        if not set(names) & set(PATH_NAMES):
            raise no_row(f"{table}, row 1", f"its columns are {', '.join(parquet.schema_arrow.names[:20])}")
        for batch, num_bytes in read_rows(parquet, names, table):
            yield Rows(batch, lambda i, first=number: f"{table}, row {first + i}"), num_bytes
            number += batch.num_rows
    except PARQUET_ERRORS as error:
        raise SourceError(f"{table}: not a readable Parquet file ({error}). Restore it.") from error
