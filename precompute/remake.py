"""Shards of complete revisions are made again: to repair damaged ones, or to compare a sample with the store.

A shard is a pure function of the plan and the encoders, so a damaged one gets the hash that the store names. If it does
not (another kind of device, another library version), nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..datasets.arrays.shard_file import ShardFile
from ..datasets.disk.files import write_atomic
from ..datasets.disk.hashing import xxh3_parts
from ..datasets.format.layout import Part, is_image_task
from ..datasets.format.table_schemas import LOW_QUALITY, NONFINITE_CAPTION
from ..datasets.format.token_dtypes import StoredTokens, widen, widen_latents
from ..datasets.format.zarr_shard import pack_shard
from ..datasets.maintenance.findings import Finding
from ..datasets.maintenance.verify import Verification, verify_store
from ..datasets.revisions.catalog import sealed_revisions
from ..datasets.revisions.plan import FrozenPlan, read_plan, read_spec
from ..datasets.revisions.writer import row_checksum
from ..datasets.store import LatentStore
from ..errors import DamageError, LeanditError, RecordRejected, ResourceError
from ..units import plural
from .planning.opening import is_extension
from .run.shards import Shard
from .run.tasks import ShardRunner

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

LATENT_SIDES = 3  # of a row of latents; rows of tokens and captions have fewer
CLOSE = 2e-2  # of the largest value of an array; tolerance for another device or library version


def repair(
    root: Path, runner: ShardRunner, found: Verification, progress: Callable[[str, int, int], None]
) -> Verification:
    """Make damaged shards of complete revisions again, and verify the store again.

    An unfinished revision is for precompute to finish.

    Args:
      runner: of the newest revision.
      found: result of a verification of the store.
    Returns: the remaining findings.
    """
    not_reproduced: dict[str, str] = {}
    for revision in found.revisions:
        newest = read_spec(root, sealed_revisions(root)[-1])
        try:
            plan = read_plan(root, revision)
        except ResourceError:
            raise
        except LeanditError:
            continue  # both copies of a table are damaged
        if plan.spec.fingerprint != newest.fingerprint and not is_extension(plan.spec, newest):
            continue  # these encoders do not match
        tasks = sorted({task for one in found.findings if (task := plan.layout.task_of_file.get(one.path))})
        for done, shard in enumerate(runner.remake(plan, tasks), 1):
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


def _replace_shard(root: Path, plan: FrozenPlan, shard: Shard, found: Verification) -> dict[str, str]:
    """Write the files of a shard if their bytes are those that the store names.

    Returns: path of each file that differs, and why.
    """
    arrays = _keep_intact_rows(root, plan, shard) if is_image_task(shard.task) else shard.arrays
    files = {}
    for path, rows in arrays.items():
        layout = plan.layout.arrays[path]
        files[layout.shard_path(shard.number)] = pack_shard(layout, rows)
    if all(xxh3_parts(parts)[1] == found.expected[path].xxh3_128 for path, parts in files.items()):
        for path, parts in files.items():
            write_atomic(root / path, parts)
        return {}
    if shard.rejects:
        first = shard.rejects[0]
        detail = (
            f"{plural(len(shard.rejects), 'record')} of this shard cannot be encoded again, such as '{first.key}': "
            f"{first.reason}, {first.detail}. Check --source"
        )
    else:
        why = "another kind of device, number of CPU threads or version of a library, or another image in the source"
        why = "its rows were encoded in other batches, before 'leandit compact'" if plan.copies else why
        detail = f"encoded again, its bytes differ from those written: {why}. Repair where it was made, or precompute "
        detail += "into another --store"
    return dict.fromkeys(files, detail)  # no file of the shard is replaced, so all of them share the reason


def _keep_intact_rows(root: Path, plan: FrozenPlan, shard: Shard) -> dict[str, np.ndarray]:
    """Arrays with the intact rows of the damaged shard: they stay valid even if their images have changed.

    Rows of records that were rejected are empty, whatever the source holds now, unless it was for a caption.
    """
    positions = plan.positions_of(shard.part)[shard.items.start : shard.items.stop]
    records = plan.records.take(pa.array(positions, mask=positions < 0))  # nulls for a row that no record has
    arrays = {path: rows.copy() for path, rows in shard.arrays.items()}
    is_empty = pc.fill_null(pc.not_equal(records["status"], "stored"), True)
    is_for_caption = pc.is_in(records["reason"], pa.array([NONFINITE_CAPTION, LOW_QUALITY]))
    is_empty = pc.and_not(is_empty, is_for_caption).to_numpy()
    for group, layouts in shard.part.groups.items():
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
        values = [file.read(row, row + 1)[0] for file in files]
    except DamageError:
        return None
    return values if values and row_checksum(*values) == checksum else None


@dataclass
class DeepReport:
    """Result of a deep check.

    Args:
      num_records, num_captions: compared, with all their features and text encoders, those that were added later too.
      num_exact: equal bit for bit.
      num_close: equal within ``CLOSE``, as from another kind of device or library version.
      findings: all others.
    """

    num_records: int
    num_captions: int
    num_exact: int
    num_close: int
    findings: list[Finding]


def deep_check(root: Path, runner: ShardRunner, *, num_records: int, seed: int) -> DeepReport:
    """Encode a random sample of records and captions again and compare them with the store.

    The runner encodes their original batches, because the rest of a batch changes the bits of a convolution. What a
    later revision added to them was encoded in batches of its own, and so it is here.

    Args:
      num_records: number of records, and of captions, to compare; all if there are fewer.
    """
    store, rng = LatentStore(root), np.random.default_rng(seed)
    stored = np.flatnonzero(np.array(store.records["status"].to_pylist()) == "stored")
    sample = rng.choice(stored, min(num_records, len(stored)), replace=False)
    records = store.records.take(pa.array(sample)).to_pylist()
    is_finite = np.ones(store.captions.num_rows, bool)
    for name in store.texts:
        is_finite &= store.caption_checksums(name) != 0
    encoded = np.flatnonzero(is_finite)
    captions = np.sort(rng.choice(encoded, min(num_records, len(encoded)), replace=False))
    is_exact: dict[str | int, bool] = {}  # by the key of a record or the id of a caption
    findings: dict[str | int, list[Finding]] = {}
    for revision in sealed_revisions(root):
        plan = read_plan(root, revision)
        wanted = {
            (part.name, number): sampled
            for part in plan.layout.parts.values()
            for number in part.shards
            if (sampled := _sampled(part, number, records, captions))
        }
        rows = {task: sampled.keys() for task, sampled in wanted.items()}
        for shard in runner.remake(plan, wanted, rows):
            for row, what in wanted[shard.task].items():
                name = what if shard.part.captions else what["key"]
                if any(one.cause == "source_changed" for one in findings.get(name, ())):
                    continue  # said once, of a record whose image is gone
                compare = _compared_caption if shard.part.captions else _compared_record
                for outcome in compare(store, plan, shard, row, what):
                    is_exact[name] = is_exact.get(name, True) and outcome is True
                    findings.setdefault(name, []).extend([outcome] if isinstance(outcome, Finding) else [])
    num_exact = sum(is_exact.values())
    return DeepReport(
        num_records=len(is_exact) - sum(isinstance(name, int) for name in is_exact),
        num_captions=sum(isinstance(name, int) for name in is_exact),
        num_exact=num_exact,
        num_close=sum(not found for found in findings.values()) - num_exact,
        findings=[one for found in findings.values() for one in found],
    )


def _sampled(part: Part, number: int, records: Iterable[dict[str, Any]], captions: np.ndarray) -> dict[int, Any]:
    """Rows of a shard that are in the sample, with their records; or its captions, counted from the first of the part,
    with their ids."""
    if part.is_null:
        return {}
    if part.captions:
        here, first = part.captions.captions_of(number), part.captions.first_caption
        return {int(id) - first: int(id) for id in captions if int(id) - first in here}
    rows = part.arrays[0].rows_of(number)
    return {one["row"]: one for one in records if one["bucket"] == part.bucket and one["row"] in rows}


def _compared_record(
    store: LatentStore, plan: FrozenPlan, shard: Shard, row: int, record: Mapping[str, Any]
) -> Iterator[Finding | bool]:
    """Compare each group of a record with the store: exact (True), close (False), or a finding with what differs."""
    part, item = shard.part, row - shard.items.start
    of_shard = Finding("", "not_reproduced", "", plan.revision, part.bucket, shard.number, 1, [record["key"]])
    first = replace(of_shard, path=part.arrays[0].shard_path(shard.number))
    if reject := next((one for one in shard.rejects if one.row == row), None):
        said = RecordRejected(reject.stage, reject.reason, reject.detail)
        if reject.stage == "encode":
            yield replace(first, detail=f"cannot be encoded again: {said}")
            return
        detail = f"the image can no longer be read ({reject.reason}: {reject.detail})"
        yield replace(first, cause="source_changed", detail=detail)
        return
    checksums = shard.results["source_checksum"][item].tolist()
    companions = {one.name for one in plan.spec.companions}
    names = [f"source_checksum_{group}" if group in companions else "source_checksum" for group in part.groups]
    if [record[name] for name in names] != checksums:
        detail = "the source holds another image now; precompute with --set source.check=content encodes it"
        yield replace(first, cause="source_changed", detail=detail)
        return
    for layouts in part.groups.values():
        stored = [store.array(layout.path)[row] for layout in layouts]
        encoded = [shard.arrays[layout.path][item] for layout in layouts]
        yield _compared(stored, encoded, replace(of_shard, path=layouts[0].shard_path(shard.number)))


def _compared_caption(
    store: LatentStore, plan: FrozenPlan, shard: Shard, caption: int, number: int
) -> Iterator[Finding | bool]:
    """Compare a caption, counted from the first of its part, as ``_compared_record`` does; ``number`` is its id."""
    layout = shard.part.captions
    assert layout is not None, "a part of captions"
    stored, encoded = store.text(layout.name).stored_rows(number), []
    for array, first, rows in zip(shard.part.arrays, layout.starts_of(caption), stored, strict=True):
        start = first - array.rows_of(shard.number).start
        encoded.append(shard.arrays[array.path][start : start + len(rows)])
    text, path = store.captions["text"][number].as_py(), shard.part.arrays[0].shard_path(shard.number)
    yield _compared(stored, encoded, Finding(path, "not_reproduced", "", plan.revision, None, shard.number, 1, [text]))


def _compared(stored: Sequence[np.ndarray], encoded: Sequence[np.ndarray], finding: Finding) -> Finding | bool:
    """Rows, as on disk, are equal bit for bit (True), close (False), or differ."""
    if all(np.array_equal(one, other) for one, other in zip(stored, encoded, strict=True)):
        return True
    far = []
    for before, now in zip(_numbers(stored), _numbers(encoded), strict=True):
        error = float(np.max(np.abs(before - now)))
        far += [] if error <= CLOSE * float(np.max(np.abs(now))) else [error]  # NaN is far, too
    return replace(finding, detail=f"encoded again it differs by up to {max(far):.4g}") if far else False


def _numbers(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Rows of arrays as the numbers that they are: int8 tokens times the scales that follow them, bits of bfloat16."""
    numbers, rest = [], [np.asarray(one) for one in rows]
    while rest:
        one = rest.pop(0)
        if one.ndim == LATENT_SIDES:
            numbers.append(widen_latents(one).astype(np.float64))
            continue
        scales = rest.pop(0) if one.dtype == np.int8 else None
        dtype = {np.dtype(np.int8): "int8", np.dtype(np.uint16): "bfloat16"}.get(one.dtype, "float32")
        numbers.append(widen(StoredTokens(one, scales), dtype).astype(np.float64))
    return numbers
