"""The processes of a run: the rank of each one, their strategy, how they connect, agree and stop together.

The launcher (torchrun, accelerate, deepspeed, srun) sets rank and rendezvous in the environment. It also ends the other
ranks when one has ended; without it their next collective call fails, or times out.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...datasets.disk.hashing import sha256_of
from ...errors import LeanditError, RecipeError, ResourceError, RunError
from ..config import ParallelSection

Value = TypeVar("Value")
TIMEOUT = timedelta(minutes=30)  # of a collective call; a rank may compile several shapes, or read a checkpoint
# Words in the errors of gloo and NCCL when another rank is gone.
LOST = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "refused",
    "timed out",
    "timeout",
    "remote process",
    "remote error",
)

# rank, rank on its machine, number of ranks, and of those on this machine
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # accelerate and deepspeed set the same
SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process.

    Args:
      rank, world_size: among all processes.
      local_rank, local_world_size: among those of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Rank 0, which writes and reports."""
        return self.rank == 0

    @property
    def num_machines(self) -> int:
        """Machines, each with the same number of ranks."""
        return max(1, self.world_size // self.local_world_size)


ALONE = Ranks()


def read_ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """The rank that the launcher set; ``ALONE`` without a launcher.

    Raises: RecipeError: the launcher's variables contradict each other, or lack the master address.
    """
    names = TORCHRUN if "WORLD_SIZE" in environment else SRUN
    values = {name: environment[name] for name in names if name in environment}
    world_size = values.get(names[2], "1")
    if world_size == "1":
        return ALONE
    try:
        rank, local_rank, world = (int(values[name]) for name in names[:3])
        per_machine = int(values.get(names[3], world_size).partition("(")[0])  # srun writes "4(x2)": 4 on each of 2
    except (KeyError, ValueError) as error:
        said = ", ".join(f"{name}={environment.get(name)!r}" for name in names)
        raise RecipeError(f"{said}: expected the rank of this process, as set by torchrun or srun.") from error
    if not (0 <= rank < world and 0 <= local_rank < per_machine):
        raise RecipeError(f"{names[0]}={rank}, {names[1]}={local_rank} of {world} ranks: there is no such rank.")
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]:
        raise RecipeError(
            f"{missing[0]} is not set, so {world} ranks do not know where to meet. Start them with torchrun, or export "
            "MASTER_ADDR (name of the first machine) and MASTER_PORT before srun."
        )
    return Ranks(rank, world, local_rank, per_machine)


def choose_strategy(section: ParallelSection, ranks: Ranks) -> str:
    """The strategy of a run; "auto": "single" for one rank, "ddp" for several, "deepspeed" if its config is given.

    Raises: RecipeError: the strategy does not fit the number of ranks.
    """
    asked, world_size = section.strategy, ranks.world_size
    if asked == "auto":
        asked = "deepspeed" if section.deepspeed_config else "single" if world_size == 1 else "ddp"
    if asked == "single" and world_size > 1:
        raise RecipeError(f"parallel.strategy 'single': {world_size} ranks were started. Use 'ddp', 'fsdp' or 'hsdp'.")
    if asked in ("ddp", "fsdp", "hsdp") and world_size == 1:
        raise RecipeError(
            f"parallel.strategy '{asked}': there is only one rank. Start more, for example '"
            "torchrun --nproc-per-node 8 --no-python -- leandit train ...', or use 'auto'."
        )
    if (asked == "deepspeed") != bool(section.deepspeed_config):
        raise RecipeError(
            f"parallel.strategy '{asked}' with parallel.deepspeed_config '{section.deepspeed_config}': expected both, "
            "'deepspeed' and the path of a ds_config.json, or neither."
        )
    if section.cpu_offload and asked not in ("fsdp", "hsdp"):
        raise RecipeError(
            f"parallel.cpu_offload: strategy '{asked}' keeps everything on the GPU. Use 'fsdp' or 'hsdp', or a "
            "ds_config.json that offloads."
        )
    if asked == "hsdp":
        num_replicas(section, ranks)
    return asked


