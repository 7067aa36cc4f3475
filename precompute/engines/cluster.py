"""The ordinary command once a device of a running Ray cluster, in tasks that end with this process.

The processes write into the store's folder, which all machines must share; ordinary processes may work on it too.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...datasets.format.layout import LEASES
from ...errors import RecipeError, ResourceError
from ..planning.images import MAX_THREADS
from ..sharing.leases import alone
from .devices import NEVER_STARTED, Ended, LocalProcess, StartGate, child_environment, supervise

SEEN_SECONDS = 20.0  # a folder of a network may show a new file late
CONNECT_SECONDS = 20.0


def run_on_cluster(
    words_of: Callable[[str], list[str]],
    address: str,
    devices: str,
    *,
    store: Path,
    num_threads: int,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Run a command with tasks of a Ray cluster, whose machines all see the store's folder and a source that is no URL.

    Args:
      words_of: module and arguments for a device; paths are absolute.
      address: of the cluster, as ``ray.init`` takes it.
      devices: "auto" (all GPUs, or without GPUs a process on each machine), "cuda", "cpu", or "cpu,cpu" for two.
      num_threads: of torch, on every machine.
      say, check: as for ``supervise``.
    Returns: stdout of each process by its name, in the order in which they ended.
    Raises: as ``supervise``. ResourceError: no cluster, no GPU or no CPU.
    """
    ray = _connect(address)
    try:
        device, count, needs = plan_tasks(ray.nodes(), address, devices)
        num_decoders = max(1, min(MAX_THREADS, needs["num_cpus"]))
        environment = child_environment(num_threads=num_threads, num_decoders=num_decoders)
        task = ray.remote(_encode).options(max_retries=0, scheduling_strategy="SPREAD", **needs)
        with _probe(store) as probe:
            gate = StartGate()

            def run() -> Ended:
                try:
                    arguments = (words_of(device), environment, str(store), probe, os.getcwd())
                    ended = gate.start(lambda: task.remote(*arguments))  # after a shutdown, Ray would start a cluster
                    return NEVER_STARTED if ended is None else ray.get(ended)
                except ray.exceptions.RayError as error:
                    return Ended(None, "", str(error).partition("\n")[0])

            def stop() -> None:
                gate.close()
                ray.shutdown()

            runs = {f"{device} (task {number})": run for number in range(1, count + 1)}
            return supervise(runs, stop, store=store, say=say, check=check)
    finally:
        ray.shutdown()


def plan_tasks(nodes: list[dict[str, Any]], address: str, devices: str) -> tuple[str, int, dict[str, int]]:
    """Device of each task, number of tasks, and what each takes of its machine: its share of the CPUs decodes.

    Args:
      nodes: as ``ray.nodes`` lists them.
    Raises: ResourceError: no GPU, or no CPU; RecipeError: unknown devices.
    """
    kinds = set(devices.split(","))
    if devices not in ("auto", "cuda") and kinds != {"cpu"}:
        raise RecipeError(f"--device '{devices}': with --engine ray, expected auto, cuda, cpu or cpu,cpu.")
    machines = [node["Resources"] for node in nodes if node["Alive"]]
    num_gpus = [(int(machine["GPU"]), int(machine.get("CPU", 0))) for machine in machines if machine.get("GPU")]
    num_cpus = [int(machine["CPU"]) for machine in machines if machine.get("CPU")]
    if kinds == {"cuda"} and not num_gpus:
        raise ResourceError(f"--device cuda: the cluster at '{address}' has no GPUs. Use --device cpu.")
    if not num_cpus:
        raise ResourceError(f"the cluster at '{address}' has no CPUs. Start its machines with more '--num-cpus'.")
    if num_gpus and kinds != {"cpu"}:
        needs = {"num_gpus": 1, "num_cpus": min(cpus // gpus for gpus, cpus in num_gpus)}
        return "cuda", sum(gpus for gpus, _ in num_gpus), needs
    named = devices.count(",") + 1
    count = named if named > 1 else len(num_cpus)
    on_a_machine = -(-count // len(num_cpus))
    return "cpu", count, {"num_cpus": min(num_cpus) // on_a_machine}


def _encode(words: list[str], environment: dict[str, str], store: str, probe: str, folder: str) -> Ended:
    """On a machine of the cluster: run a command in a process, which ends with this one."""
    leases, end, machine = Path(store) / LEASES, time.monotonic() + SEEN_SECONDS, os.uname().nodename
    while not (leases.is_dir() and probe in os.listdir(leases)):
        if time.monotonic() > end:
            message = (
                f"store '{store}': machine '{machine}' cannot see the command's folder. Expected a "
                "--store on a file system that all machines of the cluster share."
            )
            return Ended(ResourceError.exit_code, "", message)
        time.sleep(0.1)
    if os.path.isdir(folder):
        os.chdir(folder)  # for relative paths in the recipe
    return LocalProcess(words, environment).wait(lambda line: print(line, file=sys.stderr, flush=True))


@contextmanager
def _probe(root: Path) -> Iterator[str]:
    """A file in the store's folder, by which tasks check that they see the same folder."""
    name = f"probe-{secrets.token_hex(8)}"  # swept if this process dies
    with alone(root, name, waiting=lambda: None):
        yield f"{name}.lock"


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
        ray.init(address=address, namespace="leandit", logging_level="ERROR")  # it prints the tasks' lines here
    except ModuleNotFoundError as error:
        raise ResourceError("--engine ray: Ray is not installed. Install leandit with its extra 'ray'.") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise ResourceError(
            f"--engine ray: no cluster answers at '{address}' ({error}). Start one with 'ray start --head', or pass "
            "its --address."
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ray
