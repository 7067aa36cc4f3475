"""An import: list the features, plan them by their headers, copy missing shards, seal.

No encoder is loaded: rows are the numbers of the source. Running the same command again resumes; a shard with a valid
commit record is never made twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ...datasets.format.layout import Task
from ...datasets.format.schema import Manifest, StoreSpec
from ...datasets.revisions.plan import FrozenPlan, freeze_plan
from ...datasets.revisions.writer import StoreWriter
from ...errors import FingerprintMismatch, RecipeError, RecordRejected, SourceError
from ...recipe import parse_stored
from ..planning.images import num_threads
from ..planning.opening import newest_plan
from ..run.clock import Progress
from ..run.rejects import RejectLimits
from ..run.shards import Shard
from ..run.tasks import ShardRunner, Wanted
from .describe import describe_import, differing_settings
from .formats.class_files import FastDit, Mar
from .formats.edm2 import Edm2
from .formats.lightningdit import LightningDit
from .formats.mds import Mds
from .formats.mlperf_flux import MlperfFlux
from .formats.nemo import Nemo
from .formats.pixart import PixArt
from .null_caption import read_null
from .plan import listing_hash, plan_import, reject_outliers, scan_records
from .recipe import ImportRecipe, Kind, check_keys
from .shards import CaptionShard, LatentShard, caption_origins
from .source import Entry, Reader

READERS: dict[str, type[Reader]] = {
    one.kind: one for one in (FastDit, LightningDit, Mar, Edm2, PixArt, Mds, MlperfFlux, Nemo)
}


@dataclass
class ImportReport:
    """The result of an import.

    Args:
      manifest: of the store.
      spec: of the store.
      num_imported: records copied by this call; 0 if the store was already complete.
      total_seconds: wall time of the call.
    """

    manifest: Manifest
    spec: StoreSpec
    num_imported: int
    total_seconds: float


@dataclass
class Importer(ShardRunner):
    """Copies features into shards.

    Args:
      null: file of the null caption, or "zeros".
      listing: of the source, to repair a store.
    """

    reader: Reader
    null: str | None = None
    listing: str = ""

    @property
    def num_at_once(self) -> int:
        """Records that are read concurrently."""
        return num_threads()

    def empty_shards(self, plan: FrozenPlan, tasks: Iterable[Task], remade: Wanted | None = None) -> Iterator[Shard]:
        """Shards of features to be read."""
        origins = caption_origins(plan)
        for name, number in tasks:
            part = plan.layout.parts[name]
            if part.captions:
                yield CaptionShard(plan, part, number, self.reader, origins, self.null)
            else:
                yield LatentShard(plan, part, number, self.reader)

    def remake(self, plan: FrozenPlan, tasks: Iterable[Task], wanted: Wanted | None = None) -> Iterator[Shard]:
        """Read shards of a sealed revision again, except the null caption, which is not among the features.

        Raises: SourceError: the revision is of other features.
        """
        if plan.listing != self.listing and not plan.copies:
            raise SourceError(f"source '{self.reader.root}': not what the store was imported from. Check --source.")
        readable = [task for task in tasks if not plan.layout.parts[task[0]].is_null]
        yield from self.filled(self.empty_shards(plan, readable))


def load_importer(spec: StoreSpec, source: Path) -> Importer:
    """What repairs an imported store; raises SourceError: the features cannot be read."""
    if "import" not in spec.recipe:
        raise SourceError(
            "the store was written with create_store, so only the program that wrote it can make its shards again. "
            "Write it again, or restore the damaged files from a copy."
        )
    settings = dict(spec.recipe["import"])
    kind = str(settings.pop("kind"))
    recipe, _ = parse_stored("recipe of the store", ImportRecipe, settings)
    reader = open_reader(kind, source, recipe)
    return Importer(reader=reader, listing=listing_hash(list(reader.entries())))


def open_reader(kind: str, root: Path, recipe: ImportRecipe) -> Reader:
    """The reader of a kind of features.

    Raises: RecipeError: unknown kind, or a setting that it does not read; SourceError: the source does not match it.
    """
    if kind not in READERS:
        raise RecipeError(f"import '{kind}': no such kind of features. Expected one of {', '.join(get_args(Kind))}.")
    if not (root.is_dir() or (kind == Edm2.kind and root.is_file())):
        file = " a .zip, or" if kind == Edm2.kind else ""
        raise SourceError(f"source '{root}': not found. An import of '{kind}' needs{file} a folder; check --source.")
    reader = READERS[kind](root, recipe)
    check_keys(kind, recipe, has_captions=bool(reader.defaults.texts), has_labels=reader.has_labels)
    return reader


def import_features(
    kind: str,
    recipe: ImportRecipe,
    *,
    source_path: Path,
    store_path: Path,
    progress: Progress,
    null: str | None = None,
) -> ImportReport:
    """Convert latents that another program has cached into a store, exactly.

    Args:
      kind: of the features.
      null: file of the null caption, or "zeros"; required with captions, and only with them.
    Raises: LeanditError: its class says what to fix; the same command then resumes.
    """
    start = time.perf_counter()
    reader = open_reader(kind, source_path, recipe)
    if null and not reader.defaults.texts:
        raise RecipeError(f"--null '{null}' has no effect: these features have no captions. Leave it out.")
    entries = list(reader.entries())
    listing = listing_hash(entries)
    plan = newest_plan(store_path)
    if plan is None:
        plan = freeze_plan(store_path, _plan(reader, entries, listing, null, progress))
    check_resumes(store_path, plan, reader, listing)
    importer = Importer(reader=reader, null=null)
    writer, limits = StoreWriter(store_path, plan, own=()), recipe.source.limits()
    manifest = importer.complete(writer, plan.layout.tasks(), section=limits, progress=progress)
    assert manifest, "an import has no parts"
    return ImportReport(manifest, plan.spec, importer.num_encoded, time.perf_counter() - start)


def _plan(reader: Reader, entries: Sequence[Entry], listing: str, null: str | None, progress: Progress) -> FrozenPlan:
    """Scan every record and plan those that can be stored; raises SourceError if too many cannot."""
    headers = scan_records(reader, entries, lambda done: progress("scan", done, len(entries)))
    common, headers = reject_outliers(headers, reader)
    limits = RejectLimits(reader.recipe.source.limits(), len(entries), is_planning=True)
    pairs = enumerate(zip(entries, headers, strict=True))
    rejects = [(i, entry.key, header) for i, (entry, header) in pairs if isinstance(header, RecordRejected)]
    limits.count(len(entries), rejects)
    limits.check()
    nulls = {}
    for (name, section), (length, width, _) in zip(reader.defaults.texts.items(), common.captions, strict=True):
        shape = (width,) if section.output == "pooled" else (length, width)
        nulls[name] = read_null(null, section, shape, name)
    return plan_import(describe_import(reader, common, headers, nulls), entries, headers, listing)


def check_resumes(root: Path, plan: FrozenPlan, reader: Reader, listing: str) -> None:
    """Raise if something else made the store, or if the source has changed since it was planned.

    Raises: FingerprintMismatch, SourceError.
    """
    if not plan.spec.is_imported:
        raise FingerprintMismatch(f"store '{root}': encoded, not imported. Nothing was changed. Use another --store.")
    if differing := differing_settings(plan.spec, reader):
        raise FingerprintMismatch(
            f"store '{root}': imported with other settings. Nothing was changed. Use those that made it, or "
            "another --store. What differs:" + "".join(f"\n  {field}" for field in differing)
        )
    if plan.listing != listing:
        raise SourceError(
            f"store '{root}': its source lists different files or sizes than when the store was planned. Nothing was "
            "changed. Restore the source, or import it into another --store."
        )
