"""Select the records to train on: by label, by aspect ratio, by a score from a user's table, and a holdout.

    selection = RecordFilter(labels=["n01440764"], scores=ScoreTable(path, "aesthetic", minimum=5.5)).select(store)
    plan = BatchPlan(selection.counts, global_batch=256, seed=0, selection=selection)

A filter does not change the store. It is evaluated once into sorted positions per bucket, which the plan shuffles.

The holdout is a share of the records that never train, chosen by a hash of the key alone. No seed and no position is
part of it: a record that is held out stays so while the store grows, in every run, and in every store that has its key.
A larger share holds out the same records and more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from ...errors import RecipeError
from ..disk.hashing import xxh3_parts

if TYPE_CHECKING:
    from ..store import LatentStore

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them


@dataclass(frozen=True)
class ScoreTable:
    """A Parquet file with one score per record, and a minimum.

    Args:
      path: of the Parquet file; unknown keys are ignored.
      column: integers, floats or booleans. Null and NaN mean no score.
      minimum: records with a lower score, or none, are filtered out.
      key: the column with the records' keys.
    """

    path: str | Path
    column: str
    minimum: float
    key: str = "key"


@dataclass(frozen=True)
class Selection:
    """The records of a store to train on.

    Args:
      counts: of records per bucket, in the order of the store's buckets.
      positions: of each bucket, sorted positions of the selected records, in the smallest integer dtype; None for all.
      num_filtered: records filtered out, by reason; a record counts for the first that applies.
      identity: plain values of the filter, for the state of a loader.
      content_hash: of the store whose records these are (``LatentStore.content_hash``).
      num_stored: all records of each bucket, when they were selected.
      held_out: of each bucket, sorted positions of the records that would be selected without a holdout.
    """

    counts: Mapping[str, int]
    positions: Mapping[str, np.ndarray | None]
    num_filtered: Mapping[str, int]
    identity: Mapping[str, Any]
    content_hash: str
    num_stored: Mapping[str, int]
    held_out: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_records(self) -> int:
        """Number of selected records."""
        return sum(self.counts.values())

    def describe(self) -> str:
        """One line: number of selected records, and of filtered ones by reason."""
        total = self.num_records + sum(self.num_filtered.values())
        reasons = ", ".join(f"{count} by {reason}" for reason, count in self.num_filtered.items() if count)
        return f"{self.num_records} of {total} records are used; filtered out: {reasons or 'none'}"


@dataclass(frozen=True)
class RecordFilter:
    """Conditions for a record to train; without any, every record does.

    Args:
      labels: class names or class indices, any of which will do; None for all.
      min_aspect, max_aspect: height over width of the source image, both ends included; None for no limit.
      scores: numbers from a table, with a minimum.
      holdout: share of the records that do not train; 0: none.
    Raises: RecipeError: no label, limits that no number keeps, or a holdout that is no share below 1.
    """

    labels: Sequence[str | int] | None = None
    min_aspect: float | None = None
    max_aspect: float | None = None
    scores: ScoreTable | None = None
    holdout: float = 0.0

    def __post_init__(self) -> None:
        if self.labels is not None and (isinstance(self.labels, str) or not len(self.labels)):
            raise RecipeError(
                f"a filter with labels {self.labels!r}: expected a list of at least one, or None for all."
            )
        low, high = self._aspects
        if not low <= high:
            raise RecipeError(f"a filter with aspects from {low} to {high}: expected a minimum not above the maximum.")
        if self.scores and not math.isfinite(self.scores.minimum):
            raise RecipeError(f"a filter with a minimum score of {self.scores.minimum}: expected a finite number.")
        if not 0 <= self.holdout < 1:
            raise RecipeError(f"a filter with a holdout of {self.holdout}: expected a share of at least 0 and below 1.")

    @property
    def _aspects(self) -> tuple[float, float]:
        return (
            0.0 if self.min_aspect is None else self.min_aspect,
            math.inf if self.max_aspect is None else self.max_aspect,
        )

    def select(self, store: LatentStore) -> Selection:
        """Select the records of a store.

        Raises: RecipeError: unknown class, unusable score table, or no record left.
        """
        records = {bucket: store.index(bucket).records for bucket in store.buckets}
        identity: dict[str, Any] = {}
        passing = _is_stored(store)
        num_filtered, held_out = dict[str, int](), np.zeros(len(passing), bool)
        for reason, passes in self._conditions(store, identity):  # a record counts for the first that it fails
            held_out = passing & ~passes  # after the last condition: those of the holdout, if there is one
            num_filtered[reason] = int(np.count_nonzero(held_out))
            passing &= passes
        positions = {bucket: _positions(passing[of_bucket]) for bucket, of_bucket in records.items()}
        counts = {b: len(records[b]) if chosen is None else len(chosen) for b, chosen in positions.items()}
        kept_out = {b: np.flatnonzero(held_out[one]) for b, one in records.items()} if self.holdout else {}
        selection = Selection(
            counts=counts,
            positions=positions,
            num_filtered=num_filtered,
            identity=identity,
            content_hash=store.content_hash,
            num_stored={bucket: len(of_bucket) for bucket, of_bucket in records.items()},
            held_out=kept_out,
        )
        if not selection.num_records:
            raise RecipeError(f"store '{store.path}': {selection.describe()}. Relax the filter.")
        return selection

    def _conditions(self, store: LatentStore, identity: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
        """Reason and (N,) bool a record of each condition; fills in the filter's identity."""
        identity |= {"labels": None, "min_aspect": self.min_aspect, "max_aspect": self.max_aspect, "scores": None}
        if self.labels is not None:
            identity["labels"] = label_indices(self.labels, store)
            labels = store.record_columns(("label",))["label"].to_numpy()
            yield "label", np.isin(labels, identity["labels"])
        if self.min_aspect is not None or self.max_aspect is not None:
            table = store.record_columns(("height_px", "width_px"))
            height_px, width_px = (pc.fill_null(column, 0).to_numpy().astype(np.float64) for column in table.columns)
            low, high = self._aspects
            known = (height_px > 0) & (width_px > 0)
            aspect = np.divide(height_px, width_px, out=np.zeros(len(known)), where=known)
            yield "aspect", known & (aspect >= low) & (aspect <= high)
        if self.scores is not None:
            scores = read_scores(self.scores, store)
            identity["scores"] = {
                "column": self.scores.column,
                "minimum": float(self.scores.minimum),
                # Only of stored records, so that the order and other rows of the file do not matter.
                "xxh3_128": xxh3_parts([np.ascontiguousarray(scores[_is_stored(store)])])[1],
            }
            yield "no_score", ~np.isnan(scores)
            yield "score", scores >= self.scores.minimum
        if self.holdout:
            identity["holdout"] = self.holdout
            yield "holdout", ~is_held_out(store.numbers("keys"), self.holdout)


