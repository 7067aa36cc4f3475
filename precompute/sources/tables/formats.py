"""Loads a table into DuckDB: CSV, JSON lines, a JSON list, COCO's captions, Parquet; all as rows of ``rows.py``."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from ....datasets.disk.spill import BATCH_ROWS
from ....errors import SourceError
from ...config import SourceSection
from ..files.files import SourceFiles
from ..files.folders import Scan
from ..files.record import SourceRecord, is_image, usable_key
from ..listing.duck import MEMORY_MIB, identifier, literal
from .columns import Roles, choose_columns
from .rows import POSITION, row_columns, text_cell, typed_cell
from .text_rows import MAX_ROW_BYTES, NOT_UTF8, TextRow, choose_quoting, split_rows

SNIFFED_BYTES = 1 << 18  # of a text table, to find the delimiter
MAX_COLUMNS = 4096
MAX_BROKEN_ROWS = 10_000  # with more, the delimiter is probably wrong
MAX_BATCH_CHARS = 1 << 26  # of cells that are loaded at once
DELIMITERS = (",", "\t", ";", "|")
MAX_COCO_BYTES = 1 << 30
COCO_MEMORY = 12  # times the size of the file, which is parsed as one object


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
    if is_text_table(table):
        return _load_text(connection, files, table, path, scan)
    if table.endswith(".parquet"):
        cells, roles = _parquet_cells(connection, files, table, path, scan)
    elif is_coco(files, table):
        cells, roles = _coco_cells(connection, files, table, path, scan)
    else:
        cells, roles = _json_cells(connection, files, table, path, scan)
    columns = row_columns(roles)
    connection.execute(f"CREATE TEMP TABLE loaded AS SELECT {columns} FROM ({cells})")
    return []


def memory_mib(files: SourceFiles, table: str, path: str) -> int:
    """Memory that loading a table may take.

    Raises: SourceError: COCO's captions of more than a GiB.
    """
    if not is_coco(files, table):
        return MEMORY_MIB
    if (size := os.path.getsize(path)) > MAX_COCO_BYTES:
        raise SourceError(
            f"source '{files.shown(table)}': {size >> 20} MiB; a JSON object of at most {MAX_COCO_BYTES >> 20} MiB is "
            "read. Write it as JSONL, one image a line."
        )
    return MEMORY_MIB + COCO_MEMORY * (size >> 20)


def is_text_table(name: str) -> bool:
    """Whether a file is a text table, by its name."""
    return name.lower().endswith((".csv", ".tsv", ".txt", ".token"))


def _choose(columns: list[str], files: SourceFiles, table: str, scan: Scan, *, may_vary: bool = False) -> Roles:
    where = f"source '{files.shown(table)}'"
    roles, note = choose_columns(columns, scan.settings, where, list(scan.companions.values()), may_vary=may_vary)
    scan.notes.append(note)
    return roles


# ------------------------------------------------------------------------------------------------------- Parquet, JSON


def _parquet_cells(
    connection: duckdb.DuckDBPyConnection, files: SourceFiles, table: str, path: str, scan: Scan
) -> tuple[str, Roles]:
    roles = _choose(pq.read_schema(path).names, files, table, scan)
    described = connection.execute("DESCRIBE SELECT * FROM read_parquet(?)", [path]).fetchall()
    kinds = {name: kind for name, kind, *_ in described}
    cells = [f"{typed_cell(identifier(name), kinds[name])} AS {identifier(name)}" for name in roles.names]
    source = f"read_parquet({literal(path)}, file_row_number = true)"
    return f"SELECT file_row_number AS {POSITION}, {', '.join(cells)} FROM {source}", roles


def _json_cells(
    connection: duckdb.DuckDBPyConnection, files: SourceFiles, table: str, path: str, scan: Scan
) -> tuple[str, Roles]:
    where = f"source '{files.shown(table)}'"
    form = "newline_delimited" if table.endswith(".jsonl") else "array"
    limits = f"format = '{form}', maximum_object_size = {MAX_ROW_BYTES}, ignore_errors = {form != 'array'}"
    if form == "array" and _letters(files, table, from_end=True).rstrip()[-1:] != "]":
        raise SourceError(f"{where}: a JSON list without its end, or not a list of objects. Restore it.")
    first = connection.execute(
        f"SELECT json_keys(json) FROM read_json_objects(?, {limits}) WHERE json_type(json) = 'OBJECT' LIMIT 1", [path]
    ).fetchone()
    if first is None:
        raise SourceError(
            f"{where}: it has no JSON object. Expected some with 'file_name' (or 'path') as text"
            f"{_advice_for_lines(files, table) if form != 'array' else '.'}"
        )
    roles = _choose(first[0], files, table, scan, may_vary=True)
    kinds = ", ".join(f"{literal(name)}: 'JSON'" for name in roles.names)
    cells = [f"nullif({name}::VARCHAR, 'null')::JSON AS {name}" for name in map(identifier, roles.names)]
    source = f"read_json({literal(path)}, {limits}, columns = {{{kinds}}})"
    return f"SELECT row_number() OVER () - 1 AS {POSITION}, {', '.join(cells)} FROM {source}", roles


def _advice_for_lines(files: SourceFiles, table: str) -> str:
    """The end of a message on a .jsonl without an object in any line: what it seems to be."""
    letters = _letters(files, table).lstrip()
    if "\0" in letters or letters.startswith("\ufffd"):
        return " in UTF-8, one a line; this is UTF-16 or no text. Convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"
    if letters.startswith("["):
        return ", one a line; this is a list. Rename it to .json, and pass its path as the source."
    return ", one a line." if letters else "; it is empty."


def _letters(files: SourceFiles, table: str, *, from_end: bool = False) -> str:
    """The first or last text of a file."""
    with files.open(table, ahead=False) as file:
        if from_end:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        return file.read(1 << 16).decode("utf-8-sig", "replace")


# ------------------------------------------------------------------------------------------------------- COCO


def is_coco(files: SourceFiles, table: str) -> bool:
    """Whether a table is one JSON object, as COCO's captions are."""
    return table.endswith(".json") and _letters(files, table).lstrip()[:1] == "{"


