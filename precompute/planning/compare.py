"""Compare a source with a planned revision: unchanged, new, changed and gone records.

With ``--drop-gone`` the next revision equals a fresh store of the source, record by record. A record is unchanged if
its file has the planned size, time and place; otherwise the checksum from its encoding decides. So a copied or touched
source is read again, but never encoded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import pyarrow as pa
import xxhash

from ...datasets.errors import RecordRejected
from ...datasets.format.table_schemas import RECORDS_SCHEMA, place_columns
from ...datasets.revisions.plan import FrozenPlan
from ..config import PrecomputeRecipe
from ..sources.files.record import Place, SourceRecord, listing_problem, planned_texts
from ..sources.listing.listing import Listing, record_batches, spool
from ..sources.source import Source

DUPLICATE = "duplicate_key"
FILE_PROBLEMS = ("missing_file", "unreadable")  # the file may come back, so the record counts as gone
OF_THE_LISTING = ("bad_metadata", "missing_file", DUPLICATE, "no_caption")  # rejects that no file content decides


@dataclass(frozen=True)
class Base:
    """The complete revision that a new one builds on: its plan and its tables."""

    plan: FrozenPlan
    records: pa.Table
    captions: pa.Table

    def sizes_differ(self, recipe: PrecomputeRecipe) -> bool:
        """Base and recipe disagree whether sizes come from headers or from the manifest."""
        return self.plan.spec.recipe.get("source", {}).get("sizes", "header") != recipe.source.sizes


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
class Kept:
    """A record carried over: its position in the base, and its present listing."""

    position: int
    record: SourceRecord


@dataclass(frozen=True)
class Comparison:
    """Differences between a source and a revision.

    Args:
      kept: records carried over, in the order of the base.
      fresh: records to plan, in the order of the source.
      attempts: of retried records: the number of this attempt, by position in ``fresh``.
      table: the base's records that are carried over (RECORDS_SCHEMA).
      gone_classes: classes that only gone records have; they follow the source's own.
      num_added, num_changed, num_retried: counts of the fresh records.
      num_described: carried over with another label or other captions.
      num_gone: no longer in the source.
      num_dropped: gone and left out.
      is_renamed: class names have changed.
    """

    kept: list[Kept]
    fresh: Listing
    table: pa.Table
    attempts: dict[int, int] = field(default_factory=dict)
    gone_classes: list[str] = field(default_factory=list)
    num_added: int = 0
    num_changed: int = 0
    num_retried: int = 0
    num_described: int = 0
    num_gone: int = 0
    num_dropped: int = 0
    is_renamed: bool = False

    @property
    def texts(self) -> list[list[str]]:
        """Captions of the records carried over; empty if rejected at scan."""
        rows = self.table["row"].to_pylist()
        return [planned_texts(one.record) if row >= 0 else [] for one, row in zip(self.kept, rows, strict=True)]

    @property
    def changes_anything(self) -> bool:
        """A new revision would differ from the base."""
        return bool(self.fresh or self.num_described or self.num_dropped or self.is_renamed)

    def counts(self) -> Comparison:
        """The counts alone, without a record: small, and picklable."""
        return replace(self, kept=[], fresh=Listing([]), table=RECORDS_SCHEMA.empty_table(), attempts={})


class KnownRecord(NamedTuple):
    """A record of the base.

    Args:
      record: its listing when it was planned; the captions are those that were encoded.
      is_planned: it has a row, so its captions were encoded.
      checksum: of the picture's file; None if not stored.
      size_px: height and width of the picture; None if never known.
      picture_checksums: of the files of its companion pictures, by name, if stored.
    """

    record: SourceRecord
    is_stored: bool
    is_planned: bool
    reason: str | None
    detail: str | None
    checksum: int | None
    attempts: int
    size_px: tuple[int | None, int | None]
    picture_checksums: dict[str, int | None]


class State(Enum):
    """State of a base record in the source."""

    SAME = "picture or reject is unchanged; label and captions may differ"
    CHANGED = "must be planned again"
    GONE = "not listed, or its file cannot be read"


def all_fresh(records: Listing) -> Comparison:
    """A comparison in which every record is new."""
    return Comparison([], records, RECORDS_SCHEMA.empty_table(), num_added=len(records))


def compare(
    source: Source,
    base: Base,
    options: Options,
    recipe: PrecomputeRecipe,
    *,
    num_threads: int,
    progress: Callable[[int], None],
) -> Comparison:
    """Compare a source with a revision; reads files that may have changed.

    Args:
      recipe: of the next revision; its ``source.check`` may request reading every file.
      progress: called with the number of files checked so far.
    """
    known, listed = _known_records(base), list(source.records)
    positions = _match(known, listed)
    now = {position: record for position, record in zip(positions, listed, strict=True) if position is not None}
    sizes_differ = base.sizes_differ(recipe)
    states = _find_states(source, known, now, recipe, sizes_differ, num_threads=num_threads, progress=progress)
    count: Counter[str] = Counter()
    kept, gone_classes = _carry_over(source, base, known, now, states, options, count)
    fresh, attempts = _to_plan(listed, known, positions, states, {one.position for one in kept}, count)
    table = base.records.take(pa.array([one.position for one in kept], pa.int64()))
    listing = spool(record_batches(fresh), lambda _: None, check_keys=False)  # repeated keys are already marked
    return Comparison(kept, listing, table, attempts, gone_classes, **dict[str, Any](count))


def _match(known: Sequence[KnownRecord], listed: Sequence[SourceRecord]) -> list[int | None]:
    """Position in the base of each listed record; None if new."""
    identities = _identities((one.record.key, one.reason == DUPLICATE) for one in known)
    places = {identity: i for i, identity in enumerate(identities)}
    names = ((record.key, bool(record.problem) and record.problem[0] == DUPLICATE) for record in listed)
    return [places.get(identity) for identity in _identities(names)]


def _identities(names: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, int]]:
    """Identify each record by its key, and repetitions of a key by their number.

    Order alone would not do: a record that was planned again comes after repetitions that were carried over.
    """
    seen: Counter[str] = Counter()
    for key, repeats in names:
        seen[key] += repeats
        yield key, seen[key] if repeats else 0


def _find_states(
    source: Source,
    known: Sequence[KnownRecord],
    now: dict[int, SourceRecord],
    recipe: PrecomputeRecipe,
    sizes_differ: bool,
    *,
    num_threads: int,
    progress: Callable[[int], None],
) -> list[State]:
    """State of each base record; reads its file if size, time and place do not decide.

    Args:
      now: present listing of known records, by position in the base.
      sizes_differ: as ``Base.sizes_differ``.
    """
    states = [State.GONE] * len(known)

    def find(position: int) -> State:
        return _state_of(known[position], now[position], source, recipe, sizes_differ)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="leandit-compare") as pool:
        for done, (position, state) in enumerate(zip(now, pool.map(find, now), strict=True), 1):
            states[position] = state
            progress(done)
    return states


def _state_of(
    known: KnownRecord, now: SourceRecord, source: Source, recipe: PrecomputeRecipe, sizes_differ: bool
) -> State:
    """State of a record that is still listed."""
    companions = now.pictures[: len(known.record.pictures)]  # a recipe may add more
    same_place = known.record.place == now.place and known.record.pictures == companions
    if problem := listing_problem(now, needs_caption=recipe.needs_captions):
        if known.is_stored and problem[0] in FILE_PROBLEMS:
            return State.GONE
        # The detail of a repeated key names the first position, which other records may shift.
        is_same = known.reason == problem[0] and (known.detail == problem[1] or problem[0] == DUPLICATE)
        return _same_if(is_same and not known.is_stored)
    if known.reason in OF_THE_LISTING:
        return State.CHANGED
    says_other_size = (
        recipe.source.sizes == "manifest" and bool(now.height_px) and (now.height_px, now.width_px) != known.size_px
    )
    if known.reason == "wrong_size" and says_other_size:
        return State.CHANGED
    if not known.is_stored:
        if sizes_differ and now.height_px:
            return State.CHANGED  # the other size may fit
        return _same_if(same_place)  # a reject has no checksum to compare
    if says_other_size:
        return State.CHANGED  # a fresh store would reject the picture as wrong_size
    if same_place and recipe.source.check == "stat":
        return State.SAME
    return _same_if(known.checksum is not None and _has_same_bytes(source, now, known))


def _same_if(same: bool) -> State:
    return State.SAME if same else State.CHANGED


def _carry_over(
    source: Source,
    base: Base,
    known: Sequence[KnownRecord],
    now: dict[int, SourceRecord],
    states: Sequence[State],
    options: Options,
    count: Counter[str],
) -> tuple[list[Kept], list[str]]:
    """Records carried over from the base, and classes that only gone records have."""
    gone = [one.record for one, state in zip(known, states, strict=True) if state is State.GONE]
    gone_classes, label_of = _classes_of([] if options.drop_gone else gone, base.plan.spec.classes, source)
    has_text, kept = bool(base.plan.spec.text_encoders), list[Kept]()
    for position, (one, state) in enumerate(zip(known, states, strict=True)):
        before = one.record
        if state is State.GONE:
            count["num_gone"] += 1
            count["num_dropped"] += options.drop_gone
            if not options.drop_gone:
                kept.append(Kept(position, replace(before, label=label_of.get(before.label, before.label))))
        elif state is State.SAME and (one.is_stored or not options.retry_rejected):
            record = now[position]
            other_texts = has_text and one.is_planned and planned_texts(before) != planned_texts(record)
            count["num_described"] += before.label != record.label or other_texts
            kept.append(Kept(position, record))
    return kept, gone_classes


def _to_plan(
    listed: Sequence[SourceRecord],
    known: Sequence[KnownRecord],
    positions: Sequence[int | None],
    states: Sequence[State],
    kept: set[int],
    count: Counter[str],
) -> tuple[list[SourceRecord], dict[int, int]]:
    """Listed records that are not carried over, and the attempt of each retried one by its position among them."""
    fresh: list[SourceRecord] = []
    attempts: dict[int, int] = {}
    for record, position in zip(listed, positions, strict=True):
        if position in kept:
            continue
        if position is None:
            count["num_added"] += 1
        elif states[position] is State.SAME:
            count["num_retried"] += 1
            attempts[len(fresh)] = known[position].attempts + 1
        elif states[position] is State.CHANGED:
            count["num_changed"] += 1
        fresh.append(record)  # gone records too: still listed, they become rejects
    return fresh, attempts


def _classes_of(gone: list[SourceRecord], before: list[str] | None, source: Source) -> tuple[list[str], dict[int, int]]:
    """Classes missing from the source, and the new labels of gone records after the source's own classes."""
    classes, labels = source.classes or [], sorted({record.label for record in gone if record.label >= 0})
    if not labels or before is None:
        return [], {}
    if not source.has_class_names:  # labels are numbers
        return [str(i) for i in range(len(classes), labels[-1] + 1)], {}
    missing = [before[label] for label in labels if before[label] not in classes]
    every = [*classes, *missing]
    return missing, {label: every.index(before[label]) for label in labels}


