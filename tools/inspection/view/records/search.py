"""The records of a store that a query names, in its order."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from .....datasets.disk.cached import cached_property
from .....datasets.errors import RecipeError
from .....datasets.format.class_names import ClassNames
from .query import Condition, Query
from .word_index import LetterPairs, WordIndex, contains, contains_all, needles

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them
KEPT = 16  # results, orders and texts of columns that are kept
THREADS = 2  # that look through one column
OPERATORS = {"=": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}


class RecordSearch:
    """Searches the records table of a store. Thread-safe.

    Args:
      records, captions: tables of the store.
      class_names: of its labels.
    """

    def __init__(self, records: pa.Table, captions: pa.Table, class_names: ClassNames) -> None:
        self._table, self._captions_table, self._classes = records, captions, class_names
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="leandit-search")
        self._found = functools.lru_cache(KEPT)(self._find)
        self._order = functools.lru_cache(KEPT)(self._ordered)
        self._lowered = functools.lru_cache(KEPT)(lambda column: pc.utf8_lower(pc.cast(records[column], pa.string())))

    @property
    def columns(self) -> list[str]:
        """Names of the columns that can be compared and sorted by."""
        return [field.name for field in self._table.schema if not pa.types.is_list(field.type)]

    def find(self, query: Query) -> np.ndarray:
        """Positions in the records table of all pages of a query, in its order.

        Raises: RecipeError: an unknown column, class or value.
        """
        return self._found(replace(query, page=1))

    def counts(self, column: str) -> dict[str, int]:
        """Number of records with each value of a text column, most first; without nulls."""
        counts = {entry["values"]: entry["counts"] for entry in self._table[column].value_counts().to_pylist()}
        return {name: counts[name] for name in sorted(counts, key=lambda name: -counts[name]) if name is not None}

    def prepare(self) -> None:
        """Build the index of the captions."""
        with self._lock:
            _ = self._captions, self._key_pairs, self._caption_places

    def best_caption(self, query: Query, captions: Sequence[str]) -> str:
        """The caption of a record that a query found it by, else the first; "" without captions."""
        wanted = needles(query.q)
        return next((text for text in captions if contains_all(text, wanted)), next(iter(captions), ""))

    def _find(self, query: Query) -> np.ndarray:
        found = self._of_text(query.q)
        for column, value in (("bucket", query.bucket), ("status", query.status), ("reason", query.reason)):
            if value:
                found &= _truths(pc.equal(self._table[column], value))
        if query.class_:
            found &= self._labels == self._classes.find(query.class_)
        for condition in query.conditions:
            found &= self._of_condition(condition)
        if not query.sort:
            return np.flatnonzero(found).astype(np.int32)
        order = self._order(self._known(query.sort), query.order)
        return order[found[order]]

    def _known(self, column: str) -> str:
        if column not in self.columns:
            raise RecipeError(f"no column {column!r}. There are: {', '.join(self.columns)}.")
        return column

    def _ordered(self, column: str, order: str) -> np.ndarray:
        """All positions in the order of a column, nulls last; where equal in the order of the table."""
        values = pa.concat_arrays(self._table[column].chunks) if self._table.num_rows else pa.array([])
        direction = "ascending" if order == "up" else "descending"
        return pc.array_sort_indices(values, order=direction).to_numpy().astype(np.int32)  # stable, and nulls last

    def _of_condition(self, condition: Condition) -> np.ndarray:
        column = self._table[self._known(condition.column)]
        if condition.value == "null":
            if condition.operator not in ("=", "!="):
                raise RecipeError(f"where {condition.column} {condition.operator} null: needed = or !=.")
            return _truths(pc.is_null(column) if condition.operator == "=" else pc.is_valid(column))
        if condition.operator == "~":
            return self._containing(condition.column, pc.utf8_lower(condition.value).as_py())
        compare = getattr(pc, OPERATORS[condition.operator])
        return _truths(compare(column, _value(condition, column.type)))

    def _of_text(self, text: str) -> np.ndarray:
        """Whether one caption, the class name or the key of each record contains all words."""
        wanted = needles(text)
        if not wanted:
            return np.ones(self._table.num_rows, bool)
        found = np.zeros(self._table.num_rows, bool)
        if self._captions_table.num_rows:
            self.prepare()
            captions, (records, ids) = self._captions, self._caption_places
            found[records[captions.find(wanted)[ids]]] = True
        if names := self._class_names:
            found |= np.array([*(contains_all(name, wanted) for name in names), False])[self._labels]
        return found | self._of_keys(wanted)

    def _of_keys(self, wanted: Sequence[str]) -> np.ndarray:
        if not all(map(self._key_pairs.may_hold, wanted)):
            return np.zeros(self._table.num_rows, bool)
        first, *others = sorted(wanted, key=len, reverse=True)
        found = self._containing("key", first)
        for other in others:
            places = np.flatnonzero(found)
            found[places] = contains(self._lowered("key").take(places), other)
        return found

    @cached_property
    def _key_pairs(self) -> LetterPairs:
        return LetterPairs(self._lowered("key"))

    def _containing(self, column: str, part: str) -> np.ndarray:
        """Whether the text of a column contains a part in small letters; some records in each thread."""
        texts = self._lowered(column)
        edges = np.linspace(0, len(texts), THREADS + 1).astype(int).tolist()
        pieces = [texts.slice(a, b - a) for a, b in itertools.pairwise(edges)]
        return np.concatenate(list(self._threads.map(contains, pieces, [part] * THREADS)))

    @cached_property
    def _labels(self) -> np.ndarray:
        return self._table["label"].to_numpy()

    @cached_property
    def _class_names(self) -> list[str]:
        return [self._classes.describe(label) for label in range(len(self._classes))]

    @cached_property
    def _captions(self) -> WordIndex:
        return WordIndex(self._captions_table["text"])

    @cached_property
    def _caption_places(self) -> tuple[np.ndarray, np.ndarray]:
        """Record and caption of each place where a record names a caption."""
        lists = self._table["caption_ids"]
        counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts), pc.list_flatten(lists).to_numpy()


def _truths(values: pa.ChunkedArray) -> np.ndarray:
    return pc.fill_null(values, False).to_numpy()


def _value(condition: Condition, kind: pa.DataType) -> Any:
    """The value of a condition as one of a column's type.

    Raises: RecipeError.
    """
    if pa.types.is_string(kind):
        return condition.value
    read: Callable[[str], Any] = float if pa.types.is_floating(kind) else functools.partial(int, base=0)
    try:
        return pa.scalar(read(condition.value), kind)
    except (ValueError, OverflowError, pa.ArrowException) as error:
        raise RecipeError(f"where {condition.column}: {condition.value!r} is no {kind}.") from error