def _coco_cells(
    connection: duckdb.DuckDBPyConnection, files: SourceFiles, table: str, path: str, scan: Scan
) -> tuple[str, Roles]:
    """COCO's captions: one object with the lists 'images' and 'annotations', joined by the id of the image.

    The file is read once for each list, so that only one of them is in memory as it is parsed.
    """
    where = f"source '{files.shown(table)}'"
    if scan.companions:
        raise SourceError(
            f"{where}: [companions.{next(iter(scan.companions))}] needs a table with a column for it; COCO's list "
            "of captions has none. Write a JSONL, CSV or Parquet table."
        )
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
    lacks_list, num_images, num_captions, num_without_caption, num_unused = connection.execute(
        """SELECT (SELECT coalesce(bool_or(is_missing), false) FROM images) OR coalesce(bool_or(is_missing), false),
        (SELECT count(*) FROM images), count(*), count(*) FILTER (caption IS NULL),
        count(*) FILTER (image_id NOT IN (SELECT id FROM images WHERE id IS NOT NULL)) FROM annotations"""
    ).fetchall()[0]
    if lacks_list or num_without_caption:
        missing = "the lists 'images' and 'annotations'" if lacks_list else "annotations with 'caption'"
        raise SourceError(f"{where}: a JSON object without {missing}; expected COCO's captions, or a list of rows.")
    scan.notes.append(f"COCO: {num_images} images, {num_captions} captions")
    if num_unused:
        scan.notes.append(f"COCO: captions that name no image of the list: {num_unused}")
    cells = [f"to_json({name}) AS {name}" for name in ("file_name", "caption", "height", "width")]
    position = "row_number() OVER (ORDER BY images.place, annotations.place) - 1"
    joined = "images LEFT JOIN annotations ON id = image_id"
    return (
        f"SELECT {position} AS {POSITION}, {', '.join(cells)} FROM {joined}",
        Roles(("file_name",), ("caption",), (), ("height", "width"), ()),
    )


