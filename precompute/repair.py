"""Encode damaged shards of a store again.

A shard is a pure function of the plan and the encoders, so the new bytes have the hash that the store names. If they
do not (another kind of device, another library version), nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from ..datasets.arrays.shard_file import ShardFile
from ..datasets.disk.hashing import xxh3_parts
from ..datasets.errors import DamageError
from ..datasets.format.layout import is_picture_task
from ..datasets.format.row_layout import LATENTS
from ..datasets.format.schema import Fallback, StoreSpec
from ..datasets.format.table_schemas import PLACES, place_columns
from ..datasets.format.zarr_shard import ArrayLayout, pack_shard
from ..datasets.maintenance.repair import repair_revision, reseal, revisions_to_repair
from ..datasets.maintenance.verify import Verification, verify_store
from ..datasets.revisions.catalog import read_spec, sealed_revisions
from ..datasets.revisions.commits import Task, read_record
from ..datasets.revisions.plan import FrozenPlan
from ..datasets.revisions.writer import StoreWriter, row_checksum
from .config import PrecomputeRecipe
from .encoders.loading import Encoders
from .images.decoders import Decoders
from .planning.additions import is_extension
from .progress.clock import StageClock
from .progress.rejects import RejectLimit
from .shards.latent_shard import PackedShard
from .shards.stages import encode_captions, encode_pictures, write_shard
from .sources.files.record import SourceRecord
from .sources.source import Source

FallbacksOf = Callable[[str, int], Sequence[Fallback]]
UNLIMITED = {"max_rejects_in_a_row": 1 << 62}


class Maker(Protocol):
    """Makes shards of a store's plans again."""

    @property
    def fingerprint(self) -> str:
        """Of the revisions that it can make."""
        ...

    def make(self, plan: FrozenPlan, tasks: Sequence[Task], fallbacks_of: FallbacksOf) -> Iterator[PackedShard]:
        """Make shards of a plan again.

        Args:
          fallbacks_of: rows of a part and shard that were not encoded as planned.
        """
        ...


@dataclass(frozen=True)
class Tools:
    """The source, and the store's own recipe and encoders."""

    source: Source
    recipe: PrecomputeRecipe
    fingerprint: str
    encoders: Encoders
    decoders: Decoders

    def make(self, plan: FrozenPlan, tasks: Sequence[Task], fallbacks_of: FallbacksOf) -> Iterator[PackedShard]:
        """Encode shards of a plan again."""
        plan = with_places(plan, self.source)
        clock = StageClock()
        texts = [task for task in tasks if not is_picture_task(task)]
        yield from encode_captions(plan, texts, self.encoders.captions, clock)
        section = self.recipe.source.model_copy(update=UNLIMITED)
        yield from encode_pictures(
            plan,
            [task for task in tasks if is_picture_task(task)],
            self.encoders,
            self.decoders,
            self.source,
            limit=RejectLimit(section, None),
            clock=clock,
            progress=lambda _: None,
            fallbacks_of=fallbacks_of,
        )


def repair(root: Path, tools: Maker, found: Verification, progress: Callable[[str, int, int], None]) -> Verification:
    """Encode damaged shards again, restore the files that depend on them, and verify the store again.

    Args:
      found: result of a verification of the store.
    Returns: the remaining findings.
    """
    not_reproduced: dict[str, str] = {}
    for revision in revisions_to_repair(found):
        writer = repair_revision(root, revision, found)
        if writer is None or not _can_make(root, writer.spec, tools):
            continue  # too much is missing, or these encoders do not match
        at_fault = {writer.plan.layout.task_of(finding.path) for finding in found.findings}
        if revision in found.revisions:
            at_fault |= set(writer.missing_tasks())  # an unfinished revision is for precompute to finish
        tasks = [task for task in writer.plan.layout.tasks() if task in at_fault]
        for done, shard in enumerate(tools.make(writer.plan, tasks, _fallbacks_of(writer)), 1):
            not_reproduced |= _replace_shard(writer, shard, found)
            progress("repair", done, len(tasks))
        reseal(writer)
    left = verify_store(root)
    left.findings = [
        replace(finding, cause="not_reproduced", detail=not_reproduced[finding.path])
        if finding.path in not_reproduced
        else finding
        for finding in left.findings
    ]
    return left


def _can_make(root: Path, spec: StoreSpec, tools: Maker) -> bool:
    """Whether tools have the encoders of a revision: those of the newest one, perhaps before others were added."""
    newest = read_spec(root, (sealed_revisions(root) or [1])[-1])
    return spec.fingerprint == tools.fingerprint or (
        newest.fingerprint == tools.fingerprint and is_extension(spec, newest)
    )


def _fallbacks_of(writer: StoreWriter) -> Callable[[str, int], Sequence[Fallback]]:
    """Look up the rows of a shard that were not encoded as planned, in its commit record."""

    def fallbacks(part: str, shard: int) -> Sequence[Fallback]:
        record = read_record(writer.root, writer.plan, part, shard)
        return record.fallbacks if record else ()

    return fallbacks


