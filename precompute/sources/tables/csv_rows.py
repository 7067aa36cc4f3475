"""Text tables: ``.csv``, ``.tsv``, and Flickr8k's lists, read by Arrow a few MiB at a time.

``csv_layout.py`` detects delimiter, header and columns. Only one block of a table is in memory at a time.
"""

from __future__ import annotations

import ast
import json
import re
import time
import weakref
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from ....datasets.errors import SourceError
from ...config import SourceSection
from ..files.files import SourceFiles, shown
from ..files.folders import Scan
from ..files.placement import LOOKED_NAMES
from ..files.record import CAPTION_NAMES, LABEL_NAMES, MAX_CLASSES, PATH_NAMES, SourceRecord, usable_key
from .columns import columns_note
from .csv_layout import NUMBERED, TextLayout, column_of, read_layout
from .foreign_parquet import TABLE_ROWS
from .rows import Rows, first_names, no_utf8

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

BLOCK_BYTES = 1 << 24  # limits the length of a row
MAX_CLASS_BYTES = 1 << 26  # of all class names
DROP_SECONDS = 1.0  # within which a finished reader is gone
MAX_BROKEN_ROWS = 10_000  # with more, the delimiter is probably wrong
WHOLE_NUMBER = r"^[+-]?[0-9]{1,18}(\.0*)?$"  # pandas writes integers as 3.0 if other cells are empty
LIST_CELL = r"""(?s)^\[\s*["'].*["']\s*\]$"""
TEXT = r""""((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'"""  # in either quotes
STRING, LIST = (
    re.compile(TEXT, re.DOTALL),
    re.compile(rf"\[\s*(?:{TEXT})(?:(?:\s*,\s*|\s+)(?:{TEXT}))*\s*\]", re.DOTALL),
)
ESCAPED = r"""(?s)(?:[^\\]|\\[\\'"nrtxuU])*"""  # as Python escapes strings
SWALLOWED = r"\n[^\n]{1,200}\.(?i:jpe?g|png|webp|gif|bmp)"  # a row inside an unclosed quote


def text_rows(files: SourceFiles, path: str, scan: Scan, broken: list[SourceRecord]) -> Iterator[tuple[Rows, int]]:
    """Batches of rows of a text table, and their sizes in bytes.

    Args:
      scan: receives a note on the columns, and class names if labels are names.
      broken: receives a reject for each row whose number of cells is wrong.
    Raises: SourceError: it is not a text table, or a row is longer than 16 MiB.
    """
    table = f"source '{shown(files, path)}'"
    with files.open(path) as file:
        layout = read_layout(file, table, scan.settings)
    scan.notes.append(columns_note(layout.chosen, layout.columns, scan.companions))
    scan.classes = classes = _class_names(files, path, layout, table)
    encoding_is_told = False
    number = 1
    with files.open(path) as file:
        for batch in _batches(file, layout, list(layout.chosen), table, broken):
            for start in range(0, batch.num_rows, TABLE_ROWS):
                part = batch.slice(start, TABLE_ROWS)
                where = lambda i, first=number: f"{table}, row {first + i}"  # noqa: E731
                values = _row_values(part, layout, classes, broken)
                if isinstance(values, list) and not encoding_is_told:  # a reason why rows are no columns
                    encoding_is_told = True
                    scan.notes += _other_encoding(files, path, f"'{path}'")
                yield Rows(values, where), part.nbytes
                number += part.num_rows


def described_pictures(files: SourceFiles, path: str, settings: SourceSection) -> list[str]:
    """The first pictures that a text table names; empty if it has neither captions nor labels.

    Raises: SourceError: it is not a text table.
    """
    table = f"source '{shown(files, path)}'"
    with files.open(path) as file:
        layout = read_layout(file, table, settings)
    if not set(layout.chosen.values()) & {*CAPTION_NAMES, *LABEL_NAMES}:
        return []
    with files.open(path) as file:
        batch = next(_batches(file, layout, list(layout.chosen), table, []), None)
    if batch is None:
        return []
    return first_names(Rows(_row_values(batch.slice(0, LOOKED_NAMES), layout, None, []), lambda i: table))


