"""What runs on the machines of a Ray cluster: an actor for each device that encodes, and tasks that decode for it.

A picture is decoded in a child of the process that runs the task (``decoders.py``), so that a hostile one costs itself
and not the task.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

import ray
import torch
from ray.exceptions import RaySystemError, WorkerCrashedError

from ...datasets.errors import LeanditError, RecordRejected, ResourceError, SourceError
from ...datasets.format.layout import LEASES
from ...datasets.format.schema import StoreSpec
from ...datasets.revisions.catalog import read_spec
from ..config import PrecomputeRecipe, SourceSection
from ..encoders.describe import describe_store
from ..encoders.vae import Encoders, load_encoders
from ..images.decoders import Decoded, Decoders, PicturePlace
from ..planning.opening import check_fingerprint
from ..progress.clock import StageClock
from ..sources.several import open_sources
from ..sources.source import OpenedSource
from .worker import Broken, EncodeRequest, Failed, WorkDone, Worker, outcome

PICTURES_A_TASK = 8  # a task costs Ray 1 to 2 ms, a picture of 256 px as much to decode
GATHER_SECONDS = 0.005  # for a task to fill
TRIES = 8  # of a task whose process or machine is lost
SEEN_SECONDS = 20.0  # a folder of a network may show a new file late


@dataclass(frozen=True)
class ActorJob:
    """What an actor is for.

    Args:
      root: the store, absolute.
      folder: that paths in the recipe are relative to.
      device: of the encoders, as torch names it on the actor's machine.
      num_threads: of torch; on a CPU another number makes other bits.
      num_at_once: pictures that are decoded for it at the same time.
    """

    recipe: PrecomputeRecipe
    root: Path
    folder: Path
    device: str
    num_threads: int
    num_at_once: int


class EncodingActor:
    """Encodes shards, and writes them into the store's folder itself."""

    def __init__(self, job: ActorJob) -> None:
        self._job = job

    @functools.cached_property
    def _encoders(self) -> Encoders:
        if self._job.folder.is_dir():
            os.chdir(self._job.folder)
        torch.set_num_threads(self._job.num_threads)
        return load_encoders(self._job.recipe, torch.device(self._job.device))

    def describe(self, probe: str, known: StoreSpec | None) -> StoreSpec | Failed | Broken:
        """As ``Engine.describe``."""

        def described() -> StoreSpec:
            self._check_folder(probe)
            return describe_store(self._job.recipe, None, self._encoders, known=known)

        return outcome(described)

    def encode(self, probe: str, request: EncodeRequest) -> Iterator[Any]:
        """Do what is asked for, telling of it; the last that is told is how it ended."""
        told: SimpleQueue[Any] = SimpleQueue()
        thread = threading.Thread(target=lambda: told.put(outcome(lambda: self._run_request(probe, request, told))))
        thread.start()
        while True:
            message = told.get()
            yield message
            if isinstance(message, WorkDone | Failed | Broken):
                return

    def _run_request(self, probe: str, request: EncodeRequest, told: SimpleQueue[Any]) -> WorkDone:
        root, recipe = self._job.root, self._job.recipe
        self._check_folder(probe)
        planned = read_spec(root, request.revision)
        check_fingerprint(root, planned, describe_store(recipe, None, self._encoders, known=planned))
        _open_here(request.source_paths, request.sources)
        with TaskDecoders(request.source_paths, request.sources, self._job.num_at_once) as decoders:
            worker = Worker(recipe, self._encoders, decoders, StageClock())
            return worker.run_request(request, root, decoders, told.put)

    def _check_folder(self, probe: str) -> None:
        """The store's folder is the one that the driver has.

        Raises: ResourceError: it is another one.
        """
        folder, end = self._job.root / LEASES, time.monotonic() + SEEN_SECONDS
        while not (folder.is_dir() and probe in os.listdir(folder)):
            if time.monotonic() > end:
                raise ResourceError(
                    f"store '{self._job.root}': machine '{os.uname().nodename}' does not see the folder that the "
                    "command sees. Needed a --store on a file system that all machines of the cluster share."
                )
            time.sleep(0.1)


@dataclass(frozen=True)
class _Wanted:
    """One picture that a thread waits for."""

    place: tuple[str, int, int]
    how: dict[str, Any]
    picture: Future[Decoded] = field(default_factory=Future)


