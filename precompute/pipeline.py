"""Stage 1: load and check the encoders, list the source, freeze the plan, encode missing shards, seal; then grow.

Running the same command again resumes: a shard with a valid commit record is never encoded twice. If the source has
changed, a new revision encodes only the changes.

Any number of processes may run the same command at the same time, on one machine or on several that share the store's
folder. One of them lists and plans while the others wait, then all encode, and the last one seals; leases
(``sharing/leases.py``) assign each shard to one process. With a part, a process encodes only its share of the shards.
``engines`` starts the command on each device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from ..datasets.format.layout import LEASES, revision_prefix
from ..datasets.format.layout import PLAN as PLAN_FOLDER
from ..datasets.format.schema import Manifest, SelfCheck, StoreSpec
from ..datasets.revisions.catalog import begun_revision, read_manifest, remove_empty_revisions, sealed_revisions
from ..datasets.revisions.commits import hash_of_damaged_plan
from ..datasets.revisions.plan import FrozenPlan, freeze_plan, read_plan
from ..datasets.revisions.writer import StoreWriter
from ..errors import DamageError, StoreIncomplete
from ..units import plural
from .config import PrecomputeRecipe
from .encoders.loading import describe_store, load_encoders
from .encoders.text.encoder import TokenCount
from .images.decoders import Decoders
from .planning.compare import Comparison, Options
from .planning.images import MAX_THREADS, num_threads
from .planning.opening import (
    check_apart,
    check_fingerprint,
    is_extension,
    label_warnings,
    look_for_plan,
    newest_plan,
)
from .planning.planner import Planner
from .planning.quality import check_quality
from .planning.self_check import NUM_IMAGES, check_encoders
from .run.bottleneck import CHECK, LOAD, PLAN, StageTime, stage_times
from .run.clock import Progress, StageClock
from .run.tasks import Runner
from .sharing.leases import ALL_SHARDS, Leases, alone, seal_alone
from .sources.several import SourcePaths, list_sources, open_sources
from .sources.source import Source

LOG = logging.getLogger(__name__)


@dataclass
class Report:
    """The result of a precompute.

    Args:
      manifest: of the newest revision; None if other parts still have shards to encode.
      num_left: shards left to other parts.
      num_encoded: images encoded by this call; 0 if the store was already complete.
      total_seconds: wall time of the call.
      codec: of the store.
      seconds: of each stage, summed over threads, so they can exceed the wall time.
      source: None if another process has listed it.
      changes: of the source since the previous revision, if a revision was added.
      tokens: counts of the text encoder.
      device: of the encoders, as "cpu" or "cuda".
      num_decoders: images that are read and decoded concurrently.
      num_ignored_profiles: encoded images whose color profile is broken or of other pixels.
      num_low_quality: captions that were stored although their quality is below store.min_text_cosine.
    """

    manifest: Manifest | None
    num_left: int
    num_encoded: int
    total_seconds: float
    codec: str
    seconds: dict[str, float]
    source: Source | None
    changes: Comparison | None = None
    tokens: TokenCount = field(default_factory=TokenCount)
    device: str = "cpu"
    num_decoders: int = 1
    num_ignored_profiles: int = 0
    num_low_quality: int = 0

    @property
    def times(self) -> list[StageTime]:
        """Time and rate of each stage."""
        return stage_times(self.seconds, self.num_encoded, self.num_decoders)


def precompute(
    recipe: PrecomputeRecipe,
    *,
    source_path: SourcePaths,
    store_path: Path,
    device: torch.device,
    progress: Progress,
    options: Options | None = None,
    part: slice = ALL_SHARDS,
    listed: Source | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Encode every image and caption of a source exactly once into a store.

    Args:
      source_path: a folder, a file or a URL; or several.
      options: how to treat missing or rejected records.
      device: where the encoders run.
      part: encode only these shards; by default all that no other process encodes.
      listed: the source, if it is already listed.
      say: called with notes about the source before encoding starts.
    Raises: LeanditError: its class says what to fix; then run the same command again.
    """
    start, clock, newest = time.perf_counter(), StageClock(), newest_revision(store_path)
    if not newest:
        look_for_plan(store_path)  # refuses a path that is no store before anything is loaded
    source = listed or open_sources(source_path, recipe.source, recipe.companion_columns)
    with clock.measure(LOAD):
        encoders = load_encoders(recipe, device)
    for warning in recipe.images.for_vae(encoders.image.downscale).warnings():
        say(warning)
    with Decoders(num_threads(), max_megapixels=recipe.images.max_megapixels) as decoders:
        LOG.info(
            "encoders on %s; %d decoders, one for each core that this process may use, at most %d",
            encoders.image.device,
            decoders.num_at_once,
            MAX_THREADS,
        )
        runner = Runner(encoders, decoders, source, clock=clock, store=recipe.store)
        stage = Stage1(store_path, recipe, source_path, runner, progress, say, part, options or Options(), listed)
        manifest = stage.run(newest)
    return Report(
        manifest=manifest,
        num_left=runner.num_left,
        num_encoded=runner.num_encoded,
        total_seconds=time.perf_counter() - start,
        codec=recipe.store.codec,
        seconds=clock.seconds,
        source=stage.listed,
        changes=stage.changes,
        tokens=runner.tokens,
        device=encoders.image.device.type,
        num_decoders=decoders.num_at_once,
        num_ignored_profiles=runner.num_ignored_profiles,
        num_low_quality=runner.num_low_quality,
    )