# ------------------------------------------------------------------------------------------------------- text tables


@dataclass(frozen=True)
class TextLayout:
    """The layout of a text table.

    Args:
      delimiter: between cells.
      columns: their names.
      beginning: the first bytes of the file.
      newline: the end of a line.
    """

    delimiter: str
    columns: list[str]
    beginning: bytes
    newline: bytes

    def first_rows(self) -> list[list[str]]:
        """Cells of the first rows, without the names of the columns."""
        file = io.BytesIO(self.beginning)
        rows = split_rows(file, self.delimiter, "doubled", len(self.columns), self.newline)
        return [row.cells for row in islice(rows, 1, None) if row.cells]


def read_layout(files: SourceFiles, table: str) -> TextLayout:
    """Find the delimiter of a text table: the one that makes most columns of its first line, a tab in a .tsv.

    Raises: SourceError: it is not UTF-8 text, or empty.
    """
    where = f"source '{files.shown(table)}'"
    with files.open(table) as file:
        data = file.read(SNIFFED_BYTES)
    newline = b"\r" if b"\r" in data and b"\n" not in data else b"\n"
    text = data.decode("utf-8-sig", "replace").lstrip("\r\n")
    if not text.strip():
        raise SourceError(f"{where}: it is empty.")
    line = re.split(r"[\r\n]", text, maxsplit=1)[0]
    if "\0" in line:
        raise SourceError(f"{where}: not UTF-8 text: it contains NUL bytes. Save it as UTF-8.")
    headers = {mark: [cell.strip() for cell in next(csv.reader([line], delimiter=mark))] for mark in DELIMITERS}
    is_tsv = table.lower().endswith(".tsv") and "\t" in line
    delimiter = "\t" if is_tsv else max(DELIMITERS, key=lambda mark: len(headers[mark]))
    if len(headers[delimiter]) > MAX_COLUMNS:
        raise SourceError(f"{where}: {len(headers[delimiter])} columns, at most {MAX_COLUMNS} are read.")
    return TextLayout(delimiter, headers[delimiter], data, newline)


def image_in_header(layout: TextLayout) -> str:
    """The image that the first line names, if it is a row and not the names of the columns; else an empty text."""
    cells = (re.sub(r"#\d+$", "", cell) for cell in layout.columns)
    return next(filter(is_image, cells), "")


def missing_header(files: SourceFiles, table: str, image: str) -> SourceError:
    """The error of a text table whose first line names an image."""
    return SourceError(
        f"source '{files.shown(table)}': its first line names no columns but the image {image[:80]!r}. Add a header, "
        "for example: sed -e 's/#[0-9]*\\t/\\t/' -e '1i image\\tcaption' OLD > captions.tsv"
    )


def described_images(layout: TextLayout, table: str, settings: SourceSection) -> list[str]:
    """The first images that a text table names; empty if it has neither captions nor labels.

    Raises: SourceError: no column names images.
    """
    with_labels = settings.model_copy(update={"labels": "auto"})  # it names the images although labels are not read
    roles, _ = choose_columns(layout.columns, with_labels, table, ())
    if not (roles.captions or roles.labels):
        return []
    column = layout.columns.index(roles.images[0])
    return [row[column].strip() for row in layout.first_rows() if len(row) > column]


