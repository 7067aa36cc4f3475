"""The frozen plan of a revision: the position of every row, fixed before the first encode, in one atomic folder.

The first process to write the folder plans the revision; all others use that plan. So concurrent coordinators still
write one store, even if the source changes meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from ..format.layout import (
    CAPTIONS,
    PLAN,
    PLAN_FILE,
    RECORDS,
    Content,
    Part,
    RevisionLayout,
    revision_prefix,
    revisions_with,
)
from ..format.row_layout import LATENTS
from ..format.schema import FORMAT_VERSION, Addition, FileEntry, LatentStatistics, PlanFile, SelfCheck, StoreSpec
from ..format.table_schemas import CAPTION_RESULTS, captions_schema, suffixes
from ..format.tables import map_plan_table, parquet_file, table_problem

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

VOLATILE = "source_mtime_ns"  # columns that begin so do not depend on the content of a file


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
      records: as ``plan_schema``, all records of the revision. Records that it encodes have its number in
        ``revision``; the others are carried over, and may be completed by ``added``.
      captions: as ``captions_schema``; those that this revision adds come last, sorted by length.
      recorded_hash: from the store; empty for a new plan.
      self_check: of the autoencoder, made before the first plan of the stack was frozen; None without one.
      statistics: of the latents in the stack; None without a stack, or if some of its shards have none.
      added: text encoders, features and pictures that it adds to the rows and captions of earlier revisions.
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
    statistics: LatentStatistics | None = None
    added: tuple[Addition, ...] = ()

    @cached_property
    def hash(self) -> str:
        """Hash of everything that decides the bytes; commit records name it."""
        if self.recorded_hash:
            return self.recorded_hash
        volatile = [name for name in self.records.column_names if name.startswith(VOLATILE)]
        parts = [parquet_file(self.records.drop_columns(volatile)), parquet_file(self.captions)]
        tables = [xxh3_parts([part])[1] for part in parts]
        added = [addition.model_dump() for addition in self.added]
        facts = [self.spec.fingerprint, self.revision, self.base, self.stack, self.copies, *tables]
        return sha256_of([*facts, added] if added else facts)

    @cached_property
    def bucket_positions(self) -> dict[str, np.ndarray]:
        """Of each bucket, (N,) positions in the records table by row, mapped; buckets in order of their size."""
        counts = {name: rows for name, rows in _count_rows(self).items() if rows}
        return self._positions(self.revision, {name: counts[name] for name in sorted(counts, key=bucket_size)})

    @cached_property
    def _added_positions(self) -> dict[int, dict[str, np.ndarray]]:
        return {one.revision: self._positions(one.revision, one.buckets) for one in self.added}

    def positions_of(self, part: Part) -> np.ndarray:
        """(N,) positions in the records table of the rows of a part; -1 for a row that no stored record has."""
        of_revision = (
            self._added_positions if part.revision != self.revision else {self.revision: self.bucket_positions}
        )
        return of_revision[part.revision][part.bucket]

    def _positions(self, revision: int, counts: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Positions in the records table of the rows of a revision's buckets, mapped; -1 where there is no record."""
        ends = np.cumsum([*counts.values()], dtype=np.int64)
        positions = map_array(int(ends[-1]) if len(ends) else 0, "int64", "the rows of the plan")
        positions[:] = -1
        by_bucket = {name: positions[end - counts[name] : end] for name, end in zip(counts, ends, strict=True)}
        for name, rows, records in _rows_of(self, revision):
            assert name is not None, "a row has a bucket"
            if name in by_bucket:
                by_bucket[name][rows] = records
        return by_bucket

    @cached_property
    def own_captions(self) -> pa.Table:
        """The captions that this revision adds."""
        return self.captions_of(self.revision)

    @cached_property
    def first_caption(self) -> int:
        """Id of the first caption that this revision adds."""
        return self.first_caption_of(self.revision)

    def first_caption_of(self, revision: int) -> int:
        """Id of the first caption that a revision added."""
        return int(pc.sum(pc.less(self.captions["revision"], revision)).as_py() or 0)

    def captions_of(self, revision: int) -> pa.Table:
        """The captions that a revision added."""
        first, end = self.first_caption_of(revision), self.first_caption_of(revision + 1)
        return self.captions.slice(first, end - first)

    @cached_property
    def layout(self) -> RevisionLayout:
        """Files and arrays of the revision."""
        rows = {name: len(positions) for name, positions in self.bucket_positions.items()}
        texts = [one.name for one in self.spec.text_encoders]
        groups = [LATENTS, *self.spec.groups]
        own = Content(self.revision, rows, self._num_tokens(self.revision, texts), not self.stack, groups)
        added = [
            Content(one.revision, one.buckets, self._num_tokens(one.revision, one.texts), one.has_null, one.groups)
            for one in self.added
        ]
        return RevisionLayout(self.spec, own, added)

    def _num_tokens(self, revision: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """(num_captions,) stored tokens of the captions that a revision added, by text encoder."""
        captions, found = self.captions_of(revision), {}
        for name in names:
            spec = self.spec.text_encoder_of(name).spec
            counts = captions[f"num_tokens{suffixes(self.spec)[name]}"].to_numpy()
            found[name] = np.full(len(counts), spec.max_tokens) if spec.full_length else counts
        return found


def first_plan(
    spec: StoreSpec,
    listing: str,
    records: pa.Table,
    *,
    texts: Sequence[str],
    num_tokens: Sequence[int],
    further: Mapping[str, Sequence[int]] = {},
) -> FrozenPlan:
    """The plan of a store's first revision, for captions that need no tokenizer.

    Args:
      records: as ``plan_schema`` has them.
      texts: of the captions, sorted by their lengths.
      num_tokens: their lengths, by the first text encoder.
      further: their lengths by each other text encoder.
    """
    count = len(texts)
    captions: dict[str, Sequence[Any]] = {"text": texts, "revision": [1] * count}
    for suffix, lengths in {"": num_tokens, **{f"_{name}": lengths for name, lengths in further.items()}}.items():
        captions |= {f"num_tokens{suffix}": lengths, f"truncated{suffix}": [False] * count}
        captions |= {f"{result}{suffix}": [None] * count for result in CAPTION_RESULTS}
    return FrozenPlan(
        spec=spec,
        revision=1,
        base="",
        stack=(),
        carried=(),
        copies=False,
        listing=listing,
        records=records,
        captions=pa.table(captions, schema=captions_schema(spec)),
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
    if plan.statistics:
        content["statistics"] = plan.statistics.model_dump()
    if plan.added:
        content["added"] = [addition.model_dump() for addition in plan.added]
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
        statistics=file.statistics,
        added=tuple(file.added),
    )
    if problem := table_problem(file.spec, revision, records, captions.num_rows, captions) or _row_problem(plan):
        raise DamageError(f"{damaged} Its tables are not valid: {problem}.")
    return plan


def _rows_of(plan: FrozenPlan, revision: int) -> Iterator[tuple[str | None, np.ndarray, np.ndarray]]:
    """Bucket, rows and table positions of the records in a revision's arrays, without those that it rejected."""
    first = 0
    for batch in plan.records.select(["bucket", "revision", "row", "status"]).to_batches():
        rows = batch["row"].to_numpy()
        has_row = (batch["revision"].to_numpy() == revision) & (rows >= 0)
        if revision != plan.revision:
            has_row &= pc.equal(batch["status"], "stored").to_numpy(zero_copy_only=False)
        own = np.flatnonzero(has_row)
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
    for name, rows, _ in _rows_of(plan, plan.revision):
        assert name is not None, "a row has a bucket"
        counts[name] = counts.get(name, 0) + len(rows)
    return counts


def _row_problem(plan: FrozenPlan) -> str:
    """Describe a bucket whose rows are not 0, 1, 2, ...; "" if there is none."""
    if any(name is None for name, _, _ in _rows_of(plan, plan.revision)):
        return "a row without a bucket"
    counts = _count_rows(plan)
    seen = {name: np.zeros(rows, bool) for name, rows in counts.items()}
    for name, rows, _ in _rows_of(plan, plan.revision):
        assert name is not None, "checked above"
        if rows.max() < counts[name]:
            seen[name][rows] = True
    for name, is_seen in seen.items():
        if not is_seen.all():
            return f"rows of bucket {name!r} that are not consecutive"
    return ""
