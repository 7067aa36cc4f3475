"""Repair without encoding: plan, commit records, tables and manifest are rebuilt from each other.

Each can be rebuilt from the others byte for byte, so only damage to two that depend on each other loses something.
Shards are encoded again by ``precompute/repair.py``.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from ..disk.files import remove, write_atomic
from ..disk.hashing import canonical_json, read_json, xxh3_file, xxh3_parts
from ..disk.strays import sweep_strays
from ..errors import DamageError, StoreError, StoreIncomplete
from ..format.buckets import bucket_size
from ..format.caption_layout import NULL_PART
from ..format.layout import (
    ADDED,
    CAPTIONS,
    GROUP,
    MANIFEST,
    PLAN,
    PLAN_FILE,
    RECORDS,
    commit_path,
    group_json,
    revision_prefix,
)
from ..format.row_layout import bucket_part
from ..format.schema import Addition, CommitRecord, Manifest, StoreSpec
from ..format.table_schemas import (
    CAPTION_RESULTS,
    PICTURE_RESULTS,
    captions_schema,
    place_columns,
    plan_schema,
    suffixes,
)
from ..format.zarr_shard import ArrayLayout
from ..revisions.catalog import read_spec
from ..revisions.commits import carried_files, file_entry, read_manifest, read_record
from ..revisions.plan import FrozenPlan, planned_revisions, read_plan, write_plan
from ..revisions.writer import StoreWriter
from .findings import read_intact_table, shard_place
from .rebuilt_record import rebuild_record
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
        record = read_record(root, plan, *task) or rebuild_record(root, plan, task, found.expected)
        if record:
            _write_json(root / commit_path(revision, *task), record.model_dump())
    writer = StoreWriter(root, plan)  # rewrites damaged metadata
    reseal(writer)
    return writer


def _write_json(path: Path, value: Any) -> None:
    """Write JSON unless the file has these bytes: a space more leaves its values, and so their hash, as they were."""
    content = canonical_json(value)
    if not path.is_file() or path.read_bytes() != content:
        write_atomic(path, content)


def reseal(writer: StoreWriter) -> None:
    """Write tables and manifest again if all shards exist."""
    if not writer.missing_tasks() and (writer.num_stored or writer.plan.stack):
        manifest = writer.seal()
        _write_json(writer.root / revision_prefix(manifest.revision) / MANIFEST, manifest.model_dump())


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
        plan = read_plan(root, revision)
    except (DamageError, StoreIncomplete):
        return _rebuilt_plan(root, revision)
    head = root / revision_prefix(revision) / PLAN / PLAN_FILE
    _write_json(head, read_json(head))
    return plan


def _rebuilt_plan(root: Path, revision: int) -> FrozenPlan | None:
    """Rebuild a plan from the sealed tables, and write it."""
    try:
        manifest, spec = read_manifest(root, revision), read_spec(root, revision)
        records, captions = (read_intact_table(root, manifest, name) for name in (RECORDS, CAPTIONS))
    except (DamageError, StoreError, OSError):
        return None
    group = revision_prefix(revision) + GROUP
    if not any(entry == file_entry(group, group_json(spec)) for entry in manifest.files):
        return None  # the attributes are damaged as well
    try:
        added = _additions(root, manifest, spec)
        below = read_manifest(root, manifest.stack[-2]) if manifest.stack[:-1] else None
    except (DamageError, ValidationError, OSError):
        return None  # what it adds to, or says what was added, is damaged as well
    plan = FrozenPlan(
        spec=spec,
        revision=revision,
        base=manifest.base,
        stack=tuple(manifest.stack[:-1]),
        carried=carried_files(manifest, manifest.stack[:-1]) if revision > 1 else (),
        copies=manifest.copies,
        listing="",  # unknown: the next precompute compares all files by content
        records=_planned_records(records, revision, spec, {name for one in added for name in one.groups}),
        captions=_planned_captions(captions, revision, spec, {name for one in added for name in one.texts}),
        recorded_hash=manifest.plan,
        self_check=manifest.self_check,
        statistics=below and below.statistics,
        added=added,
    )
    write_plan(root, plan, replace=True)
    return plan


def _additions(root: Path, manifest: Manifest, spec: StoreSpec) -> tuple[Addition, ...]:
    """What a revision adds to earlier ones, from its commit records.

    Raises: DamageError, ValidationError, OSError: a record or an array's metadata is damaged.
    """
    prefix = f"{revision_prefix(manifest.revision)}commits/{ADDED}/"
    added: dict[int, dict[str, Any]] = {}
    for path in (entry.path for entry in manifest.files if entry.path.startswith(prefix)):
        number, kind, name, *_ = path.removeprefix(prefix).split("/")
        one = added.setdefault(
            int(number), {"buckets": {}, "texts": [], "features": [], "pictures": [], "has_null": False}
        )
        if kind == "buckets":
            groups = CommitRecord.model_validate(read_json(root / path)).features
            one["pictures"] = [picture.name for picture in spec.pictures if picture.name in groups]
            one["features"] = [name for name in groups if name not in one["pictures"]]
            latents = f"{revision_prefix(int(number))}{bucket_part(name)}/{spec.latent.array}"
            one["buckets"][name] = ArrayLayout.from_metadata(latents, read_json(root / latents / GROUP)).shape[0]
            continue
        one["has_null"] |= kind == NULL_PART
        text = "" if name.endswith(".json") else name
        one["texts"] += [text] if text not in one["texts"] else []
    order = [one.name for one in (*spec.text_encoders, *spec.features)]
    for one in added.values():
        one["texts"].sort(key=order.index)
        one["features"].sort(key=order.index)
        one["buckets"] = {bucket: one["buckets"][bucket] for bucket in sorted(one["buckets"], key=bucket_size)}
    return tuple(Addition(revision=number, **added[number]) for number in sorted(added))


def _planned_records(records: pa.Table, revision: int, spec: StoreSpec, added: Set[str]) -> pa.Table:
    """The records table as planned; of the pictures' locations only the names are known.

    Args:
      added: names of features and pictures that the revision adds to all records.
    """
    own = (records["revision"].to_numpy() == revision) & (records["row"].to_numpy() >= 0)
    columns = {name: records[name] for name in records.column_names}
    unknown_yet = ["stage", "reason", "detail", "checksum", "source_checksum", "fallback"]
    undone = {"status": "planned", **dict.fromkeys(unknown_yet)}
    undone |= {f"{name}_{feature.name}": None for feature in spec.features for name in CAPTION_RESULTS}
    undone |= {f"{name}_{picture.name}": None for picture in spec.pictures for name in PICTURE_RESULTS}
    everywhere = {f"{name}_{group}" for group in added for name in (*CAPTION_RESULTS, *PICTURE_RESULTS)}
    for name, value in undone.items():
        values = np.array(records[name].to_pylist(), object)
        values[slice(None) if name in everywhere else own] = value
        columns[name] = pa.array(values, records.schema.field(name).type)
    count = records.num_rows
    unknown = dict.fromkeys(list(SOURCE_COLUMNS)[1:], np.full(count, UNKNOWN_LOCATION))
    columns |= {"source_path": columns["key"], **unknown}
    for path, *numbers in place_columns(spec):
        columns |= {path: pa.array([""] * count), **dict.fromkeys(numbers, np.full(count, UNKNOWN_LOCATION))}
    schema = plan_schema(spec)
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _planned_captions(captions: pa.Table, revision: int, spec: StoreSpec, added: Set[str]) -> pa.Table:
    """The captions table as planned; ``added``: text encoders that the revision adds to all captions."""
    own, schema = captions["revision"].to_numpy() == revision, captions_schema(spec)
    columns = {name: captions[name] for name in schema.names}
    for text, suffix in suffixes(spec).items():
        for name in (f"{result}{suffix}" for result in CAPTION_RESULTS):
            values = np.array(captions[name].to_pylist(), object)
            values[slice(None) if text in added else own] = None
            columns[name] = pa.array(values, schema.field(name).type)
    return pa.table(columns, schema=schema)
