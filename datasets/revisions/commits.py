"""Commit records, and the manifest that merges them.

A shard counts only if its commit record exists, matches its own hash, belongs to this plan, and names files of the
right size. The seal is a pure function of plan and records, so every process writes the same bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute
from pydantic import ValidationError

from ..disk.hashing import canonical_json, read_json, sha256_of, xxh3_file, xxh3_parts
from ..errors import DamageError
from ..format.layout import (
    CAPTIONS,
    GROUP,
    MANIFEST,
    RECORDS,
    REVISIONS,
    Task,
    commit_path,
    is_picture_part,
    revision_prefix,
)
from ..format.row_layout import LATENTS
from ..format.schema import FORMAT_VERSION, CommitRecord, FeatureRows, FileEntry, LatentStatistics, Manifest
from ..format.table_schemas import REJECT_REASONS, captions_schema, records_schema
from ..format.tables import parquet_of_groups
from .latent_statistics import merge_statistics
from .merge import STATUSES, Merge
from .plan import FrozenPlan

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them


def missing_work(plan: FrozenPlan, missing: Sequence[Task]) -> str:
    """Describe tasks of a plan for a message: shards, pictures, captions."""
    layout = plan.layout
    counts = Counter[str]()
    for which, tasks in (("missing", missing), ("all", layout.tasks())):
        for part, shard in tasks:
            if not layout.parts[part].is_null:
                counts[f"{which} {'pictures' if is_picture_part(part) else 'captions'}"] += layout.num_items(
                    part, shard
                )
    described = f"{len(missing)} of {len(layout.tasks())} shards, with {counts['missing pictures']} of "
    described += f"{counts['all pictures']} pictures"
    if not plan.spec.text_encoders:
        return described
    return f"{described} and {counts['missing captions']} of {counts['all captions']} captions"


def read_commits(root: Path, plan: FrozenPlan, *, check_bytes: bool = False) -> dict[Task, CommitRecord]:
    """Read all valid commit records; ``check_bytes`` as of ``read_commit``."""
    records = {task: read_commit(root, plan, *task, check_bytes=check_bytes) for task in plan.layout.tasks()}
    return {task: record for task, record in records.items() if record}


def read_commit(
    root: Path, plan: FrozenPlan, part: str, shard: int, *, check_bytes: bool = False
) -> CommitRecord | None:
    """Read the commit record of a task; None if it is not valid, so the shard must be encoded again.

    Args:
      check_bytes: hash the shard's files instead of only checking sizes: after a power failure they may hold zeros.
    """
    record = read_record(root, plan, part, shard)
    if record is None:
        return None
    files = [(root / entry.path, entry) for entry in record.files]
    if not all(path.is_file() and path.stat().st_size == entry.bytes for path, entry in files):
        return None
    if check_bytes and not all(xxh3_file(path) == entry.xxh3_128 for path, entry in files):
        return None
    return record


def read_record(root: Path, plan: FrozenPlan, part: str, shard: int) -> CommitRecord | None:
    """Read the commit record of a task without looking at its files; None if it is not of this plan."""
    try:
        record = CommitRecord.model_validate(read_json(root / commit_path(plan.revision, part, shard)))
    except (OSError, DamageError, ValidationError):
        return None
    named = (record.fingerprint, record.plan, record.part, record.shard)
    if named != (plan.spec.fingerprint, plan.hash, part, shard) or record != record.with_hash():
        return None
    return record if _matches_plan(plan, record) else None


def _matches_plan(plan: FrozenPlan, record: CommitRecord) -> bool:
    """Whether a record has the files and rows of the plan; a record from others may contain anything."""
    part = plan.layout.parts[record.part]
    if {entry.path for entry in record.files} != {array.shard_path(record.shard) for array in part.arrays}:
        return False
    count = plan.layout.num_items(record.part, record.shard)
    if part.captions:
        return (
            len(record.checksums) == count
            and all(_HEX.fullmatch(digits) for digits in record.checksums)
            and not record.source_checksums
            and not record.rejects
            and not record.features
            and record.statistics is None
            and len(record.min_cosines) == len(record.max_errors)
            and len(record.min_cosines) in ((0,) if part.is_null else (0, count))
            and not record.fallbacks
        )
    rows, pictures = plan.layout.rows_of(record.part, record.shard), {one.name for one in plan.spec.pictures}
    return (
        len(record.checksums) == len(record.source_checksums) == (count if LATENTS in part.groups else 0)
        and record.features.keys() == part.groups.keys() - {LATENTS}
        and _are_statistics(record.statistics, plan.spec.latent.channels if LATENTS in part.groups else 0)
        and all(_fits(found, count, name in pictures) for name, found in record.features.items())
        and not record.min_cosines
        and not record.max_errors
        and all(not digits or _HEX.fullmatch(digits) for digits in (*record.checksums, *record.source_checksums))
        and all(reject.row in rows and reject.reason in REJECT_REASONS for reject in record.rejects)
        and all(fallback.row in rows for fallback in record.fallbacks)
    )


def _are_statistics(statistics: LatentStatistics | None, channels: int) -> bool:
    """Whether statistics are of this many channels; those of an earlier release are absent."""
    return not statistics or len(statistics.channel_mean) == len(statistics.channel_std) == channels > 0


def _fits(found: FeatureRows, count: int, is_picture: bool) -> bool:
    """Whether a feature or companion picture has results of all rows of a shard."""
    return (
        len(found.checksums) == count
        and len(found.source_checksums) == (count if is_picture else 0)
        and all(not digits or _HEX.fullmatch(digits) for digits in (*found.checksums, *found.source_checksums))
        and len(found.min_cosines) == len(found.max_errors)
        and len(found.min_cosines) in ((0,) if is_picture else (0, count))
    )


_HEX = re.compile("[0-9a-f]{16}")


class CommitSummary(NamedTuple):
    """The part of a commit record that a writer keeps in memory, without the checksums of its rows.

    Args:
      files: of its shard, then the record itself.
      num_rows: records or captions that it adds; 0 if it only completes those of an earlier revision.
      rejects: number by reason.
    """

    files: tuple[FileEntry, ...]
    num_rows: int
    rejects: Counter[str]

    @classmethod
    def of(cls, plan: FrozenPlan, record: CommitRecord) -> CommitSummary:
        """Summarise a record."""
        rejects = Counter(reject.reason for reject in record.rejects)
        num_rows = len(record.checksums) if plan.layout.parts[record.part].revision == plan.revision else 0
        return cls((*record.files, _record_entry(plan, record)), num_rows, rejects)


class CommitFiles(Mapping[Task, CommitRecord]):
    """The commit records of a plan, each read from disk on access.

    Raises: DamageError: one of them has changed since the seal began, or does not account for each of its rows.
    """

    def __init__(self, root: Path, plan: FrozenPlan) -> None:
        self._root, self._plan = root, plan

    def __getitem__(self, task: Task) -> CommitRecord:
        if (record := read_record(self._root, self._plan, *task)) is None:
            raise DamageError(
                f"store '{self._root}': '{commit_path(self._plan.revision, *task)}' changed while the store was "
                "sealed. Run the same command again."
            )
        _check_rows(self._root, self._plan, record)
        return record

    def __iter__(self) -> Iterator[Task]:
        return iter(self._plan.layout.tasks())

    def __len__(self) -> int:
        return len(self._plan.layout.tasks())


def _check_rows(root: Path, plan: FrozenPlan, record: CommitRecord) -> None:
    """Raise DamageError unless each planned row of a shard of pictures is either stored or rejected, exactly once."""
    part = plan.layout.parts[record.part]
    if part.captions:  # always stored: ``_matches_plan`` has seen a checksum of each
        return
    rows = plan.layout.rows_of(record.part, record.shard)
    positions = plan.positions_of(part)[rows.start : rows.stop]
    rejects = Counter(reject.row for reject in record.rejects)
    groups = [record.checksums] if LATENTS in part.groups else []
    groups += [found.checksums for found in record.features.values()]
    for row, position, *checksums in zip(rows, positions, *groups, strict=True):
        is_stored, count = any(checksums), rejects[row]
        if is_stored + count == (position >= 0) and all(checksums) == is_stored:
            continue
        key = f"record '{plan.records['key'][int(position)]}'" if position >= 0 else "no record"
        where = f"revision {plan.revision}, bucket {part.bucket}, shard {record.shard}, row {row} ({key})"
        raise DamageError(
            f"store '{root}': {where} has {sum(map(bool, checksums))} of {len(checksums)} checksums and {count} "
            "rejects; a record is stored with all checksums, or rejected once. Remove "
            f"'{commit_path(plan.revision, record.part, record.shard)}' and run the same command again: it encodes "
            "this shard again."
        )


def seal_files(root: Path, plan: FrozenPlan) -> tuple[dict[str, bytes | memoryview], Manifest]:
    """Content of the files that a seal writes, and the manifest.

    Reads each commit record of the plan once.

    Returns: content by path of the files that are neither shards nor commit records (tables in mapped temporary files),
      and the manifest.
    Raises: DamageError: as ``CommitFiles``, or a record is neither stored nor rejected.
    """
    prefix, merge = revision_prefix(plan.revision), Merge(plan)
    entries, statistics = {entry.path: entry for entry in plan.carried}, [plan.statistics] if plan.stack else []
    for task, commit in CommitFiles(root, plan).items():
        merge.add(task, commit)
        if LATENTS in plan.layout.parts[task[0]].groups:
            statistics.append(commit.statistics)
        entries |= {entry.path: entry for entry in CommitSummary.of(plan, commit).files}
    statuses, stored = Counter[str](), Counter[str]()

    def counted(groups: Iterable[pa.Table]) -> Iterator[pa.Table]:
        for group in groups:
            _check_statuses(root, plan, group)
            statuses.update(_counts(group["status"]))
            stored.update(_counts(group["bucket"].filter(pc.equal(group["status"], "stored"))))
            yield group

    files: dict[str, bytes | memoryview] = {
        **plan.layout.static_files(),
        prefix + RECORDS: parquet_of_groups(records_schema(plan.spec), counted(merge.record_groups())),
        prefix + CAPTIONS: parquet_of_groups(captions_schema(plan.spec), merge.caption_groups()),
    }
    entries |= {path: file_entry(path, content) for path, content in files.items()}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        revision=plan.revision,
        base=plan.base,
        stack=[*plan.stack, plan.revision],
        copies=plan.copies,
        fingerprint=plan.spec.fingerprint,
        plan=plan.hash,
        num_planned=plan.records.num_rows,
        num_stored=statuses["stored"],
        num_rejected=statuses["rejected"],
        buckets={**dict.fromkeys(plan.bucket_positions, 0), **stored},
        num_captions=plan.captions.num_rows,
        num_caption_tokens=pc.sum(pc.cast(plan.captions["num_tokens"], pa.int64())).as_py() or 0,
        files=[entries[path] for path in sorted(entries)],
        root_hash="",
        self_check=plan.self_check,
        statistics=_merged(statistics),
    )
    return files, with_root_hash(manifest)


def _check_statuses(root: Path, plan: FrozenPlan, group: pa.Table) -> None:
    """Raise DamageError at a record that is neither stored nor rejected."""
    left = group.filter(pc.invert(pc.is_in(group["status"], STATUSES)))
    for one in left.slice(0, 1).to_pylist():
        where = f"revision {plan.revision}, bucket {one['bucket']}, row {one['row']} (record '{one['key']}')"
        raise DamageError(
            f"store '{root}': {where} is '{one['status']}', and in no shard of the plan; each must be stored or "
            "rejected. The plan cannot be completed: precompute into another --store."
        )


def _merged(statistics: Sequence[LatentStatistics | None]) -> LatentStatistics | None:
    """Statistics of all shards; None if some are of an earlier release, which kept none."""
    known = [one for one in statistics if one]
    return merge_statistics(known) if known and len(known) == len(statistics) else None


def _counts(values: pa.ChunkedArray) -> dict[str, int]:
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(values).to_pylist()}


def commit_record(plan: FrozenPlan, part: str, shard: int, **content: Any) -> CommitRecord:
    """The commit record of a shard, with its hash.

    Args:
      content: the fields of ``CommitRecord`` that describe the shard.
    """
    of_plan = {"format_version": FORMAT_VERSION, "fingerprint": plan.spec.fingerprint, "plan": plan.hash}
    return CommitRecord(**of_plan, part=part, shard=shard, **content, record_hash="").with_hash()


def _record_entry(plan: FrozenPlan, record: CommitRecord) -> FileEntry:
    """Size and hash of a commit record's own file."""
    return file_entry(commit_path(plan.revision, record.part, record.shard), canonical_json(record.model_dump()))


