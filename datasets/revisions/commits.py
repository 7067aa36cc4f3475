"""Commit records: what was written of one shard, until the revision is sealed.

A shard counts only if its commit record exists, matches its own hash, belongs to this plan, and names files of the
right size. The results of its rows lie beside it, as fixed-size binary rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import DamageError, LeanditError, RecordRejected, ResourceError
from ..disk.hashing import xxh3_file
from ..format.layout import COMMITS, PLAN, PLAN_FILE, Part, Task, commit_path, revision_prefix, rows_path
from ..format.row_layout import LATENTS
from ..format.schema import CommitRecord, PlanFile
from ..format.table_schemas import (
    EMPTY,
    LOW_QUALITY,
    NONFINITE_CAPTION,
    REJECT_REASONS,
    REJECTED,
    ROW_RESULTS,
    STORED,
)
from .catalog import file_entry, read_hashed
from .plan import FrozenPlan


def missing_work(plan: FrozenPlan, missing: Sequence[Task]) -> str:
    """Describe tasks of a plan for a message: shards, images, captions."""
    counts, all_tasks = Counter[str](), plan.layout.tasks()
    for which, tasks in (("missing", missing), ("all", all_tasks)):
        for name, shard in tasks:
            part = plan.layout.parts[name]
            kind = "null" if part.is_null else "captions" if part.captions else "images"
            counts[f"{which} {kind}"] += len(part.items(shard))
    kinds = [kind for kind in ("images", "captions") if counts[f"missing {kind}"]]
    of_all = [f"{counts[f'missing {kind}']:,} of {counts[f'all {kind}']:,} {kind}" for kind in kinds]
    return f"{len(missing):,} of {len(all_tasks):,} shards" + (f" ({', '.join(of_all)})" if of_all else "")


def new_results(part: Part, num_rows: int) -> np.ndarray:
    """(num_rows, groups) of ROW_RESULTS, all empty: one for each group of arrays of a part; captions have one."""
    results = np.zeros((num_rows, len(part.groups) or 1), ROW_RESULTS)
    results["min_cosine"] = results["max_error"] = np.nan
    return results


def nonfinite_caption(text: str, class_name: str) -> str:
    """What is said of a caption whose embedding is not finite."""
    return f"{class_name} in float32 produced NaN or infinity for the caption {text[:80]!r}"


def reject_of_caption(text: str, class_name: str, min_cosine: float | None) -> RecordRejected:
    """The reject of a caption, and of the records that have it.

    Args:
      class_name: of the text encoder.
      min_cosine: of its tokens as stored with those of the encoder; None if these are not finite.
    """
    if min_cosine is None:
        return RecordRejected("encode", NONFINITE_CAPTION, nonfinite_caption(text, class_name))
    detail = (
        f"a token of the caption {text[:80]!r} has a cosine of {min_cosine:.4f} as stored with that of {class_name}, "
        "without its largest numbers; store.on_low_quality rejects it"
    )
    return RecordRejected("encode", LOW_QUALITY, detail)


def read_commit(
    root: Path, plan: FrozenPlan, part: str, shard: int, *, check_bytes: bool = False, check_files: bool = True
) -> CommitRecord | None:
    """Read the commit record of a task; None if it is not valid, so the shard must be encoded again.

    Args:
      check_bytes: hash the shard's files instead of only checking sizes: after a power failure they may hold zeros.
      check_files: look at the files at all.
    Raises: ResourceError: the disk or this machine failed while the record was read.
    """
    try:
        record = read_hashed(root, commit_path(plan.revision, part, shard), CommitRecord, "")
    except ResourceError:  # it may be valid: to encode the shard again would be a guess
        raise
    except (OSError, LeanditError):
        return None
    if (record.plan, record.part, record.shard) != (plan.hash, part, shard) or not _matches_plan(plan, record):
        return None
    files = [(root / entry.path, entry) for entry in record.files] if check_files else []
    if not all(path.is_file() and path.stat().st_size == entry.bytes for path, entry in files):
        return None
    if check_bytes and not all(xxh3_file(path) == entry.xxh3_128 for path, entry in files):
        return None
    return record


def hash_of_damaged_plan(root: Path, revision: int) -> str:
    """The hash of an unfinished revision's plan of which a file is damaged or missing.

    Returns: the hash that ``plan.json`` or a commit record names; "" if no intact file does, so no shard is known to be
      encoded by it.
    Raises: ResourceError: the disk or this machine failed at one of these files, which may be intact.
    """
    prefix = revision_prefix(revision)
    kinds: dict[str, type[PlanFile | CommitRecord]] = {f"{prefix}{PLAN}/{PLAN_FILE}": PlanFile}
    for path in sorted((root / prefix / COMMITS).rglob("*.json")):
        kinds[path.relative_to(root).as_posix()] = CommitRecord
    for name, kind in kinds.items():
        try:
            return read_hashed(root, name, kind, "").plan
        except ResourceError:
            raise
        except (LeanditError, OSError):
            continue
    return ""


def read_results(root: Path, plan: FrozenPlan, record: CommitRecord) -> np.ndarray:
    """The results of a shard's rows, (rows, groups) of ROW_RESULTS.

    Raises: DamageError: they are not those that were written, or a row is not either stored or rejected, exactly once.
    """
    entry, part = record.files[-1], plan.layout.parts[record.part]
    rows = part.items(record.shard)
    path = commit_path(plan.revision, record.part, record.shard)
    again = f"Remove '{path}' and run the same command again: it encodes this shard again."
    content = (root / entry.path).read_bytes() if (root / entry.path).is_file() else b""
    if file_entry(entry.path, content) != entry:
        raise DamageError(f"store '{root}': '{entry.path}' changed while the store was sealed. {again}")
    results = np.frombuffer(content, ROW_RESULTS).reshape(-1, len(part.groups) or 1)
    states = results["state"]
    is_stored = (states == STORED) & (results["checksum"] != 0)  # 0 stands for none
    positions = np.array(rows) if part.captions else plan.positions_of(part)[rows.start : rows.stop]
    num_rejects = np.bincount([reject.row - rows.start for reject in record.rejects], minlength=len(rows))
    expected = np.where(positions < 0, EMPTY, np.where(num_rejects > 0, REJECTED, STORED))[:, None]
    wrong = np.any((states != expected) | (is_stored != (expected == STORED)), axis=1) | (
        num_rejects > (positions >= 0)
    )
    if wrong.any():
        row = int(np.argmax(wrong))
        position, count = int(positions[row]), int(is_stored[row].sum())
        key = f"record '{plan.records['key'][position]}'" if position >= 0 else "no record"
        item = f"caption {row}" if part.captions else f"row {rows[row]} ({key})"
        where = f"revision {plan.revision}, '{record.part}', shard {record.shard}, {item}"
        raise DamageError(
            f"store '{root}': {where} has {count} of {states.shape[1]} checksums and {num_rejects[row]} rejects; it "
            f"must be stored with all checksums, or rejected once. {again}"
        )
    return results


def _matches_plan(plan: FrozenPlan, record: CommitRecord) -> bool:
    """Whether a record has the files and rows of the plan; a record from others may contain anything."""
    part = plan.layout.parts[record.part]
    paths = [array.shard_path(record.shard) for array in part.arrays]
    rows = part.items(record.shard)
    results_bytes = len(rows) * (len(part.groups) or 1) * ROW_RESULTS.itemsize
    if [entry.path for entry in record.files] != [*paths, rows_path(plan.revision, record.part, record.shard)]:
        return False
    if record.files[-1].bytes != results_bytes:
        return False
    channels, statistics = plan.spec.latent.channels, record.statistics
    return (
        (statistics is not None) == (LATENTS in part.groups)
        and (not statistics or len(statistics.channel_mean) == len(statistics.channel_std) == channels)
        and all(reject.row in rows and reject.reason in REJECT_REASONS for reject in record.rejects)
        and all(fallback.row in rows for fallback in record.fallbacks)
        and not (part.captions and record.fallbacks)
        and not (part.is_null and record.rejects)
    )
