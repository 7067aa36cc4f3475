"""Text tables, such as CSV, as rows of cells: a row that cannot be read is a row with a problem, never left out.

Rows are split here rather than by a library, because each line must end up in exactly one row: readers of CSV drop what
an open quote swallows, and lines that are longer than their buffer.
"""

from __future__ import annotations

import re
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Literal, NamedTuple

from ....datasets.disk.spill import named_errors
from ..files.record import MAX_KEY_CHARS, is_image

Quoting = Literal["none", "doubled", "backslash"]
"""Whether cells may be in double quotes, and how a quote inside such a cell is written: as two, or after a backslash.
"""

CHUNK_BYTES = 1 << 20
MAX_ROW_BYTES = 1 << 24
BEGINNING_BYTES = 4 * MAX_KEY_CHARS  # of a line that is too long, for messages
BOM = b"\xef\xbb\xbf"
QUOTES_ARE_TEXT = "\t|"  # delimiters whose tables are often written without any quoting
SPACED = ",;"  # delimiters that people follow with a space, also before a quote
NOT_CLOSED = "a double quote is not closed, or text follows it"
NOT_UTF8 = "not UTF-8"
TOO_LONG = f"longer than {MAX_ROW_BYTES >> 20} MiB"
HAS_NUL = "it contains a NUL byte"
# What may stand inside of a quoted cell.
INSIDE: dict[Quoting, str] = {"doubled": r'(?:[^"]|"")*', "backslash": r'(?:[^"\\]|\\.|\\$|"")*'}
ESCAPED: dict[Quoting, str] = {"doubled": r'"(")', "backslash": r'\\(["\\])|"(")'}
MEANINGS: dict[Quoting, str] = {
    "none": "are part of the text",
    "doubled": "enclose cells",
    "backslash": "enclose cells, and one inside follows a backslash",
}


class TextRow(NamedTuple):
    """A row of a text table.

    Args:
      line: number of its first line, from 1.
      cells: empty if the row has a problem.
      problem: why it cannot be read; empty if it can.
      beginning: of its text, for messages; empty without a problem.
    """

    line: int
    cells: list[str]
    problem: str = ""
    beginning: str = ""


class _Line(NamedTuple):
    """A line of a table: its number from 1, its text without the line end, and why its row cannot be read."""

    number: int
    text: str
    problem: str = ""


class _CellSplitter:
    """Splits the lines of one row into cells.

    Args:
      delimiter: one character.
      quoting: of the table; not "none".
    """

    def __init__(self, delimiter: str, quoting: Quoting) -> None:
        inside, end = INSIDE[quoting], rf" *(?={re.escape(delimiter)}|$)"
        self._delimiter = delimiter
        self._inside = re.compile(inside, re.DOTALL)
        self._end = re.compile(rf'"{end}')
        self._spaced = re.compile(rf' +"({inside})"{end}', re.DOTALL) if delimiter in SPACED else None
        self._escaped = re.compile(ESCAPED[quoting])
        self.reset()

    def reset(self) -> None:
        """Begin a row."""
        self.cells: list[str] = []
        self._open: list[str] | None = None  # the lines so far of a quoted cell

    def feed(self, line: str) -> bool:
        """Split one more line of the row.

        Returns: whether the row is complete: no quote is open.
        Raises: ValueError: text follows a closing quote.
        """
        position = 0
        while True:
            if self._open is None and line.startswith('"', position):
                self._open = []
                position += 1
            if self._open is not None:
                inside = self._inside.match(line, position)
                assert inside, "the pattern matches an empty text"
                self._open.append(inside[0])
                if inside.end() == len(line):
                    return False
                end = self._end.match(line, inside.end())
                if end is None:
                    raise ValueError(NOT_CLOSED)
                self.cells.append(self._unescape("\n".join(self._open)))
                self._open = None
                position = end.end()
            elif self._spaced and (cell := self._spaced.match(line, position)):
                self.cells.append(self._unescape(cell[1]))
                position = cell.end()
            else:
                end_of_cell = line.find(self._delimiter, position)
                end_of_cell = len(line) if end_of_cell < 0 else end_of_cell
                self.cells.append(line[position:end_of_cell])
                position = end_of_cell
            if position == len(line):
                return True
            position += 1  # after the delimiter

    def _unescape(self, cell: str) -> str:
        return self._escaped.sub(lambda match: match[match.lastindex or 0], cell)


def split_rows(
    file: BinaryIO, delimiter: str, quoting: Quoting, num_columns: int, newline: bytes = b"\n"
) -> Iterator[TextRow]:
    """The rows of a text table with their cells, the first included; empty lines are no rows.

    A row whose quotes do not fit ends with its first line, so that an open quote does not swallow the rows after it.

    Args:
      num_columns: cells that a row must have; further empty ones are dropped.
      newline: at the end of each line; a carriage return before it is dropped.
    """
    splitter = None if quoting == "none" else _CellSplitter(delimiter, quoting)
    lines = _lines(file, newline)
    again: deque[_Line] = deque()  # lines after the first of a row whose quotes do not fit
    while True:
        first = again.popleft() if again else next(lines, None)
        if first is None:
            return
        if not first.problem and not first.text.strip():
            continue
        if splitter is None or '"' not in first.text or first.problem == TOO_LONG:
            yield _row([first], first.text.split(delimiter), num_columns)
            continue
        row = [first]
        num_chars = len(first.text)
        problem = ""
        splitter.reset()
        try:
            while not splitter.feed(row[-1].text):
                following = again.popleft() if again else next(lines, None)
                if following is None or following.problem == TOO_LONG or num_chars > MAX_ROW_BYTES:
                    again.extendleft([following] if following else [])
                    problem = NOT_CLOSED
                    break
                row.append(following)
                num_chars += len(following.text)
        except ValueError as error:
            problem = str(error)
        if problem:
            again.extendleft(reversed(row[1:]))
            yield TextRow(first.number, [], first.problem or problem, first.text[:MAX_KEY_CHARS])
        else:
            yield _row(row, splitter.cells, num_columns)