def is_held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """(N,) bool of the (N,) hashes of keys; ``share``: from 0 to below 1."""
    return hashes < np.uint64(int(share * 2.0**64))


def label_indices(labels: Sequence[str | int], store: LatentStore) -> list[int]:
    """Sorted class indices of labels given by name or index.

    Raises: RecipeError: unknown class, with the nearest name.
    """
    try:
        return sorted({store.class_names.find(label) for label in labels})
    except RecipeError as error:
        raise RecipeError(f"store '{store.path}': {error}") from error


def read_scores(table: ScoreTable, store: LatentStore) -> np.ndarray:
    """Score of each record, (N,) float64 in the order of the records table, NaN for none.

    Raises: RecipeError: as ``lines_by_key``, or no stored record has a line.
    """
    where = f"score table '{table.path}'"
    lines, column = lines_by_key(where, table.path, table.key, table.column, pa.float64(), store)
    scores = np.full(len(lines), np.nan)
    values = pc.fill_null(column, math.nan).to_numpy(zero_copy_only=False)
    scores[lines >= 0] = values[lines[lines >= 0]] + 0.0  # no negative zero: equal scores have equal bytes
    scores[np.isnan(scores)] = np.nan  # and one kind of NaN
    return scores


def lines_by_key(
    where: str,
    path: str | Path,
    key: str,
    column: str,
    kind: pa.DataType,
    store: LatentStore,
) -> tuple[np.ndarray, pa.Array]:
    """Find the line of each record in a user's Parquet file.

    Args:
      where: names the table in errors.
      key, column: names of the columns of keys and of values.
      kind: type of the values.
    Returns: (N,) int64 line of each record of the records table, -1 for none; and the values of all lines.
    Raises: RecipeError: the file is not Parquet, a column is missing or of another type, a key is repeated, or no
      stored record has a line.
    """
    try:
        names = pq.read_schema(path).names
        if missing := [name for name in (key, column) if name not in names]:
            raise RecipeError(f"{where}: no column '{missing[0]}'. Available: {', '.join(names)}.")
        table = pq.read_table(path, columns=[key, column])
    except FileNotFoundError as error:
        raise RecipeError(f"{where}: no such file.") from error
    except (pa.ArrowException, OSError) as error:
        raise RecipeError(f"{where}: not a readable Parquet file ({error}).") from error
    table = table.filter(pc.is_valid(table[key])).combine_chunks()
    try:
        keys, values = table[key].cast(pa.string()).combine_chunks(), table[column].cast(kind).combine_chunks()
    except pa.ArrowException as error:
        raise RecipeError(f"{where}: expected text in '{key}' and {kind} in '{column}' ({error}).") from error
    if len(pc.unique(keys)) < len(keys):
        counts = pc.value_counts(keys)
        twice = counts.field("values")[int(np.argmax(counts.field("counts").to_numpy()))]
        raise RecipeError(f"{where}: duplicate key '{twice}'. Expected one row for each record.")
    batches = (batch["key"].cast(pa.string()) for batch in store.record_batches(("key",)))
    lines = np.concatenate([pc.fill_null(pc.index_in(one, value_set=keys), -1).to_numpy() for one in batches])
    if not np.any(lines[stored := _is_stored(store)] >= 0):
        first = store.record_at(int(np.argmax(stored))).key
        raise RecipeError(
            f"{where}: no key in common with store '{store.path}', whose first is '{first}'. "
            f"The table's are {', '.join(repr(one) for one in keys.slice(0, 3).to_pylist()) or 'none'}."
        )
    return lines, values


def _is_stored(store: LatentStore) -> np.ndarray:
    """(N,) bool, whether each record of the records table is stored."""
    stored = np.zeros(store.num_records, bool)
    for bucket in store.buckets:
        stored[store.index(bucket).records] = True
    return stored


def _positions(passes: np.ndarray) -> np.ndarray | None:
    """Positions of true values of a (N,) bool, in the smallest integer dtype; None if all are true."""
    if passes.all():
        return None
    return np.flatnonzero(passes).astype(np.min_scalar_type(max(len(passes) - 1, 0)))
