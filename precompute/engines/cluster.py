"""The engine of a running Ray cluster: an actor for each GPU, decoding on the CPUs of all machines.

This process lists, plans and seals. The actors share the shards by leases and write them into the store's folder, which
all machines must share; so ordinary processes may work on the same store. A lost actor is replaced while the others
continue; only a shard that kills actor after actor ends the run. All actors end with this process
(``cluster_actor.py``).
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...datasets.errors import RecipeError, ResourceError
from ...datasets.format.layout import LEASES
from ...datasets.format.schema import StoreSpec
from ...datasets.revisions.commits import Task
from ...datasets.revisions.writer import StoreWriter
from ..config import PrecomputeRecipe
from ..encoders.text import CaptionTokenizer, TokenCount
from ..progress.clock import StageClock
from ..progress.tally import Committed, Tally
from ..progress.verdict import Power
from ..sharing.leases import Lease
from ..sources.several import SourcePaths, paths_of
from ..sources.source import Source
from .worker import Broken, EncodeRequest, Failed, WorkDone

MAX_DEATHS = 5  # of actors that held the same shard
MAX_LOSSES = 10  # of actors in a row, without a commit in between
MAX_IN_FLIGHT = 512  # pictures of one actor
LOOK_SECONDS = 0.5  # between two checks whether to stop
GRACE_SECONDS = 10.0  # for the other actors to finish, once one has found everything committed
SILENCE_SECONDS = 60.0
CONNECT_SECONDS = 20.0


@dataclass
class _Actor:
    """An actor and the stream of its messages."""

    name: str
    handle: Any
    messages: Any = None


class Cluster:
    """The actors of one run; a context manager that connects and disconnects.

    Args:
      root: the store, in a folder that all machines share.
      sources: paths that all machines see, or URLs.
      address: of the cluster, as ``ray.init`` takes it.
      devices: "auto": a GPU each, or without GPUs half the CPUs of each machine; "cuda"; "cpu"; or "cpu,cpu" for two.
      num_threads: of torch in each actor.
      say: called with a message for each loss.
    """

    def __init__(
        self,
        recipe: PrecomputeRecipe,
        root: Path,
        sources: SourcePaths,
        *,
        address: str,
        devices: str,
        num_threads: int,
        say: Callable[[str], None],
    ) -> None:
        self._recipe, self._root, self._address, self._devices = recipe, root.absolute(), address, devices
        self._source_paths = [path if "://" in path else os.path.abspath(path) for path in paths_of(sources)]
        self._num_threads, self._say = num_threads, say
        self.tokens, self.power = TokenCount(), Power()
        self.tokenizer = CaptionTokenizer(recipe.text) if recipe.text.kind != "none" else None
        self._actors: list[_Actor] = []
        self._num_started = 0

    def __enter__(self) -> Cluster:
        self._ray = _connect(self._address)
        try:
            self._make, self._device, count, self._num_at_once = self._plan_actors()
            self._actors = [self._start() for _ in range(count)]
        except BaseException:
            self._ray.shutdown()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor.handle)
        self._ray.shutdown()

    def describe(self, source: Source, known: StoreSpec | None = None) -> StoreSpec:
        """As ``Engine.describe``, by the first actor."""
        for _ in range(MAX_LOSSES):
            actor = self._actors[0]
            with self._probe() as probe:
                answer = self._answer(actor.handle.describe.remote(probe, known))
            if isinstance(answer, StoreSpec):
                return answer.model_copy(update={"classes": source.classes})
            self._replace(actor, answer, [])
        raise ResourceError(f"the cluster lost {MAX_LOSSES} actors in a row before they could begin. See 'ray status'.")

    def encode(
        self, writer: StoreWriter, missing: Sequence[Task], source: Source, *, tally: Tally, clock: StageClock
    ) -> None:
        """As ``Engine.encode``: all actors work until no shard is missing."""
        request = EncodeRequest.of(writer, missing, source, self._source_paths)
        deaths: Counter[Task] = Counter()
        losses, last_message, end = 0, time.monotonic(), float("inf")
        with self._probe() as probe:
            working = [self._begin(actor, probe, request) for actor in self._actors]
            while working and time.monotonic() < end:
                ready, _ = self._ray.wait([actor.messages for actor in working], timeout=LOOK_SECONDS)
                if not ready:
                    last_message = self._say_silence(last_message)
                for actor in [actor for actor in working if actor.messages in ready]:
                    message, last_message = self._next(actor), time.monotonic()
                    match message:
                        case WorkDone():
                            clock.add(message.seconds)
                            self.tokens += message.tokens
                            working.remove(actor)
                            end = min(end, time.monotonic() + GRACE_SECONDS)  # all is committed
                        case Broken() | Failed():
                            held = tally.drop_worker(actor.name)
                            deaths.update(held)
                            losses += 1
                            _check_losses(losses, deaths, message)
                            working.remove(actor)
                            working.append(self._begin(self._replace(actor, message, held), probe, request))
                        case event:
                            losses = 0 if isinstance(event, Committed) else losses
                            tally.count(actor.name, event)
        for actor in working:  # still waiting for room in the cluster
            self._ray.kill(actor.handle)
            self._actors[self._actors.index(actor)] = self._start()

    def _begin(self, actor: _Actor, probe: str, request: EncodeRequest) -> _Actor:
        actor.messages = actor.handle.encode.options(num_returns="streaming").remote(probe, request)
        return actor

    def _next(self, actor: _Actor) -> Any:
        try:
            return self._answer(next(actor.messages))
        except StopIteration:
            return Broken("its work ended without an outcome")

    def _answer(self, reference: Any) -> Any:
        """An actor's message, or ``Broken`` if it is gone or its code failed."""
        last_message = time.monotonic()
        while True:
            try:
                return self._ray.get(reference, timeout=LOOK_SECONDS)
            except self._ray.exceptions.GetTimeoutError:
                last_message = self._say_silence(last_message)
            except self._ray.exceptions.RayError as error:
                return Broken(str(error).splitlines()[0])

    def _say_silence(self, last_message: float) -> float:
        """Report a long silence; returns the time of the last message or report."""
        if time.monotonic() - last_message < SILENCE_SECONDS:
            return last_message
        self._say(
            f"nothing was done for {SILENCE_SECONDS:.0f} s: actors load their encoders, other processes hold the "
            "shards, or the cluster has no room for actors ('ray status')"
        )
        return time.monotonic()

    def _replace(self, actor: _Actor, why: Broken | Failed, held: Sequence[Task]) -> _Actor:
        """Start another actor for a lost one; raises errors that the user can fix."""
        if isinstance(why, Failed):
            raise why.error
        shards = ", ".join(f"{shard} of '{part}'" for part, shard in held)
        said = f"{actor.name} is gone: {why.what}" + (f" It held shard {shards}." if held else "")
        self._say(f"{said} Another is started, the others go on")
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(actor.handle)  # if only its task has ended
        new = self._start()
        self._actors[self._actors.index(actor)] = new
        return new

    def _start(self) -> _Actor:
        from .cluster_actor import ActorJob

        self._num_started += 1
        job = ActorJob(self._recipe, self._root, Path.cwd(), self._device, self._num_threads, self._num_at_once)
        return _Actor(f"actor {self._num_started}", self._make(job))

    def _plan_actors(self) -> tuple[Callable[[Any], Any], str, int, int]:
        """Choose the actor's constructor and device, the number of actors, and pictures in flight for each.

        Raises: ResourceError: no GPU, or no CPU left to decode; RecipeError: unknown devices.
        """
        from .cluster_actor import PICTURES_A_TASK, EncodingActor

        resources = self._ray.cluster_resources()
        num_gpus, num_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
        kinds = set(self._devices.split(","))
        if len(kinds) > 1 or not kinds <= {"auto", "cuda", "cpu"}:
            raise RecipeError(f"--device '{self._devices}': with --engine ray, needed auto, cuda, cpu or cpu,cpu.")
        if kinds == {"cuda"} and not num_gpus:
            raise ResourceError(f"--device cuda: the cluster at '{self._address}' has no GPUs. Use --device cpu.")
        if num_gpus and kinds != {"cpu"}:
            device, count, needs = "cuda", num_gpus, {"num_gpus": 1, "num_cpus": 1}
        else:
            sizes = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
            sizes = [size for size in sizes if size] or [0]
            named = self._devices.count(",") + 1
            device, count = "cpu", named if named > 1 else len(sizes)
            on_a_machine = -(-count // len(sizes))
            needs = {"num_cpus": min(sizes) // (2 * on_a_machine)}  # the rest decode
        if num_cpus - count * needs["num_cpus"] < 1:
            raise ResourceError(
                f"the cluster at '{self._address}' has {num_cpus} CPUs, and {count} actors on {device} take "
                f"{needs['num_cpus']} each: none is left to decode pictures. Start its machines with more '--num-cpus'."
            )
        self.power = Power(device, count, max(1, num_cpus))
        share = max(1, 2 * num_cpus // count) * PICTURES_A_TASK
        actor = self._ray.remote(EncodingActor).options(max_restarts=0, scheduling_strategy="SPREAD", **needs)
        return actor.remote, device, count, min(share, MAX_IN_FLIGHT)

    @contextmanager
    def _probe(self) -> Iterator[str]:
        """A file in the store's folder, by which actors check that they see the same folder."""
        folder, name = self._root / LEASES, f"probe-{secrets.token_hex(8)}.lock"
        folder.mkdir(parents=True, exist_ok=True)
        lease = Lease(folder / name)  # swept if this process dies
        try:
            lease.take()
            yield name
        finally:
            lease.release()
            with suppress(OSError):  # others hold leases there
                folder.rmdir()


def _check_losses(losses: int, deaths: Counter[Task], why: Broken | Failed) -> None:
    """Raises if the user can fix the error, or if too many actors were lost."""
    if isinstance(why, Failed):
        raise why.error
    most = max(deaths.values(), default=0)
    if most >= MAX_DEATHS:
        suspects = " or ".join(f"shard {shard} of '{part}'" for (part, shard), count in deaths.items() if count == most)
        raise ResourceError(
            f"{suspects}: {most} actors were lost while they held it; the last: {why.what} Look at its pictures, its "
            "files and the memory of the machines. What is committed stays, the same command goes on."
        )
    if losses >= MAX_LOSSES:
        raise ResourceError(
            f"the cluster lost {losses} actors without one shard in between; the last: {why.what} What is committed "
            "stays, the same command goes on."
        )


def _connect(address: str) -> Any:
    """Connect to the cluster silently, keeping this process's signal handlers.

    Raises: ResourceError: no cluster, or Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise it warns of a future default
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        import ray

        if found := re.fullmatch(r"([^/]+):([0-9]+)", address):  # Ray itself waits for minutes
            socket.create_connection((found[1], int(found[2])), CONNECT_SECONDS).close()
        ray.init(address=address, namespace="leandit", logging_level="ERROR", log_to_driver=False)
    except ModuleNotFoundError as error:
        raise ResourceError("--engine ray: Ray is not installed. Install leandit with its extra 'ray'.") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise ResourceError(
            f"--engine ray: no cluster answers at '{address}' ({error}). Start one with 'ray start --head', or give "
            "its --address."
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ray
