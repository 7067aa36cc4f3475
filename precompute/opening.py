"""Take up a store, plan its first revision or its next; refuse what is another store, or too small a disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from ..datasets.commits import Task, carried_files
from ..datasets.errors import FingerprintMismatch, RecordRejected, ResourceError, SourceError, StoreError
from ..datasets.files import TEMPORARY_PREFIX, sweep_strays
from ..datasets.frozen import FrozenPlan, freeze_plan, planned_revisions, read_plan
from ..datasets.layout import LEASES
from ..datasets.recipe import flatten
from ..datasets.revisions import check_store, sealed_revisions
from ..datasets.schema import FileEntry, StoreSpec
from ..datasets.store import LatentStore
from ..datasets.writer import StoreWriter
from .caption_plan import plan_captions
from .config import PrecomputeRecipe
from .decoder import Decoders
from .growth import Base, Comparison, Options, all_fresh, compare
from .picture_plan import num_threads, picture_table, plan_pictures
from .plan import PlannedTexts, plan_records
from .sources import Source
from .stages import Progress
from .text_encoders import CaptionTokenizer

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them


def newest_plan(root: Path) -> FrozenPlan | None:
    """Plan of the newest revision, complete or not, after what dead processes left is swept up.

    Returns, Raises: as ``look_for_plan``.
    """
    if root.is_dir():
        sweep_strays(root)
    return look_for_plan(root)


def check_apart(root: Path, source: Source, source_path: Path | str) -> None:
    """Refuse a store among the folders of a source whose classes they are: it would be one, and move the labels.

    Raises: SourceError.
    """
    has_classes = source.kind == "imagefolder" and source.classes
    folder, store = Path(str(source_path).removeprefix("file://")).resolve(), root.resolve()
    is_inside = store.is_relative_to(folder)
    if has_classes and is_inside and not any(part.startswith(".") for part in store.relative_to(folder).parts):
        raise SourceError(
            f"store '{root}': it lies inside of source '{source.name}', whose folders are its classes: the store would "
            "become one of them. Nothing was changed. Give a --store elsewhere."
        )


def look_for_plan(root: Path) -> FrozenPlan | None:
    """Plan of the newest revision, complete or not; nothing is changed.

    Returns: None where nothing is planned yet.
    Raises: StoreError: something else is there, or the plan of a store is gone.
    """
    if root.exists() and not root.is_dir():
        raise StoreError(f"store '{root}': a file is there; needed a folder, or nothing. Give another --store.")
    if not root.exists():
        return None
    planned, sealed = planned_revisions(root), sealed_revisions(root)
    if planned and (not sealed or planned[-1] >= sealed[-1]):
        plan = read_plan(root, planned[-1])
        if plan.copies and plan.revision not in sealed:
            raise StoreError(f"store '{root}': it is being compacted. Run 'leandit compact {root}' again: it goes on.")
        return plan
    others = (path.name for path in root.iterdir() if path.name != LEASES)
    if any(not name.startswith(TEMPORARY_PREFIX) for name in others):  # those are of a plan that others write
        if not planned and planned_revisions(root):  # others have finished theirs between the two looks
            return look_for_plan(root)
        check_store(root)  # refuses what is not ours
        raise StoreError(
            f"store '{root}': its 'plan' folder is gone, so nothing can be added. Nothing was changed. Run "
            "'leandit verify --repair --source PATH', or give another --store; a complete store can still be read."
        )
    return None


def is_sealed(root: Path, plan: FrozenPlan) -> bool:
    """The revision of a plan is complete."""
    return plan.revision in sealed_revisions(root)


def check_fingerprint(root: Path, found: StoreSpec, wanted: StoreSpec) -> None:
    """Refuse a store that other encoders or settings made, naming each field.

    Raises: FingerprintMismatch.
    """
    if found.fingerprint == wanted.fingerprint:
        return
    there, here = flatten(found.identity()), flatten(wanted.identity())
    differing = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
    fields = "; ".join(f"{key} is {there.get(key)!r} in the store, {here.get(key)!r} now" for key in differing[:6])
    more = f"; and {len(differing) - 6} more" if len(differing) > 6 else ""
    beside = "or --new-revision to encode everything anew beside what is there"
    if planned_revisions(root)[-1:] > sealed_revisions(root)[-1:]:
        beside = "or first finish this one with the settings that made it, and then give --new-revision"
    raise FingerprintMismatch(
        f"store '{root}': made with other encoders or settings: {fields}{more}. Nothing was changed. Two ways on: give "
        f"another --store, {beside}. Or use the settings that made this store."
    )


@dataclass(frozen=True)
class Planner:
    """Plans revisions of one store from one source.

    Args:
      root: the store.
      spec: what the revision will say of itself.
      source, recipe, tokenizer, decoders: what is planned with.
      progress: told of what is scanned.
    """

    root: Path
    spec: StoreSpec
    source: Source
    recipe: PrecomputeRecipe
    tokenizer: CaptionTokenizer | None
    decoders: Decoders
    progress: Progress

    def plan_first(self) -> FrozenPlan:
        """Plan every record of the source as the first revision.

        Raises: SourceError: not one record can be encoded.
        """
        return self._freeze(self._plan(all_fresh(self.source.records), 1, "", (), None))

    def plan_next(self, options: Options) -> tuple[FrozenPlan | None, Comparison | None]:
        """Compare the source with the newest revision, which is complete, and plan the next one if they differ.

        Where the spec is another, nothing can be carried over: all is planned anew, beside what is there.

        Returns: the plan, or None where nothing has to be done; and what has changed, if the files were looked at.
        Raises: SourceError: with another spec, records that are gone cannot be kept and nobody asked to drop them.
        """
        store, source = LatentStore(self.root), self.source
        base_plan, manifest = read_plan(self.root, store.revision), store.manifest
        assert manifest is not None
        anew = self.spec.fingerprint != base_plan.spec.fingerprint
        read_all = self.recipe.source.check == "content"
        if not (anew or read_all or options != Options()) and source.listing_hash() == base_plan.listing:
            return None, None
        total = len(source.records)
        comparison = compare(
            source,
            Base(base_plan, store.records, store.captions),
            options,
            check_content=read_all,
            num_threads=num_threads(),
            progress=lambda done: self.progress("compare", done, total),
        )
        if not anew and not comparison.changes_anything:
            return None, comparison
        if anew and comparison.num_gone > comparison.num_dropped:
            raise SourceError(
                f"source '{source.name}': {comparison.num_gone} records of store '{self.root}' are gone from it, so "
                "they cannot be encoded anew. Restore them, or add --drop-gone to leave them out of the new revision."
            )
        stack = () if anew else tuple(manifest.stack)
        plan = self._plan(
            all_fresh(source.records) if anew else comparison,
            store.revision + 1,
            manifest.root_hash,
            carried_files(manifest, stack),
            None if anew else store.captions,
            stack,
        )
        return self._freeze(plan), comparison

    def _freeze(self, plan: FrozenPlan) -> FrozenPlan:
        """Write the plan, unless others have been faster: then theirs holds.

        Raises: StoreError: it is that of a compaction.
        """
        held = freeze_plan(self.root, plan)
        if held.copies:
            raise StoreError(f"store '{self.root}': it is being compacted. Run 'leandit compact {self.root}' first.")
        return held

    def _plan(
        self,
        comparison: Comparison,
        revision: int,
        base: str,
        carried: tuple[FileEntry, ...],
        known_captions: pa.Table | None,
        stack: tuple[int, ...] = (),
    ) -> FrozenPlan:
        """Plan a revision: what is carried over from its base, and the new records.

        Raises: SourceError: there is nothing to carry over, and not one new record can be encoded.
        """
        source, fresh, total = self.source, comparison.fresh, len(comparison.fresh)
        found = plan_pictures(
            source, fresh, self.recipe, self.decoders, progress=lambda done: self.progress("scan", done, total)
        )
        pictures = picture_table(found)
        if not comparison.kept and pc.all(pc.less(pictures["row"], 0)).as_py():
            first = pictures.slice(0, 1).to_pylist()[0]
            raise SourceError(
                f"source '{source.name}': all {total} records are rejected; the first is '{fresh[0].key}': "
                f"{RecordRejected(first['stage'], first['reason'], first['detail'])}. Nothing was written."
            )
        captions, caption_ids = plan_captions(
            PlannedTexts(comparison, pictures),
            self.tokenizer,
            self.recipe.text.max_tokens,
            revision=revision,
            known=known_captions,
        )
        classes = [*(source.classes or ()), *comparison.gone_classes]
        return FrozenPlan(
            spec=self.spec.model_copy(update={"classes": classes or None}),
            revision=revision,
            base=base,
            stack=stack,
            carried=carried,
            copies=False,
            listing=source.listing_hash(),
            records=plan_records(comparison, pictures, caption_ids, revision=revision),
            captions=captions,
        )


def needed_bytes(writer: StoreWriter, missing: list[Task]) -> int:
    """Bytes of what is missing, before any codec."""
    return sum(
        len(array.rows_of(shard)) * array.row_bytes
        for part, shard in missing
        for array in writer.plan.layout.part_arrays(part)
    )


def check_disk(writer: StoreWriter, missing: list[Task], *, beside: int = 0) -> None:
    """Refuse to start when the disk cannot hold what is missing.

    Args:
      beside: bytes that other stores need of the same disk.
    Raises: ResourceError.
    """
    needed = beside + needed_bytes(writer, missing)
    free = shutil.disk_usage(writer.root).free
    if needed > free:
        raise ResourceError(
            f"store '{writer.root}': the disk has {free / 2**30:.1f} GiB free, the store needs {needed / 2**30:.1f} "
            "GiB more. Free some space, or give a --store on another disk; the same command then goes on."
        )
