"""Copy what a grown store still uses into a new store of one revision; nothing is encoded, the old store is only read.

Growing never rewrites a shard, so what was changed or dropped stays on disk. The new store is planned, committed and
sealed like any revision, in a temporary folder that gets its name when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..disk.files import move, temporary_folder
from ..disk.strays import sweep_strays
from ..errors import DamageError, LeanditError, RecipeError, ResourceError, StoreError
from ..format.layout import Part
from ..format.schema import Fallback, Manifest, StoreSpec
from ..format.table_schemas import (
    CAPTION_RESULTS,
    CAPTION_START,
    PLAN_SCHEMA,
    STORED,
    captions_schema,
    place_columns,
    plan_schema,
    suffixes,
)
from ..revisions.catalog import planned_revisions, read_manifest, sealed_revisions
from ..revisions.commits import new_results
from ..revisions.local import openable, with_stored_encoder_paths
from ..revisions.plan import FrozenPlan, read_plan, write_plan
from ..revisions.writer import StoreWriter, row_checksum
from ..store import LatentStore
from ..units import readable_size

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them


def compact(
    root: Path, out: Path, *, progress: Callable[[str, int, int], None], without: Collection[str] = ()
) -> Manifest:
    """Write what a store still uses as a new store, checking every row; the same call again finds it there.

    Args:
      out: folder of the new store, which gets this name when it is complete.
      without: names of text encoders, features and pictures to leave out.
    Returns: manifest of the new store.
    Raises: StoreError: a revision is unfinished, or something else is at ``out``; DamageError: a row is not what was
      written; ResourceError: the disk is too small; RecipeError: it has no such text encoder, feature or picture.
      Then nothing is at ``out``.
    """
    store = LatentStore(root)
    assert store.manifest is not None
    if unfinished := planned_revisions(root):
        raise StoreError(
            f"store '{root}': revision {unfinished[0]} is unfinished. Run the same precompute command again, then this."
        )
    if out.resolve().is_relative_to(root.resolve()):
        raise StoreError(f"store '{out}': it would lie in store '{root}'. Give an --out elsewhere.")
    spec = spec_without(store.spec, without)
    if os.path.lexists(out):
        return _made_before(store.manifest, spec, out)
    sweep_strays(out.absolute().parent, below=False)
    with temporary_folder(out) as temporary:
        plan = plan_compaction(store, spec, out)
        write_plan(temporary, plan, replace=False)
        manifest = _copy(StoreWriter(temporary, plan), store, progress)
        move(temporary, out)
    return manifest


def spec_without(spec: StoreSpec, names: Collection[str]) -> StoreSpec:
    """The spec of a store without some text encoders, features and pictures.

    Raises: RecipeError: it has none of this name, or it is the first text encoder, which orders the captions.
    """
    known = [*(one.name for one in spec.text_encoders[1:]), *spec.groups]
    if unknown := [name for name in names if name not in known]:
        raise RecipeError(
            f"compact --without '{unknown[0]}': needed a text encoder, but not the first, a feature or a picture of "
            f"the store: {', '.join(known) or 'it has none'}."
        )
    recipe = dict(spec.recipe)
    for key in ("text", "features", "pictures"):
        if key in recipe:
            recipe[key] = {name: value for name, value in recipe[key].items() if name not in names}
    kinds = ("texts", "features", "pictures")
    kept = {kind: [one for one in getattr(spec, kind) if one.name not in names] for kind in kinds}
    recipe = {key: section for key, section in recipe.items() if section or key not in kinds}
    return spec.model_copy(update={**kept, "recipe": recipe}).with_fingerprint() if names else spec


def _made_before(base: Manifest, spec: StoreSpec, out: Path) -> Manifest:
    """Manifest of an existing store, which must be the compaction of ``base``. Raises: StoreError."""
    try:
        manifest = read_manifest(out, sealed_revisions(out)[-1])
    except (LeanditError, OSError, IndexError):
        manifest = None
    is_same = manifest and manifest.copies and manifest.base == base.root_hash
    if manifest is None or not is_same or manifest.fingerprint != spec.fingerprint:
        raise StoreError(f"store '{out}': it already exists, and was not changed. Give another --out.")
    return manifest


def plan_compaction(store: LatentStore, spec: StoreSpec, out: Path) -> FrozenPlan:
    """Plan one revision that holds all stored records of the newest one, rows without holes, captions that are used.

    It has the next number, so that a run on the old store can move to it.

    Args:
      spec: as ``spec_without``.
    """
    base, manifest = read_plan(store.path, store.revision), store.manifest
    assert manifest is not None
    revision, count = store.revision + 1, store.records.num_rows
    spec = with_stored_encoder_paths(openable(spec, store.path), out)
    order = used_captions(store)
    new_id = {old: new for new, old in enumerate(order)}
    captions = store.captions.take(pa.array(order, pa.int64()))
    names = (CAPTION_START, *CAPTION_RESULTS)
    results = [f"{name}{suffix}" for name in names for suffix in suffixes(store.spec).values()]
    undone = dict.fromkeys(results, [None] * len(order))
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
    schema = plan_schema(spec)
    places = {name for columns_of in place_columns(spec) for name in columns_of}  # these stay as planned
    undone_groups = [name for name in schema.names[len(PLAN_SCHEMA) :] if name not in places]
    columns |= {name: pa.nulls(count, schema.field(name).type) for name in undone_groups}
    return FrozenPlan(
        spec=spec,
        revision=revision,
        base=manifest.root_hash,
        copies=True,
        listing=base.listing,
        records=_replace(base.records.select(schema.names), columns),
        captions=captions.select(captions_schema(spec).names).cast(captions_schema(spec)),
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
            f"store '{store.path}': its compaction needs {readable_size(needed)}, the disk of --out has "
            f"{readable_size(free)} free. Free some space, or give an --out on another disk."
        )
    row_of = np.full(store.records.num_rows, -1, np.int64)  # of each record, in the stacked arrays of its bucket
    for bucket in store.buckets:
        row_of[store.index(bucket).records] = store.index(bucket).rows
    caption_of = np.array(used_captions(store), np.int64)
    for done, (part, shard) in enumerate(tasks, 1):
        of_part = writer.plan.layout.parts[part]
        if of_part.captions is None:
            _copy_rows(writer, store, of_part, shard, row_of)
        elif of_part.is_null:
            rows = store.text(of_part.captions.name).stored_null_rows
            paths, results = [array.path for array in of_part.arrays], new_results(of_part, 1)
            results["state"], results["checksum"] = STORED, row_checksum(*rows)
            writer.commit(part, shard, dict(zip(paths, rows, strict=True)), results)
        else:
            _copy_captions(writer, store, of_part, shard, caption_of)
        progress("compact", done, len(tasks))
    return writer.seal()


def _copy_rows(writer: StoreWriter, store: LatentStore, part: Part, shard: int, row_of: np.ndarray) -> None:
    rows = part.arrays[0].rows_of(shard)
    positions = writer.plan.positions_of(part)[rows.start : rows.stop]
    table, results = store.records.take(pa.array(positions)), new_results(part, len(rows))
    keys, arrays = table["key"].to_pylist(), dict[str, np.ndarray]()
    results["state"] = STORED
    for i, (group, layouts) in enumerate(part.groups.items()):
        copied = {one.path: store.array(one.path).take(row_of[positions]) for one in layouts}
        results["checksum"][:, i] = [row_checksum(*rows) for rows in zip(*copied.values(), strict=True)]
        _copy_results(table, f"_{group}" if group else "", results[:, i])
        _check(store, keys, table[f"checksum_{group}" if group else "checksum"], results[:, i])
        arrays |= copied
    how = zip(rows, table["fallback"].to_pylist(), strict=True)
    fallbacks = [Fallback(row=row, how=fallback) for row, fallback in how if fallback]
    writer.commit(part.name, shard, arrays, results, fallbacks=fallbacks)


def _copy_captions(writer: StoreWriter, store: LatentStore, part: Part, shard: int, caption_of: np.ndarray) -> None:
    layout = part.captions
    assert layout is not None, "a part of captions"
    captions, source = layout.captions_of(shard), store.text(layout.name)
    filled = {
        one.path: np.full((len(one.rows_of(shard)), *one.shape[1:]), one.fill_value, one.dtype) for one in part.arrays
    }
    before = store.captions.take(pa.array(caption_of[captions.start : captions.stop]))
    results, suffix = new_results(part, len(captions)), suffixes(store.spec)[layout.name]
    results["state"] = STORED
    for i, caption in enumerate(captions):
        rows = source.stored_rows(int(caption_of[caption]))
        for array, row, start in zip(part.arrays, rows, layout.starts_of(caption), strict=True):
            first = start - array.rows_of(shard).start
            filled[array.path][first : first + len(row)] = row
        results["checksum"][i] = row_checksum(*rows)
    _copy_results(before, suffix, results[:, 0])
    _check(store, before["text"].to_pylist(), before[f"checksum{suffix}"], results[:, 0])
    writer.commit(part.name, shard, filled, results)


def _copy_results(table: pa.Table, suffix: str, results: np.ndarray) -> None:
    """Copy what a table has of its rows beside their checksums."""
    for name, absent in (("source_checksum", 0), ("min_cosine", np.nan), ("max_error", np.nan)):
        if f"{name}{suffix}" in table.column_names:
            results[name] = pc.fill_null(table[f"{name}{suffix}"], absent).to_numpy()


def _check(store: LatentStore, names: list[str], stored: pa.ChunkedArray, copied: np.ndarray) -> None:
    for name, before, now in zip(names, stored.to_pylist(), copied["checksum"].tolist(), strict=True):
        if before != now:
            raise DamageError(
                f"store '{store.path}': '{name}' is not what was written, so there is no new store. "
                "Run 'leandit verify --repair --source PATH', then compact again."
            )
