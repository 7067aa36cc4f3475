"""The records and captions tables of a store, searched and read by DuckDB; they stay on disk.

What a user types is never part of the SQL: it is a parameter of the query, or selects one of the known columns and
operators. The database opens no file but the two tables, loads no extension, and its configuration is locked.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from ....datasets.errors import DamageError, RecipeError, RowOutOfRange
from ....datasets.format.layout import CAPTIONS, RECORDS, revision_prefix
from ....datasets.format.table_schemas import records_schema
from ....datasets.store import LatentStore, Record
from .query import Condition, Query

PAGE = 24  # records
MAX_SECONDS = 30  # of a query
CONFIG = {
    "memory_limit": "512MB",  # what is beyond it goes to temporary files
    "max_temp_directory_size": "8GB",
    "max_execution_time": MAX_SECONDS * 1000,
    "threads": min(4, os.cpu_count() or 1),
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "python_enable_replacements": False,  # a table's name never means a variable of Python
}
LOCK = (
    f"SET enable_external_access = false; SET max_execution_time = {MAX_SECONDS * 1000}; SET lock_configuration = true"
)
FIELDS = ("bucket", "status", "reason")  # of a query: columns that have this very value
NULL_TESTS = {"=": "IS NULL", "!=": "IS NOT NULL"}
DIRECTIONS = {"up": "ASC", "down": "DESC"}
HAS_WORDS = """(({keys}) OR label IN (SELECT label FROM classes WHERE {names}) OR position IN (
    SELECT position FROM (SELECT position, unnest(caption_ids) AS caption FROM records)
    WHERE caption IN (SELECT position FROM captions WHERE {texts})))"""
FIND = """
    WITH hits AS {materialized} (SELECT position, {rank} AS rank FROM records WHERE {conditions})
    SELECT (SELECT count(*) FROM hits) AS num_hits,
      array(SELECT position FROM hits ORDER BY rank {direction} NULLS LAST, position LIMIT $size OFFSET $first) AS page