def _known_records(base: Base) -> list[KnownRecord]:
    texts = base.captions["text"].to_pylist()
    places = ("key", "source_path", "source_offset", "source_bytes", "source_mtime_ns", "label", "caption_ids")
    results = ("status", "row", "reason", "detail", "source_checksum", "attempts", "height_px", "width_px")
    planned = zip(*(base.plan.records[name].to_pylist() for name in places), strict=True)
    became = zip(*(base.records[name].to_pylist() for name in results), strict=True)
    known = []
    pictures, checksums = _known_pictures(base)
    for i, ((*place, ids), (status, row, *result, height_px, width_px)) in enumerate(zip(planned, became, strict=True)):
        of_record = tuple(places[i] for places in pictures if places[i][0] is not None)
        record = SourceRecord(*place, captions=tuple(texts[j] for j in ids or ()), pictures=of_record)
        size_px, found = (height_px, width_px), {name: column[i] for name, column in checksums.items()}
        known.append(
            KnownRecord(record, status == "stored", row >= 0, *result, size_px=size_px, picture_checksums=found)
        )
    return known


def _known_pictures(base: Base) -> tuple[list[list[Place]], dict[str, list[int | None]]]:
    """Places of the companion pictures of all records, and checksums of their files by name."""
    spec, planned = base.plan.spec, base.plan.records
    places = [
        list(zip(*(planned[name].to_pylist() for name in columns), strict=True)) for columns in place_columns(spec)
    ]
    return places, {one.name: base.records[f"source_checksum_{one.name}"].to_pylist() for one in spec.pictures}


def _has_same_bytes(source: Source, now: SourceRecord, known: KnownRecord) -> bool:
    """Whether a record's own picture and its stored companions have the bytes that were encoded."""
    places = dict(zip(source.pictures, now.pictures, strict=False))
    return _checksum(source, now.place) == known.checksum and all(
        _checksum(source, places[name], name) == checksum for name, checksum in known.picture_checksums.items()
    )


def _checksum(source: Source, place: Place, picture: str = "") -> int | None:
    path, offset, num_bytes, _ = place
    try:
        return xxhash.xxh3_64_intdigest(source.read(path, offset, num_bytes, stage="scan", picture=picture))
    except RecordRejected:
        return None
