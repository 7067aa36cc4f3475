"""Plans of revisions: the first from every record of a source, the next from what has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from ...datasets.format.layout import next_row
from ...datasets.format.row_layout import buckets_of
from ...datasets.format.schema import StoreSpec
from ...datasets.format.table_schemas import plan_schema, suffixes
from ...datasets.revisions.catalog import read_manifest
from ...datasets.revisions.local import with_stored_encoder_paths
from ...datasets.revisions.plan import FrozenPlan, freeze_plan, read_plan
from ...datasets.store import LatentStore
from ...errors import RecordRejected, SourceError
from ...units import plural
from ..config import PrecomputeRecipe
from ..encoders.text.tokenizer import CaptionTokenizer
from ..images.decoders import Decoders
from ..run.clock import REJECTED, Progress
from ..run.rejects import HINTS, RejectLimits, count_reasons
from ..sources.listing.listing import Listing
from ..sources.source import Source
from .captions import CaptionCounts, plan_captions
from .compare import Comparison, Options, all_fresh, compare, sizes_differ
from .images import num_threads, plan_images
from .records import TEXTS, plan_records, planned_texts

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them


@dataclass(frozen=True)
class Planner:
    """Plans revisions of one store from one source.

    Args:
      root: the store.
      spec: of the revision; None to plan images only.
      tokenizers: of the text encoders, by name.
      progress: called while scanning.
      check: checks the encoders on a sample of a plan before it is frozen; returns the plan with what it found.
    """

    root: Path
    spec: StoreSpec | None
    source: Source
    recipe: PrecomputeRecipe
    tokenizers: Mapping[str, CaptionTokenizer]
    decoders: Decoders
    progress: Progress
    check: Callable[[FrozenPlan], FrozenPlan] = lambda plan: plan

    def plan_first(self) -> FrozenPlan:
        """Plan every record of the source as the first revision.

        Raises: as ``first``.
        """
        return freeze_plan(self.root, self.first())

    def first(self) -> FrozenPlan:
        """The plan of every record of the source as the first revision; writes nothing.

        Raises: SourceError: no record can be encoded, or too many are rejected; EncoderError: of the check.
        """
        return self.check(self.plan(all_fresh(self.source.records), None))

    def plan_next(self, options: Options) -> tuple[FrozenPlan | None, Comparison | None]:
        """Compare the source with the newest, complete revision, and plan the next one if they differ.

        Returns, Raises: as ``next``.
        """
        plan, comparison = self.next(options)
        if plan is None:
            return None, comparison
        return freeze_plan(self.root, plan), comparison

    def next(self, options: Options) -> tuple[FrozenPlan | None, Comparison | None]:
        """The plan of what has changed since the newest, complete revision; writes nothing.

        Returns: the plan, or None if nothing has to be done; and the changes, if the files were compared.
        Raises: as ``compare`` and ``plan``.
        """
        comparison, base = self.compare(options)
        if comparison is None or base is None:
            return None, comparison
        return self.check(self.plan(comparison, base)), comparison

    def compare(self, options: Options) -> tuple[Comparison | None, FrozenPlan | None]:
        """Compare the source with the newest, complete revision; writes nothing.

        Returns: the changes, if the files were compared; and what the next revision builds on, None if nothing has to
          be done. The spec is the store's, or one that adds text encoders, features, companions or sample captions.
        Raises: SourceError: gone records cannot be encoded again or completed, and dropping them was not requested.
        """
        source, spec = self.source, self._spec
        base = read_plan(self.root, LatentStore(self.root).revision)
        extends, is_renamed = spec.fingerprint != base.spec.fingerprint, self._is_renamed(base.spec)
        extends |= spec.sample_captions != base.spec.sample_captions
        must_look = extends or is_renamed or sizes_differ(base, self.recipe) or options != Options()
        must_look |= self.recipe.source.check == "content"
        if not must_look and source.listing_hash(null_captions=self.recipe.null_captions) == base.listing:
            return None, None
        total = len(source.records)
        comparison = compare(
            *(source, base, options, self.recipe),
            num_threads=num_threads(),
            progress=lambda done: self.progress("compare", done, total),
        )
        comparison = replace(comparison, is_renamed=is_renamed)
        if not (extends or comparison.changes_anything):
            return comparison, None
        if spec.groups != base.spec.groups and comparison.num_gone > comparison.num_dropped:
            raise SourceError(
                f"source '{source.name}': it lacks {plural(comparison.num_gone, 'record')} of store '{self.root}', "
                "so these cannot be encoded. Restore them, or leave them out with --drop-gone."
            )
        return comparison, base

    @property
    def _spec(self) -> StoreSpec:
        assert self.spec, "only a planner of images has none"
        return self.spec

    def _names_of(self, classes: list[str], before: StoreSpec | None) -> list[str] | None:
        """Display names of classes: the source's, else the base's; None if neither has any."""
        source, names = self.source, {}
        if before and before.class_names:
            names = dict(zip(before.classes or (), before.class_names, strict=True))
        if source.class_names:
            names |= zip(source.classes or (), source.class_names, strict=True)
        return [names.get(name, name) for name in classes] if names else None

    def _is_renamed(self, before: StoreSpec) -> bool:
        """The source changes names, or display names, of classes of the base."""
        if self.source.renames(before.classes):
            return True
        return bool(self.source.class_names) and self._names_of(before.classes or [], before) != before.class_names

    def limits(self, comparison: Comparison) -> RejectLimits:
        """The reject limits of a revision, before any of its new records is checked."""
        table, total = comparison.carried, comparison.carried.num_rows + len(comparison.fresh)
        carried = count_reasons(table.filter(pc.equal(table["status"], "rejected"))["reason"])
        return RejectLimits(self.recipe.source, total, carried=carried, is_planning=True)

    def measure(
        self, fresh: Listing, limits: RejectLimits, base: FrozenPlan | None = None, *, stops: bool = True
    ) -> pa.Table:
        """Size, bucket, row and crop of the new images of a revision that builds on a base, as ``plan_images``."""
        arrays = read_manifest(self.root, base.revision).layouts() if base else {}
        first_rows = {bucket: next_row(self._spec, bucket, arrays) for bucket in buckets_of(arrays)}
        images = self.recipe.images.for_vae(self.spec.latent.downscale) if self.spec else self.recipe.images

        def scanned(done: int) -> None:
            if limits.rejected:
                self.progress(REJECTED, limits.rejected.total(), 0)
            self.progress("scan", done, len(fresh))

        recipe = self.recipe.model_copy(update={"images": images})
        how = {"first_rows": first_rows, "progress": scanned, "stops": stops}
        return plan_images(self.source, fresh, recipe, self.decoders, limits, **how)

    def refusal(self, comparison: Comparison, images: pa.Table) -> SourceError | None:
        """The error if nothing is carried over and no new image can be encoded, or None."""
        if comparison.carried.num_rows or not pc.all(pc.less(images["row"], 0)).as_py():
            return None
        fresh, first = comparison.fresh, images.slice(0, 1).to_pylist()[0]
        return SourceError(
            f"source '{self.source.name}': all {len(fresh)} records are rejected; the first is '{fresh[0].key}': "
            f"{RecordRejected(first['stage'], first['reason'], first['detail'])}. Nothing was written. "
            f"{HINTS.get(first['reason'], '')}".rstrip()
        )

    def plan(self, comparison: Comparison, base: FrozenPlan | None, images: pa.Table | None = None) -> FrozenPlan:
        """Plan a revision from carried-over and new records; writes nothing.

        Args:
          base: the revision that it builds on; None for the first.
          images: of the new records, if already planned.
        Raises: SourceError: nothing is carried over and no new record can be encoded; or too many are rejected.
        """
        spec, manifest = self._spec, base and read_manifest(self.root, base.revision)
        revision = manifest.revision + 1 if manifest else 1
        if images is None:
            images = self.measure(comparison.fresh, self.limits(comparison), base)
            if refusal := self.refusal(comparison, images):
                raise refusal
        counts = [
            CaptionCounts(suffix, self.tokenizers[name], spec.text_encoder_of(name).spec.max_tokens, name)
            for name, suffix in suffixes(spec).items()
        ]
        captions, caption_ids = plan_captions(
            chain(planned_texts(comparison, images), [pa.array([spec.sample_captions], TEXTS)]),
            counts,
            num_records=comparison.carried.num_rows + len(comparison.fresh) + 1,
            revision=revision,
            known=base and base.captions,
        )
        caption_ids = caption_ids.slice(0, len(caption_ids) - 1)  # no record has the sample captions
        classes = [*(self.source.classes or ()), *comparison.gone_classes]
        names = {"classes": classes or None, "class_names": self._names_of(classes, base and base.spec)}
        return FrozenPlan(
            spec=with_stored_encoder_paths(spec.model_copy(update=names), self.root),
            revision=revision,
            base=manifest.root_hash if manifest else "",
            copies=False,
            listing=self.source.listing_hash(null_captions=self.recipe.null_captions),
            records=plan_records(comparison, images, caption_ids, revision=revision, schema=plan_schema(spec)),
            captions=captions,
            before=manifest,
        )
