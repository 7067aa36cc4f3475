"""The processes of a run: who is which rank, what they must agree on, and who is still alive.

Whoever starts them (torchrun, accelerate, deepspeed, srun) says so in the environment, which is read here; nothing of
theirs is needed. What ranks tell each other beside tensors is JSON in torch's key-value store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from ..datasets.errors import LeanditError, RecipeError, ResourceError, RunError

BEAT_SECONDS = 2.0
SILENT_SECONDS = 40.0  # without a sign of life a rank is dead; a rank that compiles or writes still gives them
COLLECTIVE_TIMEOUT = timedelta(minutes=120)  # the heartbeat ends a run whose rank died; a slow collective is only slow
LOST = ("gloo", "nccl", "connection")  # what torch's errors speak of when another rank is gone
EXIT_DEAD_RANK = ResourceError.exit_code

# rank, rank on its machine, number of ranks, and of those on this machine
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # accelerate and deepspeed set the same
SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")


@dataclass(frozen=True)
class Ranks:
    """The place of this process among those that train together.

    Args:
      rank, world_size: among all.
      local_rank, local_world_size: among those of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Rank 0, which writes and tells."""
        return self.rank == 0

    @property
    def num_machines(self) -> int:
        """Machines of equally many ranks."""
        return max(1, self.world_size // self.local_world_size)


ALONE = Ranks()


def read_ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """The place that the launcher gave this process; alone where there is none.

    Raises: RecipeError: the launcher's variables contradict each other, or lack where the ranks meet.
    """
    names = TORCHRUN if "WORLD_SIZE" in environment else SRUN
    found = {name: environment[name] for name in names if name in environment}
    world_size = found.get(names[2], "1")
    if world_size == "1":
        return ALONE
    try:
        rank, local_rank, world = (int(found[name]) for name in names[:3])
        per_machine = int(found.get(names[3], world_size).partition("(")[0])  # srun writes "4(x2)": 4 on each of 2
    except (KeyError, ValueError) as error:
        said = ", ".join(f"{name}={environment.get(name)!r}" for name in names)
        raise RecipeError(f"{said}: needed the rank of this process, as torchrun or srun say it.") from error
    if not (0 <= rank < world and 0 <= local_rank < per_machine):
        raise RecipeError(f"{names[0]}={rank}, {names[1]}={local_rank} of {world} ranks: there is no such rank.")
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]:
        raise RecipeError(
            f"{missing[0]} is not set, so {world} ranks do not know where to meet. Start them with torchrun, or export "
            "MASTER_ADDR (name of the first machine) and MASTER_PORT before srun."
        )
    return Ranks(rank, world, local_rank, per_machine)


@contextlib.contextmanager
def connected(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Connect the ranks, where nobody has yet: NCCL on GPUs, gloo else; gloo for what lies in memory.

    Raises: ResourceError: not all of them came.
    """
    if ranks.world_size == 1 or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{where}" if "RANK" not in os.environ else None,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistError, RuntimeError) as error:
        raise ResourceError(
            f"rank {ranks.rank} of {ranks.world_size}: the ranks could not meet at {where} ({error}). Look whether all "
            "of them were started, and whether the port is free and reachable."
        ) from error
    done = False
    try:
        yield
        done = True
    finally:
        if done or device.type == "cpu":  # NCCL would wait for ranks that are about to end, or have ended
            dist.destroy_process_group()


