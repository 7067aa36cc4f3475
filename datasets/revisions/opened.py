"""One revision of a store, opened for reading: which one, whether it is complete, and its tables."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ...errors import DamageError, StoreError, StoreIncomplete, StoreWarning
from ..disk.cached import cached_property
from ..disk.hashing import xxh3_file
from ..format.layout import CAPTIONS, RECORDS, REMOTE_ABOUT, index_path, revision_prefix, zarr_files
from ..format.schema import FileEntry, Manifest
from ..format.table_schemas import captions_schema, records_schema
from ..format.tables import check_table, read_batches, read_row_group, table_problem
from ..format.zarr_shard import ArrayLayout
from .catalog import (
    REPAIR,
    check_chain,
    check_not_lost,
    check_store,
    planned_revisions,
    read_manifest,
    sealed_revisions,
    unsealed,
)
from .commits import missing_work, read_commit, read_results
from .local import read_local, whole_spec
from .merge import Merge
from .plan import read_plan
from .records import build_index, map_index

STAT_THREADS = 8  # on a network file system each file takes a while


class OpenedRevision:
    """A revision with its manifest or, while it is incomplete, with its plan and commit records.

    Args:
      path: of the store.
      number: of the revision; 0 for the newest complete one.
      allow_incomplete: open the first revision even while shards are missing.
    Attributes:
      newest_revision: the newest complete one, 1 if there is none.
      unfinished_revision: a newer one that was begun but is not complete, or None.
      spec: the store's, with origins of encoders and recipe.
      layouts: all arrays by path.
      manifest: None while the revision is incomplete; then it has a ``plan``.
      plan_hash: of the plan, which identifies an incomplete revision; "" if ``local.json`` is lost.
    Raises: as ``LatentStore``.
    """

    def __init__(self, path: Path, number: int, *, allow_incomplete: bool) -> None:
        check_store(path)
        sealed, planned = sealed_revisions(path), planned_revisions(path)
        if number and number not in (sealed or [1]):
            complete = ", ".join(map(str, sealed)) or "none"
            begun = f" {unsealed(number)}" if number in planned else ""
            raise StoreError(f"store '{path}': it has no complete revision {number}. Available: {complete}.{begun}")
        if number not in sealed:
            check_not_lost(path)
        check_chain(path)
        self.path, self.root = path, Path(os.path.abspath(path))  # absolute, for files that are read later
        self.newest_revision = sealed[-1] if sealed else 1
        self.unfinished_revision = planned[-1] if planned else None
        if sealed and self.unfinished_revision and not number:
            warnings.warn(
                f"store '{path}': revision {self.newest_revision} is opened. {unsealed(self.unfinished_revision)} Ask "
                f"for revision {self.newest_revision} to open it without this warning.",
                StoreWarning,
                stacklevel=3,
            )
        self.revision = number or self.newest_revision
        self.manifest: Manifest | None = None
        self._row_groups: dict[str, tuple[int, pa.Table]] = {}  # the last read of each table
        self._intact: dict[tuple[str, bool], tuple[int, int, int]] = {}  # inode, size, time of tables that were right
        self._numbers: dict[str, np.ndarray] = {}
        if sealed:
            self.manifest, local = read_manifest(path, self.revision), read_local(path, self.revision)
            self.spec, self.plan_hash = whole_spec(self.manifest.spec, local), local.plan if local else ""
            self.layouts: Mapping[str, ArrayLayout] = self.manifest.layouts()
            if not number and not self.unfinished_revision:
                self._warn_of_later(self.manifest)
            return
        self._plan = plan = read_plan(path, 1)
        self.spec, self.plan_hash, self.layouts = plan.spec, plan.hash, plan.layout.arrays
        if not allow_incomplete:
            missing = [task for task in plan.layout.tasks() if not read_commit(path, plan, *task)]
            problem = "all shards exist, but the store is not sealed"
            problem = f"{missing_work(plan, missing)} are missing" if missing else problem
            raise StoreIncomplete(
                f"store '{path}': not complete; {problem}. Run the same precompute command again: it resumes."
            )

    def _warn_of_later(self, manifest: Manifest) -> None:
        """Warn if a ``zarr.json`` is not that of the newest revision: the folder of a later one may be lost."""
        for path, content in zarr_files(manifest.spec, manifest.layouts().values()).items():
            file = self.root / path
            if file.is_file() and (file.stat().st_size != len(content) or file.read_bytes() != content):
                warnings.warn(
                    f"store '{self.path}': revision {manifest.revision} is opened, and '{path}' is of another one: it "
                    f"is damaged, or revision {manifest.revision + 1} was complete and its folder is lost. Run "
                    f"'leandit verify {self.path}'.",
                    StoreWarning,
                    stacklevel=4,
                )
                return

    @property
    def num_records(self) -> int:
        """Rows of the records table, rejected records included."""
        return self.manifest.num_planned if self.manifest else self._plan.records.num_rows

    @property
    def num_captions(self) -> int:
        """Rows of the captions table."""
        return self.manifest.num_captions if self.manifest else self._plan.captions.num_rows

    def batches(self, name: str, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """A table (RECORDS or CAPTIONS) in batches of rows: some columns, with texts as dictionaries, or all.

        Raises: DamageError: it is not the table of the manifest, or not valid.
        """
        if self.manifest:
            path, count = self.table_file(name, texts=columns is None), 0
            for batch in read_batches(path, columns):
                is_records, count = name == RECORDS, count + batch.num_rows
                problem = table_problem(self.spec, self.revision, batch, self.num_captions) if is_records else ""
                if problem:
                    raise DamageError(f"store '{self.path}': its records table is not valid: {problem}. {REPAIR}")
                yield batch
            expected = self.num_records if name == RECORDS else self.num_captions
            if count != expected:
                raise DamageError(
                    f"store '{self.path}': {count} rows of '{name}', the manifest says {expected}. {REPAIR}"
                )
        else:
            for group in self._merge.records() if name == RECORDS else self._merge.captions():
                yield from (group.select(columns) if columns else group).to_batches()

    def table(self, name: str, columns: Sequence[str] | None) -> pa.Table:
        """Read a table as ``batches`` does, all rows at once."""
        batches = list(self.batches(name, columns))
        return pa.Table.from_batches(batches, batches[0].schema if batches else self._schema(name, columns))

    def _schema(self, name: str, columns: Sequence[str] | None) -> pa.Schema:
        schema = records_schema(self.spec) if name == RECORDS else captions_schema(self.spec)
        return schema if columns is None else pa.schema([schema.field(column) for column in columns])

    @cached_property
    def _merge(self) -> Merge:
        """What the committed shards of an incomplete revision hold."""
        plan = self._plan
        merge = Merge(plan)
        for task in plan.layout.tasks():
            if record := read_commit(self.root, plan, *task):
                merge.add(task, record, read_results(self.root, plan, record))
        return merge

    @cached_property
    def files(self) -> dict[str, FileEntry]:
        """Size and hash of every file of the manifest, by path; empty while the revision is incomplete."""
        return {entry.path: entry for entry in self.manifest.files} if self.manifest else {}

    def row(self, name: str, position: int) -> dict[str, Any]:
        """One row of a table (RECORDS or CAPTIONS); of a complete revision only its row group is read.

        Raises: DamageError; IndexError: the table has no such row.
        """
        count = self.num_records if name == RECORDS else self.num_captions
        if not 0 <= position < count:
            raise IndexError(f"row {position} of {count}")
        if not self.manifest:
            return self.table(name, None).slice(position, 1).to_pylist()[0]
        path, (first, group) = self.table_file(name, texts=True), self._row_groups.get(name, (0, pa.table({})))
        if not 0 <= position - first < group.num_rows:
            first, group = self._row_groups[name] = read_row_group(path, position)
        row = group.slice(position - first, 1)
        problem = table_problem(self.spec, self.revision, row, self.num_captions) if name == RECORDS else ""
        if problem:
            raise DamageError(f"store '{self.path}': row {position} of '{name}' is not valid: {problem}. {REPAIR}")
        return row.to_pylist()[0]

    def table_file(self, name: str, *, texts: bool) -> Path:
        """Path of a table with the hash of the manifest, which ``check_table`` has passed. Raises: DamageError."""
        path = revision_prefix(self.revision) + name
        entry, file = self.files[path], self.root / path
        try:
            status = file.stat()
            state = status.st_ino, status.st_size, status.st_mtime_ns
            if state not in (self._intact.get((name, texts)), self._intact.get((name, True))):
                self._check_hash(entry)
                check_table(file, num_rows=self.num_captions if name == CAPTIONS else self.num_records, texts=texts)
                self._intact[name, texts] = state
        except FileNotFoundError as error:  # it was there when the store was opened
            raise DamageError(f"store '{self.path}': file '{path}' is missing. {REPAIR}") from error
        return file

    def _check_hash(self, entry: FileEntry) -> None:
        if xxh3_file(self.root / entry.path) != entry.xxh3_128:
            raise DamageError(f"store '{self.path}': '{entry.path}' differs from the manifest. {REPAIR}")

    def numbers(self, name: str) -> np.ndarray:
        """An array of the revision's index (``index_names``), mapped; of an incomplete revision computed.

        Where files of the revision may not be mapped, a copy is: in memory or, if it is large, in a temporary file.

        Raises: DamageError: its file is not what was written.
        """
        if name not in self._numbers:
            if self.manifest:
                self._numbers[name] = self._map_numbers(name, self.manifest)
            else:
                self._numbers |= build_index(self.spec, self.layouts, self.num_records, self.num_captions, self.batches)
        return self._numbers[name]

    @property
    def may_map(self) -> bool:
        """Whether files of the revision may be mapped, as on a local disk."""
        return True

    def _map_numbers(self, name: str, manifest: Manifest) -> np.ndarray:
        stored = manifest.num_stored
        starts = stored + sum(count > 0 for count in manifest.buckets.values())
        counts = {"rows": stored, "records": stored, "labels": stored, "caption_starts": starts, "caption_ids": -1}
        count = counts.get(name, self.num_captions if name.startswith("caption_") else self.num_records)
        entry = self.files[index_path(self.revision, name)]
        try:
            self._check_hash(entry)
            return map_index(self.root / entry.path, name, entry.bytes, count, copied=not self.may_map)
        except FileNotFoundError as error:  # it was there when the store was opened
            raise DamageError(f"store '{self.path}': file '{entry.path}' is missing. {REPAIR}") from error

    def check_files(self) -> None:
        """Check that every file of the manifest is there with its size: a shorter shard would end the process.

        Raises: DamageError; StoreError: the folder is the local part of a store at a URL.
        """
        entries = list(self.files.values())
        with ThreadPoolExecutor(STAT_THREADS, thread_name_prefix="leandit-open") as pool:
            list(pool.map(self._check_sizes, (entries[first::STAT_THREADS] for first in range(STAT_THREADS))))

    def _check_sizes(self, entries: Sequence[FileEntry]) -> None:
        for entry in entries:
            path = self.path / entry.path
            size = path.stat().st_size if path.is_file() else None
            if size is None and (self.path.parent / REMOTE_ABOUT).is_file():
                raise StoreError(
                    f"store '{self.path}': this is the local folder of a store at a URL, which holds only a part of "
                    "it. Open the URL itself: LatentStore(url)."
                )
            if size != entry.bytes:
                state = "is missing" if size is None else f"has {size} bytes"
                raise DamageError(
                    f"store '{self.path}': file '{entry.path}' {state}, the manifest says {entry.bytes} bytes. {REPAIR}"
                )
