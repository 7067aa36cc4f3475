"""Copy what a grown store still uses into a new store of one revision; nothing is encoded, the old store is only read.

Growing never rewrites a shard, so what was changed or dropped stays on disk. The new store is planned, committed and
sealed like any revision, in a temporary folder that gets its name when it is complete.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...datasets.disk.files import move, temporary_folder
from ...datasets.disk.strays import sweep_beside
from ...datasets.format.layout import CaptionLayout, Part
from ...datasets.format.row_layout import FEATURES, caption_folder
from ...datasets.format.schema import Fallback, Manifest, Reject, StoreSpec
from ...datasets.format.table_schemas import (
    CAPTION_RESULTS,
    CAPTION_START,
    PLAN_SCHEMA,
    REJECTED,
    STORED,
    captions_schema,
    place_columns,
    plan_schema,
    suffixes,
)
from ...datasets.format.zarr_shard import ArrayLayout
from ...datasets.revisions.catalog import planned_revisions, read_manifest, sealed_revisions
from ...datasets.revisions.commits import new_results, reject_of_caption
from ...datasets.revisions.local import openable, with_stored_encoder_paths
from ...datasets.revisions.plan import FrozenPlan, freeze_plan, read_plan
from ...datasets.revisions.writer import StoreWriter, row_checksum
from ...datasets.store import LatentStore
from ...errors import DamageError, LeanditError, RecipeError, ResourceError, StoreError
from ...units import readable_size

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them
Columns = dict[str, pa.Array | pa.ChunkedArray]


def compact(
    root: Path, out: Path, *, progress: Callable[[str, int, int], None], without: Collection[str] = ()
) -> Manifest:
    """Write what a store still uses as a new store, checking every row; the same call again finds it there.

    Args:
      out: folder of the new store, which gets this name when it is complete.
      without: names of text encoders, features and companions to leave out.
    Returns: manifest of the new store.
    Raises: StoreError: a revision is unfinished, or something else is at ``out``; DamageError: a row is not what was
      written; ResourceError: the disk is too small; RecipeError: it has no such text encoder, feature or companion.
      Then nothing is at ``out``.
    """
    store = LatentStore(root)
    assert store.manifest is not None
    if unfinished := planned_revisions(root):
        raise StoreError(
            f"store '{root}': revision {unfinished[0]} is unfinished. Run its precompute command again, then this one."
        )
    if out.resolve().is_relative_to(root.resolve()):
        raise StoreError(f"store '{out}': it would lie inside store '{root}'. Pass an --out elsewhere.")
    spec = spec_without(store.spec, without)
    if os.path.lexists(out):
        return _made_before(store.manifest, spec, out)
    sweep_beside(out.absolute())
    with temporary_folder(out) as temporary:
        base = read_plan(root, store.revision)
        plan = plan_compaction(store, base, spec, out)
        freeze_plan(temporary, plan)
        manifest = _Copy(StoreWriter(temporary, plan), store, base).run(progress)
        move(temporary, out)
    return manifest


def spec_without(spec: StoreSpec, names: Collection[str]) -> StoreSpec:
    """The spec of a store without some text encoders, features and companions.

    Raises: RecipeError: it has none of this name, or it is the first text encoder, which orders the captions.
    """
    known = [*(one.name for one in spec.text_encoders[1:]), *spec.groups]
    if unknown := [name for name in names if name not in known]:
        raise RecipeError(
            f"compact --without '{unknown[0]}': expected a feature, a companion or a text encoder other than the first "
            f"of the store: {', '.join(known) or 'it has none'}."
        )
    recipe = dict(spec.recipe)
    for key in ("text", "features", "companions"):
        if key in recipe:
            recipe[key] = {name: value for name, value in recipe[key].items() if name not in names}
    kinds = ("texts", "features", "companions")
    kept = {kind: [one for one in getattr(spec, kind) if one.name not in names] for kind in kinds}
    recipe = {key: section for key, section in recipe.items() if section or key not in (*kinds, "companions")}
    return spec.model_copy(update={**kept, "recipe": recipe}).with_fingerprint() if names else spec


def _made_before(base: Manifest, spec: StoreSpec, out: Path) -> Manifest:
    """Manifest of an existing store, which must be the compaction of ``base``. Raises: StoreError."""
    try:
        manifest = read_manifest(out, sealed_revisions(out)[-1])
    except ResourceError:
        raise
    except (LeanditError, OSError, IndexError):
        manifest = None
    is_same = manifest and manifest.copies and manifest.base == base.root_hash
    if manifest is None or not is_same or manifest.fingerprint != spec.fingerprint:
        raise StoreError(f"store '{out}': it already exists, and was not changed. Use another --out.")
    return manifest


def plan_compaction(store: LatentStore, base: FrozenPlan, spec: StoreSpec, out: Path) -> FrozenPlan:
    """Plan one revision that holds all stored records of the newest one, rows without holes, captions that are used.

    It has the next number: growing goes on from there, and no number stands for two contents.

    Args:
      base: plan of the newest revision, with the results of encoding.
      spec: as ``spec_without``.
    """
    manifest = store.manifest
    assert manifest is not None
    revision, count = store.revision + 1, base.records.num_rows
    spec = with_stored_encoder_paths(openable(spec, store.path), out)

    used = used_captions(base)
    of_captions: Columns = {"revision": pa.array(np.full(len(used), revision, np.int32))}
    results = [
        f"{name}{suffix}" for name in (CAPTION_START, *CAPTION_RESULTS) for suffix in suffixes(store.spec).values()
    ]
    captions = base.captions.take(pa.array(used, pa.int64()))
    captions = _replace(captions, of_captions | _nulls(captions.schema, results, len(used)))

    rows = np.full(count, -1, np.int64)
    for bucket in store.buckets:
        positions = np.sort(store.index(bucket).records)
        rows[positions] = np.arange(len(positions))
    new_ids = np.full(base.captions.num_rows, -1, np.int32)
    new_ids[used] = np.arange(len(used))

    def renumbered(lists: pa.Array) -> pa.Array:
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(new_ids[lists.flatten().to_numpy()]))

    remaining = {
        "latents",
        *(caption_folder(encoder.name) for encoder in spec.text_encoders),
        *(f"{FEATURES}/{feature.name}" for feature in spec.features),
    }
    schema = plan_schema(spec)
    is_stored = pa.array((rows >= 0).astype(np.int8))
    columns: Columns = {
        "revision": pa.array(np.full(count, revision, np.int32)),
        "row": pa.array(rows),
        "caption_ids": pa.chunked_array(map(renumbered, base.records["caption_ids"].chunks), pa.list_(pa.int32())),
        "status": pa.array(["rejected", "planned"]).take(is_stored),
    }
    places = {name for names in place_columns(spec) for name in names}  # these stay as planned
    undone = [name for name in schema.names[len(PLAN_SCHEMA) :] if name not in places]
    return FrozenPlan(
        spec=spec,
        revision=revision,
        base=manifest.root_hash,
        copies=True,
        listing=base.listing,
        records=_replace(
            base.records.select(schema.names),
            columns | _nulls(schema, ["checksum", "source_checksum", "fallback", *undone], count),
        ),
        captions=captions.select(captions_schema(spec).names).cast(captions_schema(spec)),
        self_check=manifest.self_check,
        quality=[quality for quality in manifest.quality if quality.group in remaining],
    )


def used_captions(base: FrozenPlan) -> np.ndarray:
    """(N,) ids of the captions that a record still has, and of sample captions, in the order of the compacted store: by
    length."""
    used = pc.unique(pc.list_flatten(base.records["caption_ids"])).to_numpy().astype(np.int64)
    samples = pa.array(base.spec.sample_captions, pa.string())
    used = np.union1d(used, np.flatnonzero(pc.is_in(base.captions["text"], samples).to_numpy()))
    lengths = base.captions["num_tokens"].to_numpy()
    return used[np.lexsort((used, lengths[used]))]


def _nulls(schema: pa.Schema, names: Collection[str], count: int) -> Columns:
    return {name: pa.nulls(count, schema.field(name).type) for name in names}


def _replace(table: pa.Table, columns: Columns) -> pa.Table:
    return pa.table({name: columns.get(name, table[name]) for name in table.column_names}, schema=table.schema)


class _Copy:
    """Copies the shards of a compaction, checking every row.

    Args:
      base: plan of the revision that is copied, with the results of encoding.
    """

    def __init__(self, writer: StoreWriter, store: LatentStore, base: FrozenPlan) -> None:
        self._writer, self._store, self._base, self._captions = writer, store, base, used_captions(base)
        self._rows = np.full(base.records.num_rows, -1, np.int64)  # of each record, in the arrays of its bucket
        for bucket in store.buckets:
            self._rows[store.index(bucket).records] = store.index(bucket).rows

    def run(self, progress: Callable[[str, int, int], None]) -> Manifest:
        """Copy all shards, and seal."""
        layout = self._writer.plan.layout
        tasks = layout.tasks()
        expected, free = layout.num_bytes(tasks), shutil.disk_usage(self._writer.root).free
        if expected > free:
            raise ResourceError(
                f"store '{self._store.path}': its compaction needs {readable_size(expected)}, the disk of --out has "
                f"{readable_size(free)} free. Free some space, or pass an --out on another disk."
            )
        for done, (name, shard) in enumerate(tasks, 1):
            part = layout.parts[name]
            if part.is_null:
                self._copy_null(part)
            elif part.captions:
                self._copy_captions(part, part.captions, shard)
            else:
                self._copy_rows(part, shard)
            progress("compact", done, len(tasks))
        return self._writer.seal()

    def _copy_null(self, part: Part) -> None:
        assert part.captions is not None, "a part of captions"
        rows = self._store.text(part.captions.name).stored_null_rows
        results = new_results(part, 1)
        results["state"], results["checksum"] = STORED, row_checksum(*rows)
        arrays = dict(zip([array.path for array in part.arrays], rows, strict=True))
        self._writer.commit(part.name, 0, arrays, results)

    def _copy_rows(self, part: Part, shard: int) -> None:
        rows = part.arrays[0].rows_of(shard)
        positions = self._writer.plan.positions_of(part)[rows.start : rows.stop]
        table, results = self._base.records.take(pa.array(positions)), new_results(part, len(rows))
        arrays = dict[str, np.ndarray]()
        for i, (group, layouts) in enumerate(part.groups.items()):
            copied = {one.path: self._store.array(one.path).take(self._rows[positions]) for one in layouts}
            results["checksum"][:, i] = [row_checksum(*parts) for parts in zip(*copied.values(), strict=True)]
            shards = functools.partial(self._shards_of_row, positions, layouts)
            self._finish(results[:, i], table, "key", f"_{group}" if group else "", shards)
            arrays |= copied
        how = zip(rows, table["fallback"].to_pylist(), strict=True)
        fallbacks = [Fallback(row=row, how=fallback) for row, fallback in how if fallback]
        self._writer.commit(part.name, shard, arrays, results, fallbacks=fallbacks)

    def _copy_captions(self, part: Part, layout: CaptionLayout, shard: int) -> None:
        captions, source = layout.captions_of(shard), self._store.text(layout.name)
        arrays = {
            one.path: np.full((len(one.rows_of(shard)), *one.shape[1:]), one.fill_value, one.dtype)
            for one in part.arrays
        }
        before = self._captions[captions.start : captions.stop]
        results = new_results(part, len(captions))
        for i, caption in enumerate(captions):
            rows = source.stored_rows(int(before[i]))
            for array, values, start in zip(part.arrays, rows, layout.starts_of(caption), strict=True):
                first = start - array.rows_of(shard).start
                arrays[array.path][first : first + len(values)] = values
            results["checksum"][i] = row_checksum(*rows)
        table = self._base.captions.take(pa.array(before))
        suffix, rejects = suffixes(self._store.spec)[layout.name], list[Reject]()
        is_lost = table[f"checksum{suffix}"].is_null().to_numpy()
        results["checksum"][is_lost] = 0
        self._finish(results[:, 0], table, "text", suffix, lambda i: source.shard_paths(int(before[i])))
        results["state"][is_lost] = REJECTED
        class_name = self._store.spec.text_encoder_of(layout.name).encoder.class_name
        for i in np.flatnonzero(is_lost).tolist():
            text = table["text"][i].as_py()
            reject = reject_of_caption(text, class_name, table[f"min_cosine{suffix}"][i].as_py())
            rejects.append(
                Reject(row=captions[i], key=text, stage=reject.stage, reason=reject.reason, detail=reject.detail)
            )
        self._writer.commit(part.name, shard, arrays, results, rejects=rejects)

    def _shards_of_row(self, positions: np.ndarray, layouts: Sequence[ArrayLayout], index: int) -> list[str]:
        """Paths of the shards that hold the row of one of some records, in the store that is copied."""
        rows = self._rows[positions[index : index + 1]]
        return [path for layout in layouts for path in self._store.array(layout.path).shard_paths(rows)]

    def _finish(
        self, results: np.ndarray, table: pa.Table, name: str, suffix: str, shards: Callable[[int], list[str]]
    ) -> None:
        """Copy what the table of the rows has beside their checksums, and compare these.

        Args:
          name: of the column that names a row.
          suffix: of the columns of the group.
          shards: paths of the shards that hold a row of the table, from its position.
        Raises: DamageError.
        """
        results["state"] = STORED
        for column, absent in (("source_checksum", 0), ("min_cosine", np.nan), ("max_error", np.nan)):
            if f"{column}{suffix}" in table.column_names:
                results[column] = pc.fill_null(table[f"{column}{suffix}"], absent).to_numpy()
        differing = np.flatnonzero(pc.fill_null(table[f"checksum{suffix}"], 0).to_numpy() != results["checksum"])
        if len(differing):
            first = int(differing[0])
            paths = " or ".join(f"'{path}'" for path in shards(first))
            raise DamageError(
                f"store '{self._store.path}': '{table[name][first]}' in shard {paths} differs from what was written, "
                "so there is no new store. Run 'leandit verify STORE --repair --source PATH', then compact again."
            )