def _row(lines: Sequence[_Line], cells: list[str], num_columns: int) -> TextRow:
    """A row of some lines, or its problem."""
    problem = next((line.problem for line in lines if line.problem), "")
    while len(cells) > num_columns and not cells[-1].strip():
        cells.pop()
    if not problem and len(cells) != num_columns:
        problem = f"{len(cells)} cells, expected {num_columns}"
    if problem:
        return TextRow(lines[0].number, [], problem, lines[0].text[:MAX_KEY_CHARS])
    return TextRow(lines[0].number, cells)


def _lines(file: BinaryIO, newline: bytes) -> Iterator[_Line]:
    """The lines of a file as text, with the problem that the row of each has; of one that is too long the beginning."""
    for number, (line, is_too_long) in enumerate(_raw_lines(file, newline), 1):
        if is_too_long:
            yield _Line(number, line.decode("utf-8", "replace"), TOO_LONG)
            continue
        line = line.removeprefix(BOM) if number == 1 else line
        try:
            text = line.decode("utf-8")
            problem = ""
        except UnicodeDecodeError:
            text = line.decode("utf-8", "replace")
            problem = NOT_UTF8
        yield _Line(number, text.removesuffix("\r"), HAS_NUL if "\0" in text else problem)


def _raw_lines(file: BinaryIO, newline: bytes) -> Iterator[tuple[bytes, bool]]:
    """The lines of a file without their ends, and whether each is too long: then only its beginning is given."""
    pending = b""
    is_too_long = False
    while chunk := file.read(CHUNK_BYTES):
        *lines, pending = (pending + chunk).split(newline)
        for line in lines:
            is_too_long = is_too_long or len(line) > MAX_ROW_BYTES
            yield line[:BEGINNING_BYTES] if is_too_long else line, is_too_long
            is_too_long = False
        is_too_long = is_too_long or len(pending) > MAX_ROW_BYTES
        if is_too_long:
            pending = pending[:BEGINNING_BYTES]
    if pending:
        yield pending, is_too_long


@contextmanager
def without_long_lines(path: str) -> Iterator[tuple[str, list[TextRow]]]:
    """The path of a text file without lines that are too long, and these lines as rows with a problem.

    It is that of the file itself if it has none, else that of a temporary copy.
    """
    with open(path, "rb") as file:
        if not any(is_too_long for _, is_too_long in _raw_lines(file, b"\n")):
            yield path, []
            return
    long_lines: list[TextRow] = []
    with named_errors(f"a copy of '{path}'"), tempfile.TemporaryFile(prefix="leandit-table-") as copy:
        with open(path, "rb") as file:
            for number, (line, is_too_long) in enumerate(_raw_lines(file, b"\n"), 1):
                if is_too_long:
                    long_lines.append(TextRow(number, [], TOO_LONG, line.decode("utf-8", "replace")))
                else:
                    copy.write(line + b"\n")
        copy.flush()
        yield f"/proc/self/fd/{copy.fileno()}", long_lines


@dataclass
class _Reading:
    """How well a table reads with one way of quoting.

    Args:
      num_broken: rows that cannot be read.
      num_images: rows whose name is that of an image.
    """

    quoting: Quoting
    num_broken: int = 0
    num_images: int = 0

    def outcome(self) -> str:
        """What double quotes mean in this way, and what it gives."""
        return f"{MEANINGS[self.quoting]}: {self.num_images:,} images, {self.num_broken:,} broken rows"


def choose_quoting(
    path: str, delimiter: str, num_columns: int, image_column: int, newline: bytes = b"\n"
) -> tuple[Quoting, str]:
    """Choose how a table is quoted, by reading all of it in each way that is possible.

    The way with fewest broken rows is taken; of equals the one with most names of images, since quotes that are only
    text may enclose whole rows; of equals again, quotes enclose cells.

    Args:
      path: of the file.
      image_column: index of the column with the names of the images.
    Returns: the way, and a note if there was a choice.
    """
    has_quotes, has_backslashes = _find_quotes(path)
    possible: list[Quoting] = ["doubled"]
    if delimiter in QUOTES_ARE_TEXT:
        possible.append("none")
    if has_backslashes:
        possible.append("backslash")
    if not has_quotes or len(possible) == 1:
        return "doubled", ""
    readings = []
    for quoting in possible:
        reading = _Reading(quoting)
        with open(path, "rb") as file:
            for row in split_rows(file, delimiter, quoting, num_columns, newline):
                if row.problem:
                    reading.num_broken += 1
                elif is_image(row.cells[image_column].strip()):
                    reading.num_images += 1
        readings.append(reading)
    best = min(readings, key=lambda reading: (reading.num_broken, -reading.num_images))
    if all((r.num_broken, r.num_images) == (best.num_broken, best.num_images) for r in readings):
        return best.quoting, ""
    others = "; ".join(f"if they {reading.outcome()}" for reading in readings if reading is not best)
    return best.quoting, f"double quotes {best.outcome()} ({others})"


def _find_quotes(path: str) -> tuple[bool, bool]:
    """Whether a file has double quotes, and whether it has some after a backslash."""
    has_quotes = has_backslashes = False
    last = b""
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            has_quotes = has_quotes or b'"' in chunk
            has_backslashes = has_backslashes or b'\\"' in last + chunk
            last = chunk[-1:]
    return has_quotes, has_backslashes