def _batches(
    file: BinaryIO, layout: TextLayout, columns: list[str], table: str, broken: list[SourceRecord]
) -> Iterator[pa.RecordBatch]:
    """Some columns as bytes, not stripped."""

    def skip(row: Any) -> str:
        if len(broken) >= MAX_BROKEN_ROWS:
            return "error"
        name = str(row.text).partition(layout.delimiter)[0].strip()
        key, _ = usable_key(f"{name} (row {row.number})")
        detail = f"row {row.number} has {row.actual_columns} cells, the table has {row.expected_columns} columns"
        broken.append(SourceRecord(key, key, problem=("bad_metadata", detail)))
        return "skip"

    reader, is_held = None, weakref.ref(skip)
    numbers = [str(number) for number in range(len(layout.columns))]  # names may be empty, or repeat
    wanted = [numbers[layout.columns.index(column)] for column in columns]
    try:
        reader = pyarrow.csv.open_csv(
            file,
            read_options=pyarrow.csv.ReadOptions(
                use_threads=False,
                block_size=BLOCK_BYTES,
                column_names=numbers,
                skip_rows_after_names=int(layout.has_header),
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=layout.delimiter,
                quote_char='"' if layout.has_quotes else False,
                newlines_in_values=layout.has_quotes,
                invalid_row_handler=skip,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=wanted, column_types=dict.fromkeys(wanted, pa.binary()), check_utf8=False
            ),
        )
        for batch in reader:
            yield pa.RecordBatch.from_arrays(batch.columns, names=columns)
    except pa.ArrowException as error:
        raise SourceError(
            f"{table}: not a readable text table: a row longer than {BLOCK_BYTES >> 20} MiB, an unclosed quote, or "
            f"another delimiter than {layout.delimiter!r} ({str(error)[:200]})."
        ) from error
    finally:
        # A thread of Arrow drops the file and then the handler; if Python is ending by then, the process is aborted.
        del reader, skip
        deadline = time.monotonic() + DROP_SECONDS
        while is_held() and time.monotonic() < deadline:
            time.sleep(0.0005)


def _other_encoding(files: SourceFiles, path: str, where: str) -> list[str]:
    """What to say of the first line that is not UTF-8; empty if all are."""
    with files.open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return [no_utf8(f"{where}, line {number}", error)]
    return []


def _class_names(files: SourceFiles, path: str, layout: TextLayout, table: str) -> list[str] | None:
    """Class names in the order of their labels; None if all labels are numbers.

    Raises: SourceError: too many.
    """
    column = column_of(layout.chosen, LABEL_NAMES)
    if column is None:
        return None
    names: set[bytes] = set()
    with files.open(path) as file:
        for batch in _batches(file, layout, [column], table, []):
            names.update(name.strip() for name in pc.unique(batch[column]).to_pylist())
            if len(names) > MAX_CLASSES or sum(map(len, names)) > MAX_CLASS_BYTES:
                raise SourceError(
                    f"{table}: column '{column}' has {len(names)} different values already, so they are no labels. "
                    "Name another with --set source.label=NAME, or rename the column."
                )
    try:  # strip them as in the rows, where whitespace need not be ASCII
        texts = pc.utf8_trim_whitespace(pa.array(names, pa.binary()).cast(pa.string())).to_pylist()
    except pa.ArrowInvalid as error:
        raise SourceError(f"{_other_encoding(files, path, table)[0]}.") from error
    classes = sorted({*texts} - {""})
    return None if all(re.match(WHOLE_NUMBER, name) for name in classes) else classes