class SharedStop:
    """Lets all ranks stop after the same step, whichever was asked to; the step does not wait for the answer.

    What is said after a step is known to all after the next one.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._group = dist.new_group(backend="gloo") if ranks.world_size > 1 else None
        self._flag, self._pending = torch.zeros((), dtype=torch.int32), None

    def asked(self, here: bool) -> bool:
        """Whether the ranks stop now; every rank asks once a step.

        Args:
          here: this rank was asked to.
        """
        if self._group is None:
            return here
        if self._pending is not None:
            self._pending.wait()
        stops = self._pending is not None and bool(self._flag)
        self._flag = torch.tensor(int(here), dtype=torch.int32)
        self._pending = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return stops


class Meeting:
    """Words that the ranks of a run exchange, and the watch over each other.

    Args:
      ranks: place of this process; ``connected`` has joined it with the others.
      say: takes the line that names a dead rank.
    """

    _meetings = itertools.count()

    def __init__(self, ranks: Ranks, say: Callable[[str], None]) -> None:
        self.ranks, self._say = ranks, say
        self._name = f"leandit-{next(self._meetings)}"  # the same on every rank: they meet equally often
        self._words = PrefixStore(self._name, _default_store()) if ranks.world_size > 1 else None
        self._closed = threading.Event()
        self._topics = 0

    def __enter__(self) -> Meeting:
        """Give signs of life from now on, and end this process when another rank is dead."""
        if self._words is not None:
            words = PrefixStore(self._name, _default_store().clone())  # a connection of the thread's own
            threading.Thread(target=self._watch, args=(words,), name="leandit-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.leave()
        else:
            self._tell_death(error)
        self._closed.set()

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuse ranks that do not say the same; every rank raises, and names who differs in what.

        Args:
          facts: JSON values by name.
        Raises: RunError.
        """
        said = self.gather(facts)
        for rank, other in enumerate(said):
            differing = sorted(name for name in said[0].keys() | other.keys() if said[0].get(name) != other.get(name))
            if differing:
                name = differing[0]
                self.leave()  # every rank says the same, and none of them is dead
                raise RunError(
                    f"rank {rank}: {name} is {other.get(name)!r}, that of rank 0 is {said[0].get(name)!r}. Start all "
                    "ranks with the same command, release and store."
                )

    def announce(self, value: Any) -> Any:
        """A JSON value of rank 0, on every rank."""
        self._topics += 1
        if self._words is None:
            return value
        if self.ranks.is_first:
            self._words.set(str(self._topics), json.dumps(value))
        return json.loads(self._words.get(str(self._topics)))

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of every rank, in their order."""
        self._topics += 1
        if self._words is None:
            return [json.loads(json.dumps(value))]
        keys = [f"{self._topics}/{rank}" for rank in range(self.ranks.world_size)]
        self._words.set(keys[self.ranks.rank], json.dumps(value))
        return [json.loads(word) for word in self._words.multi_get(keys)]

    def _watch(self, words: Any) -> None:
        rank, world_size = self.ranks.rank, self.ranks.world_size
        words.set(f"host/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
        watched = range(1, world_size) if rank == 0 else range(1)
        seen, silent = dict.fromkeys(watched, -1), dict.fromkeys(watched, 0.0)
        while not self._closed.wait(BEAT_SECONDS):
            try:
                words.add(f"beat/{rank}", 1)
                if words.check(["dead"]):
                    self._end(**json.loads(words.get("dead")))
                for other in watched:
                    beat = words.add(f"beat/{other}", 0)
                    silent[other] = 0.0 if beat != seen[other] else silent[other] + BEAT_SECONDS
                    seen[other] = beat
                    if silent[other] >= SILENT_SECONDS:
                        host = words.get(f"host/{other}").decode() if words.check([f"host/{other}"]) else "not seen yet"
                        why = f"rank {other} ({host}) gave no sign of life for {SILENT_SECONDS:.0f} s"
                        words.set("dead", json.dumps({"why": why}))
                        self._end(why)
            except (dist.DistError, RuntimeError):  # who keeps the words is gone: rank 0, or what started it
                if not self._closed.is_set():
                    self._end("rank 0, or what started it, is gone")

    def _tell_death(self, error: BaseException) -> None:
        """Say before this rank ends alone why it does, so that the others end at once and name it.

        Where it ends because another one is gone, it waits until the watch has found and named that one.
        """
        if self._words is None or self._closed.is_set():
            return
        if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in LOST):
            time.sleep(SILENT_SECONDS + 2 * BEAT_SECONDS)  # the watch ends the process meanwhile
        name = f"rank {self.ranks.rank} ({socket.gethostname()}, process {os.getpid()})"
        why = str(error) or type(error).__name__
        code = error.exit_code if isinstance(error, LeanditError) else EXIT_DEAD_RANK
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._words.set("dead", json.dumps({"why": f"{name} ended: {why}", "code": code}))
            if self.ranks.is_first:
                time.sleep(2 * BEAT_SECONDS)  # its process may keep the words: the others read them meanwhile

    def _end(self, why: str, code: int = EXIT_DEAD_RANK) -> None:
        if self._closed.is_set() or why.startswith(f"rank {self.ranks.rank} "):
            return
        again = "; start the same command again, which goes on from the newest checkpoint"
        self._say(f"{why}. All ranks end{again if code == EXIT_DEAD_RANK else ''}")
        sys.stderr.flush()
        os._exit(code)

    def leave(self) -> None:
        """End the watch, once all ranks are here; the first one, which may keep the words, goes last."""
        if self._words is None or self._closed.is_set():
            return
        self.gather("done")
        self._closed.set()
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self.ranks.is_first:
                goodbyes = [f"bye/{rank}" for rank in range(1, self.ranks.world_size)]
                self._words.wait(goodbyes, timedelta(seconds=SILENT_SECONDS))
            else:
                self._words.set(f"bye/{self.ranks.rank}", "")


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
