"""Copy what a grown store still uses into a new store of one revision; nothing is encoded, the old store is only read.

Growing never rewrites a shard, so what was changed or dropped stays on disk. The new store is planned, committed and
sealed like any revision, in a temporary folder that gets its name when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..disk.files import move, temporary_folder, write_atomic
from ..disk.strays import sweep_strays
from ..errors import DamageError, LeanditError, ResourceError, StoreError
from ..format.encoder_paths import with_moved_encoder_paths
from ..format.layout import CAPTION_PART, GROUP, NULL_PART, bucket_part, group_json
from ..format.schema import Fallback, Manifest
from ..format.table_schemas import CAPTION_RESULTS, CAPTIONS_SCHEMA
from ..revisions.catalog import sealed_revisions
from ..revisions.commits import file_entry, read_manifest
from ..revisions.plan import FrozenPlan, planned_revisions, read_plan, write_plan
from ..revisions.writer import StoreWriter, row_checksum
from ..store import LatentStore


def compact(root: Path, out: Path, *, progress: Callable[[str, int, int], None]) -> Manifest:
    """Write what a store still uses as a new store, checking every row; the same call again finds it there.

    Args:
      out: folder of the new store, which gets this name when it is complete.
    Returns: manifest of the new store.
    Raises: StoreError: a revision is unfinished, or something else is at ``out``; DamageError: a row is not what was
      written; ResourceError: the disk is too small. Then nothing is at ``out``.
    """
    store = LatentStore(root)
    assert store.manifest is not None
    newest = max(planned_revisions(root), default=0)
    if newest > store.revision and not read_plan(root, newest).copies:  # else an older version was compacting in place
        raise StoreError(
            f"store '{root}': revision {newest} is unfinished. Run the same precompute command again, then this."
        )
    if out.resolve().is_relative_to(root.resolve()):
        raise StoreError(f"store '{out}': it would lie in store '{root}'. Give an --out elsewhere.")
    if os.path.lexists(out):
        return _made_before(store.manifest, out)
    sweep_strays(out.absolute().parent, below=False)
    with temporary_folder(out) as temporary:
        plan = plan_compaction(store, out)
        write_atomic(temporary / GROUP, group_json(plan.spec))
        write_plan(temporary, plan, replace=False)
        manifest = _copy(StoreWriter(temporary, plan), store, progress)
        move(temporary, out)
    return manifest


def _made_before(base: Manifest, out: Path) -> Manifest:
    """Manifest of an existing store, which must be the compaction of ``base``. Raises: StoreError."""
    try:
        manifest = read_manifest(out, sealed_revisions(out)[-1])
    except (LeanditError, OSError, IndexError):
        manifest = None
    if manifest is None or not manifest.copies or manifest.base != base.root_hash:
        raise StoreError(f"store '{out}': it already exists, and was not changed. Give another --out.")
    return manifest


def plan_compaction(store: LatentStore, out: Path) -> FrozenPlan:
    """Plan one revision that holds all stored records of the newest one, rows without holes, captions that are used.

    It has the next number, so that a run on the old store can move to it.
    """
    base, manifest = read_plan(store.path, store.revision), store.manifest
    assert manifest is not None
    revision, count = store.revision + 1, store.records.num_rows
    order = used_captions(store)
    new_id = {old: new for new, old in enumerate(order)}
    captions = store.captions.take(pa.array(order, pa.int64()))
    undone = dict.fromkeys(CAPTION_RESULTS, [None] * len(order))
    captions = _replace(captions, {"revision": [revision] * len(order), **undone})

    stored = np.array([status == "stored" for status in store.records["status"].to_pylist()])
    buckets = np.array(store.records["bucket"].to_pylist(), object)
    rows = np.full(count, -1, np.int64)
    for bucket in store.buckets:
        positions = np.flatnonzero(stored & (buckets == bucket))
        rows[positions] = np.arange(len(positions))
    caption_ids = [[new_id[caption] for caption in ids or ()] for ids in store.records["caption_ids"].to_pylist()]
    unknown = pa.nulls(count, pa.uint64())
    columns = {
        "revision": [revision] * count,
        "row": rows,
        "caption_ids": caption_ids,
        "status": np.where(stored, "planned", "rejected"),
        # Only the sealed table has the reasons of records that were rejected while encoding.
        **{name: store.records[name] for name in ("stage", "reason", "detail")},
        "checksum": unknown,
        "source_checksum": unknown,
        "fallback": pa.nulls(count, pa.string()),
    }
    spec = with_moved_encoder_paths(store.spec, store.path, out)
    return FrozenPlan(
        spec=spec,
        revision=revision,
        base=manifest.root_hash,
        stack=(),
        carried=(file_entry(GROUP, group_json(spec)),),
        copies=True,
        listing=base.listing,
        records=_replace(base.records, columns),
        captions=captions.cast(CAPTIONS_SCHEMA),
        self_check=manifest.self_check,
    )


def used_captions(store: LatentStore) -> list[int]:
    """Ids of the captions that a record still has, in the order of the compacted store: by length."""
    used = {caption for ids in store.records["caption_ids"].to_pylist() for caption in ids or ()}
    lengths = store.captions["num_tokens"].to_numpy()
    return sorted(used, key=lambda caption: (lengths[caption], caption))


def _replace(table: pa.Table, columns: dict) -> pa.Table:
    return pa.table({name: columns.get(name, table[name]) for name in table.column_names}, schema=table.schema)


def _copy(writer: StoreWriter, store: LatentStore, progress: Callable[[str, int, int], None]) -> Manifest:
    """Copy all shards, checking every row, and seal."""
    tasks = writer.plan.layout.tasks()
    needed = writer.plan.layout.num_bytes(tasks)
    free = shutil.disk_usage(writer.root).free
    if needed > free:
        raise ResourceError(
            f"store '{store.path}': its compaction needs {needed / 2**30:.1f} GiB, the disk of --out has "
            f"{free / 2**30:.1f} GiB free. Free some space, or give an --out on another disk."
        )
    row_of = np.full(store.records.num_rows, -1, np.int64)  # of each record, in the stacked arrays of its bucket
    for bucket in store.buckets:
        row_of[store.index(bucket).records] = store.index(bucket).rows
    caption_of = np.array(used_captions(store), np.int64)
    for done, (part, shard) in enumerate(tasks, 1):
        if part == NULL_PART:
            paths = [array.path for array in writer.plan.layout.part_arrays(part)]
            parts = store.tokens.stored_null.parts
            writer.commit(part, shard, dict(zip(paths, parts, strict=True)), checksums=[row_checksum(*parts)])
        elif part == CAPTION_PART:
            _copy_captions(writer, store, shard, caption_of)
        else:
            _copy_latents(writer, store, part.removeprefix("buckets/"), shard, row_of)
        progress("compact", done, len(tasks))
    return writer.seal()


def _copy_latents(writer: StoreWriter, store: LatentStore, bucket: str, shard: int, row_of: np.ndarray) -> None:
    layout = writer.plan.layout
    rows = layout.rows_of(bucket_part(bucket), shard)
    positions = writer.plan.bucket_positions[bucket][rows.start : rows.stop]
    sources = [store.latents(bucket)] + ([store.flipped_latents(bucket)] if store.spec.latent.flip else [])
    arrays = {
        array.path: source.take(row_of[positions])
        for array, source in zip(layout.part_arrays(bucket_part(bucket)), sources, strict=True)
    }
    table = store.records.take(pa.array(positions))
    checksums = [f"{checksum:016x}" for checksum in table["checksum"].to_pylist()]
    copied = [row_checksum(*(array[i] for array in arrays.values())) for i in range(len(rows))]
    _check(store, table["key"].to_pylist(), checksums, copied)
    source_checksums = [f"{checksum:016x}" for checksum in table["source_checksum"].to_pylist()]
    fallbacks = [
        Fallback(row=row, how=how) for row, how in zip(rows, table["fallback"].to_pylist(), strict=True) if how
    ]
    writer.commit(
        bucket_part(bucket), shard, arrays, checksums=checksums, source_checksums=source_checksums, fallbacks=fallbacks
    )


def _copy_captions(writer: StoreWriter, store: LatentStore, shard: int, caption_of: np.ndarray) -> None:
    plan = writer.plan
    arrays = plan.layout.part_arrays(CAPTION_PART)
    rows, captions = arrays[0].rows_of(shard), plan.layout.captions_of(shard)
    texts = plan.own_captions["text"].slice(captions.start, len(captions)).to_pylist()
    filled = {array.path: np.full((len(rows), *array.shape[1:]), array.fill_value, array.dtype) for array in arrays}
    before = store.captions.take(pa.array(caption_of[captions.start : captions.stop]))
    checksums = []
    for caption in captions:
        parts = store.tokens.stored(int(caption_of[caption])).parts
        start = int(plan.layout.offsets[caption]) - rows.start
        for array, part in zip(filled.values(), parts, strict=True):
            array[start : start + len(part)] = part
        checksums.append(row_checksum(*parts))
    _check(store, texts, [f"{checksum:016x}" for checksum in before["checksum"].to_pylist()], checksums)
    qualities = list(zip(before["min_cosine"].to_pylist(), before["max_error"].to_pylist(), strict=True))
    narrowed = before["min_cosine"].null_count == 0
    writer.commit(CAPTION_PART, shard, filled, checksums=checksums, qualities=qualities if narrowed else ())


def _check(store: LatentStore, names: list[str], stored: list[str], copied: list[str]) -> None:
    for name, before, now in zip(names, stored, copied, strict=True):
        if before != now:
            raise DamageError(
                f"store '{store.path}': '{name}' is not what was written, so there is no new store. "
                "Run 'leandit verify --repair --source PATH', then compact again."
            )
