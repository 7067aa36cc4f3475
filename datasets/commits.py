"""Commit records and their merge: what is in a revision of a store, and that it is all there.

A shard counts only when its commit record is there, fits its own hash, belongs to this plan, and names files of the
right size. The merge is a pure function of the plan and the records, so it gives the same bytes whoever runs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pydantic import ValidationError

from .errors import DamageError
from .frozen import FrozenPlan
from .hashing import canonical_json, read_json, sha256_of, xxh3_file, xxh3_parts
from .layout import (
    CAPTION_PART,
    CAPTIONS,
    GROUP,
    MANIFEST,
    NULL_PART,
    RECORDS,
    REVISIONS,
    bucket_part,
    commit_path,
    revision_prefix,
)
from .schema import (
    CAPTION_RESULTS,
    CAPTIONS_SCHEMA,
    FORMAT_VERSION,
    RECORDS_SCHEMA,
    REJECT_REASONS,
    CommitRecord,
    FileEntry,
    Manifest,
)
from .tables import table_bytes

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

Task = tuple[str, int]
Commits = Mapping[Task, CommitRecord]


def read_commits(root: Path, plan: FrozenPlan, *, check_bytes: bool = False) -> dict[Task, CommitRecord]:
    """Read the commit records that hold; ``check_bytes`` as ``read_commit``."""
    found = {task: read_commit(root, plan, *task, check_bytes=check_bytes) for task in plan.layout.tasks()}
    return {task: record for task, record in found.items() if record}


def read_commit(
    root: Path, plan: FrozenPlan, part: str, shard: int, *, check_bytes: bool = False
) -> CommitRecord | None:
    """Read the commit record of a task, or None where it does not hold: then the shard is made again.

    Args:
      check_bytes: hash the shard's files too, not only look at their size: where a disk lost power they may hold zeros.
    """
    record = read_record(root, plan, part, shard)
    if record is None or not all(_has_size(root / entry.path, entry.bytes) for entry in record.files):
        return None
    if check_bytes and not all(xxh3_file(root / entry.path) == entry.xxh3_128 for entry in record.files):
        return None
    return record


def read_record(root: Path, plan: FrozenPlan, part: str, shard: int) -> CommitRecord | None:
    """Read the commit record of a task whether or not its files are there; None where it is not of this plan."""
    try:
        record = CommitRecord.model_validate(read_json(root / commit_path(plan.revision, part, shard)))
    except (OSError, DamageError, ValidationError):
        return None
    named = (record.fingerprint, record.plan, record.part, record.shard)
    if named != (plan.spec.fingerprint, plan.hash, part, shard) or record != record.with_hash():
        return None
    return record if _fits_plan(plan, record) else None


def _fits_plan(plan: FrozenPlan, record: CommitRecord) -> bool:
    """It names the files and as many rows as the plan has for it; a record of others may say anything."""
    if {entry.path for entry in record.files} != {
        array.shard_path(record.shard) for array in plan.layout.part_arrays(record.part)
    }:
        return False
    if record.part in (CAPTION_PART, NULL_PART):
        count = len(plan.layout.captions_of(record.shard)) if record.part == CAPTION_PART else 1
        return (
            len(record.checksums) == count
            and all(_HEX.fullmatch(digits) for digits in record.checksums)
            and not record.source_checksums
            and not record.rejects
            and len(record.min_cosines) == len(record.max_errors)
            and len(record.min_cosines) in ((0, count) if record.part == CAPTION_PART else (0,))
            and not record.fallbacks
        )
    rows = plan.layout.rows_of(record.part, record.shard)
    return (
        len(record.checksums) == len(record.source_checksums) == len(rows)
        and not record.min_cosines
        and not record.max_errors
        and all(not digits or _HEX.fullmatch(digits) for digits in (*record.checksums, *record.source_checksums))
        and all(reject.row in rows and reject.reason in REJECT_REASONS for reject in record.rejects)
        and all(fallback.row in rows for fallback in record.fallbacks)
    )


_HEX = re.compile("[0-9a-f]{16}")


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def merge_records(plan: FrozenPlan, commits: Commits) -> pa.Table:
    """Records table of a revision: the plan's places joined with what became of each row."""
    columns = {name: plan.records[name] for name in RECORDS_SCHEMA.names}
    changed = ("status", "stage", "reason", "detail", "checksum", "source_checksum", "fallback")
    values = {name: np.array(columns[name].to_pylist(), object) for name in changed}
    for bucket, positions in plan.bucket_positions.items():
        for shard in range(plan.layout.latents[bucket][0].num_shards):
            commit = commits.get((bucket_part(bucket), shard))
            if commit is None:
                continue
            rows = plan.layout.rows_of(bucket_part(bucket), shard)
            here = positions[rows.start : rows.stop]
            values["status"][here] = "stored"
            for name, digits in (("checksum", commit.checksums), ("source_checksum", commit.source_checksums)):
                values[name][here] = [int(text, 16) if text else None for text in digits]
            for fallback in commit.fallbacks:
                values["fallback"][positions[fallback.row]] = fallback.how
            for reject in commit.rejects:
                at = positions[reject.row]
                for name, value in (("status", "rejected"), ("checksum", None), ("source_checksum", None)):
                    values[name][at] = value
                for name in ("stage", "reason", "detail"):
                    values[name][at] = getattr(reject, name)
    return pa.table(columns | values, schema=RECORDS_SCHEMA)


