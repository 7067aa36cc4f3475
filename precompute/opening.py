"""Take up a store or plan a new one, and refuse what is another store, another source or too small a disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..datasets.commits import FrozenPlan, read_plan
from ..datasets.errors import DamageError, FingerprintMismatch, ResourceError, SourceError, StoreError
from ..datasets.files import read_json, sweep_strays
from ..datasets.layout import CAPTION_PART, EMBEDDINGS, MANIFEST, PLAN
from ..datasets.recipe import flatten
from ..datasets.schema import Manifest, StoreSpec
from ..datasets.store import LatentStore, read_spec
from ..datasets.writer import StoreWriter, freeze_plan
from .config import PrecomputeRecipe
from .encoders import Encoders
from .plan import num_threads, plan_captions, plan_pictures, plan_records
from .sources import Source
from .stages import Progress


def open_writer(
    root: Path, spec: StoreSpec, source: Source, recipe: PrecomputeRecipe, encoders: Encoders, progress: Progress
) -> StoreWriter:
    """Take up the store at ``root`` if it is this one, else plan a new one.

    Raises: FingerprintMismatch, SourceError: another recipe or source made it; StoreError: something else is there.
    """
    if root.exists() and not root.is_dir():
        raise StoreError(f"store '{root}': a file is there; needed a folder, or nothing. Give another --store.")
    if root.exists():
        sweep_strays(root)
        if (root / PLAN).is_file():
            found = _spec_on_disk(root, spec)
            check_fingerprint(root, found, spec)
            plan = read_plan(root)
            check_source(root, plan, source)
            return StoreWriter(root, found, plan)
        if any(root.iterdir()):
            read_spec(root)  # refuses what is not ours
            if (root / MANIFEST).exists() or (root / "commits").exists():
                raise StoreError(
                    f"store '{root}': its 'plan' folder is gone, so nothing can be mended. Nothing was changed. "
                    "Restore the folder, or give another --store; a complete store can still be read."
                )
            for folder in ("buckets", "captions", "plan"):  # of a plan that was never finished: nothing is committed
                shutil.rmtree(root / folder, ignore_errors=True)
    return StoreWriter(root, spec, make_plan(root, spec, source, recipe, encoders, progress))


def _spec_on_disk(root: Path, wanted: StoreSpec) -> StoreSpec:
    """What the store says of itself; where that is damaged but the plan is of this fingerprint, what it said."""
    planned = read_json(root / PLAN).get("fingerprint")
    try:
        found = read_spec(root)
    except (DamageError, StoreError):
        if planned != wanted.fingerprint:
            raise
        return wanted
    intact = found.with_fingerprint().fingerprint == planned
    return found if intact or planned != wanted.fingerprint else wanted


def make_plan(
    root: Path, spec: StoreSpec, source: Source, recipe: PrecomputeRecipe, encoders: Encoders, progress: Progress
) -> FrozenPlan:
    """Plan every record of the source and freeze the plan in the store.

    Raises: SourceError: not one record can be encoded.
    """
    total = len(source.records)
    pictures = plan_pictures(
        source, recipe, num_threads=num_threads(), progress=lambda done: progress("scan", done, total)
    )
    captions, caption_ids = plan_captions(source, pictures, encoders.tokenizer, recipe.text.max_tokens)
    records = plan_records(source, pictures, caption_ids)
    if all(picture.reject for picture in pictures):
        reasons = ", ".join(f"{e['values']}: {e['counts']}" for e in records["reason"].value_counts().to_pylist())
        raise SourceError(
            f"source '{source.root}': all {total} records are rejected ({reasons}); "
            f"the first is '{source.records[0].key}': {pictures[0].reject}. Nothing was written."
        )
    return freeze_plan(root, spec, records, captions, listing=source.listing_hash())


def check_fingerprint(root: Path, found: StoreSpec, wanted: StoreSpec) -> None:
    """Refuse a store that other encoders or settings made, naming each field.

    Raises: FingerprintMismatch.
    """
    if found.fingerprint == wanted.fingerprint:
        return
    there, here = flatten(found.identity()), flatten(wanted.identity())
    differing = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
    fields = "; ".join(f"{key} is {there.get(key)!r} in the store, {here.get(key)!r} now" for key in differing[:6])
    raise FingerprintMismatch(
        f"store '{root}': made with other encoders or settings: {fields}. Nothing was changed. "
        "Give another --store, or the settings that made this one."
    )


def check_source(root: Path, plan: FrozenPlan, source: Source) -> None:
    """Refuse to go on when the source is not the one that was planned.

    Raises: SourceError: saying how many records were added, are gone, or were written anew.
    """
    if source.listing_hash() == plan.listing:
        return
    columns = ("key", "source_path", "source_offset", "source_bytes", "source_mtime_ns", "label")
    planned = {row["key"]: row for row in plan.records.select(columns).to_pylist()}
    now = {record.key: record for record in source.records}
    changed = [
        key
        for key in planned.keys() & now.keys()
        if (planned[key]["source_bytes"], planned[key]["source_mtime_ns"]) != (now[key].num_bytes, now[key].mtime_ns)
    ]
    added, gone = sorted(now.keys() - planned.keys()), sorted(planned.keys() - now.keys())
    examples = [*added, *gone, *sorted(changed)][:3]
    raise SourceError(
        f"source '{source.root}': it is not what store '{root}' planned: {len(added)} records new, {len(gone)} gone, "
        f"{len(changed)} written anew"
        + (f" ({', '.join(examples)})" if examples else ", or labels or captions differ")
        + ". Restore the source, or precompute into another --store."
    )


def sealed_manifest(writer: StoreWriter) -> Manifest | None:
    """Manifest of a store that is sealed and whole; None where it has to be sealed (again)."""
    if not writer.is_sealed:
        return None
    try:
        store = LatentStore(writer.root)
        _ = store.records, store.captions  # checks the hashes of the tables
        return store.manifest
    except DamageError:
        return None


def check_disk(writer: StoreWriter, missing: list[tuple[str, int]]) -> None:
    """Refuse to start when the disk cannot hold what is missing.

    Raises: ResourceError.
    """
    needed = 0
    for layout in writer.layouts.values():
        part = {EMBEDDINGS: CAPTION_PART}.get(layout.path, layout.path.rsplit("/", 1)[0])
        needed += sum(len(layout.rows_of(shard)) * layout.row_bytes for p, shard in missing if p == part)
    free = shutil.disk_usage(writer.root).free
    if needed > free:
        raise ResourceError(
            f"store '{writer.root}': the disk has {free / 2**30:.1f} GiB free, the store needs {needed / 2**30:.1f} "
            "GiB more. Free some space, or give a --store on another disk; the same command then goes on."
        )
