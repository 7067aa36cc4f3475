"""A lost commit record, rebuilt from manifest, tables and shard: byte for byte the lost one, or not used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..arrays.shard_file import ShardFile
from ..disk.hashing import canonical_json, xxh3_file, xxh3_parts
from ..errors import DamageError
from ..format.layout import CAPTIONS, RECORDS, Part, Task, commit_path
from ..format.row_layout import LATENTS
from ..format.schema import CommitRecord, Fallback, FeatureRows, FileEntry, Reject
from ..format.table_schemas import suffixes
from ..format.zarr_shard import ArrayLayout
from ..revisions.commits import commit_record, read_manifest
from ..revisions.latent_statistics import statistics_of
from ..revisions.plan import FrozenPlan
from ..revisions.writer import row_checksum
from .findings import read_intact_table


def rebuild_record(root: Path, plan: FrozenPlan, task: Task, expected: dict[str, FileEntry]) -> CommitRecord | None:
    """Rebuild a commit record from manifest and tables; None if its hash differs from the manifest."""
    part, shard = task
    entry = expected.get(commit_path(plan.revision, *task))
    try:
        manifest = read_manifest(root, plan.revision)
        records, captions = (read_intact_table(root, manifest, name) for name in (RECORDS, CAPTIONS))
    except (DamageError, OSError):
        return None
    of_part = plan.layout.parts[part]
    files = [expected[array.shard_path(shard)] for array in of_part.arrays if array.shard_path(shard) in expected]
    if entry is None or len(files) != len(of_part.arrays):
        return None
    try:
        if of_part.captions is None:
            content = _picture_content(plan, of_part, shard, records)
            if LATENTS in of_part.groups:
                latents = _intact_rows(root, of_part.groups[LATENTS], shard, expected)
                content["statistics"] = statistics_of(latents, plan.spec.latent)
        elif of_part.is_null:  # no table holds its checksum
            content = {"checksums": [row_checksum(*_intact_rows(root, of_part.arrays, shard, expected))]}
        else:
            content = _caption_content(plan, of_part, shard, captions)
    except DamageError:
        return None  # the shard is damaged as well, and is encoded again
    nothing = {"checksums": [], "source_checksums": [], "rejects": [], "fallbacks": []}
    for without in ({}, {"statistics": None}):  # as earlier releases, which kept none
        record = commit_record(plan, part, shard, files=files, **nothing | content | without)
        if xxh3_parts([canonical_json(record.model_dump())])[1] == entry.xxh3_128:
            return record
    return None


def _intact_rows(
    root: Path, arrays: Sequence[ArrayLayout], shard: int, expected: dict[str, FileEntry]
) -> list[np.ndarray]:
    """All rows of a shard of each array. Raises: DamageError: a file of it is damaged."""
    rows = []
    for array in arrays:
        entry = expected[array.shard_path(shard)]
        path = root / entry.path
        if not path.is_file() or xxh3_file(path) != entry.xxh3_128:
            raise DamageError(f"store '{root}': '{entry.path}' is damaged.")
        rows.append(ShardFile(path, array, len(array.rows_of(shard))).read(0, len(array.rows_of(shard))))
    return rows


def _caption_content(plan: FrozenPlan, part: Part, shard: int, captions: pa.Table) -> dict[str, Any]:
    """What the commit record of a shard of captions says."""
    assert part.captions, "a part of captions"
    ids, suffix = part.captions.captions_of(shard), suffixes(plan.spec)[part.captions.name]
    table = captions.slice(plan.first_caption_of(part.revision) + ids.start, len(ids))
    return {"checksums": _digits(table[f"checksum{suffix}"].to_pylist())} | _qualities(table, suffix)


def _picture_content(plan: FrozenPlan, part: Part, shard: int, records: pa.Table) -> dict[str, Any]:
    """What the commit record of a shard of latents, features or companion pictures says."""
    rows, is_own = plan.layout.rows_of(part.name, shard), LATENTS in part.groups
    positions = plan.positions_of(part)[rows.start : rows.stop]
    columns = records.take(pa.array(positions, mask=positions < 0))  # nulls for a row without a record
    table, features = columns.to_pylist(), {}
    for name in part.groups.keys() - {LATENTS}:
        found = _digits(columns[f"checksum_{name}"].to_pylist())
        features[name] = FeatureRows(checksums=found, **_beside_checksums(columns, name))
    return {
        "checksums": _digits([row["checksum"] for row in table]) if is_own else [],
        "source_checksums": _digits([row["source_checksum"] for row in table]) if is_own else [],
        "rejects": [
            Reject(row=row["row"], key=row["key"], stage=row["stage"], reason=row["reason"], detail=row["detail"])
            for row in table
            if row["status"] == "rejected"
        ],
        "fallbacks": [Fallback(row=row["row"], how=row["fallback"]) for row in table if is_own and row["fallback"]],
        "features": features,
    }


def _beside_checksums(table: pa.Table, group: str) -> dict[str, Any]:
    """What a commit record has of rows of a feature or a companion picture, besides their checksums."""
    if f"source_checksum_{group}" in table.column_names:
        return {"source_checksums": _digits(table[f"source_checksum_{group}"].to_pylist())}
    return _qualities(table, f"_{group}")


def _qualities(table: pa.Table, suffix: str) -> dict[str, list[float]]:
    """Smallest cosines and largest errors of some rows, as in a commit record; empty if nothing was narrowed.

    A row that is not stored has zeros.
    """
    columns = {f"{name}s": table[f"{name}{suffix}"] for name in ("min_cosine", "max_error")}
    if all(column.null_count == len(column) for column in columns.values()):
        return {}
    return {name: [0.0 if value is None else value for value in column.to_pylist()] for name, column in columns.items()}


def _digits(checksums: list[int | None]) -> list[str]:
    return ["" if checksum is None else f"{checksum:016x}" for checksum in checksums]
