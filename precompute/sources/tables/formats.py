"""Loads a table into DuckDB: CSV, JSON lines, a JSON list, COCO's captions, Parquet; all as rows of ``values.py``."""

from __future__ import annotations

import csv
import io
import os
import re
from dataclasses import dataclass

import duckdb
import pyarrow.parquet as pq

from ....datasets.errors import SourceError
from ...config import SourceSection
from ..files.files import SourceFiles
from ..files.folders import Scan
from ..files.record import MAX_KEY_CHARS, SourceRecord, is_image, usable_key
from ..listing.duck import MEMORY_MIB, identifier, literal
from .columns import Roles, choose_columns
from .values import CELLS, COCO, JSON, parquet_values, row_columns

SNIFFED_BYTES = 1 << 18  # of a text table, to find the delimiter
MAX_COLUMNS = 4096
MAX_ROW_BYTES = 1 << 24
MAX_BROKEN_ROWS = 10_000  # with more, the delimiter is probably wrong
DELIMITERS = (",", "\t", ";", "|")
MAX_COCO_BYTES = 1 << 30
COCO_MEMORY = 12  # times the size of the file, which is parsed as one object
BROKEN = {
    "UNQUOTED VALUE": "a double quote is not closed, or text follows it",
    "INVALID ENCODING": "not UTF-8",
    "LINE SIZE OVER MAXIMUM": f"longer than {MAX_ROW_BYTES >> 20} MiB",
}


def load_table(
    connection: duckdb.DuckDBPyConnection, files: SourceFiles, table: str, path: str, scan: Scan
) -> list[SourceRecord]:
    """Load a table of any format as ``loaded``; adds notes.

    Args:
      table: path within the source.
      path: by which DuckDB opens it.
    Returns: rejects of rows that are no rows of the table.
    Raises: SourceError: it is no such table.
    """
    where = f"source '{files.shown(table)}'"
    companions = list(scan.companions.values())
    if is_text_table(table):
        return _load_cells(connection, files, table, path, scan)
    if table.endswith(".parquet"):
        names = pq.read_schema(path).names
        roles, note = choose_columns(names, scan.settings, where, companions)
        described = connection.execute("DESCRIBE SELECT * FROM read_parquet(?)", [path]).fetchall()
        values = parquet_values({identifier(name): kind for name, kind, *_ in described})
        source = "read_parquet(?, file_row_number = true)"
        columns = row_columns(roles, values, "file_row_number")
    elif table.endswith(".json") and _first_letter(files, table) == "{":
        if companions:
            raise SourceError(
                f"{where}: [companions.{next(iter(scan.companions))}] needs a table with a column for it; COCO's list "
                "of captions has none. Write a JSONL, CSV or Parquet table."
            )
        scan.notes += _load_coco(connection, path, where)
        return []
    else:
        form = "newline_delimited" if table.endswith(".jsonl") else "array"
        limits = f"format = '{form}', maximum_object_size = {MAX_ROW_BYTES}, ignore_errors = {form != 'array'}"
        if form == "array" and _last_letter(files, table) != "]":
            raise SourceError(f"{where}: a JSON list without its end, or not a list of objects. Restore it.")
        first = connection.execute(
            f"SELECT json_keys(json) FROM read_json_objects(?, {limits}) WHERE json_type(json) = 'OBJECT' LIMIT 1",
            [path],
        ).fetchone()
        if first is None:
            raise SourceError(f"{where}: it has no JSON object. Expected some with 'file_name' (or 'path') as text.")
        roles, note = choose_columns(first[0], scan.settings, where, companions, may_vary=True)
        wanted = ", ".join(f"{literal(name)}: 'JSON'" for name in roles.names)
        cells = ", ".join(
            f"nullif({column}::VARCHAR, 'null')::JSON AS {column}" for column in map(identifier, roles.names)
        )
        source = f"""(SELECT row_number() OVER () - 1 AS "leandit position", {cells}
        FROM read_json(?, {limits}, columns = {{{wanted}}}))"""
        columns = row_columns(roles, JSON, '"leandit position"')
    scan.notes.append(note)
    connection.execute(f"CREATE TEMP TABLE loaded AS SELECT {columns} FROM {source}", [path])
    return []


def memory_mib(files: SourceFiles, table: str, path: str) -> int:
    """Memory that loading a table may take.

    Raises: SourceError: COCO's captions of more than a GiB.
    """
    size = os.path.getsize(path)
    if not table.endswith(".json") or _first_letter(files, table) != "{":
        return MEMORY_MIB
    if size > MAX_COCO_BYTES:
        raise SourceError(
            f"source '{files.shown(table)}': {size >> 20} MiB; a JSON object of at most {MAX_COCO_BYTES >> 20} MiB is "
            "read. Write it as JSONL, one image a line."
        )
    return MEMORY_MIB + COCO_MEMORY * (size >> 20)


