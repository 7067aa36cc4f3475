"""The frozen plan of a revision: the position of every row, fixed before the first encode, in one atomic folder.

The first process to write the folder plans the revision; all others use that plan. So concurrent coordinators still
write one store, even if the source changes meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...errors import DamageError, StoreIncomplete
from ..disk.cached import cached_property
from ..disk.files import write_folder
from ..disk.hashing import canonical_json, sha256_of, xxh3_file, xxh3_parts
from ..disk.spill import map_array
from ..format.buckets import bucket_size
from ..format.layout import (
    CAPTIONS,
    LOCAL,
    PLAN,
    PLAN_FILE,
    RECORDS,
    SOURCES,
    Part,
    RevisionLayout,
    revision_prefix,
    zarr_files,
)
from ..format.row_layout import bucket_part, num_stored_tokens
from ..format.schema import FORMAT_VERSION, FileEntry, LayerQuality, Manifest, PlanFile, SelfCheck, StoreSpec
from ..format.table_schemas import CAPTION_RESULTS, CAPTION_START, captions_schema, plan_schema, suffixes
from ..format.tables import map_parquet, parquet_file, table_problem
from .catalog import Link, check_link, file_entry, read_hashed, read_manifest, sealed_revisions
from .local import read_local, shared_spec, whole_spec

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

VOLATILE = "source_mtime_ns"  # columns that begin so do not depend on the content of a file


@dataclass(frozen=True)
class FrozenPlan:
    """The plan of one revision.

    Args:
      spec: of the revision.
      revision: its number, from 1.
      base: root hash of the revision that it builds on, "" for the first.
      copies: its rows are copied from the base, a revision of another store, not encoded (``leandit compact``).
      listing: hash of the source's listing (keys, sizes, times), to detect changes of the source.
      records: as ``plan_schema``, all records of the revision. Records that it encodes have its number in
        ``revision``; the others are carried over, and new features and images complete them.
      captions: as ``captions_schema``; those that this revision adds come last, sorted by length.
      recorded_hash: from the store; empty for a new plan.
      self_check: of the autoencoder, made before the first plan of the store was frozen; None without one.
      quality: of the int8 groups that the revision begins, on a sample; the manifest also has those before it.
      before: the revision before, whose arrays it extends; None for the first one, and where it copies.
      shard_rows: as ``RevisionLayout.shard_rows``.
    """

    spec: StoreSpec
    revision: int
    base: str
    copies: bool
    listing: str
    records: pa.Table
    captions: pa.Table
    recorded_hash: str = ""
    self_check: SelfCheck | None = None
    quality: Sequence[LayerQuality] = ()
    before: Manifest | None = None
    shard_rows: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def hash(self) -> str:
        """Hash of everything that decides the bytes; commit records name it."""
        if self.recorded_hash:
            return self.recorded_hash
        volatile = [name for name in self.records.column_names if name.startswith(VOLATILE)]
        parts = [parquet_file(self.records.drop_columns(volatile)), parquet_file(self.captions)]
        tables = [xxh3_parts([part])[1] for part in parts]
        return sha256_of([self.spec.fingerprint, self.revision, self.base, self.copies, *tables])

    @cached_property
    def new_rows(self) -> dict[str, int]:
        """Rows that the revision adds to each bucket, in order of their size."""
        counts = dict[str, int]()
        for name, rows, _ in _rows_of(self, new=True):
            assert name is not None, "a row has a bucket"
            counts[name] = counts.get(name, 0) + len(rows)
        return {name: counts[name] for name in sorted(counts, key=bucket_size)}

    def positions_of(self, part: Part) -> np.ndarray:
        """(N,) positions in the records table of all rows of a bucket; -1 for a row that no stored record has."""
        return self._positions[part.bucket]

    def records_with(self, captions: np.ndarray) -> np.ndarray:
        """Positions of the records, but those that the plan rejects, with at least one of some captions, by id."""
        records, ids = caption_owners(self.records["caption_ids"].combine_chunks())
        positions = np.unique(records[np.isin(ids, captions)])
        statuses = self.records["status"].take(pa.array(positions))
        return positions[pc.not_equal(statuses, "rejected").to_numpy(zero_copy_only=False)]

    @cached_property
    def _positions(self) -> dict[str, np.ndarray]:
        """``positions_of`` for each bucket that the revision writes to."""
        ends = {part.bucket: part.arrays[0].shape[0] for part in self.layout.parts.values() if part.bucket}
        borders = np.cumsum([0, *ends.values()], dtype=np.int64)
        positions = map_array(int(borders[-1]), "int64", "the rows of the plan")
        positions[:] = -1
        by_bucket = {
            name: positions[start : start + end] for (name, end), start in zip(ends.items(), borders, strict=False)
        }
        for new in (False, True):
            for name, rows, records in _rows_of(self, new=new):
                if name in by_bucket:
                    by_bucket[name][rows] = records
        return by_bucket

    @cached_property
    def first_caption(self) -> int:
        """Id of the first caption that this revision adds."""
        return int(pc.sum(pc.less(self.captions["revision"], self.revision)).as_py() or 0)

    def captions_of(self, part: Part) -> pa.Table:
        """The captions of a part: those that the revision adds, or of a new text encoder all."""
        assert part.captions is not None, "a part of captions"
        return self.captions.slice(part.captions.first_caption)

    @cached_property
    def layout(self) -> RevisionLayout:
        """Files and arrays of the revision."""
        return RevisionLayout(
            self.spec,
            self.revision,
            self.new_rows,
            {
                name: num_stored_tokens(self.spec.text_encoder_of(name).spec, self.captions[f"num_tokens{suffix}"])
                for name, suffix in suffixes(self.spec).items()
            },
            self.first_caption,
            self.before.layouts() if self.before else {},
            self.shard_rows,
        )

    def zarr_files(self) -> dict[str, bytes]:
        """Content of every ``zarr.json`` of the store, once the revision is complete, by path."""
        return zarr_files(shared_spec(self.spec), self.layout.arrays.values())


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
        captions |= {f"{result}{suffix}": [None] * count for result in (CAPTION_START, *CAPTION_RESULTS)}
    return FrozenPlan(
        spec=spec,
        revision=1,
        base="",
        copies=False,
        listing=listing,
        records=records,
        captions=pa.table(captions, schema=captions_schema(spec)),
    )


def freeze_plan(root: Path, plan: FrozenPlan, *, replace: bool = False) -> FrozenPlan:
    """Write the plan of a revision, unless there is one.

    Args:
      replace: replace a damaged plan, which the caller has found to be the same.
    Returns: the plan of the revision: this one, or one that was written before.
    """
    tables = {RECORDS: parquet_file(plan.records), CAPTIONS: parquet_file(plan.captions)}
    content = PlanFile(
        format_version=FORMAT_VERSION,
        revision=plan.revision,
        base=plan.base,
        copies=plan.copies,
        listing=plan.listing,
        plan=plan.hash,
        spec=plan.spec,
        files=[file_entry(name, content) for name, content in tables.items()],
        self_check=plan.self_check,
        shard_rows=dict(plan.shard_rows),
        quality=list(plan.quality),
        sha256="",
    ).with_hash()
    folder = root / revision_prefix(plan.revision) / PLAN
    parts = [(name, [content]) for name, content in tables.items()]
    files = [*parts, (PLAN_FILE, canonical_json(content.model_dump()))]
    return plan if write_folder(folder, files, replace=replace) else read_plan(root, plan.revision)


def read_plan(root: Path, revision: int) -> FrozenPlan:
    """Read the plan of a revision: the frozen one, or of a sealed revision as its files tell it.

    A sealed one has the results of encoding, so its hash is not the one that commit records named.

    Raises: StoreIncomplete: it has none; DamageError: a file of it is damaged.
    """
    is_sealed = revision in sealed_revisions(root)
    try:
        return _read_plan(root, revision, is_sealed)
    except (DamageError, StoreIncomplete):
        if is_sealed or revision not in sealed_revisions(root):
            raise
        return _read_plan(root, revision, True)  # another process has just sealed it, and removed what was read


def _read_plan(root: Path, revision: int, is_sealed: bool) -> FrozenPlan:
    prefix = revision_prefix(revision)
    if is_sealed:
        remedy = f"Run 'leandit verify {root} --repair'."
        content, local = read_manifest(root, revision), read_local(root, revision)
        if local is None:
            raise DamageError(
                f"store '{root}': '{prefix}{LOCAL}', which names the encoders and the recipe, is missing or damaged. "
                f"{remedy}"
            )
        spec, listing, recorded_hash = whole_spec(content.spec, local), local.listing, ""
        files = {entry.path: entry for entry in (*content.files, local.sources)}
        names, folder = (RECORDS, CAPTIONS, SOURCES), prefix
        entries = [files[prefix + name] for name in names]
        num_planned: int | None = content.num_planned
        num_captions: int | None = content.num_captions
        shard_rows = {layout.path: layout.shard_rows for layout in content.arrays}
    else:
        remedy = (
            f"Revision {revision} is not finished: run the same precompute command again. It plans the revision again, "
            "and keeps the shards that the same plan has encoded."
        )
        content = _read_plan_file(root, revision, remedy)
        spec, listing, recorded_hash = content.spec, content.listing, content.plan
        names, folder, entries = (RECORDS, CAPTIONS), f"{prefix}{PLAN}/", content.files
        num_planned = None
        num_captions = None
        shard_rows = content.shard_rows
    for name, entry in zip(names, entries, strict=True):
        path = root / (folder + name)
        if not _is_intact(path, entry):
            raise DamageError(f"store '{root}': '{folder}{name}' is missing or damaged. {remedy}")
    before = read_manifest(root, revision - 1) if content.base and not content.copies else None
    if before:
        link = Link(base=content.base, copies=content.copies, root_hash="")
        check_link(root, revision, link, Link(base=before.base, copies=before.copies, root_hash=before.root_hash))
    records = map_parquet(root / (folder + RECORDS), num_planned)
    captions = map_parquet(root / (folder + CAPTIONS), num_captions)
    if is_sealed:
        places = map_parquet(root / (folder + SOURCES), num_planned)
        schema = plan_schema(spec)
        columns = {name: (places if name in places.column_names else records)[name] for name in schema.names}
        records = pa.table(columns, schema=schema)
    plan = FrozenPlan(
        spec=spec,
        revision=revision,
        base=content.base,
        copies=content.copies,
        listing=listing,
        records=records,
        captions=captions,
        recorded_hash=recorded_hash,
        self_check=content.self_check,
        quality=content.quality,
        before=before,
        shard_rows=shard_rows,
    )
    if problem := table_problem(spec, revision, records, captions.num_rows, captions) or _row_problem(plan):
        raise DamageError(f"store '{root}': the tables of revision {revision} are not valid: {problem}. {remedy}")
    return plan


def _is_intact(path: Path, entry: FileEntry) -> bool:
    """Whether a file is there with the hash that was written; another process may remove it at any time."""
    try:
        return xxh3_file(path) == entry.xxh3_128
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def read_spec(root: Path, revision: int = 1) -> StoreSpec:
    """The spec of a revision, sealed or not. Raises: as ``read_plan``."""
    if revision in sealed_revisions(root):
        return whole_spec(read_manifest(root, revision).spec, read_local(root, revision))
    return _read_plan_file(root, revision, "").spec


def _read_plan_file(root: Path, revision: int, remedy: str) -> PlanFile:
    """``plan.json`` of an unfinished revision. Raises: as ``read_plan``."""
    name = f"{revision_prefix(revision)}{PLAN}/{PLAN_FILE}"
    if not (root / name).is_file():
        raise StoreIncomplete(f"store '{root}': its plan is not finished. Run the same precompute command again.")
    file = read_hashed(root, name, PlanFile, remedy)
    if file.revision != revision:
        raise DamageError(f"store '{root}': '{name}' is of revision {file.revision}. {remedy}")
    return file


def _rows_of(plan: FrozenPlan, *, new: bool) -> Iterator[tuple[str | None, np.ndarray, np.ndarray]]:
    """Bucket, rows and table positions of records: of those that the revision adds, or of the stored earlier ones."""
    first = 0
    for batch in plan.records.select(["bucket", "revision", "row", "status"]).to_batches():
        rows = batch["row"].to_numpy()
        is_new = batch["revision"].to_numpy() == plan.revision
        has_row = rows >= 0
        if new:
            has_row &= is_new
        else:
            has_row &= ~is_new & pc.equal(batch["status"], "stored").to_numpy(zero_copy_only=False)
        positions = np.flatnonzero(has_row)
        if len(positions):
            buckets = batch["bucket"].take(pa.array(positions)).dictionary_encode()
            codes = pc.fill_null(buckets.indices, -1).to_numpy()
            for code, name in [*enumerate(buckets.dictionary.to_pylist()), (-1, None)]:
                of_bucket = positions[codes == code]
                if len(of_bucket):
                    yield name, rows[of_bucket], of_bucket + first
        first += batch.num_rows


def _row_problem(plan: FrozenPlan) -> str:
    """Describe a bucket whose new rows are not consecutive from its next shard on; "" if there is none."""
    if any(name is None for new in (False, True) for name, _, _ in _rows_of(plan, new=new)):
        return "a row without a bucket"
    seen = {name: np.zeros(rows, bool) for name, rows in plan.new_rows.items()}
    for name, rows, _ in _rows_of(plan, new=True):
        assert name is not None, "checked above"
        places = rows - plan.layout.first_row(name)
        if places.min() >= 0 and places.max() < len(seen[name]):
            seen[name][places] = True
    for name, is_seen in seen.items():
        if not is_seen.all():
            return f"new rows of bucket {name!r} that are not consecutive from {plan.layout.first_row(name)} on"
    known = plan.before.layouts() if plan.before else {}
    for name, rows, _ in _rows_of(plan, new=False):
        latents = known.get(f"{bucket_part(name or '')}/{plan.spec.latent.array}")
        if latents is None or not latents.has_rows(rows).all():
            return f"rows of bucket {name!r} that do not exist"
    return ""


def caption_owners(lists: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Position of the record, and id, of each caption of records: (M,) each."""
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return np.repeat(np.arange(len(lists)), counts), lists.flatten().to_numpy(zero_copy_only=False)
