"""Code that runs on a Ray cluster: an actor for each encoding device, and tasks that decode pictures for it.

Each task decodes in a child process (``decoders.py``), so a hostile picture does not kill the task.
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
    """The job of an actor.

    Args:
      root: the store, absolute.
      folder: working directory, for relative paths in the recipe.
      device: of the encoders, as torch names it on the actor's machine.
      num_threads: of torch; on a CPU the number changes the bits.
      num_at_once: pictures that are decoded for it concurrently.
    """

    recipe: PrecomputeRecipe
    root: Path
    folder: Path
    device: str
    num_threads: int
    num_at_once: int


class EncodingActor:
    """Encodes shards and writes them into the store's folder."""

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
        """Handle a request; yields events, and the outcome last."""
        events: SimpleQueue[Any] = SimpleQueue()
        thread = threading.Thread(target=lambda: events.put(outcome(lambda: self._run_request(probe, request, events))))
        thread.start()
        while True:
            message = events.get()
            yield message
            if isinstance(message, WorkDone | Failed | Broken):
                return

    def _run_request(self, probe: str, request: EncodeRequest, events: SimpleQueue[Any]) -> WorkDone:
        root, recipe = self._job.root, self._job.recipe
        self._check_folder(probe)
        planned = read_spec(root, request.revision)
        check_fingerprint(root, planned, describe_store(recipe, None, self._encoders, known=planned))
        _open_on_this_machine(request.source_paths, request.sources)
        with TaskDecoders(request.source_paths, request.sources, self._job.num_at_once) as decoders:
            worker = Worker(recipe, self._encoders, decoders, StageClock())
            return worker.run_request(request, root, decoders, events.put)

    def _check_folder(self, probe: str) -> None:
        """Check that the actor sees the driver's store folder.

        Raises: ResourceError: it does not.
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
class _PictureRequest:
    """A picture that a thread waits for."""

    place: tuple[str, int, int]
    how: dict[str, Any]
    picture: Future[Decoded] = field(default_factory=Future)


class TaskDecoders:
    """Decodes several pictures in each cluster task; implements ``Origin`` and ``PictureDecoders``.

    A context manager with a thread that fills the tasks; no thread may wait for a picture when it exits.

    Args:
      source_paths, sources: of the pictures, as in a request; the tasks read them.
      num_at_once: pictures in flight, which bounds the cluster memory that decoded pictures take.
    """

    def __init__(self, source_paths: Sequence[str], sources: Sequence[SourceSection], num_at_once: int) -> None:
        self._source, self.num_at_once = (source_paths, sources), num_at_once
        self._wanted: SimpleQueue[_PictureRequest | None] = SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._hand_out, name="leandit-tasks", daemon=True)

    def __enter__(self) -> TaskDecoders:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wanted.put(None)
        self._thread.join()

    def place(self, path: str, offset: int, num_bytes: int, *, stage: str) -> PicturePlace:
        """The place of a picture; the decoding task resolves it."""
        return PicturePlace(cast(Path, path), offset, num_bytes)  # a str: Path would normalize the key of an object

    def picture(self, path: Path, offset: int, num_bytes: int, data: bytes | None = None, **how: Any) -> Decoded:
        """As ``Decoders.picture``."""
        wanted = _PictureRequest((str(path), offset, num_bytes), how)
        self._wanted.put(wanted)
        return wanted.picture.result()

    def _hand_out(self) -> None:
        while wanted := self._wanted.get():
            some = [wanted]
            with contextlib.suppress(Empty):
                while len(some) < PICTURES_A_TASK and (wanted := self._wanted.get(timeout=GATHER_SECONDS)):
                    some.append(wanted)
            if wanted is None:
                self._wanted.put(None)  # handled after these
            task = _decode.remote(*self._source, [(one.place, one.how) for one in some])
            task.future().add_done_callback(functools.partial(_deliver, some))


def _deliver(wanted: Sequence[_PictureRequest], done: Future[Any]) -> None:
    """Deliver each thread its picture, or the error."""
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
    """Decode pictures; each result is a picture, (stage, reason, detail) of its reject, or an error."""

    def decoded(place: tuple[str, int, int], how: dict[str, Any]) -> Any:
        source, decoders = _source_and_decoders(tuple(source_paths), tuple(settings))
        try:
            return decoders.picture(*source.place(*place, stage="decode"), **how)
        except RecordRejected as reject:
            return reject.stage, reject.reason, reject.detail

    return [outcome(lambda place=place, how=how: decoded(place, how)) for place, how in wanted]


@functools.lru_cache(maxsize=1)
def _source_and_decoders(paths: tuple[str, ...], settings: tuple[SourceSection, ...]) -> tuple[OpenedSource, Decoders]:
    """The source and the single decoder child of this process, for all its tasks."""
    return _open_on_this_machine(paths, settings), Decoders(1)


def _open_on_this_machine(source_paths: Sequence[str], settings: Sequence[SourceSection]) -> OpenedSource:
    """Open sources on this machine.

    Raises: LeanditError: as ``open_sources``, with the name of the machine.
    """
    try:
        return open_sources(source_paths, settings)
    except (LeanditError, OSError) as error:
        kind = type(error) if isinstance(error, LeanditError) else SourceError
        where = f"machine '{os.uname().nodename}', which must see the source as all of the cluster"
        raise kind(f"{error} (on {where})") from error
