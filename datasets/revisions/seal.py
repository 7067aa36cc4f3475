"""The seal of a revision: tables, ``zarr.json`` files and manifest, a pure function of plan and commit records.

Every process writes the same bytes. The manifest comes last; then plan and commit records are removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...errors import DamageError
from ..disk.files import remove, write_atomic
from ..disk.hashing import canonical_json, xxh3_file, xxh3_parts
from ..format.layout import (
    CAPTIONS,
    COMMITS,
    INDEX,
    JOURNAL,
    LOCAL,
    MANIFEST,
    PLAN,
    PLAN_FILE,
    RECORDS,
    SOURCES,
    TWIN,
    commit_path,
    revision_prefix,
    zarr_files,
)
from ..format.row_layout import LATENTS
from ..format.schema import FORMAT_VERSION, LatentStatistics, Manifest
from ..format.table_schemas import captions_schema, records_schema, sources_schema
from ..format.tables import batches_of_parquet, parquet_file, parquet_of_groups, read_batches
from .catalog import file_entry
from .commits import read_commit, read_results
from .local import local_file, shared_spec
from .merge import STATUSES, Merge
from .plan import FrozenPlan
from .records import build_index
from .stored_statistics import rows_of_records, rows_written, statistics_of_stored

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

Files = dict[str, bytes | memoryview]


def seal_files(root: Path, plan: FrozenPlan) -> tuple[Files, Manifest]:
    """Files of a revision's folder by name, manifest last, and the manifest.

    Reads each commit record of the plan once.

    Returns: contents (tables in mapped temporary files), and the manifest.
    Raises: DamageError: a commit record has changed, as ``read_results``, or a record is in no shard.
    """
    prefix, merge, before = revision_prefix(plan.revision), Merge(plan), plan.before
    entries = {entry.path: entry for entry in before.files if "/c/" in entry.path} if before else {}
    statistics = list[LatentStatistics]()
    for task in plan.layout.tasks():
        if (commit := read_commit(root, plan, *task)) is None:
            path = commit_path(plan.revision, *task)
            raise DamageError(
                f"store '{root}': '{path}' changed while the store was sealed. Run the same command again."
            )
        merge.add(task, commit, read_results(root, plan, commit))
        if commit.statistics and LATENTS in plan.layout.parts[task[0]].groups:
            statistics.append(commit.statistics)
        entries |= {entry.path: entry for entry in commit.files[:-1]}
    counts = Counter[tuple[str, str | None]]()  # of records, by status and bucket

    def counted(groups: Iterable[pa.Table]) -> Iterator[pa.Table]:
        for group in groups:
            _check_statuses(root, plan, group)
            for one in group.group_by(["status", "bucket"]).aggregate([([], "count_all")]).to_pylist():
                counts[one["status"], one["bucket"]] += one["count_all"]
            yield group

    files: Files = {
        RECORDS: parquet_of_groups(records_schema(plan.spec), counted(merge.records())),
        CAPTIONS: parquet_of_groups(captions_schema(plan.spec), merge.captions()),
    }
    numbers = build_index(
        plan.spec,
        plan.layout.arrays,
        plan.records.num_rows,
        plan.captions.num_rows,
        lambda name, columns: batches_of_parquet(files[name], columns),
    )
    files |= index_files(numbers)
    stored = {str(bucket): count for (status, bucket), count in counts.items() if status == "stored"}
    of_latents = statistics_of_stored(
        root,
        plan,
        stored=rows_of_records(stored, numbers["rows"], numbers["records"], numbers["checksum"]),
        written=rows_written(plan, merge.latent_results),
        parts=statistics,
        files=entries,
    )
    entries |= {prefix + name: file_entry(prefix + name, content) for name, content in files.items()}
    files[SOURCES] = parquet_file(plan.records.select(sources_schema(plan.spec).names))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        revision=plan.revision,
        base=plan.base,
        copies=plan.copies,
        fingerprint=plan.spec.fingerprint,
        spec=shared_spec(plan.spec),
        num_planned=plan.records.num_rows,
        num_stored=sum(stored.values()),
        num_rejected=counts.total() - sum(stored.values()),
        buckets={**dict.fromkeys(plan.new_rows, 0), **stored},
        num_captions=plan.captions.num_rows,
        num_caption_tokens=pc.sum(pc.cast(plan.captions["num_tokens"], pa.int64())).as_py() or 0,
        arrays=[plan.layout.arrays[path] for path in sorted(plan.layout.arrays)],
        files=[entries[path] for path in sorted(entries)],
        root_hash="",
        self_check=plan.self_check or (before and before.self_check),
        quality=[*(before.quality if before else []), *plan.quality],
        statistics=of_latents,
    )
    manifest = manifest.with_hash()
    local = local_file(
        plan.spec,
        listing=plan.listing,
        plan=plan.hash,
        planned_at=(root / prefix / PLAN / PLAN_FILE).stat().st_mtime,
        sources=file_entry(prefix + SOURCES, files[SOURCES]),
    )
    return files | {
        LOCAL: canonical_json(local.model_dump()),
        MANIFEST: canonical_json(manifest.model_dump()),
    }, manifest


def index_files(numbers: Mapping[str, np.ndarray]) -> Files:
    """Content of the files of a revision's index, by name within its folder, from its arrays (``build_index``)."""
    return {f"{INDEX}/{name}.bin": one.view(np.uint8).data if one.size else b"" for name, one in numbers.items()}


