"""The writing side of a store: the plan is frozen first, shards are committed whole, the seal merges what is there.

Order of a shard's commit: every array file (temporary, fsync, rename), then the commit record. A process that dies in
between has cost one shard, and nothing half-written is ever read. No encoder is known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from .commits import (
    FrozenPlan,
    build_manifest,
    manifest_bytes,
    merge_captions,
    merge_records,
    metadata_paths,
    read_commits,
    read_plan,
    table_bytes,
)
from .errors import StoreError
from .files import canonical_json, sha256_of, sweep_strays, write_atomic, xxh3_parts
from .layout import (
    CAPTION_PART,
    CAPTIONS,
    LENGTHS,
    MANIFEST,
    NULL_PART,
    OFFSETS,
    PLAN,
    PLAN_CAPTIONS,
    PLAN_RECORDS,
    RECORDS,
    commit_path,
    shard_tasks,
    store_layouts,
)
from .schema import FORMAT_VERSION, CommitRecord, FileEntry, Manifest, Reject, StoreSpec
from .shards import ArrayLayout, pack_shard

VOLATILE_COLUMN = "source_mtime_ns"  # of the plan: it says when a file was written, not what is in it


def freeze_plan(root: Path, spec: StoreSpec, records: pa.Table, captions: pa.Table, *, listing: str) -> FrozenPlan:
    """Write a new store's metadata and plan; the plan's head comes last, so a torn plan is never read.

    Args:
      records: RECORDS_SCHEMA's columns but checksum, then where each picture lies in the source.
      captions: text, num_tokens, truncated.
      listing: hash of the source's listing.
    """
    contents = [sha256_of(_digest(records.drop_columns([VOLATILE_COLUMN]))), sha256_of(_digest(captions))]
    plan = FrozenPlan(
        hash=sha256_of([spec.fingerprint, *contents]), listing=listing, records=records, captions=captions
    )
    for path, content in static_files(spec, plan).items():
        write_atomic(root / path, content)
    write_atomic(root / PLAN_RECORDS, table_bytes(records))
    write_atomic(root / PLAN_CAPTIONS, table_bytes(captions))
    head = {"format_version": FORMAT_VERSION, "plan": plan.hash, "listing": listing, "fingerprint": spec.fingerprint}
    write_atomic(root / PLAN, canonical_json(head))
    return plan


def static_files(spec: StoreSpec, plan: FrozenPlan) -> dict[str, bytes]:
    """Files that the plan alone decides: the metadata of all groups and arrays, and the caption index."""
    group = {"zarr_format": 3, "node_type": "group"}
    files = {"zarr.json": canonical_json(group | {"attributes": {"leandit": spec.model_dump()}})}
    offsets = plan.offsets(spec)
    layouts = {layout.path: layout for layout in store_layouts(spec, plan.bucket_rows, offsets, plan.num_tokens)}
    for path in metadata_paths(spec, plan):
        layout = layouts.get(path.removesuffix("/zarr.json"))
        files[path] = canonical_json(layout.metadata() if layout else group | {"attributes": {}})
    if spec.text and len(offsets):
        for path, values in ((OFFSETS, offsets), (LENGTHS, plan.num_tokens)):
            files[layouts[path].shard_path(0)] = b"".join(pack_shard(layouts[path], values))
    return files


def _digest(table: pa.Table) -> str:
    """Hash of a table's values."""
    return xxhash.xxh3_128_hexdigest(table_bytes(table.combine_chunks()))


def row_checksum(*rows: np.ndarray) -> str:
    """XXH3-64 of rows that follow each other, as 16 hex digits."""
    digest = xxhash.xxh3_64()
    for row in rows:
        digest.update(np.ascontiguousarray(row).data)
    return digest.hexdigest()


class StoreWriter:
    """Commits shards to a store whose plan is frozen.

    Args:
      root: the store.
      spec: what the store says of itself.
      plan: as ``freeze_plan`` wrote it; read from the store where not given.
    """

    def __init__(self, root: Path, spec: StoreSpec, plan: FrozenPlan | None = None) -> None:
        sweep_strays(root)
        self.root, self.spec = root, spec
        self.plan = plan or read_plan(root)
        self._commits = read_commits(root, spec, self.plan)
        self.layouts: dict[str, ArrayLayout] = {
            layout.path: layout
            for layout in store_layouts(spec, self.plan.bucket_rows, self.plan.offsets(spec), self.plan.num_tokens)
        }

    @property
    def is_sealed(self) -> bool:
        """The manifest is there, so nothing is left to do."""
        return (self.root / MANIFEST).is_file()

    @property
    def num_stored(self) -> int:
        """Records that the committed shards hold."""
        return sum(
            len(commit.checksums) - len(commit.rejects)
            for (part, _), commit in self._commits.items()
            if part not in (CAPTION_PART, NULL_PART)
        )

    def tasks(self) -> list[tuple[str, int]]:
        """All (part, shard) of the store."""
        return shard_tasks(self.spec, self.plan.bucket_rows, self.plan.num_token_rows(self.spec))

    def missing_tasks(self) -> list[tuple[str, int]]:
        """The (part, shard) that no valid commit record covers."""
        return [task for task in self.tasks() if task not in self._commits]

    def commit(
        self,
        part: str,
        shard: int,
        arrays: Mapping[str, np.ndarray],
        *,
        checksums: Sequence[str],
        rejects: Sequence[Reject] = (),
    ) -> int:
        """Write one shard of every array of a part, then its commit record.

        Args:
          arrays: path of each array -> (n, ...) rows of this shard.
          checksums: one a row (or caption), "" where rejected.
          rejects: rows refused while encoding.
        Returns: bytes written.
        """
        files = []
        for path, rows in arrays.items():
            layout = self.layouts[path]
            parts = pack_shard(layout, rows)
            write_atomic(self.root / layout.shard_path(shard), parts)
            size, digest = xxh3_parts(parts)
            files.append(FileEntry(path=layout.shard_path(shard), bytes=size, xxh3_128=digest))
        record = CommitRecord(
            format_version=FORMAT_VERSION,
            fingerprint=self.spec.fingerprint,
            plan=self.plan.hash,
            part=part,
            shard=shard,
            files=files,
            checksums=list(checksums),
            rejects=list(rejects),
        )
        write_atomic(self.root / commit_path(part, shard), canonical_json(record.model_dump()))
        self._commits[part, shard] = record
        return sum(entry.bytes for entry in files)

    def seal(self) -> Manifest:
        """Merge the commit records into the tables and the manifest; the manifest comes last.

        Raises: StoreError: shards are missing.
        """
        if missing := self.missing_tasks():
            raise StoreError(
                f"store '{self.root}': {len(missing)} of {len(self.tasks())} shards are not committed, "
                f"the first is {missing[0][1]} of '{missing[0][0]}'. Run the same precompute command again."
            )
        for path, content in static_files(self.spec, self.plan).items():  # mends what was damaged since
            if not (self.root / path).is_file() or (self.root / path).read_bytes() != content:
                write_atomic(self.root / path, content)
        tables = {
            RECORDS: table_bytes(merge_records(self.spec, self.plan, self._commits)),
            CAPTIONS: table_bytes(merge_captions(self.spec, self.plan, self._commits)),
        }
        manifest = build_manifest(self.root, self.spec, self.plan, self._commits, tables)
        for name, content in tables.items():
            write_atomic(self.root / name, content)
        write_atomic(self.root / MANIFEST, manifest_bytes(manifest))
        return manifest
