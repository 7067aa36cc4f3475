"""What the ranks of a run tell each other beside tensors: what they must agree on, who is alive, and why one failed.

It is JSON in torch's key-value store. A launcher ends all ranks as soon as one has ended, so a rank that fails prints
its error before it does anything else; ranks of one machine that fail alike print it once.
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

BEAT_SECONDS = 2.0
SILENT_SECONDS = 40.0  # without a sign of life a rank is dead; a rank that compiles or writes still gives them
PRINT_SECONDS = 5.0  # that a rank may take from claiming a line to having printed it
LOST = ("gloo", "nccl", "connection")  # what torch's errors speak of when another rank is gone
EXIT_DEAD_RANK = ResourceError.exit_code


class Watchdog:
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

    def __enter__(self) -> Watchdog:
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
        elif self._words is not None and not self._closed.is_set():
            self._report(error, self._words)
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
                error = RunError(
                    f"rank {rank}: {name} is {other.get(name)!r}, that of rank 0 is {said[0].get(name)!r}. Start all "
                    "ranks with the same command, release and store."
                )
                print_once(error, self._words, self._say)
                self.leave()  # every rank raises the same, and none of them is dead
                raise error

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
                if first := _first_death(words):
                    self._end(words, **first)
                for other in watched:
                    beat = words.add(f"beat/{other}", 0)
                    silent[other] = 0.0 if beat != seen[other] else silent[other] + BEAT_SECONDS
                    seen[other] = beat
                    if silent[other] >= SILENT_SECONDS:
                        host = words.get(f"host/{other}").decode() if words.check([f"host/{other}"]) else "not seen yet"
                        name, why = f"rank {other} ({host})", f"no sign of life for {SILENT_SECONDS:.0f} s"
                        words.set("dead", json.dumps({"name": name, "why": why, "code": EXIT_DEAD_RANK}))
                        self._end(words, name, why)
            except (dist.DistError, RuntimeError):  # the words are gone, with rank 0 or with what started it
                self._end(words, "rank 0, or what started it,", "its connection is closed")

    def _report(self, error: BaseException, words: Any) -> None:
        """Print why this rank ends alone, then tell the others, so that they end at once.

        Where it ends because another one is gone, it waits until the watch has found and named that one.
        """
        name = f"rank {self.ranks.rank} ({socket.gethostname()}, process {os.getpid()})"
        try:
            if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in LOST):
                time.sleep(SILENT_SECONDS + 2 * BEAT_SECONDS)  # the watch ends the process meanwhile
            if isinstance(error, Exception):
                print_once(error, words, self._say, f"{name}: ")
        except Terminated as terminated:
            error = terminated
        if isinstance(error, Terminated) and (first := _first_death(words)):
            raise SystemExit(first["code"]) from error  # the launcher ends this rank since that one has failed
        code = error.exit_code if isinstance(error, LeanditError) else EXIT_DEAD_RANK
        with contextlib.suppress(dist.DistError, RuntimeError, Terminated):
            words.set("dead", json.dumps({"name": name, "why": _text(error), "code": code}))
            if self.ranks.is_first and not _is_kept_by_launcher():
                time.sleep(2 * BEAT_SECONDS)  # this process keeps the words: the others read them meanwhile

    def _end(self, words: Any, name: str, why: str, code: int = EXIT_DEAD_RANK) -> None:
        """End this process because the rank of that name has failed."""
        if self._closed.is_set() or name.startswith(f"rank {self.ranks.rank} "):
            return
        again = "; start the same command again, which goes on from the newest checkpoint"
        line = f"{name} ended: {why.rstrip('.')}. All ranks end{again if code == EXIT_DEAD_RANK else ''}"
        print_once(why, words, lambda _: self._say(line))
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


def print_for_all(error: LeanditError, say: Callable[[str], None]) -> None:
    """Print an error of a rank, also where the ranks are not connected, as a recipe that is wrong for all of them.

    Without torchrun's store there is then nothing through which ranks could agree who prints it: all of them do.
    """
    if not error.is_said:
        print_once(error, _launcher_store(), say)


def print_once(error: Exception | str, words: Any, say: Callable[[str], None], prefix: str = "") -> None:
    """Print an error, unless another rank of this machine has printed the same text; returns when it is printed.

    Args:
      error: or its text; of a ``LeanditError``, ``is_said`` is set.
      words: store of the ranks; None: print it.
      say: prints a line, and flushes.
      prefix: of the line.
    """
    if isinstance(error, LeanditError):
        error.is_said = True
    text = error if isinstance(error, str) else _text(error)
    key = f"{socket.gethostname()}/{sha256_of(text)[:16]}"
    with contextlib.suppress(dist.DistError, RuntimeError):  # the store is gone: better twice than not at all
        if words is not None and words.add(f"claimed/{key}", 1) > 1:
            words.wait([f"printed/{key}"], timedelta(seconds=PRINT_SECONDS))
            return
    say(prefix + text)
    with contextlib.suppress(dist.DistError, RuntimeError):
        if words is not None:
            words.set(f"printed/{key}", "")


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _first_death(words: Any) -> dict[str, Any] | None:
    """Name, reason and exit code of the rank that failed first."""
    return json.loads(words.get("dead")) if words.check(["dead"]) else None


def _is_kept_by_launcher() -> bool:
    """torchrun and accelerate keep the store of the ranks in their own process; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _launcher_store() -> Any:
    """The launcher's store, in a namespace of this start of the ranks; None where it keeps none."""
    if not _is_kept_by_launcher():
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with contextlib.suppress(dist.DistError, RuntimeError):
        store = TCPStore(address, port, timeout=timedelta(seconds=PRINT_SECONDS), wait_for_workers=False)
        return PrefixStore(f"leandit-start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return None
