"""The job of a process that encodes for another: the ordinary precompute on one device, or help with its shards."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Never, TypeVar

import torch

from ...datasets.errors import LeanditError, ResourceError
from .. import pipeline
from ..config import PrecomputeRecipe
from ..images.decoders import Decoders
from ..planning.compare import Options
from ..planning.opening import check_fingerprint, has_unfinished, look_for_plan
from ..progress.clock import Progress
from ..progress.tally import Work
from ..shards.worker import Worker
from ..sharing.leases import LOOK_SECONDS
from ..sharing.part import Part
from ..sources.several import open_sources
from ..sources.source import Source
from .told import level_told, told_to

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """A precompute; picklable. The other fields are arguments of ``pipeline.precompute``.

    Args:
      device: of the encoders, as torch names it.
      num_decoders: pictures that are decoded concurrently while others encode on the same machine.
      num_threads: of torch; on a CPU the number changes the bits.
      leads: it lists, plans and lets the store grow; others only encode what is planned.
      folder: working directory, for relative paths in the recipe.
      level_told: least level of what it tells the logger that the starting process hears.
    """

    recipe: PrecomputeRecipe
    source_path: tuple[str, ...]
    store_path: Path
    options: Options
    part: Part | None = None
    device: str = "cpu"
    num_decoders: int = 1
    num_threads: int = field(default_factory=torch.get_num_threads)
    leads: bool = True
    folder: Path = field(default_factory=Path.cwd)
    level_told: int = field(default_factory=level_told)

    def precompute(
        self,
        progress: Progress,
        say: Callable[[str], None],
        *,
        worker: Worker | None = None,
        listed: Source | None = None,
    ) -> pipeline.Report:
        """As ``pipeline.precompute``, in this process."""
        return pipeline.precompute(
            self.recipe,
            source_path=self.source_path,
            store_path=self.store_path,
            device=torch.device(self.device),
            progress=progress,
            options=self.options,
            part=self.part,
            worker=worker,
            listed=listed,
            say=say,
        )


@dataclass(frozen=True)
class Failed:
    """An error that the user can fix, and that all processes would meet."""

    error: Exception


@dataclass(frozen=True)
class Broken:
    """An error that may be the device's or the machine's, in words."""

    what: str


def outcome(do: Callable[[], T]) -> T | Failed | Broken:
    """Result of a function, or its error in a form that can be sent."""
    try:
        return do()
    except MemoryError:
        return Failed(ResourceError("out of memory. Use a smaller batch (see --set)"))
    except (LeanditError, OSError) as error:  # a full or a read-only disk
        return Failed(error)
    except Exception as error:  # noqa: BLE001 a broken device may raise anything
        return Broken(f"{type(error).__name__}: {error}")


def work(job: Job, send: Callable[[Any], None]) -> pipeline.Report:
    """Do a job in a process of its own.

    Args:
      send: called with the ``Work`` so far, (stage, done, total) of the progress, notes, and what the logger is told.
    Raises: as ``precompute``.
    """
    send(Work())  # it has begun
    if job.folder.is_dir():
        os.chdir(job.folder)
    torch.set_num_threads(job.num_threads)
    with told_to(send, job.level_told):
        return _work(job, send)


def _work(job: Job, send: Callable[[Any], None]) -> pipeline.Report:
    worker = pipeline.load_worker(job.recipe, torch.device(job.device), job.num_decoders)
    signal.signal(signal.SIGTERM, _unwind)  # from here on; during an import it would look like a bug

    def progress(*what: Any) -> None:
        send(worker.snapshot())
        send(what)

    if not job.leads:
        help_others(job, worker, progress)
    report = job.precompute(progress, send, worker=worker)
    send(worker.snapshot())
    return replace(report, changes=report.changes and report.changes.counts())


def help_others(job: Job, worker: Worker, progress: Progress) -> Never:
    """Encode shards of each revision that another process plans, until this process is ended; lists nothing.

    Raises: as ``precompute``.
    """
    root, helped = job.store_path, 0
    with Decoders(job.num_decoders) as decoders:
        while True:
            plan = look_for_plan(root) if has_unfinished(root, after=helped) else None
            if plan is None:
                time.sleep(LOOK_SECONDS)
                continue
            source = open_sources(job.source_path, job.recipe.source, job.recipe.picture_columns)
            stage = pipeline.Stage1(root, job.recipe, source, worker, decoders, progress, job.part or Part())
            check_fingerprint(root, plan.spec, stage.describe(None, plan.spec))
            pipeline.finish(stage, plan)
            helped = plan.revision


def _unwind(*_: object) -> Never:
    """End, and release the leases."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)