def write_index(root: Path, manifest: Manifest) -> None:
    """Write the index of a sealed revision again, from its tables, which are intact."""
    prefix = revision_prefix(manifest.revision)
    numbers = build_index(
        manifest.spec,
        manifest.layouts(),
        manifest.num_planned,
        manifest.num_captions,
        lambda name, columns: read_batches(root / (prefix + name), columns),
    )
    for name, content in index_files(numbers).items():
        write_unless_same(root / (prefix + name), content)


def write_seal(root: Path, files: Files, manifest: Manifest) -> None:
    """Write the files of a revision, each twice, and the ``zarr.json`` of all arrays; the manifest comes last.

    Its own second copy follows it, so that no manifest exists before all that it names.
    """
    prefix = revision_prefix(manifest.revision)
    for name in [name for name in files if name != MANIFEST]:
        write_unless_same(root / f"{prefix}{name}", files[name])
        if not name.startswith(f"{INDEX}/"):  # it follows from the tables
            write_unless_same(root / f"{prefix}{TWIN}/{name}", files[name])
    write_zarr_files(root, manifest)
    for name in (MANIFEST, f"{TWIN}/{MANIFEST}"):
        write_unless_same(root / f"{prefix}{name}", files[MANIFEST])


def write_zarr_files(root: Path, manifest: Manifest) -> None:
    """Write every ``zarr.json`` that follows from a manifest, unless it is there."""
    for path, content in zarr_files(manifest.spec, manifest.layouts().values()).items():
        write_unless_same(root / path, content)


def finish_seal(root: Path, manifest: Manifest) -> None:
    """Complete what a crash behind the manifest left undone: its second copy, and work that nothing reads any more."""
    prefix = revision_prefix(manifest.revision)
    if (root / f"{prefix}{TWIN}").is_dir():  # not of a store that was published, which has no second copies
        write_unless_same(root / f"{prefix}{TWIN}/{MANIFEST}", canonical_json(manifest.model_dump()))
    for name in (COMMITS, PLAN, JOURNAL):
        remove(root / (prefix + name))


def write_unless_same(file: Path, content: bytes | memoryview) -> None:
    """Write a file unless it already has these bytes."""
    has_size = file.is_file() and file.stat().st_size == len(content)
    if not has_size or xxh3_file(file) != xxh3_parts([content])[1]:
        write_atomic(file, [content])


def _check_statuses(root: Path, plan: FrozenPlan, group: pa.Table) -> None:
    """Raise DamageError at a record that is neither stored nor rejected."""
    left = group.filter(pc.invert(pc.is_in(group["status"], STATUSES)))
    for one in left.slice(0, 1).to_pylist():
        where = f"revision {plan.revision}, bucket {one['bucket']}, row {one['row']} (record '{one['key']}')"
        raise DamageError(
            f"store '{root}': {where} is '{one['status']}', and in no shard of the plan; each must be stored or "
            "rejected. The plan cannot be completed: precompute into another --store."
        )