def carried_files(base: Manifest, stack: Sequence[int]) -> tuple[FileEntry, ...]:
    """Files that the next revision also reads: the root's metadata and the arrays of its stack."""
    prefixes = [revision_prefix(revision) + name for revision in stack for name in ("buckets/", "captions/", GROUP)]
    shared = (GROUP, f"{REVISIONS}/{GROUP}", *prefixes)
    return tuple(entry for entry in base.files if entry.path.startswith(shared))


def with_root_hash(manifest: Manifest) -> Manifest:
    """The manifest with its root hash."""
    return manifest.model_copy(update={"root_hash": root_hash(manifest)})


def root_hash(manifest: Manifest) -> str:
    """Hash of all fields of a manifest except ``root_hash``."""
    return sha256_of(manifest.model_dump(exclude={"root_hash"}))


def file_entry(path: str, content: bytes | memoryview) -> FileEntry:
    """Size and hash of a file's content."""
    size, digest = xxh3_parts([content])
    return FileEntry(path=path, bytes=size, xxh3_128=digest)


def read_manifest(root: Path, revision: int) -> Manifest:
    """Read the manifest of a revision.

    Raises: DamageError.
    """
    name = revision_prefix(revision) + MANIFEST
    remedy = "Run 'leandit verify --repair': it rebuilds the manifest from the commit records."
    try:
        manifest = Manifest.model_validate(read_json(root / name))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])[:80]
        raise DamageError(f"store '{root}': '{name}' is not valid: {where}: {first['msg']}. {remedy}") from error
    if root_hash(manifest) != manifest.root_hash or manifest.revision != revision:
        raise DamageError(f"store '{root}': '{name}' does not match its own root hash. {remedy}")
    return manifest