"""


class StoreTables:
    """The tables of a store. Thread-safe.

    Args:
      store: opened. Tables of an incomplete one are no files yet: they are copied into the database.
    Raises: DamageError: a table is not that of the manifest.
    """

    def __init__(self, store: LatentStore) -> None:
        self._store = store
        self._resources = contextlib.ExitStack()
        folder = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="leandit-view-"))
        self._database = duckdb.connect(config={**CONFIG, "temp_directory": folder})
        self._resources.callback(self._database.close)
        names = store.class_names
        described = [names.describe(label) for label in range(len(names))]
        self._copy("classes", pa.table({"label": np.arange(len(names)), "name": pa.array(described, pa.string())}))
        self._open_files() if store.complete else self._copy_tables()
        self._database.execute(LOCK)
        self.num_records: int = self._select("SELECT count(*) AS n FROM records")[0]["n"]

    def _open_files(self) -> None:
        self._store.record_columns(("revision",))  # raises DamageError, as does the next line
        for text in self._store.texts[:1]:
            self._store.caption_checksums(text)
        paths = {}
        for file_name in (RECORDS, CAPTIONS):
            path = self._store.path / f"{revision_prefix(self._store.revision)}{file_name}"
            descriptor = os.open(path, os.O_RDONLY)
            self._resources.callback(os.close, descriptor)
            paths[file_name] = f"/dev/fd/{descriptor}"  # DuckDB would take some letters of a path for a pattern
        self._database.execute("SET allowed_paths = ?", [list(paths.values())])
        for name, path in (("records", paths[RECORDS]), ("captions", paths[CAPTIONS])):
            rows = f"read_parquet('{path}', file_row_number = true)"
            self._database.execute(f"CREATE VIEW {name} AS SELECT * RENAME (file_row_number AS position) FROM {rows}")

    def _copy_tables(self) -> None:
        for name, table in (("records", self._store.record_columns(None)), ("captions", self._store.captions)):
            self._copy(name, table.append_column("position", pa.array(np.arange(table.num_rows))))

    def _copy(self, name: str, table: pa.Table) -> None:
        self._database.register("arrow_table", table)
        self._database.execute(f"CREATE TABLE {name} AS FROM arrow_table")
        self._database.unregister("arrow_table")

    def close(self) -> None:
        """Close the files and delete temporary ones."""
        self._resources.close()

    @functools.cached_property
    def columns(self) -> dict[str, pa.DataType]:
        """Type of each column of the records that can be compared and sorted by."""
        return {
            field.name: field.type for field in records_schema(self._store.spec) if not pa.types.is_list(field.type)
        }

    def counts(self, column: str) -> dict[str, int]:
        """Number of records with each value of a column, most first; without nulls."""
        name = self._quoted(column)
        rows = self._select(
            f"SELECT {name} AS value, count(*) AS n FROM records WHERE {name} IS NOT NULL GROUP BY 1 ORDER BY 2 DESC, 1"
        )
        return {row["value"]: row["n"] for row in rows}

    def find(self, query: Query) -> tuple[int, list[int]]:
        """Number of records that a query finds, and positions in the records table of those on its page, in its order.

        Raises: RecipeError: an unknown column, class or value; or the search takes too long.
        """
        words, values = query.words, {name: value for name, value in asdict(query).items() if name in FIELDS and value}
        conditions = ["true", *(f"{name} = ${name}" for name in values)]
        if words:
            values |= _parameters(words)
            holds = {"keys": _holds("key", words), "names": _holds("name", words), "texts": _holds("text", words)}
            conditions.append(HAS_WORDS.format(**holds))
        if query.class_:
            conditions.append("label = $label")
            values["label"] = self._store.class_names.find(query.class_)
        for i, condition in enumerate(query.conditions):
            sql, value = self._comparison(condition, f"$value{i}")
            conditions.append(sql)
            values |= {} if value is None else {f"value{i}": value}
        sql = FIND.format(
            # Both the count and the page need the hits: without words, finding them twice is faster than keeping them.
            materialized="MATERIALIZED" if words else "NOT MATERIALIZED",
            rank=self._quoted(query.sort) if query.sort else "position",
            direction=DIRECTIONS[query.order] if query.sort else "ASC",
            conditions=" AND ".join(conditions),
        )
        hits = self._select(sql, values | {"size": PAGE, "first": (query.page - 1) * PAGE})[0]
        return hits["num_hits"], hits["page"]

    def rows(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        """Rows of the records table, each with its ``position``.

        Raises: RowOutOfRange.
        """
        for position in positions:
            if not 0 <= position < self.num_records:
                where = f"store '{self._store.path}'"
                raise RowOutOfRange(f"{where}: record {position}, there are {self.num_records}")
        rows = self._at("SELECT * FROM records", positions)
        return [rows[position] for position in positions]

    def record(self, position: int) -> Record:
        """The record at a position of the records table; of a stored one with its row in ``store.latents(bucket)``.

        Raises: RowOutOfRange.
        """
        values = self.rows([position])[0]
        if values["status"] == "stored":
            index = self._store.index(values["bucket"])
            values["row"] = int(index.rows[index.records == position][0])
        values |= {"index": position, "caption_ids": tuple(values["caption_ids"] or ())}
        return Record(**{name: values[name] for name in Record.__dataclass_fields__})

    def captions(self, ids: Iterable[int], words: Sequence[str] = ()) -> dict[int, dict[str, Any]]:
        """Rows of the captions table by their id; ``is_hit``: whether the text has all words of a query."""
        sql = f"SELECT *, {_holds('text', words)} AS is_hit FROM captions"
        return self._at(sql, list(ids), **_parameters(words))

    def _at(self, sql: str, positions: Sequence[int], **values: str) -> dict[int, dict[str, Any]]:
        """Rows by their position."""
        where = " WHERE position IN (SELECT unnest($positions::BIGINT[]))"
        rows = self._select(sql + where, {"positions": list(positions), **values}) if positions else []
        return {row["position"]: row for row in rows}

    def _quoted(self, column: str) -> str:
        """A column in SQL.

        Raises: RecipeError: there is no such column.
        """
        if column not in self.columns:
            raise RecipeError(f"no column {column!r}. There are: {', '.join(self.columns)}.")
        return f'"{column}"'

    def _comparison(self, condition: Condition, parameter: str) -> tuple[str, Any]:
        """A condition in SQL, and the value of its parameter; None without one."""
        column, operator, text = condition  # the operator is one of seven
        name = self._quoted(column)
        if text == "null":
            if operator not in NULL_TESTS:
                raise RecipeError(f"where {column} {operator} null: expected = or !=.")
            return f"{name} {NULL_TESTS[operator]}", None
        if operator == "~":
            return f"contains(lower({name}::VARCHAR), lower({parameter}))", text
        return f"{name} {operator} {parameter}", _value(condition, self.columns[column])

    def _select(self, sql: str, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Rows of a query, by the names of their columns."""
        with self._database.cursor() as cursor:
            try:
                cursor.execute(sql, values)
                names = [column[0] for column in cursor.description or ()]
                return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
            except duckdb.InterruptException as error:
                raise RecipeError(
                    f"search: it takes longer than {MAX_SECONDS} s. Use fewer or longer words."
                ) from error
            except duckdb.Error as error:
                raise DamageError(f"store '{self._store.path}': its tables cannot be searched ({error}).") from error


def _holds(column: str, words: Sequence[str]) -> str:
    """Whether a text has all words, whatever the case."""
    return " AND ".join(["true", *(f"contains(lower({column}), lower(${name}))" for name in _parameters(words))])


def _parameters(words: Sequence[str]) -> dict[str, str]:
    """Names of the parameters for words."""
    return {f"word{i}": word for i, word in enumerate(words)}


def _value(condition: Condition, kind: pa.DataType) -> Any:
    """The value of a condition, rounded and bounded as its column.

    Raises: RecipeError.
    """
    if pa.types.is_string(kind):
        return condition.value
    read: Callable[[str], Any] = float if pa.types.is_floating(kind) else functools.partial(int, base=0)
    try:
        return pa.scalar(read(condition.value), kind).as_py()
    except (ValueError, OverflowError, pa.ArrowException) as error:
        raise RecipeError(f"where {condition.column}: {condition.value!r} is no {kind}.") from error