def newest_revision(root: Path) -> int:
    """Number of the newest revision of a store, complete or not; 0 if nothing is planned."""
    if not root.is_dir():
        return 0
    return max([*sealed_revisions(root), begun_revision(root)])


@dataclass
class Stage1:
    """One call of ``precompute`` with loaded encoders: finishes what is planned, then plans and encodes what is new.

    Args:
      runner: encodes; its source is the listed one as soon as there is one.
      say: called with notes.
      options: how a grown store treats changes.
      listed: the source, once it is listed.
      changes: of the source since the previous revision, if a revision was added.
    """

    root: Path
    recipe: PrecomputeRecipe
    source_path: SourcePaths
    runner: Runner
    progress: Progress
    say: Callable[[str], None]
    part: slice
    options: Options
    listed: Source | None = None
    changes: Comparison | None = None

    def run(self, newest: int) -> Manifest | None:
        """The manifest of the newest revision; None if other parts still have shards to encode.

        Args:
          newest: revision when the call began; a later one is another process's.
        """
        # Finish the revision that an earlier call, or another process, has planned.
        plan = self.unfinished_plan()
        manifest = self.finish(plan) if plan else None
        # Plan the next one, unless another process has since this call began, or a part has more to do.
        may_grow = not plan or (newest >= plan.revision and self.part == ALL_SHARDS)
        if may_grow and (plan := self.next_plan(newest)):
            manifest = self.finish(plan)
        if not manifest and not self.runner.num_left:
            manifest = read_manifest(self.root, sealed_revisions(self.root)[-1])
        return manifest

    def unfinished_plan(self) -> FrozenPlan | None:
        """The plan of a revision that is not complete, for which the source does not have to be listed.

        Raises: FingerprintMismatch: encoders or settings differ from the store's.
        """
        with self.runner.clock.measure(PLAN), alone(self.root, "plan", partial(self.progress, "others plan", 0, 1)):
            revision = newest_revision(self.root)
            if not revision:
                return None
            try:
                plan = newest_plan(self.root)
                if plan is None or plan.revision < revision:
                    raise StoreIncomplete(f"store '{self.root}': the plan of revision {revision} is missing.")
            except (DamageError, StoreIncomplete) as damage:
                if revision in sealed_revisions(self.root):
                    raise
                plan = self.plan_again(revision, damage)
            remove_empty_revisions(self.root)
        if plan.revision in sealed_revisions(self.root):
            revision = self.root / revision_prefix(plan.revision)
            if (self.root / LEASES).is_dir() or (revision / PLAN_FOLDER).is_dir():
                writer = StoreWriter(self.root, plan, own=())  # a process ended after it had written the manifest
                Leases(writer).sweep()
                seal_alone(writer, lambda missing: None, partial(self.progress, "others seal", 0, 1))
            return None
        self.check_fingerprint(plan, None)
        self.log_state(plan, "is resumed")
        return plan

    def plan_again(self, revision: int, damage: DamageError | StoreIncomplete) -> FrozenPlan:
        """Plan an unfinished revision again whose plan is damaged; write it if its shards were encoded by the same one.

        Raises: FingerprintMismatch: encoders or settings differ from the store's; DamageError: the plan is another one.
        """
        source = self.list_source()
        known = read_plan(self.root, revision - 1).spec if revision > 1 else None
        planner = self.planner(source, describe_store(self.recipe, source, self.runner.encoders, known=known))
        plan = planner.first() if revision == 1 else planner.next(self.options)[0]
        expected_hash = hash_of_damaged_plan(self.root, revision)
        if plan is None or (expected_hash and plan.hash != expected_hash):
            remove = f"remove the folder '{self.root / revision_prefix(revision)}'" if known else "use another --store"
            raise DamageError(
                f"{damage} It was planned again, and is not the plan that the shards were encoded by: the source, the "
                "recipe or the options have changed since, or another revision of them was meant. Nothing was changed. "
                f"Restore them and run the same command again; to give up what is encoded of it, {remove}."
            )
        shards = "its shards are kept" if expected_hash else "no intact record names a shard of it, so all are encoded"
        self.say(f"store '{self.root}': the damaged plan of revision {revision} was made again; {shards}.")
        return freeze_plan(self.root, plan, replace=True)

    def planner(self, source: Source, spec: StoreSpec) -> Planner:
        """What plans revisions of the store from a listed source."""
        return Planner(
            root=self.root,
            spec=spec,
            source=source,
            recipe=self.recipe,
            tokenizers=self.runner.encoders.tokenizers,
            decoders=self.runner.decoders,
            progress=self.progress,
            check=self.check,
        )

    def next_plan(self, newest: int) -> FrozenPlan | None:
        """Plan the first revision, or what has changed since the newest one; None if nothing has to be done.

        One process lists and plans while others wait, and then use its plan.

        Args:
          newest: as for ``run``.
        Raises: FingerprintMismatch: encoders or settings differ from the store's.
        """
        with self.runner.clock.measure(PLAN), alone(self.root, "plan", partial(self.progress, "others plan", 0, 1)):
            source = None if newest_revision(self.root) else self.list_source()
            known = newest_plan(self.root)
            if known and known.revision > newest:
                self.check_fingerprint(known, None)
                return None if known.revision in sealed_revisions(self.root) else known
            source = source or self.list_source()
            spec = describe_store(self.recipe, source, self.runner.encoders, known=known and known.spec)
            if known and not is_extension(known.spec, spec):
                check_fingerprint(self.root, known.spec, spec)
            planner = self.planner(source, spec)
            if known is None:
                plan = planner.plan_first()
            else:
                self.log_state(known, "was complete")
                plan, self.changes = planner.plan_next(self.options)
                if self.changes and 2 * self.changes.num_gone > (num_known := known.records.num_rows):
                    self.say(
                        f"{self.changes.num_gone:,} of the {plural(num_known, 'record')} of store '{self.root}' are "
                        "not in the source. If nothing was removed, check --source: keys begin at its folder, and "
                        "several sources keep their order."
                    )
        if plan:
            self.check_fingerprint(plan, source)
            self.log_state(plan, "is new")
        return plan

    def list_source(self) -> Source:
        """List the source, unless the caller has, and print notes on it."""
        source = self.listed or list_sources(
            self.source_path,
            self.recipe.source,
            self.recipe.companion_columns,
            needs_labels=self.recipe.needs_labels,
            progress=lambda done: self.progress("list", done, 0),
        )
        self.listed = source
        self.runner.source = source
        for note in source.notes:
            self.say(f"source '{source.name}': {note}")
        for warning in label_warnings(self.recipe, source):
            self.say(warning)
        check_apart(self.root, source)
        return source

    def check(self, plan: FrozenPlan) -> FrozenPlan:
        """Check the encoders on a sample of a plan before it is frozen.

        Returns: the plan with what was measured, and in float16 the captions that int8 would hurt.
        Raises: EncoderError.
        """
        if plan.before is None:
            plan = replace(plan, self_check=self.check_images(plan))
        with self.runner.clock.measure(CHECK):
            return check_quality(
                plan,
                self.runner.encoders,
                self.runner.decoders,
                self.runner.source,
                store=self.recipe.store,
                say=self.say,
                progress=lambda done, total: self.progress("quality", done, total),
            )

    def check_images(self, plan: FrozenPlan) -> SelfCheck | None:
        """Check the encoders of images before the first plan is frozen; None if the recipe wants no check.

        Raises: EncoderError.
        """
        if not self.recipe.vae.min_psnr:
            return None
        if not self.runner.encoders.image.has_decoder:
            self.say("self-check: the autoencoder has no decoder, so vae.min_psnr has no effect")
        with self.runner.clock.measure(CHECK):
            return check_encoders(
                plan,
                self.runner.encoders,
                self.runner.decoders,
                self.runner.source,
                min_psnr_db=self.recipe.vae.min_psnr,
                say=self.say,
                progress=lambda done: self.progress("self-check", done, NUM_IMAGES),
            )

    def check_fingerprint(self, plan: FrozenPlan, source: Source | None) -> None:
        """Raise FingerprintMismatch if other encoders or settings made a plan."""
        spec = describe_store(self.recipe, source, self.runner.encoders, known=plan.spec)
        check_fingerprint(self.root, plan.spec, spec)

    def finish(self, plan: FrozenPlan) -> Manifest | None:
        """Encode the missing shards of a revision and seal it; returns, raises: as ``Runner.complete``."""
        own = plan.layout.tasks()[self.part]
        # Processes without a part share all shards: only the one that seals checks their bytes.
        writer = StoreWriter(self.root, plan, own=() if self.part == ALL_SHARDS else own)
        return self.runner.complete(writer, own, section=self.recipe.source, progress=self.progress)

    def log_state(self, plan: FrozenPlan, state: str) -> None:
        """Log whether a plan is new, resumed or complete."""
        fingerprint = plan.spec.fingerprint[:16]
        LOG.info("store '%s': revision %d %s, fingerprint %s", self.root, plan.revision, state, fingerprint)
