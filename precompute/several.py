"""Stage 1 for several stores of one source: the story of ``pipeline.py`` at several resolutions at once.

Every store is the one that its own command would have made, byte for byte: it has its own plan, shards, batches, leases
and seal. Shared is what costs: the listing, the encoders, the decoding of each picture (``lanes.py``), and the encoding
of each caption, where the stores hold the same ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..datasets.commits import Task
from ..datasets.errors import RecipeError
from ..datasets.frozen import FrozenPlan
from ..datasets.layout import NULL_PART, is_picture_task
from ..datasets.schema import Manifest
from ..datasets.writer import StoreWriter
from .clock import Progress
from .config import PrecomputeRecipe
from .decoder import Decoders
from .encoders import Encoders, load_encoders
from .growth import Options
from .here import Here
from .lanes import Lane, SharedDecoding, keep_in_step
from .leases import Leases
from .opening import check_apart, check_disk, needed_bytes
from .part import Part
from .picture_plan import num_threads
from .pipeline import Report, Stage1, plan_next, seal, take_up
from .rejects import RejectLimit, ledger_of
from .shard_encoder import ShardEncoder
from .shard_task import PackedShard
from .source_several import SourcePaths, list_sources
from .stages import Background, encode_captions
from .text_encoders import TokenCount


@dataclass(frozen=True)
class Target:
    """A store to be made, and by which recipe."""

    recipe: PrecomputeRecipe
    store_path: Path


@dataclass(frozen=True)
class SharedReport:
    """What a precompute of several stores did.

    Args:
      reports: of each store; the tokens are those that were computed for it.
      num_decoded: times that a picture was decoded, for all of them together.
    """

    reports: list[Report]
    num_decoded: int

    @property
    def num_encoded(self) -> int:
        """Pictures that went into the stores."""
        return sum(report.num_encoded for report in self.reports)


@dataclass
class Work:
    """One store while its revision is finished.

    Args:
      missing: tasks of ours that are not committed.
      limit: of rejects.
      tokens: computed for it.
    """

    stage: Stage1
    encoders: Encoders
    writer: StoreWriter
    missing: list[Task]
    limit: RejectLimit
    leases: Leases
    tokens: TokenCount = field(default_factory=TokenCount)

    @property
    def plan(self) -> FrozenPlan:
        """Of the revision."""
        return self.writer.plan

    def look(self) -> None:
        """See what is still missing of our share."""
        self.missing = self.writer.missing_tasks(self.stage.part.of(self.plan.layout.tasks()))

    def tasks(self, *, pictures: bool) -> list[Task]:
        """What is missing of the pictures, or of the captions."""
        return [task for task in self.missing if is_picture_task(task) == pictures]


def precompute_several(
    targets: Sequence[Target],
    *,
    source_path: SourcePaths,
    device: torch.device,
    progress: Progress,
    options: Options | None = None,
    new_revision: bool = False,
    part: Part | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> SharedReport:
    """Run every picture and caption of a source into several stores, decoding each picture once where that is possible.

    Args:
      targets: recipes that differ in ``images`` only, each with a store of its own.
      source_path, device, progress, options, new_revision, part, say: as of ``pipeline.precompute``, for each store.
    Raises: LeanditError: of the class that says what to mend; the stores then resume with the same command.
    """
    start = time.perf_counter()
    check_targets(targets)

    # Scan: list the source, load the encoders.
    recipe = targets[0].recipe
    source = list_sources(source_path, recipe.source, progress=lambda done: progress("list", done, 0))
    for note in source.notes:
        say(f"source '{source.name}': {note}")
    for target in targets:
        check_apart(target.store_path, source)
    encoders = load_encoders(recipe, device)
    with Decoders(num_threads()) as decoders:
        engines = [Here(target.recipe, encoders, decoders) for target in targets]
        stages = [
            Stage1(target.store_path, target.recipe, source, engine, decoders, progress, part or Part())
            for target, engine in zip(targets, engines, strict=True)
        ]

        # Plan: freeze all plans, or take up the newest ones that are there.
        begun = [take_up(stage, new_revision=new_revision) for stage in stages]

        # Encode what is missing of them, and seal them.
        first = [one.plan if one.is_ours else None for one in begun]
        manifests, tokens, num_decoded = finish_all(stages, encoders, first)

        # Grow: what the source says now makes the next revisions.
        grown = [
            plan_next(stage, one, options or Options())
            if one.was_there and (one.was_sealed or not part)
            else (None, None)
            for stage, one in zip(stages, begun, strict=True)
        ]
        later, more_tokens, more_decoded = finish_all(stages, encoders, [plan for plan, _ in grown])
    seconds = time.perf_counter() - start
    reports = [
        stage.report(
            later[i] if grown[i][0] else manifests[i], grown[i][1], tokens[i] + more_tokens[i], total_seconds=seconds
        )
        for i, stage in enumerate(stages)
    ]
    return SharedReport(reports, num_decoded + more_decoded)


def check_targets(targets: Sequence[Target]) -> None:
    """Refuse stores that would be in each other's way, and recipes that make the same pictures.

    Raises: RecipeError.
    """
    roots = [target.store_path.resolve() for target in targets]
    for i, root in enumerate(roots):
        if root in roots[:i]:
            raise RecipeError(f"--also: store '{targets[i].store_path}' is named twice; each resolution needs its own.")
        for j in (j for j, other in enumerate(roots) if other in root.parents):
            raise RecipeError(
                f"--also: store '{targets[i].store_path}' lies inside of store '{targets[j].store_path}', whose files "
                "it would be among. Needed folders of their own, beside each other."
            )
    for target in targets[1:]:
        images = target.recipe.images
        if images.exif_orientation != targets[0].recipe.images.exif_orientation:
            raise RecipeError("--also: images.exif_orientation differs; a picture is decoded once for all stores.")
        if not isinstance(images.buckets, str):
            raise RecipeError(
                "--also: images.buckets is a list of sizes, which no resolution changes. Use 'square', 'pixart' or "
                "'area', or one command for each list."
            )
        if target.recipe.model_copy(update={"images": targets[0].recipe.images}) != targets[0].recipe:
            raise RecipeError(
                "--also: the recipes differ in more than their images; needed the same encoders and source."
            )


def finish_all(
    stages: Sequence[Stage1], encoders: Encoders, plans: Sequence[FrozenPlan | None]
) -> tuple[list[Manifest | None], list[TokenCount], int]:
    """Encode what is missing of a revision of each store, and seal them.

    Args:
      plans: of the revisions; None where there is nothing to be done.
    Returns: of each store the manifest, None where there is none, and the tokens computed for it; times that a picture
      was decoded.
    """
    manifests: list[Manifest | None] = [None] * len(stages)
    tokens, num_decoded = [TokenCount()] * len(stages), 0
    with ExitStack() as held:
        works = {
            i: _begin(stage, encoders, plan, held)
            for i, (stage, plan) in enumerate(zip(stages, plans, strict=True))
            if plan
        }
        _check_disks(list(works.values()))
        while any(work.missing for work in works.values()):
            num_decoded += _encode(list(works.values()))
            for work in works.values():
                work.look()
            if waiting := [work for work in works.values() if work.missing]:
                waiting[0].leases.wait()  # for other coordinators
        for i, work in works.items():

            def again(damaged: list[Task], work: Work = work) -> None:
                nonlocal num_decoded
                work.missing = damaged
                while work.missing:
                    num_decoded += _encode([work])
                    work.missing = work.writer.missing_tasks(damaged)

            manifests[i], tokens[i] = seal(work.stage, work.writer, again), work.tokens
    return manifests, tokens, num_decoded


def _begin(stage: Stage1, encoders: Encoders, plan: FrozenPlan, held: ExitStack) -> Work:
    writer = StoreWriter(stage.root, plan, own=())  # looked at before the seal
    ledger = ledger_of(stage.recipe.source, writer)
    limit = RejectLimit(stage.recipe.source, ledger)
    work = Work(stage, encoders, writer, [], limit, held.enter_context(Leases(writer)))
    work.look()
    if work.missing:
        ledger.check()
    return work


def _check_disks(works: Sequence[Work]) -> None:
    """Refuse to start when a disk cannot hold what is missing of all stores that lie on it.

    Raises: ResourceError.
    """
    disks = [os.stat(work.writer.root).st_dev for work in works]
    needed = [needed_bytes(work.writer, work.missing) for work in works]
    for i, work in enumerate(works):
        beside = sum(size for disk, size in zip(disks[:i], needed[:i], strict=True) if disk == disks[i])
        check_disk(work.writer, work.missing, beside=beside)


def _encode(works: Sequence[Work]) -> int:
    """Encode what nobody else is encoding; returns how often a picture was decoded."""
    with ExitStack() as writing:
        backgrounds = [writing.enter_context(Background(work.writer, work.leases, work.stage.clock)) for work in works]
        for work, shard in _encode_captions(works):
            backgrounds[works.index(work)].commit(shard)
        pool = ThreadPoolExecutor(num_threads(), thread_name_prefix="leandit-decode")
        try:
            return _encode_pictures(works, backgrounds, pool)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _encode_captions(works: Sequence[Work]) -> Iterator[tuple[Work, PackedShard]]:
    """Encode shards of captions, each for all stores that miss the same one."""
    done, total = 0, sum(len(work.tasks(pictures=False)) for work in works)
    for number, work in enumerate(works):
        encoder = work.encoders.caption
        if encoder is None:
            return
        before = encoder.computed
        tasks = work.leases.take(work.tasks(pictures=False))
        for shard in encode_captions(work.plan, tasks, encoder, work.stage.clock):
            yield work, shard
            task = shard.part, shard.shard
            same = [one for one in works[number + 1 :] if task in one.missing and same_text(work.plan, one.plan, task)]
            copies = [one for one in same for _ in one.leases.take([task])]
            for other in copies:
                paths = [array.path for array in other.plan.layout.part_arrays(shard.part)]
                yield other, replace(shard, arrays=dict(zip(paths, shard.arrays.values(), strict=True)))
            done += 1 + len(copies)
            work.stage.progress("captions", done, total)
        work.tokens += encoder.computed - before


def same_text(plan: FrozenPlan, other: FrozenPlan, task: Task) -> bool:
    """A task of captions makes the same numbers in both plans: the same encoder, texts and places."""
    if (plan.spec.text, plan.spec.text_encoder) != (other.spec.text, other.spec.text_encoder):
        return False
    if task not in other.layout.tasks():
        return False
    shapes = [
        [(array.dtype, array.shape[1:], len(array.rows_of(task[1]))) for array in one.layout.part_arrays(task[0])]
        for one in (plan, other)
    ]
    if shapes[0] != shapes[1] or task[0] == NULL_PART:
        return shapes[0] == shapes[1]
    return _captions(plan, task) == _captions(other, task)


def _captions(plan: FrozenPlan, task: Task) -> tuple[list, list, list]:
    """Texts, lengths and places of the captions of a shard."""
    captions, start = plan.layout.captions_of(task[1]), plan.layout.rows_of(*task).start
    table = plan.own_captions.slice(captions.start, len(captions))
    places = plan.layout.offsets[captions.start : captions.stop] - start
    return table["text"].to_pylist(), table["num_tokens"].to_pylist(), places.tolist()


def _encode_pictures(works: Sequence[Work], backgrounds: Sequence[Background], pool: ThreadPoolExecutor) -> int:
    """Encode shards of latents of all stores, in step; returns how often a picture was decoded."""
    stage, tasks = works[0].stage, [work.tasks(pictures=True) for work in works]
    lanes = [Lane(work.plan, own, work.stage.clock) for work, own in zip(works, tasks, strict=True)]
    keep_in_step(lanes)
    decoding = SharedDecoding(lanes, stage.decoders, stage.source, pool)
    done, total = 0, sum(len(work.plan.layout.rows_of(*task)) for work in works for task in work.tasks(pictures=True))
    taken = [work.leases.take(own) for work, own in zip(works, tasks, strict=True)]

    def commit(number: int, shard: PackedShard) -> None:
        backgrounds[number].commit(shard)
        works[number].stage.num_encoded += len(shard.checksums)

    def progress(count: int) -> None:
        nonlocal done
        done += count
        stage.progress("pictures", done, total)

    with ExitStack() as encoding:
        shards = [
            encoding.enter_context(
                ShardEncoder(
                    work.plan, work.encoders.image, limit=work.limit, clock=work.stage.clock, progress=progress
                )
            )
            for work in works
        ]
        for lane, batch, pictures in decoding.batches(taken):
            number = lanes.index(lane)
            shard = shards[number].add(batch, pictures)
            if shard:
                commit(number, shard)
        for number, encoder in enumerate(shards):
            for shard in encoder.rest():
                commit(number, shard)
    return decoding.num_decoded