def merge_captions(plan: FrozenPlan, commits: Commits) -> pa.Table:
    """Captions table of a revision: the plan's texts with the checksums of their embeddings, and how close they are."""
    values = {name: plan.captions[name].to_pylist() for name in CAPTION_RESULTS}
    for (part, shard), commit in commits.items():
        if part == CAPTION_PART:
            captions = plan.layout.captions_of(shard)
            first = plan.first_caption + captions.start
            here = slice(first, first + len(captions))
            values["checksum"][here] = [int(digits, 16) for digits in commit.checksums]
            nothing = [None] * len(captions)
            values["min_cosine"][here] = commit.min_cosines or nothing
            values["max_error"][here] = commit.max_errors or nothing
    columns = {name: plan.captions[name] for name in CAPTIONS_SCHEMA.names}
    return pa.table(columns | values, schema=CAPTIONS_SCHEMA)


def seal_files(plan: FrozenPlan, commits: Commits) -> tuple[dict[str, bytes], Manifest]:
    """Everything that a revision's seal writes, and the manifest over it.

    Args:
      commits: of all tasks of the plan.
    Returns: path and content of the files that are neither shards nor commit records, then the manifest.
    """
    prefix = revision_prefix(plan.revision)
    records, captions = merge_records(plan, commits), merge_captions(plan, commits)
    tables = {prefix + RECORDS: table_bytes(records), prefix + CAPTIONS: table_bytes(captions)}
    files = plan.layout.static_files() | tables
    written = files | {
        commit_path(plan.revision, *task): canonical_json(commit.model_dump()) for task, commit in commits.items()
    }
    entries = {entry.path: entry for entry in plan.carried}
    entries |= {path: file_entry(path, content) for path, content in written.items()}
    entries |= {entry.path: entry for commit in commits.values() for entry in commit.files}
    statuses = pc.value_counts(records["status"]).to_pylist()
    count = {entry["values"]: entry["counts"] for entry in statuses}
    num_stored, num_rejected = count.get("stored", 0), count.get("rejected", 0)
    assert num_stored + num_rejected == records.num_rows, "a record is neither stored nor rejected"
    stored = records.filter(pc.equal(records["status"], "stored"))["bucket"].value_counts().to_pylist()
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        revision=plan.revision,
        base=plan.base,
        stack=[*plan.stack, plan.revision],
        copies=plan.copies,
        fingerprint=plan.spec.fingerprint,
        plan=plan.hash,
        num_planned=records.num_rows,
        num_stored=num_stored,
        num_rejected=num_rejected,
        buckets=dict.fromkeys(plan.bucket_positions, 0) | {entry["values"]: entry["counts"] for entry in stored},
        num_captions=captions.num_rows,
        num_caption_tokens=int(captions["num_tokens"].to_numpy().sum()),
        files=[entries[path] for path in sorted(entries)],
        root_hash="",
    )
    return files, with_root_hash(manifest)


def carried_files(base: Manifest, stack: Sequence[int]) -> tuple[FileEntry, ...]:
    """Files of a revision that the next one reads too: the root's metadata and the arrays of its stack."""
    prefixes = [revision_prefix(revision) + name for revision in stack for name in ("buckets/", "captions/", GROUP)]
    shared = (GROUP, f"{REVISIONS}/{GROUP}", *prefixes)
    return tuple(entry for entry in base.files if entry.path.startswith(shared))


def with_root_hash(manifest: Manifest) -> Manifest:
    """The same manifest with the hash of all the rest filled in."""
    return manifest.model_copy(update={"root_hash": root_hash(manifest)})


def root_hash(manifest: Manifest) -> str:
    """Hash of all that a manifest says but this."""
    return sha256_of(manifest.model_dump(exclude={"root_hash"}))


def file_entry(path: str, content: bytes) -> FileEntry:
    """Size and hash of a file's content."""
    size, digest = xxh3_parts([content])
    return FileEntry(path=path, bytes=size, xxh3_128=digest)


def read_manifest(root: Path, revision: int) -> Manifest:
    """Read the manifest of a revision.

    Raises: DamageError: it is not what was written.
    """
    name = revision_prefix(revision) + MANIFEST
    mend = "Run 'leandit verify --repair': it is made anew from the commit records."
    try:
        manifest = Manifest.model_validate(read_json(root / name))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])[:80]
        raise DamageError(f"store '{root}': '{name}' is not valid: {where}: {first['msg']}. {mend}") from error
    if root_hash(manifest) != manifest.root_hash or manifest.revision != revision:
        raise DamageError(f"store '{root}': '{name}' does not fit its own root hash. {mend}")
    return manifest
