"""Stage 1 as a story: list the source, load the encoders, freeze the plan, encode what is missing, seal; then grow.

Running the same command again goes on where the last one stopped: a shard with a valid commit record is never made
twice. A source that has changed since makes a new revision, in which only what changed is encoded. What overlaps with
what stands in ``stages.py``, what may be taken up in ``opening.py``, what has changed in ``growth.py``.

Any number of processes may run the same command at the same time, on one machine or on many that share the store's
folder: one plans, all encode (``leases.py``), each shard once, and whoever is last seals. With a part, a process takes
its own share of the shards only, and leaves the seal to whoever finds all of them there. Where the shards are encoded
is the engine's matter (``engines.py``): here, or by other processes that this one starts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .. import __version__
from ..datasets.buckets import bucket_name, resize_filter
from ..datasets.commits import Task
from ..datasets.errors import RecipeError, SourceError
from ..datasets.frozen import FrozenPlan
from ..datasets.schema import FORMAT_VERSION, ImageSpec, Manifest, StoreSpec
from ..datasets.writer import StoreWriter
from .config import PrecomputeRecipe
from .decoder import Decoders
from .encoders import Encoders, load_encoders
from .engines import Engine
from .forwards import largest_batch
from .growth import Comparison, Options
from .images import ADM_FILTER, COLOUR
from .leases import alone
from .model_files import library_majors
from .opening import Planner, check_disk, check_fingerprint, is_sealed, newest_plan
from .part import Part
from .plan import num_threads
from .sources import Source, list_source
from .stages import Progress, StageClock
from .tally import Tally
from .text_encoders import CaptionTokenizer, TokenCount
from .verdict import StageTime, stage_times
from .worker import Worker


@dataclass
class Report:
    """What a precompute did.

    Args:
      manifest: of the newest revision; None where only a part was asked for, and others have not finished theirs.
      num_left: shards that are left to others.
      num_encoded: pictures encoded by this call; 0 where the store was complete already.
      total_seconds: of the whole call.
      seconds: of each stage, summed over threads (reading, decoding and writing run beside the encoder).
      num_ignored: files of the source that are no pictures by their name.
      changes: of the source since the revision before, where a revision was added.
      tokens: that went through the text encoder.
      num_threads: that read and decode.
      device: of the encoders, as "cpu" or "cuda".
    """

    manifest: Manifest | None
    num_left: int
    num_encoded: int
    total_seconds: float
    seconds: dict[str, float]
    num_ignored: int
    changes: Comparison | None = None
    tokens: TokenCount = field(default_factory=TokenCount)
    num_threads: int = 1
    device: str = "cpu"

    @property
    def times(self) -> list[StageTime]:
        """Seconds and rate of each stage."""
        return stage_times(self.seconds, self.num_encoded, self.num_threads)


@dataclass
class Stage1:
    """What the stations share: the store, the source, the engine, and where progress is told."""

    root: Path
    recipe: PrecomputeRecipe
    source: Source
    engine: Engine
    progress: Progress
    part: Part
    clock: StageClock = field(default_factory=StageClock)
    num_encoded: int = 0
    num_left: int = 0


class Here:
    """The engine of one device: this process.

    Args:
      decoders: of the pictures.
    """

    def __init__(self, recipe: PrecomputeRecipe, encoders: Encoders, decoders: Decoders) -> None:
        self._recipe, self._encoders, self._decoders = recipe, encoders, decoders
        self._before = encoders.caption.computed if encoders.caption else TokenCount()

    @property
    def tokenizer(self) -> CaptionTokenizer | None:
        """As ``Engine.tokenizer``."""
        return self._encoders.tokenizer

    @property
    def tokens(self) -> TokenCount:
        """As ``Engine.tokens``."""
        caption = self._encoders.caption
        return caption.computed - self._before if caption else TokenCount()

    def describe(self, source: Source, known: StoreSpec | None = None) -> StoreSpec:
        """As ``Engine.describe``."""
        return describe_store(self._recipe, source, self._encoders, known=known)

    def encode(
        self, writer: StoreWriter, missing: Sequence[Task], source: Source, *, tally: Tally, clock: StageClock
    ) -> None:
        """As ``Engine.encode``."""
        worker = Worker(self._recipe, self._encoders, self._decoders, clock)
        num_rejected = writer.num_rejected
        worker.encode(writer, missing, source, num_rejected=num_rejected, tell=lambda event: tally.hear("", event))


def precompute(
    recipe: PrecomputeRecipe,
    *,
    source_path: Path | str,
    store_path: Path,
    device: torch.device,
    progress: Progress,
    options: Options | None = None,
    new_revision: bool = False,
    part: Part | None = None,
    engine: Engine | None = None,
) -> Report:
    """Run every picture and caption of a source through the encoders, exactly once, into a store.

    Args:
      source_path: a folder, a file or a URL.
      options: what shall become of records that are gone or rejected.
      new_revision: where the store was made with other encoders or settings, encode all anew as its next revision.
      device: of the encoders, where no engine is given.
      part: encode only this share of the shards; None for all that nobody else is encoding.
      engine: where the shards are encoded; None for this process.
    Raises: LeanditError: of the class that says what to mend; the store then resumes with the same command.
    """
    start, clock = time.perf_counter(), StageClock()
    manifest, changes = None, None

    # Scan: list the source, load the encoders.
    source = list_source(source_path, recipe.source.kind, progress=lambda done: progress("list", done, 0))
    with clock.measure("load"):
        encoders = None if engine else load_encoders(recipe, device)
    with Decoders(num_threads()) as decoders:
        engine = Here(recipe, encoders, decoders) if encoders else engine
        assert engine, "encoders are loaded where there is no engine"
        stage = Stage1(store_path, recipe, source, engine, progress, part or Part(), clock)

        # Plan: freeze it, or take up the newest one that is there.
        with stage.clock.measure("plan"), alone(store_path, "plan", lambda: progress("others plan", 0, 1)):
            found = newest_plan(store_path)
            spec = engine.describe(source, found and found.spec)
            if found and new_revision and spec.fingerprint != found.spec.fingerprint:
                spec = engine.describe(source)  # other settings may fit another batch
            planner = Planner(store_path, spec, source, recipe, engine.tokenizer, decoders, progress)
            if found and not (new_revision and is_sealed(store_path, found)):
                check_fingerprint(store_path, found.spec, spec)
            plan = found or planner.plan_first()
            if not found:  # others may have planned it first, with the batch that fits them
                spec = engine.describe(source, plan.spec)
                check_fingerprint(store_path, plan.spec, spec)
            was_sealed = bool(found) and is_sealed(store_path, plan)

        # Encode what is missing of it, and seal it.
        if plan.spec.fingerprint == spec.fingerprint:
            manifest = finish(stage, plan)

        # Grow: what the source says now makes the next revision.
        if found and (was_sealed or not part):
            with stage.clock.measure("plan"), alone(store_path, "plan", lambda: progress("others plan", 0, 1)):
                following, changes = planner.plan_next(options or Options())
            if following:  # perhaps the plan of others, who were faster
                here = engine.describe(source, following.spec)
                check_fingerprint(store_path, following.spec, here)
                manifest = finish(stage, following)
    seconds = time.perf_counter() - start
    return Report(
        manifest=manifest,
        num_left=stage.num_left,
        num_encoded=stage.num_encoded,
        total_seconds=seconds,
        seconds=stage.clock.seconds,
        num_ignored=source.num_ignored,
        changes=changes,
        tokens=engine.tokens,
        num_threads=num_threads(),
        device=device.type,
    )


def finish(stage: Stage1, plan: FrozenPlan) -> Manifest | None:
    """Encode what is missing of a revision, and seal it.

    Returns: its manifest; None where other parts are missing.
    """
    writer = StoreWriter(stage.root, plan)
    mine = set(stage.part.of(plan.layout.tasks()))
    missing = [task for task in writer.missing_tasks() if task in mine]
    check_disk(writer, missing)
    if missing:
        tally = Tally(plan, missing, stage.recipe.source, writer.num_rejected, stage.progress)
        stage.engine.encode(writer, missing, stage.source, tally=tally, clock=stage.clock)
        stage.num_encoded += tally.num_pictures
    stage.num_left = len(writer.missing_tasks())
    if stage.num_left:
        return None
    if not writer.num_stored and not plan.stack:
        raise SourceError(
            f"source '{stage.source.name}': not one of {plan.records.num_rows} pictures could be encoded, so the store "
            f"is not sealed. Look at one of them; the reasons are in '{stage.root / 'commits'}'."
        )
    return writer.seal()


def describe_store(
    recipe: PrecomputeRecipe, source: Source | None, encoders: Encoders, *, known: StoreSpec | None = None
) -> StoreSpec:
    """What the store will say of itself, with its fingerprint.

    Args:
      source: whose classes it names; None where nobody asks for them.
      known: what it says already; with vae.batch_size = 0, its batch size is kept, else the largest is found.
    Raises: RecipeError: a bucket does not fit the VAE's downscale. ResourceError: not one picture fits the device.
    """
    images, table = recipe.images, recipe.images.table
    downscale, batch_size = encoders.image.downscale, recipe.vae.batch_size
    for _, height_px, width_px in table:
        if height_px % downscale or width_px % downscale:
            raise RecipeError(
                f"bucket '{bucket_name(height_px, width_px)}': the VAE makes one latent of {downscale} px, so "
                f"both sides must be multiples of {downscale}. Use another resolution, table or VAE."
            )
    text_dtype = recipe.store.dtype if recipe.store.text_dtype == "auto" else recipe.store.text_dtype
    if not batch_size and known:
        batch_size = known.latent.batch_size
    elif not batch_size:  # one number for all buckets: what fits the largest
        _, height_px, width_px = max(table, key=lambda row: (row[1] * row[2], row))
        batch_size = largest_batch(encoders.image, height_px, width_px)
    latent = encoders.image.latent_spec(recipe.vae, recipe.store.dtype, batch_size=batch_size)
    return StoreSpec(
        format_version=FORMAT_VERSION,
        leandit_version=__version__,
        fingerprint="",
        images=ImageSpec(
            resolution_px=images.resolution,
            crop=images.crop,
            buckets=[bucket_name(height_px, width_px) for _, height_px, width_px in table],
            resize_filter=ADM_FILTER if images.crop == "adm" else resize_filter(images.buckets, images.resolution),
            colour=COLOUR,
            libraries=library_majors("pillow"),
        ),
        latent=latent,
        text=encoders.caption and encoders.caption.text_spec(recipe.text, text_dtype),
        vae=encoders.image.identity,
        text_encoder=encoders.caption and encoders.caption.identity,
        classes=source and source.classes,
        shard_mib=recipe.store.shard_mib,
        codec=recipe.store.codec,
        recipe=recipe.model_dump(),
    ).with_fingerprint()