def _replace_shard(writer: StoreWriter, shard: PackedShard, found: Verification) -> dict[str, str]:
    """Write a shard if its bytes are those that the store names.

    Returns: path of each file that differs, and why.
    """
    shard = _keep_intact_rows(writer, shard)
    differing = []
    for path, rows in shard.arrays.items():
        layout = writer.plan.layout.arrays[path]
        entry = found.expected.get(layout.shard_path(shard.shard))
        if entry and xxh3_parts(pack_shard(layout, rows))[1] != entry.xxh3_128:
            differing.append(entry.path)
    if not differing:
        write_shard(writer, shard)
        return {}
    if shard.rejects:
        why = ", ".join(f"{reject.reason} ({reject.key})" for reject in shard.rejects[:3])
    elif writer.plan.copies:
        why = "its rows were encoded in other batches, before 'leandit compact'"
    else:
        why = "another kind of device, number of CPU threads or version of a library, or another picture in the source"
    detail = (
        f"encoded again, it has other bytes than were written: {why}. It was left as it is. Repair where it was made, "
        "or precompute with --new-revision"
    )
    # No file of the shard is replaced, so all of them share the reason.
    paths = [writer.plan.layout.arrays[path].shard_path(shard.shard) for path in shard.arrays]
    return dict.fromkeys(paths, detail)


def _keep_intact_rows(writer: StoreWriter, shard: PackedShard) -> PackedShard:
    """Copy the intact rows of the damaged shard: they stay valid even if their pictures have changed."""
    record = read_record(writer.root, writer.plan, shard.part, shard.shard)
    if record is None:
        return shard
    if not is_picture_task((shard.part, shard.shard)):
        return replace(shard, qualities=list(zip(record.min_cosines, record.max_errors, strict=True)))
    try:
        maps = {
            path: ShardFile(writer.root / layout.shard_path(shard.shard), layout, len(rows))
            for path, rows in shard.arrays.items()
            for layout in [writer.plan.layout.arrays[path]]
        }
    except (DamageError, OSError, ValueError):
        return shard
    groups = writer.plan.layout.parts[shard.part].groups
    checksums = {LATENTS: record.checksums} | {name: one.checksums for name, one in record.features.items()}
    arrays = {path: rows.copy() for path, rows in shard.arrays.items()}
    fits = True
    for group, layouts in groups.items():
        paths = [layout.path for layout in layouts]
        of_group = {path: arrays[path] for path in paths}
        _keep_rows(of_group, [maps[path] for path in paths], layouts, checksums[group])
        fits &= _fit(of_group, checksums[group])
    return replace(
        shard,
        arrays=arrays,
        checksums=record.checksums,
        source_checksums=record.source_checksums,
        rejects=record.rejects if fits else shard.rejects,
        fallbacks=record.fallbacks,
        features=record.features,
    )


def _keep_rows(
    arrays: dict[str, np.ndarray], maps: Sequence[ShardFile], layouts: Sequence[ArrayLayout], checksums: Sequence[str]
) -> None:
    """Copy the intact rows of a group of arrays from disk."""
    for row, checksum in enumerate(checksums):
        try:
            found = [mapped.read(row, row + 1)[0] for mapped in maps]
        except DamageError:
            continue
        if not checksum:  # rejected: empty in every array, whatever the source holds now
            found = [np.full_like(one, layout.fill_value) for one, layout in zip(found, layouts, strict=True)]
        elif row_checksum(*found) != checksum:
            continue
        for array, one in zip(arrays.values(), found, strict=True):
            array[row] = one


def _fit(arrays: dict[str, np.ndarray], checksums: Sequence[str]) -> bool:
    """All rows have their recorded checksums."""
    found = (row_checksum(*(array[row] for array in arrays.values())) for row in range(len(checksums)))
    return all(not wanted or wanted == digest for wanted, digest in zip(checksums, found, strict=True))


def with_places(plan: FrozenPlan, source: Source) -> FrozenPlan:
    """The plan with the present places of its pictures in the source."""
    now: dict[str, SourceRecord] = {}
    for record in source.records:
        if not record.problem:
            now.setdefault(record.key, record)
    places = list(zip(*(plan.records[name].to_pylist() for name in PLACES), strict=True))
    keys = plan.records["key"].to_pylist()
    found = [now[key].place if key in now else place for key, place in zip(keys, places, strict=True)]
    columns = {name: plan.records[name] for name in plan.records.column_names}
    columns |= dict(zip(PLACES, zip(*found, strict=True), strict=True))
    order = list(source.pictures)
    for picture, names in zip(plan.spec.pictures, place_columns(plan.spec), strict=True):
        planned, i = zip(*(plan.records[name].to_pylist() for name in names), strict=True), order.index(picture.name)
        found = [now[key].pictures[i] if key in now else place for key, place in zip(keys, planned, strict=True)]
        columns |= dict(zip(names, zip(*found, strict=True), strict=True))
    return replace(plan, records=pa.table(columns, schema=plan.records.schema), recorded_hash=plan.hash)
