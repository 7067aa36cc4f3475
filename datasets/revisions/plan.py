"""The frozen plan of a revision: every row's place, fixed before the first encode, in a folder written as one.

Whoever writes the folder first has planned the revision; all others go on with that plan. So coordinators that start at
the same moment, or from a source that changes meanwhile, still make one store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pydantic import ValidationError

from ..disk.cached import cached_property
from ..disk.files import write_folder
from ..disk.hashing import canonical_json, read_json, sha256_of, xxh3_file, xxh3_parts
from ..disk.spill import map_array
from ..errors import DamageError, FormatVersionError, StoreIncomplete
from ..format.buckets import bucket_size
from ..format.layout import CAPTIONS, PLAN, PLAN_FILE, RECORDS, RevisionLayout, revision_prefix, revisions_with
from ..format.schema import FORMAT_VERSION, FileEntry, PlanFile, StoreSpec
from ..format.table_schemas import CAPTION_RESULTS, CAPTIONS_SCHEMA
from ..format.tables import map_plan_table, parquet_file, table_problem

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

VOLATILE_COLUMN = "source_mtime_ns"  # it says when a file was written, not what is in it


@dataclass(frozen=True)
class FrozenPlan:
    """The plan of one revision.

    Args:
      spec: what the revision says of itself.
      revision: its number, from 1.
      base: root hash of the revision that it builds on, "" for the first.
      stack: earlier revisions whose arrays stay in use.
      carried: files of earlier revisions that it reads: the root's metadata, and the arrays of its stack.
      copies: its rows are copied from the base, a revision of another store, not encoded (``leandit compact``).
      listing: hash of the source's listing (keys, sizes, times), to tell whether the source has changed.
      records: all records of the revision: RECORDS_SCHEMA's columns, then where each picture lies in the source. What
        this revision makes has its number in ``revision``; the rest is carried over as it is.
      captions: CAPTIONS_SCHEMA; those that this revision adds come last, sorted so that equal lengths lie together.
      recorded_hash: as the store says it; computed where the plan is new.
    """

    spec: StoreSpec
    revision: int
    base: str
    stack: tuple[int, ...]
    carried: tuple[FileEntry, ...]
    copies: bool
    listing: str
    records: pa.Table
    captions: pa.Table
    recorded_hash: str = ""

    @cached_property
    def hash(self) -> str:
        """What commit records name: a hash of all that decides the bytes."""
        if self.recorded_hash:
            return self.recorded_hash
        parts = [parquet_file(self.records.drop_columns([VOLATILE_COLUMN])), parquet_file(self.captions)]
        tables = [xxh3_parts([part])[1] for part in parts]
        return sha256_of([self.spec.fingerprint, self.revision, self.base, self.stack, self.copies, *tables])

    @cached_property
    def bucket_positions(self) -> dict[str, np.ndarray]:
        """Of each bucket, (N,) positions in the records table by row, mapped; buckets in order of their size."""
        counts = {name: rows for name, rows in _count_rows(self).items() if rows}
        names = sorted(counts, key=bucket_size)
        positions = map_array(sum(counts.values()), "int64", "the rows of the plan")
        ends = np.cumsum([counts[name] for name in names])
        found = {name: positions[end - counts[name] : end] for name, end in zip(names, ends, strict=True)}
        for name, rows, here in _own_rows(self):
            assert name is not None, "a row has a bucket"
            found[name][rows] = here
        return found

    @cached_property
    def own_captions(self) -> pa.Table:
        """The captions that this revision adds."""
        return self.captions.slice(self.first_caption)

    @cached_property
    def first_caption(self) -> int:
        """Id of the first caption that this revision adds."""
        return int(pc.sum(pc.less(self.captions["revision"], self.revision)).as_py() or 0)

    @cached_property
    def layout(self) -> RevisionLayout:
        """Where everything of the revision lies."""
        return RevisionLayout(
            spec=self.spec,
            revision=self.revision,
            bucket_rows={name: len(positions) for name, positions in self.bucket_positions.items()},
            num_tokens=self.own_captions["num_tokens"].to_numpy(),
            has_null=self.spec.text is not None and not self.stack,
        )


def first_plan(
    spec: StoreSpec, listing: str, records: pa.Table, *, texts: Sequence[str], num_tokens: Sequence[int]
) -> FrozenPlan:
    """The plan of a store's first revision, where captions need no tokenizer.

    Args:
      records: as PLAN_SCHEMA has them.
      texts: of the captions, sorted by their lengths.
      num_tokens: their lengths.
    """
    count = len(texts)
    captions = {
        "text": texts,
        "revision": [1] * count,
        "num_tokens": num_tokens,
        "truncated": [False] * count,
        **dict.fromkeys(CAPTION_RESULTS, [None] * count),
    }
    return FrozenPlan(
        spec=spec,
        revision=1,
        base="",
        stack=(),
        carried=(),
        copies=False,
        listing=listing,
        records=records,
        captions=pa.table(captions, schema=CAPTIONS_SCHEMA),
    )


def freeze_plan(root: Path, plan: FrozenPlan) -> FrozenPlan:
    """Write the plan of a revision, unless there is one.

    Returns: the plan that holds: this one, or the one that was there.
    """
    return plan if write_plan(root, plan, replace=False) else read_plan(root, plan.revision)


def write_plan(root: Path, plan: FrozenPlan, *, replace: bool) -> bool:
    """Write the folder of a plan; returns False where there is one that stays."""
    tables = {RECORDS: [parquet_file(plan.records)], CAPTIONS: [parquet_file(plan.captions)]}
    entries = []
    for name, content in tables.items():
        size, digest = xxh3_parts(content)
        entries.append(FileEntry(path=name, bytes=size, xxh3_128=digest).model_dump())
    head = {
        "format_version": FORMAT_VERSION,
        "revision": plan.revision,
        "base": plan.base,
        "stack": list(plan.stack),
        "carried": [entry.model_dump() for entry in plan.carried],
        "copies": plan.copies,
        "listing": plan.listing,
        "plan": plan.hash,
        "spec": plan.spec.model_dump(),
        "files": entries,
    }
    head |= {"sha256": sha256_of(head)}
    folder = root / revision_prefix(plan.revision) / PLAN
    return write_folder(folder, [*tables.items(), (PLAN_FILE, canonical_json(head))], replace=replace)


def planned_revisions(root: Path) -> list[int]:
    """Revisions of a store that have a plan, in order."""
    return revisions_with(root, f"{PLAN}/{PLAN_FILE}")


def read_plan(root: Path, revision: int) -> FrozenPlan:
    """Read the frozen plan of a revision.

    Raises: StoreIncomplete: there is none; DamageError: a file of it is not what was written.
    """
    folder = root / revision_prefix(revision) / PLAN
    if not (folder / PLAN_FILE).is_file():
        raise StoreIncomplete(f"store '{root}': its plan is not finished. Run the same precompute command again.")
    head = read_json(folder / PLAN_FILE)
    damaged = DamageError(
        f"store '{root}': the plan of revision {revision} is damaged. Run 'leandit verify --repair --source PATH'."
    )
    if not isinstance(head, dict) or head.pop("sha256", None) != sha256_of(head):
        raise damaged
    if head.get("format_version") != FORMAT_VERSION:
        raise FormatVersionError(
            f"store '{root}': its plan has format version {head.get('format_version')}, this release reads "
            f"{FORMAT_VERSION}. Use the release that wrote it, or precompute again."
        )
    try:
        said = PlanFile.model_validate(head)
    except ValidationError as error:
        raise damaged from error
    if said.revision != revision:
        raise damaged
    for name, entry in zip((RECORDS, CAPTIONS), said.files, strict=True):
        if not (folder / name).is_file() or xxh3_file(folder / name) != entry.xxh3_128:
            raise damaged
    records, captions = map_plan_table(folder / RECORDS), map_plan_table(folder / CAPTIONS)
    plan = FrozenPlan(
        spec=said.spec,
        revision=revision,
        base=said.base,
        stack=tuple(said.stack),
        carried=tuple(said.carried),
        copies=said.copies,
        listing=said.listing,
        records=records,
        captions=captions,
        recorded_hash=said.plan,
    )
    if problem := table_problem(said.spec, revision, records, captions.num_rows, captions) or _place_problem(plan):
        raise DamageError(f"{damaged} It says what cannot be: {problem}.")
    return plan


def _own_rows(plan: FrozenPlan) -> Iterator[tuple[str | None, np.ndarray, np.ndarray]]:
    """Records with a row in the plan's own arrays, a few at a time: their bucket, rows, and positions in the table."""
    first = 0
    for batch in plan.records.select(["bucket", "revision", "row"]).to_batches():
        rows = batch["row"].to_numpy()
        own = np.flatnonzero((batch["revision"].to_numpy() == plan.revision) & (rows >= 0))
        if len(own):
            buckets = batch["bucket"].take(pa.array(own)).dictionary_encode()
            codes = pc.fill_null(buckets.indices, -1).to_numpy()
            for code, name in [*enumerate(buckets.dictionary.to_pylist()), (-1, None)]:
                here = own[codes == code]
                if len(here):
                    yield name, rows[here], here + first
        first += batch.num_rows


def _count_rows(plan: FrozenPlan) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, rows, _ in _own_rows(plan):
        assert name is not None, "a row has a bucket"
        counts[name] = counts.get(name, 0) + len(rows)
    return counts


def _place_problem(plan: FrozenPlan) -> str:
    """Rows of a bucket that are not 0, 1, 2, ..., or ""."""
    counts: dict[str, int] = {}
    for name, rows, _ in _own_rows(plan):
        if name is None:
            return "a row without a bucket"
        counts[name] = counts.get(name, 0) + len(rows)
    seen = {name: np.zeros(rows, bool) for name, rows in counts.items()}
    for name, rows, _ in _own_rows(plan):
        assert name is not None, "looked at above"
        if rows.max() < counts[name]:
            seen[name][rows] = True
    for name, there in seen.items():
        if not there.all():
            return f"rows of bucket {name!r} that do not follow each other"
    return ""
