"""Encode again what a verification found damaged.

A shard is a pure function of the plan and the encoders, so what is encoded again has the hash that the store names;
where it has not (another kind of device, another version of a library), nothing is written.
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
from ..datasets.format.schema import Fallback
from ..datasets.format.zarr_shard import pack_shard
from ..datasets.maintenance.findings import part_of
from ..datasets.maintenance.repair import repair_revision, reseal, revisions_to_repair
from ..datasets.maintenance.verify import Verification, verify_store
from ..datasets.revisions.commits import Task, read_record
from ..datasets.revisions.plan import FrozenPlan
from ..datasets.revisions.writer import StoreWriter, row_checksum
from .config import PrecomputeRecipe
from .encoders.vae import Encoders
from .images.decoders import Decoders
from .progress.clock import StageClock
from .progress.rejects import RejectLimit
from .shards.latent_shard import PackedShard
from .shards.stages import encode_captions, encode_pictures, write_shard
from .sources.files.record import SourceRecord
from .sources.source import Source

PLACE_COLUMNS = ("source_path", "source_offset", "source_bytes", "source_mtime_ns")
FallbacksOf = Callable[[str, int], Sequence[Fallback]]
UNLIMITED = {"max_rejects_in_a_row": 1 << 62}


class Maker(Protocol):
    """Makes shards of a store's plans again."""

    @property
    def fingerprint(self) -> str:
        """Of the revisions that it can make."""
        ...

    def make(self, plan: FrozenPlan, tasks: Sequence[Task], fallbacks_of: FallbacksOf) -> Iterator[PackedShard]:
        """Make some shards of a plan again.

        Args:
          fallbacks_of: of a part and shard, how rows were encoded that were not as planned.
        """
        ...


@dataclass(frozen=True)
class Tools:
    """What is encoded with: the pictures as they lie now, the store's own recipe and encoders."""

    source: Source
    recipe: PrecomputeRecipe
    fingerprint: str
    encoders: Encoders
    decoders: Decoders

    def make(self, plan: FrozenPlan, tasks: Sequence[Task], fallbacks_of: FallbacksOf) -> Iterator[PackedShard]:
        """Encode some shards of a plan again."""
        yield from _encode(plan, tasks, self, fallbacks_of)


def repair(root: Path, tools: Maker, found: Verification, progress: Callable[[str, int, int], None]) -> Verification:
    """Encode the shards at fault again, and mend what hangs on them; then verify the store again.

    Args:
      found: what a verification of the store found.
    Returns: what is still wrong.
    """
    not_reproduced: dict[str, str] = {}
    for revision in revisions_to_repair(found):
        at_fault = {part_of(finding.path) for finding in found.findings if finding.revision == revision}
        writer = repair_revision(root, revision, found)
        if writer is None or writer.spec.fingerprint != tools.fingerprint:
            continue  # too much is gone, or what it takes to encode is not at hand
        if revision in found.revisions:
            at_fault |= set(writer.missing_tasks())  # else the revision is unfinished, which is precompute's to mend
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


def _encode(plan: FrozenPlan, tasks: Sequence[Task], tools: Tools, fallbacks_of: FallbacksOf) -> Iterator[PackedShard]:
    """Make some shards of a plan again."""
    plan = with_places(plan, tools.source)
    clock = StageClock()
    if tools.encoders.caption:
        texts = [task for task in tasks if not is_picture_task(task)]
        yield from encode_captions(plan, texts, tools.encoders.caption, clock)
    section = tools.recipe.source.model_copy(update=UNLIMITED)
    yield from encode_pictures(
        plan,
        [task for task in tasks if is_picture_task(task)],
        tools.encoders.image,
        tools.decoders,
        tools.source,
        limit=RejectLimit(section, None),
        clock=clock,
        progress=lambda _: None,
        fallbacks_of=fallbacks_of,
    )


def _fallbacks_of(writer: StoreWriter) -> Callable[[str, int], Sequence[Fallback]]:
    """How the rows of a shard were encoded that were not as planned, as its commit record says it."""

    def fallbacks(part: str, shard: int) -> Sequence[Fallback]:
        record = read_record(writer.root, writer.plan, part, shard)
        return record.fallbacks if record else ()

    return fallbacks


def _replace_shard(writer: StoreWriter, shard: PackedShard, found: Verification) -> dict[str, str]:
    """Write a shard that came out as the store says that it was; else write nothing.

    Returns: path of each file that did not, and why.
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
    # Every file of the shard is left as it is, so each that is damaged has the same reason.
    paths = [writer.plan.layout.arrays[path].shard_path(shard.shard) for path in shard.arrays]
    return dict.fromkeys(paths, detail)


def _keep_intact_rows(writer: StoreWriter, shard: PackedShard) -> PackedShard:
    """Take the rows that are still right from the damaged shard: what became of their pictures does not matter then."""
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
    arrays = {path: rows.copy() for path, rows in shard.arrays.items()}
    for row, checksum in enumerate(record.checksums):
        try:
            found = [mapped.read(row, row + 1)[0] for mapped in maps.values()]
        except DamageError:
            continue
        if not checksum:  # rejected: NaN in every array, whatever the source holds now
            found = [np.full_like(one, np.nan) for one in found]
        elif row_checksum(*found) != checksum:
            continue
        for array, one in zip(arrays.values(), found, strict=True):
            array[row] = one
    return replace(
        shard,
        arrays=arrays,
        checksums=record.checksums,
        source_checksums=record.source_checksums,
        rejects=record.rejects if _fit(arrays, record.checksums) else shard.rejects,
        fallbacks=record.fallbacks,
    )


def _fit(arrays: dict[str, np.ndarray], checksums: Sequence[str]) -> bool:
    """All rows of a shard are those that were written."""
    found = (row_checksum(*(array[row] for array in arrays.values())) for row in range(len(checksums)))
    return all(not wanted or wanted == digest for wanted, digest in zip(checksums, found, strict=True))


def with_places(plan: FrozenPlan, source: Source) -> FrozenPlan:
    """The plan with the places that its pictures have in the source now."""
    now: dict[str, SourceRecord] = {}
    for record in source.records:
        if not record.problem:
            now.setdefault(record.key, record)
    places = list(zip(*(plan.records[name].to_pylist() for name in PLACE_COLUMNS), strict=True))
    keys = plan.records["key"].to_pylist()
    found = [now[key].place if key in now else place for key, place in zip(keys, places, strict=True)]
    columns = {name: plan.records[name] for name in plan.records.column_names}
    columns |= dict(zip(PLACE_COLUMNS, zip(*found, strict=True), strict=True))
    return replace(plan, records=pa.table(columns, schema=plan.records.schema), recorded_hash=plan.hash)