class TaskDecoders:
    """Decodes in tasks of the cluster, several pictures in each; ``Origin`` and ``PictureDecoders`` at once.

    A context manager, with a thread that fills the tasks; at its end nobody may wait for a picture any more.

    Args:
      source_paths, sources: of the pictures, as an order has them; the tasks read them.
      num_at_once: pictures in flight, so the decoded ones that wait in the memory of the cluster.
    """

    def __init__(self, source_paths: Sequence[str], sources: Sequence[SourceSection], num_at_once: int) -> None:
        self._source, self.num_at_once = (source_paths, sources), num_at_once
        self._wanted: SimpleQueue[_Wanted | None] = SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._hand_out, name="leandit-tasks", daemon=True)

    def __enter__(self) -> TaskDecoders:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wanted.put(None)
        self._thread.join()

    def place(self, path: str, offset: int, num_bytes: int, *, stage: str) -> PicturePlace:
        """Where the picture lies; the task that decodes it finds the bytes."""
        return PicturePlace(cast(Path, path), offset, num_bytes)  # as it is: a Path would tidy the key of an object

    def picture(self, path: Path, offset: int, num_bytes: int, data: bytes | None = None, **how: Any) -> Decoded:
        """As ``Decoders.picture``."""
        wanted = _Wanted((str(path), offset, num_bytes), how)
        self._wanted.put(wanted)
        return wanted.picture.result()

    def _hand_out(self) -> None:
        while wanted := self._wanted.get():
            some = [wanted]
            with contextlib.suppress(Empty):
                while len(some) < PICTURES_A_TASK and (wanted := self._wanted.get(timeout=GATHER_SECONDS)):
                    some.append(wanted)
            if wanted is None:
                self._wanted.put(None)  # seen again, once these are handed out
            task = _decode.remote(*self._source, [(one.place, one.how) for one in some])
            task.future().add_done_callback(functools.partial(_give, some))


def _give(wanted: Sequence[_Wanted], done: Future[Any]) -> None:
    """Give each thread its picture, or raise there why there is none."""
    error = done.exception()
    if isinstance(error, WorkerCrashedError | RaySystemError):
        error = ResourceError(f"decoding tasks of the cluster were lost {TRIES} times: {error}. See 'ray status'.")
    found = [error] * len(wanted) if error else done.result()
    for one, picture in zip(wanted, found, strict=True):
        match picture:
            case Decoded():
                one.picture.set_result(picture)
            case Failed():
                one.picture.set_exception(picture.error)
            case (stage, reason, detail):
                one.picture.set_exception(RecordRejected(stage, reason, detail))
            case Broken():
                one.picture.set_exception(RuntimeError(picture.what))
            case _:
                one.picture.set_exception(picture)


@ray.remote(num_cpus=1, max_retries=TRIES, scheduling_strategy="SPREAD")
def _decode(source_paths: Any, settings: Any, wanted: Sequence[tuple[tuple[str, int, int], dict[str, Any]]]) -> Any:
    """Decode some pictures: each one, or (stage, reason, detail) of its reject, or what went wrong."""

    def decoded(place: tuple[str, int, int], how: dict[str, Any]) -> Any:
        source, decoders = _decoding_tools(tuple(source_paths), tuple(settings))
        try:
            return decoders.picture(*source.place(*place, stage="decode"), **how)
        except RecordRejected as reject:
            return reject.stage, reject.reason, reject.detail

    return [outcome(lambda place=place, how=how: decoded(place, how)) for place, how in wanted]


@functools.lru_cache(maxsize=1)
def _decoding_tools(paths: tuple[str, ...], settings: tuple[SourceSection, ...]) -> tuple[OpenedSource, Decoders]:
    """The source, and the one child of this process, for all tasks that it runs."""
    return _open_here(paths, settings), Decoders(1)


def _open_here(source_paths: Sequence[str], settings: Sequence[SourceSection]) -> OpenedSource:
    """Open sources that this machine must see as well.

    Raises: LeanditError: as ``open_sources``, with the name of the machine.
    """
    try:
        return open_sources(source_paths, settings)
    except (LeanditError, OSError) as error:
        kind = type(error) if isinstance(error, LeanditError) else SourceError
        where = f"machine '{os.uname().nodename}', which must see the source as all of the cluster"
        raise kind(f"{error} (on {where})") from error
