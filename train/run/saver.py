"""Write checkpoints and snapshots, optionally during the next steps.

All ranks gather (``resume.capture``); the first one writes a copy, so the next steps may change the state. Writes keep
their order, and an error in one is raised before the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..config import RunSection
from ..weights import checkpoint
from ..weights.checkpoint import Groups


class Folder(NamedTuple):
    """A folder to write.

    Args:
      kind: CHECKPOINT, SNAPSHOT or AVERAGE.
      step: that its content is of.
      groups: its tensors, on the CPU.
      state: everything else, as JSON values.
    """

    kind: str
    step: int
    groups: Groups
    state: Mapping[str, Any]


def write(folders: Sequence[Folder], run: Path, section: RunSection) -> None:
    """Write the folders, a checkpoint last; then remove older checkpoints, and older snapshots of interruptions.

    Raises: ResourceError: the disk is full; DamageError: it returned other bytes. Older checkpoints then stay.
    """
    for kind, step, groups, state in folders:
        path = checkpoint.save(kind, run, step, groups, dict(state))
        if kind == checkpoint.CHECKPOINT:
            checkpoint.prune(run, section.keep_checkpoints, proven=path, keep_every=section.keep_every)
        elif state.get(checkpoint.INTERRUPTED):
            checkpoint.prune_interrupted(kind, run)


class Saver:
    """Writes captured states one after the other.

    Args:
      run: folder.
      section: of the recipe; its ``async_checkpoint`` writes in a thread.
    """

    def __init__(self, run: Path, section: RunSection) -> None:
        self._run, self._section = run, section
        self._thread = ThreadPoolExecutor(1, "leandit-save") if section.async_checkpoint else None
        self._pending: Future[None] | None = None

    def begin(self, folders: Sequence[Folder]) -> None:
        """Write, or start writing; ``finish`` comes before the capture, so that two states are never in memory.

        Raises: ResourceError, DamageError: of this write.
        """
        if self._thread is None:
            write(folders, self._run, self._section)
        elif folders:
            self._pending = self._thread.submit(write, folders, self._run, self._section)

    def check(self) -> None:
        """Raise the error of a write that has failed: ResourceError, DamageError."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait until everything is written; raises ResourceError, DamageError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the thread, and ignore its errors."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
