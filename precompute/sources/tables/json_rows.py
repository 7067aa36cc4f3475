"""Tables of JSON: one object a line, or one array of objects, parsed incrementally."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from ....datasets.errors import SourceError
from ..files.folders import Scan
from ..files.record import PATH_NAMES
from .columns import choose_keys, columns_note
from .foreign_parquet import TABLE_ROWS
from .rows import Rows, no_row, no_utf8

MAX_LINE_BYTES = 1 << 24  # of a JSON row
READ_BYTES = 1 << 20
WHITE_SPACE = (" ", "\t", "\r", "\n")
OBJECT_BYTES = 20  # that a byte of JSON may take as objects


def json_lines(file: BinaryIO, table: str, scan: Scan) -> Iterator[tuple[Rows, int]]:
    """JSON objects, one a line."""
    return _together(_objects_of_lines(file, table), table, scan)


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
            except UnicodeDecodeError as error:
                raise SourceError(f"{no_utf8(where, error)}.") from error
            except (ValueError, RecursionError) as error:
                raise no_row(where, error) from error
            yield row, where, len(line)


def json_array(file: BinaryIO, table: str, scan: Scan) -> Iterator[tuple[Rows, int]]:
    """Objects of one JSON array, parsed one at a time."""
    return _together(_objects_of_array(file, table), table, scan)


def _objects_of_array(file: BinaryIO, table: str) -> Iterator[tuple[Any, str, int]]:
    text, number = JsonText(file), 1
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
    except UnicodeDecodeError as error:
        raise SourceError(f"{no_utf8(f'{table}, row {number} or later', error)}.") from error
    except (ValueError, RecursionError) as error:
        raise no_row(f"{table}, row {number}", error) from error


def _together(objects: Iterable[tuple[Any, str, int]], table: str, scan: Scan) -> Iterator[tuple[Rows, int]]:
    """Batches of rows with their sizes in bytes; only columns that describe a picture."""
    values, wheres, num_bytes = [], [], 0
    chosen: dict[str, str] | None = None
    for value, where, size in objects:
        if isinstance(value, dict):
            if chosen is None:
                chosen = choose_keys(list(value), scan.settings, table)
                scan.notes.append(columns_note(chosen, list(value), scan.companions))
            known = {chosen[name]: value[name] for name in chosen if name in value}
            value = known if known.keys() & set(PATH_NAMES) else dict.fromkeys(value)
        values.append(value)
        wheres.append(where)
        num_bytes += size
        if len(values) == TABLE_ROWS or num_bytes > MAX_LINE_BYTES:
            yield Rows(values, wheres.__getitem__), num_bytes * OBJECT_BYTES
            values, wheres, num_bytes = [], [], 0
    if values:
        yield Rows(values, wheres.__getitem__), num_bytes * OBJECT_BYTES


class JsonText:
    """JSON text that is read as far as needed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._text, self._position = file, "", 0
        self._decode, self._parse = codecs.getincrementaldecoder("utf-8-sig")().decode, json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            while self._text[self._position : self._position + 1] in WHITE_SPACE:
                self._position += 1
            if self._position < len(self._text) or not self._read_more():
                return self._text[self._position : self._position + 1]

    def expect(self, character: str) -> None:
        """Skip a character. Raises: ValueError: another one follows."""
        if (found := self.peek()) != character:
            raise ValueError(f"needed {character!r}, got {found!r}")
        self._position += 1

    def value(self) -> tuple[Any, int]:
        """Parse a value.

        Returns: it, and its number of characters.
        Raises: ValueError: malformed, or too long; RecursionError: too deep.
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