def is_text_table(name: str) -> bool:
    """Whether a file is a text table, by its name."""
    return name.lower().endswith((".csv", ".tsv", ".txt", ".token"))


def _first_letter(files: SourceFiles, table: str) -> str:
    with files.open(table) as file:
        return file.read(1 << 16).decode("utf-8-sig", "replace").lstrip()[:1]


def _last_letter(files: SourceFiles, table: str) -> str:
    with files.open(table, ahead=False) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        return file.read().decode("utf-8", "replace").rstrip()[-1:]


@dataclass(frozen=True)
class TextLayout:
    """The layout of a text table: delimiter, whether cells may be in double quotes, and the columns in the header."""

    delimiter: str
    has_quotes: bool
    columns: list[str]
    beginning: str


def read_layout(files: SourceFiles, table: str) -> TextLayout:
    """Find the delimiter of a text table: the one that makes most columns of its first line.

    Raises: SourceError: it is not UTF-8 text, or empty.
    """
    where = f"source '{files.shown(table)}'"
    with files.open(table) as file:
        data = file.read(SNIFFED_BYTES)
    if b"\0" in data:
        raise SourceError(f"{where}: not UTF-8 text: it has zero bytes. Save it as UTF-8.")
    text = data.decode("utf-8-sig", "replace").lstrip("\r\n")
    if not text.strip():
        raise SourceError(f"{where}: it is empty.")
    line = text.splitlines()[0]
    headers = {mark: [cell.strip() for cell in next(csv.reader([line], delimiter=mark))] for mark in DELIMITERS}
    delimiter = max(DELIMITERS, key=lambda mark: len(headers[mark]))
    if len(headers[delimiter]) > MAX_COLUMNS:
        raise SourceError(f"{where}: {len(headers[delimiter])} columns, at most {MAX_COLUMNS} are read.")
    has_quotes = delimiter in ",;" or _is_quoted(text, delimiter)
    return TextLayout(delimiter, has_quotes, headers[delimiter], text)


class MissingHeader(SourceError):
    """A text table begins with a row.

    Attributes:
      image: that its first row names.
    """

    def __init__(self, message: str, image: str) -> None:
        super().__init__(message)
        self.image = image


def _check_header(layout: TextLayout, where: str) -> None:
    """Raise MissingHeader if the first line is a row, not the names of the columns."""
    cells = re.split(rf"[{''.join(DELIMITERS)}]", layout.beginning.splitlines()[0])
    if image := next((cell for cell in cells if is_image(re.sub(r"#\d+$", "", cell.strip()))), None):
        message = f"{where}: its first line names no columns but the image {image[:80]!r}. Write a header, as: "
        message += "sed -e 's/#[0-9]*\\t/\\t/' -e '1i image\\tcaption' OLD > captions.tsv"
        raise MissingHeader(message, re.sub(r"#\d+$", "", image.strip()) if len(cells) > 1 else "")


def _is_quoted(text: str, delimiter: str) -> bool:
    """Whether all cells that start with a quote are quoted; otherwise quotes are ordinary characters."""
    cells = [cell for line in text.splitlines()[:-1] or [text] for cell in line.split(delimiter) if cell[:1] == '"']
    return bool(cells) and all(re.fullmatch(r'"(?:[^"]|"")*"\s*', cell) for cell in cells)


def described_images(files: SourceFiles, table: str, settings: SourceSection, count: int) -> list[str]:
    """The first images that a text table names; empty if it has neither captions nor labels.

    Raises: SourceError: it is not a text table.
    """
    layout = read_layout(files, table)
    _check_header(layout, f"source '{files.shown(table)}'")
    roles, _ = choose_columns(layout.columns, settings, table, ())
    if not (roles.captions or roles.labels):
        return []
    quoting = csv.QUOTE_MINIMAL if layout.has_quotes else csv.QUOTE_NONE
    rows = csv.reader(io.StringIO(layout.beginning), delimiter=layout.delimiter, quoting=quoting)
    place = layout.columns.index(roles.images[0])
    return [row[place].strip() for row, _ in zip(rows, range(count + 1), strict=False) if len(row) > place][1:]


