"""Search of the records and captions tables of a store, by DuckDB.

What a user types is never part of the SQL: it is a parameter, or selects one of the known columns and operators. The
database opens no file but the two tables, loads no extension, and its configuration is locked.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any
from urllib.parse import urlencode

import duckdb
import numpy as np
import pyarrow as pa

from ....datasets.format.layout import CAPTIONS, RECORDS
from ....datasets.format.table_schemas import records_schema
from ....datasets.store import LatentStore, Record
from ....errors import DamageError, RecipeError, RowOutOfRange

CONDITION = re.compile(r"\s*([A-Za-z0-9_-]+)\s*(>=|<=|!=|=|<|>|~)\s*(.*?)\s*")
WORD = re.compile(r'"([^"]*)"|([^\s"]+)')
MAX_CHARS, MAX_WORDS = 1000, 32  # of a value in an address; of a search
PAGE = 24  # records
MAX_SECONDS = 30  # of a query
COPIED_ROWS, COPIED_BYTES = 4_000_000, 256_000_000  # of texts that are kept in memory, at most
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
TEXTS = (("keys", "records", "key"), ("texts", "captions", "text"), ("classes", "class_names", "name"))  # searched
FIELDS = ("bucket", "status", "reason")  # of a query: columns that have this very value
NULL_TESTS = {"=": "IS NULL", "!=": "IS NOT NULL"}
DIRECTIONS = {"up": "ASC", "down": "DESC"}
IS_SMALL = """
    SELECT (SELECT count(*) FROM {table}) <= {rows}
      AND (SELECT sum(strlen({column})) FROM (SELECT {column} FROM {table} LIMIT {rows})) <= {bytes}
"""
HAS_WORDS = """position IN (
    SELECT position FROM keys WHERE {has_words} UNION ALL
    SELECT position FROM records WHERE label IN (SELECT position FROM classes WHERE {has_words}) UNION ALL
    SELECT position FROM (SELECT position, unnest(caption_ids) AS caption FROM records)
    WHERE caption IN (SELECT position FROM texts WHERE {has_words}))
"""
FIND = """
    WITH hits AS {materialized} (SELECT position, {rank} AS rank FROM records WHERE {conditions})
    SELECT (SELECT count(*) FROM hits) AS num_hits,
      array(SELECT position FROM hits ORDER BY rank {direction} NULLS LAST, position LIMIT $size OFFSET $first) AS page
