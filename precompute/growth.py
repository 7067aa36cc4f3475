"""What has changed in a source since a revision was planned: carried over, new, changed, gone.

A record is unchanged when its file has the size, time and place that the plan names; otherwise its bytes decide, by the
checksum that was taken when it was encoded. So a copied or touched source costs reading, never encoding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pyarrow as pa
import xxhash

from ..datasets.errors import RecordRejected
from ..datasets.frozen import FrozenPlan
from ..datasets.mend import UNKNOWN_PLACE
from ..datasets.schema import RECORDS_SCHEMA
from .source_listing import Listing, record_batches, spool
from .source_record import SourceRecord, caption_texts
from .sources import Source

OF_THE_LISTING = ("bad_metadata", "missing_file", "duplicate_key", "no_caption")  # rejects that no file decides


@dataclass(frozen=True)
class Base:
    """The complete revision that a new one builds on: its plan and its tables."""

    plan: FrozenPlan
    records: pa.Table
    captions: pa.Table


@dataclass(frozen=True)
class Options:
    """What a user may ask for when a store grows.

    Args:
      drop_gone: leave out records that are gone from the source; otherwise they stay.
      retry_rejected: try rejected records again although their files are the same.
    """

    drop_gone: bool = False
    retry_rejected: bool = False


@dataclass(frozen=True)
class Kept:
    """A record carried over: where it stands in the base, and what the source says of it now."""

    position: int
    record: SourceRecord


@dataclass(frozen=True)
class Comparison:
    """A source against a revision.

    Args:
      kept: records carried over, in the order of the base.
      fresh: records to be planned, in the order of the source.
      attempts: of those that are tried again, by their position in ``fresh``: which try this is.
      table: the base's records that are carried over (RECORDS_SCHEMA).
      gone_classes: that only records have which are gone from the source; they follow the source's own.
      num_added, num_changed, num_retried: of the fresh ones.
      num_described: carried over with another label or other captions.
      num_gone: no longer in the source.
      num_dropped: of those, left out.
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

    @property
    def texts(self) -> list[list[str]]:
        """Captions of the records carried over; what was rejected at scan has none."""
        rows = self.table["row"].to_pylist()
        return [caption_texts(one.record) if row >= 0 else [] for one, row in zip(self.kept, rows, strict=True)]

    @property
    def changes_anything(self) -> bool:
        """A new revision would differ from the base."""
        return bool(self.fresh or self.num_described or self.num_dropped)


def all_fresh(records: Listing) -> Comparison:
    """A source of which nothing is encoded yet."""
    return Comparison([], records, RECORDS_SCHEMA.empty_table(), num_added=len(records))


