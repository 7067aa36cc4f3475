"""A process for each device of a running Ray cluster, in an actor that ends with this process.

The processes write into the store's folder, which all machines must share; ordinary processes may work on it too.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...datasets.errors import LeanditError, RecipeError, ResourceError, SourceError
from ...datasets.format.layout import LEASES
from ..pipeline import Report
from ..planning.pictures import MAX_THREADS
from ..progress.clock import Progress
from ..sharing.leases import Lease
from ..sources.several import open_sources
from .job import Broken, Failed, Job
from .processes import LocalProcess
from .supervisor import Place, Supervisor

SEEN_SECONDS = 20.0  # a folder of a network may show a new file late
CONNECT_SECONDS = 20.0
SILENCE = (
    "nothing was done for a minute: processes load their encoders, others hold the shards, or the cluster has no room "
    "for actors ('ray status')"
)


def run_on_cluster(job: Job, address: str, *, progress: Progress, say: Callable[[str], None]) -> Report:
    """Precompute with actors of a Ray cluster.

    Args:
      job: of all of them. All machines must see the store's folder, and sources that are no URLs. Its device is
        "auto": all GPUs, or without GPUs a process on each machine; "cuda"; "cpu"; or "cpu,cpu" for two.
      address: of the cluster, as ``ray.init`` takes it.
      progress, say: as of ``Supervisor``.
    Raises: as ``Supervisor.run``. ResourceError: no cluster, no GPU or no CPU.
    """
    ray = _connect(address)
    try:
        device, count, needs = plan_actors(ray.nodes(), address, job.device)
        job = replace(job, device=device, num_decoders=max(1, min(MAX_THREADS, needs["num_cpus"])))
        job = replace(job, store_path=job.store_path.absolute(), source_path=tuple(map(_absolute, job.source_path)))
        places = [Place(f"{device} (actor {number})", job) for number in range(1, count + 1)]
        actor = ray.remote(EncodingActor).options(max_restarts=0, scheduling_strategy="SPREAD", **needs)
        with _probe(job.store_path) as probe:

            def start(job: Job) -> RemoteProcess:
                return RemoteProcess(ray, actor.remote(), job, probe)

            return Supervisor(places, start, progress=progress, say=say, silence=SILENCE).run()
    finally:
        ray.shutdown()


def plan_actors(nodes: list[dict[str, Any]], address: str, devices: str) -> tuple[str, int, dict[str, int]]:
    """Device of each actor, number of actors, and what each takes of its machine: its share of the CPUs decodes.

    Args:
      nodes: as ``ray.nodes`` lists them.
    Raises: ResourceError: no GPU, or no CPU; RecipeError: unknown devices.
    """
    kinds = set(devices.split(","))
    if devices not in ("auto", "cuda") and kinds != {"cpu"}:
        raise RecipeError(f"--device '{devices}': with --engine ray, needed auto, cuda, cpu or cpu,cpu.")
    machines = [node["Resources"] for node in nodes if node["Alive"]]
    num_gpus = [(int(machine["GPU"]), int(machine.get("CPU", 0))) for machine in machines if machine.get("GPU")]
    num_cpus = [int(machine["CPU"]) for machine in machines if machine.get("CPU")]
    if kinds == {"cuda"} and not num_gpus:
        raise ResourceError(f"--device cuda: the cluster at '{address}' has no GPUs. Use --device cpu.")
    if not num_cpus:
        raise ResourceError(f"the cluster at '{address}' has no CPUs. Start its machines with more '--num-cpus'.")
    if num_gpus and kinds != {"cpu"}:
        return (
            "cuda",
            sum(gpus for gpus, _ in num_gpus),
            {
                "num_gpus": 1,
                "num_cpus": min(cpus // gpus for gpus, cpus in num_gpus),
            },
        )
    named = devices.count(",") + 1
    count = named if named > 1 else len(num_cpus)
    on_a_machine = -(-count // len(num_cpus))
    return "cpu", count, {"num_cpus": min(num_cpus) // on_a_machine}


class EncodingActor:
    """On a machine of the cluster: the process of one device, which ends with this one."""

    def encode(self, job: Job, probe: str) -> Iterator[Any]:
        """Do a job in a child process, as ``LocalProcess.messages``."""
        try:
            _check_machine(job, probe)
        except LeanditError as error:
            yield Failed(error)
            return
        for message in LocalProcess(job).messages():
            if isinstance(message, Failed) and isinstance(message.error, OSError):  # of this machine alone
                message = Broken(f"{type(message.error).__name__}: {message.error}")
            yield message


class RemoteProcess:
    """As ``Process``, in an actor."""

    def __init__(self, ray: Any, actor: Any, job: Job, probe: str) -> None:
        self._ray, self._actor = ray, actor
        self._stream = actor.encode.options(num_returns="streaming").remote(job, probe)

    def messages(self) -> Iterator[Any]:
        """As ``Process.messages``."""
        try:
            for reference in self._stream:
                yield self._ray.get(reference)
            yield Broken("its work ended without an outcome")
        except self._ray.exceptions.RayError as error:
            yield Broken(str(error).partition("\n")[0])

    def ask_to_end(self) -> None:
        """As ``Process.ask_to_end``."""
        self._ray.kill(self._actor)

    def end(self) -> None:
        """As ``Process.end``; the cluster waits for it."""


def _check_machine(job: Job, probe: str) -> None:
    """Check that this machine sees the store's folder and the source.

    Raises: ResourceError: another folder; LeanditError: as ``open_sources``, with the name of the machine.
    """
    folder, end, machine = job.store_path / LEASES, time.monotonic() + SEEN_SECONDS, os.uname().nodename
    while not (folder.is_dir() and probe in os.listdir(folder)):
        if time.monotonic() > end:
            raise ResourceError(
                f"store '{job.store_path}': machine '{machine}' does not see the folder that the command sees. Needed "
                "a --store on a file system that all machines of the cluster share."
            )
        time.sleep(0.1)
    try:
        open_sources(job.source_path, job.recipe.source, job.recipe.picture_columns)
    except (LeanditError, OSError) as error:
        kind = type(error) if isinstance(error, LeanditError) else SourceError
        raise kind(f"{error} (on machine '{machine}', which must see the source as all of the cluster)") from error


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


@contextmanager
def _probe(root: Path) -> Iterator[str]:
    """A file in the store's folder, by which actors check that they see the same folder."""
    folder, name = root / LEASES, f"probe-{secrets.token_hex(8)}.lock"
    folder.mkdir(parents=True, exist_ok=True)
    lease = Lease(folder / name)  # swept if this process dies
    try:
        lease.take()
        yield name
    finally:
        lease.release()
        with suppress(OSError):  # others hold leases there
            folder.rmdir()
            root.rmdir()


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
