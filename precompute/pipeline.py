"""Stage 1 as a story: list the source, load the encoders, freeze the plan, encode what is missing, seal; then grow.

Running the same command again goes on where the last one stopped: a shard with a valid commit record is never made
twice. A source that has changed since makes a new revision, in which only what changed is encoded. What overlaps with
what stands in ``stages.py``, what may be taken up in ``opening.py``, what has changed in ``compare.py``.

Any number of processes may run the same command at the same time, on one machine or on many that share the store's
folder: one plans, all encode (``leases.py``), each shard once, and whoever is last seals. With a part, a process takes
its own share of the shards only, and leaves the seal to whoever finds all of them there. Where the shards are encoded
is the engine's matter (``engine.py``): here, or by other processes that this one starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..datasets.disk.strays import sweep_strays
from ..datasets.errors import SourceError
from ..datasets.format.class_names import ClassNames
from ..datasets.format.schema import Manifest, StoreSpec
from ..datasets.revisions.commits import Task
from ..datasets.revisions.plan import FrozenPlan
from ..datasets.revisions.writer import StoreWriter
from .config import PrecomputeRecipe
from .encoders.text import TokenCount
from .encoders.vae import load_encoders
from .engines.engine import Engine
from .engines.local import LocalEngine
from .images.decoders import Decoders
from .planning.compare import Comparison, Options
from .planning.opening import Planner, check_apart, check_disk, check_fingerprint, is_sealed, newest_plan
from .planning.pictures import num_threads
from .progress.clock import Progress, StageClock
from .progress.rejects import ledger_of
from .progress.tally import Tally
from .progress.verdict import Power, StageTime, stage_times
from .sharing.leases import Leases, alone, seal_alone
from .sharing.part import Part
from .sources.files.ignored import Ignored
from .sources.several import SourcePaths, list_sources
from .sources.source import Source


@dataclass
class Report:
    """What a precompute did.

    Args:
      manifest: of the newest revision; None where only a part was asked for, and others have not finished theirs.
      num_left: shards that are left to others.
      num_encoded: pictures encoded by this call; 0 where the store was complete already.
      total_seconds: of the whole call.
      codec: of the store.
      seconds: of each stage, summed over threads (reading, decoding and writing run beside the encoder).
      ignored: files and folders of the source that were left out.
      classes: of the source, by name.
      changes: of the source since the revision before, where a revision was added.
      tokens: that went through the text encoder.
      power: that it had.
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
        """Seconds and rate of each stage."""
        return stage_times(self.seconds, self.num_encoded, self.power)


@dataclass
class Stage1:
    """What the stations share: the store, the source, the engine, and where progress is told.

    Args:
      decoders: of the pictures' headers.
    """

    root: Path
    recipe: PrecomputeRecipe
    source: Source
    engine: Engine
    decoders: Decoders
    progress: Progress
    part: Part
    clock: StageClock = field(default_factory=StageClock)
    num_encoded: int = 0
    num_left: int = 0

    def describe(self, known: StoreSpec | None = None) -> StoreSpec:
        """What the store will say of itself, as ``Engine.describe``."""
        return self.engine.describe(self.source, known)

    def report(
        self, manifest: Manifest | None, changes: Comparison | None, tokens: TokenCount, *, total_seconds: float
    ) -> Report:
        """What was done."""
        return Report(
            manifest=manifest,
            num_left=self.num_left,
            num_encoded=self.num_encoded,
            total_seconds=total_seconds,
            codec=self.recipe.store.codec,
            seconds=self.clock.seconds,
            ignored=self.source.ignored,
            classes=ClassNames(self.source.classes, self.source.class_names),
            changes=changes,
            tokens=tokens,
            power=self.engine.power,
        )


@dataclass(frozen=True)
class OpenedStore:
    """Where a store stands before anything is encoded.

    Args:
      plan: of the revision to finish.
      planner: of the revision after it.
      matches_plan: these encoders and settings are the plan's; else it is complete, and the next one is encoded anew.
      existed: it was planned before this call.
      was_sealed: it was complete before this call.
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
    new_revision: bool = False,
    part: Part | None = None,
    engine: Engine | None = None,
    listed: Source | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run every picture and caption of a source through the encoders, exactly once, into a store.

    Args:
      source_path: a folder, a file or a URL; or several.
      options: what shall become of records that are gone or rejected.
      new_revision: where the store was made with other encoders or settings, encode all anew as its next revision.
      device: of the encoders, where no engine is given.
      part: encode only this share of the shards; None for all that nobody else is encoding.
      engine: where the shards are encoded; None for this process.
      listed: the source, where that has been done.
      say: called with what was guessed about the source, before anything is encoded.
    Raises: LeanditError: of the class that says what to mend; the store then resumes with the same command.
    """
    start, clock = time.perf_counter(), StageClock()
    manifest, changes = None, None

    # Scan: list the source, load the encoders.
    source = listed or list_sources(source_path, recipe.source, progress=lambda done: progress("list", done, 0))
    for note in source.notes:
        say(f"source '{source.name}': {note}")
    for warning in recipe.images.warnings():
        say(warning)
    check_apart(store_path, source)
    with clock.measure("load"):
        encoders = None if engine else load_encoders(recipe, device)
    with Decoders(num_threads()) as decoders:
        engine = LocalEngine(recipe, encoders, decoders) if encoders else engine
        assert engine, "encoders are loaded where there is no engine"
        stage = Stage1(store_path, recipe, source, engine, decoders, progress, part or Part(), clock)

        # Plan: freeze it, or take up the newest one that is there.
        opened = open_store(stage, new_revision=new_revision)

        # Encode what is missing of it, and seal it.
        if opened.matches_plan:
            manifest = finish(stage, opened.plan)

        # Grow: what the source says now makes the next revision.
        if opened.existed and (opened.was_sealed or not part):
            following, changes = plan_next(stage, opened, options or Options())
            if following:
                manifest = finish(stage, following)
    return stage.report(manifest, changes, engine.tokens, total_seconds=time.perf_counter() - start)