def compare(
    source: Source,
    base: Base,
    options: Options,
    *,
    check_content: bool,
    num_threads: int,
    progress: Callable[[int], None],
) -> Comparison:
    """Compare a source with a revision; reads the files that may have changed.

    Args:
      check_content: read every file, also where size, time and place are the same.
      progress: called with the number of files read so far.
    """
    old = _records_of(base)
    reasons = base.records["reason"].to_pylist()
    repeats = [reason == "duplicate_key" for reason in reasons]
    places = {identity: i for i, identity in enumerate(_identities(old, repeats))}
    repeats = [record.problem is not None and record.problem[0] == "duplicate_key" for record in source.records]
    listed = list(zip(_identities(source.records, repeats), source.records, strict=True))
    known = [(places[identity], record) for identity, record in listed if identity in places]
    statuses = base.records["status"].to_pylist()
    checksums = base.records["source_checksum"].to_pylist()
    attempts = base.records["attempts"].to_pylist()
    sizes = list(zip(base.records["height_px"].to_pylist(), base.records["width_px"].to_pylist(), strict=True))

    def is_unchanged(pair: tuple[int, SourceRecord]) -> bool:
        position, now = pair
        if statuses[position] == "rejected" and old[position].mtime_ns == UNKNOWN_PLACE:
            return True  # the plan was rebuilt without the places, and a reject has no checksum to compare
        if reasons[position] in OF_THE_LISTING and not now.problem:
            return reasons[position] == "no_caption" and not caption_texts(now) and old[position].place == now.place
        if reasons[position] == "wrong_size" and now.height_px and (now.height_px, now.width_px) != sizes[position]:
            return False  # a table said it, and says something else now
        if now.problem or statuses[position] == "rejected":
            return old[position].place == now.place
        if old[position].place == now.place and not check_content:
            return True
        return checksums[position] is not None and _checksum(source, now) == checksums[position]

    unchanged: dict[int, bool] = {}
    with ThreadPoolExecutor(num_threads, thread_name_prefix="leandit-compare") as pool:
        for done, ((position, _), same) in enumerate(zip(known, pool.map(is_unchanged, known), strict=True), 1):
            unchanged[position] = same
            progress(done)

    now_at = dict(known)
    gone = [record for i, record in enumerate(old) if i not in now_at or now_at[i].problem]
    gone_classes, label_of = _classes_of(gone, base.plan.spec.classes, source)
    kept: list[Kept] = []
    fresh: list[SourceRecord] = []
    attempts_now: dict[int, int] = {}
    count: dict[str, int] = defaultdict(int)
    for position, before in enumerate(old):
        now = now_at.get(position)
        missing = now is None or (now.problem is not None and statuses[position] == "stored")
        if missing:
            count["num_gone"] += 1
            count["num_dropped"] += options.drop_gone
            if not options.drop_gone:
                # A record that is listed still, without its file, is kept as well.
                kept.append(Kept(position, replace(before, label=label_of.get(before.label, before.label))))
        elif unchanged[position] and not (options.retry_rejected and statuses[position] == "rejected"):
            assert now is not None
            no_longer_captioned = bool(caption_texts(before)) and not caption_texts(now)
            if no_longer_captioned and base.plan.spec.text:
                unchanged[position] = False  # to be planned again, and rejected for it
                continue
            differs = (before.label, caption_texts(before)) != (now.label, caption_texts(now))
            count["num_described"] += differs and statuses[position] == "stored"
            kept.append(Kept(position, now))
    carried = {one.position for one in kept}
    for identity, record in listed:
        position = places.get(identity)
        if position is None:
            count["num_added"] += 1
            fresh.append(record)
        elif position not in carried:
            retried = unchanged[position] and statuses[position] == "rejected"  # a dropped one becomes a reject
            count["num_retried" if retried else "num_changed"] += 1
            if retried:
                attempts_now[len(fresh)] = attempts[position] + 1
            fresh.append(record)
    table = base.records.take(pa.array([one.position for one in kept], pa.int64()))
    listing = spool(record_batches(fresh), lambda _: None, check_keys=False)  # what repeats a key says so already
    return Comparison(kept, listing, table, attempts_now, [] if options.drop_gone else gone_classes, **count)


def _classes_of(gone: list[SourceRecord], before: list[str] | None, source: Source) -> tuple[list[str], dict[int, int]]:
    """Classes that a source has no longer, and the labels that records which are gone get beside the source's own."""
    classes, labels = source.classes or [], sorted({record.label for record in gone if record.label >= 0})
    if not labels or before is None:
        return [], {}
    if not source.has_class_names:  # a label is its own name
        return [str(i) for i in range(len(classes), labels[-1] + 1)], {}
    missing = [before[label] for label in labels if before[label] not in classes]
    every = [*classes, *missing]
    return missing, {label: every.index(before[label]) for label in labels}


def _records_of(base: Base) -> list[SourceRecord]:
    """What the source said when the base was planned."""
    texts = base.captions["text"].to_pylist()
    table = base.plan.records
    columns = ("key", "source_path", "source_offset", "source_bytes", "source_mtime_ns", "label", "caption_ids")
    return [
        SourceRecord(key, path, offset, size, mtime_ns, label, tuple(texts[i] for i in ids or ()))
        for key, path, offset, size, mtime_ns, label, ids in zip(
            *(table[name].to_pylist() for name in columns), strict=True
        )
    ]


def _identities(records: Iterable[SourceRecord], repeats: list[bool]) -> list[tuple[str, int]]:
    """Key of each record, and for one that repeats a key how many did so before it: each of them is a reject.

    Not the order alone: a record that was planned anew stands behind the repetitions that were carried over.
    """
    seen: dict[str, int] = defaultdict(int)
    identities = []
    for record, repeated in zip(records, repeats, strict=True):
        seen[record.key] += repeated
        identities.append((record.key, seen[record.key] if repeated else 0))
    return identities


def _checksum(source: Source, record: SourceRecord) -> int | None:
    try:
        return xxhash.xxh3_64_intdigest(source.read(record.path, record.offset, record.num_bytes, stage="scan"))
    except RecordRejected:
        return None