def _load_text(
    connection: duckdb.DuckDBPyConnection, files: SourceFiles, table: str, path: str, scan: Scan
) -> list[SourceRecord]:
    """Load a text table as ``loaded``. Returns: rejects of rows that cannot be read."""
    layout = read_layout(files, table)
    if image := image_in_header(layout):
        raise missing_header(files, table, image)
    roles = _choose(layout.columns, files, table, scan)
    columns = [layout.columns.index(name) for name in roles.names]  # names of others may be empty, or repeat
    quoting, note = choose_quoting(
        path, layout.delimiter, len(layout.columns), layout.columns.index(roles.images[0]), layout.newline
    )
    if note:
        scan.notes.append(f"'{table}': {note}")
    broken: list[TextRow] = []
    with open(path, "rb") as file:
        rows = split_rows(file, layout.delimiter, quoting, len(layout.columns), layout.newline)
        batches = _text_batches(islice(rows, 1, None), columns, broken)
        schema = pa.schema([(f"c{column}", pa.string()) for column in columns] + [("position", pa.int64())])
        connection.register("cells", pa.RecordBatchReader.from_batches(schema, batches))
        cells = [f"{text_cell(f'c{layout.columns.index(name)}')} AS {identifier(name)}" for name in roles.names]
        connection.execute(
            f"""CREATE TEMP TABLE loaded AS SELECT {row_columns(roles)}
            FROM (SELECT position AS {POSITION}, {", ".join(cells)} FROM cells)"""
        )
    _check_broken(broken, files, table, layout, scan)
    return rejects_of(broken)


def _text_batches(rows: Iterator[TextRow], columns: Sequence[int], broken: list[TextRow]) -> Iterator[pa.RecordBatch]:
    """Some columns of the rows of a text table, and the position of each row.

    Args:
      broken: receives the rows that cannot be read, of which no more than MAX_BROKEN_ROWS are looked for.
    """
    names = [*(f"c{column}" for column in columns), "position"]
    texts: list[list[str]] = [[] for _ in columns]
    positions: list[int] = []
    num_chars = 0
    for position, row in enumerate(rows):
        if row.problem:
            broken.append(row)
            if len(broken) >= MAX_BROKEN_ROWS:
                return
            continue
        positions.append(position)
        for values, column in zip(texts, columns, strict=True):
            values.append(row.cells[column])
            num_chars += len(row.cells[column])
        if len(positions) == BATCH_ROWS or num_chars > MAX_BATCH_CHARS:
            yield pa.RecordBatch.from_arrays([*(pa.array(values) for values in texts), pa.array(positions)], names)
            texts = [[] for _ in columns]
            positions = []
            num_chars = 0
    arrays = [pa.array(values, pa.string()) for values in texts]
    yield pa.RecordBatch.from_arrays([*arrays, pa.array(positions, pa.int64())], names)


def rejects_of(broken: Sequence[TextRow]) -> list[SourceRecord]:
    """Rejects of rows of text that cannot be read."""
    rejects = []
    for row in broken:
        name = re.split("[,;|\t]", row.beginning.strip(), maxsplit=1)[0].strip()
        key, _ = usable_key(f"{name} (row {row.line})")
        rejects.append(SourceRecord(key, key, problem=("bad_metadata", f"line {row.line}: {row.problem}")))
    return rejects


def _check_broken(broken: Sequence[TextRow], files: SourceFiles, table: str, layout: TextLayout, scan: Scan) -> None:
    """Explain the rows of a text table that cannot be read. Raises: SourceError: there are too many."""
    if len(broken) >= MAX_BROKEN_ROWS:
        raise SourceError(
            f"source '{files.shown(table)}': {len(broken)} rows or more do not fit, the first at line {broken[0].line} "
            f"({broken[0].problem}). Expected {len(layout.columns)} cells a row, with {layout.delimiter!r} between "
            "them."
        )
    encoding = next((row.line for row in broken if row.problem == NOT_UTF8), None)
    if encoding:
        scan.notes.append(
            f"'{table}', line {encoding}: expected UTF-8. Convert the table from its own encoding, for example: "
            "iconv -f LATIN1 -t UTF-8 OLD > NEW"
        )
