"""An import: list the features, plan them by their headers, copy missing shards, seal.

No encoder is loaded: rows are the numbers of the source. Running the same command again resumes; a shard with a valid
commit record is never made twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...datasets.disk.cached import cached_property
from ...datasets.disk.spill import TakenColumn
from ...datasets.errors import FingerprintMismatch, RecordRejected, SourceError
from ...datasets.format.layout import COMMITS, Part, Task, is_picture_task, revision_prefix
from ...datasets.format.schema import Manifest, StoreSpec
from ...datasets.format.zarr_shard import ArrayLayout
from ...datasets.revisions.plan import FrozenPlan, freeze_plan
from ...datasets.revisions.writer import StoreWriter, row_checksum
from ..planning.opening import check_disk, newest_plan
from ..planning.pictures import num_threads
from ..run.clock import Progress, StageClock
from ..run.rejects import RejectLimits, limits_of
from ..run.shards import Shard
from ..run.tasks import Commits
from ..sharing.leases import Leases, seal_alone
from .captions import CaptionRows, null_shard
from .describe import describe_import, differing_settings
from .formats.kinds import open_reader
from .formats.recipe import ImportRecipe
from .formats.source import Entry, Features, Reader
from .null_caption import read_null
from .plan import caption_origins, listing_hash, plan_import, reject_outliers, scan_records


@dataclass
class ImportReport:
    """The result of an import.

    Args:
      manifest: of the store.
      spec: of the store.
      num_imported: records copied by this call; 0 if the store was already complete.
      total_seconds: wall time of the call.
    """

    manifest: Manifest
    spec: StoreSpec
    num_imported: int
    total_seconds: float


def import_features(
    kind: str,
    recipe: ImportRecipe,
    *,
    source_path: Path,
    store_path: Path,
    progress: Progress,
    null: str | None = None,
) -> ImportReport:
    """Convert latents that another program has cached into a store, exactly.

    Args:
      kind: of the features.
      null: file of the null caption, or "zeros"; required with captions.
    Raises: LeanditError: its class says what to fix; the same command then resumes.
    """
    start = time.perf_counter()

    # Scan: list the records of the source.
    reader = open_reader(kind, source_path, recipe)
    entries = list(reader.entries())
    listing = listing_hash(entries)

    # Plan: open the newest plan, or scan every record and freeze the first.
    plan = newest_plan(store_path)
    if plan is None:
        plan = freeze_plan(store_path, _plan(reader, entries, listing, null, progress))
    check_resumes(store_path, plan, reader, listing)

    # Copy the missing shards and seal.
    manifest, num_imported = finish(store_path, plan, reader, null, progress)
    return ImportReport(manifest, plan.spec, num_imported, time.perf_counter() - start)


def _plan(reader: Reader, entries: Sequence[Entry], listing: str, null: str | None, progress: Progress) -> FrozenPlan:
    """Scan every record and plan those that can be stored; raises SourceError if too many cannot."""
    headers = scan_records(reader, entries, lambda done: progress("scan", done, len(entries)))
    common, headers = reject_outliers(headers, reader)
    limits = RejectLimits(reader.recipe.source.limits(), len(entries), is_planning=True)
    pairs = enumerate(zip(entries, headers, strict=True))
    rejects = [(i, entry.key, header) for i, (entry, header) in pairs if isinstance(header, RecordRejected)]
    limits.count(len(entries), rejects)
    limits.check()
    digests = {
        name: f"{row_checksum(read_null(null, (width,) if section.output == 'pooled' else (length, width), name)):016x}"
        for (name, section), (length, width, _) in zip(reader.defaults.texts.items(), common.captions, strict=True)
    }
    return plan_import(describe_import(reader, common, headers, digests), entries, headers, listing)


def check_resumes(root: Path, plan: FrozenPlan, reader: Reader, listing: str) -> None:
    """Raise if something else made the store, or if the source has changed since it was planned.

    Raises: FingerprintMismatch, SourceError.
    """
    if not plan.spec.is_imported:
        raise FingerprintMismatch(f"store '{root}': encoded, not imported. Nothing was changed. Give another --store.")
    if differing := differing_settings(plan.spec, reader):
        raise FingerprintMismatch(
            f"store '{root}': imported with other settings. Nothing was changed. Use those that made it, or give "
            "another --store. What differs:" + "".join(f"\n  {field}" for field in differing)
        )
    if plan.listing != listing:
        raise SourceError(
            f"store '{root}': its source lists other files, or sizes, than when the store was planned. Nothing was "
            "changed. Restore the source, or import it into another --store."
        )


def finish(root: Path, plan: FrozenPlan, reader: Reader, null: str | None, progress: Progress) -> tuple[Manifest, int]:
    """Copy the missing shards of a plan and seal it.

    Returns: the manifest, and the number of copied records.
    """
    writer, limits = StoreWriter(root, plan), reader.recipe.source.limits()
    missing = writer.missing_tasks()
    check_disk(writer, missing)
    total = sum(len(plan.layout.rows_of(*task)) for task in missing if is_picture_task(task))
    done, clock = 0, StageClock()

    def count(records: int) -> None:
        nonlocal done
        done += records
        progress("records", done, total)

    counted = limits_of(limits, writer)
    if missing:
        counted.check()
    shards = ShardReader(plan, reader, null, counted, count)

    def copy(missing: list[Task]) -> None:
        with Leases(writer) as leases:
            while missing:
                with Commits(writer, leases, clock) as commits:
                    for shard in shards.make(leases.take(missing)):
                        commits.add(shard)
                if missing := writer.missing_tasks(missing):
                    leases.wait()  # for other processes

    copy(missing)
    if not writer.num_stored:
        raise SourceError(
            f"source: not one of {plan.records.num_rows} records could be read, so the store is not sealed. The "
            f"reasons are in '{root / revision_prefix(plan.revision) / COMMITS}'."
        )
    if not writer.is_sealed:
        limits_of(limits, writer).check()
    return seal_alone(writer, copy, lambda: progress("others seal", 0, 1)), done


class ShardReader:
    """Makes shards of a plan from its features.

    Args:
      null: file of the null caption, or "zeros".
      limits: of rejects; None for no limit.
      count: called with the number of records of each shard.
    """

    def __init__(
        self,
        plan: FrozenPlan,
        reader: Reader,
        null: str | None,
        limits: RejectLimits | None,
        count: Callable[[int], None],
    ) -> None:
        self._plan, self._reader, self._null = plan, reader, null
        self._limits, self._count = limits, count

    @cached_property
    def _origins(self) -> np.ndarray:
        """Position of the record that holds each caption's features."""
        return caption_origins(self._plan)

    def make(self, tasks: Iterator[Task] | Sequence[Task]) -> Iterator[Shard]:
        """Read shards, in the given order."""
        with ThreadPoolExecutor(num_threads(), thread_name_prefix="leandit-read") as pool:
            for name, shard in tasks:
                part = self._plan.layout.parts[name]
                if part.is_null:
                    yield null_shard(part, self._plan.spec, self._null)
                elif part.captions:
                    yield self._captions(part, shard, pool)
                else:
                    yield self._latents(name, shard, pool)

    def _captions(self, part: Part, shard: int, pool: ThreadPoolExecutor) -> Shard:
        """All captions of a shard, by one text encoder; raises SourceError if one can no longer be read."""
        layout = part.captions
        assert layout is not None, "a part of captions"
        captions = layout.captions_of(shard)
        packed = CaptionRows(part, shard)
        texts = self._plan.captions["text"].slice(captions.start, len(captions)).to_pylist()
        entries = self._entries(self._origins[captions.start : captions.stop])
        found = pool.map(lambda entry: self._caption(entry, layout.name), entries)
        for caption, text, values in zip(captions, texts, found, strict=True):
            packed.add(caption, text, values)
        return packed.shard

    def _caption(self, entry: Entry, name: str) -> np.ndarray:
        try:
            return self._reader.read_caption(entry, name)
        except RecordRejected as reject:
            raise SourceError(
                f"record '{entry.key}': its caption cannot be read ({reject.detail}), and other records may need it. "
                "Restore it, and run the same command again. Or import into another --store with --set "
                "text.check=content, where such records are rejected."
            ) from reject

    def _latents(self, part: str, shard: int, pool: ThreadPoolExecutor) -> Shard:
        """Latents of all records of a shard, and flipped latents if any."""
        of_part = self._plan.layout.parts[part]
        layouts, positions = of_part.arrays, self._plan.positions_of(of_part)
        rows = layouts[0].rows_of(shard)
        entries = self._entries(positions[rows.start : rows.stop])
        packed, rejects = Shard(of_part, shard, len(rows)), []
        for i, (entry, found) in enumerate(zip(entries, pool.map(self._read, entries), strict=True)):
            values = found if isinstance(found, RecordRejected) else _narrowed_rows(found, layouts)
            if isinstance(values, RecordRejected):
                reject = RecordRejected("decode", values.reason, values.detail)
                packed.reject(i, rows[i], entry.key, reject)
                rejects.append((i, entry.key, reject))
            else:
                assert isinstance(found, Features)
                firsts = [rows[i]] * len(layouts)
                packed.store(i, layouts, firsts, values, source_checksum=found.source_checksum)
        if self._limits:
            self._limits.count(len(rows), rejects)
            self._limits.check()
        self._count(len(rows))
        return packed

    def _entries(self, positions: np.ndarray) -> list[Entry]:
        """Entries of records of the plan."""
        names = ("key", "source_path", "source_offset", "source_bytes")
        return list(map(Entry, *(TakenColumn(self._plan.records[name], positions)[:] for name in names)))

    def _read(self, entry: Entry) -> Features | RecordRejected:
        try:
            return self._reader.read(entry)
        except RecordRejected as reject:
            return reject


def _narrowed_rows(found: Features, layouts: Sequence[ArrayLayout]) -> list[np.ndarray] | RecordRejected:
    """A record's row of each array, (1, ...) in the store's dtype."""
    if len(found.arrays) < len(layouts):
        return RecordRejected("decode", "wrong_shape", "there is no flipped copy")
    rows = []
    for values, layout in zip(found.arrays, layouts, strict=False):
        if values.shape != layout.shape[1:]:
            return RecordRejected("decode", "wrong_shape", f"shape {values.shape}, planned {layout.shape[1:]}")
        with np.errstate(over="ignore"):  # overflow becomes infinity
            rows.append(values.astype(layout.dtype)[None])
    if not all(np.isfinite(row).all() for row in rows):
        return RecordRejected("decode", "nonfinite", "NaN or infinity in the features, or beyond store.dtype")
    return rows
