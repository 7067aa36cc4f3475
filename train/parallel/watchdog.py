"""What ranks exchange besides tensors: the inputs they must agree on, heartbeats, and errors.

Messages are JSON in torch's key-value store. A launcher ends all ranks as soon as one has ended, so a failing rank
prints its error first; ranks of one machine with the same error print it once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ...datasets.disk.hashing import sha256_of
from ...datasets.errors import LeanditError, ResourceError, RunError
from .ranks import Ranks
from .stop import Terminated

LOG = logging.getLogger(__name__)
BEAT_SECONDS = 2.0
PRINT_SECONDS = 5.0  # for a rank to print a line that it has claimed
LOST = ("gloo", "nccl", "connection")  # words in torch's errors when another rank is gone
SAID = "is_said"  # attribute of an exception that was printed, as of LeanditError
EXIT_DEAD_RANK = ResourceError.exit_code


class Watchdog:
    """Messages between the ranks of a run, and a heartbeat of each of them.

    Args:
      ranks: of this process; ``connected`` has connected it.
      say: prints the line that names a dead rank.
      silent_seconds: without a heartbeat, after which a rank is dead; one that compiles or writes still sends them.
    """

    _count = itertools.count()

    def __init__(self, ranks: Ranks, say: Callable[[str], None], silent_seconds: float = 120.0) -> None:
        self.ranks, self._say, self._silent_seconds = ranks, say, silent_seconds
        self._name = f"leandit-{next(self._count)}"  # the same on every rank: all create equally many
        self._store = PrefixStore(self._name, _default_store()) if ranks.world_size > 1 else None
        self._closed = threading.Event()
        self._topics = 0

    def __enter__(self) -> Watchdog:
        """Send heartbeats from now on, and end this process when another rank is dead."""
        if self._store is not None:
            store = PrefixStore(self._name, _default_store().clone())  # a separate connection for the thread
            threading.Thread(target=self._watch, args=(store,), name="leandit-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.leave()
        elif self._store is not None and not self._closed.is_set():
            self._report(error, self._store)
        self._closed.set()

    def agree(self, inputs: Mapping[str, Any]) -> None:
        """Check that all ranks have the same inputs.

        Args:
          inputs: JSON values by name.
        Raises: RunError: on every rank, naming the rank and the first input that differs.
        """
        first, *_ = gathered = self.gather(inputs)
        for rank, other in enumerate(gathered):
            differing = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
            if differing:
                name = differing[0]
                error = RunError(
                    f"rank {rank}: {name} is {other.get(name)!r}, that of rank 0 is {first.get(name)!r}. Start all "
                    "ranks with the same command, release and store."
                )
                print_once(error, self._store, self._say)
                self.leave()  # every rank raises, so none of them is dead
                raise error

    def announce(self, value: Any) -> Any:
        """A JSON value of rank 0, on every rank."""
        self._topics += 1
        if self._store is None:
            return value
        if self.ranks.is_first:
            self._store.set(str(self._topics), json.dumps(value))
        return json.loads(self._store.get(str(self._topics)))

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, by rank."""
        self._topics += 1
        if self._store is None:
            return [json.loads(json.dumps(value))]
        keys = [f"{self._topics}/{rank}" for rank in range(self.ranks.world_size)]
        self._store.set(keys[self.ranks.rank], json.dumps(value))
        return [json.loads(value) for value in self._store.multi_get(keys)]

    def _watch(self, store: Any) -> None:
        rank, world_size = self.ranks.rank, self.ranks.world_size
        store.set(f"host/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
        watched = range(1, world_size) if rank == 0 else range(1)
        seen, silent = dict.fromkeys(watched, -1), dict.fromkeys(watched, 0.0)
        while not self._closed.wait(BEAT_SECONDS):
            try:
                store.add(f"beat/{rank}", 1)
                if first := _first_death(store):
                    self._end(store, **first)
                for other in watched:
                    beat = store.add(f"beat/{other}", 0)
                    silent[other] = 0.0 if beat != seen[other] else silent[other] + BEAT_SECONDS
                    seen[other] = beat
                    self._judge(store, other, silent[other])
            except (dist.DistError, RuntimeError):  # the store is gone, with rank 0 or its launcher
                self._end(store, "rank 0, or its launcher,", "its connection is closed")

    def _judge(self, store: Any, other: int, silent: float) -> None:
        """Log a rank that has been silent for half of the time, and end the run after all of it."""
        limit = self._silent_seconds
        if silent < limit / 2:
            return
        host = store.get(f"host/{other}").decode() if store.check([f"host/{other}"]) else "not seen yet"
        name, why = f"rank {other} ({host})", f"no heartbeat for {silent:.0f} s"
        if silent >= limit:
            LOG.error("%s: %s, so the run ends (run.silent_seconds %g)", name, why, limit)
            store.set("dead", json.dumps({"name": name, "why": why, "code": EXIT_DEAD_RANK}))
            self._end(store, name, why)
        elif silent - BEAT_SECONDS < limit / 2:  # once
            LOG.warning("%s: %s; the run ends after %g s (run.silent_seconds)", name, why, limit)

    def _report(self, error: BaseException, store: Any) -> None:
        """Print why this rank fails, then tell the others, so that they end at once.

        If it fails because another rank is gone, it waits for the watch thread to name that rank.
        """
        name = f"rank {self.ranks.rank} ({socket.gethostname()}, process {os.getpid()})"
        try:
            if isinstance(error, RuntimeError) and any(value in str(error).lower() for value in LOST):
                time.sleep(self._silent_seconds + 2 * BEAT_SECONDS)  # the watch thread ends the process during it
            if isinstance(error, Exception):
                print_once(error, store, self._say, f"{name}: ")
        except Terminated as terminated:
            error = terminated
        if isinstance(error, Terminated) and (first := _first_death(store)):
            raise SystemExit(first["code"]) from error  # the launcher ends this rank because that one failed
        code = error.exit_code if isinstance(error, LeanditError) else EXIT_DEAD_RANK
        with contextlib.suppress(dist.DistError, RuntimeError, Terminated):
            store.set("dead", json.dumps({"name": name, "why": _text(error), "code": code}))
            if self.ranks.is_first and not _is_kept_by_launcher():
                time.sleep(2 * BEAT_SECONDS)  # this process keeps the store: let the others read it

    def _end(self, store: Any, name: str, why: str, code: int = EXIT_DEAD_RANK) -> None:
        """End this process because the named rank has failed."""
        if self._closed.is_set() or name.startswith(f"rank {self.ranks.rank} "):
            return
        advice = "; start the same command again to resume" if code == EXIT_DEAD_RANK else ""
        line = f"{name} ended: {why.rstrip('.')}. All ranks end{advice}"
        print_once(why, store, lambda _: self._say(line))
        sys.stderr.flush()
        os._exit(code)

    def leave(self) -> None:
        """End the watch once all ranks have called this; the first rank, which may keep the store, leaves last."""
        if self._store is None or self._closed.is_set():
            return
        self.gather("done")
        self._closed.set()
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self.ranks.is_first:
                goodbyes = [f"bye/{rank}" for rank in range(1, self.ranks.world_size)]
                self._store.wait(goodbyes, timedelta(seconds=self._silent_seconds))
            else:
                self._store.set(f"bye/{self.ranks.rank}", "")


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def print_for_all(error: LeanditError, say: Callable[[str], None]) -> None:
    """Print an error of a rank, also before the ranks are connected.

    Without torchrun's store the ranks cannot agree on one of them, so all print it.
    """
    if not error.is_said:
        print_once(error, _launcher_store(), say)


def print_once(error: Exception | str, store: Any, say: Callable[[str], None], prefix: str = "") -> None:
    """Print an error unless another rank of this machine prints the same text; returns once it is printed.

    Args:
      error: or its text; an exception is marked, so that the command does not print it again.
      store: of the ranks; None: always print.
      say: prints a line, and flushes.
      prefix: of the line.
    """
    if isinstance(error, Exception):
        error.__dict__[SAID] = True
    text = error if isinstance(error, str) else _text(error)
    key = f"{socket.gethostname()}/{sha256_of(text)[:16]}"
    with contextlib.suppress(dist.DistError, RuntimeError):  # the store is gone: twice is better than never
        if store is not None and store.add(f"claimed/{key}", 1) > 1:
            store.wait([f"printed/{key}"], timedelta(seconds=PRINT_SECONDS))
            return
    say(prefix + text)
    with contextlib.suppress(dist.DistError, RuntimeError):
        if store is not None:
            store.set(f"printed/{key}", "")


def _text(error: BaseException) -> str:
    if isinstance(error, LeanditError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _first_death(store: Any) -> dict[str, Any] | None:
    """Name, reason and exit code of the rank that failed first."""
    return json.loads(store.get("dead")) if store.check(["dead"]) else None


def _is_kept_by_launcher() -> bool:
    """Whether torchrun or accelerate keeps the store in its own process; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _launcher_store() -> Any:
    """The launcher's store, in a namespace of this start of the ranks; None if it keeps none."""
    if not _is_kept_by_launcher():
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with contextlib.suppress(dist.DistError, RuntimeError):
        store = TCPStore(address, port, timeout=timedelta(seconds=PRINT_SECONDS), wait_for_workers=False)
        return PrefixStore(f"leandit-start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return None