def _row_values(
    batch: pa.RecordBatch, layout: TextLayout, classes: list[str] | None, broken: list[SourceRecord]
) -> pa.RecordBatch | list[Any]:
    """Rows as columns with the names in a row, or as objects if one is not UTF-8 or its captions are lists."""
    names = list(layout.chosen.values())
    try:
        texts = [pc.utf8_trim_whitespace(column.cast(pa.string())) for column in batch.columns]
    except pa.ArrowInvalid:  # broken characters stay, and reject the record later
        cells = [[c.decode("utf-8", "surrogateescape").strip() for c in column.to_pylist()] for column in batch.columns]
        return [_plain_row(dict(zip(names, row, strict=True)), layout, classes) for row in zip(*cells, strict=True)]
    if any(name in CAPTION_NAMES and _is_odd(column) for name, column in zip(names, texts, strict=True)):
        rows = pa.RecordBatch.from_arrays(texts, names=names).to_pylist()
        return [_plain_row(row, layout, classes) for row in rows if not _has_swallowed(row, broken)]
    columns = [_column(name, column, layout, classes) for name, column in zip(names, texts, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _has_swallowed(row: dict[str, str], broken: list[SourceRecord]) -> bool:
    """Whether an unclosed quote made other rows part of this one's caption; adds a reject."""
    is_broken = any(re.search(SWALLOWED, cell) for name, cell in row.items() if name in CAPTION_NAMES)
    if is_broken:
        key, _ = usable_key(next(cell for name, cell in row.items() if name in PATH_NAMES))
        detail = "its caption contains the following rows: a double quote is not closed"
        broken.append(SourceRecord(key, key, problem=("bad_metadata", detail)))
    return is_broken


def _is_odd(texts: pa.Array) -> bool:
    """Whether a caption is a list, or contains other rows."""
    return any(pc.any(pc.match_substring_regex(texts, pattern)).as_py() for pattern in (LIST_CELL, SWALLOWED))


def _column(name: str, texts: pa.Array, layout: TextLayout, classes: list[str] | None) -> pa.Array:
    if name in PATH_NAMES:
        return pc.replace_substring_regex(texts, NUMBERED, "") if layout.is_numbered else texts
    filled = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
    if name in CAPTION_NAMES:
        return filled
    if name in LABEL_NAMES and classes is not None:
        return pc.index_in(filled, pa.array(classes)).cast(pa.int64())
    whole = pc.match_substring_regex(filled, WHOLE_NUMBER)
    numbers = pc.replace_substring_regex(pc.if_else(whole, filled, None), r"^\+|\..*$", "")
    return numbers.cast(pa.int64())


def _plain_row(row: dict[str, str], layout: TextLayout, classes: list[str] | None) -> dict[str, Any]:
    """A row as a JSON object."""
    plain: dict[str, Any] = {}
    for name, cell in row.items():
        if name in PATH_NAMES:
            plain[name] = re.sub(NUMBERED, "", cell) if layout.is_numbered else cell
        elif not cell:
            continue
        elif name in CAPTION_NAMES:
            plain[name] = cell_texts(cell)
        elif name in LABEL_NAMES and classes is not None:
            plain[name] = classes.index(cell) if cell in classes else cell
        elif re.match(WHOLE_NUMBER, cell):
            plain[name] = int(cell.partition(".")[0])
    return plain


def cell_texts(cell: str) -> str | list[str]:
    """Captions of a cell: a text, or a list of texts as written by JSON, Python or numpy."""
    if not LIST.fullmatch(cell):
        return cell
    try:
        return [str(text) for text in json.loads(cell)]
    except ValueError:  # Python's quotes
        return [_python_text(match[0]) for match in STRING.finditer(cell)]


def _python_text(quoted: str) -> str:
    """The value of a Python string literal, with escapes such as \\n and \\xa0."""
    try:
        if re.fullmatch(ESCAPED, quoted):
            return ast.literal_eval(quoted)
    except (SyntaxError, ValueError):  # it contains newlines, or an incomplete escape
        pass
    return re.sub(r"\\(.)", r"\1", quoted[1:-1])
