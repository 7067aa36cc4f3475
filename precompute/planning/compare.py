"""Compare a source with a planned revision: unchanged, new, changed and gone records.

With ``--drop-gone`` the next revision equals a fresh store of the source, record by record. A record is unchanged if
its file has the planned size, time and place; otherwise the checksum from its encoding decides. So a copied or touched
source is read again, but never encoded again. The comparison is a join in DuckDB, so its memory does not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute
import xxhash

from ...datasets.disk.spill import BATCH_ROWS, TakenColumn, map_array, map_table, rebatched
from ...datasets.format.table_schemas import PLACES, PLAN_SCHEMA, place_columns
from ...datasets.revisions.plan import FrozenPlan
from ...errors import RecordRejected
from ..config import PrecomputeRecipe
from ..sources.files.record import NO_CAPTION
from ..sources.listing.duck import database, identifier, literal, numbered
from ..sources.listing.listing import PLACES_SQL, SCHEMA, Listing, listed_places, place_fields, spool
from ..sources.source import Source

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

DUPLICATE = "duplicate_key"
FILE_PROBLEMS = ("missing_file", "unreadable")  # the file may come back, so the record counts as gone
OF_THE_LISTING = ("bad_metadata", "missing_file", DUPLICATE, "no_caption")  # rejects that no file content decides
GONE, SAME, CHANGED, UNDECIDED = range(4)  # states of a record of the base; the bytes of its file decide the last
CHECKED_AT_ONCE = 4096  # files that are read to compare their bytes
WHAT = "the comparison with the store"
# Beyond the columns of a plan: a record's position in the source, -1 if it is gone; its captions, null where those of
# the base stay.
FOUND = (pa.field("position", pa.int64()), SCHEMA.field("captions"))


@dataclass(frozen=True)
class Options:
    """User options for growing a store.

    Args:
      drop_gone: leave out records that are gone from the source; otherwise they stay.
      retry_rejected: retry rejected records even if their files are unchanged.
    """

    drop_gone: bool = False
    retry_rejected: bool = False


@dataclass(frozen=True)
class Comparison:
    """Differences between a source and a revision.

    Args:
      carried: the base's records that are carried over, in its order, with their present labels and places (its plan's
        columns, those of new companions, and FOUND).
      fresh: records to plan, in the order of the source.
      attempts: (F,) int32, the number of this attempt of each fresh record; None if it is the first of all.
      gone_classes: classes that only gone records have; they follow the source's own.
      num_added, num_changed, num_retried: counts of the fresh records.
      num_described: carried over with another label or other captions.
      num_gone: no longer in the source.
      num_dropped: gone and left out.
      is_renamed: class names have changed.
    """

    carried: pa.Table
    fresh: Listing
    attempts: np.ndarray | None = None
    gone_classes: list[str] = field(default_factory=list)
    num_added: int = 0
    num_changed: int = 0
    num_retried: int = 0
    num_described: int = 0
    num_gone: int = 0
    num_dropped: int = 0
    is_renamed: bool = False

    @property
    def changes_anything(self) -> bool:
        """A new revision would differ from the base."""
        return bool(self.fresh or self.num_described or self.num_dropped or self.is_renamed)


def all_fresh(records: Listing) -> Comparison:
    """A comparison in which every record is new."""
    return Comparison(pa.schema([*PLAN_SCHEMA, *FOUND]).empty_table(), records, num_added=len(records))


def sizes_differ(base: FrozenPlan, recipe: PrecomputeRecipe) -> bool:
    """A revision and a recipe disagree whether sizes come from headers or from the manifest."""
    return base.spec.recipe.get("source", {}).get("sizes", "header") != recipe.source.sizes


def compare(
    source: Source,
    base: FrozenPlan,
    options: Options,
    recipe: PrecomputeRecipe,
    *,
    num_threads: int,
    progress: Callable[[int], None],
) -> Comparison:
    """Compare a source with a revision; reads files that may have changed.

    Args:
      recipe: of the next revision; its ``source.check`` may request reading every file.
      progress: called with the number of records that are compared so far.
    """
    num_known, num_listed = base.records.num_rows, len(source.records)
    states = map_array(num_known, "uint8", WHAT)
    is_described = map_array(num_known, "bool", WHAT)
    listed_of, known_of = map_array(num_known, "int64", WHAT), map_array(num_listed, "int64", WHAT)
    listed_of[:], known_of[:] = -1, -1
    for batch in _joined(source, base, recipe):
        known, listed = batch["known"].to_numpy(), batch["listed"].to_numpy()
        listed_of[known], known_of[listed] = listed, known
        states[known], is_described[known] = batch["state"].to_numpy(), batch["is_described"].to_numpy(False)
    _decide(source, base, states, listed_of, num_threads=num_threads, progress=progress)
    progress(num_listed)
    is_gone, is_same = states == GONE, states == SAME
    is_kept = is_same.copy()
    if options.retry_rejected:
        is_kept &= pc.equal(base.records["status"], "stored").to_numpy()
    is_kept |= is_gone & (not options.drop_gone)
    is_new = known_of < 0
    is_fresh = is_new | ~is_kept[known_of]  # gone records that are still listed become rejects
    is_retried = is_fresh & ~is_new & is_same[known_of]
    attempts = None
    if is_retried.any():
        attempts, retried = np.ones(int(is_fresh.sum()), np.int32), np.flatnonzero(is_retried)
        before = TakenColumn(base.records["attempts"], known_of[retried])
        attempts[is_retried[is_fresh]] += np.array(before[:], np.int32)
    listed_of[is_gone] = -1
    gone_classes, labels = _classes_of_gone(base, is_gone & (not options.drop_gone), source)
    has_new_texts = is_described if base.spec.text_encoders else np.ones(num_known, bool)
    fresh = _chosen(source.records.batches(), is_fresh)
    return Comparison(
        carried=_carried(source, base, is_kept, listed_of, has_new_texts, labels),
        fresh=spool(fresh, lambda _: None, check_keys=False),  # repeated keys are already marked
        attempts=attempts,
        gone_classes=gone_classes,
        num_added=int(is_new.sum()),
        num_changed=int((is_fresh & ~is_new & (states == CHANGED)[known_of]).sum()),
        num_retried=int(is_retried.sum()),
        num_described=int((is_described & is_kept & is_same).sum()),
        num_gone=int(is_gone.sum()),
        num_dropped=int(is_gone.sum()) if options.drop_gone else 0,
    )


def _chosen(batches: Iterable[pa.RecordBatch], mask: np.ndarray) -> Iterator[pa.RecordBatch]:
    """The rows of a mask."""
    start = 0
    for batch in batches:
        yield batch.filter(pa.array(mask[start : start + batch.num_rows]))
        start += batch.num_rows


# ------------------------------------------------------------------------------------------------------- the join


def _joined(source: Source, base: FrozenPlan, recipe: PrecomputeRecipe) -> Iterator[pa.RecordBatch]:
    """Each record of the base that is still listed: both positions, state, and whether label or captions differ.

    A record is found by its key, repetitions of a key by their number: order alone would not do, because a record that
    was planned again comes after repetitions that were carried over.
    """
    with database(WHAT) as connection:
        _load_known(connection, base)
        num_companions = len(base.spec.companions)  # a recipe may add more
        needs_caption = "len(captions) = 0" if recipe.needs_captions else "false"
        connection.register("stream", numbered(SCHEMA, source.records.batches()))
        connection.execute(
            f"""CREATE TEMP TABLE listed AS SELECT position, key, label, height_px, width_px,
            coalesce(reason, CASE WHEN {needs_caption} THEN {literal(NO_CAPTION[0])} END) AS reason,
            coalesce(detail, CASE WHEN {needs_caption} THEN {literal(NO_CAPTION[1])} END) AS detail,
            hash(path, "offset", num_bytes, mtime_ns, companions[:{num_companions}]) AS place,
            list_sum([hash(hash(text), i) for text, i in
            CASE WHEN len(captions) = 0 THEN [''] ELSE captions END]) AS texts FROM stream"""
        )
        for table in ("known", "listed"):
            repeats = f"reason IS NOT DISTINCT FROM '{DUPLICATE}'"
            connection.execute(
                f"""CREATE TEMP VIEW {table}_by_key AS SELECT *, 0 AS repetition FROM {table} WHERE NOT ({repeats})
                UNION ALL SELECT *, row_number() OVER (PARTITION BY key ORDER BY position) FROM {table}
                WHERE {repeats}"""
            )
        size_differs = "false"
        if recipe.source.sizes == "manifest":
            size_differs = """l.height_px > 0
                AND (l.height_px IS DISTINCT FROM k.height_px OR l.width_px IS DISTINCT FROM k.width_px)"""
        manifest_decides = "l.height_px > 0" if sizes_differ(base, recipe) else "false"
        trusts_place = "k.place = l.place" if recipe.source.check == "stat" else "false"
        result = connection.sql(
            f"""SELECT k.position AS known, l.position AS listed, (CASE
            WHEN l.reason IS NOT NULL THEN CASE
                WHEN k.is_stored AND l.reason IN {FILE_PROBLEMS} THEN {GONE}
                -- the detail of a repeated key names the first position, which other records may shift
                WHEN NOT k.is_stored AND k.reason = l.reason AND (k.detail = l.detail OR l.reason = '{DUPLICATE}')
                THEN {SAME} ELSE {CHANGED} END
            WHEN k.reason IN {OF_THE_LISTING} THEN {CHANGED}
            WHEN k.reason = 'wrong_size' AND {size_differs} THEN {CHANGED}
            WHEN NOT k.is_stored AND {manifest_decides} THEN {CHANGED}  -- the other size may fit
            WHEN NOT k.is_stored THEN CASE WHEN k.place = l.place THEN {SAME} ELSE {CHANGED} END
            WHEN {size_differs} THEN {CHANGED}  -- a fresh store would reject the image as wrong_size
            WHEN {trusts_place} THEN {SAME} ELSE {UNDECIDED} END)::UTINYINT AS state,
            l.label <> k.label OR (k.texts IS NOT NULL AND k.texts <> l.texts) AS is_described
            FROM known_by_key k JOIN listed_by_key l USING (key, repetition)"""
        )
        yield from result.to_arrow_reader(BATCH_ROWS)


def _load_known(connection: duckdb.DuckDBPyConnection, base: FrozenPlan) -> None:
    """Load the records of the base as ``known``; ``texts`` is null where no captions were encoded."""
    companions = place_columns(base.spec)
    planned = [name for names in ([*PLACES], *companions) for name in names]
    described = ("status", "row", "reason", "detail", "height_px", "width_px")
    table = base.records.select(["key", "label", "caption_ids", *planned, *described])
    connection.register("stream", numbered(table.schema, table.to_batches()))
    places = ", ".join(f"row({', '.join(map(identifier, names))})" for names in companions)
    has_text = "row >= 0" if base.spec.text_encoders else "false"
    connection.execute(
        f"""CREATE TEMP TABLE known AS SELECT position, key, label, status = 'stored' AS is_stored, reason, detail,
        height_px, width_px, hash({", ".join(PLACES)},
        [{places}]::{PLACES_SQL}) AS place,
        CASE WHEN {has_text} THEN caption_ids END AS caption_ids, NULL::HUGEINT AS texts FROM stream"""
    )
    if base.spec.text_encoders:
        texts = base.captions.select(["text"])
        connection.register("texts", numbered(texts.schema, texts.to_batches()))
        connection.execute("CREATE TEMP TABLE hashes AS SELECT position AS id, hash(text) AS text FROM texts")
        connection.execute(
            """CREATE OR REPLACE TEMP TABLE known AS SELECT known.* REPLACE (CASE WHEN caption_ids IS NOT NULL
            THEN coalesce(sums.texts, hash(hash(''), 1::BIGINT)) END AS texts) FROM known LEFT JOIN (
            SELECT position, sum(hash(hashes.text, i)) AS texts FROM (
            SELECT position, unnest(caption_ids) AS id, generate_subscripts(caption_ids, 1) AS i FROM known)
            JOIN hashes USING (id) GROUP BY position) sums USING (position)"""
        )


def _decide(
    source: Source,
    base: FrozenPlan,
    states: np.ndarray,
    listed_of: np.ndarray,
    *,
    num_threads: int,
    progress: Callable[[int], None],
) -> None:
    """Read the files of undecided records, in the order of the source, and compare their checksums."""
    undecided = np.flatnonzero(states == UNDECIDED)
    undecided = undecided[np.argsort(listed_of[undecided], kind="stable")]
    spec = base.spec
    checksums = {
        name: TakenColumn(base.records[f"source_checksum{suffix}"], undecided)
        for name, suffix in [("", ""), *((companion.name, f"_{companion.name}") for companion in spec.companions)]
    }

    def is_same(number: int) -> bool:
        record = source.records[int(listed_of[undecided[number]])]
        places = dict(zip(source.companions, record.companions, strict=False))
        places[""] = record.path, record.offset, record.num_bytes, record.mtime_ns
        wanted = {name: column[number] for name, column in checksums.items()}
        return wanted[""] is not None and all(
            _checksum(source, places[name], name) == checksum for name, checksum in wanted.items()
        )

    with ThreadPoolExecutor(num_threads, thread_name_prefix="leandit-compare") as pool:
        for start in range(0, len(undecided), CHECKED_AT_ONCE):
            batch = range(start, min(start + CHECKED_AT_ONCE, len(undecided)))
            for number, same in zip(batch, pool.map(is_same, batch), strict=True):
                states[undecided[number]] = SAME if same else CHANGED
                progress(number + 1)


def _checksum(source: Source, place: tuple[str, int, int, int], companion: str) -> int | None:
    try:
        return xxhash.xxh3_64_intdigest(source.read(*place[:3], stage="scan", companion=companion))
    except RecordRejected:
        return None


# ------------------------------------------------------------------------------------------------------- carried over


def _carried(
    source: Source,
    base: FrozenPlan,
    is_kept: np.ndarray,
    listed_of: np.ndarray,
    has_new_texts: np.ndarray,
    labels: dict[int, int],
) -> pa.Table:
    """Records carried over, as ``Comparison.carried``: labels and places as they are listed now, those of gone records
    as they were planned.

    Args:
      is_kept, listed_of, has_new_texts: of all records of the base; the position in the source is -1 if it is gone.
      labels: new ones of gone records, by those of the base.
    """
    planned_schema = base.records.schema
    added = [field for field in place_fields(source.companions) if field.name not in planned_schema.names]
    schema = pa.schema([*planned_schema, *added, *FOUND])

    def batches() -> Iterator[pa.RecordBatch]:
        start = 0
        for batch in base.records.to_batches():
            rows = np.flatnonzero(is_kept[start : start + batch.num_rows])
            known, planned = start + rows, batch.take(pa.array(rows))
            positions, start = listed_of[known], start + batch.num_rows
            is_gone = pa.array(positions < 0)
            listed = source.records.take(positions.clip(0))
            columns = {field.name: pa.nulls(len(rows), field.type) for field in added}
            columns |= {name: planned[name] for name in planned_schema.names}
            if labels:
                new_labels = [labels.get(label, label) for label in planned["label"].to_pylist()]
                columns["label"] = pa.array(new_labels, pa.int64())
            now = {"label": listed["label"].cast(pa.int64()), **listed_places(listed, source.companions)}
            columns |= {name: pc.if_else(is_gone, columns[name], values) for name, values in now.items()}
            is_new = pa.array(has_new_texts[known] & (positions >= 0))
            captions = pc.if_else(is_new, listed["captions"], pa.scalar(None, SCHEMA.field("captions").type))
            yield pa.RecordBatch.from_pydict(columns | {"position": pa.array(positions), "captions": captions}, schema)

    return map_table(schema, rebatched(batches(), BATCH_ROWS), WHAT)


def _classes_of_gone(base: FrozenPlan, is_gone: np.ndarray, source: Source) -> tuple[list[str], dict[int, int]]:
    """Classes missing from the source, and the new labels of gone records after the source's own classes."""
    before, classes = base.spec.classes, source.classes or []
    batches = _chosen(base.records.select(["label"]).to_batches(), is_gone)
    labels = sorted({label for batch in batches for label in pc.unique(batch["label"]).to_pylist() if label >= 0})
    if not labels or before is None:
        return [], {}
    if not source.has_class_names:  # labels are numbers
        return [str(i) for i in range(len(classes), labels[-1] + 1)], {}
    missing = [before[label] for label in labels if before[label] not in classes]
    every = [*classes, *missing]
    return missing, {label: every.index(before[label]) for label in labels}
