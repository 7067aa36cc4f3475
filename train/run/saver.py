"""Writing checkpoints and snapshots, beside the steps that follow if the recipe says so.

All ranks gather; the first one writes. What is gathered is a copy of its own, so the next steps may change everything
while it is written. Writes follow each other in their order, and what went wrong in one is raised before the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..config import RunSection
from ..parallel.engine import Engine
from ..weights import checkpoint
from ..weights.checkpoint import Groups

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Folder:
    """A folder to be.

    Args:
      kind: CHECKPOINT, SNAPSHOT or AVERAGE.
      groups: its tensors, on the CPU.
      state: what is no tensor.
    """

    kind: str
    groups: Groups
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Captured:
    """State of a step, in memory: the folders that shall hold it, none of them on other ranks than the first."""

    step: int
    folders: list[Folder]


def gather(engine: Engine, groups: Sequence[str], *, keep: bool) -> dict[str, Tensors]:
    """Whole tensors on the CPU, by group and name; every rank must ask, and those that do not keep get none."""
    found: dict[str, Tensors] = {}
    for group in groups:
        found[group] = {}
        for name, tensor in engine.tensors(group):  # one at a time: of a sharded model, only one is whole on the device
            if keep:
                copy = tensor.detach().cpu()
                found[group][name] = copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy
    return found if keep else {}


def buffers_of(model: nn.Module) -> Tensors:
    """What a model's state has beside its parameters, on the CPU."""
    state = model.state_dict()
    return {name: state[name].cpu().clone() for name, _ in model.named_buffers() if name in state}


def write(captured: Captured, run: Path, section: RunSection) -> None:
    """Write the folders, a checkpoint last; older checkpoints go once it has proven whole.

    Raises: ResourceError: the disk is full; DamageError: it gives back other bytes. The older ones then stay.
    """
    for folder in captured.folders:
        path = checkpoint.save(folder.kind, run, captured.step, folder.groups, dict(folder.state))
        if folder.kind == checkpoint.CHECKPOINT:
            checkpoint.prune(run, section.keep_checkpoints, proven=path, keep_every=section.keep_every)


class Saver:
    """Writes what was captured, one after the other.

    Args:
      run: folder.
      section: of the recipe; its ``async_checkpoint`` writes in a thread.
    """

    def __init__(self, run: Path, section: RunSection) -> None:
        self._run, self._section = run, section
        self._thread = ThreadPoolExecutor(1, "leandit-save") if section.async_checkpoint else None
        self._pending: Future[None] | None = None

    def begin(self, captured: Captured) -> None:
        """Write, or begin to; waits for the one before.

        Raises: ResourceError, DamageError: of this one or of the one before.
        """
        self.finish()
        if not captured.folders:
            return
        if self._thread is None:
            write(captured, self._run, self._section)
        else:
            self._pending = self._thread.submit(write, captured, self._run, self._section)

    def check(self) -> None:
        """Raise what went wrong meanwhile.

        Raises: ResourceError, DamageError.
        """
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait until all is written.

        Raises: ResourceError, DamageError.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the thread, whatever became of its last write."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