def num_replicas(section: ParallelSection, ranks: Ranks) -> int:
    """Groups of ranks that each hold the whole model.

    Raises: RecipeError: the ranks cannot be split into that many groups.
    """
    replicas = section.replicas or ranks.num_machines
    if ranks.world_size % replicas or not 1 < replicas < ranks.world_size:
        raise RecipeError(
            f"parallel.replicas {section.replicas}: {ranks.world_size} ranks on {ranks.num_machines} machines cannot "
            f"form {replicas} equal groups of two or more ranks. Set parallel.replicas, or use 'fsdp'."
        )
    return replicas


@contextlib.contextmanager
def connected(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Connect the ranks unless they are connected: NCCL for GPUs, gloo for CPUs.

    The block must leave no model behind that DDP has wrapped.

    Raises: ResourceError: not all of them connected, or one has ended within the block.
    """
    if ranks.world_size == 1:
        yield
        return
    is_ours = not dist.is_initialized()
    if is_ours:
        _connect(ranks, device)
    done = False
    try:
        yield
        done = True
    except RuntimeError as error:  # torch's DistError is one
        if not any(word in str(error).lower() for word in LOST):
            raise
        raise ResourceError(
            f"lost the connection to another rank ({error}). Check that rank's output and its machine, then run "
            "the same command again to resume."
        ) from error
    finally:
        if is_ours and (done or device.type == "cpu"):  # NCCL would wait for ranks that have ended
            gc.collect()  # DDP keeps a group until the interpreter ends, which then aborts the process (torch 2.13)
            dist.destroy_process_group()


def _connect(ranks: Ranks, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{where}" if "RANK" not in os.environ else None,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        raise ResourceError(
            f"rank {ranks.rank} of {ranks.world_size}: the ranks could not connect at {where} ({error}). Check that "
            "all of them were started, and that the port is free and reachable."
        ) from error


def all_gather(ranks: Ranks, value: Any) -> list[Any]:
    """The values of all ranks, by rank; a collective call."""
    values = [value] * ranks.world_size
    if ranks.world_size > 1:
        dist.all_gather_object(values, value)
    return values


def from_first(ranks: Ranks, function: Callable[[], Value]) -> Value:
    """The result of a function that only the first rank calls, on every rank; a collective call.

    Raises: LeanditError: of the function, on every rank.
    """
    result: list[Any] = [None, None, ""]  # value, class and message of an error; not all errors can be pickled
    if ranks.is_first:
        try:
            result[0] = function()
        except LeanditError as error:
            result[1:] = (
                next(kind for kind in type(error).__mro__ if kind.__module__ == LeanditError.__module__),
                str(error),
            )
            if ranks.world_size == 1:
                raise
    if ranks.world_size > 1:
        dist.broadcast_object_list(result, 0)
    value, kind, message = result
    if kind is not None:
        raise kind(message)
    return value


def agree(ranks: Ranks, inputs: Mapping[str, Any]) -> None:
    """Check that all ranks have the same inputs, JSON values by name.

    Raises: RunError: on every rank, with a rank and all inputs that differ.
    """
    if len(set(all_gather(ranks, sha256_of(inputs)))) == 1:
        return
    first, *others = all_gather(ranks, dict(inputs))
    for rank, other in enumerate(others, 1):
        names = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        if names:
            differences = "; ".join(f"{n} is {other.get(n)!r}, that of rank 0 is {first.get(n)!r}" for n in names)
            raise RunError(f"rank {rank}: {differences}. Start all ranks with the same command, release and store.")


class SharedStop:
    """Stops all ranks after the same step, once one of them has a stop request.

    The exchange is one number on the CPU and runs during the next step: ranks stop one step after the request.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._is_alone, self._pending = ranks.world_size == 1, None
        self._flag = torch.zeros((), dtype=torch.int32)

    def is_due(self, requested: bool) -> bool:
        """Whether the ranks stop now; a collective call, once a step.

        Args:
          requested: this rank has a stop request.
        """
        if self._is_alone:
            return requested
        if self._pending is not None:
            self._pending.wait()
        stops = bool(self._flag)
        self._flag = torch.tensor(int(requested), dtype=torch.int32)
        self._pending = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return stops

    def finish(self) -> None:
        """Wait for the last exchange: ranks must not part while one runs."""
        if self._pending is not None:
            self._pending.wait()