def open_store(stage: Stage1, *, new_revision: bool) -> OpenedStore:
    """Take up the newest plan of the store, or plan its first revision; one process does, others wait for it.

    Raises: FingerprintMismatch: other encoders or settings made it, and nobody asked for a new revision.
    """
    root = stage.root
    with stage.clock.measure("plan"), alone(root, "plan", lambda: stage.progress("others plan", 0, 1)):
        found = newest_plan(root)
        spec = stage.describe(found and found.spec)
        if found and new_revision and spec.fingerprint != found.spec.fingerprint:
            spec = stage.describe()  # other settings may fit another batch
        tokenizer = stage.engine.tokenizer
        planner = Planner(root, spec, stage.source, stage.recipe, tokenizer, stage.decoders, stage.progress)
        if found and not (new_revision and is_sealed(root, found)):
            check_fingerprint(root, found.spec, spec)
        plan = found or planner.plan_first()
        if not found:  # others may have planned it first, with the batch that fits them
            spec = stage.describe(plan.spec)
            check_fingerprint(root, plan.spec, spec)
        was_sealed = bool(found) and is_sealed(root, plan)
    return OpenedStore(plan, planner, plan.spec.fingerprint == spec.fingerprint, bool(found), was_sealed)


def plan_next(stage: Stage1, opened: OpenedStore, options: Options) -> tuple[FrozenPlan | None, Comparison | None]:
    """Plan the revision after one that is complete, or take up the plan of others, who were faster.

    Returns: as ``Planner.plan_next``.
    """
    with stage.clock.measure("plan"), alone(stage.root, "plan", lambda: stage.progress("others plan", 0, 1)):
        following, changes = opened.planner.plan_next(options)
    if following:
        check_fingerprint(stage.root, following.spec, stage.describe(following.spec))
    return following, changes


def finish(stage: Stage1, plan: FrozenPlan) -> Manifest | None:
    """Encode what is missing of a revision, and seal it.

    Returns: its manifest; None where other parts are missing.
    """
    own = stage.part.of(plan.layout.tasks())
    # Processes without a part share all shards: the one that seals looks at their bytes, not each of them.
    writer = StoreWriter(stage.root, plan, own=() if stage.part == Part() else own)
    missing = writer.missing_tasks(own)
    if missing:
        ledger_of(stage.recipe.source, writer).check()
    check_disk(writer, missing)
    Leases(writer).sweep()  # of a process that died after its last shard

    def encode(missing: list[Task]) -> None:
        while missing:
            tally = Tally(plan, missing, ledger_of(stage.recipe.source, writer), stage.progress)
            stage.engine.encode(writer, missing, stage.source, tally=tally, clock=stage.clock)
            stage.num_encoded += tally.num_pictures
            sweep_strays(stage.root)  # of workers that were lost
            missing = writer.missing_tasks(missing)

    encode(missing)
    return seal(stage, writer, encode)


def seal(stage: Stage1, writer: StoreWriter, encode: Callable[[list[Task]], None]) -> Manifest | None:
    """Seal a revision if nothing of it is missing.

    Args:
      encode: as of ``seal_alone``.
    Returns: its manifest; None where other parts are missing.
    Raises: SourceError: not one picture of the first revision could be encoded, or all processes together have rejected
      too many.
    """
    plan, stage.num_left = writer.plan, len(writer.missing_tasks())
    if not writer.is_sealed:
        ledger_of(stage.recipe.source, writer).check()
    if stage.num_left:
        return None
    if not writer.num_stored and not plan.stack:
        raise SourceError(
            f"source '{stage.source.name}': not one of {plan.records.num_rows} pictures could be encoded, so the store "
            f"is not sealed. Look at one of them; the reasons are in '{stage.root / 'commits'}'."
        )
    return seal_alone(writer, encode, lambda: stage.progress("others seal", 0, 1))
