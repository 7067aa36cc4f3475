"""Copy what a grown store still uses into one new revision, then remove the earlier ones. Nothing is encoded.

Growing never rewrites a shard, so what was changed or dropped stays on disk until it is compacted. The copy is planned,
committed and sealed like any revision, so it can be killed at any time; the old revisions go only when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from .commits import carried_files
from .errors import DamageError, ResourceError, StoreError
from .files import remove
from .frozen import FrozenPlan, freeze_plan, planned_revisions, read_plan
from .layout import (
    CAPTION_PART,
    CAPTIONS,
    MANIFEST,
    NULL_PART,
    PLAN,
    RECORDS,
    bucket_part,
    revision_prefix,
)
from .revisions import sealed_revisions
from .schema import CAPTION_RESULTS, CAPTIONS_SCHEMA, Fallback, Manifest
from .store import LatentStore
from .strays import sweep_strays
from .writer import StoreWriter, row_checksum

OF_FIRST_REVISION = (PLAN, RECORDS, CAPTIONS, "buckets", "captions", "commits")  # in the order of their removal


@dataclass(frozen=True)
class Compaction:
    """What a compaction did.

    Args:
      manifest: of the newest revision.
      removed: revisions that are gone now.
      freed_bytes: that the store is smaller.
    """

    manifest: Manifest
    removed: list[int]
    freed_bytes: int


def compact(root: Path, *, progress: Callable[[str, int, int], None]) -> Compaction:
    """Compact a store; the same call again goes on where it was stopped.

    Raises: StoreError: a revision is unfinished; DamageError: a row is not what was written, so nothing is removed.
    """
    sweep_strays(root)
    before = _size(root)
    store = LatentStore(root)
    newest = planned_revisions(root)[-1:]
    unfinished = newest and newest[0] > store.revision
    plan = read_plan(root, newest[0]) if unfinished else None
    if plan and not plan.copies:
        raise StoreError(
            f"store '{root}': revision {plan.revision} is unfinished. Run the same precompute command again, then this."
        )
    assert store.manifest is not None
    if plan is None and store.manifest.stack == [store.revision]:  # it uses nothing of the earlier ones
        removed = _remove_before(root, store.revision)
        return Compaction(store.manifest, removed, before - _size(root))
    plan = plan or freeze_plan(root, plan_compaction(store))
    if not plan.copies:  # a precompute has planned it meanwhile
        raise StoreError(
            f"store '{root}': revision {plan.revision} is being precomputed. Let that come to its end, then run this."
        )
    manifest = _copy(StoreWriter(root, plan), store, progress)
    removed = _remove_before(root, plan.revision)
    return Compaction(manifest, removed, before - _size(root))


def plan_compaction(store: LatentStore) -> FrozenPlan:
    """Plan one revision that holds all stored records of the newest one, rows without holes, captions that are used."""
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
        here = np.flatnonzero(stored & (buckets == bucket))
        rows[here] = np.arange(len(here))
    ids = [[new_id[caption] for caption in ids or ()] for ids in store.records["caption_ids"].to_pylist()]
    nothing = pa.nulls(count, pa.uint64())
    columns = {
        "revision": [revision] * count,
        "row": rows,
        "caption_ids": ids,
        "status": np.where(stored, "planned", "rejected"),
        # What was rejected while encoding has its reason in the sealed table only.
        **{name: store.records[name] for name in ("stage", "reason", "detail")},
        "checksum": nothing,
        "source_checksum": nothing,
        "fallback": pa.nulls(count, pa.string()),
    }
    return FrozenPlan(
        spec=store.spec,
        revision=revision,
        base=manifest.root_hash,
        stack=(),
        carried=carried_files(manifest, ()),
        copies=True,
        listing=base.listing,
        records=_replace(base.records, columns),
        captions=captions.cast(CAPTIONS_SCHEMA),
    )


def used_captions(store: LatentStore) -> list[int]:
    """Ids of the captions that a record still has, in the order of the compacted store: by length."""
    used = {caption for ids in store.records["caption_ids"].to_pylist() for caption in ids or ()}
    lengths = store.captions["num_tokens"].to_numpy()
    return sorted(used, key=lambda caption: (lengths[caption], caption))


def _replace(table: pa.Table, columns: dict) -> pa.Table:
    return pa.table({name: columns.get(name, table[name]) for name in table.column_names}, schema=table.schema)


def _copy(writer: StoreWriter, store: LatentStore, progress: Callable[[str, int, int], None]) -> Manifest:
    """Copy all missing shards, checking every row, and seal."""
    missing = writer.missing_tasks()
    needed = sum(
        len(array.rows_of(shard)) * array.row_bytes
        for part, shard in missing
        for array in writer.plan.layout.part_arrays(part)
    )
    free = shutil.disk_usage(writer.root).free
    if needed > free:
        raise ResourceError(
            f"store '{writer.root}': compacting needs {needed / 2**30:.1f} GiB beside the old revisions, the disk has "
            f"{free / 2**30:.1f} GiB free. Free some space, or move the store."
        )
    row_of = np.full(store.records.num_rows, -1, np.int64)  # of each record, in the stacked arrays of its bucket
    for bucket in store.buckets:
        row_of[store.index(bucket).records] = store.index(bucket).rows
    caption_of = np.array(used_captions(store), np.int64)
    for done, (part, shard) in enumerate(missing, 1):
        if part == NULL_PART:
            paths = [array.path for array in writer.plan.layout.part_arrays(part)]
            parts = store.tokens.stored_null.parts
            writer.commit(part, shard, dict(zip(paths, parts, strict=True)), checksums=[row_checksum(*parts)])
        elif part == CAPTION_PART:
            _copy_captions(writer, store, shard, caption_of)
        else:
            _copy_latents(writer, store, part.removeprefix("buckets/"), shard, row_of)
        progress("compact", done, len(missing))
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
    found = [row_checksum(*(array[i] for array in arrays.values())) for i in range(len(rows))]
    _check(store, table["key"].to_pylist(), checksums, found)
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
    found = []
    for caption in captions:
        parts = store.tokens.stored(int(caption_of[caption])).parts
        start = int(plan.layout.offsets[caption]) - rows.start
        for array, part in zip(filled.values(), parts, strict=True):
            array[start : start + len(part)] = part
        found.append(row_checksum(*parts))
    _check(store, texts, [f"{checksum:016x}" for checksum in before["checksum"].to_pylist()], found)
    qualities = list(zip(before["min_cosine"].to_pylist(), before["max_error"].to_pylist(), strict=True))
    narrowed = before["min_cosine"].null_count == 0
    writer.commit(CAPTION_PART, shard, filled, checksums=found, qualities=qualities if narrowed else ())


def _check(store: LatentStore, names: list[str], wanted: list[str], found: list[str]) -> None:
    for name, before, now in zip(names, wanted, found, strict=True):
        if before != now:
            raise DamageError(
                f"store '{store.path}': '{name}' is not what was written, so it is not copied. Nothing was removed. "
                "Run 'leandit verify --repair --source PATH', then compact again."
            )


def _remove_before(root: Path, newest: int) -> list[int]:
    """Remove all revisions before one.

    The manifest goes first, so that none is opened half removed, then the plan, so that none is resumed or mended.
    """
    gone = [revision for revision in sealed_revisions(root) if revision < newest]
    for revision in gone:
        remove(root / revision_prefix(revision) / MANIFEST)
    for revision in range(1, newest):
        if revision > 1:
            remove(root / revision_prefix(revision))
            continue
        for name in OF_FIRST_REVISION:
            remove(root / name)
    return gone


def _size(root: Path) -> int:
    """Bytes below a folder; a file that goes meanwhile, as the lease of another, counts nothing."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
