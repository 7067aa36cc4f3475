"""Stage 1: list the source, load and check the encoders, freeze the plan, encode missing shards, seal; then grow.

Running the same command again resumes: a shard with a valid commit record is never encoded twice. If the source has
changed, a new revision encodes only the changes.

Any number of processes may run the same command at the same time, on one machine or on several that share the store's
folder. One of them plans, all encode, and the last one seals; leases (``sharing/leases.py``) assign each shard to one
process. With a part, a process encodes only its share of the shards. ``engines`` starts one on each device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..datasets.disk.strays import sweep_strays
from ..datasets.errors import SourceError
from ..datasets.format.class_names import ClassNames
from ..datasets.format.layout import COMMITS, Task, revision_prefix
from ..datasets.format.schema import Manifest, SelfCheck, StoreSpec
from ..datasets.revisions.catalog import read_manifest, sealed_revisions
from ..datasets.revisions.plan import FrozenPlan
from ..datasets.revisions.writer import StoreWriter
from .config import PrecomputeRecipe
from .encoders.describe import describe_store
from .encoders.loading import load_encoders
from .encoders.text.encoder import TokenCount
from .images.decoders import Decoders
from .planning.additions import is_extension
from .planning.compare import Comparison, Options
from .planning.opening import check_apart, check_disk, check_fingerprint, is_sealed, label_warnings, newest_plan
from .planning.pictures import MAX_THREADS, num_threads
from .planning.planner import Planner
from .planning.self_check import NUM_PICTURES, check_autoencoder
from .progress.clock import Progress, StageClock
from .progress.rejects import ledger_of
from .progress.verdict import CHECK, LOAD, PLAN, Power, StageTime, stage_times
from .shards.worker import Worker
from .sharing.leases import Leases, alone, seal_alone
from .sharing.part import Part
from .sources.files.ignored import Ignored
from .sources.several import SourcePaths, list_sources
from .sources.source import OpenedSource, Source

LOG = logging.getLogger(__name__)
MOST_SHOWN = 20  # shards in a line of the log


@dataclass
class Report:
    """The result of a precompute.

    Args:
      manifest: of the newest revision; None if other parts still have shards to encode.
      num_left: shards left to other parts.
      num_encoded: pictures encoded by this call; 0 if the store was already complete.
      total_seconds: wall time of the call.
      codec: of the store.
      seconds: of each stage, summed over threads, so they can exceed the wall time.
      ignored: files and folders of the source that were skipped.
      classes: of the source, by name.
      changes: of the source since the previous revision, if a revision was added.
      tokens: counts of the text encoder.
      power: device and threads of the run.
    """

    manifest: Manifest | None
    num_left: int
    num_encoded: int
    total_seconds: float
    codec: str
    seconds: dict[str, float]
    ignored: Ignored
    classes: ClassNames
    changes: Comparison | None = None
    tokens: TokenCount = field(default_factory=TokenCount)
    power: Power = field(default_factory=Power)

    @property
    def times(self) -> list[StageTime]:
        """Time and rate of each stage."""
        return stage_times(self.seconds, self.num_encoded, self.power)


@dataclass
class Stage1:
    """The state that all steps share.

    Args:
      decoders: read the pictures' headers, and decode them.
      say: called with notes.
    """

    root: Path
    recipe: PrecomputeRecipe
    source: OpenedSource
    worker: Worker
    decoders: Decoders
    progress: Progress
    part: Part
    say: Callable[[str], None] = lambda note: None
    num_left: int = 0

    def describe(self, source: Source | None, known: StoreSpec | None = None) -> StoreSpec:
        """The spec of a store that the encoders make; as ``describe_store``."""
        return describe_store(self.recipe, source, self.worker.encoders, known=known)

    def check(self, plan: FrozenPlan) -> SelfCheck | None:
        """Check the autoencoder before a plan is frozen; None if the recipe wants no check. Raises: EncoderError."""
        encoder, min_psnr_db = self.worker.encoders.image, self.recipe.vae.min_psnr
        if not min_psnr_db or not encoder.has_decoder:
            return None
        with self.worker.clock.measure(CHECK):
            return check_autoencoder(
                plan,
                encoder,
                self.decoders,
                self.source,
                min_psnr_db=min_psnr_db,
                say=self.say,
                progress=lambda done: self.progress("self-check", done, NUM_PICTURES),
            )


@dataclass(frozen=True)
class OpenedStore:
    """State of a store before anything is encoded.

    Args:
      plan: of the revision to finish.
      planner: of the revision after it.
      matches_plan: the plan has these encoders; otherwise it is complete, and the next revision adds some.
      existed: the plan is older than this call.
      was_sealed: the revision was complete before this call.
    """

    plan: FrozenPlan
    planner: Planner
    matches_plan: bool
    existed: bool
    was_sealed: bool


def precompute(
    recipe: PrecomputeRecipe,
    *,
    source_path: SourcePaths,
    store_path: Path,
    device: torch.device,
    progress: Progress,
    options: Options | None = None,
    part: Part | None = None,
    worker: Worker | None = None,
    listed: Source | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Encode every picture and caption of a source exactly once into a store.

    Args:
      source_path: a folder, a file or a URL; or several.
      options: how to treat records that are gone or rejected.
      device: of the encoders.
      part: encode only this share of the shards; None for all shards that no other process encodes.
      worker: with its encoders; None to load them.
      listed: the source, if it is already listed.
      say: called with notes about the source before encoding starts.
    Raises: LeanditError: its class says what to fix; then run the same command again.
    """
    start = time.perf_counter()
    manifest, changes = None, None

    # List the source, load the encoders.
    source = listed or list_sources(
        source_path, recipe.source, recipe.picture_columns, progress=lambda done: progress("list", done, 0)
    )
    for note in source.notes:
        say(f"source '{source.name}': {note}")
    for warning in label_warnings(recipe, source):
        say(warning)
    check_apart(store_path, source)
    worker = worker or load_worker(recipe, device, num_threads())
    for warning in recipe.images.for_vae(worker.encoders.image.downscale).warnings():
        say(warning)
    with Decoders(num_threads()) as decoders:
        LOG.info(
            "encoders on %s; %d decoders, one for each core that this process may use, at most %d",
            worker.encoders.image.device,
            decoders.num_at_once,
            MAX_THREADS,
        )
        stage = Stage1(store_path, recipe, source, worker, decoders, progress, part or Part(), say)

        # Plan: open the newest plan, or freeze the first.
        opened = open_store(stage, source)

        # Encode the missing shards and seal.
        if opened.matches_plan:
            manifest = finish(stage, opened.plan)

        # Grow: changes of the source make the next revision.
        if opened.existed and (opened.was_sealed or not part):
            following, changes = plan_next(stage, opened, options or Options())
            if following:
                manifest = finish(stage, following)
            elif (newest := sealed_revisions(store_path)[-1:]) > [opened.plan.revision]:
                manifest = read_manifest(store_path, *newest)  # another process has grown the store meanwhile
    work = worker.snapshot()
    return Report(
        manifest=manifest,
        num_left=stage.num_left,
        num_encoded=work.num_encoded,
        total_seconds=time.perf_counter() - start,
        codec=recipe.store.codec,
        seconds=work.seconds,
        ignored=source.ignored,
        classes=ClassNames(source.classes, source.class_names),
        changes=changes,
        tokens=work.tokens,
        power=Power(worker.encoders.image.device.type, 1, worker.num_decoders),
    )


