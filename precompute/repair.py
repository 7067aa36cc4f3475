"""Encode damaged shards of a store again.

A shard is a pure function of the plan and the encoders, so the new bytes have the hash that the store names. If they
do not (another kind of device, another library version), nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..datasets.arrays.shard_file import ShardFile
from ..datasets.disk.files import write_atomic
from ..datasets.disk.hashing import xxh3_parts
from ..datasets.errors import DamageError, LeanditError
from ..datasets.format.layout import Task, is_picture_task
from ..datasets.format.schema import Fallback, StoreSpec
from ..datasets.format.table_schemas import PLACES, place_columns
from ..datasets.format.zarr_shard import pack_shard
from ..datasets.maintenance.verify import Verification, verify_store
from ..datasets.revisions.catalog import sealed_revisions
from ..datasets.revisions.plan import FrozenPlan, read_plan, read_spec
from ..datasets.revisions.writer import row_checksum
from .config import PrecomputeRecipe
from .encoders.loading import Encoders
from .images.decoders import Decoders
from .planning.opening import is_extension
from .run.shards import Shard
from .run.tasks import FallbacksOf, Runner
from .sources.files.record import SourceRecord
from .sources.source import Source

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them


class Maker(Protocol):
    """Makes shards of a store's plans again."""

    @property
    def fingerprint(self) -> str:
        """Of the revisions that it can make."""
        ...

    def make(self, plan: FrozenPlan, tasks: Sequence[Task], fallbacks_of: FallbacksOf) -> Iterator[Shard]:
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

    def make(self, plan: FrozenPlan, tasks: Sequence[Task], fallbacks_of: FallbacksOf) -> Iterator[Shard]:
        """Encode shards of a plan again."""
        yield from self.runner.shards(
            with_places(plan, self.source), sorted(tasks, key=is_picture_task), fallbacks_of=fallbacks_of
        )

    @property
    def runner(self) -> Runner:
        """What encodes."""
        return Runner(self.encoders, self.decoders, self.source)


def repair(root: Path, tools: Maker, found: Verification, progress: Callable[[str, int, int], None]) -> Verification:
    """Encode damaged shards of complete revisions again, and verify the store again.

    An unfinished revision is for precompute to finish.

    Args:
      found: result of a verification of the store.
    Returns: the remaining findings.
    """
    not_reproduced: dict[str, str] = {}
    for revision in found.revisions:
        try:
            plan = read_plan(root, revision)
        except LeanditError:
            continue  # both copies of a table are damaged
        if not _can_make(root, plan.spec, tools):
            continue  # these encoders do not match
        tasks = sorted({task for one in found.findings if (task := plan.layout.task_of(one.path))})
        for done, shard in enumerate(tools.make(plan, tasks, fallbacks_in(plan)), 1):
            not_reproduced |= _replace_shard(root, plan, shard, found)
            progress("repair", done, len(tasks))
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
    newest = read_spec(root, sealed_revisions(root)[-1])
    return spec.fingerprint == tools.fingerprint or (
        newest.fingerprint == tools.fingerprint and is_extension(spec, newest)
    )


def fallbacks_in(plan: FrozenPlan) -> FallbacksOf:
    """Look up the rows of a shard that were not encoded as planned, in the records of its revision."""

    def fallbacks(part: str, shard: int) -> Sequence[Fallback]:
        rows, records = plan.layout.rows_of(part, shard), _records_of(plan, part, shard)
        how = records["fallback"].to_pylist()
        return [Fallback(row=row, how=fallback) for row, fallback in zip(rows, how, strict=True) if fallback]

    return fallbacks


def _records_of(plan: FrozenPlan, part: str, shard: int) -> pa.Table:
    """Records of the rows of a shard, in their order; nulls for a row that no record has."""
    rows = plan.layout.rows_of(part, shard)
    positions = plan.positions_of(plan.layout.parts[part])[rows.start : rows.stop]
    return plan.records.take(pa.array(positions, mask=positions < 0))


def _replace_shard(root: Path, plan: FrozenPlan, shard: Shard, found: Verification) -> dict[str, str]:
    """Write the files of a shard if their bytes are those that the store names.

    Returns: path of each file that differs, and why.
    """
    arrays = _keep_intact_rows(root, plan, shard) if is_picture_task(shard.task) else shard.arrays
    files = {}
    for path, rows in arrays.items():
        layout = plan.layout.arrays[path]
        files[layout.shard_path(shard.number)] = pack_shard(layout, rows)
    wrong = [path for path, parts in files.items() if xxh3_parts(parts)[1] != found.expected[path].xxh3_128]
    if not wrong:
        for path, parts in files.items():
            write_atomic(root / path, parts)
        return {}
    if shard.rejects:
        why = ", ".join(f"{reject.reason} ({reject.key})" for reject in shard.rejects[:3])
    elif plan.copies:
        why = "its rows were encoded in other batches, before 'leandit compact'"
    else:
        why = "another kind of device, number of CPU threads or version of a library, or another picture in the source"
    detail = (
        f"encoded again, it has other bytes than were written: {why}. It was left as it is. Repair where it was made, "
        "or precompute into another --store"
    )
    return dict.fromkeys(files, detail)  # no file of the shard is replaced, so all of them share the reason


def _keep_intact_rows(root: Path, plan: FrozenPlan, shard: Shard) -> dict[str, np.ndarray]:
    """Arrays with the intact rows of the damaged shard: they stay valid even if their pictures have changed.

    Rows of records that were rejected are empty, whatever the source holds now, unless it was for a caption.
    """
    part, records = shard.part, _records_of(plan, *shard.task)
    arrays = {path: rows.copy() for path, rows in shard.arrays.items()}
    is_empty = pc.fill_null(pc.not_equal(records["status"], "stored"), True)
    is_empty = pc.and_(is_empty, pc.fill_null(pc.not_equal(records["reason"], "nonfinite_caption"), True)).to_numpy()
    for group, layouts in part.groups.items():
        try:
            files = [ShardFile(root / one.shard_path(shard.number), one, len(is_empty)) for one in layouts]
        except (DamageError, OSError, ValueError):
            files = []
        for row, checksum in enumerate(records[f"checksum_{group}" if group else "checksum"].to_pylist()):
            if is_empty[row]:
                kept = [one.fill_value for one in layouts]
            elif (kept := _intact_row(files, row, checksum)) is None:
                continue
            for layout, values in zip(layouts, kept, strict=True):
                arrays[layout.path][row] = values
    return arrays


def _intact_row(files: Sequence[ShardFile], row: int, checksum: int) -> list[np.ndarray] | None:
    """A row of each file of a group, if it has its checksum."""
    try:
        found = [file.read(row, row + 1)[0] for file in files]
    except DamageError:
        return None
    return found if found and row_checksum(*found) == checksum else None


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
    order = list(source.companions)
    for picture, names in zip(plan.spec.pictures, place_columns(plan.spec), strict=True):
        planned, i = zip(*(plan.records[name].to_pylist() for name in names), strict=True), order.index(picture.name)
        found = [now[key].companions[i] if key in now else place for key, place in zip(keys, planned, strict=True)]
        columns |= dict(zip(names, zip(*found, strict=True), strict=True))
    return replace(plan, records=pa.table(columns, schema=plan.records.schema), recorded_hash=plan.recorded_hash)
