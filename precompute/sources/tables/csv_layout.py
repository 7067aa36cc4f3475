"""Detects the layout of a text table from its beginning: delimiter, quotes, header and the roles of the columns."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from typing import BinaryIO

from ....datasets.errors import SourceError
from ...config import SourceSection
from ..files.record import PATH_NAMES, is_picture
from .columns import CAPTIONS, LABELS, PICTURES, choose_columns, shown_columns, usual_columns

SNIFF_BYTES = 1 << 18
MAX_COLUMNS = 4096
DELIMITERS = (",", "\t", ";", "|")
WNID = "wnid"  # column of the classes of ImageNet, if no other is known to hold labels
NUMBERED = r"#[0-9]+$"  # Flickr8k's "NAME.jpg#0", the number of the caption


@dataclass(frozen=True)
class TextLayout:
    """The layout of a text table.

    Args:
      delimiter: between cells.
      has_quotes: cells may be in double quotes, and then contain delimiters and newlines.
      columns: their names; without a header, their numbers from 1, as text.
      has_header: the first line names the columns.
      is_numbered: names of pictures end in #0, #1, ..., the number of the caption.
      chosen: name in a row of each useful column.
    """

    delimiter: str
    has_quotes: bool
    columns: list[str]
    has_header: bool
    is_numbered: bool
    chosen: dict[str, str]


def is_text_table(name: str) -> bool:
    """Whether a file is a text table, by its name."""
    return name.lower().endswith((".csv", ".tsv", ".txt", ".token"))


def read_layout(file: BinaryIO, table: str, settings: SourceSection) -> TextLayout:
    """Detect the layout of a text table from its beginning.

    Args:
      table: for errors.
      settings: may name columns.
    Raises: SourceError: it is not text, or no column names the pictures.
    """
    data = file.read(SNIFF_BYTES)
    if b"\0" in data:
        raise SourceError(f"{table}: not UTF-8 text: it has zero bytes. Save it as UTF-8.")
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
        is_numbered = bool(re.search(NUMBERED, cells[columns.index(column_of(chosen, PATH_NAMES) or "1")]))
        return TextLayout(delimiter, has_quotes and not is_numbered, columns, False, is_numbered, chosen)
    if not settings.label and not usual_columns(cells, LABELS) and WNID in cells:
        settings = settings.model_copy(update={"label": WNID})
    chosen = choose_columns(cells, settings, table)
    if twice := next((name for name in chosen if cells.count(name) > 1), None):
        raise SourceError(f"{table}: two columns are called '{twice}'. Remove or rename one.")
    return TextLayout(delimiter, has_quotes, cells, True, False, chosen)


def _first_cells(text: str, delimiter: str, table: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader(io.StringIO(text), delimiter=delimiter))]
    except (csv.Error, StopIteration) as error:
        raise SourceError(f"{table}: not a text table ({error}).") from error


def _names_pictures(cells: list[str], settings: SourceSection) -> bool:
    """Whether the cells are names of columns, one of which names the pictures."""
    return settings.image in cells if settings.image else bool(usual_columns(cells, PICTURES))


def _is_name(cell: str) -> bool:
    """Whether a cell is the name of a picture."""
    return is_picture(re.sub(NUMBERED, "", cell))


def _is_quoted(text: str, delimiter: str) -> bool:
    """Whether all cells that start with a quote are quoted; otherwise quotes are ordinary characters."""
    cells = [cell for line in text.splitlines()[:-1] or [text] for cell in line.split(delimiter) if cell[:1] == '"']
    return bool(cells) and all(re.fullmatch(r'"(?:[^"]|"")*"\s*', cell) for cell in cells)


def _numbered_columns(cells: list[str], columns: list[str], settings: SourceSection, table: str) -> dict[str, str]:
    """As ``choose_columns``, for a table without a header, whose columns have numbers."""
    if any((settings.image, settings.caption, settings.label)):
        image = settings.image or next(name for name, cell in zip(columns, cells, strict=True) if _is_name(cell))
        return choose_columns(columns, settings.model_copy(update={"image": image}), table)
    chosen = {next(name for name, cell in zip(columns, cells, strict=True) if _is_name(cell)): PICTURES}
    others = [name for name in columns if name not in chosen]
    if len(others) > 1:
        raise SourceError(
            f"{table}: the first line does not name the columns. Name the column of captions with --set "
            f"source.caption=N, counted from 1. The first line: {shown_columns(cells).removeprefix('Its columns: ')}"
        )
    return chosen | dict.fromkeys(others, CAPTIONS)


def column_of(chosen: dict[str, str], names: tuple[str, ...]) -> str | None:
    """The first column with one of these names in a row."""
    return next((column for name in names for column, role in chosen.items() if role == name), None)