def load_worker(recipe: PrecomputeRecipe, device: torch.device, num_decoders: int) -> Worker:
    """Load the encoders. Raises: as ``load_encoders``."""
    clock = StageClock()
    with clock.measure(LOAD):
        encoders = load_encoders(recipe, device)
    return Worker(encoders, num_decoders, clock)


def open_store(stage: Stage1, source: Source) -> OpenedStore:
    """Open the newest plan of the store, or plan its first revision; other processes wait meanwhile.

    Raises: FingerprintMismatch: encoders or settings differ from the store's.
    """
    root, worker = stage.root, stage.worker
    with worker.clock.measure(PLAN), alone(root, "plan", lambda: stage.progress("others plan", 0, 1)):
        found = newest_plan(root)
        spec = stage.describe(source, found and found.spec)
        tokenizers = worker.encoders.tokenizers
        planner = Planner(
            root, spec, source, stage.recipe, tokenizers, stage.decoders, stage.progress, check=stage.check
        )
        if found and not (is_sealed(root, found) and is_extension(found.spec, spec)):
            check_fingerprint(root, found.spec, spec)
        plan = found or planner.plan_first()
        if not found:  # another process may have planned first, with its own batch size
            spec = stage.describe(source, plan.spec)
            check_fingerprint(root, plan.spec, spec)
        was_sealed = bool(found) and is_sealed(root, plan)
    state = "was complete" if was_sealed else "is resumed" if found else "is new"
    LOG.info("store '%s': revision %d %s, fingerprint %s", root, plan.revision, state, plan.spec.fingerprint[:16])
    return OpenedStore(plan, planner, plan.spec.fingerprint == spec.fingerprint, bool(found), was_sealed)


