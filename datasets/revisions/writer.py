"""Writing a store: the plan is frozen first, shards are committed one by one, the seal merges their records.

A commit writes every array file of a shard (temporary, fsync, rename) and the results of its rows, then the commit
record. A crash in between costs one shard, and no partial shard is ever read. This module knows no encoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import StoreError
from ..disk.files import write_atomic
from ..disk.hashing import canonical_json, xxh3_64, xxh3_parts
from ..format.layout import MANIFEST, Part, Task, commit_path, revision_prefix, rows_path
from ..format.row_layout import LATENTS
from ..format.schema import (
    FORMAT_VERSION,
    CommitRecord,
    Fallback,
    FileEntry,
    LatentSpec,
    LatentStatistics,
    Manifest,
    Reject,
)
from ..format.zarr_shard import pack_shard
from .catalog import file_entry, read_manifest
from .commits import read_commit
from .latent_statistics import statistics_of
from .plan import FrozenPlan
from .seal import finish_seal, seal_files, write_seal, write_unless_same

READERS = 4  # threads that hash shards


def row_checksum(*rows: np.ndarray) -> int:
    """XXH3-64 of consecutive rows."""
    return xxh3_64(*(np.ascontiguousarray(row).data for row in rows))


class WrittenShard(NamedTuple):
    """The files of a shard that are on disk, without a commit record.

    Args:
      files: the shard of each array, then the results of its rows.
      statistics: of its latents; None without latents.
    """

    files: list[FileEntry]
    statistics: LatentStatistics | None

    @property
    def num_bytes(self) -> int:
        """Size of the shards."""
        return sum(entry.bytes for entry in self.files[:-1])


def write_shard(
    root: Path,
    revision: int,
    part: Part,
    shard: int,
    arrays: Mapping[str, np.ndarray],
    results: np.ndarray,
    spec: LatentSpec,
) -> WrittenShard:
    """Write one shard of every array of a part and the results of its rows.

    Args:
      arrays, results: as for ``StoreWriter.commit``.
    """
    layouts = {layout.path: layout for layout in part.arrays}
    files = []
    for path, rows in arrays.items():
        parts = pack_shard(layouts[path], rows)
        shard_path = layouts[path].shard_path(shard)
        write_atomic(root / shard_path, parts)
        size, digest = xxh3_parts(parts)
        files.append(FileEntry(path=shard_path, bytes=size, xxh3_128=digest))
    content = results.tobytes()
    results_path = rows_path(revision, part.name, shard)
    write_atomic(root / results_path, [content])
    files.append(file_entry(results_path, content))
    latents = [arrays[layout.path] for layout in part.groups.get(LATENTS, ())]
    return WrittenShard(files, statistics_of(latents, spec) if latents else None)


class StoreWriter:
    """Commits the shards of one revision, whose plan is frozen.

    Args:
      root: the store.
      plan: of the revision.
      own: tasks of this process: their commit records are read at once, and their shards hashed; None for all. Records
        of other tasks are read when they are asked for, and the process that seals hashes their shards.
    """

    def __init__(self, root: Path, plan: FrozenPlan, *, own: Collection[Task] | None = None) -> None:
        self.root, self.plan, self.spec = root, plan, plan.spec
        self._committed: set[Task] = set()  # as far as this process has read their records
        self._rejected: dict[int, str] = {}  # reason of each record that they reject, by its position
        self._doubted: set[Task] = set()  # tasks whose record or shard was damaged: hashed when another process commits
        self._checked: set[Task] = set()  # tasks whose shards this process wrote or hashed
        self.is_shared = False  # another process has held the lease of a shard, and may still write it
        if self.is_sealed:
            return
        if plan.before is None:  # else a reader would see rows that do not exist yet
            for path, content in plan.zarr_files().items():
                write_unless_same(root / path, content)
        # Shards committed later are intact; ``verify`` hashes those of a sealed revision.
        self._read_and_hash(plan.layout.tasks() if own is None else own)

    @property
    def is_sealed(self) -> bool:
        """The revision has a manifest."""
        return (self.root / revision_prefix(self.plan.revision) / MANIFEST).is_file()

    @property
    def num_stored(self) -> int:
        """Records in the shards that are known to be committed; of a sealed revision, all that it stores."""
        if self.is_sealed:
            return read_manifest(self.root, self.plan.revision).num_stored
        committed = [(self.plan.layout.parts[name], shard) for name, shard in self._committed]
        num_rows = sum(len(part.items(shard)) for part, shard in committed if LATENTS in part.groups)
        return max(0, num_rows - len(self._rejected))

    @property
    def reject_reasons(self) -> Counter[str]:
        """Number of records that the shards known to be committed reject, by reason."""
        return Counter(list(self._rejected.values()))  # other threads add to it

    def missing_tasks(self, own: Sequence[Task] | None = None) -> list[Task]:
        """All tasks, or those of ``own``, without a valid commit record; others may commit at the same time."""
        return [task for task in (self.plan.layout.tasks() if own is None else own) if not self.is_committed(task)]

    def is_committed(self, task: Task) -> bool:
        """Whether the task has a valid commit record, from any process, or the revision is sealed."""
        if task in self._committed:
            return True
        if record := read_commit(self.root, self.plan, *task, check_bytes=task in self._doubted):
            self._count(record)
        elif (self.root / commit_path(self.plan.revision, *task)).is_file():
            self._doubted.add(task)
        return record is not None or self.is_sealed

    def recheck(self) -> list[Task]:
        """Hash all shards if other processes wrote some of them; those that differ from their record count as missing.

        Call it under the lease of the seal, so that only one of many processes does this. After a lease has expired,
        two processes may write one shard with different bytes (another device, less memory), and leave the file of one
        and the record of the other.

        Returns: the missing tasks.
        """
        tasks = self.plan.layout.tasks()
        if self.is_sealed or (not self.is_shared and self._checked.issuperset(tasks)):
            return []
        self.is_shared = False
        self._committed.clear()
        self._rejected.clear()
        return self._read_and_hash(tasks)

    def _read_and_hash(self, tasks: Collection[Task]) -> list[Task]:
        """Read the commit records of some tasks and hash their shards. Returns: the tasks without an intact one."""

        def read(task: Task) -> CommitRecord | None:
            return read_commit(self.root, self.plan, *task, check_bytes=True)

        missing = []
        with ThreadPoolExecutor(READERS, thread_name_prefix="leandit-check") as pool:
            for task, record in zip(tasks, pool.map(read, tasks), strict=True):
                if record:
                    self._count(record)
                    self._checked.add(task)
                else:
                    missing.append(task)
        exist = (task for task in missing if (self.root / commit_path(self.plan.revision, *task)).is_file())
        self._doubted.update(exist)
        return missing

    def _count(self, record: CommitRecord) -> None:
        """Count a shard as committed, and the records that it rejects: those of its rows, or with its captions."""
        part, rows = self.plan.layout.parts[record.part], [reject.row for reject in record.rejects]
        if rows and part.captions:
            positions = self.plan.records_with(np.array(rows) + part.captions.first_caption)
            self._rejected = dict.fromkeys(positions.tolist(), record.rejects[0].reason) | self._rejected
        elif rows:
            positions = self.plan.positions_of(part)[rows].tolist()
            reasons = (reject.reason for reject in record.rejects)
            self._rejected |= zip(positions, reasons, strict=True)
        self._committed.add((record.part, record.shard))

    def commit(
        self,
        part: str,
        shard: int,
        arrays: Mapping[str, np.ndarray],
        results: np.ndarray,
        *,
        rejects: Sequence[Reject] = (),
        fallbacks: Sequence[Fallback] = (),
    ) -> int:
        """Write one shard of every array of a part, then its commit record.

        Args:
          arrays: path of each array -> (n, ...) rows of this shard.
          results: of its rows or captions, (n, groups) of ROW_RESULTS, as ``new_results`` makes them.
          rejects: rows rejected while encoding.
          fallbacks: rows that were not encoded as planned.
        Returns: bytes written.
        """
        layouts = self.plan.layout.parts[part]
        written = write_shard(self.root, self.plan.revision, layouts, shard, arrays, results, self.spec.latent)
        self.record(part, shard, written, rejects=rejects, fallbacks=fallbacks)
        return written.num_bytes

    def record(
        self,
        part: str,
        shard: int,
        written: WrittenShard,
        *,
        rejects: Sequence[Reject] = (),
        fallbacks: Sequence[Fallback] = (),
    ) -> None:
        """Write the commit record of a shard whose files are written; arguments as for ``commit``."""
        record = CommitRecord(
            format_version=FORMAT_VERSION,
            plan=self.plan.hash,
            part=part,
            shard=shard,
            files=written.files,
            rejects=list(rejects),
            fallbacks=list(fallbacks),
            statistics=written.statistics,
            record_hash="",
        ).with_hash()
        write_atomic(self.root / commit_path(self.plan.revision, part, shard), canonical_json(record.model_dump()))
        self._count(record)
        self._checked.add((part, shard))

    def seal(self) -> Manifest:
        """Merge the commit records into the tables and the manifest, then remove plan and commit records.

        Raises: StoreError: shards are missing; DamageError: as ``seal_files``.
        """
        if self.is_sealed:
            manifest = read_manifest(self.root, self.plan.revision)
        else:
            if missing := self.missing_tasks():
                raise StoreError(
                    f"store '{self.root}': {len(missing)} of {len(self.plan.layout.tasks())} shards are not committed, "
                    f"the first is {missing[0][1]} of '{missing[0][0]}'. Run the same precompute command again."
                )
            files, manifest = seal_files(self.root, self.plan)
            write_seal(self.root, files, manifest)
        finish_seal(self.root, manifest)
        return manifest