def _load_cells(
    connection: duckdb.DuckDBPyConnection, files: SourceFiles, table: str, path: str, scan: Scan
) -> list[SourceRecord]:
    where, layout = f"source '{files.shown(table)}'", read_layout(files, table)
    _check_header(layout, where)
    roles, note = choose_columns(layout.columns, scan.settings, where, list(scan.companions.values()))
    scan.notes.append(note)
    number_of = {name: f"c{number}" for number, name in enumerate(layout.columns)}  # names may be empty, or repeat
    numbered = Roles(*(tuple(number_of[name] for name in names) for names in vars(roles).values()))
    columns = ", ".join(f"'c{number}': 'VARCHAR'" for number in range(len(layout.columns)))
    quote = '"' if layout.has_quotes else ""
    connection.execute(
        f"""CREATE TEMP TABLE loaded AS SELECT {row_columns(numbered, CELLS, "position")} FROM (
        SELECT row_number() OVER () - 1 AS position, * FROM read_csv(?, auto_detect = false, header = true, delim = ?,
        quote = ?, escape = ?, nullstr = '\x01', store_rejects = true, rejects_limit = {2 * MAX_BROKEN_ROWS},
        max_line_size = {MAX_ROW_BYTES}, buffer_size = {2 * MAX_ROW_BYTES}, columns = {{{columns}}}))""",
        [path, layout.delimiter, quote, quote],
    )
    broken = connection.execute(
        f"""SELECT line, arg_min(error_type, column_idx), left(any_value(csv_line), {MAX_KEY_CHARS}),
        arg_min(left(error_message, 200), column_idx) FROM reject_errors GROUP BY line ORDER BY line"""
    ).fetchall()
    if len(broken) >= MAX_BROKEN_ROWS:
        raise SourceError(
            f"{where}: {len(broken)} rows or more do not fit, the first at line {broken[0][0]} ({broken[0][3]}). "
            f"Expected {len(layout.columns)} cells a row, with {layout.delimiter!r} between them."
        )
    if encoding := next((line for line, kind, *_ in broken if kind == "INVALID ENCODING"), None):
        scan.notes.append(
            f"'{table}', line {encoding}: expected UTF-8. Convert the table with its own encoding, as: "
            "iconv -f LATIN1 -t UTF-8 OLD > NEW"
        )
    return [
        _broken_row(line, text.strip().partition(layout.delimiter)[0], kind, why) for line, kind, text, why in broken
    ]


def _broken_row(line: int, name: str, kind: str, why: str) -> SourceRecord:
    key, _ = usable_key(f"{name.strip()} (row {line})")
    return SourceRecord(key, key, problem=("bad_metadata", f"line {line}: {BROKEN.get(kind) or why}"))


def _load_coco(connection: duckdb.DuckDBPyConnection, path: str, where: str) -> list[str]:
    """Load COCO's captions, one object with the lists 'images' and 'annotations', joined by the id of the image.

    The file is read once for each list, so that only one of them is in memory as it is parsed.
    """
    lists = {
        "images": "id BIGINT, file_name VARCHAR, height BIGINT, width BIGINT",
        "annotations": "image_id BIGINT, caption VARCHAR",
    }
    for name, fields in lists.items():
        connection.execute(
            f"""CREATE TEMP TABLE {name} AS SELECT generate_subscripts({name}, 1) AS place,
            unnest(coalesce({name}, [NULL]), recursive := true), {name} IS NULL AS is_missing
            FROM read_json(?, format = 'unstructured', records = true,
            maximum_object_size = {os.path.getsize(path) + 1}, columns = {{{name}: 'STRUCT({fields})[]'}})""",
            [path],
        )
    lacking, images, captions, wordless, unused = connection.execute(
        """SELECT (SELECT coalesce(bool_or(is_missing), false) FROM images) OR coalesce(bool_or(is_missing), false),
        (SELECT count(*) FROM images), count(*), count(*) FILTER (caption IS NULL),
        count(*) FILTER (image_id NOT IN (SELECT id FROM images WHERE id IS NOT NULL)) FROM annotations"""
    ).fetchall()[0]
    if lacking or wordless:
        what = "the lists 'images' and 'annotations'" if lacking else "annotations with 'caption'"
        raise SourceError(f"{where}: a JSON object without {what}; expected COCO's captions, or a list of rows.")
    columns = row_columns(Roles(("file_name",), ("caption",), (), ("height", "width"), ()), COCO, "position")
    connection.execute(
        f"""CREATE TEMP TABLE loaded AS SELECT {columns} FROM (
        SELECT row_number() OVER (ORDER BY images.place, annotations.place) - 1 AS position,
        images.* EXCLUDE (is_missing), caption FROM images LEFT JOIN annotations ON id = image_id);
        DROP TABLE images; DROP TABLE annotations"""
    )
    notes = [f"COCO: {images} images, {captions} captions"]
    return notes + ([f"COCO: {unused} captions name no image of the list"] if unused else [])