def plan_next(stage: Stage1, opened: OpenedStore, options: Options) -> tuple[FrozenPlan | None, Comparison | None]:
    """Plan the revision after a complete one, or open the plan if another process was faster.

    Returns: as ``Planner.plan_next``.
    """
    with stage.worker.clock.measure(PLAN), alone(stage.root, "plan", lambda: stage.progress("others plan", 0, 1)):
        following, changes = opened.planner.plan_next(options)
    if following:
        check_fingerprint(stage.root, following.spec, stage.describe(None, following.spec))
    return following, changes


def finish(stage: Stage1, plan: FrozenPlan) -> Manifest | None:
    """Encode the missing shards of a revision and seal it.

    Returns: its manifest; None if other parts still have shards to encode.
    """
    own = stage.part.of(plan.layout.tasks())
    # Processes without a part share all shards: only the one that seals checks their bytes.
    writer = StoreWriter(stage.root, plan, own=() if stage.part == Part() else own)
    missing = writer.missing_tasks(own)
    _log_shards(plan, own, missing)
    if missing:
        ledger_of(stage.recipe.source, writer).check()
    check_disk(writer, missing)
    Leases(writer).sweep()  # left by processes that died

    def encode(missing: list[Task]) -> None:
        while missing:
            section = stage.recipe.source
            stage.worker.encode(writer, missing, stage.source, stage.decoders, section=section, progress=stage.progress)
            sweep_strays(stage.root)  # left by lost workers
            missing = writer.missing_tasks(missing)

    encode(missing)
    return seal(stage, writer, encode)


def _log_shards(plan: FrozenPlan, own: Sequence[Task], missing: Sequence[Task]) -> None:
    buckets = ", ".join(f"{name}: {count}" for name, count in plan.new_rows.items())
    LOG.info("revision %d, pictures of each bucket: %s", plan.revision, buckets)
    done = [task for task in own if task not in set(missing)]
    LOG.info("revision %d, shards committed and skipped (%d): %s", plan.revision, len(done), _shards(done))
    LOG.info("revision %d, shards missing (%d): %s", plan.revision, len(missing), _shards(missing))


def _shards(tasks: Sequence[Task]) -> str:
    shown = ", ".join(f"{part} {shard}" for part, shard in tasks[:MOST_SHOWN])
    return (shown or "none") + (f" and {len(tasks) - MOST_SHOWN} more" if len(tasks) > MOST_SHOWN else "")


def seal(stage: Stage1, writer: StoreWriter, encode: Callable[[list[Task]], None]) -> Manifest | None:
    """Seal a revision if no shard is missing.

    Args:
      encode: as for ``seal_alone``.
    Returns: its manifest; None if other parts still have shards to encode.
    Raises: SourceError: no picture of the first revision could be encoded, or all processes together rejected too many.
    """
    plan, stage.num_left = writer.plan, len(writer.missing_tasks())
    if not writer.is_sealed:
        ledger_of(stage.recipe.source, writer).check()
    if stage.num_left:
        return None
    if not writer.num_stored and not plan.before:
        raise SourceError(
            f"source '{stage.source.name}': none of {plan.records.num_rows} pictures could be encoded, so the store is "
            f"not sealed. Look at one of them; the reasons are in "
            f"'{stage.root / revision_prefix(plan.revision) / COMMITS}'."
        )
    return seal_alone(writer, encode, lambda: stage.progress("others seal", 0, 1))
