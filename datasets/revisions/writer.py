"""Writing a store: the plan is frozen first, shards are committed one by one, the seal merges their records.

A commit writes every array file of a shard (temporary, fsync, rename), then the commit record. A crash in between costs
one shard, and no partial shard is ever read. This module knows no encoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..disk.files import write_atomic
from ..disk.hashing import canonical_json, xxh3_64, xxh3_file, xxh3_parts
from ..errors import LeanditError, StoreError
from ..format.layout import CAPTIONS, MANIFEST, RECORDS, Task, commit_path, is_picture_task, revision_prefix
from ..format.row_layout import LATENTS
from ..format.schema import Fallback, FeatureRows, FileEntry, LatentStatistics, Manifest, Reject
from ..format.zarr_shard import pack_shard
from .commits import CommitSummary, commit_record, file_entry, read_commit, read_manifest, seal_files
from .latent_statistics import statistics_of
from .plan import FrozenPlan

READERS = 4  # threads that hash shards


def row_checksum(*rows: np.ndarray) -> str:
    """XXH3-64 of consecutive rows, as 16 hex digits."""
    return f"{xxh3_64(*(np.ascontiguousarray(row).data for row in rows)):016x}"


class StoreWriter:
    """Commits the shards of one revision, whose plan is frozen.

    Args:
      root: the store.
      plan: of the revision.
      own: tasks of this process, whose shards are hashed; None for all. Other processes hash their own, and the one
        that seals hashes all.
      doubted: tasks whose shards must be hashed, if another process has just hashed all others.
    """

    def __init__(
        self,
        root: Path,
        plan: FrozenPlan,
        *,
        own: Collection[Task] | None = None,
        doubted: Collection[Task] | None = None,
    ) -> None:
        self.root, self.plan, self.spec = root, plan, plan.spec
        for path, content in plan.layout.static_files().items():
            self._ensure(path, content)
        self._commits: dict[Task, CommitSummary] = {}
        self.is_shared = False  # other processes write shards of this revision
        if doubted is None and self.is_sealed:
            self._read(frozenset())
        elif doubted is None:
            # Hash the existing shards of an unfinished revision; shards committed later are intact. ``verify`` hashes
            # those of a sealed one.
            tasks = plan.layout.tasks()
            checked = frozenset(tasks if own is None else own)
            self._read(checked)
            self.is_shared = any(task not in checked for task in self._commits)
            missing = [task for task in tasks if task not in self._commits]
            doubted = [task for task in missing if (root / commit_path(plan.revision, *task)).is_file()]
        self.doubted = frozenset(doubted or ())

    @property
    def is_sealed(self) -> bool:
        """The revision has a manifest."""
        return (self.root / revision_prefix(self.plan.revision) / MANIFEST).is_file()

    @property
    def num_stored(self) -> int:
        """Records in the committed shards."""
        return sum(
            commit.num_rows - commit.rejects.total()
            for task, commit in self._commits.items()
            if is_picture_task(task) and commit.num_rows
        )

    @property
    def reject_reasons(self) -> Counter[str]:
        """Number of rejects in the committed shards, by reason."""
        return sum((commit.rejects for commit in list(self._commits.values())), Counter[str]())  # others add to it

    def missing_tasks(self, own: Sequence[Task] | None = None) -> list[Task]:
        """All tasks, or those of ``own``, without a valid commit record; others may commit at the same time."""
        return [task for task in (self.plan.layout.tasks() if own is None else own) if not self.is_committed(task)]

    def is_committed(self, task: Task) -> bool:
        """Whether the task has a valid commit record, from any process."""
        if task not in self._commits:
            record = read_commit(self.root, self.plan, *task, check_bytes=task in self.doubted)
            if record:
                self._commits[task], self.is_shared = CommitSummary.of(self.plan, record), True
        return task in self._commits

    def _read(self, checked: Collection[Task]) -> None:
        """Read all valid commit records, and hash the shards of ``checked``."""

        def read(task: Task) -> CommitSummary | None:
            record = read_commit(self.root, self.plan, *task, check_bytes=task in checked)
            return record and CommitSummary.of(self.plan, record)

        with ThreadPoolExecutor(READERS, thread_name_prefix="leandit-check") as pool:
            tasks = self.plan.layout.tasks()
            self._commits = {task: found for task, found in zip(tasks, pool.map(read, tasks), strict=True) if found}

    def recheck(self) -> list[Task]:
        """Hash all shards if other processes wrote some of them; those that differ from their record count as missing.

        Call it under the lease of the seal, so that only one of many processes does this. After a lease has expired,
        two processes may write one shard with different bytes (another device, less memory), and leave the file of one
        and the record of the other.

        Returns: the missing tasks.
        """
        if not self.is_shared or self.is_sealed:
            return []
        self.is_shared = False
        tasks = self.plan.layout.tasks()
        self._read(frozenset(tasks))
        damaged = [task for task in tasks if task not in self._commits]
        self.doubted |= set(damaged)
        return damaged

    def commit(
        self,
        part: str,
        shard: int,
        arrays: Mapping[str, np.ndarray],
        *,
        checksums: Sequence[str],
        source_checksums: Sequence[str] = (),
        rejects: Sequence[Reject] = (),
        qualities: Sequence[tuple[float, float]] = (),
        fallbacks: Sequence[Fallback] = (),
        features: Mapping[str, FeatureRows] | None = None,
    ) -> int:
        """Write one shard of every array of a part, then its commit record.

        Args:
          arrays: path of each array -> (n, ...) rows of this shard.
          checksums: one per row (or caption), "" if rejected.
          source_checksums: of the pictures' files, one per row, "" if rejected.
          rejects: rows rejected while encoding.
          qualities: smallest cosine and largest error of each narrowed caption.
          fallbacks: rows that were not encoded as planned.
          features: results of each feature of the part.
        Returns: bytes written.
        """
        files = []
        for path, rows in arrays.items():
            layout = self.plan.layout.arrays[path]
            parts = pack_shard(layout, rows)
            write_atomic(self.root / layout.shard_path(shard), parts)
            size, digest = xxh3_parts(parts)
            files.append(FileEntry(path=layout.shard_path(shard), bytes=size, xxh3_128=digest))
        record = commit_record(
            self.plan,
            part,
            shard,
            files=files,
            checksums=list(checksums),
            min_cosines=[cosine for cosine, _ in qualities],
            max_errors=[error for _, error in qualities],
            source_checksums=list(source_checksums),
            rejects=list(rejects),
            fallbacks=list(fallbacks),
            features=dict(features or {}),
            statistics=self._statistics(part, arrays),
        )
        write_atomic(self.root / commit_path(self.plan.revision, part, shard), canonical_json(record.model_dump()))
        self._commits[part, shard] = CommitSummary.of(self.plan, record)
        return sum(entry.bytes for entry in files)

    def _statistics(self, part: str, arrays: Mapping[str, np.ndarray]) -> LatentStatistics | None:
        """Of the latents among the arrays of a shard; None where there are none."""
        latents = [arrays[one.path] for one in self.plan.layout.parts[part].groups.get(LATENTS, ())]
        return statistics_of(latents, self.plan.spec.latent) if latents else None

    def seal(self) -> Manifest:
        """Merge the commit records into the tables and the manifest; the manifest comes last.

        Raises: StoreError: shards are missing; DamageError: as ``seal_files``.
        """
        if missing := self.missing_tasks():
            raise StoreError(
                f"store '{self.root}': {len(missing)} of {len(self.plan.layout.tasks())} shards are not committed, "
                f"the first is {missing[0][1]} of '{missing[0][0]}'. Run the same precompute command again."
            )
        if manifest := self._valid_manifest():  # a new one could differ: Parquet names its writer
            return manifest
        files, manifest = seal_files(self.root, self.plan)
        for path, content in files.items():
            self._ensure(path, content)
        self._ensure(revision_prefix(self.plan.revision) + MANIFEST, canonical_json(manifest.model_dump()))
        return manifest

    def _valid_manifest(self) -> Manifest | None:
        """The existing manifest, if it matches the tables and the commit records."""
        try:
            manifest = read_manifest(self.root, self.plan.revision)
        except (LeanditError, OSError):
            return None
        entries, prefix = {entry.path: entry for entry in manifest.files}, revision_prefix(self.plan.revision)
        known = [entry for commit in self._commits.values() for entry in commit.files]
        known += [file_entry(path, content) for path, content in self.plan.layout.static_files().items()]
        for path in (prefix + RECORDS, prefix + CAPTIONS):
            file = self.root / path
            if not file.is_file():
                return None
            known.append(FileEntry(path=path, bytes=file.stat().st_size, xxh3_128=xxh3_file(file)))
        is_current = all(entries.get(entry.path) == entry for entry in known)
        return manifest if is_current and manifest.plan == self.plan.hash else None

    def _ensure(self, path: str, content: bytes | memoryview) -> None:
        """Write a file unless it already has these bytes."""
        file = self.root / path
        has_size = file.is_file() and file.stat().st_size == len(content)
        if not has_size or xxh3_file(file) != file_entry(path, content).xxh3_128:
            write_atomic(file, [content])
