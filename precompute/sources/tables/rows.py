"""Rows of a table to records of a source, in batches.

Nearly all rows are plain: Arrow checks them and arranges their columns, without a Python object for any. Irregular rows
are handled one at a time, which finds their problems. For a plain row both ways agree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ....datasets.errors import SourceError
from ..files.entries import FoundFile
from ..files.files import SourceFiles
from ..files.placement import LOOKED_NAMES, Placement
from ..files.record import (
    CAPTION_NAMES,
    LABEL_NAMES,
    MAX_CAPTION_CHARS,
    MAX_CAPTIONS,
    MAX_CLASSES,
    MAX_KEY_CHARS,
    MAX_SIDE_PX,
    PATH_NAMES,
    SIDES,
    SourceRecord,
    captions_of,
    label_of,
    size_of,
    usable_key,
)
from ..listing.listing import SCHEMA, no_pictures, record_batch
from ..listing.merge import repeated_texts

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

ROW_NAMES = (*PATH_NAMES, *CAPTION_NAMES, *LABEL_NAMES, *SIDES)  # names that describe a picture
NO_PLAIN_PATH = r"(^|/)\.{0,2}(/|$)"  # some part is empty, "." or ".."
PLAIN_TEXT = r"(?s)^[^\pZ\pC](.*[^\pZ\pC])?$"  # does not start or end with possible whitespace
CAPTIONS = pa.list_(pa.string())
UNNAMED = "the row names no picture"
COLUMNS = pa.schema(
    [
        ("name", pa.string()),
        ("label", pa.int64()),
        ("captions", CAPTIONS),
        ("height", pa.int64()),
        ("width", pa.int64()),
    ]
)
IRREGULAR = (pa.ArrowException, OverflowError, UnicodeError, TypeError)  # values that a column of COLUMNS cannot hold


@dataclass(frozen=True)
class Rows:
    """A batch of rows of a table.

    Args:
      values: JSON objects, or a batch of a Parquet file.
      where: location of row i, for errors.
      of_companions: a row may name no picture, which then is its problem.
    """

    values: Sequence[Any] | pa.RecordBatch
    where: Callable[[int], str]
    of_companions: bool = False

    def __len__(self) -> int:
        return len(self.values)

    def columns(self) -> pa.RecordBatch | None:
        """The rows as COLUMNS; None if any row is not representable."""
        try:
            return (
                _columns_of_objects(self.values)
                if isinstance(self.values, Sequence)
                else _columns_of_batch(self.values)
            )
        except IRREGULAR:
            return None

    def some(self, numbers: np.ndarray) -> list[Any]:
        """Single rows as JSON objects."""
        if isinstance(self.values, Sequence):
            return [self.values[i] for i in numbers]
        return self.values.take(pa.array(numbers)).to_pylist()


@dataclass(frozen=True)
class CheckedRows:
    """A batch of rows whose plain ones are checked and wait for their files.

    Args:
      rows: all of them.
      plain: (P,) positions of the plain ones.
      columns: of those, COLUMNS.
      paths: of those, within the source.
    """

    rows: Rows
    plain: np.ndarray
    columns: pa.RecordBatch
    paths: pa.Array

    def batch(self, files: SourceFiles, placement: Placement, found: Sequence[FoundFile | None]) -> pa.RecordBatch:
        """A record for each row, in order, as a batch of the listing.

        Args:
          found: the files of the plain rows.
        Raises: SourceError: a row is not an object with a path.
        """
        there = [i for i, file in enumerate(found) if file and not file.problem]
        plain, columns, paths = self.plain, self.columns, self.paths
        if len(there) < len(found):
            taken = pa.array(there, pa.int64())
            plain, columns, paths = plain[there], columns.take(taken), paths.take(taken)
        batch = _plain_batch(columns, paths, [file for file in found if file and not file.problem])
        if len(plain) == len(self.rows):
            return batch
        irregular = np.setdiff1d(np.arange(len(self.rows)), plain)
        both = pa.Table.from_batches([batch, record_batch(_one_by_one(files, placement, self.rows, irregular))])
        order = np.argsort(np.concatenate([plain, irregular]))
        return both.take(pa.array(order)).combine_chunks().to_batches()[0]


def check_rows(rows: Rows, placement: Placement) -> CheckedRows:
    """Select the plain rows.

    Args:
      placement: of their pictures.
    """
    columns = rows.columns()
    if columns is not None and placement.prefix:
        columns = columns.set_column(0, COLUMNS.field(0), _without_prefix(columns["name"], placement.prefix))
    plain = np.empty(0, np.int64) if columns is None else np.flatnonzero(_is_plain(columns))
    columns = pa.RecordBatch.from_pylist([], COLUMNS) if columns is None else columns.take(pa.array(plain))
    paths = columns["name"]
    if placement.folder:
        paths = pc.binary_join_element_wise(placement.folder, paths, "/")
    if placement.suffix:
        paths = pc.binary_join_element_wise(paths, placement.suffix, "")
    return CheckedRows(rows, plain, columns, paths)


def _without_prefix(names: pa.Array, prefix: str) -> pa.Array:
    return pc.if_else(pc.starts_with(names, prefix), pc.utf8_slice_codeunits(names, len(prefix)), names)


def first_names(rows: Rows) -> list[str]:
    """Names of pictures in the first rows."""
    some = rows.some(np.arange(min(LOOKED_NAMES, len(rows))))
    names = [next((row[name] for name in PATH_NAMES if row.get(name)), None) for row in some if isinstance(row, dict)]
    return [name for name in names if isinstance(name, str)]


def _one_by_one(files: SourceFiles, placement: Placement, rows: Rows, numbers: np.ndarray) -> list[SourceRecord]:
    unnamed = SourceRecord("", "", problem=("bad_metadata", UNNAMED))
    return [
        unnamed if rows.of_companions and _is_unnamed(row) else row_record(files, placement, row, rows.where(i))
        for i, row in zip(numbers.tolist(), rows.some(numbers), strict=True)
    ]


def _is_unnamed(row: Any) -> bool:
    return isinstance(row, dict) and not any(row.get(name) for name in PATH_NAMES)


def row_record(files: SourceFiles, placement: Placement, row: Any, where: str) -> SourceRecord:
    """The record of one row: path (``file_name`` or ``path``), optionally label, captions and size.

    Raises: SourceError: not an object with a path.
    """
    try:
        name = next((row[name] for name in PATH_NAMES if row.get(name) is not None), None)
        if not isinstance(name, str):
            raise TypeError(
                f"'file_name' is {type(name).__name__}; its keys: {', '.join(sorted(map(repr, row)))[:120]}"
            )
    except (AttributeError, TypeError) as error:
        raise no_row(where, error) from error
    name = placement.key(name)
    key, unusable = usable_key(name)
    if unusable:
        return SourceRecord(key, key, problem=unusable)
    inside = os.path.normpath(name)
    if os.path.isabs(inside) or inside.split(os.sep)[0] == "..":
        is_absolute = name.startswith("/")
        problem = (
            "is an absolute path outside the source: see source.root" if is_absolute else "leaves the source folder"
        )
        return SourceRecord(name, name, problem=("bad_metadata", f"file_name {problem}"))
    try:
        label, captions = label_of(row), captions_of(row)
    except UnicodeEncodeError:
        return SourceRecord(name, inside, problem=("bad_metadata", f"{where}: its text is not UTF-8"))
    except (TypeError, ValueError) as error:
        return SourceRecord(name, inside, problem=("bad_metadata", str(error)))
    file = placement.look(files, inside)
    if file is None:
        return SourceRecord(name, inside, problem=("missing_file", f"there is no '{placement.path(inside)}'"))
    return file.record(key=name, label=label, captions=captions, size=size_of(row))


def no_row(where: str, error: object) -> SourceError:
    """The error for a row that describes no picture."""
    return SourceError(f"{where}: needed a JSON object with 'file_name' (or 'path') as text ({str(error)[:200]}).")


def no_utf8(where: str, error: UnicodeDecodeError) -> str:
    """What to say of a table in another encoding."""
    got = error.object[error.start]
    convert = "iconv -f LATIN1 -t UTF-8 OLD > NEW"
    return f"{where}: expected UTF-8, got byte 0x{got:02x}. Convert the table with its own encoding, as: {convert}"


def _columns_of_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Columns of a Parquet file as COLUMNS. Raises: one of IRREGULAR."""
    by_name, nothing = dict(zip(batch.schema.names, batch.columns, strict=True)), pa.nulls(batch.num_rows)
    names = [_text(by_name[name]) for name in PATH_NAMES if name in by_name]
    captions = [_texts(by_name[name]) for name in CAPTION_NAMES if name in by_name]
    captions.append(pa.repeat(pa.scalar([], CAPTIONS), batch.num_rows))
    label = by_name.get("label", by_name.get("cls", nothing))
    label, height, width = [
        _whole(one) for one in (label, by_name.get("height", nothing), by_name.get("width", nothing))
    ]
    columns = [pc.coalesce(*names), label, pc.coalesce(*captions), height, width]
    return pa.RecordBatch.from_arrays(columns, schema=COLUMNS)


