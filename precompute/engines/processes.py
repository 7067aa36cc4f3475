"""The engine of several devices of one machine: a process for each, started, watched and ended by this one.

They share the shards by leases, so nothing is handed out, and nothing is lost with a process that dies: the others go
on with its shards. What such a process does stands in ``process_serve.py``. None of them outlives this one: they end
when the socket to it does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ...datasets.errors import RecipeError, ResourceError
from ...datasets.format.schema import StoreSpec
from ...datasets.revisions.commits import Task
from ...datasets.revisions.writer import StoreWriter
from ..config import PrecomputeRecipe
from ..encoders.text import CaptionTokenizer, TokenCount
from ..planning.pictures import MAX_THREADS, num_cores
from ..progress.clock import StageClock
from ..progress.tally import Tally
from ..progress.verdict import Power
from ..sources.several import SourcePaths, paths_of
from ..sources.source import Source
from .process_child import END_SECONDS
from .process_serve import Describe, Job
from .worker import Broken, EncodeRequest, Failed, WorkDone

CHILD_MODULE = f"{__package__}.process_child"


class Processes:
    """One process for each device; a context manager that starts and ends them.

    Args:
      root: the store.
      sources: as the user gave them.
      devices: as torch names them, one for each process.
      num_threads: of torch in each process.
      say: called with a message when a process dies.
    Raises: RecipeError: devices of two kinds, whose bits differ.
    """

    def __init__(
        self,
        recipe: PrecomputeRecipe,
        root: Path,
        sources: SourcePaths,
        devices: Sequence[str],
        *,
        num_threads: int,
        say: Callable[[str], None],
    ) -> None:
        kinds = sorted({device.partition(":")[0] for device in devices})
        if len(kinds) > 1:
            raise RecipeError(
                f"--device '{','.join(devices)}': {' and '.join(kinds)} make different bits of one picture. Needed "
                "devices of one kind."
            )
        share = max(1, min(MAX_THREADS, num_cores() // len(devices)))
        self.power = Power(kinds[0], len(devices), share * len(devices))
        self._jobs = [Job(recipe, root, device, share, num_threads) for device in devices]
        self._source_paths, self._say, self.tokens = paths_of(sources), say, TokenCount()
        self.tokenizer = CaptionTokenizer(recipe.text) if recipe.text.kind != "none" else None
        self._children: list[_Child] = []

    def __enter__(self) -> Processes:
        try:
            for number, job in enumerate(self._jobs):
                self._children.append(_Child(number, job))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        children, self._children = self._children, []
        for child in children:
            child.ask_to_end()
        for child in children:
            child.end()

    def describe(self, source: Source, known: StoreSpec | None = None) -> StoreSpec:
        """As ``Engine.describe``, by the first living process."""
        while True:
            child = self._children[0]
            answer = child.ask(Describe(known)) or child.receive()
            if isinstance(answer, StoreSpec):
                return answer.model_copy(update={"classes": source.classes})
            self._remove(child, answer, [])

    def encode(
        self, writer: StoreWriter, missing: Sequence[Task], source: Source, *, tally: Tally, clock: StageClock
    ) -> None:
        """As ``Engine.encode``: all processes work until no shard is missing."""
        request = EncodeRequest.of(writer, missing, source, self._source_paths)
        working = [child for child in list(self._children) if not self._is_lost(child, request)]
        while working:
            ready = {id(connection) for connection in wait([child.connection for child in working])}
            for child in [child for child in working if id(child.connection) in ready]:
                message = child.receive()
                match message:
                    case WorkDone():
                        clock.add(message.seconds)
                        self.tokens += message.tokens
                        working.remove(child)
                    case Broken() | Failed() | None:
                        working.remove(child)
                        self._remove(child, message, tally.drop_worker(child.name))
                    case event:
                        tally.count(child.name, event)

    def _is_lost(self, child: _Child, request: EncodeRequest) -> bool:
        if broken := child.ask(request):
            self._remove(child, broken, [])
        return bool(broken)

    def _remove(self, child: _Child, cause: Broken | Failed | None, held: Sequence[Task]) -> None:
        """Remove a dead process; raises errors that the others would meet too, or if it was the last."""
        if cause and cause.error:
            raise cause.error
        what = cause.what if isinstance(cause, Broken) else child.how_it_ended()
        self._children.remove(child)
        child.end()
        shards = ", ".join(f"{shard} of '{part}'" for part, shard in held)
        said = f"the process on {child.name} is gone: {what}" + (f"; it held shard {shards}" if held else "")
        if not self._children:
            raise ResourceError(f"{said}. No other is left. What is committed stays, the same command goes on.")
        self._say(f"{said}. The other {len(self._children)} go on with its shards")


class _Child:
    """A process and its socket."""

    def __init__(self, number: int, job: Job) -> None:
        self.name = f"{job.device} (process {number + 1})"
        ours, theirs = socket.socketpair()
        with theirs:
            self.connection = Connection(ours.detach())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", CHILD_MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],  # only this one: an inherited copy would keep a sibling's socket open
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is the parent's
            )
        self.ask(job)

    def ask(self, request: Any) -> Broken | None:
        """Send a request; returns ``Broken`` if the process has ended."""
        try:
            self.connection.send(request)
        except OSError:
            return Broken(self.how_it_ended())
        return None

    def receive(self) -> Any:
        """The next message; None if it ended without one."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def how_it_ended(self) -> str:
        """Its exit status in words."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it does not answer any more"
        if code >= 0:
            return f"it ended with status {code}"
        return f"it was ended by signal {-code} ({signal.strsignal(-code)})"

    def ask_to_end(self) -> None:
        """Let it release its leases and end."""
        self._process.terminate()

    def end(self) -> None:
        """Wait for its end; kill it after END_SECONDS."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.connection.close()