"""


@dataclass(frozen=True)
class Query:
    """Which records, in which order, as the address of a page says it.

    Args:
      q: words that one caption, the class name or the key contains.
      where: conditions joined by "and", such as ``height_px >= 512``; "~" means contains.
      bucket, class_, status, reason: values of these; "" for any.
      sort: a column; "" for the order of the table.
      order: "up" or "down".
      page: from 1.
    """

    q: str = ""
    where: str = ""
    bucket: str = ""
    class_: str = ""
    status: str = ""
    reason: str = ""
    sort: str = ""
    order: str = "up"
    page: int = 1

    @staticmethod
    def parse(parameters: Mapping[str, str]) -> Query:
        """Read the parameters of an address.

        Raises: RecipeError: an unknown parameter, or an invalid value.
        """
        known = {field.name for field in fields(Query)}
        for name, value in parameters.items():
            if name not in known:
                raise RecipeError(f"no parameter {name!r}. Available: {', '.join(sorted(known))}.")
            if len(value) > MAX_CHARS:
                raise RecipeError(f"{name}: {len(value)} characters, expected at most {MAX_CHARS}.")
        values: dict[str, Any] = {"page": "1", **parameters}
        if not re.fullmatch("[1-9][0-9]{0,8}", values["page"]):
            raise RecipeError(f"page {values['page']!r}: expected a number of at least 1.")
        if values.get("order", "up") not in DIRECTIONS:
            raise RecipeError(f"order {values['order']!r}: expected one of {', '.join(DIRECTIONS)}.")
        values["page"] = int(values["page"])
        return Query(**values)

    @property
    def words(self) -> list[str]:
        """The words of ``q``; "several words" in quotes are one.

        Raises: RecipeError: too many.
        """
        words = [quoted or word for quoted, word in WORD.findall(self.q)]
        words = list(dict.fromkeys(word for word in words if word.strip()))
        if len(words) > MAX_WORDS:
            raise RecipeError(f"search: {len(words)} words, expected at most {MAX_WORDS}.")
        return words

    @property
    def conditions(self) -> list[tuple[str, ...]]:
        """Column, operator and value of each condition of ``where``.

        Raises: RecipeError.
        """
        conditions = []
        for part in re.split(r"\s+and\s+", self.where.strip()) if self.where.strip() else ():
            if not (match := CONDITION.fullmatch(part)):
                raise RecipeError(
                    f"where {part!r}: expected COLUMN, one of = != < <= > >= ~ (contains) and a value, such as "
                    "height_px >= 512; several joined by 'and'."
                )
            conditions.append(match.groups())
        return conditions

    def link(self, **changes: Any) -> str:
        """The address of this query with some changes; page 1 unless ``page`` is one of them."""
        values = asdict(replace(self, **{"page": 1} | changes))
        return "?" + urlencode({name: value for name, value in values.items() if value != getattr(Query(), name)})


class StoreTables:
    """The tables of a store. Thread-safe.

    They stay on disk. Keys and captions are also kept in memory, in lower case, unless they are large.

    Args:
      store: opened. Tables of an incomplete one are no files yet: they are copied into the database.
    Raises: DamageError: a table is not that of the manifest.
    """

    def __init__(self, store: LatentStore) -> None:
        self._store, self._resources = store, contextlib.ExitStack()
        folder = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="leandit-view-"))
        self._database = duckdb.connect(config={**CONFIG, "temp_directory": folder})
        self._resources.callback(self._database.close)
        names = store.class_names
        described = pa.array([names.describe(label) for label in range(len(names))], pa.string())
        self._copy("class_names", pa.table({"name": described}))
        if store.complete:
            self._open_files()
        else:
            self._copy("records", store.record_columns(None))
            self._copy("captions", store.captions)
        for name, table, column in TEXTS:
            sql = IS_SMALL.format(table=table, column=column, rows=COPIED_ROWS, bytes=COPIED_BYTES)
            kind = "TABLE" if self._database.execute(sql).fetchall()[0][0] else "VIEW"
            self._database.execute(f"CREATE {kind} {name} AS SELECT position, lower({column}) AS text FROM {table}")
        self._database.execute(LOCK)
        self.num_records: int = self._select("SELECT count(*) AS n FROM records")[0]["n"]

    def _open_files(self) -> None:
        for name, file_name in (("records", RECORDS), ("captions", CAPTIONS)):
            descriptor = os.open(self._store.table_file(file_name, texts=False), os.O_RDONLY)
            self._resources.callback(os.close, descriptor)
            opened = f"/dev/fd/{descriptor}"  # DuckDB would take some letters of a path for a pattern
            self._database.execute("SET allowed_paths = list_append(current_setting('allowed_paths'), ?)", [opened])
            rows = f"read_parquet('{opened}', file_row_number = true)"
            self._database.execute(f"CREATE VIEW {name} AS SELECT * RENAME (file_row_number AS position) FROM {rows}")

    def _copy(self, name: str, table: pa.Table) -> None:
        self._database.register("arrow", table.append_column("position", pa.array(np.arange(table.num_rows))))
        self._database.execute(f"CREATE TABLE {name} AS FROM arrow")
        self._database.unregister("arrow")

    def close(self) -> None:
        """Close the files and delete temporary ones."""
        self._resources.close()

    @functools.cached_property
    def columns(self) -> dict[str, pa.DataType]:
        """Type of each column of the records that can be compared and sorted by."""
        schema = records_schema(self._store.spec)
        return {field.name: field.type for field in schema if not pa.types.is_list(field.type)}

    def counts(self, column: str) -> dict[str, int]:
        """Number of records with each value of a column, most first; without nulls."""
        name = self._quoted(column)
        sql = (
            f"SELECT {name} AS value, count(*) AS n FROM records WHERE {name} IS NOT NULL GROUP BY 1 ORDER BY 2 DESC, 1"
        )
        return {row["value"]: row["n"] for row in self._select(sql)}

    def find(self, query: Query) -> tuple[int, list[int]]:
        """Number of records that a query finds, and positions in the records table of those on its page, in its order.

        Raises: RecipeError: an unknown column, class or value; or the search takes too long.
        """
        values = {name: value for name, value in asdict(query).items() if name in FIELDS and value}
        conditions = ["true", *(f"{name} = ${name}" for name in values)]
        if words := _words(query.words):
            conditions.append(HAS_WORDS.format(has_words=_has("text", words)))
        if query.class_:
            conditions.append("label = $label")
            values["label"] = self._store.class_names.find(query.class_)
        for i, condition in enumerate(query.conditions):
            sql, value = self._comparison(*condition, parameter=f"$value{i}")
            conditions.append(sql)
            values |= {} if value is None else {f"value{i}": value}
        sql = FIND.format(
            # Both the count and the page need the hits: without words, finding them twice is faster than keeping them.
            materialized="MATERIALIZED" if words else "NOT MATERIALIZED",
            rank=self._quoted(query.sort) if query.sort else "position",
            direction=DIRECTIONS[query.order] if query.sort else "ASC",
            conditions=" AND ".join(conditions),
        )
        hits = self._select(sql, values | words | {"size": PAGE, "first": (query.page - 1) * PAGE})[0]
        return hits["num_hits"], hits["page"]

    def rows(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        """Rows of the records table, each with its ``position``.

        Raises: RowOutOfRange.
        """
        for position in positions:
            if not 0 <= position < self.num_records:
                where = f"store '{self._store.path}'"
                raise RowOutOfRange(f"{where}: record {position} out of range: it has {self.num_records}")
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
        parameters = _words(words)
        return self._at(f"SELECT *, {_has('lower(text)', parameters)} AS is_hit FROM captions", list(ids), **parameters)

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
            raise RecipeError(f"no column {column!r}. Available: {', '.join(self.columns)}.")
        return f'"{column}"'

    def _comparison(self, column: str, operator: str, text: str, parameter: str) -> tuple[str, Any]:
        """A condition in SQL, and the value of its parameter, rounded and bounded as its column; None without one."""
        name = self._quoted(column)
        if text == "null":
            if operator not in NULL_TESTS:
                raise RecipeError(f"where {column} {operator} null: expected = or !=.")
            return f"{name} {NULL_TESTS[operator]}", None
        if operator == "~":
            return f"contains(lower({name}::VARCHAR), lower({parameter}))", text
        kind, value = self.columns[column], text
        if not pa.types.is_string(kind):
            read: Callable[[str], Any] = float if pa.types.is_floating(kind) else functools.partial(int, base=0)
            try:
                value = pa.scalar(read(text), kind).as_py()
            except (ValueError, OverflowError, pa.ArrowException) as error:
                raise RecipeError(f"where {column}: {text!r} is not of type {kind}.") from error
        return f"{name} {operator} {parameter}", value  # the operator is one of seven

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


def _words(words: Iterable[str]) -> dict[str, str]:
    """Words by the names of their parameters."""
    return {f"word{i}": word for i, word in enumerate(words)}


def _has(lowered: str, parameters: Iterable[str]) -> str:
    """Whether a text in lower case has all words, whatever their case."""
    return " AND ".join(["true", *(f"contains({lowered}, lower(${name}))" for name in parameters)])
