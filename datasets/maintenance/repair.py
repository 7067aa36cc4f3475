"""Repair without encoding: plan, commit records, tables and manifest are rebuilt from each other.

Each can be rebuilt from the others byte for byte, so only damage to two that depend on each other loses something.
Shards are encoded again by ``precompute/repair.py``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from ..arrays.shard_file import ShardFile
from ..disk.files import remove, write_atomic
from ..disk.hashing import canonical_json, xxh3_file, xxh3_parts
from ..disk.strays import sweep_strays
from ..errors import DamageError, StoreError, StoreIncomplete
from ..format.layout import CAPTION_PART, CAPTIONS, GROUP, NULL_PART, RECORDS, commit_path, group_json, revision_prefix
from ..format.schema import CommitRecord, Fallback, FileEntry, Reject
from ..format.table_schemas import CAPTION_RESULTS, CAPTIONS_SCHEMA
from ..revisions.catalog import read_spec
from ..revisions.commits import Task, carried_files, commit_record, file_entry, read_manifest, read_record
from ..revisions.plan import FrozenPlan, planned_revisions, read_plan, write_plan
from ..revisions.writer import StoreWriter, row_checksum
from .findings import read_intact_table, shard_place
from .verify import Verification, verify_store

UNKNOWN_LOCATION = -1  # size and time of a picture in a rebuilt plan: the next precompute compares the bytes
SOURCE_COLUMNS = {
    "source_path": pa.string(),
    "source_offset": pa.int64(),
    "source_bytes": pa.int64(),
    "source_mtime_ns": pa.int64(),
}


def repair_revision(root: Path, revision: int, found: Verification) -> StoreWriter | None:
    """Rebuild damaged plan, metadata and commit records of a revision, and seal it if possible.

    Returns: a writer for the shards to encode; None if too much is lost.
    """
    plan = _plan_of(root, revision)
    if plan is None:
        return None
    for task in plan.layout.tasks():
        if read_record(root, plan, *task) is None:
            record = _rebuild_record(root, plan, task, found.expected)
            if record:
                write_atomic(root / commit_path(revision, *task), canonical_json(record.model_dump()))
    writer = StoreWriter(root, plan)  # rewrites damaged metadata
    reseal(writer)
    return writer


def reseal(writer: StoreWriter) -> None:
    """Write tables and manifest again if all shards exist."""
    if not writer.missing_tasks() and (writer.num_stored or writer.plan.stack):
        writer.seal()


def repair_without_encoding(root: Path, found: Verification) -> Verification:
    """Repair everything that needs no encoder, and remove temporaries of killed processes.

    Args:
      found: a verification of the store.
    Returns: a verification after the repair.
    Raises: StoreError: a folder with files replaces a file of the store; then nothing is changed.
    """
    _make_way(root, found)
    remove_litter(root)
    for revision in revisions_to_repair(found):
        repair_revision(root, revision, found)
    _repair_root_group(root, found)
    return verify_store(root)


def revisions_to_repair(found: Verification) -> list[int]:
    """Revisions with findings, and all complete ones, which may share metadata."""
    return sorted({finding.revision for finding in found.findings} | set(found.revisions))


def remove_litter(root: Path) -> list[Path]:
    """Remove the temporaries of all processes; only safe while nothing writes to the store."""
    return sweep_strays(root, of_all=True)


def _make_way(root: Path, found: Verification) -> None:
    """Replace links and empty folders in place of a file of the store."""
    for finding in found.findings:
        path = root / finding.path
        if finding.cause in ("missing", "unsealed", "content") and path.is_dir() and not path.is_symlink():
            if any(inner.is_symlink() or not inner.is_dir() for inner in path.rglob("*")):
                raise StoreError(
                    f"store '{root}': '{finding.path}' is a folder with files; needed a file. "
                    "Nothing was changed. Move the folder out of the store, then repair again."
                )
            remove(path)
        elif finding.cause == "link":
            entry = found.expected.get(finding.path)
            intact = path.is_file() and (entry is None or xxh3_file(path) == entry.xxh3_128)
            if intact:  # plans and manifests carry their own hash, and are checked again
                write_atomic(path, path.read_bytes())
            elif entry is None or not shard_place(finding.path):
                remove(path)  # the target stays; the file is rebuilt


def _repair_root_group(root: Path, found: Verification) -> None:
    """Restore the root's metadata from the first revision, or after a compaction from a later one."""
    entry = found.expected.get(GROUP)
    if entry is None or not any(finding.path == GROUP for finding in found.findings):
        return
    for revision in planned_revisions(root):
        try:
            content = group_json(read_plan(root, revision).spec)
        except (DamageError, StoreError):
            continue
        if xxh3_parts([content])[1] == entry.xxh3_128:
            write_atomic(root / GROUP, content)
            return


