"""Tables of text: ``.csv``, ``.tsv``, and Flickr8k's lists, read by Arrow a few MiB at a time.

The delimiter, whether the first line names the columns, and which column is what are told from the beginning of the
file. Nothing of a table is held but the block that is being read.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from ....datasets.errors import SourceError
from ...config import SourceSection
from ..files.files import SourceFiles, shown
from ..files.folders import Scan
from ..files.placement import LOOKED_NAMES
from ..files.record import CAPTION_NAMES, LABEL_NAMES, MAX_CLASSES, PATH_NAMES, SourceRecord, is_picture, usable_key
from .columns import CAPTIONS, PICTURES, choose_columns, columns_note, shown_columns, usual_columns
from .foreign_parquet import TABLE_ROWS
from .rows import Rows, first_names

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

SNIFF_BYTES = 1 << 18
BLOCK_BYTES = 1 << 24  # a row is shorter
MAX_COLUMNS = 4096
MAX_CLASS_BYTES = 1 << 26  # of all names of classes
MAX_BROKEN_ROWS = 10_000  # more of them are another delimiter
DELIMITERS = (",", "\t", ";", "|")
NUMBERED = r"#[0-9]+$"  # Flickr8k's "NAME.jpg#0", the number of the caption
WHOLE_NUMBER = r"^[+-]?[0-9]{1,18}(\.0*)?$"  # pandas writes whole numbers beside empty cells as 3.0
LIST_CELL = r"""(?s)^\[\s*["'].*["']\s*\]$"""
TEXT = r""""((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'"""  # in either quotes
STRING, LIST = (
    re.compile(TEXT, re.DOTALL),
    re.compile(rf"\[\s*(?:{TEXT})(?:(?:\s*,\s*|\s+)(?:{TEXT}))*\s*\]", re.DOTALL),
)
ESCAPED = r"""(?s)(?:[^\\]|\\[\\'"nrtxuU])*"""  # as Python escapes what it writes
SWALLOWED = r"\n[^\n]{1,200}\.(?i:jpe?g|png|webp|gif|bmp)"  # a row that a quote has swallowed which is not closed


@dataclass(frozen=True)
class TextLayout:
    """How a table of text is written.

    Args:
      delimiter: between cells.
      has_quotes: cells may stand in double quotes, and hold delimiters and new lines then.
      columns: their names; their numbers from 1, as text, where the first line does not name them.
      has_header: the first line names the columns.
      is_numbered: names of pictures end in #0, #1, ..., the number of the caption.
      chosen: what each useful column is called in a row.
    """

    delimiter: str
    has_quotes: bool
    columns: list[str]
    has_header: bool
    is_numbered: bool
    chosen: dict[str, str]


def is_text_table(name: str) -> bool:
    """A file is a table of text by its name."""
    return name.lower().endswith((".csv", ".tsv", ".txt", ".token"))


def read_layout(file: BinaryIO, table: str, settings: SourceSection) -> TextLayout:
    """Find out how a table of text is written, from its beginning.

    Args:
      table: for errors.
      settings: may name columns.
    Raises: SourceError: it is no text, or no column is known to name the pictures.
    """
    data = file.read(SNIFF_BYTES)
    if b"\0" in data:
        raise SourceError(f"{table}: not a table of UTF-8 text, it holds zero bytes. Save it as UTF-8.")
    text = data.decode("utf-8-sig", "replace").lstrip("\r\n")
    if not text.strip():
        raise SourceError(f"{table}: it is empty.")
    by_delimiter = {delimiter: _first_cells(text, delimiter, table) for delimiter in DELIMITERS}

    def fitness(delimiter: str) -> tuple[bool, int]:
        cells = by_delimiter[delimiter]
        return _names_pictures(cells, settings) or any(map(_is_name, cells)), len(cells)

    delimiter = max(DELIMITERS, key=fitness)
    cells = by_delimiter[delimiter]
    if len(cells) > MAX_COLUMNS:
        raise SourceError(f"{table}: {len(cells)} columns, at most {MAX_COLUMNS} are read.")
    has_quotes = delimiter in ",;" or _is_quoted(text, delimiter)
    if not _names_pictures(cells, settings) and any(map(_is_name, cells)):
        columns = [str(number) for number in range(1, len(cells) + 1)]
        chosen = _numbered_columns(cells, columns, settings, table)
        is_numbered = bool(re.search(NUMBERED, cells[columns.index(_column_of(chosen, PATH_NAMES) or "1")]))
        return TextLayout(delimiter, has_quotes and not is_numbered, columns, False, is_numbered, chosen)
    chosen = choose_columns(cells, settings, table)
    if twice := next((name for name in chosen if cells.count(name) > 1), None):
        raise SourceError(f"{table}: two columns are called '{twice}'. Leave one of them out, or rename it.")
    return TextLayout(delimiter, has_quotes, cells, True, False, chosen)


def text_rows(files: SourceFiles, path: str, scan: Scan, broken: list[SourceRecord]) -> Iterator[tuple[Rows, int]]:
    """Rows of a table of text, and the bytes that they take; as ``source_tables`` reads the others.

    Args:
      scan: takes a note of the columns, and the names of classes where labels are names.
      broken: takes a reject for each row with another number of cells than the table has columns.
    Raises: SourceError: it is no such table, or a row is longer than 16 MiB.
    """
    table = f"source '{shown(files, path)}'"
    with files.open(path) as file:
        layout = read_layout(file, table, scan.settings)
    with files.open(path) as file:
        classes = _class_names(file, layout, table)
    scan.classes = classes
    scan.notes.append(columns_note(layout.chosen, layout.columns))
    number = 1
    with files.open(path) as file:
        for batch in _batches(file, layout, list(layout.chosen), table, broken):
            for start in range(0, batch.num_rows, TABLE_ROWS):
                part = batch.slice(start, TABLE_ROWS)
                where = lambda i, first=number: f"{table}, row {first + i}"  # noqa: E731
                yield Rows(_row_values(part, layout, classes, broken), where), part.nbytes
                number += part.num_rows


def described_pictures(files: SourceFiles, path: str, settings: SourceSection) -> list[str]:
    """The first pictures that a table of text names; none where it says neither captions nor labels of them.

    Raises: SourceError: it is no such table.
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


def _first_cells(text: str, delimiter: str, table: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader(io.StringIO(text), delimiter=delimiter))]
    except (csv.Error, StopIteration) as error:
        raise SourceError(f"{table}: not a table of text ({error}).") from error


def _names_pictures(cells: list[str], settings: SourceSection) -> bool:
    """The cells are names of columns, one of which names the pictures."""
    return settings.image in cells if settings.image else bool(usual_columns(cells, PICTURES))


def _is_name(cell: str) -> bool:
    """A cell is the name of a picture."""
    return is_picture(re.sub(NUMBERED, "", cell))


def _is_quoted(text: str, delimiter: str) -> bool:
    """All cells that begin with a quote are quoted; else a quote is a letter as any other."""
    cells = [cell for line in text.splitlines()[:-1] or [text] for cell in line.split(delimiter) if cell[:1] == '"']
    return bool(cells) and all(re.fullmatch(r'"(?:[^"]|"")*"\s*', cell) for cell in cells)


def _numbered_columns(cells: list[str], columns: list[str], settings: SourceSection, table: str) -> dict[str, str]:
    """As ``choose_columns``, of a table whose first line is a row already: columns have numbers."""
    if any((settings.image, settings.caption, settings.label)):
        image = settings.image or next(name for name, cell in zip(columns, cells, strict=True) if _is_name(cell))
        return choose_columns(columns, settings.model_copy(update={"image": image}), table)
    chosen = {next(name for name, cell in zip(columns, cells, strict=True) if _is_name(cell)): PICTURES}
    others = [name for name in columns if name not in chosen]
    if len(others) > 1:
        raise SourceError(
            f"{table}: the first line does not name the columns. Say which is the caption with --set source.caption=N, "
            f"counted from 1. The first line: {shown_columns(cells).removeprefix('Its columns: ')}"
        )
    return chosen | dict.fromkeys(others, CAPTIONS)


def _column_of(chosen: dict[str, str], names: tuple[str, ...]) -> str | None:
    return next((column for name in names for column, role in chosen.items() if role == name), None)


def _batches(
    file: BinaryIO, layout: TextLayout, columns: list[str], table: str, broken: list[SourceRecord]
) -> Iterator[pa.RecordBatch]:
    """Some columns as bytes, with white space at the ends as it is."""

    def skip(row: Any) -> str:
        if len(broken) >= MAX_BROKEN_ROWS:
            return "error"
        name = str(row.text).partition(layout.delimiter)[0].strip()
        key, _ = usable_key(f"{name} (row {row.number})")
        detail = f"row {row.number} has {row.actual_columns} cells, the table has {row.expected_columns} columns"
        broken.append(SourceRecord(key, key, problem=("bad_metadata", detail)))
        return "skip"

    numbers = [str(number) for number in range(len(layout.columns))]  # names may be empty, or come twice
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
            f"{table}: not a readable table of text: a row longer than {BLOCK_BYTES >> 20} MiB, a quote that is not "
            f"closed, or another delimiter than {layout.delimiter!r} ({str(error)[:200]})."
        ) from error


def _class_names(file: BinaryIO, layout: TextLayout, table: str) -> list[str] | None:
    """Names of the classes in the order of their index, where not all labels are numbers.

    Raises: SourceError: there are too many.
    """
    column = _column_of(layout.chosen, LABEL_NAMES)
    if column is None:
        return None
    names: set[bytes] = set()
    for batch in _batches(file, layout, [column], table, []):
        names.update(name.strip() for name in pc.unique(batch[column]).to_pylist())
        if len(names) > MAX_CLASSES or sum(map(len, names)) > MAX_CLASS_BYTES:
            raise SourceError(
                f"{table}: column '{column}' has {len(names)} different values already, so they are no labels. Name "
                "another with --set source.label=NAME, or rename the column."
            )
    try:  # white space at their ends goes as in the rows: it need not be ASCII
        texts = pc.utf8_trim_whitespace(pa.array(names, pa.binary()).cast(pa.string())).to_pylist()
    except pa.ArrowInvalid as error:
        raise SourceError(f"{table}: column '{column}' is not UTF-8. Save the table as UTF-8.") from error
    found = sorted({*texts} - {""})
    return None if all(re.match(WHOLE_NUMBER, name) for name in found) else found


def _row_values(
    batch: pa.RecordBatch, layout: TextLayout, classes: list[str] | None, broken: list[SourceRecord]
) -> pa.RecordBatch | list[Any]:
    """Rows under the names that a row has: as columns, or one by one where one is not UTF-8 or its texts are lists."""
    names = list(layout.chosen.values())
    try:
        texts = [pc.utf8_trim_whitespace(column.cast(pa.string())) for column in batch.columns]
    except pa.ArrowInvalid:  # half of a letter stays, and is found where a record is made of the row
        cells = [[c.decode("utf-8", "surrogateescape").strip() for c in column.to_pylist()] for column in batch.columns]
        return [_plain_row(dict(zip(names, row, strict=True)), layout, classes) for row in zip(*cells, strict=True)]
    if any(name in CAPTION_NAMES and _is_odd(column) for name, column in zip(names, texts, strict=True)):
        rows = pa.RecordBatch.from_arrays(texts, names=names).to_pylist()
        return [_plain_row(row, layout, classes) for row in rows if not _has_swallowed(row, broken)]
    columns = [_column(name, column, layout, classes) for name, column in zip(names, texts, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _has_swallowed(row: dict[str, str], broken: list[SourceRecord]) -> bool:
    """A quote is not closed, so other rows stand in this one's caption: it is a reject."""
    is_broken = any(re.search(SWALLOWED, cell) for name, cell in row.items() if name in CAPTION_NAMES)
    if is_broken:
        key, _ = usable_key(next(cell for name, cell in row.items() if name in PATH_NAMES))
        detail = "its caption holds the rows that follow: a double quote is not closed"
        broken.append(SourceRecord(key, key, problem=("bad_metadata", detail)))
    return is_broken


def _is_odd(texts: pa.Array) -> bool:
    """A caption is a list, or holds other rows."""
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
    """A row as JSON would have it."""
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
    """Captions of a cell: one text, or those of a list of texts as JSON, Python or numpy writes it."""
    if not LIST.fullmatch(cell):
        return cell
    try:
        return [str(text) for text in json.loads(cell)]
    except ValueError:  # Python's quotes
        return [_python_text(match[0]) for match in STRING.finditer(cell)]


def _python_text(quoted: str) -> str:
    """The text of a string as Python writes it, with escapes as \\n and \\xa0."""
    try:
        if re.fullmatch(ESCAPED, quoted):
            return ast.literal_eval(quoted)
    except (SyntaxError, ValueError):  # new lines stand in it, or half an escape
        pass
    return re.sub(r"\\(.)", r"\1", quoted[1:-1])
