"""The frozen plan of a revision: the position of every row, fixed before the first encode, in one atomic folder.

The first process to write the folder plans the revision; all others use that plan. So concurrent coordinators still
write one store, even if the source changes meanwhile.
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
from ..format.schema import FORMAT_VERSION, FileEntry, PlanFile, SelfCheck, StoreSpec
from ..format.table_schemas import CAPTION_RESULTS, CAPTIONS_SCHEMA
from ..format.tables import map_plan_table, parquet_file, table_problem

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

VOLATILE_COLUMN = "source_mtime_ns"  # does not depend on a file's content


@dataclass(frozen=True)
class FrozenPlan:
    """The plan of one revision.

    Args:
      spec: of the revision.
      revision: its number, from 1.
      base: root hash of the revision that it builds on, "" for the first.
      stack: earlier revisions whose arrays stay in use.
      carried: files of earlier revisions that it reads: the root's metadata, and the arrays of its stack.
      copies: its rows are copied from the base, a revision of another store, not encoded (``leandit compact``).
      listing: hash of the source's listing (keys, sizes, times), to detect changes of the source.
      records: PLAN_SCHEMA, all records of the revision. Records that it encodes have its number in ``revision``; the
        others are carried over unchanged.
      captions: CAPTIONS_SCHEMA; those that this revision adds come last, sorted by length.
      recorded_hash: from the store; empty for a new plan.
      self_check: of the autoencoder, made before the first plan of the stack was frozen; None without one.
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
    self_check: SelfCheck | None = None

    @cached_property
    def hash(self) -> str:
        """Hash of everything that decides the bytes; commit records name it."""
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
        by_bucket = {name: positions[end - counts[name] : end] for name, end in zip(names, ends, strict=True)}
        for name, rows, records in _own_rows(self):
            assert name is not None, "a row has a bucket"
            by_bucket[name][rows] = records
        return by_bucket

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
        """Files and arrays of the revision."""
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
    """The plan of a store's first revision, for captions that need no tokenizer.

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
    content = {
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
    if plan.self_check:
        content["self_check"] = plan.self_check.model_dump()
    content |= {"sha256": sha256_of(content)}
    folder = root / revision_prefix(plan.revision) / PLAN
    return write_folder(folder, [*tables.items(), (PLAN_FILE, canonical_json(content))], replace=replace)


def planned_revisions(root: Path) -> list[int]:
    """Revisions of a store that have a plan, in order."""
    return revisions_with(root, f"{PLAN}/{PLAN_FILE}")


def read_plan(root: Path, revision: int) -> FrozenPlan:
    """Read the frozen plan of a revision.

    Raises: StoreIncomplete: it has none; DamageError: a file of it is damaged.
    """
    folder = root / revision_prefix(revision) / PLAN
    if not (folder / PLAN_FILE).is_file():
        raise StoreIncomplete(f"store '{root}': its plan is not finished. Run the same precompute command again.")
    content = read_json(folder / PLAN_FILE)
    damaged = DamageError(
        f"store '{root}': the plan of revision {revision} is damaged. Run 'leandit verify --repair --source PATH'."
    )
    if not isinstance(content, dict) or content.pop("sha256", None) != sha256_of(content):
        raise damaged
    if content.get("format_version") != FORMAT_VERSION:
        raise FormatVersionError(
            f"store '{root}': its plan has format version {content.get('format_version')}, this release reads "
            f"{FORMAT_VERSION}. Use the release that wrote it, or precompute again."
        )
    try:
        file = PlanFile.model_validate(content)
    except ValidationError as error:
        raise damaged from error
    if file.revision != revision:
        raise damaged
    for name, entry in zip((RECORDS, CAPTIONS), file.files, strict=True):
        if not (folder / name).is_file() or xxh3_file(folder / name) != entry.xxh3_128:
            raise damaged
    records, captions = map_plan_table(folder / RECORDS), map_plan_table(folder / CAPTIONS)
    plan = FrozenPlan(
        spec=file.spec,
        revision=revision,
        base=file.base,
        stack=tuple(file.stack),
        carried=tuple(file.carried),
        copies=file.copies,
        listing=file.listing,
        records=records,
        captions=captions,
        recorded_hash=file.plan,
        self_check=file.self_check,
    )
    if problem := table_problem(file.spec, revision, records, captions.num_rows, captions) or _row_problem(plan):
        raise DamageError(f"{damaged} Its tables are not valid: {problem}.")
    return plan


def _own_rows(plan: FrozenPlan) -> Iterator[tuple[str | None, np.ndarray, np.ndarray]]:
    """Bucket, rows and table positions of the records in the plan's own arrays, a few at a time."""
    first = 0
    for batch in plan.records.select(["bucket", "revision", "row"]).to_batches():
        rows = batch["row"].to_numpy()
        own = np.flatnonzero((batch["revision"].to_numpy() == plan.revision) & (rows >= 0))
        if len(own):
            buckets = batch["bucket"].take(pa.array(own)).dictionary_encode()
            codes = pc.fill_null(buckets.indices, -1).to_numpy()
            for code, name in [*enumerate(buckets.dictionary.to_pylist()), (-1, None)]:
                of_bucket = own[codes == code]
                if len(of_bucket):
                    yield name, rows[of_bucket], of_bucket + first
        first += batch.num_rows


def _count_rows(plan: FrozenPlan) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, rows, _ in _own_rows(plan):
        assert name is not None, "a row has a bucket"
        counts[name] = counts.get(name, 0) + len(rows)
    return counts


def _row_problem(plan: FrozenPlan) -> str:
    """Describe a bucket whose rows are not 0, 1, 2, ...; "" if there is none."""
    if any(name is None for name, _, _ in _own_rows(plan)):
        return "a row without a bucket"
    counts = _count_rows(plan)
    seen = {name: np.zeros(rows, bool) for name, rows in counts.items()}
    for name, rows, _ in _own_rows(plan):
        assert name is not None, "checked above"
        if rows.max() < counts[name]:
            seen[name][rows] = True
    for name, is_seen in seen.items():
        if not is_seen.all():
            return f"rows of bucket {name!r} that are not consecutive"
    return ""