def _plan_of(root: Path, revision: int) -> FrozenPlan | None:
    """Read a plan; if it is damaged, rebuild it from the sealed tables and write it."""
    try:
        return read_plan(root, revision)
    except (DamageError, StoreIncomplete):
        pass
    try:
        manifest, spec = read_manifest(root, revision), read_spec(root, revision)
        records, captions = (read_intact_table(root, manifest, name) for name in (RECORDS, CAPTIONS))
    except (DamageError, StoreError, OSError):
        return None
    group = revision_prefix(revision) + GROUP
    if not any(entry == file_entry(group, group_json(spec)) for entry in manifest.files):
        return None  # the attributes are damaged as well
    plan = FrozenPlan(
        spec=spec,
        revision=revision,
        base=manifest.base,
        stack=tuple(manifest.stack[:-1]),
        carried=carried_files(manifest, manifest.stack[:-1]) if revision > 1 else (),
        copies=manifest.copies,
        listing="",  # unknown: the next precompute compares all files by content
        records=_planned_records(records, revision),
        captions=_planned_captions(captions, revision),
        recorded_hash=manifest.plan,
        self_check=manifest.self_check,
    )
    write_plan(root, plan, replace=True)
    return plan


def _planned_records(records: pa.Table, revision: int) -> pa.Table:
    """The records table as planned; of the pictures' locations only the names are known."""
    own = (records["revision"].to_numpy() == revision) & (records["row"].to_numpy() >= 0)
    columns = {name: records[name] for name in records.column_names}
    unknown_yet = ("stage", "reason", "detail", "checksum", "source_checksum", "fallback")
    undone = {"status": "planned", **dict.fromkeys(unknown_yet)}
    for name, value in undone.items():
        values = np.array(records[name].to_pylist(), object)
        values[own] = value
        columns[name] = pa.array(values, records.schema.field(name).type)
    count = records.num_rows
    unknown = dict.fromkeys(list(SOURCE_COLUMNS)[1:], np.full(count, UNKNOWN_LOCATION))
    columns |= {"source_path": columns["key"], **unknown}
    fields = [*records.schema, *SOURCE_COLUMNS.items()]
    return pa.table(columns, schema=pa.schema(fields))


def _planned_captions(captions: pa.Table, revision: int) -> pa.Table:
    own = captions["revision"].to_numpy() == revision
    columns = {name: captions[name] for name in CAPTIONS_SCHEMA.names}
    for name in CAPTION_RESULTS:
        values = np.array(captions[name].to_pylist(), object)
        values[own] = None
        columns[name] = pa.array(values, CAPTIONS_SCHEMA.field(name).type)
    return pa.table(columns, schema=CAPTIONS_SCHEMA)


def _rebuild_record(root: Path, plan: FrozenPlan, task: Task, expected: dict[str, FileEntry]) -> CommitRecord | None:
    """Rebuild a commit record from manifest and tables; None if its hash differs from the manifest."""
    part, shard = task
    entry = expected.get(commit_path(plan.revision, *task))
    try:
        manifest = read_manifest(root, plan.revision)
        records, captions = (read_intact_table(root, manifest, name) for name in (RECORDS, CAPTIONS))
    except (DamageError, OSError):
        return None
    arrays = plan.layout.part_arrays(part)
    files = [expected[array.shard_path(shard)] for array in arrays if array.shard_path(shard) in expected]
    if entry is None or len(files) != len(arrays):
        return None
    checksums, source_checksums, rejects, fallbacks, qualities = [], [], [], [], {}
    if part == CAPTION_PART:
        ids = plan.layout.captions_of(shard)
        table = captions.slice(plan.first_caption + ids.start, len(ids))
        checksums = _digits(table["checksum"].to_pylist())
        if not table["min_cosine"].null_count:
            qualities = {"min_cosines": table["min_cosine"].to_pylist(), "max_errors": table["max_error"].to_pylist()}
    elif part == NULL_PART:  # no table holds its checksum
        rows = []
        for file, array in zip(files, arrays, strict=True):
            shard_path = root / file.path
            if not shard_path.is_file() or xxh3_file(shard_path) != file.xxh3_128:
                return None
            rows.append(ShardFile(shard_path, array, array.shape[0]).read(0, array.shape[0]))
        checksums = [row_checksum(*rows)]
    else:
        rows = plan.layout.rows_of(part, shard)
        positions = plan.bucket_positions[part.removeprefix("buckets/")][rows.start : rows.stop]
        table = records.take(pa.array(positions)).to_pylist()
        checksums = _digits([row["checksum"] for row in table])
        source_checksums = _digits([row["source_checksum"] for row in table])
        rejects = [
            Reject(row=row["row"], key=row["key"], stage=row["stage"], reason=row["reason"], detail=row["detail"])
            for row in table
            if row["status"] == "rejected"
        ]
        fallbacks = [Fallback(row=row["row"], how=row["fallback"]) for row in table if row["fallback"]]
    record = commit_record(
        plan,
        part,
        shard,
        files=files,
        checksums=checksums,
        source_checksums=source_checksums,
        rejects=rejects,
        fallbacks=fallbacks,
        **qualities,
    )
    same = xxh3_parts([canonical_json(record.model_dump())])[1] == entry.xxh3_128
    return record if same else None


def _digits(checksums: list[int | None]) -> list[str]:
    return ["" if checksum is None else f"{checksum:016x}" for checksum in checksums]