def _text(column: pa.Array) -> pa.Array:
    if column.type not in (pa.string(), pa.large_string(), pa.null()):
        raise TypeError(column.type)
    return column.cast(pa.string())


def _texts(column: pa.Array) -> pa.Array:
    if column.type in (CAPTIONS, pa.large_list(pa.string()), pa.list_(pa.large_string())):
        return column.cast(CAPTIONS)
    texts = _text(column)
    offsets = np.cumsum([0, *texts.is_valid().to_numpy(zero_copy_only=False)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), texts.drop_null(), mask=texts.is_null())


def _whole(column: pa.Array) -> pa.Array:
    if not (pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
        raise TypeError(column.type)
    return column.cast(pa.int64())


def _columns_of_objects(rows: Sequence[Any]) -> pa.RecordBatch | None:
    """JSON objects as COLUMNS; None if a value has another type. Raises: one of IRREGULAR."""
    if set(map(type, rows)) != {dict}:
        return None
    names, captions = _first_of(rows, PATH_NAMES), _first_of(rows, CAPTION_NAMES)
    labels = [row.get("label", row.get("cls", -1)) for row in rows]
    nothing = type(None)
    if not (
        set(map(type, names)) == {str}
        and set(map(type, labels)) <= {int, nothing}
        and set(map(type, captions)) <= {str, list, nothing}
    ):
        return None
    lists = [[value] if type(value) is str else value or [] for value in captions]
    sides = [[value if type(value) is int else None for value in (row.get(name) for row in rows)] for name in SIDES]
    values = [names, labels, lists, *sides]
    arrays = [pa.array(value, field.type) for value, field in zip(values, COLUMNS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=COLUMNS)


def _first_of(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Any]:
    """Value of the first present name in each row."""
    values: list[Any] = [None] * len(rows)
    for name in names:
        values = [row.get(name) if value is None else value for row, value in zip(rows, values, strict=True)]
    return values


def _is_plain(columns: pa.RecordBatch) -> np.ndarray:
    """(N,) bool: rows that need no change or message."""
    names, labels, captions = columns["name"], columns["label"], columns["captions"]
    plain = _all(
        pc.less_equal(pc.utf8_length(names), MAX_KEY_CHARS), pc.invert(pc.match_substring_regex(names, NO_PLAIN_PATH))
    )
    plain &= _all(pc.greater_equal(labels, -1), pc.less(labels, MAX_CLASSES)) | labels.is_null().to_numpy(
        zero_copy_only=False
    )
    texts, lengths = captions.flatten(), pc.list_value_length(captions).to_numpy()
    row_of = np.repeat(np.arange(len(columns)), lengths)
    plain_text = _all(
        pc.less_equal(pc.utf8_length(texts), MAX_CAPTION_CHARS), pc.match_substring_regex(texts, PLAIN_TEXT)
    )
    plain[row_of[~plain_text]] = False
    plain[lengths > MAX_CAPTIONS] = False
    if lengths.max(initial=0) > 1:
        plain[row_of[repeated_texts(row_of, texts)]] = False
    return plain


def _all(*conditions: pa.Array) -> np.ndarray:
    """Where all conditions are true and not null."""
    true = [pc.fill_null(condition, False).to_numpy(zero_copy_only=False) for condition in conditions]
    return np.logical_and.reduce(true)


def _plain_batch(columns: pa.RecordBatch, paths: pa.Array, found: Sequence[FoundFile]) -> pa.RecordBatch:
    """Plain rows and their files as a batch of the listing."""
    sides = [pc.fill_null(columns[name], 0).to_numpy() for name in SIDES]
    has_size = np.logical_and.reduce([(side > 0) & (side <= MAX_SIDE_PX) for side in sides])
    nothing = pa.nulls(len(columns), pa.string())
    columns_of_listing = {
        "key": columns["name"],
        "path": paths,
        "offset": np.zeros(len(columns), np.int64),
        "num_bytes": [file.num_bytes for file in found],
        "mtime_ns": [file.mtime_ns for file in found],
        "label": pc.fill_null(columns["label"], -1).cast(pa.int32()),
        "captions": columns["captions"],
        "reason": nothing,
        "detail": nothing,
        "height_px": np.where(has_size, sides[0], 0).astype(np.int32),
        "width_px": np.where(has_size, sides[1], 0).astype(np.int32),
        **no_pictures(len(columns)),
    }
    return pa.RecordBatch.from_pydict(columns_of_listing, SCHEMA)
