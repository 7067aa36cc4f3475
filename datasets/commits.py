"""Commit records and their merge: what is in a store, and that it is all there.

A shard counts only when its commit record is there, belongs to this plan and fingerprint, and names files of the right
size. The merge is a pure function of the plan and the records, so it gives the same bytes whoever runs it, and when.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from pydantic import ValidationError

from .errors import DamageError, StoreError
from .files import canonical_json, read_json, xxh3_file, xxh3_parts
from .layout import (
    CAPTION_PART,
    PLAN,
    PLAN_CAPTIONS,
    PLAN_RECORDS,
    bucket_part,
    commit_path,
    embedding_layout,
    latent_layouts,
    place_captions,
    shard_tasks,
    store_layouts,
)
from .schema import CAPTIONS_SCHEMA, FORMAT_VERSION, RECORDS_SCHEMA, CommitRecord, FileEntry, Manifest, StoreSpec

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

Commits = Mapping[tuple[str, int], CommitRecord]


@dataclass(frozen=True)
class FrozenPlan:
    """The plan as it lies in a store: every row's place, fixed before the first encode.

    Args:
      hash: of the two tables (without the files' times), named by every commit record.
      listing: hash of the source's listing (keys, sizes, times), to tell whether the source has changed.
      records: RECORDS_SCHEMA's first columns, then where each picture lies in the source.
      captions: text, num_tokens, truncated; sorted so that equal lengths lie together.
    """

    hash: str
    listing: str
    records: pa.Table
    captions: pa.Table

    @property
    def bucket_rows(self) -> dict[str, int]:
        """Rows per bucket, buckets in order of their name's size."""
        counts = self.records["bucket"].drop_null().value_counts().to_pylist()
        rows = {entry["values"]: entry["counts"] for entry in counts}
        return dict(sorted(rows.items(), key=lambda item: tuple(map(int, item[0].split("x")))))

    @property
    def num_tokens(self) -> np.ndarray:
        """(num_captions,) tokens of each caption."""
        return self.captions["num_tokens"].to_numpy()

    def offsets(self, spec: StoreSpec) -> np.ndarray:
        """(num_captions,) first row of each caption's tokens."""
        if spec.text is None:
            return np.empty(0, np.int64)
        return place_captions(self.num_tokens, embedding_layout(spec, 0).shard_rows)

    def num_token_rows(self, spec: StoreSpec) -> int:
        """Rows of the embeddings array."""
        offsets = self.offsets(spec)
        return int(offsets[-1] + self.num_tokens[-1]) if len(offsets) else 0


def read_plan(root: Path) -> FrozenPlan:
    """Read the frozen plan of a store.

    Raises: StoreError: the plan was never finished; run precompute again.
    """
    if not (root / PLAN).is_file():
        raise StoreError(f"store '{root}': its plan is not finished. Run the same precompute command again.")
    head = read_json(root / PLAN)
    return FrozenPlan(
        hash=head["plan"],
        listing=head["listing"],
        records=pq.read_table(root / PLAN_RECORDS),
        captions=pq.read_table(root / PLAN_CAPTIONS),
    )


def read_commits(root: Path, spec: StoreSpec, plan: FrozenPlan) -> dict[tuple[str, int], CommitRecord]:
    """Read the commit records that hold: of this plan and fingerprint, all files there with the right size."""
    commits = {}
    for part, shard in shard_tasks(spec, plan.bucket_rows, plan.num_token_rows(spec)):
        record = _read_commit(root / commit_path(part, shard))
        if record is None or (record.fingerprint, record.plan) != (spec.fingerprint, plan.hash):
            continue
        if all(_has_size(root / entry.path, entry.bytes) for entry in record.files):
            commits[part, shard] = record
    return commits


def _read_commit(path: Path) -> CommitRecord | None:
    try:
        return CommitRecord.model_validate(read_json(path))
    except (FileNotFoundError, DamageError, ValidationError):
        return None  # not there, or torn: the shard is made again


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def merge_records(spec: StoreSpec, plan: FrozenPlan, commits: Commits) -> pa.Table:
    """Records table of a store: the plan's places joined with what became of each row."""
    columns = {name: plan.records[name] for name in RECORDS_SCHEMA.names if name != "checksum"}
    status = np.array(plan.records["status"].to_pylist(), object)
    stage, reason, detail = (np.array(plan.records[name].to_pylist(), object) for name in ("stage", "reason", "detail"))
    checksums = np.zeros(len(status), np.uint64)
    bucket, row = np.array(plan.records["bucket"].to_pylist(), object), plan.records["row"].to_numpy()
    for name, num_rows in plan.bucket_rows.items():
        positions = np.flatnonzero(bucket == name)
        positions = positions[np.argsort(row[positions], kind="stable")]  # position in the table of each row
        layout = latent_layouts(spec, name, num_rows)[0]
        for shard in range(layout.num_shards):
            commit = commits.get((bucket_part(name), shard))
            if commit is None:
                continue
            rows = layout.rows_of(shard)
            here = positions[rows.start : rows.stop]
            status[here] = "stored"
            checksums[here] = [int(digits, 16) if digits else 0 for digits in commit.checksums]
            for reject in commit.rejects:
                at = positions[reject.row]
                status[at], stage[at], reason[at], detail[at] = "rejected", reject.stage, reject.reason, reject.detail
    columns |= {"status": status, "stage": stage, "reason": reason, "detail": detail}
    columns["checksum"] = pa.array(checksums, mask=status != "stored")
    return pa.table(columns, schema=RECORDS_SCHEMA)


def merge_captions(spec: StoreSpec, plan: FrozenPlan, commits: Commits) -> pa.Table:
    """Captions table of a store: the plan's texts with the checksums of their embeddings."""
    checksums: list[int | None] = [None] * plan.captions.num_rows
    offsets = plan.offsets(spec)
    for (part, shard), commit in commits.items():
        if part == CAPTION_PART:
            first = int(np.searchsorted(offsets, embedding_layout(spec, 0).shard_rows * shard))
            checksums[first : first + len(commit.checksums)] = [int(digits, 16) for digits in commit.checksums]
    columns = {name: plan.captions[name] for name in ("text", "num_tokens", "truncated")}
    return pa.table(columns | {"checksum": pa.array(checksums, pa.uint64())}, schema=CAPTIONS_SCHEMA)


def table_bytes(table: pa.Table) -> bytes:
    """A table as the bytes of a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_statistics=True)
    return sink.getvalue().to_pybytes()


def build_manifest(
    root: Path, spec: StoreSpec, plan: FrozenPlan, commits: Commits, tables: Mapping[str, bytes]
) -> Manifest:
    """Merge everything into the manifest.

    Args:
      tables: bytes of RECORDS and CAPTIONS, not yet on disk.
    """
    records = merge_records(spec, plan, commits)
    stored = records.filter(pc.equal(records["status"], "stored"))
    per_bucket = {e["values"]: e["counts"] for e in stored["bucket"].value_counts().to_pylist()}
    num_stored = stored.num_rows
    num_rejected = records.filter(pc.equal(records["status"], "rejected")).num_rows
    assert num_stored + num_rejected == records.num_rows, "a record is neither stored nor rejected"

    files = [entry for commit in commits.values() for entry in commit.files]
    for name, content in tables.items():
        size, digest = xxh3_parts([content])
        files.append(FileEntry(path=name, bytes=size, xxh3_128=digest))
    committed = {entry.path for entry in files}
    offsets = plan.offsets(spec)
    for path in ["zarr.json", *metadata_paths(spec, plan)]:
        files.append(file_entry(root, path))
    for layout in store_layouts(spec, plan.bucket_rows, offsets, plan.num_tokens):
        for shard in range(layout.num_shards):
            if layout.shard_path(shard) not in committed:  # the caption index, which is written with the plan
                files.append(file_entry(root, layout.shard_path(shard)))
    return Manifest(
        format_version=FORMAT_VERSION,
        fingerprint=spec.fingerprint,
        plan=plan.hash,
        num_planned=records.num_rows,
        num_stored=num_stored,
        num_rejected=num_rejected,
        buckets={name: per_bucket.get(name, 0) for name in plan.bucket_rows},
        num_captions=plan.captions.num_rows,
        num_caption_tokens=int(plan.num_tokens.sum()),
        files=sorted(files, key=lambda entry: entry.path),
        root_hash="",
    ).with_root_hash()


def metadata_paths(spec: StoreSpec, plan: FrozenPlan) -> list[str]:
    """Paths of the ``zarr.json`` of every group and array below the root."""
    groups = {"buckets"} | {bucket_part(bucket) for bucket in plan.bucket_rows}
    groups |= {"captions"} if spec.text else set()
    arrays = {layout.path for layout in store_layouts(spec, plan.bucket_rows, plan.offsets(spec), plan.num_tokens)}
    return sorted(f"{path}/zarr.json" for path in groups | arrays)


def file_entry(root: Path, path: str) -> FileEntry:
    """Size and hash of a file that is on disk."""
    return FileEntry(path=path, bytes=(root / path).stat().st_size, xxh3_128=xxh3_file(root / path))


def manifest_bytes(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``."""
    return canonical_json(manifest.model_dump())
